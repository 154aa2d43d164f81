"""Functions that run when a graph task of autograd ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from fairshard.params.listing import Listing
from fairshard.utils.autograd import at_end_of_task
from fairshard.utils.dynamo import not_traced, set_tracer


class _Token:
    """Held by a graph task; hides ``listings`` when the task ends, even after an exception."""

    def __init__(self, listings: list[Listing]) -> None:
        self.listings = listings

    @not_traced
    def __del__(self) -> None:
        tracer = set_tracer(None)
        for listing in self.listings:
            listing.hide()
        set_tracer(tracer)


def at_end(end: Callable[[], None], listings: list[Listing]) -> weakref.ref[_Token]:
    """Call ``end`` when the graph task ends; the returned reference dies with the task, even after an exception."""
    token = _Token(listings)

    @not_traced
    def call(_held: _Token = token) -> None:
        tracer = set_tracer(None)
        try:
            end()
        finally:
            set_tracer(tracer)

    at_end_of_task(call)
    return weakref.ref(token)
