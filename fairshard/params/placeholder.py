"""The object that replaces a parameter while only its shards exist."""

import weakref
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from fairshard.errors import ParameterShardedError


@dataclass(frozen=True)
class GatheredAs:
    """The properties of a gathered parameter, except its shape."""

    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


class Source(Protocol):
    """An object that knows the properties of a gathered parameter."""

    @property
    def gathered_as(self) -> GatheredAs | None:
        """The properties; None if not known yet."""


class ShardedParameter:
    """Replaces a parameter while only its shards exist; reading it raises `ParameterShardedError`.

    It has the shape, dtype, device and ``requires_grad`` that the gathered parameter will have, but no values. An empty
    tensor in its place would be worse: sums of it are 0, and freed memory crashes the interpreter.
    """

    __slots__ = ("__weakref__", "_known", "_source", "fqn", "shape")

    def __init__(self, fqn: str, shape: torch.Size, known: GatheredAs | None = None) -> None:
        self.fqn = fqn
        self.shape = shape
        self._known = known
        self._source: weakref.ref[Source] | None = None  # weak: the source holds this object

    def follow(self, source: Source) -> None:
        """Take dtype, device and ``requires_grad`` from ``source`` from now on."""
        self._source = weakref.ref(source)

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self._gathered_as.dtype

    @property
    def device(self) -> torch.device:
        """The compute device."""
        return self._gathered_as.device

    @property
    def requires_grad(self) -> bool:
        """Whether its shards are trained."""
        return self._gathered_as.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._refuse()

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return self.shape.numel()

    def size(self, dim: int | None = None) -> Any:
        """Shape of the whole parameter, or its size in ``dim``."""
        return self.shape if dim is None else self.shape[dim]

    def is_floating_point(self) -> bool:
        """Whether the dtype is a floating one."""
        return self.dtype.is_floating_point

    @property
    def _gathered_as(self) -> GatheredAs:
        source = None if self._source is None else self._source()
        known = self._known if source is None else source.gathered_as
        if known is None:
            self._refuse()
        return known

    def __repr__(self) -> str:
        return f"<sharded parameter {self.fqn} {tuple(self.shape)}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):  # protocols probe for these; they must be absent
            raise AttributeError(name)
        self._refuse()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedParameter":
        return ShardedParameter(self.fqn, self.shape, self._gathered_as)

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardedParameter, (self.fqn, self.shape, self._gathered_as)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        """Refuse every torch function, naming the first sharded parameter among its arguments."""
        for arg in (*args, *(kwargs or {}).values()):
            for part in arg if isinstance(arg, (list, tuple)) else (arg,):
                if isinstance(part, cls):
                    part._refuse()
        raise ParameterShardedError("A parameter was read while it is sharded.")

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ParameterShardedError(
            f"Parameter `{self.fqn}` must be gathered to be read, but only its shards exist outside of its unit's "
            f"forward and backward: `{self.fqn.rpartition('.')[0] or 'the root'}` was not reached through its wrapper. "
            "Call the wrapped module itself; or make its method gather the parameters, with "
            '`fairshard.nn.register_forward_method(wrapper, "name")`; or read the parameter inside '
            "`with FullyShardedDataParallel.summon_full_params(model):`. Resize or tie parameters before wrapping."
        )


def _refuse_operators() -> None:
    arithmetic = "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift"
    others = "neg pos abs invert lt le gt ge len iter getitem setitem float int index bool array contains"
    names = [prefix + name for name in arithmetic.split() for prefix in ("", "r", "i")] + others.split()
    for name in names:
        setattr(ShardedParameter, f"__{name}__", ShardedParameter._refuse)


_refuse_operators()
