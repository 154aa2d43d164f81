"""Terminal output of a run: the table of units, the progress, the summary."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType

from tqdm import tqdm

from fairshard.cli.metrics import StepMetrics, Summary, bits_per_byte
from fairshard.utils.size_text import size_text

_MAX_RANKS_SHOWN = 4
_LINES_WITHOUT_TERMINAL = 20


def say(text: str) -> None:
    """Print a line of the log and flush it, so that it appears immediately, even in a pipe."""
    print(text, flush=True)


def summary_lines(summary: Summary, first_val_loss: float) -> list[str]:
    """Lines printed at the end of a run."""
    return [
        f"validation loss  {loss_text(summary)}, from {first_val_loss:.3f} at the start",
        f"throughput       {summary.tokens_per_s:,.0f} tokens/s over all ranks",
        f"communication    {summary.collectives_per_step:.4g} collectives and "
        f"{size_text(summary.bytes_per_step)} per step and rank",
        f"peak memory      {_by_rank(summary.peak_bytes)}",
        f"state            rank 0 keeps {size_text(summary.device_bytes)} on the device, "
        f"{size_text(summary.pinned_bytes)} pinned and {size_text(summary.pageable_bytes)} pageable on the host; "
        f"a step waits {1e3 * summary.copy_wait_s:.3g} ms for copies between them",
    ]


def loss_text(summary: Summary) -> str:
    """The last validation loss in nats, and in bits per byte if the bytes of a token are known.

    The user's own loss has no units: it need not be a cross-entropy.
    """
    if summary.has_own_loss:
        return f"{summary.val_loss:.3f}"
    if summary.bits_per_byte is None:
        return f"{summary.val_loss:.3f} nats per token"
    unit = "byte" if summary.bits_per_byte == bits_per_byte(summary.val_loss, 1.0) else "token"
    return f"{summary.val_loss:.3f} nats per {unit} ({summary.bits_per_byte:.3f} bits per byte)"


class Progress:
    """A bar on a terminal; about twenty lines if stderr is a file or a pipe."""

    def __init__(self, num_steps: int, done: int = 0) -> None:
        self._num_steps = num_steps
        self._done = done
        on_terminal = sys.stderr.isatty()
        self._bar = tqdm(total=num_steps, initial=done, unit="step", dynamic_ncols=True) if on_terminal else None
        self._every = max(1, num_steps // _LINES_WITHOUT_TERMINAL)
        self._started = time.monotonic()

    def step(self, metrics: StepMetrics) -> None:
        """Show one step."""
        text = f"loss {metrics.loss:.3f}, {metrics.tokens_per_s:,.0f} tokens/s, memory {_by_rank(metrics.mem_bytes)}"
        if metrics.state_bytes:
            text += f", of it state {_by_rank(metrics.state_bytes)}"
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update()
        elif metrics.step % self._every == 0 or metrics.step == self._num_steps:
            elapsed = time.monotonic() - self._started
            left = elapsed / (metrics.step - self._done) * (self._num_steps - metrics.step)
            say(f"{self._at(metrics.step)}  {text}, {_time_text(elapsed)}, {_time_text(left)} left")

    def validation(self, step: int, val_loss: float) -> None:
        """Show a validation loss."""
        self._line(f"{self._at(step)}  validation loss {val_loss:.3f}")

    def saving(self, step: int) -> None:
        """Show that a checkpoint is saved, in the background."""
        self._line(f"{self._at(step)}  saving a checkpoint")

    def _line(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        else:
            say(text)

    def _at(self, step: int) -> str:
        return f"step {step:>{len(str(self._num_steps))}}/{self._num_steps}"

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _time_text(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02} min"


def _by_rank(sizes: Sequence[int]) -> str:
    if len(sizes) > _MAX_RANKS_SHOWN:
        return f"{size_text(min(sizes))} to {size_text(max(sizes))} per rank"
    return " | ".join(size_text(nbytes) for nbytes in sizes)
