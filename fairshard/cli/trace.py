"""``--trace STEP``: ``trace.json`` and ``trace.png``, the timeline of every rank in one step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from torch import nn

from fairshard.extras.observe.timeline import timeline

TRACE_FILES = ("trace.json", "trace.png")


def traced(model: nn.Module, folder: Path, step: int) -> AbstractContextManager[None]:
    """Observe ``model`` in the context, and write the events of all ranks into ``folder``. **Collective.**"""
    title = f"fairshard train, {folder.name}, step {step}"
    return timeline(model, *(folder / name for name in TRACE_FILES), title=title)
