"""A wrapper's methods for optimizer state dicts, under the names of FSDP1 and fairscale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from fairshard.engine.tree import units_below
from fairshard.nn.data_parallel.wrapper.attributes import UnitAttributes
from fairshard.settings.state_dicts import FullOptimStateDictConfig, StateDictType
from fairshard.setup.arguments import check_module
from fairshard.state.forms import common_settings
from fairshard.state.local import LAYOUT_KEY, check_layout, layout_bytes
from fairshard.state.optim_gathering import GatheredOptimState
from fairshard.state.optim_loading import ShardedOptimState, Source, check_of_class
from fairshard.state.optim_params import OptimParams, OptimStateKeyType, rekey, with_keys

OptimInput = list[dict[str, Any]] | Iterable[nn.Parameter]


class OptimStateMethods(UnitAttributes):
    """Saves and loads optimizer state of a sharded model under original names, whole or sharded.

    *Whole* state equals that of the same optimizer over the unwrapped model, keyed by name; `rekey_optim_state_dict`
    converts it to that optimizer's keys. Methods are **collective** over the ranks of the model, and gather or scatter
    one shard's state at a time; `get_shard_from_optim_state_dict` does not communicate.
    """

    # ---- in the form set for the model

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """The state of ``optim`` in the form set for ``model`` (see ``state_dict_type``).

        ``optim_state_dict`` is the result of ``optim.state_dict()``; if None, that is called.

        Raises:
            ValueError: the state differs across ranks, or is not elementwise.
        """
        _check_group(model, group)
        settings = common_settings(model)
        config = settings.optim_state_dict_config
        if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            saved = optim.state_dict() if optim_state_dict is None else optim_state_dict
            copied = tree_map_only(
                Tensor, lambda t: t.to("cpu" if config.offload_to_cpu else t.device, copy=True), saved
            )
            return {**copied, LAYOUT_KEY: layout_bytes(model)}
        gathered = _gathered(model, optim, optim_state_dict)
        if settings.state_dict_type is StateDictType.SHARDED_STATE_DICT:
            return gathered.sharded(config.offload_to_cpu)
        return gathered.full(_from_first(config), config.offload_to_cpu)

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Convert the result of `optim_state_dict`, in the form set for ``model``, for ``optim.load_state_dict``.

        With ``FullOptimStateDictConfig(rank0_only=True)`` rank 0 passes the state, and other ranks pass ``{}``.
        The order ``(optim_state_dict, model, optim)`` of older examples is also accepted. ``load_directly`` also loads
        the result.

        Raises:
            ValueError: ``optim_state_dict`` has no state, but ``optim`` has, which would be lost; or its entries do not
                combine into the state of one shard.
        """
        arguments: Any = (model, optim, optim_state_dict)
        if isinstance(model, Mapping):
            optim_state_dict, model, optim = arguments
        _check_group(model, group)
        settings = common_settings(model)
        if settings.state_dict_type is StateDictType.LOCAL_STATE_DICT:
            check_layout(model, optim_state_dict)
            made = {key: value for key, value in optim_state_dict.items() if key != LAYOUT_KEY}
        else:
            from_first = _from_first(settings.optim_state_dict_config)
            groups = OptimParams(model).groups_of(optim)
            keys = {param: name for name, param in model.named_parameters()} if is_named_optimizer else None
            source = Source.FIRST_RANK if from_first else Source.EVERY_RANK
            made = ShardedOptimState(model, source).make(optim_state_dict, groups, keys)
        _check_not_lost(made, optim)
        check_of_class(made, optim)
        if load_directly:
            optim.load_state_dict(made)
        return made

    # ---- whole

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: OptimInput | None = None,
        rank0_only: bool = True,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Whole state in host memory; with ``rank0_only`` an empty dict on the other ranks."""
        _check_group(model, group)
        return _gathered(model, optim, optim_input=optim_input).full(rank0_only, offload_to_cpu=True)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: OptimInput | None = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """Convert whole state, passed on every rank, for ``optim.load_state_dict``."""
        return _made(full_optim_state_dict, model, optim, optim_input)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: OptimInput | None = None,
        optim: Optimizer | None = None,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Like `shard_full_optim_state_dict`, but with state from rank 0; arguments of other ranks are ignored."""
        _check_group(model, group)
        return _made(full_optim_state_dict, model, optim, optim_input, Source.FIRST_RANK)

    # ---- sharded

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: Optimizer, group: ProcessGroup | None = None, *, optim_input: OptimInput | None = None
    ) -> dict[str, Any]:
        """State by name with this rank's parts; ``torch.distributed.checkpoint`` saves it unchanged."""
        if group is not None and not isinstance(group, ProcessGroup):  # `optim_input` was third in torch 1.13
            group, optim_input = None, group
        _check_group(model, group)
        return _gathered(model, optim, optim_input=optim_input).sharded(offload_to_cpu=True)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim: Any = None,
        *older: Any,
        optim_input: OptimInput | None = None,
    ) -> dict[str, Any]:
        """Convert the result of `sharded_optim_state_dict`, for the same wrapping, for ``optim.load_state_dict``.

        The order ``(sharded_optim_state_dict, model, optim_input, optim)`` of torch 1.13 is also accepted.
        """
        if not isinstance(optim, Optimizer):
            optim_input = optim_input if optim is None else optim
            optim = older[0] if older else None
        return _made(sharded_optim_state_dict, model, optim, optim_input)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: OptimInput | None = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """Convert keys of ``optim_state_dict`` from numbers to names, or back; ``model`` is the unwrapped one.

        Raises:
            ValueError: the keys mix names and numbers, or a key belongs to no parameter.
        """
        return rekey(optim_state_dict, optim_state_key_type, model, optim, optim_input)

    # ---- fairscale

    def gather_full_optim_state_dict(self, optim: Optimizer, recipient_rank: int | None = 0) -> dict[str, Any] | None:
        """Whole state for the unwrapped model's optimizer, on ``recipient_rank``, or on all ranks if None."""
        whole = _gathered(self, optim).full(rank0_only=recipient_rank == 0, offload_to_cpu=True)
        if recipient_rank is not None and self.rank != recipient_rank:
            return None
        names = (name for group in whole["param_groups"] for name in group["params"])
        return with_keys(whole, {name: number for number, name in enumerate(names)})

    def get_shard_from_optim_state_dict(
        self, full_optim_state_dict: dict[str, Any], optim: Optimizer | None = None
    ) -> dict[str, Any]:
        """Convert the result of `gather_full_optim_state_dict` for this rank's optimizer. No communication.

        With several param groups pass the ``optim`` that has them; without it, one group of ``parameters()`` is
        assumed.

        Raises:
            TypeError: this rank has no dict; `gather_full_optim_state_dict` returns one on a single rank.
            ValueError: the state does not combine into the state of one shard.
        """
        if not isinstance(full_optim_state_dict, Mapping):
            raise TypeError(
                "`full_optim_state_dict` must be, on every rank, the dict that one rank has gathered, but is "
                f"{full_optim_state_dict!r}. Send the dict to all ranks, or call `scatter_full_optim_state_dict`."
            )
        params = OptimParams(self, is_local=True)
        groups = params.groups_of(optim)
        numbered = [params.in_order(name for param in own for name in params.of(param).first_names) for own in groups]
        named = with_keys(full_optim_state_dict, dict(enumerate(name for own in numbered for name in own)))
        return ShardedOptimState(self, Source.THIS_RANK).make(named, groups)


