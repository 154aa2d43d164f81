"""The model that a run trains, its loss, and its units: the GPT, or the model of ``--hf`` or ``--factory``.

``--factory package.module:function`` names a function without arguments that returns the model, or the model and its
loss::

    def build() -> nn.Module | tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]: ...

- The **model** is a plain module, not sharded, on the CPU, with the same weights on every rank: the function is called
  with torch's generator set to ``--seed``. Its weights should be fp32; ``--precision`` says what computes.
- The **loss** is called as ``loss(model, tokens)`` with the sharded model and this rank's part of the batch, int64
  ``[rows, context + 1]`` on the model's device: bytes of ``--data``, or ids of ``--tokens``. It returns the mean loss
  over the rows as a 0-d tensor that has a gradient. It calls the model, not methods of it. Without a loss, the model
  maps ``[rows, context]`` to logits ``[rows, context, vocabulary]``, or to an object with such ``logits``, and the loss
  is the cross-entropy of each next token.
- Modules of one class in a ``ModuleList`` or ``Sequential`` become units; ``--policy`` chooses others.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairshard.cli.gpt import GPT, GPTConfig
from fairshard.cli.options import COMPUTE_DTYPES, OptionError, TrainingStopped, TrainOptions, check_policy, refused
from fairshard.engine.tree import units_below
from fairshard.nn import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from fairshard.nn.wrap import ModuleWrapPolicy, lambda_auto_wrap_policy, size_based_auto_wrap_policy
from fairshard.optim.grad_norm import clip_grad_norm_
from fairshard.planning.choice import Chooser, ModuleTree

Loss = Callable[[nn.Module, Tensor], Tensor]
"""A loss of the model and the tokens ``[rows, context + 1]``."""


@dataclass(frozen=True)
class Task:
    """A model, its loss, and a name for the log; the methods are for a model that has been sharded.

    ``vocab_size`` is None if it is unknown. ``random`` are the names of weights that the folder of ``--hf`` lacks.
    ``has_own_loss``: the loss is the user's, in unknown units; otherwise it is in nats per token.
    """

    model: nn.Module
    loss: Loss
    name: str
    vocab_size: int | None = None
    random: tuple[str, ...] = ()
    has_own_loss: bool = False

    @property
    def has_fused_kernels(self) -> bool:
        """Whether torch's fused optimizers can step the parameters: DTensors have none."""
        return isinstance(self.model, FullyShardedDataParallel)

    @contextlib.contextmanager
    def unreduced(self) -> Iterator[None]:
        """Accumulate full gradients in a backward, without communication."""
        if isinstance(self.model, FullyShardedDataParallel):
            with self.model.no_sync():
                yield
            return
        model: Any = self.model
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def clip(self, max_norm: float) -> float:
        """Clip the gradients; returns their norm over all ranks. **Collective.**"""
        if isinstance(self.model, FullyShardedDataParallel):
            return float(self.model.clip_grad_norm_(max_norm))
        return float(clip_grad_norm_([unit for _, unit in units_below(self.model)], max_norm, 2.0))


def logits_of(model: nn.Module, tokens: Tensor, **options: Any) -> Tensor:
    """The logits ``[rows, length, vocabulary]`` of a model that returns them, or an object with ``logits``."""
    output = model(tokens, **options)
    logits: Tensor = getattr(output, "logits", output)
    return logits


def next_token_loss(model: nn.Module, tokens: Tensor, **options: Any) -> Tensor:
    """Mean nats per token over ``[rows, context + 1]``, in fp32 for any precision of the model."""
    logits = logits_of(model, tokens[:, :-1], **options)
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def make_task(options: TrainOptions) -> Task:
    """Build the model, with the weights that ``--seed`` draws; the same on every rank.

    On torch's meta device, it has no weights, also with ``--hf``.

    Raises:
        OptionError: the model cannot be built, or the function of ``--factory`` returns something else.
    """
    torch.manual_seed(options.seed)
    if options.factory is not None:
        model, loss = parts_of(options.factory, _imported(options.factory)())
        name = f"{type(model).__name__} of {options.factory}"
        return Task(model, loss or next_token_loss, name, has_own_loss=loss is not None)
    if options.hf is not None:
        from fairshard.cli import hugging_face

        made = hugging_face.make_model(options.hf, options.context)
        no_cache: dict[str, Any] = {"use_cache": False} if made.has_cache else {}
        return Task(made.model, partial(next_token_loss, **no_cache), made.name, made.vocab_size, made.random)
    config = GPTConfig(options.layers, options.dim, options.heads, options.context, options.vocab_size)
    name = f"GPT of {options.layers} blocks, width {options.dim}, {options.heads} heads"
    return Task(GPT(config), next_token_loss, name, options.vocab_size)


