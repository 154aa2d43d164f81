"""A run on the simulator: the order of its work, its races, its simulated time."""

import os
import sys

from tests.kit import rank_call
from tests.sim.device import loaded

_RANK_CALL = rank_call.__file__
_EAGERNESS = (0.0, 0.05, 0.5, 0.9)


def configure(seed=0, eagerness=0.0, policy="random"):
    """Choose the order of work from now on.

    ``policy`` is ``"serial"`` (at once, the reference), ``"random"`` (any head of a stream) or ``"priority"`` (streams
    have random priorities, which change now and then). ``eagerness`` is the chance that the device does a task when the
    host issues one; at 0 it works only while the host waits.
    """
    loaded().configure(seed, eagerness, policy)


def order_by_seed(seed):
    """Choose a policy, an eagerness and an order by ``seed``; None is serial."""
    if seed is None:
        configure(0, 0.0, "serial")
    else:
        configure(seed, _EAGERNESS[seed // 2 % 4], ("random", "priority")[seed % 2])


def watch(raises=False, stacks=True):
    """Look for races, also between the host and the device; note where each task was issued.

    ``raises`` makes the access that comes second raise, for a debugger; otherwise `races` lists them.
    """
    loaded().set_checks(True, raises, True)
    loaded().set_stacks(_where if stacks else None)


def set_cost(name="", fixed=0.0, per_byte=0.0, per_flop=0.0):
    """Set the simulated time of tasks called ``name``; without one, that of all others.

    Names are those in `trace`: operators (``aten::mm``), collectives (``all_gather``), ``copy_ to device``,
    ``copy_ to host``. Bytes are all that a task reads and writes on the device; operations are counted for matrix
    products only, those of 4-byte elements twice. A task takes the longer of its bytes and its operations.
    """
    loaded().set_cost(name, fixed, per_byte, per_flop)


def _where(depth=6):
    """The innermost frames of the task that are not torch's, as text."""
    frame, lines = sys._getframe().f_back, []  # none before it on autograd's threads
    while frame is not None and len(lines) < depth:
        code = frame.f_code
        if code.co_filename == _RANK_CALL:
            break
        if f"{os.sep}torch{os.sep}" not in code.co_filename:
            name = code.co_filename.rpartition("site-packages/")[2]
            lines.append(f"        {name}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return "\n".join(lines)
