"""Sharded modules as torch's own code knows them: the class, the state and the keys that it looks for.

The only file that writes torch's keys on users' modules. torch's code finds a sharded module by its class, by the name
``fully_shard`` in the registry of composable APIs (``replicate``), or by the state of torch's ``fully_shard``
(pipelining). The state here has what that code reads, and raises AttributeError by name for everything else. torch 2.6
reads ``_fsdp_param_group``, later versions ``_fsdp_param_groups``; the other names are the same from 2.6 to 2.13.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed.fsdp
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._composable_state import _module_state_mapping, _State

from fairshard.checks.usage import assert_idle
from fairshard.engine.root import Root
from fairshard.engine.unit import Unit

_API = "fully_shard"
_KEYS = (STATE_KEY, REGISTRY_KEY)
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


class _Shown:
    """What torch calls ``torch_name``: attributes that it does not have raise AttributeError with the name."""

    torch_name = ""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"`{name}` of torch's {self.torch_name} must not be used on a module that fairshard has sharded: fairshard "
            "has no such attribute. Use the methods of FSDPModule."
        )


class ParamGroup(_Shown):
    """The parameters of one unit: what torch calls a ``FSDPParamGroup``.

    Attributes:
        comm_ctx: set by torch's ``share_comm_ctx``; no effect, because each model keeps its own streams.
    """

    torch_name = "FSDPParamGroup"

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self.comm_ctx: object = None

    def post_backward(self, *_unused: Any) -> None:
        """Reduce what backwards under ``set_requires_gradient_sync(False)`` have kept. **Collective.**

        Reduces the gradients of all units of the model; further calls have no effect until the next backward.
        """
        root: Root | None = self._unit.root
        if root is not None and any(1 in flat_param.reached for unit in root.units for flat_param in unit.flat_params):
            _reduce_kept(root)


def _reduce_kept(root: Root) -> None:
    """Reduce what `no_sync` has kept in units that reduce again, without a backward. **Collective.**

    Raises:
        TrainingStateError: in the middle of a pass.
    """
    assert_idle(root, "post_backward")
    root.told.backward_begins([])
    root.engine.follow(root, [])
    for unit in root.units:
        unit.end_backward(awaited=False)
        for flat_param in unit.flat_params if unit.sync else ():
            flat_param.note_reached(bytearray(len(flat_param.slots)))
    for observer in root.observers:
        observer.backward_ends(is_reached=True, reduces=True)


class StateContext(_Shown):
    """State that the units of one model share.

    Attributes:
        all_states: the state of each unit, outermost first; empty before the first forward, as in torch.
    """

    torch_name = "FSDPStateContext"

    def __init__(self, states: list[TorchState]) -> None:
        self.all_states = states


class TorchState(_Shown, _State):
    """The state of a sharded module, as torch's code reads it."""

    torch_name = "FSDPState"

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._comm_ctx: object = None
        self._fsdp_param_group = ParamGroup(unit)
        self._fsdp_param_groups = [self._fsdp_param_group]

    @property
    def _is_root(self) -> bool | None:
        root: Root | None = self._unit.root
        return None if root is None else root.units[0] is self._unit

    @property
    def _state_ctx(self) -> StateContext:
        root: Root | None = self._unit.root
        return StateContext([] if root is None else [state_of(unit) for unit in root.units])

    def _root_post_backward_final_callback(self) -> None:
        self._fsdp_param_group.post_backward()

    def _pre_forward(self, *_args: Any) -> NoReturn:
        raise NotImplementedError(
            "A forward method of a module that fairshard has sharded must be registered with fairshard's "
            "`register_fsdp_forward_method`, but was registered with torch's. Import the function from fairshard.nn."
        )


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"`{name}` of torch's FSDPModule must not be called on a module that fairshard has sharded: fairshard has "
            "no such method. Leave the call out."
        )

    refuse.__name__ = name
    refuse.__doc__ = "Not supported: always raises."
    return refuse


class TorchFSDPModule(torch.distributed.fsdp.FSDPModule):
    """Torch's ``FSDPModule`` without its behaviour: methods that no subclass overrides raise NotImplementedError."""

    for _name, _value in vars(torch.distributed.fsdp.FSDPModule).items():
        if callable(_value) and not _name.startswith("__"):
            vars()[_name] = _refusal(_name)
    del _name, _value

    _fairshard_unit: Unit
    _orig_cls_mro_index = 3  # the place of the original class among the bases; torch 2.6 does not have it

    def _get_fsdp_state(self) -> Any:
        return state_of(self._fairshard_unit)


def state_of(unit: Unit) -> TorchState:
    """The state of the first module of ``unit``, which `register` has created."""
    assert unit.members is not None
    state: TorchState = vars(unit.members.modules[0])[STATE_KEY][_key()]
    return state


def register(module: nn.Module, unit: Unit) -> None:
    """Show ``module``, one of the modules of ``unit``, to torch's code as sharded."""
    state = TorchState(unit)
    vars(module).setdefault(STATE_KEY, {})[_key()] = state
    vars(module).setdefault(REGISTRY_KEY, {})[_API] = RegistryItem()
    _module_state_mapping[module] = weakref.ref(state)


def mark_managed(module: nn.Module) -> None:
    """Mark ``module`` as a part of a sharded one, as Hugging Face's transformers and torch.compile look for it."""
    vars(module).update(dict.fromkeys(_MARKS, True))


def without_torch_keys(attributes: dict[str, Any]) -> dict[str, Any]:
    """``attributes`` of a module without torch's keys, which differ in each process."""
    return {name: value for name, value in attributes.items() if name not in _KEYS}


def _key() -> Any:
    """The key of torch's ``fully_shard`` among the states of a module."""
    return vars(torch.distributed.fsdp.fully_shard)["__wrapped__"]
