"""`Check`: what runs for one line of docs/notes/gpu.md, and what it needs.

A check is a function with a claim as its docstring. It returns figures by name, or raises. ``@on_ranks`` checks run on
each rank of a process group; ``@on_host`` checks run in the process of the part, and start processes of their own.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

SIMULATED = "sim"


@dataclass(frozen=True)
class Machine:
    """Where a part runs: the type of its device, their number, where files go, and whether sizes are small.

    Sizes are small on the simulated accelerator and on the CPU, where times mean nothing.
    """

    device: str
    num_devices: int
    out: Path
    ranks_per_device: int = 1

    @property
    def is_small(self) -> bool:
        return self.device in ("cpu", SIMULATED)

    @property
    def max_ranks(self) -> int:
        """The number of ranks that the devices have room for; the small ones are processes of any number."""
        return 4 if self.is_small else self.num_devices * self.ranks_per_device

    @cached_property
    def lacks(self) -> Mapping[str, str]:
        """Why something that checks need is missing here, by the name under which they need it."""
        missing = {}
        if self.device != "cuda":
            for name in ("CUDA", "cudaHostRegister", "cuDNN", "NCCL", "CUDA's sanitizer", "inductor on CUDA"):
                missing[name] = f"{name} is not part of device {self.device}"
        elif torch.version.hip:
            missing["CUDA's sanitizer"] = "ROCm has none"
            missing["cuDNN"] = "ROCm has MIOpen"
        for package in ("pytest", "hypothesis", "torchao", "lightning", "triton", "matplotlib", "tqdm"):
            if importlib.util.find_spec(package) is None:
                missing[package] = f"package {package} is not installed in this Python"
        return missing


@dataclass(frozen=True)
class Check:
    """What runs for a line. ``num_ranks`` is what the line needs; ``alone``: what one rank shows is worth a run."""

    line: str
    part: str
    run: Callable
    num_ranks: int = 0  # 0: in the process of the part
    num_devices: int = 1  # in one process
    alone: bool = False
    needs: tuple[str, ...] = ()
    timeout: float = 60.0
    seeds: tuple[int, ...] = (0, 1)  # on the simulated accelerator: orders in which it works only when the host waits

    @property
    def claim(self) -> str:
        return " ".join((self.run.__doc__ or "").split())


@dataclass
class Registry:
    """All checks by the line that they run for, and the reasons of the lines that nothing runs."""

    checks: dict[str, Check] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def add(self, check):
        if check.line in self.checks or check.line in self.reasons:
            raise ValueError(f"Line `{check.line}` must be bound once, but is bound twice.")
        self.checks[check.line] = check

    def leave_out(self, line, reason):
        """Nothing runs ``line``, because of ``reason``."""
        if line in self.checks or line in self.reasons:
            raise ValueError(f"Line `{line}` must be bound once, but is bound twice.")
        self.reasons[line] = reason


REGISTRY = Registry()


def on_ranks(line, num_ranks=1, **how):
    """Bind the decorated function, which each rank calls with ``is_small``, to ``line``. Rank 0's figures count."""

    def bind(function):
        REGISTRY.add(Check(line, how.pop("part", "lines"), function, num_ranks, **how))
        return function

    return bind


def on_host(line, part, **how):
    """Bind the decorated function, which takes the `Machine` and the seconds that are left, to ``line``."""

    def bind(function):
        REGISTRY.add(Check(line, part, function, 0, **how))
        return function

    return bind


class Missed(AssertionError):
    """A claim does not hold; ``figures`` are those that show it."""

    def __init__(self, reason, figures):
        super().__init__(reason, figures)
        self.reason, self.figures = reason, figures

    def __str__(self):
        return self.reason


class NotHere(Exception):
    """The check found out that this machine cannot show its line; the message says why."""
