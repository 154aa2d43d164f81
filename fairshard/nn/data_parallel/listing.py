"""What ``parameters()`` of a unit's modules yields: what is registered, or what is gathered while they compute."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Protocol

from torch import nn

from fairshard.nn.data_parallel.autograd_hooks import AlwaysAtEnd
from fairshard.nn.data_parallel.param_slot import ParamSlot

_Place = tuple[dict[str, nn.Parameter | None], str, nn.Parameter | None, nn.Parameter | None]


class Listing:
    """The leaves of ``slots`` in the place of what is registered, while it is on.

    Where one ``shard`` is registered for all of them, on ``holder`` as ``key``, nothing is listed there meanwhile.

    *Invariant*: what somebody else has put in a parameter's place (``functional_call``) stays there.
    """

    __slots__ = ("_places", "is_on")

    def __init__(
        self, slots: Sequence[ParamSlot], holder: nn.Module | None, key: str, shard: nn.Parameter
    ) -> None:
        self.is_on = False
        self._places: list[_Place] = [
            (module._parameters, name, slot.registered, slot.leaf) for slot in slots for module, name in slot.owners
        ]
        if holder is not None:
            self._places.append((holder._parameters, key, shard, None))

    def show(self) -> None:
        """List the leaves, which are gathered."""
        self.is_on = True
        for params, name, registered, leaf in self._places:  # host time: nothing is called in this loop
            try:
                if params[name] is registered:
                    params[name] = leaf
            except KeyError:  # the user has deleted it
                continue

    def hide(self) -> None:
        """List what is registered; a second time does nothing."""
        if self.is_on:
            self.is_on = False
            for params, name, registered, leaf in self._places:
                try:
                    if params[name] is leaf:
                        params[name] = registered
                except KeyError:
                    continue


class _Listed(Protocol):
    listing: Listing
    is_gathered: bool


def show_leaves(flat_params: Iterable[_Listed]) -> list[Listing]:
    """List the leaves of ``flat_params``, which are gathered; returns what has not been shown before this call."""
    shown = [flat_param.listing for flat_param in flat_params if not flat_param.listing.is_on]
    for listing in shown:
        listing.show()
    return shown


def list_for_recomputation(flat_params: Iterable[_Listed]) -> None:
    """As `show_leaves`, until they are resharded, or the running backward is over: a checkpoint may recompute."""
    shown = show_leaves(flat_param for flat_param in flat_params if flat_param.is_gathered)
    if shown:
        AlwaysAtEnd(partial(hide_leaves, shown))


def hide_leaves(shown: list[Listing]) -> None:
    """Undo `show_leaves`."""
    for listing in shown:
        listing.hide()
