"""`FSDPModule`, base class of modules that `fully_shard` has sharded: controls gathering, resharding and gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fairshard.checks.leaf_writes import show, unpin
from fairshard.checks.optimizer_check import watch_copy
from fairshard.checks.usage import assert_idle
from fairshard.engine.residency import Event
from fairshard.engine.root import Root
from fairshard.engine.training_state import TrainingState
from fairshard.engine.tree import units_below
from fairshard.engine.unit import Unit
from fairshard.errors import FairshardError, TrainingStateError
from fairshard.nn.data_parallel.guards import check_other_door
from fairshard.nn.data_parallel.in_place.comm import CommMethods, check_flag, units_of_module
from fairshard.nn.data_parallel.methods import ForwardMethod, explaining_methods
from fairshard.nn.data_parallel.running import NOT_IN_A_GRAPH, run
from fairshard.nn.data_parallel.torch_state import TorchFSDPModule, register, without_torch_keys
from fairshard.settings.check import require
from fairshard.settings.mesh import check_mesh
from fairshard.setup.arguments import units_of
from fairshard.setup.changes import adopt_changes
from fairshard.setup.claim import claim
from fairshard.setup.guard import check_conversion, refuse_sharing
from fairshard.utils.dynamo import not_traced, set_tracer
from fairshard.utils.graph_breaks import breaks_graph, untraced
from fairshard.utils.nested import apply_to_tensors
from fairshard.views.shown_dtensors import ShownDTensors


class Members:
    """The ``modules`` of one unit, which stays gathered from the first call of any until all have been called.

    ``output_dtype``: the dtype to which their floating-point outputs are cast.
    """

    def __init__(self, modules: Sequence[nn.Module], output_dtype: torch.dtype | None) -> None:
        self.modules = tuple(modules)
        self.output_dtype = output_dtype
        self._left: set[int] = set()

    @property
    def fqn(self) -> str:
        """Name of the unit until the modules have names: their indexes, or empty for a single module."""
        return ", ".join(str(index) for index in range(len(self.modules))) if len(self.modules) > 1 else ""

    def in_order(self, names: Mapping[int, str]) -> list[str]:
        """Names of the modules, in their order; skips modules whose ``id`` is not in ``names``."""
        return [names[id(module)] for module in self.modules if id(module) in names]

    @not_traced
    def enter(self, module: nn.Module) -> None:
        """``module`` is called."""
        if len(self.modules) > 1:
            self._left = self._left or set(range(len(self.modules)))
            self._left.discard(self.modules.index(module))

    def begin_pass(self) -> None:
        """A pass begins: no module has been called yet."""
        self._left = set()

    @property
    def has_uncalled(self) -> bool:
        """Whether some, but not all, modules have been called: the unit stays gathered for the others."""
        return bool(self._left)


class UnshardHandle(torch.distributed.fsdp.UnshardHandle):
    """Handle returned by ``unshard(async_op=True)``."""

    def __init__(self, unit: Unit | None) -> None:
        self._unit = unit

    @untraced
    def wait(self) -> None:
        """Wait for the all-gather, and register the whole parameters; a second call does nothing."""
        unit, self._unit = self._unit, None
        if unit is not None and unit.is_gathered:
            show(unit)


class FSDPModule(CommMethods, TorchFSDPModule):  # type: ignore[misc]  # types of its own for custom communication
    """Base class of every module on which `fully_shard` was called.

    Methods with ``recurse`` apply to this module and all sharded modules below it; other methods to this module only.

    Source: PyTorch's FSDP2, for names, arguments and defaults.
    """

    # The names must not collide with those of a user's class.
    _fairshard_class: type[nn.Module]
    _fairshard_methods: frozenset[str]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the original class; slicing a container, for example, calls its class."""
        made = cls._fairshard_class.__new__(cls._fairshard_class, *args, **kwargs)
        made.__init__(*args, **kwargs)  # type: ignore[misc]
        return made

    @breaks_graph(NOT_IN_A_GRAPH)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Gather the parameters, run the module and its hooks, free them. **Collective.**"""
        return self._fairshard_run(super().__call__, args, kwargs)

    @breaks_graph(NOT_IN_A_GRAPH)
    def _fairshard_run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = self._fairshard_unit
        assert unit.members is not None
        unit.members.enter(self)
        if unit.state is TrainingState.FORWARD:  # an inner call: the outer one gathers and frees
            return function(*args, **kwargs)
        dtype = unit.members.output_dtype
        if dtype is not None:
            function = functools.partial(_casting, dtype, function)
        return run(self, unit, function, args, kwargs)

    def _fairshard_gather_in(self, method_name: str) -> None:
        """Run the method like the forward from now on."""
        self.__class__ = sharded_class(self._fairshard_class, self._fairshard_methods | {method_name})

    # ---- gathering

    @untraced
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module; with ``async_op`` only start the gather, and return a handle.

        `parameters` then yields whole parameters until `reshard`; they are for reading, because nothing keeps changes.
        The next forward also waits for the gather. If weights change in between and torch counts the write, the forward
        gathers again. torch does not count writes through ``.data`` or ``torch._foreach_`` functions: call `reshard`
        after those. **Collective.**
        """
        root = root_of(self)
        root.engine.drop_interrupted(root)
        unit = self._fairshard_unit
        if root.engine.is_between_passes:
            root.shared.await_step()
            unit.is_pinned = True
        unit.on(Event.UNSHARD)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    @untraced
    def reshard(self) -> None:
        """Free the whole parameters of this module, if gathered.

        Raises:
            TrainingStateError: inside the module's own forward.
        """
        unit = self._fairshard_unit
        require(
            unit.state is not TrainingState.FORWARD,
            f"`reshard` must not be called inside the forward of the module itself, `{unit.fqn or 'root'}`, which "
            "computes with the parameters. Call it after the forward.",
            TrainingStateError,
        )
        unpin(unit)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free the parameters after each forward from now on, or keep them for the backward.

        This also overrides the default of the outermost module, which keeps its own.

        Raises:
            ValueError: ``reshard_after_forward`` is not a bool.
        """
        check_flag("reshard_after_forward", reshard_after_forward)
        for unit in units_of_module(self, recurse):
            unit.reshard_after_forward = reshard_after_forward
            unit.config = replace(unit.config, disable_reshard_on_root=False)
            unit.rule = unit.config.rule

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Free the parameters after each backward, or keep them for the next forward unless an optimizer steps first.

        Raises:
            ValueError: ``reshard_after_backward`` is not a bool.
        """
        self._fairshard_set("reshard_after_backward", reshard_after_backward, recurse)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """False: do not gather in the backward, because no gradient of this module needs its parameters (embeddings).

        Raises:
            ValueError: ``unshard_in_backward`` is not a bool.
        """
        self._fairshard_set("unshard_in_backward", unshard_in_backward, recurse=False)

    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:  # type: ignore[override]
        """Gather ``modules`` when this one's forward starts, instead of the unit that followed in the last pass.

        Raises:
            ValueError: ``modules`` holds something that is not an FSDPModule.
        """
        self._fairshard_unit.ahead_in_forward = units_of(modules, "FSDPModule", ValueError)

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:  # type: ignore[override]
        """Gather ``modules`` when the backward reaches this one, instead of the unit that it would reach next.

        Raises:
            ValueError: ``modules`` holds something that is not an FSDPModule.
        """
        self._fairshard_unit.ahead_in_backward = units_of(modules, "FSDPModule", ValueError)

    def set_forward_prefetch(self, enable: bool, *, recurse: bool = True) -> None:
        """False: as in PyTorch, the forward gathers ahead only modules set by `set_modules_to_forward_prefetch`.

        Raises:
            ValueError: ``enable`` is not a bool.
        """
        self._fairshard_set("enable", enable, recurse, "predicts_forward")

    # ---- gradients

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """False: more backwards of the same forwards follow, and the predicted order stays valid for them.

        Raises:
            ValueError: ``is_last_backward`` is not a bool.
        """
        check_flag("is_last_backward", is_last_backward)
        root_of(self).is_last_backward = is_last_backward

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """False: accumulate whole gradients on each rank, without communication, until set to True again.

        Raises:
            ValueError: ``requires_gradient_sync`` is not a bool.
        """
        self._fairshard_set("requires_gradient_sync", requires_gradient_sync, recurse, "sync")

    def _fairshard_set(self, argument: str, value: bool, recurse: bool, attribute: str = "") -> None:
        check_flag(argument, value)
        for unit in units_of_module(self, recurse):
            setattr(unit, attribute or argument, value)

    def reset_iter_state(self) -> None:
        """Drop the state of a forward or backward that raised; the next forward also does so.

        Raises:
            TrainingStateError: this is not the outermost module.
        """
        root = root_of(self)
        require(
            root.units[0] is self._fairshard_unit,
            "`reset_iter_state` must be called on the outermost sharded module, but this is "
            f"`{self._fairshard_unit.fqn}`. Call it on the model.",
            TrainingStateError,
        )
        root.engine.reset(root)

    def set_device_mesh(self, mesh: DeviceMesh) -> None:
        """After unpickling, use ``mesh`` for this module and all below it; otherwise all ranks are used.

        Raises:
            TypeError: ``mesh`` is not a mesh.
            ValueError: it does not have as many dimensions as the original mesh, or does not contain this rank.
            TrainingStateError: in the middle of a pass.
        """
        check_mesh(mesh)
        units = units_of_module(self, recurse=True)
        for unit in units:
            if unit.root is not None:
                assert_idle(unit.root, "set_device_mesh")
            wanted = 1 if unit.groups.replicas is None else 2
            require(
                mesh.ndim == wanted,
                f"`mesh` must have {wanted} dimension{'s' * (wanted - 1)}, like the original mesh of unit "
                f"`{unit.fqn or 'root'}`, but has {mesh.ndim}.",
            )
        for unit in units:
            unit.groups.set(mesh.get_group() if mesh.ndim == 1 else (mesh.get_group(1), mesh.get_group(0)))
            unit.root = None
            for flat_param in unit.flat_params:
                shown = flat_param.shows
                if isinstance(shown, ShownDTensors):
                    shown.follow_mesh(mesh)

    # ---- nn.Module

    def __getattr__(self, name: str) -> Any:
        """Say what `fully_shard` has in place of attributes of `FullyShardedDataParallel`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            check_other_door(name)
            raise

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero the gradients of all parameters, those of DTensors where `parameters` yields whole ones too."""
        shown = [unit for _, unit in units_below(self) if unit.registered.are_leaves and not unit.open_calls]
        for unit in shown:
            unit.registered.swap(to_leaves=False)
        try:
            super().zero_grad(set_to_none)
        finally:
            for unit in shown:
                unit.registered.swap(to_leaves=unit.is_gathered)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FSDPModule:
        refuse_sharing(fn)
        for unit in units_of_module(self, recurse):  # check before anything changes
            check_conversion(unit, fn)
            if unit.state is not TrainingState.FORWARD:
                unpin(unit)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        adopt_changes(self._fairshard_unit)
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        unit = self._fairshard_unit
        if unit.root is not None:
            assert_idle(unit.root, "pickle or deepcopy")
        self.reshard()
        adopt_changes(unit)  # a copy starts with the values of the shards
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple) or reduced[1][:1] != (type(self),):
            raise FairshardError(
                f"A sharded module must be pickled and copied by its state, but {self._fairshard_class.__name__} has "
                "its own `__reduce__`, which cannot handle shards. Save its state dict instead."
            )
        state = without_torch_keys(reduced[2]) if isinstance(reduced[2], dict) else reduced[2]
        return _rebuilt, (self._fairshard_class, self._fairshard_methods), state, *reduced[3:]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        register(self, self._fairshard_unit)
        watch_copy(self._fairshard_unit)


