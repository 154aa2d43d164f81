"""The functions of ``torch.distributed.checkpoint.state_dict`` over a wrapper: refused by name.

These functions take the parameters that modules register for whole ones, or for DTensors; a wrapper registers this
rank's shards, whose optimizer state they would save as the whole. They look for ``_fqn_modifiers`` on each module with
children before they read or write anything, and nothing else does: there the wrapper raises. All ranks call these
functions, so all ranks raise.
"""

from __future__ import annotations

from fairshard.engine.unit import Unit
from fairshard.errors import ParameterShardedError


def refuse_torch_functions(unit: Unit) -> None:
    """Raise if the parameters that the wrapper of ``unit`` registers do not have the shapes of whole ones.

    Raises:
        ParameterShardedError: the result would hold this rank's shards in place of whole values.
    """
    if not all(flat_param.shows.keeps_shapes for flat_param in unit.flat_params):
        raise ParameterShardedError(
            "Functions of torch.distributed.checkpoint.state_dict must find whole parameters or DTensors, but "
            f"FullyShardedDataParallel registers this rank's shards (unit `{unit.fqn or 'root'}`). Call "
            "`model.state_dict()` and `model.load_state_dict(state)`; for an optimizer "
            "`FullyShardedDataParallel.optim_state_dict(model, optimizer)` and "
            "`FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)`; or "
            "`fairshard.checkpoint.save` and `load`."
        )
