"""The number of optimizer steps that have begun in this process."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from fairshard.utils.dynamo import untraced

_num_steps = 0


def num_steps() -> int:
    """Number of optimizer steps that have begun in this process."""
    return _num_steps


@untraced
def count_step(*_: Any) -> None:
    """A step begins; called by torch, and by optimizers that step part of their parameters outside ``step``."""
    global _num_steps
    _num_steps += 1


register_optimizer_step_pre_hook(count_step)
