"""A training whose line another thread reads, while frames end and garbage is collected; a wrong read ends the process.

python -m tests.checks.positions_run SECONDS
"""

import gc
import sys
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

def train(is_running):
    while is_running():
        deep(15)
        wide(9)
"""
"""Compiled as a library's code, which is not the user's."""


def main(seconds):
    """Train for so long; each time the line must be one of this file."""
    pauses, found, end = [], [], time.time() + seconds
    names = {"sleep": time.sleep, "get_ident": threading.get_ident, "pauses": pauses, "training": threading.get_ident()}
    exec(compile(TRAINING, "<library>", "exec"), names)

    def watch():
        while time.time() < end:
            pauses[:] = [None] * 3
            found.append(line_of(names["training"]))

    thread = threading.Thread(target=watch)
    gc.set_threshold(20)  # so that some of the garbage is collected while a line is read
    thread.start()
    names["train"](thread.is_alive)
    assert found
    assert all("(positions_run.py:" in line.where for line in found), found


main(float(sys.argv[1]))
