"""When a collective fails, each rank reports its place through the store, and the error compares the places."""

import datetime
import re
import threading
import time
from unittest import mock

import pytest
import torch.distributed as dist

from fairshard.checkpoint import agreement
from fairshard.checks import watchdog
from fairshard.checks.positions import BACKGROUND, BEGINS_BACKWARD, BEGINS_FORWARD, Place, background, first_difference
from fairshard.checks.watchdog import watch
from fairshard.errors import CollectiveFailedError, RanksDisagreeError
from fairshard.utils.failures import explain, explained, observers
from fairshard.utils.testing import fake_group
from tests.on_ranks import on_ranks


class Standing:
    """A training run that makes no progress, unless it ``moves``."""

    def __init__(self, *place):
        self.stands_at(*place)
        self.moves = False
        self.num_told = 0

    def stands_at(self, *place):
        self._place = Place(*place)

    def place(self):
        return self._place

    def progress(self):
        self.num_told += self.moves
        return self.num_told


def own_watchdog():
    return observers[dist.group.WORLD]


def until(key):
    """Wait, outside of any collective, until another rank has set ``key``."""
    dist.distributed_c10d._get_default_store().wait([key])


def reach(key):
    dist.distributed_c10d._get_default_store().set(key, "")


@on_ranks(3)
def test_ranks_whose_collective_failed_read_the_place_of_all_others():
    """The last rank is stuck elsewhere; its thread writes the line that the rank is at once a beat."""
    rank = dist.get_rank()
    training = Standing(f"in step {rank}")
    watch(training)
    if rank == 2:
        until("done 0")
        training.stands_at("in step 5")
        reach("moved")
        until("done 1")
        return
    if rank == 1:
        until("moved")
    with mock.patch.object(watchdog, "_LATE_S", 30.0):
        started = time.monotonic()
        error = explain(RuntimeError("no answer\nand a long trace"))
        assert time.monotonic() - started < 15, "nobody is waited for whose beat has moved"
    assert type(error) is CollectiveFailedError
    text = str(error)
    assert text.startswith(f"A collective failed on rank {rank}: no answer\n")
    assert text.endswith("restart all ranks from the last checkpoint.")
    where = r"\(test_watchdog.py:\d+, in"
    assert re.search(rf"^  rank 0: in step 0 {where} test_ranks_whose", text, re.MULTILINE)
    assert re.search(rf"^  rank 1: in step 1 {where} {('until', 'test_ranks_whose')[rank]}", text, re.MULTILINE)
    assert re.search(rf"^  rank 2: in step {(2, 5)[rank]} {where} until", text, re.MULTILINE)
    assert str(explain(RuntimeError("again"))) == text.replace("no answer", "again"), "asked for once"
    reach(f"done {rank}")


@on_ranks(2)
def test_a_rank_writes_one_message_a_beat_until_its_group_ends():
    """The watchdog reads nothing while no collective fails; its thread ends with the group."""
    with mock.patch.object(watchdog, "_BEAT_S", 0.01):
        watch(Standing("in step 1"))
        store = own_watchdog()._store = mock.Mock()
        while store.set.call_count < 20:
            time.sleep(0.01)
        assert {name for name, _, _ in store.method_calls} == {"set"}
        thread = own_watchdog()._thread
        dist.destroy_process_group()
        thread.join(20)
        assert not thread.is_alive()


@on_ranks(2)
def test_a_store_may_serve_another_group_later():
    """Answers of an earlier group on the same store are not used again."""
    for number in range(2):
        training = Standing(f"in group {number}")
        watch(training)
        text = str(explain(RuntimeError("no answer")))
        assert f"ranks 0-1: in group {number}" in text
        observers.clear()
        dist.barrier()


