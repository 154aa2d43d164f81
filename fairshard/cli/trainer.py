"""Training steps and validation of a sharded model on one rank; every rank calls them in the same order."""

from __future__ import annotations

import contextlib
import json
import math
import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairshard.checks.histories import compare_ranks
from fairshard.cli.data import Data, Ids
from fairshard.cli.log import StepMetrics
from fairshard.cli.model import Task
from fairshard.cli.options import TrainingStopped, TrainOptions
from fairshard.cli.ranks import Ranks
from fairshard.optim import CPUOptimizer, ShardedGradScaler
from fairshard.utils.collectives import counters, reset_counters
from fairshard.utils.device import memory_allocated
from fairshard.utils.messages import gather_scalars

VALIDATION_WINDOWS = 512
_FINAL_LR = 0.1


def learning_rate(options: TrainOptions, step: int) -> float:
    """Learning rate of ``step`` (from 1): linear up to the peak, then a cosine to a tenth of it, where it stays."""
    step = min(step, options.schedule_steps)
    if step <= options.warmup_steps:
        return options.lr * step / options.warmup_steps
    done = (step - options.warmup_steps) / (options.schedule_steps - options.warmup_steps)
    return options.lr * (_FINAL_LR + (1 - _FINAL_LR) * 0.5 * (1 + math.cos(math.pi * done)))


def make_optimizer(task: Task, options: TrainOptions) -> torch.optim.Optimizer:
    """The optimizer that ``options`` name, with torch's fused kernel if it can step the parameters."""
    params, fused = [param for param in task.model.parameters() if param.requires_grad], task.has_fused_kernels
    if options.optimizer == "sgd":
        return torch.optim.SGD(params, lr=options.lr, momentum=0.9, weight_decay=options.weight_decay, fused=fused)
    settings: dict[str, Any] = {"lr": options.lr, "betas": (0.9, 0.95), "weight_decay": options.weight_decay}
    if options.optimizer == "cpu-adamw":
        return CPUOptimizer(task.model, torch.optim.AdamW, num_threads=options.threads, **settings)
    return torch.optim.AdamW(params, fused=fused, **settings)


class Batches:
    """The batches of every step, the same for any number of ranks.

    All ranks draw the starts of the whole batch from one seeded generator, so the state of the generator is the place
    in the data of all of them; each keeps its own rows. Shares differ by one row where the batch does not divide.
    """

    def __init__(self, ids: Ids, options: TrainOptions, ranks: Ranks) -> None:
        self.generator = np.random.default_rng(options.seed)
        self._ids, self._options, self._ranks = ids, options, ranks

    def next(self) -> list[NDArray[np.int64]]:
        """This rank's part of the next batch: one ``[rows, context + 1]`` for each pass."""
        options = self._options
        starts = self.generator.integers(0, len(self._ids) - options.context, options.batch_size)
        passes = np.array_split(starts, options.accumulate)
        share = [np.array_split(part, self._ranks.size)[self._ranks.rank] for part in passes]
        return [self._ids.windows(part, options.context) for part in share]


def even_starts(length: int, context: int, count: int = VALIDATION_WINDOWS) -> NDArray[np.int64]:
    """``count`` starts of windows spread evenly over a text; windows overlap if the text is short."""
    return np.linspace(0, length - context - 1, count).astype(np.int64)


def check_known(batch: NDArray[np.int64], vocab_size: int) -> None:
    """Check that a model of ``vocab_size`` tokens knows those of a batch.

    Raises:
        TrainingStopped: it does not.
    """
    if batch.size and not 0 <= batch.min() <= batch.max() < vocab_size:
        bad = batch.min() if batch.min() < 0 else batch.max()
        raise TrainingStopped(
            f"a token must be at least 0 and below the model's vocabulary of {vocab_size}, but one of the data is "
            f"{bad}. Pass tokens of this model's tokenizer."
        )


