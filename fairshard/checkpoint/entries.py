"""Entries of a checkpoint for torch.distributed.checkpoint: the model and the rest of the training state.

===========================  ==================================================================
``model.<name>``             parameters and buffers under their unwrapped names
``optim.state.<name>.<..>``  optimizer state under the names of the parameters
``optim.param_groups.<i>``   hyperparameters; ``params`` are names
``scheduler``, ``scaler``    their ``state_dict()``, in a tuple of one
``rank.<r>``                 random numbers, ``extra`` and diverging buffers of rank ``r``, in a tuple of one
===========================  ==================================================================

torch's own tools write and read the first three for FSDP2 and plain modules. The tuple keeps torch from flattening
the value.
"""

from __future__ import annotations

import io
import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fairshard.checkpoint.objects import read_object
from fairshard.checkpoint.reader import first_line
from fairshard.settings.state_dicts import StateDictType
from fairshard.state.forms import state_dict_type
from fairshard.state.optim_params import OptimParams
from fairshard.utils.device import accelerator_rng_state, set_accelerator_rng_state
from fairshard.utils.dtensors import memory_of
from fairshard.utils.span_tensor import SpanTensor
from fairshard.utils.subclasses import is_wrapper


@runtime_checkable
class Stateful(Protocol):
    """An object with ``state_dict`` and ``load_state_dict``: a scheduler, a scaler, a data loader."""

    def state_dict(self) -> dict[str, Any]:
        """The state as a dict."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Restore a state."""


@dataclass
class Training:
    """Objects that are saved and resumed together. ``extra`` is a dict of plain data, or `Stateful`."""

    model: nn.Module
    optimizer: Optimizer | None = None
    scheduler: Stateful | None = None
    scaler: Stateful | None = None
    extra: dict[str, Any] | Stateful | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise TypeError(
                f"`model` must be an nn.Module, but is {type(self.model).__name__}. Pass the model itself, not its "
                "state dict, after the folder or the step."
            )
        if self.optimizer is not None and not hasattr(self.optimizer, "param_groups"):
            raise TypeError(
                f"`optimizer` must be an optimizer or None, but is {type(self.optimizer).__name__}. Pass the optimizer "
                "itself, not its state dict."
            )

    @property
    def others(self) -> dict[str, Stateful]:
        """The scheduler and the scaler, if there are."""
        found = {"scheduler": self.scheduler, "scaler": self.scaler}
        return {name: stateful for name, stateful in found.items() if stateful is not None}


def object_entries(training: Training, rank: int) -> dict[str, Any]:
    """Entries other than model and optimizer; this rank's own values are under its `rank_key`.

    Raises:
        TypeError: a value holds anything but tensors, numbers, strings and containers of them.
    """
    entries: dict[str, Any] = {
        name: (_plain(name, stateful.state_dict()),) for name, stateful in training.others.items()
    }
    extra = training.extra
    if isinstance(extra, Stateful):
        extra = extra.state_dict()
    entries[rank_key(rank)] = ({"rng": rng_state(), "extra": _plain("extra", extra)},)
    return entries


def replicated(entries: Mapping[str, Any]) -> dict[str, Tensor]:
    """The model's replicated values, such as BatchNorm statistics, which may differ between ranks.

    ``model`` holds rank 0's; a load on the same number of ranks restores each rank's own.
    """
    model = entries["model"].items()
    sharded = (SpanTensor, DTensor)
    return {name: value for name, value in model if isinstance(value, Tensor) and not isinstance(value, sharded)}


def rank_key(rank: int) -> str:
    """Key of the values that belong to ``rank`` alone."""
    return f"rank.{rank}"


