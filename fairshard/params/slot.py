"""Where a parameter is in the module tree, under all its names."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.weak import WeakIdKeyDictionary

from fairshard.params.placeholder import ShardedParameter
from fairshard.utils.storage import set_data

_slots: WeakIdKeyDictionary = WeakIdKeyDictionary()  # leaf -> its slot, as long as the slot lives


def slot_of(param: nn.Parameter) -> "ParamSlot | None":
    """The slot of ``param`` if a unit has sharded it, otherwise None.

    Modules that still refer to a sharded ``param`` see an empty leaf.
    """
    slot: ParamSlot | None = _slots.get(param, lambda: None)()
    return slot


class ParamSlot:
    """One parameter, the modules that refer to it, and the leaf that they use while it is gathered.

    The leaf *is* the original ``nn.Parameter``: references that modules saved (``nn.RNNBase._flat_weights``),
    hooks and initialisation flags stay valid. While sharded it holds no elements.
    """

    has_mesh = False
    """Whether the parameter is cut over ranks of a mesh of its own while it is gathered."""
    registered: nn.Parameter | None = None
    placeholder: ShardedParameter | None = None

    def __init__(self, leaf: nn.Parameter, fqn: str) -> None:
        self.leaf = leaf
        self.fqn = fqn
        self.shape = leaf.shape
        self.numel = leaf.numel()
        self.owners: list[tuple[nn.Module, str]] = []  # several for tied weights: modules, and the name in each

    @property
    def values(self) -> Tensor:
        """The values to cut, before the parameter is sharded."""
        return self.leaf

    @property
    def is_gathered(self) -> bool:
        """Whether the leaf shows whole values."""
        return self.leaf.shape == self.shape

    def local_grad(self, grad: Tensor) -> Tensor:
        """This rank's part of ``grad``, the gradient of the leaf: all of it, dense."""
        return grad.to_dense() if grad.is_sparse else grad

    @property
    def keeps_dtype(self) -> bool:
        """Whether the parameter is not cast for compute: BatchNorm takes low-precision inputs, but fp32 weights."""
        return any(isinstance(module, _BatchNorm) for module, _ in self.owners)

    def register(self, shard: nn.Parameter | None) -> None:
        """Replace the parameter in its modules with ``shard``, or with a placeholder that raises."""
        self.registered = shard
        self.placeholder = ShardedParameter(self.fqn, self.leaf.shape) if shard is None else None
        for module, name in self.owners:
            module._parameters[name] = shard  # None keeps the name's place in the module's order
            if self.placeholder is not None:
                module.__dict__[name] = self.placeholder
        _slots[self.leaf] = weakref.ref(self)
        self.leaf.grad = None
        self.clear()

    def renew_leaf(self, device: torch.device) -> None:
        """Replace the leaf with a new one on ``device``: a leaf on the meta device can never show memory."""
        old = self.leaf
        leaf = nn.Parameter(torch.empty(0, dtype=old.dtype, device=device), old.requires_grad)
        leaf.__dict__.update(old.__dict__)
        self.compute_with(leaf)

    def move_to(self, device: torch.device) -> None:
        """Compute on ``device`` from now on; the leaf is empty, and nothing is copied."""
        empty = self.leaf.data.to(device)
        set_data(self.leaf, empty)
        self.show(empty)
        self.clear()

    def show(self, view: Tensor) -> None:
        """Make the leaf show ``view``, with the dtype and device of ``view``."""
        self.leaf.data = view

    def compute_with(self, leaf: nn.Parameter) -> None:
        """Use ``leaf`` as the leaf from now on."""
        self.leaf = leaf
        _slots[leaf] = weakref.ref(self)

    def clear(self) -> None:
        """Empty the leaf, which keeps its dtype and device."""
        self.leaf.data = torch.empty(0, dtype=self.leaf.dtype, device=self.leaf.device)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _slots[self.leaf] = weakref.ref(self)
