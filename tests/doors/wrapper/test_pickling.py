"""A wrapped model survives pickle, deepcopy, and being sent to another process."""

import copy
import multiprocessing
import pickle
import tempfile
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.errors import HeldGradientError, ShardOptimizerError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.optim import CPUOptimizer
from tests.copied import by_pickle, by_torch_save, losses_of
from tests.models import mlp, tiny, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn, sgd


@pytest.mark.pairs
@on_ranks(1, 2)
@pytest.mark.parametrize("copied_by", [copy.deepcopy, by_pickle, by_torch_save])
@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("kwargs", [{}, {"flatten_parameters": False}, {"mixed_precision": True}], ids=str)
def test_a_copy_trains_like_the_original(copied_by, num_steps, kwargs):
    """A copy made before or after some steps has the same state, trains alike, and shares no memory."""
    wrapped = wrap_tiny(tiny(), **kwargs)
    losses_of(wrapped, num_steps)
    copied = copied_by(wrapped)
    state = wrapped.state_dict()
    assert_same_state(copied.state_dict(), state)
    losses = losses_of(copied)
    assert_same_state(wrapped.state_dict(), state)
    assert losses_of(wrapped) == losses
    assert_same_state(copied.state_dict(), wrapped.state_dict())
    assert repr(copied) == repr(wrapped)


@on_ranks(2)
@pytest.mark.parametrize("kwargs", [{}, {"use_orig_params": True}], ids=str)
def test_optimizers_of_a_copy_are_checked(kwargs):
    """On a copy, too, an optimizer that would skip gradients held by units, or needs whole parameters, is refused."""
    wrapped = wrap_each(mlp(4, 9, 5), cpu_offload=True, move_grads_to_cpu=False, **kwargs)
    for copied_by in (copy.deepcopy, by_pickle, by_torch_save):
        copied = copied_by(wrapped)
        copied(randn(3, 4)).sum().backward()
        with pytest.raises(HeldGradientError, match=r"CPUOptimizer"):
            sgd(copied).step()
        with pytest.raises(ShardOptimizerError, match="LBFGS needs all parameters"):
            torch.optim.LBFGS(copied.parameters()).step(lambda: 0.0)
        before = copied.state_dict()
        CPUOptimizer(copied, torch.optim.SGD, lr=0.1).step()
        assert not torch.equal(copied.state_dict()["0.weight"], before["0.weight"])


@on_ranks(2)
def test_the_original_is_not_changed_by_being_copied():
    """Pickling or copying a model in the middle of training does not change it."""
    a, b = wrap_tiny(tiny()), wrap_tiny(tiny())
    losses_of(a)
    losses_of(b)
    pickle.dumps(a)
    copy.deepcopy(a)
    assert losses_of(a) == losses_of(b)


@on_ranks(2)
def test_the_group_is_missing_until_it_is_needed():
    """After unpickling ``process_group`` reads "MISSING"; the first use sets it to the default group."""
    copied = by_pickle(FSDP(nn.Linear(4, 5)))
    assert copied.process_group == "MISSING"
    copied(randn(2, 4))
    assert copied.process_group is dist.group.WORLD


@on_ranks(2)
def test_the_group_may_be_set():
    """A group set by ``model.process_group = g`` replaces the default group; deepcopy keeps the group."""
    group = dist.new_group()
    wrapped = FSDP(nn.Linear(4, 5), process_group=group)
    assert copy.deepcopy(wrapped).process_group is group
    copied = by_pickle(wrapped)
    copied.process_group = group
    copied(randn(2, 4)).sum().backward()
    assert copied.process_group is group


@on_ranks(2)
def test_another_rank_or_world_size_is_refused():
    """A shard belongs to one rank of one world size; using it elsewhere raises an error that names both."""
    copied = by_pickle(FSDP(nn.Linear(4, 5)))
    copied.process_group = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with pytest.raises(ValueError, match=rf"{dist.get_rank()} of 2.*0 of 1"):
        copied(randn(2, 4))
    parts = [None, None]
    dist.all_gather_object(parts, pickle.dumps(FSDP(nn.Linear(4, 5))))
    foreign = pickle.loads(parts[1 - dist.get_rank()])
    with pytest.raises(ValueError, match=rf"{1 - dist.get_rank()} of 2.*{dist.get_rank()} of 2"):
        foreign(randn(2, 4))


@pytest.mark.cpu_only("memory of a device is not shared this way")
@on_ranks(2)
def test_shared_memory_is_copied_out():
    """A copy sent the way torch.multiprocessing does is not affected by later changes to the original."""
    wrapped = wrap_each(mlp(4, 9, 5))
    copied = pickle.loads(ForkingPickler.dumps(wrapped))
    state = copied.state_dict()
    with torch.no_grad():
        for param in wrapped.parameters():
            param.add_(1)
    assert_same_state(copied.state_dict(), state)


def _continue_elsewhere(rank, world_size, path, model, queue):
    """The main function of a process that received a model: join a group, train, report."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    try:
        queue.put((losses_of(model), model.state_dict()["shared.bias"].tolist()))
    except Exception as error:
        queue.put(repr(error))
    finally:
        dist.destroy_process_group()


@pytest.mark.cpu_only("the other process is one without the test's device")
@on_ranks(2, timeout=120)
def test_it_can_be_passed_to_another_process():
    """Each rank sends its model to a new process; the new processes form a group and train as the senders would."""
    path = [str(Path(tempfile.mkdtemp()) / "store")]
    dist.broadcast_object_list(path)
    wrapped = wrap_tiny(tiny())
    losses_of(wrapped)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    arguments = (dist.get_rank(), 2, path[0], wrapped, queue)
    process = context.Process(target=_continue_elsewhere, args=arguments)
    process.start()
    result = queue.get(timeout=60)
    process.join(30)
    assert result == (losses_of(wrapped), wrapped.state_dict()["shared.bias"].tolist())


@on_ranks(2)
def test_in_the_middle_of_a_pass_it_is_refused():
    """Copying a model inside its forward raises an error, because the model is not idle."""
    wrapped = wrap_each(mlp(4, 9, 5))
    seen = []

    def copy_it(*_):
        for copied_by in (copy.deepcopy, pickle.dumps):
            with pytest.raises(ValueError, match="IDLE"):
                copied_by(wrapped)
        seen.append(True)

    handle = wrapped[0].module.register_forward_pre_hook(copy_it)
    wrapped(randn(2, 4))
    handle.remove()
    assert seen == [True]
