"""What a wrapper offers to read and write its state: state dicts of three forms, and whole parameters to look at."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fairshard.errors import FairshardError, NotRootError, StateDictTypesDifferError
from fairshard.nn.data_parallel.assigned_values import is_assigned
from fairshard.nn.data_parallel.claim import claim, roots_below
from fairshard.nn.data_parallel.fairscale_shards import consolidate
from fairshard.nn.data_parallel.full_params import Showing, is_shown, summon
from fairshard.nn.data_parallel.local_state_dict import load_local_state_dict, local_metadata, local_state_dict
from fairshard.nn.data_parallel.root import Root
from fairshard.nn.data_parallel.state_dict import (
    Loading,
    check_loads_inside,
    check_whole_inside,
    load_module_state_dict,
    module_state_dict,
)
from fairshard.nn.data_parallel.state_dict_config import (
    OptimStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    default_settings,
    resolve_settings,
)
from fairshard.nn.data_parallel.tree import unit_of, units_below, walk
from fairshard.nn.data_parallel.unit import Unit
from fairshard.nn.data_parallel.unit_attributes import UnitAttributes


class StateMethods(UnitAttributes):
    """A wrapper's state."""

    def _init_state(self) -> None:
        self._loading = Loading(self._unit)
        self.register_load_state_dict_post_hook(_end_loading)  # type: ignore[no-untyped-call]

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The model's state under its unwrapped names, in the precision of the shards, in the form that is set.

        Whole by default: every rank gets all of it, in tensors of its own, which load into the unwrapped module and
        back. See `state_dict_type` for the other forms. Inside `summon_full_params` it is whole, and has what has been
        written there. **Collective**, except for local and sharded ones.

        Raises:
            TrainingStateError: inside a forward or backward.
            RuntimeError: the units have different forms set.
        """
        if args:  # nn.Module still takes them by position
            positional = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False))
            destination = positional.get("destination", destination)
            prefix, keep_vars = positional.get("prefix", prefix), positional.get("keep_vars", keep_vars)
        self._assert_idle("state_dict", or_shown=True)
        check_whole_inside((unit for _, unit in units_below(self)), "state_dict")
        # The outermost wrapper has compared the units: once for each of them would cost a walk for each.
        settings = self._unit.state_dict_settings if self._unit.is_inner else common_settings(self)
        if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            state = {} if destination is None else destination
            local = local_state_dict(self, settings.state_dict_config.offload_to_cpu)
            state.update({f"{prefix}{name}": value for name, value in local.items()})
            return state
        for before in self._state_dict_pre_hooks.values():
            before(self, prefix, keep_vars)
        state = module_state_dict(self, self._unit, destination, prefix, keep_vars)
        for after in self._state_dict_hooks.values():
            state = after(self, state, prefix, {"version": self._version}) or state
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of the form that is set; returns missing and unexpected keys. **Collective.**

        A whole one is given on every rank; with ``FullStateDictConfig(rank0_only=True)`` on rank 0, and ``{}``
        elsewhere, where each rank receives its shards unit by unit. Sharded values must hold what this rank owns, or
        be whole.

        ``assign=True`` copies all the same: parameters stay those that optimizers know, in their dtype and on their
        device. Only what has no memory yet, an ignored parameter or a buffer on the meta device, becomes the value.
        """
        self._assert_idle("load_state_dict", or_shown=True)
        check_loads_inside(unit for _, unit in units_below(self))
        if common_settings(self).state_dict_type is StateDictType.LOCAL_STATE_DICT:
            return load_local_state_dict(self, state_dict, strict)
        loadings = [part._loading for _, part in walk(self) if isinstance(part, StateMethods)]
        load = super().load_state_dict
        return load_module_state_dict(self, self._unit, loadings, state_dict, lambda state: load(state, strict, assign))

    def local_state_dict(self) -> dict[str, Tensor]:
        """This rank's shards and buffers, copied; loads only into the same wrapping, rank and world size."""
        return local_state_dict(self)

    def load_local_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> Any:
        """Load what `local_state_dict` returned on this rank; returns missing and unexpected keys.

        Raises:
            RuntimeError: it does not fit; nothing is changed then.
        """
        return load_local_state_dict(self, state_dict, strict)

    def local_metadata_dict(self) -> dict[str, Any]:
        """What the shards in `local_state_dict` are shards of, in fairscale's form: names, shapes, padding, buffers."""
        return local_metadata(self)

    @staticmethod
    def consolidate_shard_weights(
        shard_weights: Sequence[Mapping[str, Tensor]],
        shard_metadata: Sequence[Mapping[str, Any]],
        with_module_buffers: bool = True,
        strict: bool = True,
    ) -> dict[str, Tensor]:
        """The whole state dict, in host memory, from every rank's `local_state_dict` and `local_metadata_dict`.

        fairscale's own are read too. Buffers are those of rank 0. No process group is needed, and no model.
        ``strict=False`` leaves out parameters that the weights lack.

        Raises:
            ValueError: not one description for each rank.
            CheckpointError: they are not the shards of all ranks of one model, in order.
        """
        state, buffers = consolidate(shard_weights, shard_metadata, strict)
        return {name: state[name] for name in state if with_module_buffers or name not in buffers}

    # ---- the form of state dicts

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> StateDictSettings:
        """Choose the form of the state dicts of all wrappers in ``module``, and of their optimizers; returns the last.

        FULL_STATE_DICT gives whole values, SHARDED_STATE_DICT values that ``torch.distributed.checkpoint`` saves and
        loads as they are, LOCAL_STATE_DICT this rank's shards. torch's enum and configs are accepted.

        Raises:
            RuntimeError: a config does not belong to the form.
            AssertionError: the wrappers have had different forms set.
        """
        settings = resolve_settings(state_dict_type, state_dict_config, optim_state_dict_config)
        _check_door(module, settings)
        before = common_settings(module)
        for _, unit in units_below(module):
            unit.state_dict_settings = dataclasses.replace(settings)
        return before

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """The form and configs in force for the wrappers in ``module``; the defaults if it has none.

        Raises:
            AssertionError: they have different ones.
        """
        return common_settings(module)

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: StateDictConfig | None = None,
        optim_state_dict_config: OptimStateDictConfig | None = None,
    ) -> Iterator[None]:
        """`set_state_dict_type` for the ``with`` block; what was in force before is so again after it."""
        before = StateMethods.set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
        try:
            yield
        finally:
            for _, unit in units_below(module):
                unit.state_dict_settings = dataclasses.replace(before)

    # ---- whole parameters

    @contextmanager
    def summon_full_params(
        self: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
        volatile: bool = False,
    ) -> Iterator[None]:
        """Show whole parameters under their own names and shapes inside the ``with`` block. **Collective.**

        Also as ``FullyShardedDataParallel.summon_full_params(module)`` for a module that contains wrappers, and on
        an inner wrapper. With ``writeback`` each rank keeps, of what was written, the part that it owns;
        ``volatile=True`` is fairscale's ``writeback=False``; with one rank all is kept in any case. ``rank0_only``
        shows them on rank 0, ``offload_to_cpu`` in host memory. ``with_grads`` shows the reduced gradients too, and
        writes them back as parameters are.

        Raises:
            TrainingStateError: inside a forward, a backward or another such block.
            ValueError: ``rank0_only`` with ``writeback``.
        """
        writeback = writeback and not volatile
        if rank0_only and writeback:
            raise ValueError(
                "`rank0_only=True` must go with `writeback=False`, but writeback is True: the other ranks have nothing "
                "to write back. To change weights from rank 0, load a state dict there (FullStateDictConfig)."
            )
        if offload_to_cpu and not rank0_only:
            warnings.warn(
                "`offload_to_cpu=True` without `rank0_only=True` puts the whole model into host memory once for every "
                "rank of the host.",
                stacklevel=3,
            )
        firsts = []
        for root in roots_below(self):
            root.assert_idle("summon_full_params")
            firsts.append(root.units[0])
        units = [unit for _, unit in units_below(self)]
        if not recurse:
            own = unit_of(self)
            units = [unit for unit in units if unit is own or (own is None and unit in firsts)]
        how = Showing(writeback, rank0_only, offload_to_cpu=offload_to_cpu, with_grads=with_grads)
        with summon(units, how):
            yield

    # ---- private

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self._claimed()
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, *rest)
        self._loading.begin(self, state_dict, prefix, assigns=is_assigned(rest[0]))

    def _assert_idle(self, what: str, or_shown: bool = False) -> None:
        """Raise unless neither this unit nor one below it is in a pass or, unless ``or_shown``, shown whole."""
        root = self._claimed()
        units = [unit for _, unit in units_below(self)]
        if root.units[0] is self._unit:
            units += root.units
        root.assert_idle(what, [unit for unit in units if not (or_shown and is_shown(unit))])

    def _claimed(self) -> Root:
        """The root that this unit belongs to; it becomes one itself if nothing has claimed it."""
        return self._unit.root or claim(self)

    def _require_root(self, what: str) -> Root:
        root = self._unit.root if self._unit.is_inner else self._claimed()
        if root is None or root.units[0] is not self._unit:
            raise NotRootError(
                f"`{what}` must be called on the outermost wrapper, but this is the inner unit `{self._unit.fqn}`. "
                "Call it on the model that wraps this one."
            )
        return root


