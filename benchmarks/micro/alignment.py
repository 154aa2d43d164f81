"""What it costs a GPU to compute with a weight that does not begin at a multiple of 16 bytes.

    python benchmarks/micro/alignment.py                        # needs one GPU of about 10 GiB

The first table times products with a weight ``[4096, 4096]`` whose storage begins some elements earlier. The second one
times a step of four blocks, each a scalar and two Linears of 4096 and 8192, with what the engine does about it and
without, beside FSDP2, whose parameters have memory of their own. Losses must be equal to FSDP2's to the bit where
weights are aligned.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, ROWS, STEPS = 4096, 4096, 8
OFFSETS = (0, 1, 2, 4, 8)


def products() -> None:
    """Print microseconds of ``F.linear``, by dtype, rows of the input, and first element of the weight."""
    print("dtype, rows of the input: microseconds with the weight at element", *OFFSETS)
    for dtype in (torch.bfloat16, torch.float32):
        for rows in (64, 8192):
            x = torch.randn(rows, DIM, device="cuda").to(dtype)
            found = []
            for offset in OFFSETS:
                memory = torch.randn(DIM * DIM + max(OFFSETS), device="cuda").to(dtype)
                weight = memory[offset : offset + DIM * DIM].view(DIM, DIM)
                found.append(f"{1e6 * _seconds(lambda x=x, weight=weight: F.linear(x, weight)):.0f}")
            print(f"{dtype}, {rows}:", *found)


def _seconds(act: Callable[[], object], times: int = 20) -> float:
    """The mean time of ``act`` on the device."""
    for _ in range(3):
        act()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        act()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times / 1e3


class Block(nn.Module):
    """A scalar before two matrices: without alignment both begin at an odd element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.up, self.down = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x))) * self.scale


def _sharded(engine: str) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy as TheirPolicy
    from torch.distributed.fsdp import fully_shard as theirs

    from fairshard.nn import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(4)])
    if engine == "wrapper":
        precision = MixedPrecision(torch.bfloat16)
        for index in range(4):
            model[index] = FullyShardedDataParallel(model[index], mixed_precision=precision)
        return FullyShardedDataParallel(model, mixed_precision=precision)
    for unit in (*model, model):
        if engine == "fsdp2":
            theirs(unit, mp_policy=TheirPolicy(torch.bfloat16))
        else:
            fully_shard(unit, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    return model


def steps(engine: str, is_aligned: bool) -> tuple[float, float]:
    """The median milliseconds of a forward and a backward on one rank, and the loss."""
    from fairshard.params import line
    from fairshard.views import rows

    wanted = line.is_to_align if is_aligned else lambda *_: False
    with mock.patch.object(line, "is_to_align", wanted), mock.patch.object(rows, "is_to_align", wanted):
        model, times = _sharded(engine), []
        x = torch.randn(ROWS, DIM).bfloat16()
        for _ in range(STEPS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            loss = model(x).float().square().mean()
            loss.backward()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
            model.zero_grad()
    return 1e3 * statistics.median(times[2:]), loss.item()


def main() -> None:
    """Print both tables."""
    from fairshard.utils.rank_pool import RankPool

    sys.path.insert(0, str(Path(__file__).parent))
    import alignment  # the ranks find it under this name, not as __main__

    products()
    pool = RankPool("cuda")
    (theirs, loss), *_ = pool.run(1, alignment.steps, "fsdp2", True)
    print(f"fsdp2: {theirs:.1f} ms a step")
    for engine in ("wrapper", "fully_shard"):
        for is_aligned in (False, True):
            (own, found), *_ = pool.run(1, alignment.steps, engine, is_aligned)
            if is_aligned and found != loss:
                raise SystemExit(f"error: the loss of {engine} is {found}, FSDP2's is {loss}")
            how = "aligned" if is_aligned else "as they lie"
            print(f"{engine}, {how}: {own:.1f} ms, {own / theirs:.2f} of FSDP2's")
    pool.close()


if __name__ == "__main__":
    main()
