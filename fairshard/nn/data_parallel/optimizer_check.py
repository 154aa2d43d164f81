"""An optimizer that would step nothing, or half a gradient, is told so at its first step."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from fairshard.errors import StaleOptimizerError
from fairshard.nn.data_parallel.flat_param import FlatParam
from fairshard.nn.data_parallel.param_slot import ParamSlot

# Which original parameters are leaves now; how many there were, and how many it held, when an optimizer was clean.
_sharded: WeakIdKeyDictionary = WeakIdKeyDictionary()
_clean: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
_num_sharded = 0
_is_installed = False


def watch_optimizers(flat_params: list[FlatParam]) -> None:
    """From now on, raise at the first step of an optimizer that holds an original parameter of ``flat_params``."""
    global _num_sharded, _is_installed
    for flat_param in flat_params:
        for slot in flat_param.slots:
            _sharded[slot.leaf] = weakref.ref(slot)  # a slot holds its leaf, which would never go away
            _num_sharded += 1
    if not _is_installed:
        register_optimizer_step_pre_hook(_before_step)
        _is_installed = True


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    seen = _num_sharded, sum(len(group["params"]) for group in optimizer.param_groups)
    if _clean.get(optimizer) == seen:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            slot: weakref.ref[ParamSlot] | None = _sharded.get(param)
            if slot is not None:
                known = slot()
                name = known.fqn if known else "of a model that is gone"
                raise StaleOptimizerError(
                    f"An optimizer must be built after wrapping, but {type(optimizer).__name__} holds the original "
                    f"parameter `{name}`, which has become a shard: stepping it would change nothing. Build the "
                    "optimizer from `model.parameters()` of the wrapped model."
                )
    _clean[optimizer] = seen
