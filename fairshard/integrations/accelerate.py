"""Trains with accelerate and the Hugging Face Trainer: their FSDP plugins, both versions, build fairshard's engine."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from fairshard.checkpoint import load_optimizer
from fairshard.integrations.torch_names import loaded, require, swap, swapped
from fairshard.nn import (
    FSDPModule,
    FullyShardedDataParallel,
    clean_tensor_name,
    fully_shard,
    register_fsdp_forward_method,
)

require("accelerate", at_least="1.4")
from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, PartialState  # noqa: E402
from accelerate.utils import OPTIMIZER_NAME, DistributedType, FullyShardedDataParallelPlugin  # noqa: E402

__all__ = ["disable", "enable", "enabled"]

PACKAGES = ("accelerate", "transformers", "peft", "trl")
_LOAD_OPTIMIZER = "load_fsdp_optimizer"
_OF_MODELS = ("extract_model_from_parallel", "save_fsdp_model", "load_fsdp_model", "save_fsdp_optimizer")
_ASKS = "is_fsdp_managed_module"

_undo = ExitStack()
_owners: list[Any] = []  # of what is replaced


class AcceleratedFSDP(FullyShardedDataParallel):
    """The wrapper as accelerate makes it, with a low-precision model's trained parameters upcast before they are cut.

    accelerate keeps fp32 parameters under mixed precision, by changing FSDP1's flat parameters after wrapping.
    """

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        policy = kwargs.get("mixed_precision")
        if policy is not None and policy.param_dtype is not None:
            _upcast(module, kwargs.get("ignored_modules") or ())
        _repair_trainer()
        super().__init__(module, *args, **kwargs)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[Any]:
        """An empty list: accelerate looks here for flat parameters to upcast, and they are upcast already."""
        return []


NAMES: dict[str, Any] = {
    "FullyShardedDataParallel": AcceleratedFSDP,
    "fully_shard": fully_shard,
    "register_fsdp_forward_method": register_fsdp_forward_method,
}
"""What these packages find in ``torch.distributed.fsdp``."""


def enable() -> None:
    """Make the FSDP plugins of accelerate, and of the Hugging Face ``Trainer``, build fairshard's engine, on CPU too.

    Call it before ``Accelerator`` or ``Trainer`` is made. ``fsdp_version=1`` wraps with `FullyShardedDataParallel`,
    ``fsdp_version=2`` shards with `fully_shard`. Only accelerate, transformers, peft and trl are affected, and what
    they call while they wrap, save or load a model. A second call does nothing.
    """
    if _owners:
        return
    _replace(AcceleratorState, "__init__", _init_on_cpu)
    _replace(FullyShardedDataParallelPlugin, "__post_init__", _post_init_on_cpu)
    _replace(Accelerator, "prepare", _prepare)
    _replace(Accelerator, "prepare_model", _with_ours)
    _replace(Accelerator, "get_state_dict", _without_compiled)
    _replace(FSDPModule, "_get_name", _name_of_class)
    _replace_functions()


def disable() -> None:
    """Undo `enable`; models that are already sharded stay so."""
    _undo.close()
    _owners.clear()


@contextmanager
def enabled() -> Iterator[None]:
    """`enable` inside the block, and `disable` after it."""
    enable()
    try:
        yield
    finally:
        disable()


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    _undo.enter_context(mock.patch.object(owner, name, wraps(original)(make(original))))
    _owners.append(owner)


def _replace_functions() -> None:
    """Replace names and functions that loaded modules of the packages have, and have not been replaced before."""
    modules = loaded(PACKAGES)
    _undo.enter_context(swap(modules, NAMES))
    makers = {_LOAD_OPTIMIZER: _load_optimizer, _ASKS: _with_ours, **dict.fromkeys(_OF_MODELS, _without_compiled)}
    for module in modules:
        for name, make in makers.items():
            if name in vars(module) and not hasattr(vars(module)[name], "__wrapped__"):
                _replace(module, name, make)


def _repair_trainer() -> None:
    """Replace methods of the ``Trainer``, if it is loaded, that do not expect the wrapper."""
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer is None or trainer in _owners:
        return
    _replace_functions()  # what has been loaded since `enable`
    for name, make in (("get_decay_parameter_names", _clean_names), ("train", _train)):
        if hasattr(trainer, name):
            _replace(trainer, name, make)


def _train(original: Any) -> Any:
    """``Trainer.train`` that trains the wrapper made by ``evaluate`` or ``predict``, and not the module in it."""

    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.model, FullyShardedDataParallel) and self.model_wrapped is self.model.module:
            self.model_wrapped = self.model
        return original(self, *args, **kwargs)

    return train


def _clean_names(original: Any) -> Any:
    """``Trainer.get_decay_parameter_names``, which reads names of modules, without the parts that wrappers add."""

    def names(self: Any, model: nn.Module) -> list[str]:
        return [_without_wrappers(model, name) for name in original(self, model)]

    return names


def _without_wrappers(model: nn.Module, path: str) -> str:
    """``path`` of a parameter through the modules of ``model``, as `named_parameters` of a wrapper yields it."""
    parts: list[str] = []
    holder: Any = model
    for part in path.split("."):
        if not (isinstance(holder, FullyShardedDataParallel) and part == "module"):
            parts.append(part)
        holder = None if holder is None else holder._modules.get(part)
    return ".".join(parts)


def _init_on_cpu(original: Any) -> Any:
    """``AcceleratorState.__init__`` that also honours an FSDP plugin on several CPU ranks."""

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type is DistributedType.MULTI_CPU:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = self.distributed_type

    return init


def _post_init_on_cpu(original: Any) -> Any:
    """The plugin's ``__post_init__`` that without a GPU allows ``sync_module_states``, for which it wants a device."""

    def post_init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            original(self, *args, **kwargs)
        except RuntimeError:
            if torch.accelerator.is_available() or not self.sync_module_states:
                raise
            self.param_init_fn = lambda module: module.to_empty(device="cpu", recurse=False)

    return post_init


