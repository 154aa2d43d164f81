"""Buffers under mixed precision: modules compute with a cast copy; the original keeps its dtype and every bit."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class ComputeBuffers:
    """Casts the floating buffers of a unit's modules while the unit computes, and writes changes back.

    Casts again for each call, and compares element by element, because torch does not count changes through
    ``buffer.data``.
    """

    def __init__(self, modules: list[nn.Module], dtype: torch.dtype) -> None:
        self._modules = [module for module in modules if not isinstance(module, _BatchNorm)]
        self._dtype = dtype
        self._shown: list[tuple[nn.Module, str, Tensor, Tensor, int]] = []

    @torch.inference_mode(False)
    @torch.no_grad()
    def attach(self) -> None:
        """Replace the modules' buffers with cast copies, unless they are replaced already."""
        if self._shown:
            return
        for module in self._modules:
            for name, original in module._buffers.items():
                if original is None or not original.is_floating_point() or original.dtype == self._dtype:
                    continue
                cast = original.to(self._dtype)
                module._buffers[name] = cast
                self._shown.append((module, name, original, cast, cast._version))

    @torch.inference_mode(False)
    @torch.no_grad()
    def detach(self) -> None:
        """Restore the originals, with the changes that the forward made to the copies."""
        for module, name, original, cast, version in self._shown:
            now = module._buffers.get(name)
            if now is None:
                continue
            if now is cast and now._version == version:
                kept = original.data  # does not count as a write to the original
                kept.copy_(torch.where(now == original.to(self._dtype), kept, now))
            elif now.shape == original.shape:
                original.copy_(now)
            else:
                original = now.to(original.dtype)
            module._buffers[name] = original
        self._shown.clear()
