"""Trains with Lightning: a strategy like its ``FSDPStrategy``, with fairshard's wrapper, on CPU too.

``ModelParallelStrategy`` needs nothing from here: call `fully_shard` in ``configure_model``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from fairshard.integrations.torch_names import require, swapped
from fairshard.nn import FullyShardedDataParallel

__all__ = ["FairshardPrecision", "FairshardStrategy"]

require("lightning", at_least="2.5")
from lightning.pytorch import callbacks  # noqa: E402
from lightning.pytorch.plugins import Precision  # noqa: E402
from lightning.pytorch.plugins.precision import FSDPPrecision  # noqa: E402
from lightning.pytorch.strategies import FSDPStrategy  # noqa: E402

_AVERAGING = getattr(callbacks, "WeightAveraging", ())  # not in older versions


class FairshardPrecision(FSDPPrecision):  # type: ignore[misc]
    """Lightning's precision of FSDP, which also clips gradients by their norm over all ranks."""

    def __init__(self, given: FSDPPrecision, strategy: FairshardStrategy) -> None:
        super().__init__(given.precision, given.scaler)
        self._strategy = strategy

    def clip_grad_by_norm(self, optimizer: Any, clip_val: Any) -> None:
        """Clip the gradients of the whole model. **Collective.**

        Raises:
            ValueError: ``optimizer`` has only some of the model's trained parameters.
        """
        own = {param for group in optimizer.param_groups for param in group["params"]}
        left = [name for name, p in self._strategy.model.named_parameters() if p.requires_grad and p not in own]
        if left:
            raise ValueError(
                "`gradient_clip_val` must clip all trained parameters together, because the norm is that of the whole "
                f"sharded model, but `{left[0]}` (one of {len(left)}) is not in this {type(optimizer).__name__}. Give "
                "one optimizer all of them, freeze the others, or shard with `fully_shard` (ModelParallelStrategy), "
                "over which torch's clip_grad_norm_ clips any list of parameters."
            )
        self._strategy.model.clip_grad_norm_(clip_val)


class FairshardStrategy(FSDPStrategy):  # type: ignore[misc]
    """``Trainer(strategy=FairshardStrategy(...))`` wraps the model with `FullyShardedDataParallel`.

    Takes the arguments of ``FSDPStrategy``; others are those of `FullyShardedDataParallel`. ``use_orig_params`` is
    always True. Checkpoints are in the formats of ``FSDPStrategy``. ``Trainer(gradient_clip_val=...)`` works. A module
    is wrapped once: later calls of ``fit``, ``validate``, ``test`` and ``predict``, of other Trainers too, use the
    first strategy's wrapper.

    Raises:
        ValueError: ``use_orig_params`` is False.

    Source: Lightning's ``FSDPStrategy``, for names, arguments and defaults.
    """

    strategy_name = "fairshard"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_orig_params", True):
            raise ValueError(
                "`use_orig_params` must be True, but is False: Lightning finds optimizer states by the parameters' "
                "own names. Leave it out."
            )
        super().__init__(*args, **kwargs)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``strategy="fairshard"``."""
        strategy_registry.register(cls.strategy_name, cls, description="FSDP by fairshard")

    @property
    def precision_plugin(self) -> Any:
        """The precision plugin, which can clip."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if type(plugin) is FSDPPrecision:
            plugin = FairshardPrecision(plugin, self)
        FSDPStrategy.precision_plugin.fset(self, plugin)

    def setup(self, trainer: Any) -> None:
        """Wrap the model, and set up its optimizers for a fit. **Collective.**

        Raises:
            ValueError: a callback of the Trainer averages weights.
        """
        for callback in trainer.callbacks:
            if isinstance(callback, _AVERAGING):
                raise ValueError(
                    "Callbacks must not average weights with FairshardStrategy, but the Trainer has a "
                    f"{type(callback).__name__}, which copies whole weights before wrapping and then averages them "
                    "with shards. Leave it out and average in the module what `self.parameters()` yields from "
                    "`on_train_start` on (shards), or use DDPStrategy."
                )
        super().setup(trainer)

    def _setup_model(self, model: Any) -> Any:
        for hook in model._forward_pre_hooks.values():
            if isinstance(hook, _Keeper):
                return hook.wrapper
        with _ours():
            wrapper = super()._setup_model(model)
        if wrapper is not model:
            model.register_forward_pre_hook(_Keeper(wrapper))
        return wrapper

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Lightning's context of ``configure_model``: ``wrap`` makes fairshard's wrappers."""
        with _ours(), super().model_sharded_context():
            yield

    def lightning_module_state_dict(self) -> Any:
        """The model's state, in the form set by ``state_dict_type``. **Collective.**"""
        with _ours():
            return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> Any:
        """The state of ``optimizer``, in the form set by ``state_dict_type``. **Collective.**"""
        with _ours():
            return super().optimizer_state(optimizer)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Load model and optimizers from a checkpoint of either form. **Collective.**"""
        with _ours():
            return super().load_checkpoint(*args, **kwargs)


class _Keeper:
    """Hook without effect: a module keeps its wrapper, which Lightning drops, for the next ``fit`` or ``validate``."""

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper

    def __call__(self, _module: Any, _args: Any) -> None:
        """Do nothing."""


def _ours() -> ExitStack:
    """Inside, Lightning's methods take fairshard's wrapper from ``torch.distributed.fsdp``."""
    return swapped({"FullyShardedDataParallel": FullyShardedDataParallel})
