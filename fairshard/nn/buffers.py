"""Buffers of a module, moved and cast in place."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


@torch.no_grad()
def cast_buffers_(module: nn.Module, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
    """Move the buffers of ``module`` itself to ``device``, and cast the floating ones to ``dtype``, in place.

    Pass it to ``module.apply`` for a whole tree. Buffers of BatchNorm keep their dtype.
    """
    for name, buffer in module.named_buffers(recurse=False):
        castable = buffer.is_floating_point() and not isinstance(module, _BatchNorm)
        module._buffers[name] = buffer.to(device=device, dtype=dtype if castable else None)
