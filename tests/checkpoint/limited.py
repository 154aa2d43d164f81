"""Running code on hostile files in a process of its own, whose death and appetite are seen."""

import os
import pickle
import resource
import signal
import time
import traceback
from dataclasses import dataclass

from tests.forked import fork

MAX_SECONDS, MAX_NBYTES = 2.0, 256 * 10**6
_TIMEOUT_S = 60
_ROOM_NBYTES = 4 << 30  # of addresses: enough for threads, and the machine survives


@dataclass
class Outcome:
    """What ``fn`` returned or raised, its CPU time in seconds, and its peak of memory above that before, in bytes."""

    value: object
    error: BaseException | None
    seconds: float
    nbytes: int


def run_limited(fn, *args, room_nbytes=_ROOM_NBYTES):
    """Run ``fn`` in a forked process; fails if that process dies, hangs, or takes more than 4 GB of addresses."""
    read, write = os.pipe()
    pid = fork(lambda: _play(write, fn, args, room_nbytes))
    os.close(write)
    with open(read, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert answer, f"the process died with {describe(status)}"
    return pickle.loads(answer)


def assert_refused(outcome, kind, *words):
    """``fn`` raised ``kind`` with these words, soon, and took little memory."""
    assert isinstance(outcome.error, kind), outcome
    for word in words:
        assert word in str(outcome.error), outcome.error
    assert outcome.seconds <= MAX_SECONDS, outcome
    assert outcome.nbytes <= MAX_NBYTES, outcome


def describe(status):
    """The end of a process in words."""
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit status {os.WEXITSTATUS(status)}"


def _play(write, fn, args, room_nbytes):
    code = 1
    try:
        signal.alarm(_TIMEOUT_S)
        before = _status("VmSize")
        resource.setrlimit(resource.RLIMIT_AS, (before + room_nbytes, before + room_nbytes))
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # forget the peak
        before, began = _status("VmRSS"), time.process_time()
        value = error = None
        try:
            value = fn(*args)
        except Exception as raised:
            error = raised
        seconds, nbytes = time.process_time() - began, _status("VmHWM") - before
        try:
            answer = pickle.dumps(Outcome(value, error, seconds, nbytes))
        except Exception:
            answer = pickle.dumps(Outcome(None, RuntimeError(f"{value!r} {error!r}"), seconds, nbytes))
        with open(write, "wb") as pipe:
            pipe.write(answer)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _status(name):
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024
