"""Text to tokens, by the tokenizer of ``--hf``: once for all ranks, into files of the run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fairshard.cli.chunks import chunks, too_short
from fairshard.cli.sharded import TrainingStopped
from fairshard.cli.text import Text, TextPlan
from fairshard.utils.collectives import gather_objects
from fairshard.utils.groups import host_group

FOLDER = "tokens"
_DONE = "done.json"
_CHUNK_NBYTES = 1 << 20


def encoded(plan: TextPlan, tokenizer: Any, folder: Path, rank: int, context: int) -> Text:
    """The text of ``plan`` as tokens, mapped from files that rank 0 writes into ``folder``. **Collective.**

    A resumed run finds them there. After each megabyte the ranks exchange a message, so none waits for long.

    Raises:
        TrainingStopped: a rank cannot read the files, or a side is shorter than a window.
    """
    done = folder / _DONE
    group = host_group()
    if not gather_objects(done.exists(), group)[0]:
        work = _write(plan, tokenizer, folder) if rank == 0 else None
        while not gather_objects(work is not None and next(work, True), group)[0]:
            pass
    missing = [number for number, seen in enumerate(gather_objects(done.exists(), group)) if not seen]
    if missing:
        raise TrainingStopped(f"all ranks must see {folder}, which rank 0 has written, but rank {missing[0]} does not.")
    dtype = json.loads(done.read_text(encoding="utf-8"))["dtype"]
    train, validation = (np.memmap(folder / f"{side}.bin", dtype, "r") for side in ("train", "validation"))
    for side, tokens in (("train on", train), ("validate on", validation)):
        if len(tokens) < context + 1:
            raise TrainingStopped(too_short(plan, side, len(tokens), context))
    return Text(train, validation, plan.validation_nbytes / len(validation))


def _write(plan: TextPlan, tokenizer: Any, folder: Path) -> Iterator[bool]:
    """Write the files; yields False after each chunk."""
    folder.mkdir(exist_ok=True)
    dtype = "uint16" if max(tokenizer.get_vocab().values()) < 1 << 16 else "uint32"
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for side, pieces in (("train", plan.train), ("validation", plan.validation)):
        with (folder / f"{side}.bin").open("wb") as out:
            for piece in pieces:
                for text in chunks(piece, _CHUNK_NBYTES):
                    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                    out.write(np.asarray(ids, dtype).tobytes())
                    yield False
                out.write(np.asarray(end, dtype).tobytes())
    (folder / _DONE).write_text(json.dumps({"dtype": dtype}) + "\n", encoding="utf-8")