def root_of(module: FSDPModule) -> Root:
    """The root of the unit of ``module``; if it has none, `claim` makes ``module`` the outermost module."""
    return module._fairshard_unit.root or claim(module)


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """Accepted without effect for the stages of a pipeline: each model keeps its own streams.

    Raises:
        ValueError: ``modules`` holds something that is not an FSDPModule.

    Source: PyTorch's function of the same name.
    """
    units_of(modules, "FSDPModule", ValueError)


_classes: dict[tuple[type[nn.Module], frozenset[str]], type[FSDPModule]] = {}


def sharded_class(original: type[nn.Module], forward_methods: frozenset[str] = frozenset()) -> type[FSDPModule]:
    """The class of modules of class ``original`` after `fully_shard`; its ``forward_methods`` run gathered."""
    key = original, forward_methods
    if key not in _classes:
        methods = {**explaining_methods(original), **{name: ForwardMethod(name) for name in forward_methods}}
        own = {"_fairshard_class": original, "_fairshard_methods": forward_methods, "__module__": original.__module__}
        _classes[key] = type(f"FSDP{original.__name__}", (FSDPModule, original), {**methods, **own})
    return _classes[key]


def _rebuilt(original: type[nn.Module], forward_methods: frozenset[str]) -> nn.Module:
    """An empty sharded module of class ``original``, to be filled with state."""
    made = original.__new__(original)
    made.__class__ = sharded_class(original, forward_methods)
    return made


@not_traced
def _casting(dtype: torch.dtype, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    outputs = function(*args, **kwargs)
    tracer = set_tracer(None)
    try:
        return apply_to_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, outputs)
    finally:
        set_tracer(tracer)
