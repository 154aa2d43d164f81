"""The line that a rank reports is read while its training runs on."""

import gc
import threading
import time

from fairshard.checks.positions import line_of

TRAINING = """
class Garbage:
    def __init__(self):
        self.itself = self

    def __del__(self):  # as a tensor's destructor does, it lets other threads run
        if get_ident() != training and pauses:
            pauses.pop()
            sleep(0.0003)

def deep(depth):
    _garbage = [Garbage(), {}, []]
    return deep(depth - 1) if depth else None

def wide(depth, b=1, c=2, d=3):
    e = f = g = h = depth
    _garbage = [Garbage()]
    return (wide(depth - 1, b, c, d) if depth % 2 else deep(depth - 1)) if depth else [e, f, g, h]

def train(until):
    while time() < until:
        deep(15)
        wide(9)
"""


def test_a_line_is_read_while_frames_end_and_garbage_is_collected():
    """Each read gives the line of the user; with frames that have ended, Python up to 3.11 would crash in it."""
    pauses, found, ended = [], [], threading.Event()
    names = {"sleep": time.sleep, "time": time.time, "get_ident": threading.get_ident, "pauses": pauses}
    exec(compile(TRAINING, "<library>", "exec"), names)
    names["training"] = threading.get_ident()

    def watch():
        while not ended.is_set():
            pauses[:] = [None] * 3
            found.append(line_of(names["training"]))

    thread, before = threading.Thread(target=watch), gc.get_threshold()
    thread.start()
    gc.set_threshold(20)  # so that some of it is collected while a line is read
    try:
        names["train"](time.time() + 1.5)
    finally:
        gc.set_threshold(*before)
        ended.set()
        thread.join()
    assert len(found) > 10
    assert all("(test_positions.py:" in line.where for line in found[:-1])
