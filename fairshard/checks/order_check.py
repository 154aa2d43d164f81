"""Records which units this rank has run, and in which order, to report its position and differences among ranks.

The exchange that plans a backward (`Backward`) compares the ranks before anything else is communicated. It compares a
hash of all calls that await a backward, so no forward goes unnoticed, and the `history` of the model: all gathers of
forwards, with gradients or not, and the numbers of passes and optimizer steps. Saves compare the history, too.

Gathers of several models over one group match by their order alone, so the order among models is compared as well.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NoReturn

import torch.distributed as dist

from fairshard.checks.positions import BEGINS_BACKWARD, BEGINS_FORWARD, GATHERED_AGAIN, Place, first_difference
from fairshard.checks.watchdog import watch
from fairshard.engine.observer import Observer
from fairshard.engine.residency import State
from fairshard.engine.root import Root
from fairshard.engine.unit import Unit
from fairshard.errors import RanksDisagreeError
from fairshard.params.flat_param import FlatParam
from fairshard.utils.collectives import Communicator

_MAX_NOTED = 1 << 15  # per step; without a limit, forwards with grad but no backward would accumulate forever
_MAX_NAMED = 4

# `map` with it costs no Python call per unit.
_TRAINED: Callable[[FlatParam], bytes] = attrgetter("trained")
_FACTOR, _MASK = 0x100000001B3, (1 << 62) - 1  # of a rolling hash
_FORWARD, _BACKWARD = -1, -2  # the start of a pass; units count from 0, twice if gathered again


@dataclass(frozen=True)
class Recorded:
    """What one rank has run, for the error that names a difference.

    Attributes:
        phase: where it is, in words.
        trained: the units of the running step.
        gathered: the gathers of forwards since the last backward, also without gradients and ahead of calls, of all
            models of the same ranks: the place of the model (see `GatherOrder`), and the name of the unit.
        state: what else must be the same on all ranks, in words, by name.
    """

    phase: str
    trained: Place
    gathered: list[tuple[int, str]]
    state: dict[str, str]


@dataclass
class GatherOrder:
    """The gathers of forwards that one group of ranks has seen, of all its models, since a model was last added.

    Attributes:
        num_models: models of the group so far; the place of a model counts from 1, in the order of first passes.
        hash: a hash of the gathers.
        noted: the gathers since the last backward, with the model's place and the unit's name.
    """

    num_models: int = 0
    hash: int = 0
    noted: list[tuple[int, str]] = field(default_factory=list)

    def add_model(self) -> int:
        """Add a model, at the same moment on all ranks; returns its place.

        The gathers before are forgotten: ranks may have differed in models that they have dropped since.
        """
        self.num_models += 1
        self.hash = 0
        self.noted.clear()
        return self.num_models

    def note(self, place: int, number: int, name: str) -> None:
        """The unit ``number`` of the model at ``place`` is gathered."""
        self.hash = ((self.hash * _FACTOR + place) * _FACTOR + number + 1) & _MASK
        if len(self.noted) < _MAX_NOTED:
            self.noted.append((place, name))


_orders: weakref.WeakKeyDictionary[Communicator, GatherOrder] = weakref.WeakKeyDictionary()


class OrderCheck(Observer):
    """The units that the running step has called, gathered and sent.

    A step ends with a backward that reduces gradients, and includes the passes before it under ``no_sync``.
    Recomputation by a checkpoint is not recorded. Of a pass without gradients only the gathers are compared, because
    calls of gathered units concern no other rank. Units without communication do not count. Nothing in ``join`` counts.
    """

    def __init__(self, units: list[Unit], comms: Sequence[Communicator]) -> None:
        self._names = [unit.fqn or "root" for unit in units]
        self._numbers = {unit: number for number, unit in enumerate(units)}
        self._shared = {
            number
            for unit, number in self._numbers.items()
            if _num_ranks(unit) > 1 and any(flat_param.line.numel for flat_param in unit.flat_params)
        }
        self._comms = [comm for comm in comms if comm.peers]
        self._gathers = dict.fromkeys(self._comms, 0)  # a hash of the gathers that each group has seen
        own = {unit: unit.groups.communicators() for unit in units}
        self._group_of = {unit: own[unit].shard for unit in units}
        self._params_of = {
            comm: [each for unit in units if comm in (own[unit].shard, own[unit].replicas) for each in unit.flat_params]
            for comm in comms
        }
        self._orders = {comm: _orders.setdefault(comm, GatherOrder()) for comm in self._comms}
        self._places = {comm: order.add_model() for comm, order in self._orders.items()}
        self._units = units
        self.in_join = False  # some ranks may have no batches left, ...
        self.is_partial = False  # ... and some have none
        self.has_begun = False  # a forward has been run
        self.num_forwards = self.num_steps = self.num_interrupted = 0
        self.step = 1
        self.noted: list[int] = []  # the running step, or a pass that is not compared
        self._trained = self.noted
        self._kept = 0  # length of the part that is kept after an exception
        self._begun = 0
        self._phase = "between passes, before the first one"

    @staticmethod
    def of(root: Root) -> OrderCheck:
        """The order check of ``root``."""
        return next(observer for observer in root.observers if isinstance(observer, OrderCheck))

    # ---- events

    def pass_begins(self, unit: Unit, is_trained: bool) -> None:
        """A pass through the model starts; it is not compared if ranks may run different passes, as in ``join``."""
        self.has_begun = True
        if is_trained and not self.in_join and self._units[0].root.is_common:
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
        self.watch()

    def watch(self) -> None:
        """Report the position of the calling thread from now on; see ``watchdog.py``."""
        watch(self)

    def call_enters(self, unit: Unit) -> None:
        """``unit`` is called."""
        self.noted.append(self._numbers[unit])

    def grads_sent(self, unit: Unit) -> None:
        """The gradients of ``unit`` are sent."""
        self.noted.append(self._numbers[unit])

    def gather(self, unit: Unit, in_backward: bool) -> None:
        """``unit`` is gathered; if it was already, this rank has written to it, and the others must have, too."""
        if in_backward:
            self.noted.append(self._numbers[unit])
            return
        if unit.memory is not State.SHARDED:
            self.noted.append(self._numbers[unit] + len(self._names))
        if self.in_join:
            return
        number, comm = self._numbers[unit], self._group_of[unit]
        if comm in self._gathers and number in self._shared:
            self._gathers[comm] = (self._gathers[comm] * _FACTOR + number + 1) & _MASK
            self._orders[comm].note(self._places[comm], number, self._names[number])

    def call_leaves(self, unit: Unit, completed: bool, is_last: bool) -> None:
        """A call is over; drops a pass that raised."""
        if not is_last:
            return
        if not completed:
            self._phase = f"after it raised {self.place().text}"
            del self.noted[self._begun :]
            return
        is_trained = self.noted is self._trained
        self.num_forwards += is_trained
        self._phase = f"after the forward of step {self.step}" if is_trained else "after a forward without gradients"

    def backward_begins(self, passes: Sequence[Any]) -> None:
        """A backward starts."""
        self.noted = self._trained
        self.noted.append(_BACKWARD)
        self._phase = f"in the backward of step {self.step}"

    def backward_ends(self, is_reached: bool, reduces: bool) -> None:
        """A backward is over; if it ``reduces`` gradients, the optimizers step next."""
        self.end_backward(reduces, is_common=not self.is_partial)

    def end_backward(self, ends_step: bool, is_common: bool) -> None:
        """Like `backward_ends`. Drops the record of a step that is not ``is_common`` to all ranks."""
        self._phase = f"after the backward of step {self.step}"
        self.step += ends_step
        if ends_step or not is_common:
            self.noted = self._trained = []
        self._kept = len(self.noted)
        for order in self._orders.values():
            order.noted.clear()

    def count_step(self) -> None:
        """An optimizer has stepped shards of the model."""
        self.num_steps += 1

    def interrupted(self, in_backward: bool) -> None:
        """Drop the record of an interrupted pass, which may be run again."""
        self.num_interrupted += in_backward
        self.noted = self._trained
        del self.noted[self._kept :]
        self._phase = f"after a pass of step {self.step} that raised"

    def facts(self, comm: Communicator) -> tuple[int, ...]:
        """Numbers that are equal on all ranks of ``comm`` if these have run the same things so far.

        In `join` some ranks have no batches left, and do not see what the others freeze.
        """
        order = self._orders.get(comm, GatherOrder())
        gathers = self._gathers.get(comm, 0), order.hash, self._places.get(comm, 0)
        params = self._params_of.get(comm, ())
        in_backward = self._units[0].root.backward is not None  # which goes by the flags of the forward
        flags = map(_TRAINED, params) if in_backward else (flat_param.shows.wanted() for flat_param in params)
        trained = 0 if self.in_join else zlib.crc32(b"".join(flags))
        return self.num_interrupted, self.step, self.num_forwards, self.num_steps, trained, *gathers

    def _frozen(self) -> str:
        """How many parameters are frozen, and which are first."""
        names = [
            f"`{slot.fqn}`"
            for unit in self._numbers
            for flat_param in unit.flat_params
            for slot, is_trained in zip(flat_param.slots, flat_param.shows.wanted(), strict=True)
            if not is_trained
        ]
        return f"{len(names)} ({', '.join(names[:_MAX_NAMED])})" if names else "none"

    def recorded(self) -> Recorded:
        """What this rank has run since the last step, and what else must be the same on all ranks."""
        gathered = [noted for order in self._orders.values() for noted in order.noted]
        places = ", ".join(map(str, self._places.values()))
        unsynced = [f"`{unit.fqn or 'root'}`" for unit in self._units if not unit.sync][:3] or ["none"]
        state = {
            "backwards that have raised": str(self.num_interrupted),
            "units under no_sync": ", ".join(unsynced),
            "optimizer steps": str(self.num_steps),
            "forwards with gradients": str(self.num_forwards),
            "frozen parameters": self._frozen(),
            "places of the model in the order in which models ran first": places,
        }
        return Recorded(self._phase, Place("", self.step, self._words(self._trained)), gathered, state)

    def ranks_differ(self) -> NoReturn:
        """Raise, because ranks have run different things. **Collective.**

        Raises:
            RanksDisagreeError: with the first unit in which ranks differ, or with the states if the units agree.
        """
        known = {dist.get_rank(): self.recorded()}
        for comm in self._comms:
            for others in comm.gather_objects(known):
                known.update(others)
        raise difference_among(known)

    # ---- this rank's position

    def place(self) -> Place:
        """The current position in training."""
        noted = list(self.noted)
        text = self._phase
        last = next((number for number in reversed(noted) if number >= 0), None)
        if last is not None and not text.startswith("after it raised"):
            text += f", at `{self._names[last % len(self._names)]}`"
            text += ", whose weights it wrote in the forward" if last >= len(self._names) else ""
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
            elif number - len(self._names) in self._shared:
                words.append(GATHERED_AGAIN.format(f"`{self._names[number - len(self._names)]}`"))
        return tuple(words)


def difference_among(known: dict[int, Recorded]) -> RanksDisagreeError:
    """The error to raise on all ranks if the histories of the ranks in ``known`` differ."""
    found = first_difference({rank: [one.trained] for rank, one in known.items()}, to_the_end=True)
    found = found or _different_gathers(known) or _different_states({rank: one.state for rank, one in known.items()})
    return RanksDisagreeError(
        f"{found} This was noticed {next(iter(known.values())).phase}. Every rank must run the same units in the same "
        "order; otherwise it would compute with the parameters of others."
    )


def _different_gathers(known: dict[int, Recorded]) -> str:
    """The first difference among the ranks' gathers, as a sentence; names models if there are several."""
    has_several = len({place for one in known.values() for place, _ in one.gathered}) > 1

    def words(noted: tuple[int, str]) -> str:
        place, name = noted
        return f"the gather of `{name}`{f' of model {place}' if has_several else ''} (forward)"

    gathered = {rank: Place("", one.trained.step, tuple(map(words, one.gathered))) for rank, one in known.items()}
    found = first_difference({rank: [place] for rank, place in gathered.items()}, to_the_end=True)
    return f"{found} Models are numbered in the order in which they ran first." if found and has_several else found


def _different_states(states: dict[int, dict[str, str]]) -> str:
    """The differences among ranks that have run the same units, in sentences."""
    found = ""
    for name in next(iter(states.values())):
        ranks_in: dict[str, list[int]] = {}
        for rank, state in sorted(states.items()):
            ranks_in.setdefault(state[name], []).append(rank)
        if len(ranks_in) > 1:
            on = (f"{value} on rank {', '.join(map(str, ranks))}" for value, ranks in ranks_in.items())
            found += f"The {name} differ: {'; '.join(on)}. "
    if not found:
        return (
            "The same units are inside a checkpoint on some ranks, but not on others; or forwards before the last "
            "backward have gathered different units."
        )
    return (
        f"{found}If a backward has raised, its error is in the log of that rank, and the others have summed gradients "
        "without that rank's part. Ranks may have stepped with other values than the others: restart all ranks from "
        "the last checkpoint."
    )


def _num_ranks(unit: Unit) -> int:
    shard, replicas = unit.groups.shard, unit.groups.replicas
    return int(shard.world_size * (1 if replicas is None else replicas.world_size))
