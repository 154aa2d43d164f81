"""State dicts of a model with units: whole, sharded, or local to this rank.

Whole and sharded state dicts go unit by unit through ``nn.Module``'s own machinery. While a wrapper's part is
collected or loaded, its parameters are registered under their own names, whole or as this rank's runs. So modules
with their own ``_save_to_state_dict`` or ``_load_from_state_dict``, and hooks on both, work as they do unwrapped.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from fairshard.checks.agreement import raise_together
from fairshard.engine.tree import modules_of, paths_of, walk
from fairshard.engine.unit import Unit
from fairshard.errors import FairshardError, MixedGroupsError, TrainingStateError
from fairshard.settings.state_dicts import FullStateDictConfig, StateDictConfig, StateDictType
from fairshard.state.assigned_values import own_tensors_kept
from fairshard.state.full_params import Showing, show, show_spans
from fairshard.state.shown import is_shown, shown_on_first
from fairshard.utils.messages import broadcast_object
from fairshard.utils.names import COMPILED, clean_tensor_name, join
from fairshard.utils.span_tensor import SpanTensor


def takes_from_first(config: StateDictConfig) -> bool:
    """Whether only rank 0 has the whole values."""
    return isinstance(config, FullStateDictConfig) and config.rank0_only


def module_state_dict(wrapper: nn.Module, unit: Unit, destination: Any, prefix: str, keep_vars: bool) -> Any:
    """State dict of the wrapped module, under unwrapped names. **Collective** unless sharded.

    Unless ``keep_vars``, the caller owns the tensors: no later step, load or reshard changes them.
    """
    before = {} if destination is None else dict(destination)
    wrapped = wrapper._modules["module"]
    assert wrapped is not None
    config = unit.state_dict_settings.state_dict_config
    with _showing(unit, writeback=False):
        state = wrapped.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
    added = [key for key in state if key not in before or state[key] is not before[key]]
    if (takes_from_first(config) or unit in shown_on_first) and unit.group.rank != 0:
        for key in added:
            del state[key]
        getattr(state, "_metadata", {}).clear()
        return state
    _clean_names(prefix, added, state)
    if not keep_vars:
        added = [key for key in state if key not in before or state[key] is not before[key]]
        _own(wrapper, unit, added, state)
    return state


def _clean_names(prefix: str, added: list[str], state: Any) -> None:
    """Remove torch.compile's parts from the names ``added`` to ``state``, and keep the order."""

    def clean(name: str) -> str:
        return prefix + clean_tensor_name(name[len(prefix) :]) if name.startswith(prefix) else name

    if any(clean(key) != key for key in added):
        for key in added:
            state[clean(key)] = state.pop(key)
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        cleaned = {clean(f"{name}.")[:-1]: version for name, version in metadata.items()}
        metadata.clear()
        metadata.update(cleaned)


def _own(wrapper: nn.Module, unit: Unit, added: list[str], state: Any) -> None:
    """Copy the values ``added`` to ``state`` that share memory with the model."""
    offload = unit.state_dict_settings.state_dict_config.offload_to_cpu
    live = {_memory(fp.shard.detach()) for fp in unit.flat_params}
    for part in modules_of(wrapper):
        live |= {_memory(own) for own in (*part.parameters(recurse=False), *part.buffers(recurse=False))}
    for key in added:
        value = state[key]
        if isinstance(value, Tensor) and _memory(value) in live:
            state[key] = value.to("cpu" if offload else value.device, copy=True)


def _memory(value: Tensor) -> int:
    return (value.run if isinstance(value, SpanTensor) else value).untyped_storage().data_ptr()


def check_whole_inside(units: Iterable[Unit], what: str) -> None:
    """Check that state dicts of units that are shown now are whole, because their shards are written back later.

    Raises:
        TrainingStateError: another form is set for a unit that is shown; the message names ``what``.
    """
    for unit in filter(is_shown, units):
        kind = unit.state_dict_settings.state_dict_type
        if kind is not StateDictType.FULL_STATE_DICT and unit.members is None:
            raise TrainingStateError(
                f"`{what}` inside summon_full_params must use whole values, but unit `{unit.fqn or 'root'}` has "
                f"{kind.name} set, and its shards are only written at the end of the `with` block. Call it outside of "
                "the block, or set FULL_STATE_DICT."
            )


def check_loads_inside(units: Iterable[Unit]) -> None:
    """Check that every rank can load into the units that are shown now.

    Raises:
        TrainingStateError: a unit is shown, or has its state dict, on rank 0 alone; see also `check_whole_inside`.
    """
    for unit in filter(is_shown, units):
        check_whole_inside([unit], "load_state_dict")
        if unit in shown_on_first or takes_from_first(unit.state_dict_settings.state_dict_config):
            raise TrainingStateError(
                f"A load inside summon_full_params must be on every rank, but unit `{unit.fqn or 'root'}` is shown, or "
                "has its state dict, on rank 0 alone. Load outside of the `with` block."
            )


