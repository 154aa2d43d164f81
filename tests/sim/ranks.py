"""Ranks on the simulated accelerator: a task on them fails at any race."""

import contextlib
import functools
import inspect
import os

import pytest
import torch

from tests import sim
from tests.kit.rank_pool import RankPool
from tests.on_ranks import Body

SEED = "FAIRSHARD_SIM_SEED"
"""Environment variable with the seed of ``--device sim``, as `sim.order_by_seed` takes it; unset or empty: serial."""


def seed_of_environment():
    """The seed that `SEED` names."""
    return int(os.environ[SEED]) if os.environ.get(SEED) else None


@contextlib.contextmanager
def watched(seed=None, num_devices=1):
    """Run a task on the simulator, in the order of ``seed``; at its end raise if the task had a race."""
    sim.load(num_devices)
    sim.restart()
    sim.order_by_seed(seed)
    sim.watch()
    try:
        yield
        torch.accelerator.synchronize()
    finally:
        found = sim.races()
        sim.restart()  # after an error, other ranks never answer what is queued
    if found:
        raise AssertionError("\n".join([f"{len(found)} races on the simulated accelerator (seed {seed}):", *found]))


_pools = {}


def pool(num_devices=1):
    """Ranks for tests that need the simulator, whatever ``--device`` says; a process keeps its number of devices."""
    if num_devices not in _pools:
        _pools[num_devices] = RankPool("sim")
    return _pools[num_devices]


def on_sim(*world_sizes, num_devices=1, timeout=60.0):
    """Run the decorated function on that many ranks on the simulator; skip it where there is none.

    Without ``world_sizes``, ``world_size`` must be parametrized. A parameter ``seed`` of the test, if it has one,
    chooses the order of work; otherwise that is serial.
    """

    def decorate(function):
        @functools.wraps(function)
        def test(world_size, **kwargs):
            __tracebackhide__ = True
            if sim.why_missing():
                pytest.skip(sim.why_missing())
            sim.build()
            pool(num_devices).around = functools.partial(watched, kwargs.get("seed"), num_devices)
            pool(num_devices).run(world_size, Body(function.__module__, function.__name__), timeout=timeout, **kwargs)

        own = inspect.signature(function).parameters.values()
        first = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = inspect.Signature([first, *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own)])
        return pytest.mark.parametrize("world_size", world_sizes)(test) if world_sizes else test

    return decorate


def close():
    """End the ranks of every `pool`."""
    for each in _pools.values():
        each.close()


def around():
    """The context of tasks under ``--device sim``, for `tests.kit.rank_pool.RankPool`."""
    return functools.partial(watched, seed_of_environment())
