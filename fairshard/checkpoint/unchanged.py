"""Optimizers, schedulers and scalers keep their state if a load fails while it is applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.optim import Optimizer

from fairshard.checkpoint.entries import Stateful


@contextmanager
def unchanged_on_error(optimizer: Optimizer | None, others: Sequence[Stateful]) -> Iterator[None]:
    """If the ``with`` block raises, put back the state of all that it has loaded state into.

    torch's optimizers replace their state and groups in a load, and do not write into them.
    """
    kept = None if optimizer is None else (optimizer.state, optimizer.param_groups)
    states = [other.state_dict() for other in others]
    try:
        yield
    except BaseException:
        if optimizer is not None and kept is not None:
            optimizer.state, optimizer.param_groups = kept
        for other, state in zip(others, states, strict=True):
            other.load_state_dict(state)
        raise
