"""The model that a run trains, and its loss: the GPT, or that of ``--hf`` or ``--factory``."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fairshard.cli.chunks import check_length
from fairshard.cli.factory import Loss, imported, parts_of
from fairshard.cli.gpt import GPT, GPTConfig
from fairshard.cli.option_error import OptionError
from fairshard.cli.options import TrainOptions
from fairshard.cli.text import TextPlan
from fairshard.cli.tokens import check_tokens
from fairshard.cli.wrapping import policy_of

_FLOAT = 4


@dataclass(frozen=True)
class Task:
    """A plain model, its loss, and a name for the log.

    ``vocab_size`` is None if it is unknown. ``random`` are the names of weights that the folder of ``--hf`` lacks.
    ``has_own_loss``: the loss is the user's, in unknown units; otherwise it is in nats per token.
    """

    model: nn.Module
    loss: Loss
    name: str
    vocab_size: int | None = None
    random: tuple[str, ...] = ()
    has_own_loss: bool = False


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

    Raises:
        OptionError: the function of ``--factory`` returns something else.
    """
    torch.manual_seed(options.seed)
    if options.factory is not None:
        made, loss = parts_of(options.factory, imported(options.factory)())
        name = f"{type(made).__name__} of {options.factory}"
        return Task(made, loss or next_token_loss, name, has_own_loss=loss is not None)
    if options.hf is not None:
        return _hf_task(options)
    config = GPTConfig(options.layers, options.dim, options.heads, options.context, options.vocab_size)
    name = f"GPT of {options.layers} blocks, width {options.dim}, {options.heads} heads"
    return Task(GPT(config), next_token_loss, name, options.vocab_size)


def planned_nbytes(options: TrainOptions, plan: TextPlan) -> int:
    """Check the model of ``--hf`` or ``--factory`` on torch's meta device; returns the bytes of its weights.

    A factory that fails there, because it needs real weights, is not checked further: 0.

    Raises:
        OptionError: the model cannot be built, or does not fit the context, the tokens or the policy.
    """
    if options.factory is not None:
        function = imported(options.factory)
        try:
            with torch.device("meta"):
                made = function()
        except (Exception, SystemExit):
            return 0
        model, _ = parts_of(options.factory, made)
    else:
        model = _checked_hf(options, plan)
    policy_of("--policy", options.policy, model)
    return sum(param.numel() for param in model.parameters()) * _FLOAT


def _checked_hf(options: TrainOptions, plan: TextPlan) -> nn.Module:
    from fairshard.cli import hugging_face  # here because it imports the engine

    assert options.hf is not None
    config = hugging_face.causal_config(options.hf)
    text_config = config.get_text_config()
    most = getattr(text_config, "max_position_embeddings", None)
    if isinstance(most, int) and options.context > most:
        raise OptionError(f"--context must be at most {most}, the positions of {options.hf}, but is {options.context}.")
    vocab_size = int(text_config.vocab_size)
    tokenizer = hugging_face.tokenizer_beside(options.hf)
    if tokenizer is not None and plan.is_text:
        largest = max(tokenizer.get_vocab().values(), default=0)
        if largest >= vocab_size:
            raise OptionError(
                f"the tokenizer in {options.hf} has token {largest}, but the model has a vocabulary of {vocab_size}. "
                "Pass the tokenizer of this model."
            )
        check_length(plan, tokenizer, options.context)
    else:
        cure = "Raise vocab_size in its config." if plan.is_text else "Pass tokens of this model's tokenizer."
        check_tokens(plan, vocab_size, cure)
    try:
        with torch.device("meta"):
            return hugging_face.random_model(config)
    except Exception as error:  # sizes in a config may contradict each other
        raise OptionError(f"--hf {options.hf} cannot be built: {' '.join(str(error).split())}") from error


def _hf_task(options: TrainOptions) -> Task:
    from fairshard.cli import hugging_face

    assert options.hf is not None
    config = hugging_face.causal_config(options.hf)
    random: list[str] = []
    if hugging_face.has_weights(options.hf):
        model, random = hugging_face.loaded_model(options.hf, config)
        origin = "weights"
    else:
        model = hugging_face.random_model(config)
        origin = "random weights"
    model.train()
    settings: Any = model.config
    settings.architectures = [type(model).__name__]  # sharding in place changes the class
    name = f"{type(model).__name__} of {options.hf}, {origin}"
    vocab_size = int(config.get_text_config().vocab_size)
    has_cache = "use_cache" in inspect.signature(model.forward).parameters
    no_cache: dict[str, Any] = {"use_cache": False} if has_cache else {}
    return Task(model, partial(next_token_loss, **no_cache), name, vocab_size, tuple(random))
