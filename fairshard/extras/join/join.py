"""Ranks that run out of batches at different times: ranks that are done still take part in all collectives.

Inside ``join`` each pass, backward, clipping and step begins with a small all-reduce that counts the ranks that still
compute. As soon as one is done, the others announce each collective operation, and the ranks that are done take part:
they gather parameters and immediately free them, reduce zeros, and step their shards::

    rank 0 (computes)  | forward | a: gather, compute | ... | backward | a: gather, compute | a: reduce | end | step |
    rank 1 (is done)   | forward | a: gather, free    | ... | backward | a: gather, free    | a: zeros  | end | step |

*Invariant*: every message begins with one number from each rank, whether it computes or is done, so that messages
always match. ``torch.distributed.algorithms.Join`` sends the same number, and can therefore take part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from fairshard.checks.leaf_writes import unpin
from fairshard.checks.nan_check import NanCheck
from fairshard.checks.order_check import OrderCheck
from fairshard.engine.observer import Observer
from fairshard.engine.plan import holds_for_all
from fairshard.engine.record import CallRecord, Pass
from fairshard.engine.residency import Event
from fairshard.engine.root import Root
from fairshard.engine.unit import Unit
from fairshard.errors import CollectiveFailedError, FairshardError, TrainingStateError
from fairshard.extras.join.grad_notes import GradNotes
from fairshard.params.flat_param import FlatParam
from fairshard.utils.buckets import Division
from fairshard.utils.collectives import Communicator
from fairshard.utils.hook_bucket import HookKind

_FORWARD, _END_FORWARD, _END_BACKWARD, _END_STEP, _CALL, _OTHER, _FIRST = range(7)
_DONE_ALONE = ("no_sync", "pickle or deepcopy", "clip_grad_norm_")
_FAILED = 1 << 16  # added to a sum in which each rank that computes counts 1

Call = Callable[..., Callable[[], object]]
"""Called on a rank that is done when others make a call: checks the arguments, and returns this rank's part of it."""


