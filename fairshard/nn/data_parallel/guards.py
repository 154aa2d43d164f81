"""What the two entry points refuse: each other's arguments and names, containers, and torch's state dict functions."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from fairshard.engine.tree import is_wrapper
from fairshard.engine.unit import Unit
from fairshard.errors import ParameterShardedError
from fairshard.settings.check import require
from fairshard.utils.keywords import named_keywords
from fairshard.utils.user_line import level_of_user

_POLICY = "`mp_policy=MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...)`"
_NAMES_STAY = "Leave it out: fully_shard keeps the parameters' names and shapes."

wrapper_keywords = named_keywords(
    "FullyShardedDataParallel",
    {
        "mesh": "It is `device_mesh` here.",
        "mp_policy": "Pass `mixed_precision=MixedPrecision(param_dtype=..., reduce_dtype=...)`; `mp_policy` is an "
        "argument of fully_shard.",
        "offload_policy": "Pass `cpu_offload=True`; `offload_policy` is an argument of fully_shard.",
        "shard_placement_fn": "It is `placement_fn` here, with `use_orig_params=True`.",
        "dp_mesh_dims": "Pass the data-parallel mesh as `device_mesh`; `dp_mesh_dims` is an argument of fully_shard.",
    },
)
"""Decorator of the wrapper's constructor that names misspelt arguments, and those of `fully_shard`."""

in_place_keywords = named_keywords(
    "fully_shard",
    {
        "process_group": "Pass `mesh=DeviceMesh.from_group(process_group, device_type)`; `process_group` is an "
        "argument of FullyShardedDataParallel.",
        "device_mesh": "It is `mesh` here.",
        "mixed_precision": f"Pass {_POLICY}; `mixed_precision` is an argument of FullyShardedDataParallel.",
        "compute_dtype": f"Pass {_POLICY}; `compute_dtype` is an argument of FullyShardedDataParallel.",
        "cpu_offload": "Pass `offload_policy=CPUOffloadPolicy()`; `cpu_offload` is an argument of "
        "FullyShardedDataParallel.",
        "sharding_strategy": "Pass `reshard_after_forward` (True is FULL_SHARD, False is SHARD_GRAD_OP), and a 2-D "
        "`mesh` for hybrid strategies; `sharding_strategy` is an argument of FullyShardedDataParallel.",
        "auto_wrap_policy": "Call fully_shard on each of the inner modules, then on the whole model.",
        "ignored_modules": "Pass their parameters as `ignored_params`.",
        "ignored_states": "Pass the parameters as `ignored_params`.",
        "use_orig_params": _NAMES_STAY,
        "flatten_parameters": _NAMES_STAY,
    },
)
"""Decorator of `fully_shard` that names misspelt arguments, and those of the wrapper."""

_OF_WRAPPER, _OF_IN_PLACE = "an attribute of FullyShardedDataParallel", "a method of models sharded by fully_shard"
_GUARDS = {
    "clip_grad_norm_": (_OF_WRAPPER, "Call `torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)`."),
    "no_sync": (
        _OF_WRAPPER,
        "Call `model.set_requires_gradient_sync(False)`, and with True before the last backward of a step.",
    ),
    "summon_full_params": (
        _OF_WRAPPER,
        "Read `param.full_tensor()` on all ranks, or call `model.unshard()` and then `model.reshard()`.",
    ),
    "module": (_OF_WRAPPER, "The model itself is the module."),
    "set_requires_gradient_sync": (_OF_IN_PLACE, "Use `with model.no_sync():`."),
    "set_is_last_backward": (_OF_IN_PLACE, "Use `with model.no_sync():` around all backwards but the last."),
    "unshard": (_OF_IN_PLACE, "Read whole parameters inside `with model.summon_full_params():`."),
    "reshard": (
        _OF_IN_PLACE,
        "The wrapper frees parameters by itself; see its argument `reshard_after_forward`.",
    ),
    "set_reshard_after_forward": (_OF_IN_PLACE, "Pass `reshard_after_forward` to the wrapper."),
}
"""By name: the entry point whose modules have it, and the cure for those of the other one."""


def check_other_door(name: str) -> None:
    """Raise if ``name``, which a sharded module does not have, is a name of the other entry point.

    Raises:
        AttributeError: with the cure; so that ``hasattr`` is False.
    """
    if name in _GUARDS:
        what, cure = _GUARDS[name]
        raise AttributeError(f"`{name}` is {what}, but this model was sharded by the other entry point. {cure}")


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def lacks_forward(module: nn.Module) -> bool:
    """Whether ``module`` is a container, to which neither its class nor the user has given a forward."""
    is_own = type(module).forward is not nn.Module.forward or "forward" in vars(module)
    return isinstance(module, _CONTAINERS) and not is_own


def check_wrappable(module: Any) -> None:
    """Check that ``module`` can be wrapped; warn if it is a wrapper already.

    Raises:
        TypeError: it is not a module.
        ValueError: it is a container, which has no forward.
    """
    require(isinstance(module, nn.Module), f"`module` must be an nn.Module, but is {type(module).__name__}.", TypeError)
    require(
        not lacks_forward(module),
        f"A wrapped module must have a forward, but a {type(module).__name__} has none: nothing would gather its "
        "parameters. Wrap the modules in it, or the module around it.",
    )
    if is_wrapper(module):
        warnings.warn(
            "A FullyShardedDataParallel around another one has no effect: it has no parameters of its own. Wrap the "
            "module once.",
            stacklevel=level_of_user(),
        )


def refuse_torch_functions(unit: Unit) -> None:
    """Refuse ``torch.distributed.checkpoint.state_dict`` over the wrapper of ``unit``, unless its parameters are whole.

    Its functions take the parameters that modules register for whole ones, or for DTensors; a wrapper registers this
    rank's shards, whose optimizer state they would save as the whole. They look for ``_fqn_modifiers`` on each module
    with children before they read or write anything, and nothing else does: there the wrapper calls this. All ranks
    call these functions, so all ranks raise.

    Raises:
        ParameterShardedError: the result would hold this rank's shards in place of whole values.
    """
    if not all(flat_param.shows.keeps_shapes for flat_param in unit.flat_params):
        raise ParameterShardedError(
            "Functions of torch.distributed.checkpoint.state_dict must find whole parameters or DTensors, but "
            f"FullyShardedDataParallel registers this rank's shards (unit `{unit.fqn or 'root'}`). Call "
            "`model.state_dict()` and `model.load_state_dict(state)`; for an optimizer "
            "`FullyShardedDataParallel.optim_state_dict(model, optimizer)` and "
            "`FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)`; or "
            "`fairshard.checkpoint.save` and `load`."
        )
