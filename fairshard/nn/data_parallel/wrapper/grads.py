"""A wrapper's methods for its backwards: how gradients are reduced and clipped, gathering ahead, uneven inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.join import Joinable, JoinHook

from fairshard.checks.order_check import OrderCheck
from fairshard.checks.usage import assert_idle
from fairshard.engine.tree import units_below
from fairshard.errors import TrainingStateError
from fairshard.nn.comm_hooks import LOW_PRECISION_HOOKS
from fairshard.nn.data_parallel.wrapper.state import StateMethods
from fairshard.optim.grad_norm import clip_grad_norm_
from fairshard.settings.check import CALLABLE, FLAG, Check, require
from fairshard.settings.fsdp import ShardingStrategy
from fairshard.settings.groups import SavedGroup
from fairshard.setup.arguments import units_of
from fairshard.utils.buckets import Division
from fairshard.utils.graph_breaks import untraced
from fairshard.utils.hook_bucket import HookKind
from fairshard.utils.tensors import is_same_memory
from fairshard.views.ragged import check_none_owned


class GradMethods(StateMethods):
    """Methods of a wrapper for gradients, for gathering ahead, and for ranks with different numbers of batches."""

    @untraced
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank without communication inside the ``with`` block; may be nested.

        The first backward outside the block reduces the sum. Until then every rank holds whole gradients, and ``.grad``
        is a placeholder of zeros: ``zero_grad`` also discards the held gradients, any other change raises, and so does
        an optimizer's step. With SHARD_GRAD_OP, parameters stay gathered from a backward inside the
        block to the next forward; weight changes through ``.data`` in between are not detected. Only on the outermost
        wrapper.
        """
        root = self._require_root("no_sync")
        assert_idle(root, "no_sync")
        before = [unit.sync for unit in root.units]
        for unit in root.units:
            unit.sync = False
        try:
            yield
        finally:
            for unit, sync in zip(root.units, before, strict=True):
                unit.sync = sync

    @untraced
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most ``max_norm``; return the original norm.

        **Collective**, on the outermost wrapper, between backward and step. ``norm_type`` may be ``math.inf``. The
        norm is 0-d fp32, on the compute device, equal on all ranks.

        Raises:
            MixedGroupsError: inner wrappers use different process groups.
            NotRootError: this is an inner wrapper.
            PendingGradientError: gradients of `no_sync` passes wait to be reduced.
            TypeError: ``max_norm`` or ``norm_type`` is no number.
        """
        root = self._require_root("clip_grad_norm_")
        assert_idle(root, "clip_grad_norm_")
        limits = _number("max_norm", max_norm), _number("norm_type", norm_type)
        with nullcontext() if root.join is None else root.join.announced_call("clip_grad_norm_", *limits):
            return clip_grad_norm_(root.units, *limits)

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Reduce the gradients of each unit with ``hook`` instead of the engine. **Collective.**

        The hook also averages; see `fairshard.nn.comm_hooks` for its arguments. Call it once, on the outermost
        wrapper, before the first forward.

        Raises:
            NotRootError: this is an inner wrapper.
            RuntimeError: a hook is already registered, or a forward has run.
            ValueError: the sharding strategy is hybrid, or a parameter is placed by `Owned`.
            TypeError: ``hook`` is not callable.
        """
        CALLABLE("hook", hook)
        root = self._require_root("register_comm_hook")
        assert_idle(root, "register_comm_hook")
        for unit in root.units:
            require(
                not unit.config.sharding_strategy.is_hybrid,
                "`register_comm_hook` must not be used with hybrid sharding, whose gradients are reduced in two "
                f"groups, but unit `{unit.fqn or 'root'}` is {unit.config.sharding_strategy.name}.",
            )
            require(
                not any(isinstance(flat_param.bucket_kind, HookKind) for flat_param in unit.flat_params),
                "`register_comm_hook` must be called once, but a hook is already registered.",
                RuntimeError,
            )
            check_none_owned(unit.flat_params, "register_comm_hook")
        require(
            not OrderCheck.of(root).has_begun,
            "`register_comm_hook` must be called before the first forward, but one has run.",
            RuntimeError,
        )
        for unit in root.units:
            reduce = _reducing(hook, state, unit.config.sharding_strategy is ShardingStrategy.NO_SHARD)
            for flat_param in unit.flat_params:
                if getattr(hook, "__name__", "") in _LOW_PRECISION:
                    flat_param.reduce_dtype = flat_param.compute_dtype  # the hook casts
                flat_param.bucket_kind = HookKind(reduce, root.shared.reduce_stream, flat_param.name)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients by ``factor`` instead of the number of ranks, for this unit and all units below.

        Raises:
            ValueError: ``factor`` is not positive.
        """
        self.set_gradient_divide_factors(1.0, factor)

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool = True) -> None:
        """Divide gradients by ``pre`` before they are summed over ranks, and the sum by ``post``.

        If ``recursive``, applies to all units below. Gradients accumulated by `no_sync` use the factors set when they
        are reduced.

        Raises:
            ValueError: a factor is not positive.
        """
        _DIVISOR("pre", pre)
        _DIVISOR("post", post)
        self._claimed()
        for unit in [unit for _, unit in units_below(self)] if recursive else [self._unit]:
            for flat_param in unit.flat_params:
                flat_param.route.division = Division(float(pre), float(post))
                flat_param.follow_route()

    # ---- gathering ahead

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather ``modules``, wrappers of the same model, when this one's forward starts; an empty list undoes it.

        They replace the unit that followed in the last pass. All ranks must name the same modules.

        Raises:
            TypeError: ``modules`` is not a list of wrappers.
        """
        self._unit.ahead_in_forward = units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather ``modules``, wrappers of the same model, when the backward reaches this one; an empty list undoes it.

        They replace the unit that the backward would reach next. They are gathered before this one computes its
        gradients, or after it with ``BACKWARD_POST``. All ranks must name the same modules.

        Raises:
            TypeError: ``modules`` is not a list of wrappers.
        """
        self._unit.ahead_in_backward = units_of(modules)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: more backwards of the same forwards follow the next one, and may reach units that it does not.

        Units gathered ahead but not reached stay gathered, and the recorded order is kept, until True is set. Gradients
        are reduced as usual. Call it on the outermost wrapper, after its first forward.

        Raises:
            TypeError: ``is_last_backward`` is not True or False.
            TrainingStateError: no forward has run.
        """
        FLAG("is_last_backward", is_last_backward)
        if self._unit.root is None:
            raise TrainingStateError(
                "`set_is_last_backward` must be called between a forward and its backward, but no forward has "
                "run. Call it after a forward."
            )
        self._unit.root.is_last_backward = is_last_backward

    # ---- uneven inputs

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
        _ALL_RANKS("divide_by_initial_world_size", divide_by_initial_world_size)
        if not enable:
            yield
            return
        with self._joined(throw_on_early_termination, divide_by_initial_world_size, stateful).taking_part():
            yield

    # ---- for torch.distributed.algorithms.Join, which must be given this wrapper alone

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Hook that PyTorch's ``Join([model])`` calls on a rank that is done; keywords are those of `join`."""
        divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        hook: JoinHook = self._joined(False, divides_by_all, kwargs.get("stateful", ()))
        return hook

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
        join = self._require_root("join").join
        if join is not None:
            join.throws = config.throw_on_early_termination
            if not (config.is_first_joinable and config.enable):
                join.leave()
        if not config.is_first_joinable:
            raise ValueError("A wrapper must be alone in PyTorch's Join, but is not the first. Use model.join().")

    _join_config = property(fset=_configure_join, doc="Configuration that PyTorch's Join sets.")

    # ---- private

    def _joined(self, *arguments: Any) -> Any:
        from fairshard.extras.join.joined import Joined  # only models with uneven inputs need it

        return Joined(self._require_root("join"), *arguments)


