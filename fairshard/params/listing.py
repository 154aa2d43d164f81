"""``parameters()`` of a unit's modules: gathered parameters while the modules compute, otherwise shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import nn

from fairshard.params.slot import ParamSlot
from fairshard.utils.autograd import AlwaysAtEnd

# Parameters and attributes of a module, a name, what is registered, the leaf.
_Place = tuple[dict[str, nn.Parameter | None], dict[str, Any], str, nn.Parameter | None, nn.Parameter | None]


class Listing:
    """Registers the leaves of ``slots`` in place of their shards, while it is on.

    If one ``shard`` is registered for all of them, on ``holder`` as ``key``, nothing is registered there meanwhile. A
    leaf is then no attribute beside the registered parameter, as it is otherwise while it is gathered: it would hide
    what ``functional_call`` puts there.

    *Invariant*: what others (``functional_call``) have put in a parameter's place stays there.
    """

    __slots__ = ("_places", "is_on")

    def __init__(self, slots: Sequence[ParamSlot], holder: nn.Module | None, key: str, shard: nn.Parameter) -> None:
        self.is_on = False
        self._places: list[_Place] = [
            (module._parameters, module.__dict__, name, slot.registered, slot.leaf)
            for slot in slots
            for module, name in slot.owners
        ]
        if holder is not None:
            self._places.append((holder._parameters, {}, key, shard, None))

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


class _Listed(Protocol):
    listing: Listing
    is_gathered: bool


def show_leaves(flat_params: Iterable[_Listed]) -> list[Listing]:
    """Register the leaves of ``flat_params``, which are gathered; returns those that were not shown before."""
    shown = [flat_param.listing for flat_param in flat_params if not flat_param.listing.is_on]
    for listing in shown:
        listing.show()
    return shown


def list_for_recomputation(flat_params: Iterable[_Listed]) -> None:
    """As `show_leaves`, until they are resharded or the graph task is over, because a checkpoint may recompute."""
    shown = show_leaves(flat_param for flat_param in flat_params if flat_param.is_gathered)
    if shown:
        AlwaysAtEnd(partial(hide_leaves, shown))


def hide_leaves(shown: list[Listing]) -> None:
    """Undo `show_leaves`."""
    for listing in shown:
        listing.hide()
