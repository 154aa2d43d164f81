"""Options that fairscale's wrapper got after its first ten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fairshard.settings.fsdp1 import CPUOffload, adopt
from fairshard.settings.state_dicts import FullStateDictConfig, StateDictSettings, default_settings


@dataclass(frozen=True)
class LateOptions:
    """What each means is in the docstring of the wrapper. The defaults change nothing.

    Attributes:
        keeps_across_passes: what a forward leaves gathered serves the next forward, unless an optimizer has stepped or
            torch has counted a write to the shards; and the backward frees it after each of several forwards. Else
            each forward gathers anew, and what a forward has left gathered stays so until all gradients are there.
    """

    disable_reshard_on_root: bool = True
    state_dict_device: torch.device | None = None
    state_dict_on_rank_0_only: bool = False
    no_broadcast_optim_state: bool = False
    clear_autocast_cache: bool = False
    verbose: bool = False
    keeps_across_passes: bool = False

    def settings(self) -> StateDictSettings | None:
        """The form of state dicts that is asked for; None for the usual one."""
        if self.state_dict_device is None and not self.state_dict_on_rank_0_only:
            return None
        settings = default_settings()
        on_cpu = self.state_dict_device is not None and self.state_dict_device.type == "cpu"
        settings.state_dict_config = FullStateDictConfig(on_cpu, rank0_only=self.state_dict_on_rank_0_only)
        return settings


DEFAULTS = LateOptions()


def late_options(
    *, state_dict_device: torch.device | str | None, compute_device: torch.device, **flags: Any
) -> LateOptions:
    """The options, checked.

    Raises:
        TypeError: a flag is not True or False.
        ValueError: state dicts are asked for on a device where the model does not compute.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"`{name}` must be True or False, but is {value!r}.")
    device = None if state_dict_device is None else torch.device(state_dict_device)
    if device is not None and device.type != "cpu" and device.type != compute_device.type:
        raise ValueError(
            f"`state_dict_device` must be the CPU or where the module is, {compute_device.type}, but is {device}. "
            "Leave it out, or move the module first."
        )
    return LateOptions(state_dict_device=device, **flags)


def offload_of(cpu_offload: Any, move_params_to_cpu: bool | None) -> Any:
    """``cpu_offload``, or what its later name says.

    Raises:
        TypeError: the later name's value is not True, False or None.
        ValueError: the two contradict each other.
    """
    if move_params_to_cpu is None:
        return cpu_offload
    if not isinstance(move_params_to_cpu, bool):
        raise TypeError(f"`move_params_to_cpu` must be True, False or None, but is {move_params_to_cpu!r}.")
    given = adopt(cpu_offload, CPUOffload)
    if (given.offload_params if isinstance(given, CPUOffload) else given) and not move_params_to_cpu:
        raise ValueError(
            "`move_params_to_cpu=False` contradicts `cpu_offload=True`, its earlier name. Pass one of the two."
        )
    return move_params_to_cpu
