"""Text in chunks for a tokenizer, and whether it is long enough in tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fairshard.cli.option_error import OptionError
from fairshard.cli.text import Piece, TextPlan

_CHECKED_NBYTES = 1 << 14


def check_length(plan: TextPlan, tokenizer: Any, context: int) -> None:
    """Check that both sides of ``plan`` hold a window of tokens; reads no more of a side than that takes.

    Raises:
        OptionError: a side is shorter than a window.
    """
    for side, pieces in (("train on", plan.train), ("validate on", plan.validation)):
        count = 0
        for piece in pieces:
            for text in chunks(piece, _CHECKED_NBYTES):
                count += len(tokenizer(text, add_special_tokens=False)["input_ids"])
                if count > context:
                    break
            count += tokenizer.eos_token_id is not None
            if count > context:
                break
        if count <= context:
            raise OptionError(too_short(plan, side, count, context))


def too_short(plan: TextPlan, side: str, count: int, context: int) -> str:
    """The message for ``side`` of ``plan``, which holds ``count`` tokens: less than a window."""
    return (
        f"a context of {context} needs {context + 1} tokens to {side}, but {plan.source} leaves {count}. "
        "Pass more text or a smaller --context."
    )


def chunks(piece: Piece, nbytes: int) -> Iterator[str]:
    """The text of a piece in chunks of about ``nbytes``, cut between lines."""
    with piece.path.open("rb") as file:
        file.seek(piece.begin)
        left = piece.end - piece.begin
        while left > 0 and (lines := file.readlines(min(left, nbytes))):
            chunk = b"".join(lines)[:left]
            left -= len(chunk)
            yield chunk.decode("utf-8", errors="replace")
