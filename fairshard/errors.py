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

The docstring of each has its cause and cure. A traceback says so below the message, in a note (``__notes__``, which
Python 3.10 does not print); the message itself can be quoted in another one.

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
        self.__notes__ = [f"Cause and cure: python -m pydoc {__name__}.{known.__name__}"]


class TrainingStateError(FairshardError, ValueError, AssertionError):
    """A method was called in a phase that does not allow it: in a forward, or in `summon_full_params`, for example.

    Cure: call it between passes, after the backward has returned, and outside the ``with`` block. The message names
    the phase.
    """


class NotRootError(FairshardError, AssertionError):
    """A method of the whole model was called on an inner wrapper.

    Cure: call it on the outermost wrapper.
    """


class OptionsExcludeError(FairshardError, ValueError, AssertionError):
    """Two options were set that exclude each other. The message names both.

    Cure: remove one of them.
    """


class MixedGroupsError(FairshardError, NotImplementedError):
    """The units of one model are sharded over different process groups, and this method needs a single one.

    Cure: pass the same `process_group` (`mesh`) to all units, or work group by group: norms, for example.
    """


class GradRequiresGradError(FairshardError):
    """A backward with ``create_graph=True``: weights are freed before a second backward could use them.

    Cure: compute what needs double backward on a module that is not sharded.
    """


class ParameterShardedError(FairshardError):
    """A parameter was read while this rank has only its shard: outside the forward and backward of its unit.

    Cure: call the wrapped module itself, not a module or method inside it. For another method than forward, register
    it: ``register_forward_method(wrapper, "name")``, or `register_fsdp_forward_method` for `fully_shard`. To read or
    edit values, use ``summon_full_params()``. For a state dict, call ``state_dict()`` of the wrapper on all ranks,
    and pass the result on.
    """


class ShardChangedError(FairshardError):
    """Weights changed between a forward and its backward, or a forward wrote to a gathered parameter of its own.

    Cure: run the backward before the optimizer steps or a state dict is loaded. Compute with a changed value
    (`torch.nn.utils.parametrize`) instead of writing it, as ``nn.Embedding(max_norm=...)`` does.
    """


class BackwardOrderError(FairshardError):
    """A gradient arrived after its unit was sent, or for a parameter that was frozen when the backward began.

    Cure: recompute with `torch.utils.checkpoint` or `fairshard.nn.checkpoint_wrapper`, not with a function of your
    own, which makes a second graph. Freeze and train outside of hooks and of checkpointed functions.
    """


class PartialGradientError(FairshardError):
    """An exception ended a backward after a part of the gradients had been added or sent.

    Cure: call ``zero_grad()``, and repeat the backwards of this step. Until then such gradients show zeros, and what
    later backwards add to them is dropped.
    """


class PendingGradientError(FairshardError):
    """An optimizer stepped, or gradients were clipped or unscaled, before they were reduced.

    Cure: run the last backward of a step without ``no_sync()``, ``set_requires_gradient_sync(False)`` and
    ``set_requires_all_reduce(False)``. At the end of an epoch, drop what is left with ``zero_grad()``. torch's own
    `clip_grad_norm_` raises "more than one element of the written-to tensor refers to a single memory location" then.
    """


class StaleOptimizerError(FairshardError):
    """The optimizer holds whole parameters, not shards, or steps before the backward has ended.

    Cure: build the optimizer from ``model.parameters()`` after wrapping, and not while a module is gathered.
    """


class HeldGradientError(FairshardError):
    """Gradients stay on the device (``cpu_offload=True, move_grads_to_cpu=False``), where this optimizer sees none.

    Cure: use `fairshard.optim.CPUOptimizer`, or leave `move_grads_to_cpu` out.
    """


class ShardOptimizerError(FairshardError, TypeError):
    """The optimizer needs what a shard does not have: a parameter's shape, a closure over all of them, fp32 masters.

    Cure: take an elementwise optimizer (AdamW, SGD, Adagrad, Lion), or `fairshard.optim.Muon` for matrices. For fp32
    masters on the CPU wrap the fp32 module with ``mixed_precision=True``.
    """


class LocalScalingError(FairshardError):
    """torch's `clip_grad_norm_` or `GradScaler` would see one rank's part of a flat shard, and ranks would differ.

    Cure: call ``model.clip_grad_norm_(max_norm)`` on all ranks; use `fairshard.optim.ShardedGradScaler`.
    """


class HostMemoryError(FairshardError, MemoryError):
    """The ranks of a host would pin more than 80 % of its free memory for offloaded shards and gradients.

    Cure: start fewer ranks on the host, spread the model over more hosts, or offload less (`offload_fraction`).
    """


class StateDictTypesDifferError(FairshardError, AssertionError):
    """The units of one model have different types of state dict set.

    Cure: call ``FullyShardedDataParallel.set_state_dict_type`` on the outermost module.
    """


class CheckpointError(FairshardError, ValueError):
    """A checkpoint is missing, damaged, of another model, or in use by another run. Nothing in memory has changed.

    Cure: choose the checkpoint before it, or build the model that was saved. ``fairshard inspect FOLDER`` shows what
    is in one, and compares all checksums. The message names the file.
    """


class NonFiniteGradientError(FairshardError):
    """With ``nan_check=True``, a gradient is NaN or infinite.

    Cure: look at what the named modules compute, on the batch of the named rank: they are the first in the order of
    the backward. With scaled fp16 gradients leave `nan_check` out.
    """


class CollectiveFailedError(FairshardError):
    """A rank died, hung, ran out of data, or did not call a method that all ranks must call.

    Cure: read the log of the rank that is ``gone`` or silent first; the message says where every rank was. Let the
    error end the process, and restart all ranks from the last checkpoint. If ranks have different numbers of batches,
    use ``join``.
    """


class RanksDisagreeError(FairshardError):
    """Ranks built different models, ran their units in different orders, stepped or evaluated differently.

    Cure: find the branch that depends on the rank or on its data, and make all ranks take the same one; the message
    has the first difference, with the line of your code on each rank. Then restart all ranks from the last
    checkpoint.
    """
