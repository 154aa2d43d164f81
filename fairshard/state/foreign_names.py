"""State dicts that were made for something else: recognised by their names and values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fairshard.engine.tree import walk
from fairshard.utils.names import clean_tensor_name, join

_PREFIXES = {"module.": "DistributedDataParallel", "_orig_mod.": "torch.compile"}


def check_names(module: nn.Module, state: Mapping[str, Any], is_flat: bool) -> None:
    """Check that ``state`` could be a state dict of ``module``, which a wrapper has made flat, or `fully_shard` not.

    Raises:
        RuntimeError: its names have a prefix of another wrapper, or it holds shards, or other dictionaries.
    """
    problem = _problem(module, state, is_flat) if state else ""
    if problem:
        raise RuntimeError(f"A state dict must map the names of {type(module).__name__} to tensors, but {problem}")


def _problem(module: nn.Module, state: Mapping[str, Any], is_flat: bool) -> str:
    for prefix, made_by in _PREFIXES.items():
        if prefix[:-1] not in module._modules and all(str(key).startswith(prefix) for key in state):
            return (
                f"all its names begin with `{prefix}`, as those of {made_by} do, such as `{next(iter(state))}`. Remove "
                "the prefix: `torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state_dict, "
                f'"{prefix}")`.'
            )
    flat = [key for key in state if re.search(r"(^|\.)flat_param_\d+$", str(key))]
    if flat:
        how = "Load it with `load_local_state_dict`, or save" if is_flat else "Save"
        return (
            f"`{flat[0]}` is the shard of one rank, from `local_state_dict`. {how} the result of `state_dict()`, which "
            "any wrapping and number of ranks can load."
        )
    nested = [key for key, value in state.items() if isinstance(value, Mapping) and not _is_extra(key)]
    if nested and not any(isinstance(value, Tensor) for value in state.values()):
        held = [key for key in nested if any(isinstance(value, Tensor) for value in state[key].values())]
        if held:
            return f"it holds dictionaries: {', '.join(map(repr, nested))}. Load `state_dict[{held[0]!r}]`."
    return ""


def _is_extra(key: str) -> bool:
    return key.endswith("_extra_state")


def check_whole(wrapper: nn.Module, state: Mapping[str, Any]) -> None:
    """Check that ``state`` holds no DTensors, except for those of modules that ``wrapper`` ignores.

    Raises:
        RuntimeError: it does; the message names the first.
    """
    own = {
        clean_tensor_name(join(fqn, name))
        for fqn, part in walk(wrapper)
        for name, param in part._parameters.items()
        if isinstance(param, DTensor)
    }
    for key, value in state.items():
        if isinstance(value, DTensor) and clean_tensor_name(str(key)) not in own:
            raise RuntimeError(
                f"A state dict must hold whole values while FULL_STATE_DICT is set, but `{key}` is a DTensor, as in "
                "state dicts of fully_shard. Save whole values there, with `torch.distributed.checkpoint.state_dict."
                "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))`; or set "
                "SHARDED_STATE_DICT here."
            )
