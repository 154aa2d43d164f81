"""Keys of optimizer state dicts: numbers, as in torch, or parameter names."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from torch import nn
from torch.optim import Optimizer

from fairshard.state.optim_params import OptimParams, ids_of


class OptimStateKeyType(Enum):
    """Kind of the keys of optimizer state."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


def rekey(
    saved: dict[str, Any], key_type: Any, model: nn.Module, optim: Optimizer | None, optim_input: Any
) -> dict[str, Any]:
    """``saved`` with keys of ``key_type``; ``saved`` itself if it already has them. ``model`` is not wrapped.

    Raises:
        TypeError: ``key_type`` is not an `OptimStateKeyType`.
        ValueError: the keys mix names and numbers, or a key belongs to no parameter.
    """
    wanted = OptimStateKeyType.__members__.get(getattr(key_type, "name", ""))
    if wanted is None:
        raise TypeError(
            "`optim_state_key_type` must be OptimStateKeyType.PARAM_NAME or OptimStateKeyType.PARAM_ID, but is "
            f"{key_type!r}."
        )
    used = [key for group in saved.get("param_groups", []) for key in group["params"]]
    kinds = {type(key) for key in [*saved["state"], *used]}
    if kinds == {int, str} or not kinds <= {int, str}:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"The keys of optimizer state must be all numbers or all names, but are {names}.")
    if not kinds or kinds == ({int} if wanted is OptimStateKeyType.PARAM_ID else {str}):
        return saved
    params = OptimParams(model)
    groups = params.groups_of(optim, optim_input)
    if any(len(named.names) > 1 for named in params):
        raise ValueError(
            "`model` must be the unwrapped module, whose optimizer numbers original parameters, but it has units of "
            "several parameters. Pass a module built as before wrapping."
        )
    by_number = {number: params.of(param).first_names[0] for param, number in ids_of(groups).items()}
    new_keys: Mapping[Any, Any] = by_number
    if wanted is OptimStateKeyType.PARAM_ID:
        new_keys = {name: number for number, name in by_number.items()}
    unknown = [key for key in [*saved["state"], *used] if key not in new_keys]
    if unknown:
        raise ValueError(
            f"Every key of optimizer state must be a parameter of `model`, which has {len(new_keys)}, but "
            f"{unknown[0]!r} is not. Pass the unwrapped model that the state belongs to."
        )
    rekeyed: dict[str, Any] = {"state": {new_keys[key]: value for key, value in saved["state"].items()}}
    if "param_groups" in saved:
        rekeyed["param_groups"] = [
            {**group, "params": sorted(new_keys[key] for key in group["params"])} for group in saved["param_groups"]
        ]
    return rekeyed
