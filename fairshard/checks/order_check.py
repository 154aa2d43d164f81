"""Records which units this rank has run, and in which order, to report its position and differences among ranks.

The exchange that plans a backward (`Backward`) compares the ranks before anything else is communicated. It compares a
hash of all calls that await a backward, so no forward goes unnoticed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NoReturn

import torch.distributed as dist

from fairshard.engine.unit import Unit
from fairshard.errors import RanksDisagreeError
from fairshard.utils.collectives import Communicator
from fairshard.utils.positions import BEGINS_BACKWARD, BEGINS_FORWARD, Place, first_difference

_MAX_NOTED = 1 << 15  # per step; without a limit, forwards with grad but no backward would accumulate forever
_FORWARD, _BACKWARD = -1, -2  # the start of a pass; all other numbers are units


def check_settings(units: Sequence[Unit]) -> None:
    """Raise unless the options of the whole model are equal in all of ``units``, outermost first.

    Raises:
        ValueError: an inner unit has a different ``order_check`` or ``nan_check``.
    """
    outer = units[0]
    for unit in units:
        for name in ("order_check", "nan_check"):
            wanted, found = getattr(outer.config, name), getattr(unit.config, name)
            if found != wanted:
                raise ValueError(
                    f"`{name}` must be the same in all wrappers of a model, but is {found!r} in unit `{unit.fqn}` and "
                    f"{wanted!r} in `{outer.fqn or 'root'}`, the outermost. Pass the same value to both."
                )


class OrderCheck:
    """The units that the running step has called, gathered and sent.

    A step ends with a backward that reduces gradients, and includes the passes before it under ``no_sync``.
    Recomputation by a checkpoint is not recorded, and a pass without gradients is not compared. Units without
    communication do not count.
    """

    def __init__(self, units: list[Unit], comms: Sequence[Communicator]) -> None:
        self._names = [unit.fqn or "root" for unit in units]
        self._numbers = {unit: number for number, unit in enumerate(units)}
        self._shared = {
            number
            for unit, number in self._numbers.items()
            if _num_ranks(unit) > 1 and any(flat_param.has_elements for flat_param in unit.flat_params)
        }
        self._comms = [comm for comm in comms if comm.world_size > 1 and comm.is_real]
        self.step = 1
        self.noted: list[int] = []  # the running step, or a pass that is not compared
        self._trained = self.noted
        self._kept = 0  # length of the part that is kept after an exception
        self._begun = 0
        self._phase = "between passes, before the first one"

    # ---- called by the root

    def begin_forward(self, is_compared: bool) -> None:
        """A pass through the model starts; it is not compared if ranks may run different passes, as in ``join``."""
        if is_compared:
            self.noted = self._trained
            if len(self.noted) > _MAX_NOTED:
                self.noted.clear()
                self._kept = 0
            self._phase = f"in the forward of step {self.step}"
        else:
            self.noted = []
            self._phase = f"in a forward without gradients, after step {self.step - 1}"
        self._begun = len(self.noted)
        self.noted.append(_FORWARD)

    def note(self, unit: Unit) -> None:
        """``unit`` is called, gathered or sent."""
        self.noted.append(self._numbers[unit])

    def end_forward(self, completed: bool) -> None:
        """The pass is over; drops one that raised."""
        if not completed:
            self._phase = f"after it raised {self.place().text}"
            del self.noted[self._begun :]
            return
        is_trained = self.noted is self._trained
        self._phase = f"after the forward of step {self.step}" if is_trained else "after a forward without gradients"

    def begin_backward(self) -> None:
        """A backward starts."""
        self.noted = self._trained
        self.noted.append(_BACKWARD)
        self._phase = f"in the backward of step {self.step}"

    def end_backward(self, ends_step: bool, is_common: bool) -> None:
        """A backward is over; with ``ends_step`` it has reduced gradients, and the optimizers step next.

        Drops the record of a step that is not ``is_common`` to all ranks.
        """
        self._phase = f"after the backward of step {self.step}"
        self.step += ends_step
        if ends_step or not is_common:
            self.noted = self._trained = []
        self._kept = len(self.noted)

    def forget(self) -> None:
        """Drop the record of an interrupted pass, which may be run again."""
        self.noted = self._trained
        del self.noted[self._kept :]
        self._phase = f"after a pass of step {self.step} that raised"

    def raise_difference(self, state: str) -> NoReturn:
        """Raise, because ranks have run different things. **Collective.**

        Args:
            state: what else must be the same on all ranks, in words.

        Raises:
            RanksDisagreeError: with the first unit in which ranks differ, or with the states if the units agree.
        """
        known = {dist.get_rank(): ([Place("", self.step, self._words(self.noted))], state)}
        for comm in self._comms:
            for others in comm.gather_objects(known):
                known.update(others)
        found = first_difference({rank: places for rank, (places, _) in known.items()}, to_the_end=True)
        found = found or _different_states({rank: state for rank, (_, state) in known.items()})
        raise RanksDisagreeError(
            f"{found} This was noticed {self._phase}. Every rank must run the same units in the same order; otherwise "
            "it would compute with the parameters of others."
        )

    # ---- this rank's position

    def place(self) -> Place:
        """The current position in training."""
        noted = list(self.noted)
        text = self._phase
        last = next((number for number in reversed(noted) if number >= 0), None)
        if last is not None and not text.startswith("after it raised"):
            text += f", at `{self._names[last]}`"
        return Place(text, self.step, self._words(noted if self.noted is self._trained else []))

    def progress(self) -> Hashable:
        """A value that changes with every recorded unit."""
        return self.step, len(self.noted), self._phase

    def _words(self, noted: list[int]) -> tuple[str, ...]:
        """``noted`` as names, each with the kind of its pass."""
        words: list[str] = []
        kind = "forward"
        for number in noted:
            if number < 0:
                kind = "forward" if number == _FORWARD else "backward"
                words.append(BEGINS_FORWARD if number == _FORWARD else BEGINS_BACKWARD)
            elif number in self._shared:
                words.append(f"`{self._names[number]}` ({kind})")
        return tuple(words)


def _different_states(states: dict[int, str]) -> str:
    """The difference among ranks that have run the same units, as a sentence."""
    ranks_in: dict[str, list[int]] = {}
    for rank, state in sorted(states.items()):
        ranks_in.setdefault(state, []).append(rank)
    if len(ranks_in) == 1:
        return "The same units are inside a checkpoint on some ranks, but not on others."
    text = " ".join(f"On rank {', '.join(map(str, ranks))}, {state}." for state, ranks in ranks_in.items())
    return (
        f"{text} If a backward has raised, its error is in the log of that rank. The others have summed "
        "gradients without that rank's part, and may have stepped: restart all ranks from the last checkpoint."
    )


def _num_ranks(unit: Unit) -> int:
    groups = unit.groups
    return groups.shard.world_size * (1 if groups.replicas is None else groups.replicas.world_size)