class Join(Observer):
    """One rank in one ``with model.join():``; ``calls``: the calls that ranks may make, by name."""

    def __init__(self, root: Root, throws: bool, divides_by_all: bool, calls: Mapping[str, Call]) -> None:
        comm = root.units[0].comm
        assert comm is not None
        for unit in root.units:
            if unit.comm is not comm or any(flat_param.comms.replicas for flat_param in unit.flat_params):
                raise ValueError(
                    f"`join` needs all units sharded over one process group, but unit `{unit.fqn or 'root'}` uses "
                    "another one or has replicas. Give every rank the same number of batches instead."
                )
            part = unit.config.reshard_after_forward
            if not isinstance(part, bool) and part not in (1, comm.world_size):
                raise ValueError(
                    f"`join` needs `reshard_after_forward` to be True or False, but unit `{unit.fqn or 'root'}` keeps "
                    f"parameters sharded over {part} ranks, and a rank that is done has no part to keep. Pass True or "
                    "False, or give every rank the same number of batches."
                )
        self._flat_params = [flat_param for unit in root.units for flat_param in unit.flat_params]
        if not divides_by_all and any(isinstance(flat_param.bucket_kind, HookKind) for flat_param in self._flat_params):
            raise ValueError(
                "`divide_by_initial_world_size` must be True with a communication hook, which does all averaging, but "
                "is False. Leave it out."
            )
        if root.join is not None and root.join.is_in_block:
            raise TrainingStateError("`join` must not be entered inside of itself. Leave the outer `with` block first.")
        self.throws = throws
        self.is_short = False  # some rank is done, as of the last message
        self.was_short = False
        self.is_done = False  # this rank is done
        self.has_followed = False
        self.is_in_block: bool = False
        self._root = root
        self._comm: Communicator = comm
        self._divides_by_all = divides_by_all
        self._calls = {"backward": self._join_backward, **calls}
        self._units = {unit: index for index, unit in enumerate(root.units)}
        self._grads = GradNotes(self._flat_params)
        self._divisions: dict[FlatParam, Division] = {}
        self._num_active = comm.world_size
        self._is_inside = self._is_in_backward = False  # once this rank is done: inside a pass of the others
        self._has_failed = False

    # ---- the block

    @contextmanager
    def taking_part(self, finish: Callable[[], object]) -> Iterator[None]:
        """Compute inside; then take part in the other ranks' passes until all are done, and call ``finish``."""
        self.is_in_block = True
        try:
            yield
            while self._follow():
                pass
        except CollectiveFailedError:
            raise
        except Exception:
            if not self._has_failed and self._is_one_done(self._count(_FAILED)):
                self._exchange(has_failed=True)
            raise
        finish()

    def enter(self) -> None:
        """From now on, listen to the passes of the model."""
        self._root.join = self
        self._root.tell([self, *self._root.observers])
        OrderCheck.of(self._root).in_join = True

    def close(self) -> None:
        """The block is over: from now on all ranks run the same passes."""
        root = self._root
        if self._is_in_backward:
            root.engine.reset(root)
        self._restore_divisions()
        if self.was_short:
            for unit in root.units:
                unpin(unit)
            root.record.passes.clear()
        root.order.forget()
        leave(root)

    def leave(self) -> None:
        """See `leave`."""
        leave(self._root)

    # ---- a rank that computes

    def pass_begins(self, unit: Unit, is_trained: bool) -> None:
        """A forward begins."""
        self._send_message(_FORWARD)

    def call_leaves(self, unit: Unit, completed: bool, is_last: bool) -> None:
        """A call is over, and perhaps the forward."""
        if is_last and self.is_short:
            self._send_message(_END_FORWARD)

    def gather(self, unit: Unit, in_backward: bool) -> None:
        """``unit`` is gathered next."""
        if self.is_short and not self.is_done and not in_backward:
            self._send_message(_FIRST + self._units[unit])

    def backward_begins(self, passes: Sequence[Pass[Unit]]) -> None:
        """A backward of ``passes`` begins: send them to ranks that are done, which execute the same schedule."""
        self.announce_call(
            "backward",
            lambda: (
                self._described(passes), [unit.sync for unit in self._units], bytes(map(holds_for_all, self._units)),
            ),
        )  # fmt: skip
        self._divide()

    def _described(self, passes: Sequence[Pass[Unit]]) -> list[tuple[int, list[int], list[tuple[int, int]]]]:
        """For each pass, its number and events, and the unit and checkpoint of each call."""
        units = self._units
        return [(one.number, one.events, [(units[call.unit], call.segment) for call in one.calls]) for one in passes]

    def backward_ends(self, is_reached: bool, reduces: bool) -> None:
        """A backward is over; if some ranks have not computed it, ranks cannot compare what they have run."""
        if self.is_short:
            self._send_message(_END_STEP if reduces else _END_BACKWARD)
        self._restore_divisions()
        self._grads.note()
        OrderCheck.of(self._root).is_partial = self.is_short

    def announce_call(self, call: str, arguments: Callable[[], tuple[Any, ...]]) -> None:
        """All ranks make ``call`` next; raise if a rank that is done cannot take part.

        Raises:
            FairshardError: on all ranks.
        """
        self._send_message(_CALL)
        if self.is_short:
            self._comm.gather_objects((call, arguments(), self._grads.states()))
            self.agree("")

    @contextmanager
    def announced_call(self, call: str, *arguments: Any) -> Iterator[None]:
        """Call `announce_call`; the ``with`` block makes the call, and its changes to gradients are recorded."""
        self.announce_call(call, lambda: arguments)
        yield
        self._grads.note()

    def gather_states(self, value: Any) -> list[Any]:
        """All ranks are done: zero gradients like the last ranks, and return the last ranks' values. **Collective.**"""
        answers = self._comm.gather_objects(None if self.has_followed else (value, self._grads.states()))
        last = [answer for answer in answers if answer is not None]
        if self.has_followed:
            self._grads.follow([states for _, states in last])
        return [value for value, _ in last]

    def agree(self, problem: str) -> None:
        """Raise on all ranks if any has a ``problem``. **Collective.**

        Raises:
            FairshardError: with the problem of the first rank that has one.
        """
        problems = [one for one in self._comm.gather_objects(problem) if one]
        if problems:
            self._has_failed = True
            raise FairshardError(problems[0])

    def needs_all(self, what: str) -> None:
        """Raise on all ranks if ``what``, which needs all of them, is called while some are done."""
        if what in _DONE_ALONE:
            return
        self._send_message(_OTHER)
        if self.is_short:
            self._fail(
                f"`{what}` must not be called inside of `join` once a rank has run out of batches. Call it outside of "
                "the block, or give every rank the same number of batches."
            )

    # ---- a rank that is done

    def follow_pass(self) -> None:
        """Take part in a whole forward, backward or call, once the ranks that compute have been counted."""
        self._handle_message()
        while self._is_inside and self._follow():
            pass

    def _follow(self) -> bool:
        """Take part in the next operation of the others; returns False if all are done."""
        self.is_done = True
        total = self._count(0)
        if total:
            self._is_one_done(total)
            self._handle_message()
        return total > 0

    @torch.no_grad()
    def _handle_message(self) -> None:
        self.is_done = self.has_followed = self.is_short = self.was_short = True
        self._num_active, subject = self._exchange()
        root = self._root
        if subject == _FORWARD:
            self._join_forward()
        elif subject == _END_FORWARD:
            self._is_inside = False
        elif subject in (_END_BACKWARD, _END_STEP):
            self._restore_divisions()
            self._is_inside = self._is_in_backward = False
            OrderCheck.of(root).end_backward(subject == _END_STEP, is_common=False)
            NanCheck.of(root).backward_ends(is_reached=True, reduces=subject == _END_STEP)
        elif subject == _CALL:
            self._join_call()
        elif subject == _OTHER:
            self._fail(
                "Another rank made a call that needs all ranks, but this one has run out of batches: see that rank's "
                "error."
            )
        else:
            self._join_transfer(subject - _FIRST)

    def _join_forward(self) -> None:
        root = self._root
        if self._is_in_backward:  # the backward raised on the other ranks, which go on
            root.engine.reset(root)
            self._is_in_backward = False
        self._is_inside = True
        OrderCheck.of(root).watch()
        root.shared.await_step()
        for flat_param in self._flat_params:
            flat_param.begin_pass()

    def _join_call(self) -> None:
        answers = [answer for answer in self._comm.gather_objects(None) if answer is not None]
        call, arguments, _ = answers[0]
        self._grads.follow([states for _, _, states in answers])
        action, problem = None, ""
        try:
            action = self._calls[call](*arguments)
        except Exception as error:  # of any kind: the others wait for the result
            problem = str(error)
        self.agree(problem)
        assert action is not None
        with torch.enable_grad():
            action()

    def _join_backward(
        self, described: list[tuple[int, list[int], list[tuple[int, int]]]], syncs: list[bool], resident: bytes
    ) -> Callable[[], object]:
        units = self._root.units
        passes = []
        for number, events, calls in described:
            one = Pass[Unit]()
            one.number = number
            one.calls, one.events = [CallRecord(units[unit], segment) for unit, segment in calls], events
            passes.append(one)
        return partial(self._follow_backward, passes, syncs, resident)

    def _follow_backward(self, passes: list[Pass[Unit]], syncs: list[bool], resident: bytes) -> None:
        self._is_inside = self._is_in_backward = True
        self._divide()
        before = [unit.sync for unit in self._units]
        for unit, sync in zip(self._units, syncs, strict=True):
            unit.sync = sync
        try:
            self._root.engine.follow(self._root, passes, resident)
        finally:
            for unit, sync in zip(self._units, before, strict=True):
                unit.sync = sync

    def _join_transfer(self, number: int) -> None:
        unit = self._root.units[number]
        unit.on(Event.RESHARD)
        unit.on(Event.UNSHARD)
        unit.on(Event.RESHARD)

    # ---- the divisors of gradients

    def _divide(self) -> None:
        """Divide gradients by the number of ranks that compute, if the user has asked for that."""
        self._restore_divisions()
        if self._divides_by_all or not self.is_short:
            return
        for flat_param in self._flat_params:
            before = self._divisions[flat_param] = flat_param.division
            flat_param.division = Division(before.before, before.after * self._num_active / self._comm.world_size)

    def _restore_divisions(self) -> None:
        for flat_param, division in self._divisions.items():
            flat_param.division = division
        self._divisions.clear()

    # ---- messages

    def _send_message(self, subject: int) -> None:
        total = self._count(1)
        num_failed, self._num_active = divmod(total, _FAILED)
        self.is_short = self._is_one_done(total)
        if self.is_short:
            self.was_short = True
            self._exchange(subject)
        elif num_failed:
            self._fail("Another rank raised inside of `join`: see that rank's error.")

    def _count(self, own: int) -> int:
        """The sum over ranks of ``own``: 1 for those that compute, `_FAILED` for those that raised, 0 for others."""
        number = torch.tensor([float(own)], device=self._root.shared.device)
        self._comm.all_reduce(number, "sum").wait()
        return int(number.item())

    def _is_one_done(self, total: int) -> bool:
        """Whether some rank is done; with ``throw_on_early_termination`` this raises on all ranks."""
        is_short = sum(divmod(total, _FAILED)) < self._comm.world_size
        if is_short and self.throws:
            self._count(int(self.is_done))  # like PyTorch's Join on a rank that is done
            self._fail("A rank has run out of batches, and `throw_on_early_termination=True`. Omit it to continue.")
        return is_short

    def _exchange(self, subject: int | None = None, has_failed: bool = False) -> tuple[int, int]:
        """Send the number of the next operation if this rank computes; how many do, and theirs."""
        own = [int(subject is not None), int(has_failed), subject or 0, (subject or 0) ** 2]
        numbers = torch.tensor(own, dtype=torch.int64, device=self._root.shared.device)
        self._comm.all_reduce(numbers, "sum").wait()
        num_active, num_failed, total, squares = map(int, numbers.tolist())
        if num_active * squares != total**2:  # equal only if all sent the same number
            self._fail("Ranks inside of `join` must call the same units in the same order, but did not.")
        if num_failed and not has_failed:
            self._fail("Another rank raised inside of `join`: see that rank's error.")
        return num_active, total // max(num_active, 1)

    def _fail(self, why: str) -> None:
        self._has_failed = True
        raise FairshardError(f"{why} This is rank {self._comm.rank}.")


def leave(root: Root) -> None:
    """All ranks run the same passes of ``root`` from now on."""
    if root.join is not None:
        root.tell([observer for observer in root.observers if observer is not root.join])
        root.join = None
    OrderCheck.of(root).in_join = OrderCheck.of(root).is_partial = False