def common_settings(module: nn.Module) -> StateDictSettings:
    """The settings that all units below ``module`` share; the defaults if there are none.

    Raises:
        StateDictTypesDifferError: they have different ones.
    """
    units: list[tuple[str, Unit]] = units_below(module)
    if not units:
        return default_settings()
    (first_fqn, first), *others = units
    for fqn, unit in others:
        if unit.state_dict_settings != first.state_dict_settings:
            raise StateDictTypesDifferError(
                "All units of a model must have one type of state dict set, but they differ: "
                f"`{first_fqn or 'root'}` has {first.state_dict_settings}, `{fqn}` has {unit.state_dict_settings}. "
                "Call FullyShardedDataParallel.set_state_dict_type on the outermost module."
            )
    return dataclasses.replace(first.state_dict_settings)


def _check_door(module: nn.Module, settings: StateDictSettings) -> None:
    """Raise if what `fully_shard` has sharded is to give its state in another form than the one that it has."""
    for fqn, unit in units_below(module):
        if unit.members is not None and settings.state_dict_type is not StateDictType.SHARDED_STATE_DICT:
            raise FairshardError(
                f"The state dict of what `fully_shard` has sharded, `{fqn or 'root'}`, must stay one of DTensors, but "
                f"{settings.state_dict_type.name} is asked for. For whole values call "
                "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
                "options=StateDictOptions(full_state_dict=True)), and load_state_dict takes them as they are."
            )


def _end_loading(wrapper: StateMethods, keys: Any) -> None:
    wrapper._loading.end(keys)