def model_entries(model: nn.Module) -> dict[str, Any]:
    """The model's state dict; sharded values are views of the shards, without a copy.

    Raises:
        TypeError: a value is a tensor subclass whose memory only its class can read.
    """
    with state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict(keep_vars=True)
    for key, value in state.items():
        local = value._local_tensor if isinstance(value, DTensor) else value
        if isinstance(local, Tensor) and not isinstance(local, SpanTensor) and is_wrapper(local):
            raise TypeError(
                f"A checkpoint must consist of plain tensors, but `{key}` is a {type(local).__name__}, a tensor "
                "subclass that wraps others. Save the state dict with torch.distributed.checkpoint, which leaves that "
                "to the class."
            )
    return {
        key: value.detach() if isinstance(value, Tensor) else _wrapped(_plain(f"model.{key}", value))
        for key, value in state.items()
    }


def unwrapped(value: Any) -> Any:
    """The value of the model that was saved as ``value``, see `_wrapped`."""
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def _wrapped(value: Any) -> Any:
    """``value``, in a tuple of one if torch would flatten it with a loss, or if it is such a tuple itself."""
    is_wrapped = isinstance(value, tuple) and len(value) == 1
    return value if _survives(value) and not is_wrapped else (value,)


def _survives(value: Any) -> bool:
    """Whether torch can restore ``value`` from its parts: it drops empty dicts, and makes keys strings."""
    if isinstance(value, Mapping):
        return bool(value) and all(isinstance(key, str) and _survives(part) for key, part in value.items())
    return not isinstance(value, list) or all(map(_survives, value))


def aliases_of(params: OptimParams) -> dict[str, str]:
    """Every other name of a tied parameter, mapped to its first name."""
    every = (names for named in params for names in named.names)
    return {name: first for first, *others in every for name in others}


def live_storages(params: OptimParams, optimizer: Optimizer | None) -> set[int]:
    """Addresses of host-memory shards and their optimizer state, which only an optimizer step changes."""
    found: set[int] = set()
    state: Mapping[Any, Any] = {} if optimizer is None else optimizer.state
    for named in params:
        if named.flat_param is not None and named.flat_param.shows.on_cpu:
            tensors = [named.param, *state.get(named.param, {}).values()]
            memory = [memory_of(tensor) for tensor in tensors if isinstance(tensor, Tensor)]
            found.update(own.untyped_storage().data_ptr() for own in memory if own.device.type == "cpu" and own.numel())
    return found


def _plain(where: str, value: Any) -> Any:
    """A copy of ``value``, saved and read back as data.

    Raises:
        TypeError: reading it back would run code.
    """
    file = io.BytesIO()
    try:
        torch.save(value, file)
        return read_object(file.getbuffer())
    except Exception as error:  # pickling can raise anything
        for key, part in value.items() if isinstance(value, Mapping) else ():
            _plain(f"{where}[{key!r}]", part)
        raise TypeError(
            f"A checkpoint must consist of tensors, numbers, strings and containers of them, but `{where}` is "
            f"{type(value).__name__}, which could run code when it is read: {first_line(error)} Save plain data."
        ) from None


def checksum(value: Tensor) -> int:
    """The CRC-32 of the elements of ``value``."""
    return zlib.crc32(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


# ---- random number generators: torch's on the CPU and this rank's accelerator, Python's and numpy's


def rng_state() -> dict[str, Any]:
    """State of all generators, as tensors and numbers."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "gpu": accelerator_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
    }


def check_rng(saved: dict[str, Any]) -> None:
    """Check that ``saved`` can be restored; the generators do not change.

    Raises:
        Exception: it cannot; of any kind.
    """
    kind, keys, position, *_ = saved["numpy"]
    if kind != "MT19937" or keys.shape != (624,) or not 0 <= position <= 624:
        raise ValueError("the state of numpy's generator is damaged")  # numpy itself would read outside of the keys
    current = rng_state()
    try:
        restore_rng(saved)
    finally:
        restore_rng(current)


def restore_rng(saved: dict[str, Any]) -> None:
    """Restore the state ``saved``."""
    torch.set_rng_state(saved["torch"])
    set_accelerator_rng_state(saved["gpu"])
    version, internal, gauss_next = saved["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, *rest = saved["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
