"""The functions of ``torch.distributed.checkpoint.state_dict`` over a wrapper: what they get wrong is refused by name.

These functions take the parameters that modules register for whole ones, or for DTensors; a wrapper registers this
rank's shards. On all versions only they call ``named_parameters(recurse=False)`` on every module of a model: there a
wrapper looks at its caller. All ranks call these functions, so all ranks raise.
"""

from __future__ import annotations

from types import FrameType

from fairshard.engine.unit import Unit
from fairshard.errors import ParameterShardedError
from fairshard.settings.state_dicts import StateDictType
from fairshard.setup.around import refuse_torchs_sharding

_WHERE = "torch.distributed.checkpoint.state_dict"
_SAVES = {"get_state_dict", "get_model_state_dict", "get_optimizer_state_dict"}
_LOADS = {"set_state_dict", "set_model_state_dict", "set_optimizer_state_dict"}
_SAVE_OPTIM = "FullyShardedDataParallel.optim_state_dict(model, optimizer)"
_LOAD_OPTIM = "optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state))"
_FULL_TYPE = "FullyShardedDataParallel.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)"


def refuse_torch_functions(unit: Unit, caller: FrameType | None) -> None:
    """Raise if ``caller``, which asks for parameters of ``unit``'s wrapper, is one of torch's functions that fail here.

    Raises:
        ParameterShardedError: the result would hold this rank's shards in place of whole values.
        ValueError: it is torch's ``fully_shard``.
    """
    refuse_torchs_sharding(unit, caller)
    while caller is not None and caller.f_globals.get("__name__") == _WHERE:
        name = caller.f_code.co_name
        if name in _SAVES | _LOADS:
            problem = _problem(unit, name, caller)
            if problem:
                raise ParameterShardedError(
                    f"`{name}` of {_WHERE} must find whole parameters or DTensors, but FullyShardedDataParallel "
                    f"registers this rank's shards (unit `{unit.fqn or 'root'}`), {problem}."
                )
            return
        caller = caller.f_back


def _problem(unit: Unit, name: str, frame: FrameType) -> str:
    """The mistake of the function ``name``, running in ``frame``, and the cure; empty if it makes none."""
    if all(flat_param.shows.keeps_shapes for flat_param in unit.flat_params):
        return ""
    options = frame.f_locals.get("options")
    if frame.f_locals.get("optimizers"):
        wrong = "so it would take their optimizer state for whole. Call "
        return wrong + (f"`{_SAVE_OPTIM}`" if name in _SAVES else f"`{_LOAD_OPTIM}`")
    if name in _LOADS and getattr(options, "full_state_dict", False):
        return "to which it cannot distribute `full_state_dict=True`. Call `model.load_state_dict(state)`"
    kind = unit.state_dict_settings.state_dict_type
    if name in _SAVES and getattr(options, "full_state_dict", False) and kind is not StateDictType.FULL_STATE_DICT:
        return f"which it cannot gather while {kind.name} is set. Call `{_FULL_TYPE}` first"
    flat = [flat_param for flat_param in unit.flat_params if flat_param.shows.holder is not None]
    is_frozen = any(not flat_param.shard.requires_grad for flat_param in flat)
    if name in _SAVES and is_frozen and getattr(options, "ignore_frozen_params", False):
        return "which do not have the names of its frozen parameters. Pass `use_orig_params=True` to the wrappers"
    return ""
