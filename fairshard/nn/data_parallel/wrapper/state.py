"""A wrapper's methods to read and write its state: state dicts of three forms, and access to whole parameters."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from fairshard.checks.usage import assert_idle
from fairshard.engine.root import Root
from fairshard.engine.tree import unit_of, units_below, walk
from fairshard.engine.unit import Unit
from fairshard.errors import NotRootError
from fairshard.nn.data_parallel.wrapper.attributes import UnitAttributes
from fairshard.settings.state_dicts import StateDictType
from fairshard.setup.claim import claim, roots_below
from fairshard.state import forms
from fairshard.state.assigned_values import is_assigned
from fairshard.state.forms import common_settings
from fairshard.state.full_params import Showing, summon
from fairshard.state.local import add_local_state_dict, load_local_state_dict, local_metadata, local_state_dict
from fairshard.state.model import (
    Loading,
    check_loads_inside,
    check_whole_inside,
    load_module_state_dict,
    module_state_dict,
)
from fairshard.state.shown import is_shown


class StateMethods(UnitAttributes):
    """Methods of a wrapper for state dicts and whole parameters."""

    def _init_state(self) -> None:
        self._fairshard_loading = Loading(self._unit)
        self.register_load_state_dict_post_hook(_end_loading)  # type: ignore[no-untyped-call]

    def state_dict(self, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The model's state under unwrapped names, in the dtype of the shards, in the form set for the model.

        By default every rank gets the whole state in new tensors, which the unwrapped module can load, and vice versa.
        See `state_dict_type` for the other forms. Inside `summon_full_params` the state is whole and includes values
        written there. **Collective**, except for the local and sharded forms.

        Raises:
            TrainingStateError: inside a forward or backward.
            RanksDisagreeError: on every rank, if the state is gathered and the ranks have run different things.
            RuntimeError: the units' forms differ.
        """
        self._assert_idle("state_dict", or_shown=True)
        check_whole_inside((unit for _, unit in units_below(self)), "state_dict")
        # Only the outermost wrapper compares the units: comparing in each wrapper would walk the tree every time.
        settings = self._unit.state_dict_settings if self._unit.is_inner else common_settings(self)
        if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            return add_local_state_dict(self, destination, prefix, settings.state_dict_config.offload_to_cpu)
        whole = settings.state_dict_type is StateDictType.FULL_STATE_DICT
        if whole and self._gathers(unit for _, unit in units_below(self)):
            from fairshard.checks.histories import compare_ranks

            compare_ranks(self)
        for before in self._state_dict_pre_hooks.values():
            before(self, prefix, keep_vars)
        state = module_state_dict(self, self._unit, destination, prefix, keep_vars)
        for after in self._state_dict_hooks.values():
            state = after(self, state, prefix, {"version": self._version}) or state
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict of the form set for the model; returns missing and unexpected keys. **Collective.**

        Every rank passes a whole state dict; with ``FullStateDictConfig(rank0_only=True)`` only rank 0 does, the other
        ranks pass ``{}`` and receive their shards unit by unit. Sharded values must hold this rank's part, or be
        whole.

        ``assign=True`` also copies: optimizers hold the parameters, which keep their dtype and device. Only an ignored
        parameter or a buffer on the meta device, which has no memory yet, is replaced with the value.
        """
        self._assert_idle("load_state_dict", or_shown=True)
        check_loads_inside(unit for _, unit in units_below(self))
        if common_settings(self).state_dict_type is StateDictType.LOCAL_STATE_DICT:
            return load_local_state_dict(self, state_dict, strict)
        loadings = [part._fairshard_loading for _, part in walk(self) if isinstance(part, StateMethods)]
        load = super().load_state_dict
        return load_module_state_dict(
            self, self._unit, loadings, state_dict, lambda state: load(state, strict, assign), strict
        )

    def local_state_dict(self) -> dict[str, Tensor]:
        """Copies of this rank's shards and buffers; they load only into the same wrapping, rank and world size.

        The description of the shards is in the attribute ``_metadata`` of the dict; without it, a load checks only
        names and shapes.
        """
        return local_state_dict(self)

    def load_local_state_dict(self, state_dict: Mapping[str, Tensor], strict: bool = True) -> Any:
        """Load the result of `local_state_dict` on this rank; returns missing and unexpected keys.

        Raises:
            RuntimeError: ``state_dict`` does not match; nothing has changed.
        """
        return load_local_state_dict(self, state_dict, strict)

    def local_metadata_dict(self) -> dict[str, Any]:
        """Description of the shards in `local_state_dict`, in fairscale's form: names, shapes, padding, buffers."""
        return local_metadata(self)

    @staticmethod
    def consolidate_shard_weights(
        shard_weights: Sequence[Mapping[str, Tensor]],
        shard_metadata: Sequence[Mapping[str, Any]],
        with_module_buffers: bool = True,
        strict: bool = True,
    ) -> dict[str, Tensor]:
        """The whole state dict, in host memory, from every rank's `local_state_dict` and `local_metadata_dict`.

        Also accepts fairscale's shards. Buffers are those of the first rank that has them. Units that only some ranks
        have (experts) keep their names; under one name all ranks or groups of ranks must have equal values. Needs no
        process group and no model. ``strict=False`` leaves out parameters that are missing from the weights.

        Raises:
            ValueError: the numbers of weights and descriptions differ.
            CheckpointError: they are not the shards of all ranks of one model, in order, or values differ.
        """
        from fairshard.state.fairscale_shards import consolidate

        state, buffers = consolidate(shard_weights, shard_metadata, strict)
        return {name: state[name] for name in state if with_module_buffers or name not in buffers}

    # ---- the form of state dicts

    set_state_dict_type = staticmethod(forms.set_state_dict_type)
    get_state_dict_type = staticmethod(common_settings)
    state_dict_type = staticmethod(forms.state_dict_type)

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

        Can be called on an inner wrapper, or as ``FullyShardedDataParallel.summon_full_params(module)`` for a module
        that contains wrappers. With ``writeback`` each rank keeps the changes to its own part; ``volatile=True`` is
        fairscale's ``writeback=False``; with one rank all changes are always kept. ``rank0_only`` shows the parameters
        on rank 0 only, ``offload_to_cpu`` in host memory. ``with_grads`` also shows the reduced gradients (zeros where
        a parameter has none, but others of its unit have one), and writes them back like parameters. Unless
        ``rank0_only``, the model may run inside the block without gradients (``generate``); it computes in the dtype of
        the shards, without communication.

        Raises:
            TrainingStateError: inside a forward, a backward or another such block.
            ValueError: ``rank0_only`` with ``writeback``.
        """
        writeback = writeback and not volatile
        if rank0_only and writeback:
            raise ValueError(
                "`rank0_only=True` needs `writeback=False`, but writeback is True: the other ranks have nothing to "
                "write back. To change weights from rank 0, load a state dict there (FullStateDictConfig)."
            )
        if offload_to_cpu and not rank0_only:
            warnings.warn(
                "`offload_to_cpu=True` without `rank0_only=True` puts the whole model into host memory once for every "
                "rank of the host.",
                stacklevel=3,
            )
        firsts = []
        for root in roots_below(self):
            assert_idle(root, "summon_full_params")
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
        self._fairshard_loading.begin(self, state_dict, prefix, assigns=is_assigned(rest[0]))

    def _assert_idle(self, what: str, or_shown: bool = False) -> None:
        """Check that neither this unit nor any below it is in a pass or, unless ``or_shown``, shown whole."""
        root = self._claimed()
        units = [unit for _, unit in units_below(self)]
        if root.units[0] is self._unit:
            units += root.units
        assert_idle(root, what, [unit for unit in units if not (or_shown and is_shown(unit))])

    def _gathers(self, units: Iterable[Unit]) -> bool:
        """Whether a whole state dict of this wrapper, which is the outermost, gathers any of ``units``."""
        cut = [unit for unit in units if unit.groups.shard.world_size > 1]
        return not self._unit.is_inner and bool(cut) and not any(map(is_shown, cut))

    def _claimed(self) -> Root:
        """The root of this unit; if it has none, `claim` makes this wrapper the outermost."""
        return self._unit.root or claim(self)

    def _require_root(self, what: str) -> Root:
        root = self._unit.root if self._unit.is_inner else self._claimed()
        if root is None or root.units[0] is not self._unit:
            raise NotRootError(
                f"`{what}` must be called on the outermost wrapper, but this is the inner unit `{self._unit.fqn}`. "
                "Call it on the model that wraps this one."
            )
        return root


def _end_loading(wrapper: StateMethods, keys: Any) -> None:
    wrapper._fairshard_loading.end(keys)
