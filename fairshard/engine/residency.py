"""When a unit is gathered and when it is freed: one pure function.

`Unit.on` asks `action` at every event of a unit, and does what it says; nothing else gathers or frees. *Invariant*:
every argument is the same on all ranks that gather together, so the answer is, too, and needs no message. No torch
here: the table is printed by ``python -m fairshard.engine.residency`` and tested like arithmetic.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class State(Enum):
    """What a rank holds of a unit."""

    SHARDED = "its shard"
    GATHERING = "its shard, and memory that a gather is filling"
    WHOLE = "its shard, and every parameter"


class Event(Enum):
    """What can happen to a unit."""

    PASS_BEGINS = "the outermost call begins"
    ENTER = "a call begins, or the unit is gathered ahead of its call"
    LEAVE = "a call ends; if the unit has several modules, the last of them"
    PASS_ENDS = "the outermost call ends"
    NEEDED = "the schedule says gather"
    UNNEEDED = "the schedule needs it no more for one forward"
    BACKWARD_ENDS = "the backward is over"
    UNSHARD = "the user gathers it"
    RESHARD = "the user frees it, or shows it in other memory"
    INTERRUPTED = "a backward that has raised is cleaned up"


class Action(Enum):
    """What the engine does."""

    NOTHING, GATHER, FREE = "-", "gather", "free"


class Keeps(NamedTuple):
    """What the user has asked for: when to free, and what to use again; read when a pass or a backward begins.

    ``reshard_after_forward``: False for the outermost unit, too, whose backward comes first (unless ``reshard_root``).
    ``keeps_across_passes``: the next forward may use what an earlier one has gathered, if no shard was written to.
    """

    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    keeps_across_passes: bool = False


def action(
    memory: State, event: Event, keeps: Keeps, *, stale: bool = False, open_calls: int = 0, recorded: bool = True,
    hidden: bool = False, pinned: bool = False,
) -> Action:  # fmt: skip
    """What the engine does with a unit in state ``memory`` at ``event``.

    Args:
        stale: the versions of its shards have moved since it was gathered.
        open_calls: its open calls, without the one that begins or ends.
        recorded: a backward may follow, because gradients were enabled.
        hidden: outputs hide their tensors, so that no hook could gather it again in time.
        pinned: the user has gathered it, and no call of it has ended since.
    """
    here = memory is not State.SHARDED
    if event is Event.ENTER:
        return Action.NOTHING if here and (open_calls or not stale) else Action.GATHER
    if event is Event.NEEDED or event is Event.UNSHARD:
        return Action.NOTHING if here else Action.GATHER
    if event is Event.PASS_BEGINS:
        frees = stale or not (keeps.keeps_across_passes or pinned)
    elif event is Event.LEAVE:
        frees = keeps.reshard_after_forward and not (recorded and hidden)
    elif event is Event.PASS_ENDS:
        frees = not pinned and (memory is State.GATHERING or not recorded)
    elif event is Event.UNNEEDED:
        frees = keeps.reshard_after_backward and not hidden
    elif event is Event.BACKWARD_ENDS:
        frees = keeps.reshard_after_backward and not (pinned or hidden)
    else:  # whoever asks has made sure that no call is open
        return Action.FREE if here else Action.NOTHING
    return Action.FREE if here and frees and not open_calls else Action.NOTHING


def table(keeps: Keeps = Keeps(), **facts: bool) -> str:  # noqa: B008 (immutable)
    """The actions by event and state, as text; ``facts``: see `action`."""
    rows = [[event.name, *(action(state, event, keeps, **facts).value for state in State)] for event in Event]
    header = ["", *(state.name for state in State)]
    return "\n".join(f"{row[0]:14}" + "".join(f"{cell:>11}" for cell in row[1:]) for row in [header, *rows])


if __name__ == "__main__":
    print(table())
