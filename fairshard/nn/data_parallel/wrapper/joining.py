"""A wrapper's method for ranks that run out of batches at different times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Joinable, JoinHook

from fairshard.checks.usage import assert_idle
from fairshard.checks.values_check import compare_values
from fairshard.engine.root import Root
from fairshard.extras.join.join import Call, Join, leave
from fairshard.extras.join.optimizers import JoinedOptimizers, without_grads
from fairshard.nn.data_parallel.wrapper.state import StateMethods
from fairshard.optim.grad_norm import clip_grad_norm_
from fairshard.settings.groups import SavedGroup


class JoinMethods(StateMethods):
    """Methods of a wrapper for ranks with different numbers of batches."""

    @contextmanager
    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
        *,
        stateful: Iterable[Any] = (),
    ) -> Iterator[None]:
        """Context in which ranks may run out of batches at different times, in training or evaluation. **Collective.**

        A rank that reaches the end of the block takes part in the collectives of the other ranks until all are done: it
        gathers, contributes zero gradients, clips, and steps its shards. The sum of gradients is divided by the number
        of all ranks, or, without ``divide_by_initial_world_size``, by the number of ranks that still compute. With
        ``throw_on_early_termination`` all ranks raise as soon as one is done and another continues. ``enable=False``
        does nothing. Only on the outermost wrapper.

        ``stateful``, the same list on each rank, holds objects that a rank needs when it is done: optimizers that may
        not have stepped yet, and objects such as schedulers, which get the state of the last rank. Once a rank is done,
        the only collective method allowed in the block is ``clip_grad_norm_``.

        Raises:
            NotRootError: this is an inner wrapper.
            ValueError: the units use several process groups.
            TypeError: an object in ``stateful`` has no state, or was passed as another argument.
            FairshardError: on all ranks, if one raised, or if a rank that is done cannot follow.
        """
        if not isinstance(divide_by_initial_world_size, bool):
            raise TypeError(
                "`divide_by_initial_world_size` must be True or False, but is "
                f"{type(divide_by_initial_world_size).__name__}. Pass optimizers and schedulers as `stateful=[...]`."
            )
        if not enable:
            yield
            return
        optimizers, join = self._join(throw_on_early_termination, divide_by_initial_world_size, stateful)
        try:
            with join.taking_part(optimizers.finish):
                yield
        finally:
            optimizers.close()
            join.close()

    # ---- for torch.distributed.algorithms.Join, which must be given this wrapper alone

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Hook that PyTorch's ``Join([model])`` calls on a rank that is done; keywords are those of `join`."""
        divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        return _Hook(*self._join(False, divides_by_all, kwargs.get("stateful", ())))

    @property
    def join_device(self) -> torch.device:
        """Device of the tensors that count the ranks still computing."""
        return self._require_root("join").shared.device

    @property
    def join_process_group(self) -> ProcessGroup:
        """Process group over which these ranks are counted."""
        group: SavedGroup = self._unit.group
        return group.resolve()

    def _configure_join(self, config: Any) -> None:
        root = self._require_root("join")
        if not config.is_first_joinable:
            leave(root)
            raise ValueError("A wrapper must be alone in PyTorch's Join, but is not the first. Use model.join().")
        if not config.enable:
            leave(root)
        elif root.join is not None:
            root.join.throws = config.throw_on_early_termination

    _join_config = property(fset=_configure_join, doc="Configuration that PyTorch's Join sets.")

    # ---- private

    def _join(self, throws: bool, divides_by_all: bool, stateful: Iterable[Any]) -> tuple[JoinedOptimizers, Join]:
        root = self._require_root("join")
        optimizers = JoinedOptimizers(root, stateful)
        calls: dict[str, Call] = {"step": optimizers.follow, "clip_grad_norm_": partial(_follow_clip, root)}
        join = Join(root, throws, divides_by_all, calls)
        compare_values(root)  # a rank may run out of batches before its first forward
        leave(root)
        assert_idle(root, "join")
        join.enter()
        optimizers.open(join)
        return optimizers, join


Joinable.register(JoinMethods)


class _Hook(JoinHook):
    """Hook that PyTorch's ``Join`` runs on a rank that is done."""

    def __init__(self, optimizers: JoinedOptimizers, join: Join) -> None:
        self._optimizers = optimizers
        self._join = join

    def main_hook(self) -> None:
        """Take part in the next collectives of the other ranks."""
        self._join.follow_pass()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Finish when all ranks are done."""
        try:
            self._optimizers.finish()
        finally:
            self._optimizers.close()
            self._join.close()


def _follow_clip(root: Root, max_norm: float, norm_type: float) -> Callable[[], object]:
    def clip() -> None:
        ignored = {id(param): param for unit in root.units for param in unit.origin.ignored.params}
        with without_grads(list(ignored.values())):
            clip_grad_norm_(root.units, max_norm, norm_type)

    return clip