Joinable.register(GradMethods)

_DIVISOR = Check(lambda factor: factor > 0, "a positive number to divide gradients by", ValueError)
_ALL_RANKS = replace(FLAG, how="Pass optimizers and schedulers as `stateful=[...]`.")
_LOW_PRECISION = {hook.__name__ for hook in LOW_PRECISION_HOOKS}  # PyTorch's hooks have the same names


def _reducing(hook: Callable[..., Any], state: Any, in_place: bool) -> Callable[[Tensor, Tensor], object]:
    """A function that fills a shard with the mean of gradients by ``hook``, which may change them ``in_place``."""

    def reduce(flat: Tensor, shard: Tensor) -> None:
        name, mean = ("grad", flat) if in_place else ("shard", shard)
        returned = hook(state, flat) if in_place else hook(state, flat, shard)
        if not (returned is None or (isinstance(returned, Tensor) and is_same_memory(returned, mean))):
            raise TypeError(  # the engine would ignore a mean or a future
                f"A communication hook must leave the mean in `{name}`, its last argument, and return None, but "
                f"returned {type(returned).__name__}. Copy the mean there (`{name}.copy_(...)`), and wait for "
                "asynchronous work."
            )
        if in_place:
            shard.copy_(flat)

    return reduce


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"`{name}` of clip_grad_norm_ must be a number, but is a {type(value).__name__}. The method knows the "
            "parameters, unlike torch's function: call `model.clip_grad_norm_(max_norm)`."
        ) from error
