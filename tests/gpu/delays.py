"""Streams that are late: work on one of the engine's streams starts only after a sleep.

Where a wait is missing, the stream that should have waited reads old values or writes too early, so results differ.
On the simulated accelerator a sleep is one small task, and orders come from its seed.
"""

import contextlib
from unittest import mock

import torch
from torch import nn

from fairshard.engine import shared
from fairshard.utils import streams
from tests.kit import rank_device

SIMULATED = "sim"
COMPUTE, UNSHARD, REDUCE, COPY = "compute", "unshard", "reduce", "copy"
SLEEP_MS = 2.0
CYCLES_PER_MS = 2_000_000
"""Of a GPU at 2 GHz; a slower one sleeps longer."""


def sleep(ms=SLEEP_MS):
    """Let the current stream of this rank's device do nothing for about ``ms``."""
    kind = rank_device().type
    if kind == "cuda":
        torch.cuda._sleep(int(ms * CYCLES_PER_MS))
    else:
        own = _scratch(torch.accelerator.current_stream())
        for _ in range(1 if kind == SIMULATED else int(1000 * ms)):
            own.add_(1)


def _scratch(stream):
    """Memory for the sleeps of ``stream``, which nothing frees: an allocation there would be a race with compute."""
    key = stream.device, stream.stream_id
    if key not in _scratches:
        _scratches[key] = torch.zeros(1, device=stream.device)
        torch.accelerator.synchronize()
    return _scratches[key]


_scratches = {}


@contextlib.contextmanager
def late(role, ms=SLEEP_MS):
    """Make work on the stream of ``role`` late in models that are built inside; it must have some."""
    count = [0]

    def delay():
        count[0] += 1
        sleep(ms)

    with _late_compute(delay) if role == COMPUTE else _late_stream(role, delay):
        yield
    assert count[0], f"no work was put on the {role} stream, so nothing was late"


def _late_compute(delay):
    """Sleep before each module's forward, and before what autograd does behind it."""
    call = nn.Module.__call__

    def later(module, *args, **kwargs):
        delay()
        output = call(module, *args, **kwargs)
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda _grad: delay())
        return output

    return mock.patch.object(nn.Module, "__call__", later)


@contextlib.contextmanager
def _late_stream(role, delay):
    """Sleep whenever the program enters the stream of ``role``."""
    ours, use, make = [], streams.Stream.use, shared.Shared.__init__

    def made(self, *args, **kwargs):
        make(self, *args, **kwargs)
        ours.append({UNSHARD: self.unshard_stream, REDUCE: self.reduce_stream, COPY: self.transfers.stream}[role])
        if rank_device().type not in ("cpu", "cuda"):
            with use(ours[-1]):
                current = torch.accelerator.current_stream()
            _scratch(current)

    @contextlib.contextmanager
    def entered(stream):
        with use(stream):
            delay()
            yield

    def late_use(self):
        return entered(self) if any(self is stream for stream in ours) else use(self)

    with mock.patch.object(shared.Shared, "__init__", made), mock.patch.object(streams.Stream, "use", late_use):
        yield


def must_not_wait(function, ms=200.0):
    """Call ``function`` behind a long sleep on the current stream; the host must return before the sleep ends."""
    module = torch.get_device_module(rank_device().type)
    module.synchronize()
    sleep(ms)
    slept = torch.accelerator.current_stream().record_event()
    before = _simulated_waits()
    result = function()
    has_waited = slept.query()
    if rank_device().type == SIMULATED:  # a sleep takes no time there, and the device goes on while the host waits
        has_waited = _simulated_waits() > before
    module.synchronize()
    assert not has_waited, f"the host has waited for the device, which slept for {ms:.0f} ms before this work"
    return result


def _simulated_waits():
    """How often the host has waited for the simulated accelerator; 0 on other devices."""
    if rank_device().type != SIMULATED:
        return 0
    from tests import sim

    return sim.stats()["syncs"]
