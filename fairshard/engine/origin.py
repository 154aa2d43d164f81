"""What a unit was made from, and what it must ignore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fairshard.params.flat_param import FlatParam
from fairshard.params.versions import versions_of
from fairshard.utils.containers import apply_to_tensors


@dataclass(frozen=True)
class Ignored:
    """The ``modules`` that a unit ignores, with all below them, and the ``params`` of these and beside them."""

    modules: tuple[nn.Module, ...] = ()
    params: tuple[nn.Parameter, ...] = ()

    @property
    def ids(self) -> set[int]:
        """The ``id`` of each of them."""
        return {id(item) for item in (*self.modules, *self.params)}

    def replaced(self, new: Mapping[int, nn.Parameter]) -> Ignored:
        """With ``new[id(param)]`` instead of ``param``."""
        return Ignored(self.modules, tuple(new.get(id(param), param) for param in self.params))


NOTHING = Ignored()


@dataclass
class Origin:
    """A module whose values were there to be cut, for a unit that computes on ``device``.

    ``is_placed``: the user has named that device. ``moves_inputs``: what a forward is called with goes there too.
    ``sums`` has a checksum for each parameter where ranks may have begun with different values; until they are
    compared. ``shared``: the `SharedParams` that its modules use of other units.
    """

    device: torch.device
    ignored: Ignored
    is_placed: bool
    moves_inputs: bool
    sums: dict[str, Tensor]
    shared: Any
    _versions: list[int] = field(default_factory=list)

    def note_cut(self, flat_params: Sequence[FlatParam]) -> None:
        """The shards of ``flat_params`` have just been cut."""
        self._versions = versions_of(flat_params)

    def has_changed(self, flat_params: Sequence[FlatParam]) -> bool:
        """Whether something was written to a shard since."""
        return self._versions != versions_of(flat_params)

    @property
    def trains_ignored(self) -> bool:
        """Whether a backward computes gradients that the unit does not see."""
        return any(param.requires_grad for param in self.ignored.params)

    def without_ignored(self, modules: list[nn.Module]) -> list[nn.Module]:
        """Those of ``modules`` that are not ignored."""
        ignored = self.ignored.ids
        return [module for module in modules if id(module) not in ignored]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "sums": {}}


def move_inputs(inputs: Any, device: torch.device) -> Any:
    """``inputs`` with every tensor in them on ``device``, differentiably; containers keep their types."""
    return apply_to_tensors(lambda tensor: tensor.to(device, non_blocking=True), inputs)
