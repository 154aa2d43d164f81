"""``--sample``: a text that the model writes at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fairshard.cli.local_path import printable
from fairshard.cli.options import TrainOptions
from fairshard.cli.sharded import Sharded
from fairshard.cli.task import logits_of
from fairshard.cli.text import Text

_PROMPT = 32
_TEMPERATURE = 0.8


@torch.no_grad()
def sample(
    sharded: Sharded,
    text: Text,
    options: TrainOptions,
    decode: Callable[[Sequence[int]], str],
    device: torch.device,
) -> str:
    """The start of the validation text, and how the model goes on, drawn at temperature 0.8. **Collective.**

    Every rank draws for itself; they call the model equally often. Models whose output is not logits are not asked.
    """
    length = min(_PROMPT, options.context)
    start = text.validation[np.arange(length)].astype(np.int64)
    tokens = torch.from_numpy(start).to(device).unsqueeze(0)
    random = torch.Generator(device).manual_seed(options.seed)
    was_training = sharded.model.training
    sharded.model.eval()
    for _ in range(options.sample):
        seen = tokens[:, -options.context :]
        logits = logits_of(sharded.model, seen)
        if not isinstance(logits, Tensor) or logits.shape[:2] != seen.shape or logits.dim() != 3:
            return "sample           none: the model's output is not logits [rows, length, vocabulary]"
        weights = torch.softmax(logits[:, -1].float() / _TEMPERATURE, -1)
        tokens = torch.cat([tokens, torch.multinomial(weights, 1, generator=random)], 1)
    sharded.model.train(was_training)
    prompt, written = (decode(part) for part in (tokens[0, :length].tolist(), tokens[0, length:].tolist()))
    lines = [printable(line) for line in f"{prompt}|{written}".split("\n")]
    head = "sample           the text before | is given, the rest is the model's"
    return "\n".join([head, *(f"  {line}" for line in lines)])
