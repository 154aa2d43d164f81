"""Letting ranks run out of batches at different times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fairshard.nn.data_parallel.join import Join
from fairshard.nn.data_parallel.state_methods import StateMethods


class JoinMethods(StateMethods):
    """Of a wrapper: the method for ranks with different numbers of batches."""

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Iterator[None]:
        """Let ranks run out of batches at different times, for passes without a backward. **Collective.**

        A rank that leaves the block keeps its part in every gather until all have left it. In the block, nothing but
        forwards may be called that needs all ranks. Forwards for training are passed as long as every rank has
        batches; when one has not, all ranks raise: a rank that is done would not step its shard of the parameters.
        Therefore ``divide_by_initial_world_size`` makes no difference, and is there for scripts written for DDP.
        With ``throw_on_early_termination`` all ranks raise at the first pass without one of them, of either kind.
        With ``enable=False`` nothing is done. Only the outermost wrapper has it.

        Raises:
            NotRootError: this is an inner wrapper.
            ValueError: the units use several process groups.
            FairshardError: on all ranks, as said above, or because one raised.
        """
        if not enable:
            yield
            return
        root = self._require_root("join")
        join = Join(root, throw_on_early_termination)
        root.assert_idle("join")
        root.join = join
        try:
            with join.taking_part():
                yield
        finally:
            root.join = None
            root.order.forget()
