"""fairshard: a ZeRO-3 engine for PyTorch in plain Python."""

from typing import TYPE_CHECKING

from fairshard.errors import FairshardError
from fairshard.utils.lazy import lazy
from fairshard.version import __version__

if TYPE_CHECKING:
    from fairshard.checkpoint import Checkpointer as Checkpointer
    from fairshard.extras.observe.timeline import timeline as timeline
    from fairshard.nn import FSDP as FSDP
    from fairshard.nn import FSDPModule as FSDPModule
    from fairshard.nn import FullyShardedDataParallel as FullyShardedDataParallel
    from fairshard.nn import fully_shard as fully_shard
    from fairshard.nn.wrap import describe as plan
    from fairshard.optim import CPUOptimizer as CPUOptimizer
    from fairshard.planning.model_summary import summary as summary

_HOMES = {
    "CPUOptimizer": "fairshard.optim",
    "Checkpointer": "fairshard.checkpoint",
    "FSDP": "fairshard.nn",
    "FSDPModule": "fairshard.nn",
    "FullyShardedDataParallel": "fairshard.nn",
    "fully_shard": "fairshard.nn",
    "plan": "fairshard.nn.wrap:describe",
    "summary": "fairshard.planning.model_summary",
    "timeline": "fairshard.extras.observe.timeline",
}
if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy(__name__, _HOMES)

__all__ = [
    "FSDP",
    "CPUOptimizer",
    "Checkpointer",
    "FSDPModule",
    "FairshardError",
    "FullyShardedDataParallel",
    "__version__",
    "fully_shard",
    "plan",
    "summary",
    "timeline",
]
