"""One call of a unit: its leaves are the registered parameters while it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fairshard.engine.root import Root
from fairshard.engine.unit import Unit
from fairshard.errors import ParameterShardedError
from fairshard.utils.async_tensors import waited

_FREED = (
    "A forward must not read its unit's parameters after a backward has freed them, but a backward has run inside the "
    "forward of unit `{}`, which then reads one (Lightning's `manual_backward` runs inside the forward of the "
    "outermost wrapper). Call `backward` outside of the forward, or shard each network that is called again after the "
    "backward as a unit of its own."
)


def call_in(unit: Unit, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)`` as a forward of ``unit``, which has joined a root. **Collective.**"""
    root: Root = unit.root
    if root.in_backward:  # a reentrant checkpoint runs the call, and trains what is trained now
        unit.listing.following.follow()
    args, kwargs, call = root.pre_forward(unit, args, kwargs)
    args, kwargs = waited(args, kwargs)
    listing = unit.listing
    is_nested = listing.is_computing
    try:
        if not is_nested:
            listing.show()
        versions = listing.versions()
        outputs = function(*args, **kwargs)
        listing.check_unwritten(versions)
    except BaseException as error:
        is_freed = isinstance(error, ParameterShardedError) and not listing.is_on
        root.abort_forward(unit, is_nested)
        if is_freed:
            raise ParameterShardedError(_FREED.format(unit.fqn or "root")) from error
        raise
    return root.post_forward(unit, outputs, call, is_nested)