def _prepare(original: Any) -> Any:
    """``Accelerator.prepare`` that gives optimizers made before it the parameters that the wrapper registers."""

    original = _with_ours(original)

    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.distributed_type is not DistributedType.FSDP or self.is_fsdp2:
            return original(self, *args, **kwargs)
        models = [given for given in args if isinstance(given, nn.Module)]
        old = {param: (index, name) for index, model in enumerate(models) for name, param in model.named_parameters()}
        optimizers = [given for given in args if isinstance(given, torch.optim.Optimizer)]
        stale = [optimizer for optimizer in optimizers if any(param in old for param in _params(optimizer))]
        if stale and not self.state.fsdp_plugin.use_orig_params and not any(map(_is_sharded, models)):
            raise ValueError(
                "An optimizer passed to `prepare` must hold the sharded model's parameters, but this "
                f"{type(stale[0]).__name__} was made before the model was wrapped, and without `use_orig_params` the "
                "wrapper has no parameter for each original. Pass `use_orig_params=True` to the FSDP plugin, or make "
                "the optimizer after `prepare(model)`."
            )
        prepared = original(self, *args, **kwargs)
        results = prepared if isinstance(prepared, tuple) else (prepared,)
        wrapped = [result for result in results if isinstance(result, nn.Module)]
        new = {
            (index, clean_tensor_name(name)): param
            for index, model in enumerate(wrapped)
            for name, param in model.named_parameters()
        }
        for optimizer in stale:
            for group in optimizer.param_groups:
                group["params"] = [
                    new.get((old[param][0], clean_tensor_name(old[param][1])), param) if param in old else param
                    for param in group["params"]
                ]
        return prepared

    return prepare


def _name_of_class(_original: Any) -> Any:
    """``_get_name`` of sharded modules, by which the ``Trainer`` knows whether to shift labels: that of their class."""

    def name(self: Any) -> str:
        own = str(super(FSDPModule, self)._get_name())
        return str(self._fairshard_class.__name__) if own == type(self).__name__ else own  # a class may choose another

    return name


def _with_ours(original: Any) -> Any:
    """``original``, in which ``torch.distributed.fsdp`` has fairshard's names."""

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with swapped(NAMES):
            return original(*args, **kwargs)

    return call


def _without_compiled(original: Any) -> Any:
    """`_with_ours`, given the wrapper in place of a compiled model around it.

    accelerate takes the wrapper out of the compiled model, which then has no parameters, and saves the compiled model's
    names.
    """

    original = _with_ours(original)

    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*map(_uncompiled, args), **{name: _uncompiled(value) for name, value in kwargs.items()})

    return call


def _uncompiled(given: Any) -> Any:
    inside = given._modules.get("_orig_mod") if isinstance(given, nn.Module) else None
    return inside if isinstance(inside, FullyShardedDataParallel) else given


def _load_optimizer(original: Any) -> Any:
    """``load_fsdp_optimizer`` that also loads a sharded state into a new optimizer, for which accelerate reads none."""

    signature = inspect.signature(original)
    original = _with_ours(original)

    def load(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        model = given["model"] = _uncompiled(given["model"])
        is_sharded = given["fsdp_plugin"].state_dict_type.name == "SHARDED_STATE_DICT" and _is_sharded(model)
        if not (is_sharded and given.get("use_dcp", True)):
            original(*bound.args, **bound.kwargs)
            return
        folder, name = Path(given["input_dir"]), f"{OPTIMIZER_NAME}_{given['optimizer_index']}"
        given["accelerator"].wait_for_everyone()
        load_optimizer(folder if folder.name == name else folder / name, model, given["optimizer"])
        given["accelerator"].wait_for_everyone()

    return load


def _params(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(module, FullyShardedDataParallel) for module in model.modules())


def _upcast(module: nn.Module, ignored: Any) -> None:
    """Make trained parameters fp32, but for those of ``ignored`` modules and those that are sharded already."""
    kept = {param for part in ignored for param in part.parameters()}
    low = [
        (name, param)
        for name, param in module.named_parameters()
        if param.requires_grad and param.is_floating_point() and param.dtype.itemsize < 4 and param not in kept
    ]
    for _, param in low:
        param.data = param.data.float()
    if low and int(os.environ.get("RANK", "0")) == 0:
        warnings.warn(
            f"Mixed precision keeps parameters in torch.float32; {len(low)} in lower precision were cast, the first "
            f"is `{low[0][0]}`.",
            stacklevel=4,
        )
