"""Modules sharded by `fully_shard` as torch's own code knows them: the base class and the state that it looks for.

The only file that writes torch's keys on users' modules. Private names of torch are the same in 2.6 and 2.13 unless a
comment says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed.fsdp


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"`{name}` of torch's FSDPModule must not be called on a module that fairshard has sharded: fairshard has "
            "no such method. Leave the call out."
        )

    refuse.__name__ = name
    refuse.__doc__ = "Not supported: always raises."
    return refuse


class TorchFSDPModule(torch.distributed.fsdp.FSDPModule):
    """Torch's ``FSDPModule`` without its behaviour: methods that no subclass overrides raise NotImplementedError."""

    for _name, _value in vars(torch.distributed.fsdp.FSDPModule).items():
        if callable(_value) and not _name.startswith("__"):
            vars()[_name] = _refusal(_name)
    del _name, _value
