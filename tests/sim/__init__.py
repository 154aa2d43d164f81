"""A simulated asynchronous accelerator, ``torch.device("sim")``: streams, events, CUDA's reuse of memory, collectives.

Work is put into queues and done when the host waits, in an order drawn from a seed. `races` reports every two accesses
to the same memory that no wait orders, in one run, whatever the order was; in some orders they also give wrong numbers.
See ``README.md`` in this folder.

`import tests.sim` builds nothing; `load` does. A process that has loaded it has an accelerator from then on, so tests
load it in ranks of their own (`tests.sim.ranks`), never in pytest's process.
"""

from tests.sim.device import load, loaded
from tests.sim.extension import build, why_missing
from tests.sim.run import configure, order_by_seed, set_cost, watch

__all__ = ["build", "configure", "load", "order_by_seed", "set_cost", "watch", "why_missing"]


def __getattr__(name):
    """What the extension offers under the same name; times are simulated.

    ``races()``: each two accesses so far that no wait orders, as text. ``reset()``: finish all work, then forget races,
    statistics and the time. ``restart()``: drop the queued work, and forget every stream, access and cost, as in
    a new process. ``stats()``: counts of what the device did, by name. ``trace()``: name, device, stream, start and end
    of each task so far. ``host_time()``: the host's clock. ``makespan()``: when the last stream ends.
    """
    if name in ("races", "reset", "restart", "stats", "trace", "host_time", "makespan"):
        return getattr(loaded(), name)
    raise AttributeError(name)
