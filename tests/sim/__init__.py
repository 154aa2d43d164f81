"""A simulated asynchronous accelerator, ``torch.device("sim")``: streams, events, CUDA's reuse of memory, collectives.

Work is put into queues and done when the host waits, in an order drawn from a seed. `races` reports every two accesses
to the same memory that no wait orders, in one run, whatever the order was; in some orders they also give wrong numbers.
See ``README.md`` in this folder.

`import tests.sim` builds nothing; `load` does. A process that has loaded it has an accelerator from then on, so tests
load it in ranks of their own (`tests.sim.ranks`), never in pytest's process.
"""

from tests.sim.device import load
from tests.sim.extension import build, why_missing
from tests.sim.run import (
    configure,
    host_time,
    makespan,
    order_by_seed,
    races,
    reset,
    restart,
    set_cost,
    stats,
    trace,
    watch,
)

__all__ = [
    "build",
    "configure",
    "host_time",
    "load",
    "makespan",
    "order_by_seed",
    "races",
    "reset",
    "restart",
    "set_cost",
    "stats",
    "trace",
    "watch",
    "why_missing",
]