class Trainer:
    """A sharded model, its optimizer and its text. All methods are **collective**."""

    def __init__(
        self,
        task: Task,
        data: Data,
        options: TrainOptions,
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        self.model = task.model
        self._task, self._data, self._options = task, data, options
        self._ranks, self._device = ranks, device
        self._batches = Batches(data.train, options, ranks)
        self._optimizer = make_optimizer(task, options)
        self._scaler = ShardedGradScaler(device.type, growth_interval=200, enabled=options.precision == "fp16")
        self._tokens = 0

    def step(self, step: int) -> StepMetrics:
        """Train on one batch.

        Raises:
            TrainingStopped: the loss or the gradients are not finite.
        """
        started = time.perf_counter()
        reset_counters()
        lr = learning_rate(self._options, step)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        local_loss = self._backward()
        by_rank = gather_scalars([local_loss, memory_allocated(self._device)], device=self._device)
        loss = math.fsum(entry[0] for entry in by_rank) / self._ranks.size
        self._check_loss(f"at step {step}", [entry[0] for entry in by_rank])
        grad_norm = self._update(step)
        tokens = self._options.batch_size * self._options.context
        self._tokens += tokens
        seconds = time.perf_counter() - started
        counted = counters().values()
        return StepMetrics(
            step=step,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            tokens=self._tokens,
            tokens_per_s=tokens / seconds,
            step_s=seconds,
            mem_bytes=tuple(int(entry[1]) for entry in by_rank),
            collectives=sum(number for number, _ in counted),
            comm_bytes=sum(nbytes for _, nbytes in counted),
        )

    def saved(self) -> tuple[Any, ...]:
        """What a checkpoint holds, as `Checkpointer.save` and ``load`` take it: all of the state of training."""
        return self.model, self._optimizer, None, self._scaler, self

    def state_dict(self) -> dict[str, Any]:
        """State of the batches and the token count."""
        state = json.dumps(self._batches.generator.bit_generator.state)
        return {"batches": {"generator": state}, "tokens": self._tokens}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore a saved state."""
        self._batches.generator.bit_generator.state = json.loads(saved["batches"]["generator"])
        self._tokens = saved["tokens"]

    @torch.no_grad()
    def validate(self, step: int) -> float:
        """Mean loss over windows spread evenly over the validation text, the same windows every time.

        All ranks have as many batches, because they gather the weights equally often, though not as many windows. A
        rank without a window for a batch computes the first one again, for nothing.

        Raises:
            TrainingStopped: the loss is not finite.
        """
        options, size, text = self._options, self._ranks.size, self._data.validation
        starts = even_starts(len(text), options.context)
        rows = max(1, options.batch_size // (size * options.accumulate))
        num_batches = -(-len(starts[::size]) // rows)
        self.model.eval()
        losses = []
        for own in np.array_split(starts[self._ranks.rank :: size], num_batches):
            windows = text.windows(own if len(own) else starts[:1], options.context)
            losses.append(len(own) * self._loss(windows).item())
        total = math.fsum(losses)
        self.model.train()
        by_rank = gather_scalars([total], device=self._device)
        compare_ranks(self.model)  # no backward does if the run ends here
        self._check_loss(f"in the validation after step {step}", [entry[0] for entry in by_rank])
        return math.fsum(entry[0] for entry in by_rank) / VALIDATION_WINDOWS

    def _loss(self, batch: NDArray[np.int64]) -> Tensor:
        """Mean loss over ``[rows, context + 1]``.

        Raises:
            TrainingStopped: the model does not know a token; the user's own loss is no 0-d tensor, or has no gradient.
        """
        task = self._task
        if task.vocab_size is not None:
            check_known(batch, task.vocab_size)
        loss = task.loss(self.model, torch.from_numpy(batch).to(self._device))
        problem = ""
        if not isinstance(loss, Tensor):
            problem = f"is {type(loss).__name__}"
        elif loss.dim():
            problem = f"has the shape {list(loss.shape)}"
        elif torch.is_grad_enabled() and not loss.requires_grad:
            problem = "does not depend on a trained parameter"
        if task.has_own_loss and problem:
            raise TrainingStopped(
                f"the loss of --factory {self._options.factory} must be a tensor without dimensions, the mean over the "
                f"rows, that has a gradient, but {problem}."
            )
        return loss

    def _backward(self) -> float:
        """Accumulate the gradient of this rank's part of the next batch; return its part of the loss.

        The mean over ranks is the mean loss of the batch.
        """
        batches = self._batches.next()
        even_rows = self._options.batch_size / self._ranks.size
        total = torch.zeros((), device=self._device)
        for number, batch in enumerate(batches, start=1):
            # Only the last pass reduces. The others accumulate full gradients: W times the memory, no bytes sent.
            last = number == len(batches)
            with contextlib.nullcontext() if last else self._task.unreduced():
                # Gradients are means over ranks, so a rank's loss weighs as its rows to an even share of the batch.
                loss = self._loss(batch) / (even_rows / len(batch))
                self._scaler.scale(loss).backward()
            total += loss.detach()
        return total.item()

    def _update(self, step: int) -> float | None:
        """Clip and step the optimizer; return the gradient norm, or None if fp16 gradients overflowed."""
        self._scaler.unscale_(self._optimizer)
        norm = self._task.clip(self._options.clip or math.inf)
        finite = math.isfinite(norm)
        if not finite and not (self._scaler.is_enabled() and self._scaler.get_scale() > 1):
            raise TrainingStopped(f"the gradient norm is {norm} at step {step}. Lower --lr or --clip.")
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        return norm if finite else None

    def _check_loss(self, where: str, losses: list[float]) -> None:
        bad = [f"{loss} on rank {rank}" for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        if bad:
            raise TrainingStopped(f"the loss is {', '.join(bad[:4])} {where}. Lower --lr or --clip.")
