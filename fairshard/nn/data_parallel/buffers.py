"""Buffers under mixed precision: compute sees a cast copy, the original keeps its dtype and every bit."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@torch.no_grad()
def cast_buffers_(
    module: nn.Module, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> None:
    """Move the buffers that ``module`` itself holds to ``device``, and the floating ones to ``dtype``, in place.

    Use it with ``module.apply(...)`` for a whole tree. Buffers of BatchNorm keep their dtype.
    """
    for name, buffer in module.named_buffers(recurse=False):
        castable = buffer.is_floating_point() and not isinstance(module, _BatchNorm)
        module._buffers[name] = buffer.to(device=device, dtype=dtype if castable else None)


class ComputeBuffers:
    """Casts the floating buffers of a unit's modules while the unit computes, and writes changes back."""

    def __init__(self, modules: list[nn.Module], dtype: torch.dtype) -> None:
        self._modules = modules
        self._dtype = dtype
        self._shown: list[tuple[nn.Module, str, Tensor, Tensor, int]] = []
        self._casts: dict[tuple[int, str], tuple[Tensor, int, Tensor]] = {}

    @torch.no_grad()
    def attach(self) -> None:
        """Let the modules see cast copies; nothing if they already do."""
        if self._shown:
            return
        for module in self._modules:
            if isinstance(module, _BatchNorm):
                continue
            for name, original in module._buffers.items():
                if original is None or not original.is_floating_point() or original.dtype == self._dtype:
                    continue
                cast = self._cast_of(module, name, original)
                module._buffers[name] = cast
                self._shown.append((module, name, original, cast, cast._version))

    @torch.no_grad()
    def detach(self) -> None:
        """Put the originals back, with what the forward wrote into the copies."""
        for module, name, original, cast, version in self._shown:
            now = module._buffers.get(name)
            if now is not None and (now is not cast or now._version != version):
                if now.shape == original.shape:
                    original.copy_(now)
                else:
                    original = now.to(original.dtype)
                self._casts.pop((id(module), name), None)
            if name in module._buffers:
                module._buffers[name] = original if now is not None else None
        self._shown = []

    def _cast_of(self, module: nn.Module, name: str, original: Tensor) -> Tensor:
        """A cast copy, made again only when the original has changed."""
        kept = self._casts.get((id(module), name))
        if kept is not None and kept[0] is original and kept[1] == original._version:
            return kept[2]
        cast = original.to(self._dtype)
        self._casts[id(module), name] = original, original._version, cast
        return cast

    def __getstate__(self) -> dict[str, Any]:
        state = copy.copy(self.__dict__)
        state["_casts"] = {}
        return state
