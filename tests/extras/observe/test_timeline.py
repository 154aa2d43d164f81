"""Events of a step become bars on lanes, a trace for Chrome, and a picture."""

import json

import pytest

from fairshard.extras.observe.timeline import bars, draw_timeline, write_trace
from fairshard.extras.observe.unit_event import Phase, UnitEvent

# name, fqn, time: a forward in which `a` waits for its gather while `b`'s is issued, then a backward of `b`
STEP = [
    ("unshard", "", 0),
    ("unshard_wait", "", 1),
    ("unshard_wait_end", "", 2),
    ("forward", "", 2),
    ("unshard", "a", 3),
    ("unshard", "b", 4),
    ("unshard_wait", "a", 5),
    ("unshard_wait_end", "a", 7),
    ("forward", "a", 7),
    ("forward_end", "a", 8),
    ("reshard", "a", 8),
    ("forward_end", "", 9),
    ("backward", "", 10),
    ("reshard", "b", 11),
    ("write_grads", "", 12),
    ("reduce", "a, b", 13),
    ("reduce", "", 14),
    ("write_grads_end", "", 15),
    ("backward_end", "", 15),
    ("reduce_wait", "a, b", 16),
    ("copy_to_host", "a", 17),
    ("copy_to_host_end", "a", 18),
    ("reduce_wait_end", "a, b", 19),
    ("reduce_end", "a, b", 19),
    ("optimizer_step", "", 20),
    ("optimizer_step_end", "", 22),
]


def events(told=STEP):
    return [UnitEvent(fqn, name, Phase.FORWARD, float(time)) for name, fqn, time in told]


def on(lane):
    return [(bar.row, bar.kind, bar.fqn, bar.start, bar.end) for bar in bars(events()) if bar.lane == lane]


def test_compute_is_cut_where_something_else_is_at_work():
    """An inner unit interrupts the outer one; waits and copies of gradients interrupt the unit that does them."""
    assert on("compute") == [
        (0, "wait for gather", "", 1, 2),
        (0, "forward", "", 2, 5),
        (0, "wait for gather", "a", 5, 7),
        (0, "forward", "a", 7, 8),
        (0, "forward", "", 8, 9),
        (0, "backward", "", 10, 12),
        (0, "write gradients", "", 12, 15),
        (0, "wait for reduce", "a, b", 16, 19),
    ]


def test_what_overlaps_has_rows_of_its_own():
    """Gathers last until waited for, or until freed unused; events without an end last until the last event."""
    assert on("gather") == [(0, "gather", "", 0, 2), (0, "gather", "a", 3, 7), (1, "gather", "b", 4, 11)]
    assert on("reduce") == [(0, "reduce", "a, b", 13, 19), (1, "reduce", "", 14, 22)]
    assert on("copy") == [(0, "copy to host", "a", 17, 18)]
    assert on("optimizer") == [(0, "optimizer step", "", 20, 22)]


def test_a_unit_may_be_called_in_its_own_call():
    """The first end belongs to the inner call."""
    told = [("forward", "a", 0), ("forward", "a", 1), ("forward_end", "a", 2), ("forward_end", "a", 3)]
    assert [(bar.start, bar.end) for bar in bars(events(told))] == [(0, 1), (1, 2), (2, 3)]


def test_an_end_without_a_begin_is_left_out():
    """An observer that starts in the middle of a step sees ends without a begin: they get no bar."""
    told = [("forward_end", "a", 0), ("reduce_end", "a", 1), ("unshard_wait_end", "a", 2), ("reshard", "a", 3)]
    assert bars(events(told)) == []


def test_the_trace_is_what_chrome_reads(tmp_path):
    """The trace has a process for each rank, a thread for each row of a lane, complete events in microseconds."""
    write_trace(tmp_path / "trace.json", [events(), []])
    entries = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = {entry["tid"]: entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"}
    assert list(named.values()) == ["compute", "gather", "gather (2)", "reduce", "reduce (2)", "copy", "optimizer"]
    assert [entry["args"]["name"] for entry in entries if entry["name"] == "process_name"] == ["rank 0", "rank 1"]
    shown = {(named[entry["tid"]], entry["name"], entry["ts"], entry["dur"]) for entry in entries if entry["ph"] == "X"}
    assert len(shown) == len(bars(events()))
    assert ("gather (2)", "gather b", 4e6, 7e6) in shown
    assert ("optimizer", "optimizer step", 20e6, 2e6) in shown


@pytest.mark.parametrize("by_rank", [[events(), events()[:9]], [[]]])
def test_the_picture_is_a_png(tmp_path, by_rank):
    """The picture is a PNG, for ranks that did different things and for no events."""
    draw_timeline(tmp_path / "trace.png", by_rank, "title")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