def _from_first(config: Any) -> bool:
    return isinstance(config, FullOptimStateDictConfig) and config.rank0_only


def _gathered(model: nn.Module, optim: Optimizer, saved: Any = None, optim_input: Any = None) -> GatheredOptimState:
    """The state of ``optim``, which has its own groups: ``optim_input`` is only checked. **Collective.**"""
    params = OptimParams(model)
    if optim_input is not None:
        params.groups_of(None, optim_input)
    return GatheredOptimState(params, optim, saved).check()


def _made(
    saved: Any,
    model: nn.Module,
    optim: Optimizer | None,
    optim_input: Any,
    source: Source = Source.EVERY_RANK,
) -> dict[str, Any]:
    """What ``optim.load_state_dict`` takes for ``saved``, state under names. **Collective.**"""
    groups = OptimParams(model).groups_of(optim, optim_input)
    made = ShardedOptimState(model, source).make(saved, groups)
    if optim is not None:
        check_of_class(made, optim)
    return made


def _check_not_lost(made: Mapping[str, Any], optim: Optimizer) -> None:
    """Raise if loading ``made`` would discard the state that ``optim`` has; alike on all ranks."""
    if not made["state"] and any(optim.state.values()):
        raise ValueError(
            f"An optimizer state dict to load must have state, but is empty, while this {type(optim).__name__} has "
            "state of earlier steps, which would be lost. torch.distributed.checkpoint loads only what the dict that "
            "it is given already has: load with fairshard.checkpoint.load or load_optimizer. To go back to the state "
            "before the first step, make a new optimizer."
        )


def _check_group(model: nn.Module, group: ProcessGroup | None) -> None:
    check_module(model)
    for fqn, unit in units_below(model):
        if group is not None and unit.group.resolve() is not group:
            raise ValueError(
                f"`group` must be the process group that the model is sharded over, but `{fqn or 'root'}` uses "
                "another. Leave it out."
            )
