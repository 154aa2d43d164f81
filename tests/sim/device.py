"""``torch.sim``: registers the simulated accelerator with torch."""

import contextlib
import functools
import os
import types

import torch
import torch.distributed as dist

from tests.sim.extension import opened, why_missing


def load(num_devices=1):
    """Register ``torch.device("sim")`` and its backend of collectives in this process, and return the extension.

    The number of devices of a process is that of its first call: autograd counts them once.
    """
    made = getattr(loaded, "made", None)
    if made is not None:
        if made.device_count() != num_devices:
            raise RuntimeError(
                f"`num_devices` must be {made.device_count()}, as in the first call, but is {num_devices}."
            )
        return made
    if why_missing():
        raise RuntimeError(f"The simulated accelerator {why_missing()}.")
    # Gloo's flight recorder would take the GIL in the middle of a collective, while the scheduler is locked.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    made = opened()
    made.install()
    made.set_device_count(num_devices)
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _module(made))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("sim", functools.partial(_make_backend, made), devices=["sim"])
    _watch_conversions(made)
    _refresh_thread_pool()
    os.register_at_fork(after_in_child=_refresh_thread_pool)
    loaded.made = made
    return made


def loaded():
    """The extension, which `load` has loaded."""
    made = getattr(loaded, "made", None)
    if made is None:
        raise RuntimeError("tests.sim.load() must be called first.")
    return made


def _make_backend(made, store, rank, size, timeout):
    return made.make_backend(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


def _watch_conversions(made):
    """Note as reads by the host the two ways from a tensor to other objects that call no operator."""
    for name in ("numpy", "tolist"):
        real = getattr(torch.Tensor, name)

        def noted(tensor, *args, _real=real, _name=f"Tensor.{name}", **kwargs):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu and tensor.layout == torch.strided:
                made.touch_on_host(tensor, _name, False)
            return _real(tensor, *args, **kwargs)

        setattr(torch.Tensor, name, functools.wraps(real)(noted))


def _refresh_thread_pool():
    """Make anew torch's pool of threads, which a fork invalidates.

    torch does this at the next use. With several devices, each of autograd's device threads uses it when it starts, all
    at once, and the check for a pool that is being replaced fails: "Invalid thread pool!".
    """
    torch.set_num_threads(torch.get_num_threads())


def _module(made):
    """``torch.sim``, with the names that torch asks a device's module for."""

    def index(device=None):
        number = device if isinstance(device, int) or device is None else torch.device(device).index
        return made.current_device() if number is None else number

    class device:
        """Context in which another device is the current one."""

        def __init__(self, device):
            self._index = index(device)

        def __enter__(self):
            self._before = made.current_device()
            made.set_device(self._index)

        def __exit__(self, *unused):
            made.set_device(self._before)

    def manual_seed(seed):
        made.manual_seed(seed & 0xFFFFFFFFFFFFFFFF)

    def stream(stream):
        return contextlib.nullcontext() if stream is None else stream

    module = types.ModuleType("torch.sim")
    vars(module).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _initialized=True,
        _is_in_bad_fork=lambda: False,
        device_count=made.device_count,
        device=device,
        current_device=made.current_device,
        set_device=lambda device: made.set_device(index(device)),
        synchronize=lambda device=None: made.synchronize(-1 if device is None else index(device)),
        Stream=lambda device=None, priority=0: torch.Stream(torch.device("sim", index(device)), priority=priority),
        Event=lambda **kwargs: torch.Event("sim", **kwargs),
        stream=stream,
        current_stream=lambda device=None: torch.accelerator.current_stream(torch.device("sim", index(device))),
        manual_seed=manual_seed,
        manual_seed_all=manual_seed,
        default_generators=[made.default_generator(number) for number in range(made.device_count())],
        get_rng_state=lambda device=None: made.default_generator(index(device)).get_state(),
        set_rng_state=lambda state, device=None: made.default_generator(index(device)).set_state(state),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        memory_allocated=lambda device=None: made.allocated(index(device)),
        max_memory_allocated=lambda device=None: made.peak(index(device)),
        reset_peak_memory_stats=lambda device=None: made.reset_peak(index(device)),
        empty_cache=lambda: None,
    )
    return module
