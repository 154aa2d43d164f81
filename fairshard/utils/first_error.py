"""An error of a user's hook that is raised later than it occurred."""

from __future__ import annotations


class FirstError:
    """Keeps the first exception of its ``with`` blocks until `raise_kept`.

    Ranks run hooks on gradients at different times in a backward. One that raised at once would not send what the
    others still send, and these would wait for it.

    Attributes:
        kept: the exception; None if there is none.
    """

    def __init__(self) -> None:
        self.kept: Exception | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.kept = self.kept or error
        return True

    def raise_kept(self, drops: bool) -> None:
        """Raise the exception that was kept, or forget it if ``drops``."""
        kept, self.kept = self.kept, None
        if kept is not None and not drops:
            raise kept
