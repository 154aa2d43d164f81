"""``FullyShardedDataParallel``, a module wrapper with fairscale's names and defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fairshard.checks.leaf_writes import unpin
from fairshard.checks.optimizer_check import watch_copy, watch_optimizers
from fairshard.checks.scaling_check import watch_scaling
from fairshard.checks.usage import assert_idle
from fairshard.engine.training_state import TrainingState
from fairshard.engine.tree import UNIT_ATTRIBUTE, paths_of, units_below, walk
from fairshard.engine.unit import Unit
from fairshard.errors import ParameterShardedError, TrainingStateError
from fairshard.nn.data_parallel.guards import check_wrappable, refuse_torch_functions, wrapper_keywords
from fairshard.nn.data_parallel.methods import PLACEMENT, explaining, gathering, placement_of
from fairshard.nn.data_parallel.running import NOT_IN_A_GRAPH, run
from fairshard.nn.data_parallel.torch_state import mark_managed
from fairshard.nn.data_parallel.wrapper.attributes import HIDEABLE, is_inside, option_of
from fairshard.nn.data_parallel.wrapper.grads import GradMethods
from fairshard.nn.data_parallel.wrapper.optim_state import OptimStateMethods
from fairshard.params.grads import grads_of
from fairshard.settings.check import require
from fairshard.settings.config import host_or, offload_of, resolve
from fairshard.settings.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fairshard.settings.groups import Groups, find_groups
from fairshard.setup.construction import make_ready, resolve_construction
from fairshard.setup.guard import check_conversion, refuse_inner_states
from fairshard.setup.ignored import resolve_ignored
from fairshard.setup.lines import PlacementFn, check_placement
from fairshard.setup.sharding import check_not_sharded, shard_parameters
from fairshard.setup.survey import Survey
from fairshard.state.full_params import Showing, summon
from fairshard.state.shown import is_shown
from fairshard.utils.graph_breaks import breaks_graph
from fairshard.utils.names import join


class FullyShardedDataParallel(GradMethods, OptimStateMethods):
    """Shards the parameters of ``module``, their gradients and their optimizer state over data-parallel ranks.

    Each rank keeps ``1 / world_size`` of every parameter. The wrapper gathers whole parameters before its module
    computes, frees them afterwards, and reduce-scatters the gradients, so that each rank's optimizer steps its own
    shard. Wrap large submodules separately, and the whole model last: an outer wrapper shards every parameter that no
    inner wrapper has sharded.

    >>> import torch
    >>> from fairshard.nn import FullyShardedDataParallel as FSDP
    >>> blocks = [FSDP(torch.nn.Linear(8, 8)) for _ in range(2)]
    >>> model = FSDP(torch.nn.Sequential(*blocks, torch.nn.Linear(8, 1)))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model(torch.ones(4, 8)).mean().backward()
    >>> optimizer.step()

    Args:
        module: the module to shard; its parameters are replaced in place.
        process_group: the ranks to shard over; the default group if None. For hybrid strategies a pair: the ranks to
            shard over, and the ranks that hold the same shard.
        reshard_after_forward: free the whole parameters between forward and backward, and gather them again; a number
            keeps them sharded over that many ranks. The outermost wrapper keeps its own; see
            ``disable_reshard_on_root``.
        mixed_precision: gather and compute in ``compute_dtype``, fp16 by default, and cast floating inputs to it;
            shards, gradients of shards and optimizer state stay fp32. Also accepts a `MixedPrecision`.
        fp32_reduce_scatter: reduce gradients in fp32 under ``mixed_precision``.
        flatten_parameters: one flat parameter for the whole unit; False: a 1-D shard per parameter, or the parameter
            in its own shape if it is sharded over one rank.
        cpu_offload: keep shards and optimizer state in host memory; gather from there.
        compute_dtype: the dtype to compute in under ``mixed_precision``.
        move_grads_to_cpu: copy reduced gradients to host memory, where the optimizer steps a master copy of the
            shards; the value of ``cpu_offload`` if None. False with ``cpu_offload`` keeps them on the compute device
            for `fairshard.optim.CPUOptimizer` to fetch.
        bucket_cap_mb: gradients are collected up to this many MB (over all ranks) before they are reduced; 0
            reduces the gradients of each unit separately. The value of the outermost wrapper applies.
        device_mesh: instead of ``process_group``; 2-D (replicas, shards) for hybrid strategies.
        process_group_reduce_scatter: a second group of the same ranks, for gradients.
        sharding_strategy: what is sharded, and when it is freed; FULL_SHARD unless ``reshard_after_forward`` is False.
        buffer_dtype: dtype to which floating buffers are cast while the module computes.
        force_input_to_fp32: without mixed precision, cast floating inputs to fp32.
        backward_prefetch: when the backward starts to gather the next unit; None disables gathering ahead.
        forward_prefetch: False disables gathering the next unit ahead in the forward; None and True enable it.
        limit_all_gathers: accepted without effect; memory is always bounded.
        gradient_predivide_factor: divide gradients by this before the sum, and by the remaining factor after it.
        disable_reshard_on_root: False makes the outermost wrapper also free its parameters after the forward.
        state_dict_device: where state dicts are kept: the CPU (host memory) or the compute device, the default. This
            and the next option apply to all inner wrappers; `set_state_dict_type` overrides them.
        state_dict_on_rank_0_only: only rank 0 saves and loads state dicts; other ranks get an empty one.
        no_broadcast_optim_state: recorded in `local_metadata_dict`, and set on inner wrappers with a group of one rank
            (experts). The optimizer state of a unit on its own group always stays on the ranks of that group.
        clear_autocast_cache: clear autocast's cache after each forward of this wrapper, even if it stays gathered.
        verbose: show all settings in ``repr``.
        move_params_to_cpu: the newer name of ``cpu_offload``.
        param_init_fn: called with each module on the meta device to allocate and initialize its own parameters and
            buffers; if None, ``to_empty`` and the module's ``reset_parameters`` are used.
        device_id: the device to compute on, its name, or a GPU number; inputs are moved to it. A module on the CPU is
            cut on the CPU.
        compute_device: like ``device_id``, but inputs are not moved.
        sync_module_states: broadcast rank 0's parameters and buffers before sharding. **Collective** if True.
        allow_reset_parameters: ``reset_parameters()`` of the wrapper calls the module's, with whole parameters. Set the
            same seed on all ranks first. **Collective**.
        ignored_modules: modules below ``module`` that stay whole on every rank; their gradients are not reduced.
        ignored_states: modules and parameters that stay whole, instead of the other two arguments.
        ignored_parameters: parameters that stay whole.
        auto_wrap_policy: policy from `fairshard.nn.wrap` or PyTorch that chooses inner modules to wrap with the same
            arguments.
        use_orig_params: register this rank's part of each original parameter under its original names, as a 1-D view
            of the shard (in the original shape on one rank), for param groups by original parameter.
        order_check: accepted (``"sampled"``, ``"always"``, ``"off"``); ranks are always compared at the start of each
            backward. All wrappers of a model need the same value.
        nan_check: after each backward, raise on all ranks if a gradient is not finite, naming it and its rank. All
            wrappers of a model need the same value.
        placement_fn: with ``use_orig_params``, maps a parameter to a `RowBlocks`, between whose blocks it is cut, or to
            an `Owned`, which puts it on one rank; None: cut anywhere.

    Raises:
        ValueError: there is no process group, the arguments contradict each other, or the module is already sharded.
        TypeError: a parameter has a dtype that cannot be sharded.

    Source: fairscale's class of the same name; the algorithm is ZeRO-3, Rajbhandari et al. 2020.
    """

    @wrapper_keywords
    def __init__(
        self,
        module: nn.Module,
        process_group: Groups | None = None,
        reshard_after_forward: bool | int = True,
        mixed_precision: bool | MixedPrecision | None = False,
        fp32_reduce_scatter: bool = False,
        flatten_parameters: bool = True,
        cpu_offload: bool | CPUOffload | None = False,
        compute_dtype: torch.dtype | None = None,
        move_grads_to_cpu: bool | None = None,
        bucket_cap_mb: float = 25,
        *,
        device_mesh: DeviceMesh | None = None,
        process_group_reduce_scatter: ProcessGroup | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        buffer_dtype: torch.dtype | None = None,
        force_input_to_fp32: bool = False,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        forward_prefetch: bool | None = None,
        limit_all_gathers: bool = True,
        gradient_predivide_factor: float | None = None,
        disable_reshard_on_root: bool = True,
        state_dict_device: torch.device | str | None = None,
        state_dict_on_rank_0_only: bool = False,
        no_broadcast_optim_state: bool = False,
        clear_autocast_cache: bool = False,
        verbose: bool = False,
        move_params_to_cpu: bool | None = None,
        param_init_fn: Callable[[nn.Module], Any] | None = None,
        device_id: int | str | torch.device | None = None,
        compute_device: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        allow_reset_parameters: bool = False,
        ignored_modules: Iterable[nn.Module] | None = None,
        ignored_states: Iterable[nn.Module | nn.Parameter] | None = None,
        ignored_parameters: Iterable[nn.Parameter] | None = None,
        auto_wrap_policy: Any = None,
        use_orig_params: bool = False,
        order_check: str = "sampled",
        nan_check: bool = False,
        placement_fn: PlacementFn | None = None,
    ) -> None:
        super().__init__()
        check_wrappable(module)
        first = next(module.parameters(), None)
        settings: dict[str, Any] = {
            "reshard_after_forward": reshard_after_forward,
            "mixed_precision": mixed_precision,
            "fp32_reduce_scatter": fp32_reduce_scatter,
            "flatten_parameters": flatten_parameters,
            "cpu_offload": offload_of(cpu_offload, move_params_to_cpu),
            "compute_dtype": compute_dtype,
            "move_grads_to_cpu": move_grads_to_cpu,
            "bucket_cap_mb": bucket_cap_mb,
            "sharding_strategy": sharding_strategy,
            "buffer_dtype": buffer_dtype,
            "force_input_to_fp32": force_input_to_fp32,
            "backward_prefetch": backward_prefetch,
            "forward_prefetch": forward_prefetch,
            "limit_all_gathers": limit_all_gathers,
            "gradient_predivide_factor": gradient_predivide_factor,
            "use_orig_params": use_orig_params,
            "order_check": order_check,
            "nan_check": nan_check,
            "disable_reshard_on_root": disable_reshard_on_root,
            "state_dict_device": host_or(torch.device("cpu") if first is None else first.device, state_dict_device),
            "state_dict_on_rank_0_only": state_dict_on_rank_0_only,
            "no_broadcast_optim_state": no_broadcast_optim_state,
            "clear_autocast_cache": clear_autocast_cache,
            "verbose": verbose,
        }
        config = self._fairshard_config = resolve(**settings)
        check_placement(placement_fn, use_orig_params)
        groups = find_groups(config.sharding_strategy, process_group, device_mesh, process_group_reduce_scatter)
        how = resolve_construction(param_init_fn, device_id, compute_device, sync_module_states)
        survey = Survey(module)
        ignored = resolve_ignored(survey, ignored_modules, ignored_states, ignored_parameters)
        check_not_sharded(survey, ignored)
        if auto_wrap_policy is not None:
            from fairshard.planning.units import auto_wrap_children

            others = {
                "process_group": process_group,
                "device_mesh": device_mesh,
                "process_group_reduce_scatter": process_group_reduce_scatter,
                "param_init_fn": param_init_fn,
                "device_id": device_id,
                "compute_device": compute_device,
                "sync_module_states": sync_module_states,
                "allow_reset_parameters": allow_reset_parameters,
                "placement_fn": placement_fn,
            }
            ignored = auto_wrap_children(
                module,
                auto_wrap_policy,
                FullyShardedDataParallel,
                {**settings, **others},
                world_size=groups.shard.world_size,
                ignored=ignored,
            )
            survey.look()
        origin = make_ready(survey, how, ignored, groups.spanning())
        flat_params = shard_parameters(survey, config, groups, origin, placement_fn)
        unit = Unit(groups, flat_params, config, origin)
        setattr(self, UNIT_ATTRIBUTE, unit)
        self._init_state()
        self._fairshard_methods: set[str] = set()
        self._fairshard_resets = allow_reset_parameters
        self.module = module
        own = paths_of(self)
        for managed in (self, *(part for _, part in own)):
            mark_managed(managed)
        if flatten_parameters and not use_orig_params:
            for flat_param in flat_params:
                flat_param.shows.place = self, flat_param.name
                self.register_parameter(flat_param.name, flat_param.shard)
        watch_optimizers(flat_params, config)
        watch_scaling()
        refuse_inner_states(own, unit)
        for inner in (unit, *(inner for _, inner in survey.units)):
            inner.is_inner = inner is not unit
            if config.sets_state_dicts:
                inner.state_dict_settings = config.state_dict_settings()
            if inner.groups.is_alone and not groups.is_alone:
                inner.config = replace(inner.config, no_broadcast_optim_state=True)

    @breaks_graph(NOT_IN_A_GRAPH)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Gather the parameters, run the wrapped module, free them. **Collective.**"""
        return self._run(self._modules["module"], args, kwargs)

    @breaks_graph(NOT_IN_A_GRAPH)
    def _run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs = run(self, self._unit, function, args, kwargs)
        if self._fairshard_config.clear_autocast_cache:
            torch.clear_autocast_cache()
        return outputs

    # ---- gradients

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The parameters that have a gradient, in ``.grad`` or held by their unit."""
        held = {shard for _, unit in units_below(self) for shard in grads_of(unit.flat_params)}
        return [param for param in self.parameters() if param.grad is not None or param in held]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero all gradients, including those held by units."""
        self._leave_raised()
        super().zero_grad(set_to_none)
        for _, unit in units_below(self):
            for flat_param in unit.flat_params:
                if flat_param.grad is not None:
                    flat_param.grad.zero(set_to_none)

    def _leave_raised(self) -> None:
        """Register shards after a backward that has raised, even if its task is still alive."""
        root = self._unit.root
        if root is not None and root.backward is not None and root.engine.is_over(root.backward):
            for _, unit in units_below(self):
                unit.stop_computing()

    # ---- nn.Module

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Apply ``fn`` to this module and every module below it, with whole parameters. **Collective.**"""
        with self._whole():
            return super().apply(fn)

    def _reset_whole(self) -> None:
        with self._whole():
            self.module.reset_parameters()  # type: ignore[operator]

    def _whole(self) -> AbstractContextManager[None]:
        """Context in which the parameters of this unit are whole; changes are kept. **Collective** unless they are."""
        if is_shown(self._unit):
            return nullcontext()
        self._claimed()
        return summon([self._unit], Showing(writeback=True))

    # ---- names and state

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The 1-D shards: ``<unit>.flat_param_<i>``, or original names with ``use_orig_params`` or without flattening.

        With original names, a parameter that is sharded over one rank has its original shape. Inside
        `summon_full_params`, whole parameters under their original names.
        """
        self._leave_raised()
        return self._named("_parameters", prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The buffers under their unwrapped names."""
        return self._named("_buffers", prefix, recurse, remove_duplicate)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The modules under the names that their parameters have: a wrapper and its module share one name.

        peft, for instance, builds names of parameters from those of modules.
        """
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            yield from self.module.named_modules(memo, prefix, remove_duplicate)

    @property
    def _fqn_modifiers(self) -> Any:
        """What functions of torch.distributed.checkpoint.state_dict ask each module for, first of all."""
        refuse_torch_functions(self._unit)
        return self.__getattr__("_fqn_modifiers")

    def assert_state(self, state: TrainingState | Sequence[TrainingState]) -> None:
        """Check that this unit is in ``state``, or in one of several states.

        Raises:
            TrainingStateError: the unit is in another state.
        """
        wanted = [state] if isinstance(state, TrainingState) else state
        is_in_backward = self.training_state in (TrainingState.BACKWARD_PRE, TrainingState.BACKWARD_POST)
        require(
            self.training_state in wanted or (is_in_backward and TrainingState.BACKWARD in wanted),
            f"Unit `{self._unit.fqn or 'root'}` must be in state {' or '.join(one.name for one in wanted)}, but is in "
            f"{self.training_state.name} (rank {self.rank}).",
            TrainingStateError,
        )

    def _find_inside(self, name: str) -> Any:
        if name in self._fairshard_methods:
            return gathering(self._unit, getattr(self.module, name), self._run)
        if name in HIDEABLE and not is_inside(self, name):
            return option_of(self, name)
        try:
            found = explaining(self._unit, self.module, name)
        except ParameterShardedError:
            if name not in PLACEMENT:
                raise
            return placement_of(self._unit, name)
        return self._reset_whole if name == "reset_parameters" and self._fairshard_resets else found

    def __getstate__(self) -> dict[str, Any]:
        unit = self._unit
        if unit.root is not None:
            assert_idle(unit.root, "pickle or deepcopy")
        unpin(unit)
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        watch_copy(self._unit)
        watch_scaling()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FullyShardedDataParallel:
        check_conversion(self._unit, fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for flat_param in self._unit.flat_params:
            flat_param.adopt_assigned()
        return self

    def _named(self, kind: str, prefix: str, recurse: bool, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for fqn, part in walk(self) if recurse else [("", self)]:
            for name, value in getattr(part, kind).items():
                if value is not None and not (remove_duplicate and id(value) in seen):
                    seen.add(id(value))
                    yield join(prefix, join(fqn, name)), value
