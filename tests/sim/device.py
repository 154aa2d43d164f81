"""``torch.sim``: registers the simulated accelerator with torch."""

import functools
import os
import types

import torch
import torch.distributed as dist

from tests.sim.build import extension, why_missing


@functools.cache
def load(num_devices=1):
    """Register ``torch.device("sim")`` and its backend of collectives in this process, and return the extension."""
    if why_missing():
        raise RuntimeError(f"The simulated accelerator {why_missing()}.")
    # Gloo's flight recorder would take the GIL in the middle of a collective, while the scheduler is locked.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    made = extension()
    made.install()
    made.set_device_count(num_devices)
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _module(made))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("sim", functools.partial(_make_backend, made), devices=["sim"])
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


def _module(made):
    """``torch.sim``, with the names that torch asks a device's module for."""

    def index(device):
        number = device if isinstance(device, int) or device is None else torch.device(device).index
        return made.current_device() if number is None else number

    def manual_seed(seed):
        made.manual_seed(seed & 0xFFFFFFFF)

    module = types.ModuleType("torch.sim")
    vars(module).update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=made.device_count,
        current_device=made.current_device,
        set_device=lambda device: made.set_device(index(device)),
        synchronize=lambda device=None: made.synchronize(-1 if device is None else index(device)),
        current_stream=lambda device=None: torch.accelerator.current_stream(torch.device("sim", index(device))),
        manual_seed=manual_seed,
        manual_seed_all=manual_seed,
        get_rng_state=lambda device=None: torch.tensor(made.random_state(), dtype=torch.int64),
        set_rng_state=lambda state, device=None: made.set_random_state(*state.tolist()),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        memory_allocated=lambda device=None: made.allocated(index(device)),
        max_memory_allocated=lambda device=None: made.peak(index(device)),
        reset_peak_memory_stats=lambda device=None: made.reset_peak(index(device)),
    )
    return module
