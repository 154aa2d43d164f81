"""What stands where a parameter was while only its shards exist."""

from typing import Any, NoReturn

import torch

from fairshard.errors import ParameterShardedError


class ShardedParameter:
    """Stands where a parameter was while only its shards exist; reading it raises `ParameterShardedError`.

    An empty tensor in its place would be worse: sums of it are 0, and freed memory crashes the interpreter.
    """

    __slots__ = ("__weakref__", "fqn", "shape")

    def __init__(self, fqn: str, shape: torch.Size) -> None:
        self.fqn = fqn
        self.shape = shape

    def __repr__(self) -> str:
        return f"<sharded parameter {self.fqn} {tuple(self.shape)}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):  # protocols probe for these; absence is the answer
            raise AttributeError(name)
        self._refuse()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedParameter":
        return ShardedParameter(self.fqn, self.shape)

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardedParameter, (self.fqn, self.shape)

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
            "Call the wrapped module itself; make a method of it one that gathers, with "
            '`fairshard.nn.register_forward_method(wrapper, "name")`; or read the parameter inside '
            "`with FullyShardedDataParallel.summon_full_params(model):`."
        )


def _refuse_operators() -> None:
    arithmetic = "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift"
    others = "neg pos abs invert lt le gt ge len iter getitem setitem float int index bool array contains"
    names = [prefix + name for name in arithmetic.split() for prefix in ("", "r", "i")] + others.split()
    for name in names:
        setattr(ShardedParameter, f"__{name}__", ShardedParameter._refuse)


_refuse_operators()