@on_ranks(3)
def test_who_has_ended_or_does_not_answer_is_named():
    """A rank that ended by an error is reported with that error; a rank that does not answer is reported as silent."""
    with mock.patch.multiple(watchdog, _BEAT_S=0.1):
        if dist.get_rank() == 2:
            watch(Standing("in step 6"))
            own_watchdog()._is_over = lambda: True  # its thread ends
            own_watchdog()._thread.join()
            reach("stuck")
            until("told")
            return
        until("stuck")
        training = Standing("in the forward of step 7", 7, ("`a`",))
        watch(training)
        if dist.get_rank() == 1:
            own_watchdog().leave(KeyError("of its own"))
            assert not own_watchdog()._thread.is_alive()
            reach("left")
            until("told")
            return
        until("left")
        text = str(explain(RuntimeError("no answer")))
        reach("told")
    assert "\n  rank 1: gone: its process has ended by KeyError: 'of its own', in the forward of step 7\n" in text
    assert "\n  rank 2: silent: its process has ended or is stopped\n" in text


@on_ranks(2)
def test_a_rank_that_trains_on_answers_too():
    """A rank that another waits for may be busy with passes of its own; it is not silent."""
    training = Standing("in a forward without gradients")
    training.moves = dist.get_rank() == 1
    with mock.patch.object(watchdog, "_BEAT_S", 0.1):
        watch(training)
        dist.barrier()
        if dist.get_rank() == 0:
            text = str(explain(RuntimeError("no answer")))
            reach("told")
            assert re.search(r"^  ranks? [01-]*1: in a forward without gradients \(", text, re.MULTILINE), text
        else:
            until("told")


class SlowStore:
    """A connection to a store that takes ``seconds`` for each message."""

    def __init__(self, store, seconds):
        self._store, self._seconds = store, seconds

    def __getattr__(self, name):
        time.sleep(self._seconds)
        return getattr(self._store, name)


@on_ranks(2)
@pytest.mark.parametrize(("seconds", "place"), [(0.1, "in step 1"), (0.6, "unknown: the store, which")])
def test_a_slow_store_makes_no_rank_dead(seconds, place):
    """A beat that comes late is waited for; a rank whose beat may come too late is called unknown."""
    second_connection = watchdog._second_connection
    training = Standing("in step 1")
    short = {"_BEAT_S": 0.1, "_LATE_S": 0.4, "_SLOW_S": 0.05}
    with mock.patch.multiple(
        watchdog, _second_connection=lambda store: SlowStore(second_connection(store), seconds), **short
    ):
        watch(training)
        dist.barrier()
        if dist.get_rank() == 0:
            text = str(explain(RuntimeError("no answer")))
            reach("told")
            assert re.search(rf"^  ranks? [01-]*1: {place}", text, re.MULTILINE), text
            assert "has ended" not in text
        else:
            until("told")


def test_what_threads_do_beside_training_is_part_of_a_place():
    """A save or a copy in the background is named; other threads are not."""
    is_over = threading.Event()
    threads = [threading.Thread(target=is_over.wait, name=name) for name in (f"{BACKGROUND}a save of a", "other")]
    for thread in threads:
        thread.start()
    try:
        assert background() == ["a save of a"]
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@on_ranks(2)
def test_ranks_that_ran_different_units_are_told_which():
    """The error says that ranks disagree, and names the first unit of each that differs."""
    rank = dist.get_rank()
    training = Standing("in the backward of step 2", 2, ("`a`", ("`b`", "`c`")[rank]))
    watch(training)
    error = explain(RuntimeError("no answer"))
    assert isinstance(error, RanksDisagreeError)
    assert "In step 2 rank 0 is at `b`, rank 1 at `c`." in str(error)
    assert "\n  ranks 0-1: in the backward of step 2" in str(error)


