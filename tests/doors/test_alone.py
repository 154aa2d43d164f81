"""A collective that one rank calls alone, or in which a rank is stopped, ends in time with a report of all ranks."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doors.alone_run import TIMEOUT_S

pytestmark = pytest.mark.behaviour("a rank alone")

REPOSITORY = Path(__file__).parents[2]
ALONE = {
    "construction": "FullyShardedDataParallel",
    "first_forward": "forward",
    "state_dict": "state_dict",
    "optim_state_dict": "optim_state_dict",
    "save": "save",
    "load": "load",
    "load_latest": "load_latest",
}
"""What rank 0 calls alone, by case."""
STOPPED = [
    *(f"{place}_{mode}_save_of_wrapper" for place in ("at", "in") for mode in ("sync", "async")),
    *("in_sync_save_of_fully_shard", "at_async_save_of_fully_shard"),
]
WRITES = [f"write_in_forward_of_{door}" for door in ("wrapper", "fully_shard")]
SLOW = ["slow_sync_save_of_fully_shard", "slow_async_save_of_wrapper"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """All cases, run at the same time."""
    command = [sys.executable, "-m", "tests.doors.alone_run", str(tmp_path_factory.mktemp("alone"))]
    command += [*ALONE, "no_model", "background_save", *WRITES, *STOPPED, *SLOW]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {found["case"]: found for found in map(json.loads, done.stdout.splitlines())}


def told(found, rank=0):
    """Seconds and text of the error of ``rank``."""
    raised = [(at, text) for own, at, text in found["notes"] if own == rank and text.startswith("raised ")]
    assert raised, found
    return raised[0]


def assert_in_time(found):
    """Rank 0 raises within 5 s after the timeout, and its process ends within 10 s more, by itself."""
    code, at = found["ended"][0]
    assert told(found)[0] < TIMEOUT_S + 5
    assert code == 1
    assert at < told(found)[0] + 10


@pytest.mark.cpu_only("starts processes of its own, on gloo")
@pytest.mark.parametrize("case", ALONE)
def test_a_call_on_one_rank_only_is_told_with_the_places_of_all(ran, case):
    """The error names the call, which is collective, and the line of each rank."""
    assert_in_time(ran[case])
    _, text = told(ran[case])
    call = re.escape(ALONE[case])
    assert text.startswith("raised CollectiveFailedError: ")
    assert re.search(rf"rank 0: [^/]*in `{call}` \(alone_run\.py:\d+, in \S+\)", text), text
    assert re.search(r"rank 1: [^/]*\(alone_run\.py:\d+, in elsewhere\)", text), text
    assert f"`{ALONE[case]}` is collective: every rank must call it" in text


@pytest.mark.cpu_only("starts processes of its own, on gloo")
@pytest.mark.parametrize("case", WRITES)
def test_a_write_in_the_forward_on_one_rank_only_is_told_on_all(ran, case):
    """That rank gathers the unit again, alone; both name the unit and what must hold."""
    assert_in_time(ran[case])
    for rank in range(2):
        at, text = told(ran[case], rank)
        assert at < TIMEOUT_S + 5
        assert text.startswith("raised RanksDisagreeError: ")
        assert "In step 3 rank 0 is at the second gather of `1`, whose weights it wrote in the forward, rank 1" in text
        assert "A forward that writes to weights must do so on every rank." in text


@pytest.mark.cpu_only("starts processes of its own, on gloo")
def test_a_rank_that_has_not_called_fairshard_is_not_called_dead(ran):
    """It has no watchdog that could answer."""
    assert_in_time(ran["no_model"])
    assert "rank 1: silent: it has not called fairshard yet, or its process has ended" in told(ran["no_model"])[1]


@pytest.mark.cpu_only("starts processes of its own, on gloo")
@pytest.mark.parametrize("case", STOPPED)
def test_a_rank_that_is_stopped_at_or_in_a_save_is_told_in_time(ran, case):
    """The other rank reports it by the timeout of the user's group, and its process can end."""
    assert_in_time(ran[case])
    assert "rank 1: silent: its process has ended or is stopped" in told(ran[case])[1]
    assert told(ran[case])[1].startswith("raised CollectiveFailedError")


@pytest.mark.cpu_only("starts processes of its own, on gloo")
def test_a_background_save_does_not_keep_a_failed_process(ran):
    """Python waits for a save before it ends, but not once a collective has failed."""
    assert_in_time(ran["background_save"])
    assert "rank 1: silent: its process has ended or is stopped" in told(ran["background_save"])[1]


@pytest.mark.cpu_only("starts processes of its own, on gloo")
@pytest.mark.parametrize("case", SLOW)
def test_a_rank_that_writes_longer_than_the_timeout_is_waited_for(ran, case):
    """While a rank is at work it says so: a slow disk does not end the run."""
    assert sorted(text for _, _, text in ran[case]["notes"]) == ["saved all", "saved all"]
    assert [code for code, _ in ran[case]["ended"]] == [0, 0]
