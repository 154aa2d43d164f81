"""The exceptions of fairshard.

Wrong arguments raise plain ``ValueError`` / ``TypeError``, before any collective. Errors while running raise::

    FairshardError (RuntimeError)
    |-- TrainingStateError    (+ ValueError, AssertionError)  called in the wrong phase of training
    |-- NotRootError          (+ AssertionError)              only the outermost wrapper may do this
    |-- OptionsExcludeError   (+ ValueError, AssertionError)  two options that exclude each other
    |-- MixedGroupsError      (+ NotImplementedError)         the units use several process groups
    |-- GradRequiresGradError                                 a backward with ``create_graph=True``
    |-- ParameterShardedError                                 an original parameter read outside its unit
    |-- ShardChangedError                                     weights edited between forward and backward
    |-- BackwardOrderError                                    gradients arrived after their unit's bucket was sent
    |-- PartialGradientError                                  gradients that an exception left incomplete
    |-- PendingGradientError                                  gradients that no backward has reduced yet
    |-- StaleOptimizerError                                   an optimizer that holds no shards
    |-- HeldGradientError                                     an optimizer that would silently skip gradients
    |-- ShardOptimizerError   (+ TypeError)                   an optimizer that cannot work on 1-D shards
    |-- LocalScalingError                                   ranks would clip or skip by their own gradients alone
    |-- HostMemoryError       (+ MemoryError)                 not enough host memory to pin
    |-- StateDictTypesDifferError (+ AssertionError)          units with different types of state dict
    |-- CheckpointError       (+ ValueError)                  a checkpoint is damaged, missing, or of a different model
    |-- NonFiniteGradientError                                a gradient is NaN or infinite, with ``nan_check``
    |-- CollectiveFailedError                                 a rank died, hung or ran out of data
    `-- RanksDisagreeError                                    ranks built or ran different models

Each has a section in ``docs/reference/errors.md``, with its cause and cure. A traceback names it below the message, in
a note (``__notes__``, which Python 3.10 does not print); the message itself can be quoted in another one.

The extra bases are the classes that fairscale and FSDP1 raise in the same places, so that existing ``except`` clauses
keep working.
"""

__all__ = [
    "BackwardOrderError",
    "CheckpointError",
    "CollectiveFailedError",
    "FairshardError",
    "GradRequiresGradError",
    "HeldGradientError",
    "HostMemoryError",
    "LocalScalingError",
    "MixedGroupsError",
    "NonFiniteGradientError",
    "NotRootError",
    "OptionsExcludeError",
    "ParameterShardedError",
    "PartialGradientError",
    "PendingGradientError",
    "RanksDisagreeError",
    "ShardChangedError",
    "ShardOptimizerError",
    "StaleOptimizerError",
    "StateDictTypesDifferError",
    "TrainingStateError",
]


class FairshardError(RuntimeError):
    """Base of everything that fairshard raises while running."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        known = next(cls for cls in type(self).__mro__ if cls.__module__ == __name__)
        self.__notes__ = [f"Cause and cure: docs/reference/errors.md#{known.__name__.lower()}"]


class TrainingStateError(FairshardError, ValueError, AssertionError):
    """A method was called in a phase (forward, backward, summon) that does not allow it."""


class NotRootError(FairshardError, AssertionError):
    """A method of the outermost wrapper was called on an inner one."""


class OptionsExcludeError(FairshardError, ValueError, AssertionError):
    """Two options were set that exclude each other."""


class MixedGroupsError(FairshardError, NotImplementedError):
    """The units of one model use several process groups, and the operation needs a single one."""


class GradRequiresGradError(FairshardError):
    """Gradients themselves require grad (``create_graph=True``), which sharded gradients do not support."""


class ParameterShardedError(FairshardError):
    """An original parameter was read while only its shards exist."""


class ShardChangedError(FairshardError):
    """A shard was modified between a forward and its backward, or a gathered parameter inside a forward."""


class BackwardOrderError(FairshardError):
    """Autograd ran a backward in an order that the forward does not allow."""


class PartialGradientError(FairshardError):
    """An exception in a backward left the gradients incomplete, and the next step would use them."""


class PendingGradientError(FairshardError):
    """Gradients of ``no_sync`` passes were to be used, but no backward has reduced them yet."""


class StaleOptimizerError(FairshardError):
    """An optimizer holds whole parameters instead of shards, or steps before the backward has ended."""


class HeldGradientError(FairshardError):
    """An optimizer does not see the gradients that units hold on the compute device."""


class ShardOptimizerError(FairshardError, TypeError):
    """An optimizer needs what shards do not offer: the parameter's shape, fp32, or a closure over whole weights."""


class LocalScalingError(FairshardError):
    """torch's clipping or loss scaling would treat the parts of a shard differently on each rank."""


class HostMemoryError(FairshardError, MemoryError):
    """The ranks of a host would pin more memory than is free."""


class StateDictTypesDifferError(FairshardError, AssertionError):
    """The units of one model have different types of state dict."""


class CheckpointError(FairshardError, ValueError):
    """A checkpoint cannot be used: a file is missing or damaged, or it was saved from a different model."""


class NonFiniteGradientError(FairshardError):
    """A gradient is NaN or infinite on some rank."""


class CollectiveFailedError(FairshardError):
    """A collective failed or timed out; the message says where every rank was, and which ranks are silent."""


class RanksDisagreeError(FairshardError):
    """Ranks of one process group hold different models, or run their units in different orders."""
