"""How gradients are reduced, as users may change it, and clipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor

from fairshard.engine.tree import units_below
from fairshard.nn.comm_hooks import LOW_PRECISION_HOOKS
from fairshard.nn.data_parallel.wrapper.state import StateMethods
from fairshard.optim.grad_norm import clip_grad_norm_
from fairshard.settings.fsdp1 import ShardingStrategy
from fairshard.utils.reduce_scatter_bucketer import Division
from fairshard.utils.storage import is_same_memory


class GradMethods(StateMethods):
    """Of a wrapper: the methods that change how gradients are averaged."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank without communication, for the backwards inside; may be nested.

        The first backward outside reduces the sum. Until then every rank holds whole gradients, and those of shards
        are zeros if there were none: zero them to drop what is held; after any other change the next backward raises.
        With SHARD_GRAD_OP whole parameters are kept from a backward inside to the next forward: what changes weights
        in between through ``.data`` is not noticed. Only the outermost wrapper has it.
        """
        root = self._require_root("no_sync")
        root.assert_idle("no_sync")
        before = [unit.sync for unit in root.units]
        for unit in root.units:
            unit.sync = False
        try:
            yield
        finally:
            for unit, sync in zip(root.units, before, strict=True):
                unit.sync = sync

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most ``max_norm``; return it unclipped.

        **Collective**, on the outermost wrapper, between backward and step. ``norm_type`` may be ``math.inf``. The
        norm is 0-d fp32, on the compute device, equal on all ranks.

        Raises:
            MixedGroupsError: inner wrappers use other process groups.
            NotRootError: this is an inner wrapper.
        """
        root = self._require_root("clip_grad_norm_")
        root.assert_idle("clip_grad_norm_")
        limits = float(max_norm), float(norm_type)
        with nullcontext() if root.join is None else root.join.telling("clip_grad_norm_", *limits):
            return clip_grad_norm_(root.units, *limits)

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Let ``hook`` reduce the gradients of all units, each on its own, instead of the engine. **Collective.**

        It does all averaging; see `fairshard.nn.comm_hooks` for what it gets. Call it once, on the outermost wrapper,
        before the first forward.

        Raises:
            NotRootError: this is an inner wrapper.
            RuntimeError: there is a hook already, or a forward has been.
            ValueError: the sharding is hybrid.
            TypeError: ``hook`` cannot be called.
        """
        if not callable(hook):
            raise TypeError(f"`hook` must be callable, but is {hook!r}.")
        root = self._require_root("register_comm_hook")
        root.assert_idle("register_comm_hook")
        for unit in root.units:
            if unit.config.sharding_strategy.is_hybrid:
                raise ValueError(
                    "`register_comm_hook` must not be used with hybrid sharding, whose gradients are reduced in two "
                    f"groups, but unit `{unit.fqn or 'root'}` is {unit.config.sharding_strategy.name}."
                )
            if any(flat_param.hook is not None for flat_param in unit.flat_params):
                raise RuntimeError("`register_comm_hook` must be called once, but there is a hook already.")
        if root.has_begun:
            raise RuntimeError("`register_comm_hook` must be called before the first forward, but there has been one.")
        for unit in root.units:
            in_place = unit.config.sharding_strategy is ShardingStrategy.NO_SHARD
            for flat_param in unit.flat_params:
                if getattr(hook, "__name__", "") in _LOW_PRECISION:
                    flat_param.reduce_dtype = flat_param.compute_dtype  # the hook casts
                flat_param.hook = _in_place(hook, state) if in_place else _into_shard(hook, state)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients over ranks by ``factor``, here and below, instead of by their number.

        Raises:
            ValueError: ``factor`` is not positive.
        """
        self.set_gradient_divide_factors(1.0, factor)

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool = True) -> None:
        """Divide gradients by ``pre`` before they are summed over ranks, and the sum by ``post``.

        For all units below too if ``recursive``. What `no_sync` has accumulated is divided as is set when it is sent.

        Raises:
            ValueError: a factor is not positive.
        """
        for name, factor in (("pre", pre), ("post", post)):
            if not factor > 0:
                raise ValueError(f"`{name}` must be a positive number to divide gradients by, but is {factor!r}.")
        self._claimed()
        for unit in [unit for _, unit in units_below(self)] if recursive else [self._unit]:
            for flat_param in unit.flat_params:
                flat_param.divide_by(Division(float(pre), float(post)))


_LOW_PRECISION = {hook.__name__ for hook in LOW_PRECISION_HOOKS}  # PyTorch's have the same names


def _into_shard(hook: Callable[..., Any], state: Any) -> Callable[[Tensor, Tensor], object]:
    def reduce(flat: Tensor, shard: Tensor) -> None:
        _check_returned(hook(state, flat, shard), shard, "shard")

    return reduce


def _in_place(hook: Callable[..., Any], state: Any) -> Callable[[Tensor, Tensor], object]:
    def reduce(flat: Tensor, shard: Tensor) -> None:
        _check_returned(hook(state, flat), flat, "grad")
        shard.copy_(flat)

    return reduce


def _check_returned(returned: Any, wanted: Tensor, name: str) -> None:
    """Refuse what the hook may mean as the mean, or as something to wait for: nobody would read it."""
    if not (returned is None or (isinstance(returned, Tensor) and is_same_memory(returned, wanted))):
        raise TypeError(
            f"A communication hook must leave the mean in `{name}`, its last argument, and return None, but returned "
            f"{type(returned).__name__}. Copy the mean there (`{name}.copy_(...)`), and wait for what is asynchronous."
        )
