"""Step DTensor parameters through this rank's elements as plain 1-D tensors.

torch's kernels then run on plain tensors, without DTensor's overhead on the host; this includes fused kernels,
which DTensors do not support. Optimizer state is kept, and shown, as DTensors.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from fairshard.views.orig_param import OrigParam, Stepped


class LocalParts:
    """This rank's elements of the parameters ``stepped``; plain parameters are used unchanged."""

    def __init__(self, stepped: Mapping[nn.Parameter, Stepped]) -> None:
        self._stepped = stepped
        self._plain: dict[nn.Parameter, nn.Parameter] = {}

    def origin_of(self, param: nn.Parameter) -> OrigParam | None:
        """The `OrigParam` of ``param`` if it is a DTensor of a unit; otherwise None."""
        stepped = self._stepped.get(param) if isinstance(param, DTensor) else None
        return stepped if isinstance(stepped, OrigParam) else None

    def own(self, param: nn.Parameter, value: Tensor) -> Tensor:
        """This rank's elements of ``value``, which has the shape of ``param``; ``[n]`` if ``param`` is a DTensor."""
        origin = self.origin_of(param)
        return value if origin is None else origin.own_of(value)

    def shown(self, param: nn.Parameter, own: Tensor) -> Tensor:
        """The value in optimizer state for this rank's elements ``own``: a DTensor if ``param`` is one."""
        origin = self.origin_of(param)
        return own if origin is None else origin.shown(own)

    def seed_of(self, param: nn.Parameter) -> int:
        """Random seed of ``param``: different for each rank's part; equal on all ranks if the parameter is whole."""
        stepped = self._stepped.get(param)
        is_whole = isinstance(param, DTensor) and not any(placement.is_shard() for placement in param.placements)
        name = "" if stepped is None else f"{stepped.name} of rank {0 if is_whole else stepped.line.rank}"
        return zlib.crc32(name.encode())

    def enter(self, groups: list[dict[str, Any]], state: Any) -> tuple[list[dict[str, Any]], Any]:
        """``groups`` and ``state`` with plain tensors in place of DTensors; unchanged without DTensors."""
        params = _params_of(groups)
        if not any(self.origin_of(param) for param in params):
            return groups, state
        entered = [{**group, "params": [self._enter(param) for param in group["params"]]} for group in groups]
        plain_state: dict[Any, Any] = defaultdict(dict)
        for param in params:
            plain, kept = self._plain.get(param), state.get(param)
            if kept is not None and plain is not None:
                kept = {name: self.own(param, v) if isinstance(v, DTensor) else v for name, v in kept.items()}
            if kept is not None:
                plain_state[param if plain is None else plain] = kept
        return entered, plain_state

    def leave(self, groups: list[dict[str, Any]], plain_state: Any, state: Any) -> None:
        """Write the ``plain_state`` that the step left back into ``state``."""
        if plain_state is state:
            return
        for param in _params_of(groups):
            plain = self._plain.get(param)
            made = plain_state.get(param if plain is None else plain)
            if plain is not None:
                plain.grad = None
                increment_version(param)
                before = state.get(param, {})
                for name, value in (made or {}).items():
                    if isinstance(value, Tensor) and value.shape == plain.shape:
                        made[name] = self._kept(param, before.get(name), value)
            if made is not None:
                state[param] = made

    def _enter(self, param: nn.Parameter) -> nn.Parameter:
        origin = self.origin_of(param)
        if origin is None:
            return param
        own = origin.own_of(param)
        plain = self._plain.get(param)
        if plain is None or plain.data_ptr() != own.data_ptr() or plain.dtype != own.dtype:
            plain = self._plain[param] = nn.Parameter(own, requires_grad=param.requires_grad)
        plain.grad = None if param.grad is None else origin.own_of(param.grad)
        return plain

    def _kept(self, param: nn.Parameter, before: Any, own: Tensor) -> Tensor:
        """A DTensor over ``own``: ``before`` if it already shows that memory."""
        if isinstance(before, DTensor) and self.own(param, before).data_ptr() == own.data_ptr() and own.numel():
            return before
        return self.shown(param, own)


def _params_of(groups: list[dict[str, Any]]) -> list[nn.Parameter]:
    return [param for group in groups for param in group["params"]]
