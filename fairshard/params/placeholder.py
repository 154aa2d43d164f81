"""The object that replaces a parameter while only its shards exist."""

from typing import Any, NoReturn

import torch
from torch import nn

from fairshard.errors import ParameterShardedError

_OF_SHAPE = ("dim", "ndim", "numel", "size", "is_floating_point")


class ShardedParameter:
    """Replaces a parameter while only its shards exist; reading it raises `ParameterShardedError`.

    It has the shape, dtype, device and ``requires_grad`` that the gathered parameter will have, but no values. An empty
    tensor in its place would be worse: sums of it are 0, and freed memory crashes the interpreter.
    """

    __slots__ = ("__weakref__", "_dtype", "_leaf", "_shard", "fqn", "shape")

    def __init__(self, fqn: str, shape: torch.Size) -> None:
        self.fqn = fqn
        self.shape = shape

    def explain(self, shard: nn.Parameter, leaf: nn.Parameter, dtype: torch.dtype | None) -> None:
        """From now on, report what is gathered from ``shard`` for ``leaf``, in ``dtype``; None: in its own dtype."""
        self._shard, self._leaf, self._dtype = shard, leaf, dtype

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype."""
        return self._dtype or self._shard.dtype

    @property
    def device(self) -> torch.device:
        """The compute device."""
        # An offloaded shard is on the CPU, its leaf on the compute device. Otherwise `.cuda()` moves the shard first.
        return self._leaf.device if self._shard.device.type == "cpu" else self._shard.device

    @property
    def requires_grad(self) -> bool:
        """Whether its shards are trained."""
        return self._shard.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._refuse()

    def __repr__(self) -> str:
        return f"<sharded parameter {self.fqn} {tuple(self.shape)}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):  # protocols probe for these; they must be absent
            raise AttributeError(name)
        if name in _OF_SHAPE:
            return getattr(torch.empty(self.shape, dtype=self.dtype, device="meta"), name)
        self._refuse()

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
        raise read_error(self.fqn)


def read_error(fqn: str) -> ParameterShardedError:
    """Error for a read of parameter ``fqn`` of a wrapper while only its shards exist."""
    return ParameterShardedError(
        f"Parameter `{fqn}` must be gathered to be read, but only its shards exist outside of its unit's "
        f"forward and backward: `{fqn.rpartition('.')[0] or 'the root'}` was not reached through its wrapper. "
        "Call the wrapped module itself; or make its method gather the parameters, with "
        '`fairshard.nn.register_forward_method(wrapper, "name")`; or read the parameter inside '
        "`with FullyShardedDataParallel.summon_full_params(model):`. Resize or tie parameters before wrapping."
    )


_ARITHMETIC = "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift"
_OTHERS = "neg pos abs invert lt le gt ge len iter getitem setitem float int index bool array contains"
for _name in [prefix + name for name in _ARITHMETIC.split() for prefix in ("", "r", "i")] + _OTHERS.split():
    setattr(ShardedParameter, f"__{_name}__", ShardedParameter._refuse)
