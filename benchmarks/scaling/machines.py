"""Machines of the model of step time: published rates, each with its source beside it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


def _of(what: str, source: str) -> Any:
    return field(metadata={"what": what, "source": source})


_NCCL = "`baseLat` and `hwLat` of a ring, protocol Simple, in NCCL's src/graph/tuning.cc (2.18 to 2.20)"


@dataclass(frozen=True)
class Machine:
    """Nodes of ``node_size`` accelerators; rates in units of 1 per second, one direction."""

    name: str = _of("", "")
    node_size: int = _of("accelerators of a node", "DGX A100 and DGX H100 data sheets")
    flops: float = _of(
        "peak of dense bf16 products, FLOP/s",
        "NVIDIA A100 and H100 (SXM) data sheets: 312 and 989 TFLOPS, without sparsity",
    )
    product_share: float = _of(
        "share of the peak that large products reach",
        "assumed; cuBLAS is commonly measured at 240 to 270 TFLOPS on an A100, 600 to 700 on an H100",
    )
    attention_share: float = _of(
        "share of the peak that fused attention reaches",
        "Dao, FlashAttention-2 (2023): up to 230 TFLOPS on an A100, 335 on an H100 forward; less backward",
    )
    memory: float = _of("memory bandwidth, B/s", "data sheets: A100 80GB 2.04 TB/s (40GB: 1.56), H100 3.35 TB/s")
    memory_share: float = _of("share of it that kernels reach", "assumed")
    memory_nbytes: float = _of("memory, bytes", "data sheets")
    link: float = _of(
        "NVLink of one accelerator, one direction, B/s",
        "data sheets: 600 GB/s (A100) and 900 GB/s (H100) for both directions together",
    )
    network: float = _of(
        "network of a node, one direction, B/s",
        "2 Tb/s RoCE, taken as that of one node (Zhao et al., 2023); AWS p4d.24xlarge: 400 Gb/s EFA; DGX H100 data "
        "sheet: 8 x 400 Gb/s NDR InfiniBand",
    )
    link_share: float = _of(
        "share of link and network that NCCL reaches with large messages",
        "assumed; nccl-tests commonly show 230 to 240 GB/s on one DGX A100, which is 0.78",
    )
    base_latency: float = _of("fixed time of a collective, s", _NCCL)
    link_hop: float = _of("time of a ring's hop over NVLink, s", _NCCL)
    network_hop: float = _of("time of a ring's hop over the network, s", _NCCL)
    launch: float = _of("host time of one kernel, s", "assumed: 5 us, as in tests/sim/costs.py")
    host_hop: float = _of("hop of a gloo ring between hosts, TCP, s", "assumed: 30 us")
    host_network: float = _of("bandwidth of that ring, B/s", "assumed: 1 GB/s, one TCP stream, 8 ranks of a node")


def _machine(name: str, **given: Any) -> Machine:
    common = {
        "node_size": 8,
        "product_share": 0.80,
        "attention_share": 0.55,
        "memory_share": 0.85,
        "link_share": 0.78,
        "base_latency": 8.4e-6,
        "link_hop": 3.4e-6,
        "network_hop": 14e-6,
        "launch": 5e-6,
        "host_hop": 30e-6,
        "host_network": 1e9,
    }
    return Machine(name=name, **{**common, **given})


_A100 = {"flops": 312e12, "memory": 2.04e12, "memory_nbytes": 80e9, "link": 300e9}

MACHINES = {
    "A100, 2 Tb/s": _machine("A100, 2 Tb/s", **_A100, network=250e9),
    "A100, 400 Gb/s": _machine("A100, 400 Gb/s", **{**_A100, "memory": 1.56e12, "memory_nbytes": 40e9}, network=50e9),
    "H100": _machine(
        "H100",
        flops=989e12,
        product_share=0.66,
        attention_share=0.33,
        memory=3.35e12,
        memory_nbytes=80e9,
        link=450e9,
        network=400e9,
    ),
}
"""By name."""


@dataclass(frozen=True)
class Published:
    """A measured throughput that the model is compared with; ``tflops`` are those of one accelerator."""

    source: str
    machine: str
    num_ranks: int
    batch: int
    context: int
    tflops: float


PUBLISHED = (
    Published("Zhao et al., VLDB 2023, section 5.4", "A100, 2 Tb/s", 512, 1, 2048, 173),
    Published("Zhao et al., VLDB 2023, section 5.4", "A100, 2 Tb/s", 512, 2, 2048, 186),
    Published("PyTorch blog, March 2022", "A100, 400 Gb/s", 128, 20, 512, 159),
)
"""GPT-175B with FSDP, bf16, every block checkpointed."""


def assumptions() -> list[tuple[str, list[str], str]]:
    """Rows of the table of assumptions: what, the value of each machine, the source."""
    return [
        (each.metadata["what"], [f"{getattr(m, each.name):g}" for m in MACHINES.values()], each.metadata["source"])
        for each in fields(Machine)
        if each.metadata["what"]
    ]