def planned_task(options: TrainOptions, may_fail: bool = False) -> Task | None:
    """The task on torch's meta device, where it takes no memory.

    With ``may_fail``, it is None if the function of ``--factory`` fails there: it may need real weights.

    Raises:
        OptionError: it cannot be built, or has not the modules that ``--policy`` names.
    """
    try:
        with torch.device("meta"):
            task = make_task(options)
    except OptionError:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        if may_fail and options.factory is not None:
            return None
        raise OptionError(f"the model cannot be built on the meta device: {type(error).__name__}: {error}") from error
    policy_of(options.policy, task.model)
    return task


def _imported(text: str) -> Callable[[], Any]:
    """The function ``package.module:function``; modules in the current folder are found."""
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name):
        raise OptionError(f"--factory must be PKG.MOD:FN, but is {text}.")
    sys.path.insert(0, "")  # as with `python -m`: finds the user's own modules
    try:
        with refused(f"--factory {text} cannot be imported: ", Exception, SystemExit):  # a module may raise anything
            function: Callable[[], Any] = getattr(importlib.import_module(module_name), name)
    finally:
        sys.path.remove("")
    if not callable(function):
        raise OptionError(f"--factory {text} must be a function, but is {type(function).__name__}.")
    return function


def parts_of(text: str, made: object) -> tuple[nn.Module, Loss | None]:
    """The model and the loss that the function ``text`` returned as ``made``.

    Raises:
        OptionError: it returned something else.
    """
    model, loss = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise OptionError(f"--factory {text} must return a module, but returned {type(model).__name__}.")
    if loss is not None and not callable(loss):
        raise OptionError(f"--factory {text} must return a function as its loss, but returned {type(loss).__name__}.")
    return model, loss


def policy_of(text: str, model: nn.Module) -> Any:
    """The policy that ``--policy`` describes for ``model``; None for one unit.

    Raises:
        OptionError: ``model`` has no such class.
    """
    kind, _, value = text.partition(":")
    if kind == "size":
        return partial(size_based_auto_wrap_policy, min_num_params=check_policy(text))
    if text == "none":
        return None
    if text == "blocks":
        chosen = set(blocks(model))
        return partial(lambda_auto_wrap_policy, lambda_fn=lambda module: module in chosen) if chosen else None
    classes = {type(part) for part in model.modules()}
    wanted = set(value.split(","))
    names = {cls.__name__ for cls in classes}
    if wanted - names:
        raise OptionError(
            f"--policy class:{min(wanted - names)} must be a class of a module of this model, which has "
            f"{', '.join(sorted(names))}."
        )
    return ModuleWrapPolicy(cls for cls in classes if cls.__name__ in wanted)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated modules of ``model``, outermost only.

    Those are the modules that transformers does not split between devices, if the model says which; otherwise modules
    with parameters of which a ``ModuleList`` or a ``Sequential`` has two of the same class.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [part for part in model.modules() if type(part).__name__ in names and part is not model]
    return found or _repeated(model)


def _repeated(module: nn.Module) -> list[nn.Module]:
    children = [child for child in module.children() if next(child.parameters(), None) is not None]
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        counts = Counter(type(child) for child in children)
        found = [child for child in children if counts[type(child)] > 1]
        found = [child for child in found if type(child).forward is not nn.Module.forward]
        if found:
            return found
    return [block for child in children for block in _repeated(child)]


def build_model(options: TrainOptions, device: torch.device) -> Task:
    """Build the model and shard it: one unit for each module that the policy chooses, and one for the rest.

    **Collective.**

    Raises:
        TrainingStopped: the model is not what the options need.
    """
    with refused("", OptionError, becomes=TrainingStopped):
        task = make_task(options)
        policy = policy_of(options.policy, task.model)
    shard = _wrapped if options.engine == "wrapper" else _in_place
    return replace(task, model=shard(task.model.to(device), policy, options))


def _wrapped(module: nn.Module, policy: Any, options: TrainOptions) -> nn.Module:
    dtype = COMPUTE_DTYPES.get(options.precision)
    settings: dict[str, Any] = {
        "reshard_after_forward": options.reshard_after_forward,
        "mixed_precision": dtype is not None,
        "compute_dtype": dtype,
        "bucket_cap_mb": options.bucket_cap_mb,
        "cpu_offload": options.cpu_offload,
        "move_grads_to_cpu": options.move_grads_to_cpu,
    }
    tree = ModuleTree(module)
    for choice in [] if policy is None else Chooser(tree, policy).choose():
        tree.replace(choice.module, FullyShardedDataParallel(choice.module, **settings))
    return FullyShardedDataParallel(module, **settings)


def _in_place(module: nn.Module, policy: Any, options: TrainOptions) -> nn.Module:
    settings: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=COMPUTE_DTYPES.get(options.precision)),
        "offload_policy": CPUOffloadPolicy() if options.cpu_offload else OffloadPolicy(),
        "bucket_cap_mb": options.bucket_cap_mb,
    }
    for choice in [] if policy is None else Chooser(ModuleTree(module), policy).choose():
        fully_shard(choice.module, reshard_after_forward=options.reshard_after_forward, **settings)
    # As in the wrapper, the outermost unit stays gathered between forward and backward.
    fully_shard(module, reshard_after_forward=None if options.reshard_after_forward else False, **settings)
    return module
