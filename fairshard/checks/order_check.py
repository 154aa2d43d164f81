"""Which units this rank runs, in which order, compared with the other ranks; and where it stands, for who asks.

What is compared is a hash of all units entered since the last comparison, so that no step goes unseen, however few
are checked. In a step that is checked it travels beside other work::

    forward ---- end: send the hash | loss | backward: look at it ---- end: send, look | optimizer
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist

from fairshard.engine.unit import Unit
from fairshard.errors import RanksDisagreeError
from fairshard.utils.collectives import Communicator, RowGather, Transfer, exchange_tag
from fairshard.utils.watchdog import Place, first_difference

_NUM_FIRST_STEPS, _EVERY = 3, 50
_MAX_ENTERED = 1 << 15  # of one step; forwards with grad enabled whose backward never comes would add up for ever
_FORWARD, _BACKWARD = -1, -2  # a pass begins; other numbers are those of units


def check_settings(units: Sequence[Unit]) -> None:
    """Raise unless what counts for the whole model is set alike in all of ``units``, outermost first.

    Raises:
        ValueError: an inner unit has another ``order_check`` or ``nan_check``.
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
    """The units that the running step has entered, forward and backward.

    A step ends with a backward that reduces gradients: what comes before it under ``no_sync`` belongs to it.
    Recomputation by a checkpoint is not recorded, and a pass without gradients is not compared. Units that move no
    parameters between ranks do not count.
    """

    def __init__(self, units: list[Unit], comms: Sequence[Communicator], device: torch.device) -> None:
        self._mode = units[0].config.order_check
        self._names = [unit.fqn or "root" for unit in units]
        self._numbers = {unit: number for number, unit in enumerate(units)}
        self._shared = {
            number
            for unit, number in self._numbers.items()
            if _num_ranks(unit) > 1 and any(flat_param.shard_numel for flat_param in unit.flat_params)
        }
        self._is_cut = any(unit.groups.shard.world_size > 1 for unit in units)
        self._peers = [
            _Peers(comm, device, self._shared & {self._numbers[unit] for unit in units if _talks_in(unit, comm)})
            for comm in comms
            if comm.world_size > 1 and comm.is_real
        ]
        is_in_several = len(self._peers) > 1
        for peers in self._peers:
            peers.tells = any(peers.comm.gather_objects(is_in_several))
        self._is_sent = False
        self._is_on_host = device.type == "cpu"
        self.step = 1
        self.entered: list[Unit | int] = []  # of the running step, or of a pass that is not compared
        self._trained = self.entered
        self._kept = 0  # what an exception leaves of the step
        self._last: list[Unit | int] = []
        self._unchecked: list[tuple[int, list[Unit | int]]] = []  # steps since the last comparison
        self._phase = "between passes, before the first one"

    # ---- what the root tells

    def begin_forward(self, is_joined: bool) -> None:
        """A pass through the model starts; inside ``join`` each rank has passes of its own."""
        if torch.is_grad_enabled() and self._is_common and not is_joined:
            self.entered = self._trained
            if len(self.entered) > _MAX_ENTERED:
                self.entered.clear()
                self._kept = 0
            self._phase = f"in the forward of step {self.step}"
        else:
            self.entered = []
            self._phase = f"in a forward without gradients, after step {self.step - 1}"
        self._begun = len(self.entered)
        self.entered.append(_FORWARD)

    def end_forward(self, completed: bool) -> None:
        """The pass is over; one that raised is forgotten."""
        if not completed:
            self._phase = f"after it raised {self.place().text}"
            del self.entered[self._begun :]
            return
        is_trained = self.entered is self._trained
        self._phase = f"after the forward of step {self.step}" if is_trained else "after a forward without gradients"
        if is_trained and self._is_due and self._is_syncing:
            self._look()
            self._send()

    def begin_backward(self) -> None:
        """A backward starts."""
        if self._is_common:
            self.entered = self._trained
        self.entered.append(_BACKWARD)
        self._phase = f"in the backward of step {self.step}"
        if self._is_on_host:  # elsewhere looking would wait for the device: the end is early enough
            self._look()

    def end_backward(self, ends_step: bool, is_common: bool) -> None:
        """A backward is over; with ``ends_step`` it has reduced gradients, and what optimizers do comes next.

        Unless it ``is_common`` to all ranks, nothing of its step is compared.

        Raises:
            RanksDisagreeError: on every rank, if another has entered other units, or in another order.
        """
        self._kept = len(self.entered)
        self._phase = f"after the backward of step {self.step}"
        if not is_common:
            self._look()
            self._unchecked.clear()
            self.step += ends_step
            self._kept = 0
            self.entered = self._trained = []
        if not is_common or not ends_step:
            return
        try:
            if self._is_due:
                self._look()
                self._send()
                self._look()
                self._unchecked.clear()
            elif self._mode != "off":
                if self.entered != self._last:
                    self._last = self.entered
                self._unchecked.append((self.step, self._last))
        finally:
            self.step += 1
            self._kept = 0
            self.entered = self._trained = []

    def forget(self) -> None:
        """A pass was interrupted: it will run again, or never."""
        self.entered = self._trained
        del self.entered[self._kept :]
        self._phase = f"after a pass of step {self.step} that raised"

    # ---- comparing

    @property
    def _is_due(self) -> bool:
        if self._mode == "sampled":
            return self.step <= _NUM_FIRST_STEPS or self.step % _EVERY == 0
        return self._mode == "always"

    @property
    def _is_common(self) -> bool:
        """Whether a pass needs all ranks; with whole parameters under ``no_sync`` each may do as many as it likes."""
        return self._is_cut or self._is_syncing

    @property
    def _is_syncing(self) -> bool:
        return any(unit.sync for unit in self._numbers)

    def _send(self) -> None:
        if self._peers:
            self._is_sent = True
            for peers in self._peers:
                peers.send(self._digest(peers.numbers))

    def _look(self) -> None:
        """Wait for what was sent last.

        Raises:
            RanksDisagreeError: the ranks have sent different things.
        """
        if not self._is_sent:
            return
        self._is_sent = False
        differs = False
        for peers in self._peers:
            differs = not peers.agree() or differs
        for peers in self._peers:
            if peers.tells:
                differs = peers.any_says(differs)
        if differs:
            self._raise()

    def _digest(self, numbers: set[int]) -> int:
        steps = [*self._unchecked, (self.step, self._trained)]
        whole = hashlib.blake2b(digest_size=7)
        for step, entered in steps:
            whole.update(array("q", [step, *self._compared(entered, numbers)]).tobytes())
        return int.from_bytes(whole.digest(), "big")

    def _compared(self, entered: list[Unit | int], among: set[int]) -> list[int]:
        numbers = [entry if isinstance(entry, int) else self._numbers[entry] for entry in entered]
        return [number for number in numbers if number < 0 or number in among]

    def _raise(self) -> None:
        steps = [*self._unchecked, (self.step, self._trained)]
        own = [Place("", step, self._words(entered)) for step, entered in steps]
        told = {dist.get_rank(): own}
        for peers in self._peers:
            for places in peers.comm.gather_objects(told):
                told.update(places)
        raise RanksDisagreeError(
            f"{first_difference(told, to_the_end=True)} This was noticed {self._phase}. Every rank must run the same "
            "units in the same order, or it would compute with the parameters of others."
        )

    # ---- where this rank stands

    def place(self) -> Place:
        """Where training is."""
        entered = list(self.entered)
        text = self._phase
        last = next((entry for entry in reversed(entered) if isinstance(entry, Unit)), None)
        if last is not None and not text.startswith("after it raised"):
            text += f", at `{self._names[self._numbers[last]]}`"
        return Place(text, self.step, self._words(entered if self.entered is self._trained else []))

    def progress(self) -> Hashable:
        """Changes with every unit that is entered."""
        return self.step, len(self.entered), self._phase

    def _words(self, entered: list[Unit | int]) -> tuple[str, ...]:
        """``entered`` as names, which say of which pass they are."""
        words: list[str] = []
        kind = "forward"
        for number in self._compared(entered, self._shared):
            if number < 0:
                kind = "forward" if number == _FORWARD else "backward"
                words.append(f"the beginning of a {kind}")
            else:
                words.append(f"`{self._names[number]}` ({kind})")
        return tuple(words)


