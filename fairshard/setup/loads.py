"""Bytes of parameters that each rank of a group owns in units of models that have not run yet.

Units are sharded one after the other, inner ones first, and know neither their siblings nor their model: they are
counted together, so that ranks own about as much of the whole model. (Parameters are cut, and optimizers hold them,
long before the whole model is known.) Ranks count alike if they shard the same units in the same order; the first
forward compares owners across ranks, and counts anew (`forget_loads`). Deleted units stay counted until then, because
ranks may delete at different times.
"""

from __future__ import annotations

import weakref

from torch.distributed import ProcessGroup

_loads: weakref.WeakKeyDictionary[ProcessGroup, list[int]] = weakref.WeakKeyDictionary()


def loads_in(group: ProcessGroup) -> list[int]:
    """The bytes that each rank of ``group`` owns; callers count what they place."""
    return _loads.setdefault(group, [0] * group.size())


def forget_loads(group: ProcessGroup) -> None:
    """Count anew on ``group``: its ranks make a model."""
    _loads.pop(group, None)
