"""Peak memory of the simulated device in one training step, by the place in the program that allocated it."""

from collections import Counter
from collections.abc import Callable

from tests.sim.device import loaded


class MemoryWatch:
    """Follows allocations from its creation on; what was allocated before does not count.

    ``sim.watch(stacks=True)`` must be on, otherwise the places are empty.
    """

    def __init__(self) -> None:
        loaded().memory_log()
        self._live: dict[int, tuple[int, str]] = {}

    def during(self, run: Callable[[], object]) -> Counter[str]:
        """The bytes live at the peak while ``run`` runs, by the place that has allocated them."""
        self._follow()
        run()
        return self._follow()

    def _follow(self) -> Counter[str]:
        live = sum(nbytes for nbytes, _ in self._live.values())
        peak, at_peak = live, list(self._live.values())
        for address, nbytes, where in loaded().memory_log():
            if nbytes > 0:
                self._live[address] = nbytes, where
                live += nbytes
            elif address in self._live:
                live -= self._live.pop(address)[0]
            if live > peak and nbytes > 0:
                peak, at_peak = live, list(self._live.values())
        sites: Counter[str] = Counter()
        for nbytes, where in at_peak:
            sites[where] += nbytes
        return sites