def _num_ranks(unit: Unit) -> int:
    groups = unit.groups
    return groups.shard.world_size * (1 if groups.replicas is None else groups.replicas.world_size)


def _talks_in(unit: Unit, comm: Communicator) -> bool:
    replicas = unit.groups.replicas
    return comm.group in (unit.groups.shard.group, None if replicas is None else replicas.group)


class _Peers:
    """The ranks of one process group, what they sent last, and the ``numbers`` of the units that they share."""

    def __init__(self, comm: Communicator, device: torch.device, numbers: set[int]) -> None:
        self.comm = comm
        self.numbers = numbers
        with torch.inference_mode(False):  # the first pass may be in it
            self._hashes = torch.zeros(comm.world_size, 1, dtype=torch.int64, device=device)
            self._gather = RowGather(comm, self._hashes, "order_check")
        self._id = comm.new_id()
        self._uses = 0
        self._transfer: Transfer | None = None
        self.tells = False  # whether a rank is in other groups too, whose ranks would wait if it raised alone

    def send(self, number: int) -> None:
        """Let the other ranks know a 63-bit ``number``."""
        self._hashes[self.comm.rank] = number
        self._uses += 1
        self._transfer = self._gather.start(exchange_tag("all_gather", self._id, self._uses))

    def agree(self) -> bool:
        """Whether all sent the same."""
        transfer, self._transfer = self._transfer, None
        assert transfer is not None
        transfer.wait()
        return len(set(self._hashes.view(-1).tolist())) == 1

    def any_says(self, flag: bool) -> bool:
        """Whether any rank's ``flag`` is True. **Collective.**"""
        self.send(int(flag))
        return not self.agree() or flag

    def __del__(self) -> None:
        """A model may be dropped between forward and backward: gloo hangs if a receive under way is dropped with it."""
        if self._transfer is not None:
            _kept[:] = [*(one for one in _kept if not one.is_completed()), self._transfer]


_kept: list[Transfer] = []  # those that nobody will wait for, until they have ended