@contextmanager
def _showing(unit: Unit, writeback: bool) -> Iterator[None]:
    """Show the parameters of ``unit``; inside `summon` they are already shown, including values written since."""
    if is_shown(unit):
        yield
        return
    settings = unit.state_dict_settings
    config = settings.state_dict_config
    from_first = takes_from_first(config)
    how = Showing(writeback, from_first, from_first, config.offload_to_cpu and not writeback)
    is_sharded = settings.state_dict_type is StateDictType.SHARDED_STATE_DICT
    with show_spans(unit) if is_sharded else show(unit, how):
        yield


class Loading:
    """Loads a state dict into a tree of units; shared by the hooks of ``load_state_dict``.

    ``nn.Module.load_state_dict`` walks the tree itself, and is not called on children. A wrapper's hooks run before and
    after its part.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._stack: ExitStack | None = None
        self._prefix = ""
        self.is_shared = False  # rank 0's state is already on this rank

    def begin(self, wrapper: nn.Module, state: dict[str, Any], prefix: str, assigns: bool) -> None:
        """Show the unit's parameters, and rename the entries of ``state`` to the names of the wrapper's tree.

        With ``assigns`` torch would replace the shown parameters with the entries; the entries are copied instead.
        """
        self.abandon()
        self._prefix = prefix
        settings = self._unit.state_dict_settings
        if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            raise FairshardError(
                f"A local state dict must be loaded by the wrapper itself, but a module around unit "
                f"`{self._unit.fqn or 'root'}` loads it. Call load_state_dict on the wrapper."
            )
        if takes_from_first(settings.state_dict_config) and not (self.is_shared or self._unit.is_inner):
            share_state(wrapper, self._unit, state, prefix)
        check_loads_inside([self._unit])
        name_in_tree = _Names(wrapper)
        for key in [key for key in state if key.startswith(prefix)]:
            state[f"{prefix}module.{name_in_tree(key[len(prefix) :])}"] = state.pop(key)
        self._stack = ExitStack()
        self._stack.enter_context(_showing(self._unit, writeback=True))
        if assigns:
            self._stack.enter_context(own_tensors_kept(modules_of(wrapper)))

    def end(self, keys: _IncompatibleKeys) -> None:
        """Write the loaded values into the shards; strip the wrapper from missing and unexpected names."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()
        inside = f"{self._prefix}module."
        for names in keys:
            names[:] = [
                self._prefix + clean_tensor_name(name[len(inside) :]) if name.startswith(inside) else name
                for name in names
            ]

    def abandon(self) -> None:
        """Undo `begin` after a load that raised; the shards do not change."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.__exit__(RuntimeError, RuntimeError("the load was interrupted"), None)

    def clean(self, text: str) -> str:
        """``text`` with the names of this part stripped of the wrapper."""
        return re.sub(rf"(?<![\w.]){re.escape(self._prefix)}module\.", self._prefix, text)

    def __getstate__(self) -> dict[str, Any]:
        return {"_unit": self._unit, "_stack": None, "_prefix": "", "is_shared": False}


class _Names:
    """Maps clean names of a wrapper's part to names in its tree, which contain torch.compile's parts."""

    def __init__(self, wrapper: nn.Module) -> None:
        own = [path for path, part in paths_of(wrapper) if COMPILED in part._modules]
        # torch's checkpoint wrapper adds its part of the name in its own hooks
        self._compiled = [".".join(p for p in path.split(".") if clean_tensor_name(p) or p == COMPILED) for path in own]

    def __call__(self, name: str) -> str:
        name = clean_tensor_name(name)
        for path in self._compiled:
            before = f"{path}." if path else ""
            if name.startswith(before):
                name = f"{before}{COMPILED}.{name[len(before) :]}"
        return name


def share_state(wrapper: nn.Module, unit: Unit, state: dict[str, Any], prefix: str) -> None:
    """Broadcast rank 0's entries of ``state`` below ``prefix``; sharded parameters become meta tensors.

    **Collective.**

    Raises:
        MixedGroupsError: the units use several process groups, each with its own rank 0.
    """
    comm = unit.comm
    root = unit.root
    assert comm is not None
    assert root is not None
    if any(other.comm is not comm for other in root.units):
        raise MixedGroupsError(
            "A state dict on rank 0 alone needs a model on one process group, but the units of this one use several, "
            "each with its own rank 0. Load it on every rank."
        )
    whole = {id(param) for other in root.units for param in other.origin.ignored.params}
    sharded = {
        clean_tensor_name(join(fqn, name))
        for fqn, module in walk(wrapper)
        for name, param in module._parameters.items()
        if id(param) not in whole
    }
    theirs: dict[str, Any] = {}
    if comm.rank == 0:
        for key, value in state.items():
            if key.startswith(prefix):
                if isinstance(value, Tensor):
                    is_sharded = clean_tensor_name(key[len(prefix) :]) in sharded
                    value = torch.empty(value.shape, dtype=value.dtype, device="meta") if is_sharded else value.cpu()
                theirs[key] = value
    theirs = broadcast_object(theirs, comm.group)
    if comm.rank != 0:
        for key in [key for key in state if key.startswith(prefix)]:
            del state[key]
        state.update(theirs)


def load_module_state_dict(
    wrapper: nn.Module,
    unit: Unit,
    loadings: list[Loading],
    state: Mapping[str, Any],
    load: Callable[[Any], _IncompatibleKeys],
    strict: bool,
) -> _IncompatibleKeys:
    """Call ``load(state)``, or if ``strict``, refuse DTensors where whole values are set.

    **Collective.** Errors show unwrapped names, and are raised on all ranks; then all `loadings` are abandoned.
    """
    assert unit.comm is not None
    error: Exception | None = None
    if not isinstance(state, Mapping):
        error = TypeError(
            f"`state_dict` must be a dictionary, but is {type(state).__name__}. Read a file with torch.load(path)."
        )
    elif strict:
        error = _refusal(wrapper, unit, state)
    raise_together([unit.comm], error)
    ready = _with_metadata(wrapper, state)
    if takes_from_first(unit.state_dict_settings.state_dict_config):
        share_state(wrapper, unit, ready, "")
        for loading in loadings:
            loading.is_shared = True
    keys = _IncompatibleKeys([], [])
    try:
        keys = load(ready)
    except Exception as raised:
        error = RuntimeError(_cleaned(str(raised), loadings)) if type(raised) is RuntimeError else raised
    finally:
        for loading in loadings:
            loading.is_shared = False
            loading.abandon()
    raise_together([unit.comm], error)
    return keys


def _refusal(wrapper: nn.Module, unit: Unit, state: Mapping[str, Any]) -> Exception | None:
    """The error for a ``state`` with DTensors where whole values are set, but for those of ignored modules."""
    if unit.state_dict_settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
        return None
    params = ((join(fqn, name), param) for fqn, part in walk(wrapper) for name, param in part._parameters.items())
    own = {clean_tensor_name(name) for name, param in params if isinstance(param, DTensor)}
    for key, value in state.items():
        if isinstance(value, DTensor) and clean_tensor_name(str(key)) not in own:
            return RuntimeError(
                f"A state dict must hold whole values while FULL_STATE_DICT is set, but `{key}` is a DTensor, as in "
                "state dicts of fully_shard. Save whole values there, with `torch.distributed.checkpoint.state_dict."
                "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))`; or set "
                "SHARDED_STATE_DICT here."
            )
    return None


def _with_metadata(wrapper: nn.Module, state: Mapping[str, Any]) -> Any:
    """Shallow copy of ``state``; its metadata (module versions) get the names of the wrapper's tree."""
    copied: Any = OrderedDict(state)
    metadata = getattr(state, "_metadata", None)
    if metadata is not None:
        fqns = {id(module): clean_tensor_name(fqn) for fqn, module in walk(wrapper)}
        own = {name: metadata.get(fqns[id(module)], {}) for name, module in _module_paths(wrapper)}
        copied._metadata = {name: dict(versions) for name, versions in own.items()}  # torch adds to them
    return copied


def _cleaned(text: str, loadings: Sequence[Loading]) -> str:
    """torch's error with the names of the wrapped module; `Loading.end` has cleaned its lists of keys before."""
    lines = text.split("\n")
    for place, line in enumerate(lines):
        if "key(s) in state_dict: " not in line:
            for loading in reversed(loadings):
                line = loading.clean(line)
        lines[place] = re.sub(r"(?<!\w)(_orig_mod|_checkpoint_wrapped_module)\.", "", line)
    return "\n".join(lines)


def _module_paths(module: nn.Module, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Like `walk`, but with the path of attributes to each module, which has ``module`` in it for each wrapper."""
    seen = set() if seen is None else seen
    if id(module) not in seen:
        seen.add(id(module))
        yield path, module
        for name, child in module._modules.items():
            if child is not None:
                yield from _module_paths(child, join(path, name), seen)
