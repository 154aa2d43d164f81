"""``parameters()`` of a unit's modules: gathered parameters while the modules compute, otherwise shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from fairshard.params.flat_param import FlatParam

# Parameters and attributes of a module, a name, what is registered, the leaf.
_Place = tuple[dict[str, nn.Parameter | None], dict[str, Any], str, nn.Parameter | None, nn.Parameter | None]


class Listing:
    """Registers the leaves of ``flat_params`` in place of their shards, while it is on.

    Where one shard is registered for several parameters, nothing is registered in its place meanwhile. A leaf is then
    no attribute beside the registered parameter, as it is otherwise while it is gathered: it would hide what
    ``functional_call`` puts there.

    *Invariant*: what others (``functional_call``) have put in a parameter's place stays there.
    """

    __slots__ = ("_places", "is_on")

    def __init__(self, flat_params: Sequence[FlatParam] = ()) -> None:
        self.is_on = False
        self._places: list[_Place] = [
            (module._parameters, module.__dict__, name, slot.registered, slot.leaf)
            for flat_param in flat_params
            for slot in flat_param.slots
            for module, name in slot.owners
        ]
        for flat_param in flat_params:
            holder, key = flat_param.shows.holder, flat_param.shows.key
            if holder is not None:
                self._places.append((holder._parameters, {}, key, flat_param.shard, None))

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``function(*args, **kwargs)`` while it is on; the leaves are gathered."""
        if self.is_on:
            return function(*args, **kwargs)
        self.show()
        try:
            return function(*args, **kwargs)
        finally:
            self.hide()

    def show(self) -> None:
        """Register the leaves, which are gathered."""
        self.is_on = True
        for params, attributes, name, registered, leaf in self._places:  # host time: nothing is called in this loop
            try:
                if params[name] is registered:
                    params[name] = leaf
                    del attributes[name]
            except KeyError:  # the user has deleted it, or it is no attribute
                continue

    def hide(self) -> None:
        """Register the shards again; a second time does nothing."""
        if self.is_on:
            self.is_on = False
            for params, attributes, name, registered, leaf in self._places:
                try:
                    if params[name] is leaf:
                        params[name] = registered
                        attributes[name] = leaf
                except KeyError:
                    continue
