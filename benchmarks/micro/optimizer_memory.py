"""Print the optimizer state of a rank, for torch's AdamW and torchao's quantised ones, by layout.

    python benchmarks/micro/optimizer_memory.py                              # gpt-5m on 2 and 8 ranks, 1 minute
    python benchmarks/micro/optimizer_memory.py --model gpt-29m --worlds 4

Ranks are made one after the other, in a group that transfers nothing; the figure is that of the rank with most, times
the ranks, divided by the parameters. Steps are not compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchao.optim
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

sys.path.insert(0, str(Path(__file__).parents[1]))
from models import MODELS, build_gpt

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import RowBlocks, fully_shard

OPTIMIZERS: dict[str, Any] = {
    "torch AdamW": torch.optim.AdamW,
    **{f"torchao {name}": getattr(torchao.optim, name) for name in ("AdamW8bit", "AdamWFp8", "AdamW4bit")},
}


def _blocks(param: nn.Parameter) -> RowBlocks:
    """The fewest rows with whole blocks of 256 elements, and 4,096 elements at least: fewer are not quantised."""
    row_numel = param.numel() // param.size(0)
    step = 256 // math.gcd(256, row_numel)
    return RowBlocks(min(param.size(0), -(-4096 // (step * row_numel)) * step))


def _in_place(model: Any, **settings: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, **settings)
    return fully_shard(model, **settings)


@contextlib.contextmanager
def _group(world_size: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


LAYOUTS: dict[str, Callable[[Any], nn.Module]] = {
    "fully_shard, default rows": _in_place,
    "fully_shard, RowBlocks": lambda model: _in_place(model, shard_placement_fn=_blocks),
    "wrapper, flat": lambda model: FSDP(model, auto_wrap_policy=_is_block),
    "wrapper, RowBlocks": lambda model: FSDP(
        model, auto_wrap_policy=_is_block, use_orig_params=True, placement_fn=_blocks
    ),
}


def _is_block(module: nn.Module, recurse: bool, **_: Any) -> bool:
    return recurse or type(module).__name__ == "Block"


def nbytes_of(value: Any) -> int:
    """Bytes that ``value`` has on this rank, with those of the tensors that it wraps."""
    if isinstance(value, DTensor):
        value = value.to_local()
    if not isinstance(value, Tensor):
        return 0
    if not is_traceable_wrapper_subclass(value):
        return value.nbytes
    names, _ = value.__tensor_flatten__()
    return sum(nbytes_of(getattr(value, name)) for name in names)


def state_nbytes(plain: nn.Module, layout: str, optimizer: str, world_size: int) -> int:
    """Bytes of the optimizer state of the rank that has most."""
    most = 0
    for rank in range(world_size):
        with _group(world_size, rank):
            model = LAYOUTS[layout](copy.deepcopy(plain))
            stepper = OPTIMIZERS[optimizer](model.parameters(), lr=0.0)
            for param in model.parameters():
                param.grad = torch.zeros_like(param)
            stepper.step()
            most = max(most, sum(nbytes_of(value) for state in stepper.state.values() for value in state.values()))
    return most


def main() -> None:
    """Print one line for each number of ranks, layout and optimizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt-5m")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 8])
    options = parser.parse_args()
    torch.compiler.set_stance("force_eager")
    warnings.filterwarnings("ignore", ".*quantises its state in blocks")
    plain = build_gpt(MODELS[options.model])
    numel = sum(param.numel() for param in plain.parameters())
    for world_size in options.worlds:
        for layout in LAYOUTS:
            for optimizer in OPTIMIZERS:
                most = state_nbytes(plain, layout, optimizer, world_size)
                figure = f"{most * world_size / numel:6.3f} bytes a parameter, {most / 2**20:8.2f} MiB a rank"
                print(f"{options.model}, {world_size} ranks  {layout:26} {optimizer:18} {figure}", flush=True)


if __name__ == "__main__":
    main()
