"""What the modules of a unit have registered: the leaves while they compute, otherwise the shards.

::

    modules     `_parameters`                  attribute
    compute     the leaf, whole                none: it would hide a tensor that `functional_call` puts there
    rest        the shard's face, or nothing   a placeholder that raises, if nothing is registered
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from fairshard.params.flat_param import FlatParam

# Parameters and attributes of a module, a name, the registered parameter, the leaf, the placeholder.
_Params = dict[str, nn.Parameter | None]
_Place = tuple[_Params, dict[str, Any], str, nn.Parameter | None, nn.Parameter | None, object]


class Registered:
    """The places of the parameters of ``flat_params``; the shards are registered at first.

    *Invariant*: a tensor that other code (``functional_call``) has put in a parameter's place stays there.
    """

    __slots__ = ("_places", "are_leaves")

    def __init__(self, flat_params: Sequence[FlatParam] = ()) -> None:
        self.are_leaves = False
        self._places: list[_Place] = [
            (module._parameters, module.__dict__, name, slot.registered, slot.leaf, slot.placeholder)
            for flat_param in flat_params
            for slot in flat_param.slots
            for module, name in slot.owners
        ]
        for flat_param in flat_params:
            if flat_param.shows.place is not None:
                holder, key = flat_param.shows.place
                self._places.append((holder._parameters, {}, key, flat_param.shard, None, None))

    def swap(self, to_leaves: bool) -> None:
        """Register the leaves, which show gathered memory, or the shards; no-op if they are registered."""
        if self.are_leaves is to_leaves:
            return
        self.are_leaves = to_leaves
        if not to_leaves:
            for params, attributes, name, registered, leaf, placeholder in self._places:  # few calls: host time
                if name in params and params[name] is leaf:
                    params[name] = registered
                    if placeholder is not None:
                        attributes[name] = placeholder
            return
        for params, attributes, name, registered, leaf, placeholder in self._places:
            if name not in params:
                continue  # the user has deleted it
            if params[name] is registered:
                params[name] = leaf
            elif placeholder is None or attributes.get(name) is not placeholder:
                continue
            if placeholder is not None:  # it would hide the leaf, or what the user has put there
                attributes.pop(name, None)
