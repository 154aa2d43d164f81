"""What a module is after `fully_shard`: itself, and an `FSDPModule`, whose methods say when what is gathered."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fairshard.errors import TrainingStateError
from fairshard.nn.data_parallel.claim import claim
from fairshard.nn.data_parallel.conversion import check_conversion
from fairshard.nn.data_parallel.prefetch_methods import units_of
from fairshard.nn.data_parallel.root import Root
from fairshard.nn.data_parallel.running import run
from fairshard.nn.data_parallel.training_state import TrainingState
from fairshard.nn.data_parallel.tree import UNIT_ATTRIBUTE, units_below
from fairshard.nn.data_parallel.unit import Unit
from fairshard.utils.containers import apply_to_tensors
from fairshard.utils.reduce_scatter_bucketer import Division


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns."""

    def __init__(self, unit: Unit | None) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait until the parameters are whole, and hang them into the module; a second time does nothing."""
        unit, self._unit = self._unit, None
        if unit is not None and unit.is_gathered:
            unit.wait_unshard()


class FSDPModule(nn.Module):
    """Every module that `fully_shard` was called on is also one of these.

    Where a method takes ``recurse``, it is about this module and all below it; else about this one alone.

    Source: PyTorch's FSDP2, whose names, arguments and defaults these are.
    """

    _original: type[nn.Module]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make what the class was made of: slicing a container, for one, calls its class."""
        made = cls._original.__new__(cls._original, *args, **kwargs)
        made.__init__(*args, **kwargs)  # type: ignore[misc]
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gather the parameters, run the module and its hooks, free them. **Collective.**"""
        return self._run_gathered(super().__call__, args, kwargs)

    def _run_gathered(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = self._unit
        assert unit.members is not None
        unit.members.enter(self)
        if unit.state is TrainingState.FORWARD:  # called from within: gathered, and freed by the outer call
            return function(*args, **kwargs)
        dtype = unit.members.output_dtype
        if dtype is not None:
            function = functools.partial(_casting, dtype, function)
        return run(self, unit, function, args, kwargs)

    # ---- gathering

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module; with ``async_op`` only begin to, and return what waits for it.

        The next forward waits in any case. Weights that change meanwhile are gathered again by it. **Collective.**
        """
        root = self._root
        unit = self._unit
        unit.unshard()
        if root.is_between_passes:
            unit.keep_as_it_is()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the whole parameters of this module, if there are any.

        Raises:
            TrainingStateError: in the middle of its own forward.
        """
        unit = self._unit
        if unit.state is TrainingState.FORWARD:
            raise TrainingStateError(
                f"`reshard` must not be called inside the forward of the module itself, `{unit.fqn or 'root'}`, which "
                "computes with the parameters. Call it after the forward."
            )
        if unit.is_gathered:
            unit.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free the parameters after each forward from now on, or keep them for the backward.

        The outermost module, which keeps its own unless told otherwise, has been told so then.

        Raises:
            ValueError: ``reshard_after_forward`` is not a bool.
        """
        _check_flag("reshard_after_forward", reshard_after_forward)
        for unit in self._units(recurse):
            unit.reshard_after_forward = reshard_after_forward
            unit.config = replace(unit.config, late=replace(unit.config.late, disable_reshard_on_root=False))

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Free the parameters after each backward, or keep them for the next forward, if no step comes in between.

        Raises:
            ValueError: ``reshard_after_backward`` is not a bool.
        """
        _check_flag("reshard_after_backward", reshard_after_backward)
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: no gradient of this module needs its parameters (an embedding's does not): leave them cut.

        Raises:
            ValueError: ``unshard_in_backward`` is not a bool.
        """
        _check_flag("unshard_in_backward", unshard_in_backward)
        self._unit.unshard_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gather ``modules`` when the forward of this one starts, instead of the one that followed in the last pass.

        Raises:
            ValueError: ``modules`` holds something that is not an FSDPModule.
        """
        self._unit.prefetch.forward = units_of(modules, "FSDPModule", ValueError)
        self._settle_prefetch()

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Gather ``modules`` when the backward comes to this one, instead of the one that it should come to next.

        Raises:
            ValueError: ``modules`` holds something that is not an FSDPModule.
        """
        self._unit.prefetch.backward = units_of(modules, "FSDPModule", ValueError)
        self._settle_prefetch()

    def set_forward_prefetch(self, enable: bool, *, recurse: bool = True) -> None:
        """False: gather nothing ahead in forward but what `set_modules_to_forward_prefetch` names, as PyTorch does.

        Raises:
            ValueError: ``enable`` is not a bool.
        """
        _check_flag("enable", enable)
        for unit in self._units(recurse):
            unit.prefetch.is_forward_on = enable

    # ---- gradients

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: more backwards of the same forwards follow, and what was foreseen for this one holds for them.

        Raises:
            ValueError: ``is_last_backward`` is not a bool.
        """
        _check_flag("is_last_backward", is_last_backward)
        self._root.is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: add up gradients on each rank, whole, without communication, until it is True again.

        Raises:
            ValueError: ``requires_gradient_sync`` is not a bool.
        """
        _check_flag("requires_gradient_sync", requires_gradient_sync)
        for unit in self._units(recurse):
            unit.sync = requires_gradient_sync

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this module's gradients, over all ranks and replicas, by ``factor`` and nothing else.

        Raises:
            ValueError: ``factor`` is not positive.
        """
        if not factor > 0:
            raise ValueError(f"`factor` must be a positive number to divide gradients by, but is {factor!r}.")
        for flat_param in self._unit.flat_params:
            flat_param.divide_by(Division(1.0, float(factor)))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of `set_gradient_divide_factor`."""
        warnings.warn(
            "`set_reduce_scatter_divide_factor` is deprecated: call `set_gradient_divide_factor`.",
            FutureWarning,
            stacklevel=2,
        )
        self.set_gradient_divide_factor(factor)

    def reset_iter_state(self) -> None:
        """Drop what a forward or backward left behind that raised; the next forward does so by itself.

        Raises:
            TrainingStateError: this is not the outermost module.
        """
        root = self._root
        if root.units[0] is not self._unit:
            raise TrainingStateError(
                "`reset_iter_state` must be called on the outermost module that was sharded, but this is "
                f"`{self._unit.fqn}`. Call it on the model."
            )
        root.reset()

    # ---- nn.Module

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FSDPModule:
        unit = self._unit
        self.reshard()
        check_conversion(unit, fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for flat_param in unit.flat_params:
            flat_param.settle()
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        unit = self._unit
        if unit.root is not None:
            unit.root.assert_idle("pickle or deepcopy")
        self.reshard()
        return _rebuilt, (self._original,), self.__dict__.copy()

    # ---- private

    @property
    def _unit(self) -> Unit:
        unit: Unit = self.__dict__[UNIT_ATTRIBUTE]
        return unit

    @property
    def _root(self) -> Root:
        """The root that this unit belongs to; it becomes one itself if nothing has claimed it."""
        return self._unit.root or claim(self)

    def _units(self, recurse: bool) -> Iterator[Unit]:
        yield from [unit for _, unit in units_below(self)] if recurse else [self._unit]

    def _settle_prefetch(self) -> None:
        root = self._unit.root
        if root is not None:
            self._unit.prefetch.settle(root.units)


_classes: dict[type[nn.Module], type[FSDPModule]] = {}


def sharded_class(original: type[nn.Module]) -> type[FSDPModule]:
    """The class of modules of class ``original`` after `fully_shard`."""
    if original not in _classes:
        _classes[original] = type(f"FSDP{original.__name__}", (FSDPModule, original), {"_original": original})
    return _classes[original]


def _rebuilt(original: type[nn.Module]) -> nn.Module:
    """An empty module of class ``original``, sharded, to be filled with state."""
    made = original.__new__(original)
    made.__class__ = sharded_class(original)
    return made


def _casting(dtype: torch.dtype, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return apply_to_tensors(cast, function(*args, **kwargs))


def _check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"`{name}` must be True or False, but is {value!r}.")
