"""Door 1: ``FullyShardedDataParallel``, a module wrapper with fairscale's names and defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fairshard.errors import TrainingStateError
from fairshard.nn.data_parallel.config import resolve
from fairshard.nn.data_parallel.construction import make_ready, resolve_construction
from fairshard.nn.data_parallel.conversion import check_conversion
from fairshard.nn.data_parallel.full_params import Showing, is_shown, summon
from fairshard.nn.data_parallel.grad_methods import GradMethods
from fairshard.nn.data_parallel.groups import Groups, find_groups
from fairshard.nn.data_parallel.ignored import resolve_ignored
from fairshard.nn.data_parallel.join_methods import JoinMethods
from fairshard.nn.data_parallel.late_options import late_options, offload_of
from fairshard.nn.data_parallel.method_calls import gathering, naming_cure
from fairshard.nn.data_parallel.optim_state_methods import OptimStateMethods
from fairshard.nn.data_parallel.optimizer_check import watch_copy, watch_optimizers
from fairshard.nn.data_parallel.options import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from fairshard.nn.data_parallel.prefetch_methods import PrefetchMethods
from fairshard.nn.data_parallel.running import run
from fairshard.nn.data_parallel.sharding import check_not_sharded, shard_parameters
from fairshard.nn.data_parallel.training_state import TrainingState
from fairshard.nn.data_parallel.tree import UNIT_ATTRIBUTE, join, units_below, walk
from fairshard.nn.data_parallel.unit import Unit
from fairshard.nn.data_parallel.unit_plan import auto_wrap_children


class FullyShardedDataParallel(GradMethods, JoinMethods, OptimStateMethods, PrefetchMethods):
    """Shards the parameters of ``module``, their gradients and their optimizer state over data-parallel ranks.

    Each rank keeps ``1 / world_size`` of every parameter. The wrapper gathers them whole before its module
    computes, frees them after, and reduce-scatters the gradients, so that each rank's optimizer steps its own
    shard. Wrap large submodules on their own, and the whole model last: what inner wrappers have taken, outer ones
    leave alone.

    >>> import torch
    >>> from fairshard.nn import FullyShardedDataParallel as FSDP
    >>> blocks = [FSDP(torch.nn.Linear(8, 8)) for _ in range(2)]
    >>> model = FSDP(torch.nn.Sequential(*blocks, torch.nn.Linear(8, 1)))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model(torch.ones(4, 8)).mean().backward()
    >>> optimizer.step()

    Args:
        module: what to shard; its parameters are replaced in place.
        process_group: the ranks to shard over; the default group if None. For hybrid strategies a pair: the ranks to
            shard over, and those that hold the same shard.
        reshard_after_forward: free the whole parameters between forward and backward, and gather them again; a number
            keeps them cut over so many ranks. The outermost wrapper keeps its own in any case.
        mixed_precision: gather and compute in ``compute_dtype``, fp16 by default, and cast floating inputs to it;
            shards, gradients of shards and optimizer state stay fp32. Or a `MixedPrecision`.
        fp32_reduce_scatter: send gradients in fp32 under ``mixed_precision``.
        flatten_parameters: one flat parameter for all of a unit's; False: a 1-D shard for each.
        cpu_offload: keep shards and what the optimizer makes of them in host memory; gather from there.
        compute_dtype: the dtype to compute in under ``mixed_precision``.
        move_grads_to_cpu: copy reduced gradients to host memory, where the optimizer then steps a master copy of
            the shards; the value of ``cpu_offload`` if None. False with ``cpu_offload`` keeps them on the compute
            device for `fairshard.optim.CPUOptimizer` to fetch.
        bucket_cap_mb: gradients are collected up to this many MB (over all ranks) before they are sent; 0 or less
            sends each unit's on its own. The outermost wrapper's value counts.
        device_mesh: instead of ``process_group``; 2-D (replicas, shards) for hybrid strategies.
        process_group_reduce_scatter: a second group of the same ranks, for gradients.
        sharding_strategy: what is cut, and for how long; FULL_SHARD unless ``reshard_after_forward`` is False.
        buffer_dtype: what floating buffers are cast to while the module computes.
        force_input_to_fp32: without mixed precision, cast floating inputs to fp32.
        backward_prefetch: when the backward starts to gather the next unit; None for not ahead.
        forward_prefetch: False for not gathering the next unit ahead in forward; None and True do.
        limit_all_gathers: accepted; memory is bounded in any case.
        gradient_predivide_factor: divide gradients by it before they are summed, and by the rest after.
        disable_reshard_on_root: False lets the outermost wrapper, too, free its parameters after the forward.
        state_dict_device: the CPU to have state dicts in host memory; where the model computes if None. This and the
            next hold for all wrappers inside; `set_state_dict_type` overrides them.
        state_dict_on_rank_0_only: state dicts are given, and taken, on rank 0 alone; the others get an empty one.
        no_broadcast_optim_state: noted in `local_metadata_dict`; the optimizer state of a unit on a group of its own
            stays with its ranks in any case.
        clear_autocast_cache: drop autocast's casts after each forward of this wrapper, also where it keeps parameters.
        verbose: show all settings in ``repr``.
        move_params_to_cpu: the later name of ``cpu_offload``.
        param_init_fn: gives memory and values to what a module on the meta device owns itself; if None,
            ``to_empty`` and the module's own ``reset_parameters`` do.
        device_id: a GPU's number or a device: compute there, and move inputs there. What is on the CPU is cut there.
        compute_device: the same, but inputs are left where they are.
        sync_module_states: let all ranks begin with the parameters and buffers of rank 0. **Collective** then.
        allow_reset_parameters: ``reset_parameters()`` of the wrapper calls that of the module, with whole parameters.
            Seed all ranks alike before. **Collective**.
        ignored_modules: modules below ``module`` to leave whole on every rank; their gradients are not reduced.
        ignored_states: modules and parameters to leave whole, instead of the other two arguments.
        ignored_parameters: parameters to leave whole.
        auto_wrap_policy: which modules inside become units of their own, with the same arguments: one of
            `fairshard.nn.wrap`, or PyTorch's.
        use_orig_params: register this rank's part of each original parameter, 1-D, under its own names: views of the
            shards, for param groups by original parameter.
        order_check: compare the order of units across ranks in each step (``"always"``), in the first three and every
            50th (``"sampled"``) or never (``"off"``). All wrappers of a model need the same value.
        nan_check: after each backward, raise on all ranks if a gradient is not finite, and name it and its rank. All
            wrappers of a model need the same value.

    Raises:
        ValueError: there is no process group, the arguments contradict each other, or the module is sharded already.
        TypeError: a parameter has a dtype that cannot be sharded.

    Source: fairscale's class of the same name; the method is ZeRO-3, Rajbhandari et al. 2020.
    """

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
        device_id: int | torch.device | None = None,
        compute_device: torch.device | None = None,
        sync_module_states: bool = False,
        allow_reset_parameters: bool = False,
        ignored_modules: Iterable[nn.Module] | None = None,
        ignored_states: Iterable[nn.Module | nn.Parameter] | None = None,
        ignored_parameters: Iterable[nn.Parameter] | None = None,
        auto_wrap_policy: Any = None,
        use_orig_params: bool = False,
        order_check: str = "sampled",
        nan_check: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"`module` must be an nn.Module, but is {type(module).__name__}.")
        first = next(module.parameters(), None)
        late = late_options(
            disable_reshard_on_root=disable_reshard_on_root,
            state_dict_device=state_dict_device,
            compute_device=torch.device("cpu") if first is None else first.device,
            state_dict_on_rank_0_only=state_dict_on_rank_0_only,
            no_broadcast_optim_state=no_broadcast_optim_state,
            clear_autocast_cache=clear_autocast_cache,
            verbose=verbose,
        )
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
        }
        self.config = resolve(**settings, late=late)
        groups = find_groups(
            self.config.sharding_strategy, process_group, device_mesh, process_group_reduce_scatter
        )
        how = resolve_construction(param_init_fn, device_id, compute_device, sync_module_states)
        ignored = resolve_ignored(module, ignored_modules, ignored_states, ignored_parameters)
        check_not_sharded(module, ignored)
        if auto_wrap_policy is not None:
            others = {
                "process_group": process_group,
                "device_mesh": device_mesh,
                "process_group_reduce_scatter": process_group_reduce_scatter,
                "disable_reshard_on_root": disable_reshard_on_root,
                "state_dict_device": state_dict_device,
                "state_dict_on_rank_0_only": state_dict_on_rank_0_only,
                "no_broadcast_optim_state": no_broadcast_optim_state,
                "clear_autocast_cache": clear_autocast_cache,
                "verbose": verbose,
                "param_init_fn": param_init_fn,
                "device_id": device_id,
                "compute_device": compute_device,
                "sync_module_states": sync_module_states,
                "allow_reset_parameters": allow_reset_parameters,
            }
            ignored = auto_wrap_children(
                module,
                auto_wrap_policy,
                FullyShardedDataParallel,
                {**settings, **others},
                world_size=groups.shard.world_size,
                ignored=ignored,
            )
        origin = make_ready(module, how, ignored, groups.spanning())
        flat_params = shard_parameters(module, self.config, groups.shard.rank, groups.shard.world_size, origin)
        unit = Unit(groups, flat_params, self.config, origin)
        setattr(self, UNIT_ATTRIBUTE, unit)
        self._init_state()
        self.forward_methods: set[str] = set()
        self.allow_reset_parameters = allow_reset_parameters
        self.module = module
        if flatten_parameters and not use_orig_params:
            for flat_param in flat_params:
                flat_param.register_on(self)
        watch_optimizers(flat_params, self.config)
        for fqn, inner in units_below(self):
            inner.place(fqn)
            inner.is_inner = inner is not unit
            inner.state_dict_settings = late.settings() or inner.state_dict_settings

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Gather the parameters, run the wrapped module, free them. **Collective.**"""
        return self._run(self._modules["module"], args, kwargs)

    def _run(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outputs = run(self, self._unit, function, args, kwargs)
        if self.config.late.clear_autocast_cache:
            torch.clear_autocast_cache()
        return outputs

    # ---- gradients

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """The parameters, as `parameters` yields them, that have a gradient, on them or held by their unit."""
        held = {shard for _, unit in units_below(self) for shard in unit.shard_grad}
        return [param for param in self.parameters() if param.grad is not None or param in held]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop or zero all gradients, wherever they are kept."""
        super().zero_grad(set_to_none)
        for _, unit in units_below(self):
            unit.zero_grad(set_to_none)

    # ---- nn.Module

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Apply ``fn`` to every module below, and to this one, with whole parameters. **Collective.**"""
        if is_shown(self._unit):
            return super().apply(fn)
        self._claimed()
        with summon([self._unit], Showing(writeback=True)):
            return super().apply(fn)

    def _reset_whole(self) -> None:
        if is_shown(self._unit):
            self.module.reset_parameters()  # type: ignore[operator]
            return
        self._claimed()
        with summon([self._unit], Showing(writeback=True)):
            self.module.reset_parameters()  # type: ignore[operator]

    # ---- what it looks like

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The shards, 1-D: ``<unit>.flat_param_<i>``, or original names without flattening or with ``use_orig_params``.

        Inside `summon_full_params` the original names and shapes.
        """
        return self._named("_parameters", prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The buffers under their unwrapped names."""
        return self._named("_buffers", prefix, recurse, remove_duplicate)

    def assert_state(self, state: TrainingState | Sequence[TrainingState]) -> None:
        """Raise unless this unit is in ``state``, or in one of several.

        Raises:
            TrainingStateError: it is in another.
        """
        wanted = [state] if isinstance(state, TrainingState) else state
        if not any(one.includes(self.training_state) for one in wanted):
            names = " or ".join(one.name for one in wanted)
            raise TrainingStateError(
                f"Unit `{self._unit.fqn or 'root'}` must be in state {names}, but is in {self.training_state.name} "
                f"(rank {self.rank})."
            )

    def _find_inside(self, name: str) -> Any:
        if name in self.forward_methods:
            return gathering(self._unit, getattr(self.module, name), self._run)
        found = naming_cure(self._unit, self.module, name)
        return self._reset_whole if name == "reset_parameters" and self.allow_reset_parameters else found

    def __getstate__(self) -> dict[str, Any]:
        unit = self._unit
        if unit.root is not None:
            unit.root.assert_idle("pickle or deepcopy")
        if unit.is_gathered:
            unit.reshard()
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        watch_copy(self._unit)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FullyShardedDataParallel:
        check_conversion(self._unit, fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for flat_param in self._unit.flat_params:
            flat_param.settle()
        return self

    def _named(self, kind: str, prefix: str, recurse: bool, remove_duplicate: bool) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for fqn, part in walk(self) if recurse else [("", self)]:
            for name, value in getattr(part, kind).items():
                if value is not None and not (remove_duplicate and id(value) in seen):
                    seen.add(id(value))
                    yield join(prefix, join(fqn, name)), value
