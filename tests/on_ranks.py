"""``@on_ranks(2)`` turns a function into a test that runs it on two ranks."""

import functools
import importlib
import inspect
from dataclasses import dataclass

import pytest
from _pytest.assertion import install_importhook
from _pytest.config import get_config

from tests.kit import run_ranks


@dataclass(frozen=True)
class Body:
    """The undecorated function behind a test, named so that a worker process can find it.

    A worker imports its module with the call, before there is a group: what torch makes while it is imported may keep
    a group that exists then.
    """

    module: str
    name: str

    def __setstate__(self, state):
        self.__dict__.update(state)
        _explain_asserts()
        importlib.import_module(self.module)

    def __call__(self, **kwargs):
        function = inspect.unwrap(getattr(importlib.import_module(self.module), self.name))
        return function(**kwargs)


@functools.cache
def _explain_asserts():
    """Make this worker import test modules as pytest does, so that a failed assert shows its values."""
    install_importhook(get_config())


def in_full(world_size):
    """A value to parametrize with, such as a world size, that runs only in ``make test-all``."""
    return pytest.param(world_size, marks=pytest.mark.full)


def on_ranks(*world_sizes, timeout=60.0):
    """Run the decorated function on that many ranks, once for each of ``world_sizes``.

    The arguments that ``pytest.mark.parametrize`` and fixtures give it are pickled.
    Without ``world_sizes``, ``world_size`` must be parametrized.
    """

    def decorate(function):
        @functools.wraps(function)
        def test(world_size, **kwargs):
            __tracebackhide__ = True
            run_ranks(world_size, Body(function.__module__, function.__name__), timeout=timeout, **kwargs)

        own = list(inspect.signature(function).parameters.values())
        first = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = inspect.Signature([first, *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own)])
        return pytest.mark.parametrize("world_size", world_sizes)(test) if world_sizes else test

    return decorate
