"""The collectives of a unit among 128 ranks that are threads of this process."""

import threading
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from fairshard.nn import MixedPrecisionPolicy, fully_shard
from fairshard.utils.groups import communicator, part_of

pytestmark = [
    pytest.mark.behaviour("ranks that are threads"),
    pytest.mark.cpu_only("its ranks are threads of this process, which share one device and its streams"),
]

WORLD_SIZE = 128
SHAPES = [(17, 257), (17,), (64, 312), (64,), (64, 64), (512, 64), (256,), (64, 297)]


@contextmanager
def threaded_world():
    """Inside the context, process groups belong to threads."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    try:
        yield
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)


def run_threads(body, world_size=WORLD_SIZE):
    """Run ``body(rank)`` on ``world_size`` ranks, and raise the error of the first rank that fails."""
    store, errors = dist.HashStore(), []

    def run(rank):
        dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
        try:
            body(rank)
        except BaseException as error:
            if not isinstance(error, SystemExit):  # raised in the other ranks when one has failed
                errors.append(error)
            ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()

    with threaded_world():
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    for error in errors[:1]:
        raise error
    assert not any(thread.is_alive() for thread in threads)


def values():
    """Values that are the same on every rank; within a parameter no two elements are equal."""
    numels = [torch.Size(shape).numel() for shape in SHAPES]
    return [torch.arange(n, dtype=torch.float32).sub_(i * 3).view(SHAPES[i]) for i, n in enumerate(numels)]


def grad_of(like):
    """Small whole numbers; every dtype holds them, and sums of a few of them, exactly."""
    return (torch.arange(like.numel()) % 7).to(like.dtype).view(like.shape)


class Holder(nn.Module):
    """Parameters whose gradients are ``scale`` times `grad_of`, which varies by element."""

    def __init__(self):
        super().__init__()
        self.params = nn.ParameterList(values())

    def forward(self, scale):
        return sum((param * grad_of(param) * scale).sum() for param in self.params)


def shard(**kwargs):
    return fully_shard(Holder(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)), **kwargs)


def assert_rows(shown, expected, rank):
    """Check that this rank holds its rows of each tensor, as ``torch.chunk`` splits it; some ranks hold none."""
    for one, value in zip(shown, expected, strict=True):
        rows = value.chunk(WORLD_SIZE)
        assert torch.equal(one.to_local(), rows[rank] if rank < len(rows) else value[:0])


@pytest.mark.parametrize("num_kept", [True, pytest.param(8, marks=pytest.mark.full)])
def test_gathers_among_128_bring_all_parameters(num_kept):
    """`unshard` gives every rank the whole parameters; with ``reshard_after_forward=8`` a backward gathers among 8."""

    def body(rank):
        model = shard(reshard_after_forward=num_kept)
        assert_rows(model.parameters(), values(), rank)
        assert torch.equal(model.params[0].full_tensor(), values()[0])
        model.unshard(async_op=True).wait()
        assert all(torch.equal(param, value) for param, value in zip(model.params, values(), strict=True))
        model.reshard()
        assert_rows(model.parameters(), values(), rank)
        loss = model(torch.ones(()))
        if num_kept == 8:
            part = part_of(communicator(dist.group.WORLD), num_kept, "")
            assert (part.world_size, dict(part.counts)) == (num_kept, {})
            loss.backward()
            assert part.counts["all_gather"][0] == 1

    run_threads(body)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.full)])
def test_reductions_among_128_bring_the_mean(reduce_dtype):
    """Each rank's shard has the mean over ranks of whole numbers, which all dtypes add exactly."""
    mean = sum(rank % 5 for rank in range(WORLD_SIZE)) / WORLD_SIZE

    def body(rank):
        model = shard(mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        model(torch.tensor(float(rank % 5))).backward()
        assert_rows([param.grad for param in model.parameters()], [grad_of(value) * mean for value in values()], rank)

    run_threads(body)


def test_threads_share_nothing():
    """Two models in turn, trained by 4 threads on their own batches, have the expected weights after three steps."""

    def body(rank):
        for _ in range(2):
            model = shard()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            for _ in range(3):
                model(torch.tensor(float(rank))).backward()
                optimizer.step()
                optimizer.zero_grad()
            for param, start in zip(model.parameters(), values(), strict=True):
                assert torch.equal(param.full_tensor(), start - 3 * 1.5 * grad_of(start))

    run_threads(body, world_size=4)