@on_ranks(2)
@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_a_store_that_is_gone_is_not_waited_for(how):
    """If the store fails or hangs, a rank reports what it knows, and waits for an answer only once."""
    training = Standing("in step 1")
    end = threading.Event()
    find = {"raises": mock.Mock(side_effect=RuntimeError("gone")), "hangs": end.wait}[how]
    short = dict.fromkeys(("_BEAT_S", "_LATE_S", "_OTHERS_READ_WITHIN_S"), 0.1)
    with mock.patch.multiple(watchdog, **short):
        watch(training)
        own_watchdog()._find_others = find
        text = str(explain(RuntimeError("no answer")))
        with mock.patch.object(own_watchdog()._has_report, "wait") as wait:
            explain(RuntimeError("and no answer to the next collective"))
    assert how == "raises" or wait.call_args.args == (0.0,)
    end.set()
    assert f"\n  rank {1 - dist.get_rank()}: unknown: the store, which rank 0 or the launcher hosts, does not" in text


def test_where_nobody_else_is_there_is_no_watchdog():
    """Groups that move no data have no watchdog, and a failure is reported as it is."""
    with fake_group(2) as world:
        watch(Standing("in step 1"))
        assert world not in observers
        assert str(explain(RuntimeError("no answer"))) == "A collective failed: no answer"


@on_ranks(2)
def test_a_training_that_is_gone_is_not_kept():
    """The watchdog does not keep a training run alive; without it, the rank is reported as not training."""
    training = Standing("in step 1")
    watch(training)
    del training
    assert "not training, in `explain` (test_watchdog.py" in str(explain(RuntimeError("no answer")))


def test_differences_are_those_of_one_step():
    """Ranks are compared step by step, as far as both have got, or to the end if both have ended."""
    told = {0: [Place("", 1, ("a", "b")), Place("", 2, ("a",))], 2: [Place("", 2, ("a", "b"))], 3: []}
    assert first_difference(told) == "", "one may have come further"
    assert first_difference(told, to_the_end=True) == "In step 2 rank 0 is at the end, rank 2 at b."
    told[3] = [Place("", 1, ("a", "c"))]
    assert first_difference(told) == "In step 1 rank 0 is at b, rank 3 at c."
    assert first_difference({1: told[0]}) == ""


def test_a_rank_that_has_missed_a_backward_is_told_why():
    """A rank that begins a forward where others begin a backward is told the likely cause and the cure."""
    told = {0: [Place("", 1, ("a", BEGINS_BACKWARD))], 1: [Place("", 1, ("a", BEGINS_FORWARD))]}
    text = first_difference(told)
    assert text.startswith("In step 1 rank 0 is at the beginning of a backward, rank 1 at the beginning of a forward.")
    assert "0 * output.sum()" in text


@pytest.mark.parametrize(
    ("ranks", "text"), [([0], "rank 0"), ([0, 1], "ranks 0-1"), ([0, 2, 3, 4, 7], "ranks 0, 2-4, 7")]
)
def test_ranks_are_listed_in_runs(ranks, text):
    """Ranks are printed as ``rank 1`` or ``ranks 0, 2-4``."""
    assert watchdog._ranks(ranks) == text


@explained
def fails_with(error):
    raise error


def test_only_failures_of_a_collective_are_explained():
    """Our own errors and other kinds pass through unchanged; without a group only the cause is reported."""
    with pytest.raises(CollectiveFailedError, match="A collective failed: connection closed") as raised:
        fails_with(RuntimeError("connection closed"))
    assert str(raised.value.__cause__) == "connection closed"
    for error in (RanksDisagreeError("told"), ValueError("wrong")):
        with pytest.raises(type(error), match=str(error)):
            fails_with(error)


@on_ranks(2)
def test_once_an_exchange_of_a_save_has_failed_the_next_in_its_group_do_not_wait():
    """The other rank may never come: a process that has told of the failure can leave."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=100))
    failure = mock.patch.object(agreement, "gather_objects", side_effect=CollectiveFailedError("rank 1 has left"))
    with failure, pytest.raises(CollectiveFailedError, match="rank 1 has left"):
        agreement.on_all_ranks(group, bool)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed ?out"):
            dist.barrier(group)
        reach("rank 0 has given up")
    until("rank 0 has given up")
