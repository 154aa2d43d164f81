"""torch's fake mode, in which operations create tensors that have no values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

_num_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)  # private; about 50 ns
_mode_at: Callable[[int], Any] = getattr(torch._C, "_get_dispatch_stack_at", lambda _: None)


def is_fake_mode_on() -> bool:
    """Whether a ``FakeTensorMode`` is active on this thread."""
    num_modes = _num_modes()
    return num_modes > 0 and any(isinstance(_mode_at(number), FakeTensorMode) for number in range(num_modes))
