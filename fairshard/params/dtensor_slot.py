"""A parameter that was a DTensor before it was sharded: a tensor-parallel one, for example."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fairshard.errors import FairshardError
from fairshard.params.slot import ParamSlot


class KeptSpec:
    """The ``spec`` of a DTensor that a unit gathers. Copies share it; it cannot be pickled."""

    def __init__(self, spec: DTensorSpec) -> None:
        self.spec = spec

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptSpec:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise FairshardError(
            "A sharded model with parameters that were DTensors must not be pickled, because their mesh, "
            f"{self.spec.mesh}, cannot be restored in another process. Save its state dict with "
            "torch.distributed.checkpoint, and load it into a newly built model."
        )


class DTensorSlot(ParamSlot):
    """A parameter that is a DTensor, of which a unit shards this rank's local tensor.

    The leaf is the original DTensor. While gathered its local tensor is a view of the unit's buffer; while sharded, an
    empty tensor. `shape` and `numel` are those of the local tensor.

    ``dp_dims``: dimensions of the DTensor's mesh over which the unit itself reduces gradients.
    """

    has_mesh = True

    def __init__(self, leaf: nn.Parameter, fqn: str) -> None:
        super().__init__(leaf, fqn)
        assert isinstance(leaf, DTensor)
        self.kept = KeptSpec(leaf._spec)
        self.shape, self.numel = leaf._local_tensor.shape, leaf._local_tensor.numel()
        self.dp_dims: frozenset[int] = frozenset()
        self._shown: Tensor | None = None  # what the leaf has the metadata of

    @property
    def spec(self) -> DTensorSpec:
        """The spec of the parameter while gathered, in its original dtype."""
        return self.kept.spec

    @property
    def values(self) -> Tensor:
        """The local tensor of the leaf."""
        local: Tensor = self.leaf._local_tensor  # type: ignore[attr-defined]
        return local.detach()

    @property
    def is_gathered(self) -> bool:
        """Whether the leaf shows whole values."""
        local: Tensor = self.leaf._local_tensor  # type: ignore[attr-defined]
        return local.shape == self.shape

    def spec_in(self, dtype: torch.dtype) -> DTensorSpec:
        """The spec of the gathered parameter in ``dtype``."""
        meta = self.spec.tensor_meta
        assert meta is not None
        return replace(self.spec, tensor_meta=TensorMeta(meta.shape, meta.stride, dtype))

    def show(self, view: Tensor) -> None:
        """Make the leaf a DTensor around ``view``, with the dtype of ``view``."""
        leaf: Any = self.leaf
        if view is not self._shown:
            self._shown = view
            self._describe(view)
        leaf._local_tensor = view

    def _describe(self, local: Tensor) -> None:
        """Give the leaf the metadata of a DTensor around ``local``: dtype, and offset, which the compiler compares."""
        leaf: Any = self.leaf
        spec = self.spec_in(local.dtype)
        leaf.data = DTensor(local, spec, requires_grad=False)
        leaf._spec = spec

    def clear(self) -> None:
        """Make the local tensor empty."""
        leaf: Any = self.leaf
        leaf._local_tensor = torch.empty(0, dtype=leaf.dtype, device=leaf.device)

    def move_to(self, device: torch.device) -> None:
        """Empty the leaf. A DTensor is on the device of its mesh, so it cannot move.

        Raises:
            ValueError: the unit computes on a device of another kind.
        """
        if device.type != self.leaf.device.type:
            raise ValueError(
                f"A DTensor must be on the device type of the unit that shards it, {device.type}, but `{self.fqn}` is "
                f"on a mesh of {self.leaf.device.type}. Build both meshes for one device type."
            )
        self.clear()

    def renew_leaf(self, device: torch.device) -> None:
        """Replace the leaf, which is on the meta device, with an empty one on ``device``."""
        local = torch.empty(0, dtype=self.leaf.dtype, device=device)
        leaf = nn.Parameter(DTensor(local, self.spec_in(local.dtype), requires_grad=False), self.leaf.requires_grad)
        leaf.__dict__.update(self.leaf.__dict__)
        self.compute_with(leaf)
        self._shown = None

    @torch.no_grad()
    def local_grad(self, grad: Tensor) -> Tensor:
        """The local tensor of ``grad``, dense, placed like the parameter. **Collective** if it is placed differently.

        Dimensions of the mesh over which the unit reduces may keep partial sums.

        Raises:
            FairshardError: ``grad`` is no DTensor.
        """
        if not isinstance(grad, DTensor):
            raise FairshardError(
                f"The gradient of `{self.fqn}`, which is a DTensor on {self.spec.mesh}, must be a DTensor, but is a "
                f"{type(grad).__name__}. Return a DTensor from hooks on the parameter."
            )
        wanted = [
            given if dim in self.dp_dims and isinstance(given, Partial) else own
            for dim, (given, own) in enumerate(zip(grad.placements, self.spec.placements, strict=True))
        ]
        if list(grad.placements) != wanted:
            grad = grad.redistribute(placements=wanted)
        local = grad._local_tensor
        return local.to_dense() if local.is_sparse else local

    def __getstate__(self) -> dict[str, Any]:
        if not self.is_gathered:  # with an offset, torch's deepcopy would look for memory of the leaf's own
            self._describe(self.leaf._local_tensor)  # type: ignore[attr-defined]
            self._shown = None
        return {**self.__dict__, "_shown": None}


def new_slot(param: nn.Parameter, fqn: str) -> ParamSlot:
    """A slot for ``param``, named ``fqn``, by its kind."""
    return (DTensorSlot if isinstance(param, DTensor) else ParamSlot)(param, fqn)
