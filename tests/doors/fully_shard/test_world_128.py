"""The collectives of a unit among 128 ranks that are threads of this process."""

import threading
from contextlib import contextmanager, nullcontext

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

pytestmark = pytest.mark.cpu_only("its ranks are threads of this process, which share one device and its streams")

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


def run_threads(body, world_size=WORLD_SIZE, stream=nullcontext):
    """Run ``body(rank)`` on ``world_size`` ranks, each inside the context ``stream()``.

    Raises the error of the first rank that fails.
    """
    store, errors = dist.HashStore(), []

    def run(rank):
        dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
        try:
            with stream():
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


def params(device):
    """Values that are the same on every rank; within a parameter no two elements are equal."""
    found = []
    for number, shape in enumerate(SHAPES):
        numel = torch.Size(shape).numel()
        found.append(torch.arange(numel, dtype=torch.float32, device=device).sub_(number * 3).view(shape))
    return found


class Holder(nn.Module):
    """Parameters whose gradients are ``scale`` times `grad_of`, which varies by element."""

    def __init__(self, device):
        super().__init__()
        self.params = nn.ParameterList(params(device))

    def forward(self, scale):
        return sum((param * grad_of(param) * scale).sum() for param in self.params)


def grad_of(like):
    """Small whole numbers; every dtype holds them, and sums of a few of them, exactly."""
    return (torch.arange(like.numel(), device=like.device) % 7).to(like.dtype).view(like.shape)


def assert_whole(model, expected):
    for param, value in zip(model.params, expected, strict=True):
        assert isinstance(param, nn.Parameter)
        assert torch.equal(param, value)


def assert_rows(shown, expected, rank):
    """Check that this rank holds its rows of each tensor, as ``torch.chunk`` splits it; some ranks hold none."""
    for one, value in zip(shown, expected, strict=True):
        rows = value.chunk(WORLD_SIZE)
        assert torch.equal(one.to_local(), rows[rank] if rank < len(rows) else value[:0])


def shard(device, **kwargs):
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    return fully_shard(Holder(device), mesh=mesh, **kwargs)


@pytest.fixture
def device(request):
    """The device of the tensors, from ``--device``."""
    return request.config.getoption("--device")


STREAMS = [False, pytest.param(True, marks=pytest.mark.full)]


@pytest.fixture(params=STREAMS, ids=["current stream", "other stream"])
def stream(request, device):
    """A function that returns a context with the stream that a rank works on."""
    if request.param and device == "cpu":
        pytest.skip("needs an accelerator: there are no streams on the CPU")
    return (lambda: torch.cuda.stream(torch.cuda.Stream())) if request.param else nullcontext


def check_gathers(async_op, reshard_after_forward, device, stream):
    expected = params(device)

    def body(rank):
        model = shard(device, reshard_after_forward=reshard_after_forward)
        assert_rows(model.parameters(), expected, rank)
        assert torch.equal(model.params[0].full_tensor(), expected[0])
        handle = model.unshard(async_op=async_op)
        assert (handle is not None) == async_op
        if handle is not None:
            handle.wait()
        assert_whole(model, expected)
        model.reshard()
        assert_rows(model.parameters(), expected, rank)
        if reshard_after_forward is True:
            return
        loss = model(torch.ones((), device=device))
        part = part_of(communicator(dist.group.WORLD), reshard_after_forward, "")
        assert part.world_size == reshard_after_forward
        assert not part.counts
        loss.backward()
        assert part.counts["all_gather"][0] == 1
        assert_rows([param.grad for param in model.parameters()], [grad_of(value) for value in expected], rank)

    run_threads(body, stream=stream)


def check_reductions(reduce_dtype, device, stream):
    sizes = [torch.Size(shape).numel() for shape in SHAPES]

    def body(rank):
        model = shard(device, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        model(torch.tensor(float(rank % 5), device=device)).backward()
        line = torch.cat([grad_of(value).flatten() for value in params(device)]) * (rank % 5)
        dist.all_reduce(line)
        means = [part.view(shape) for part, shape in zip((line / WORLD_SIZE).split(sizes), SHAPES, strict=True)]
        assert_rows([param.grad for param in model.parameters()], means, rank)

    run_threads(body, stream=stream)


@pytest.mark.parametrize("async_op", [False, pytest.param(True, marks=pytest.mark.full)])
def test_gathers_among_128_bring_all_parameters(async_op, device, stream):
    """`unshard`, waited for immediately or later, gives every rank the whole parameters."""
    check_gathers(async_op, True, device, stream)


@pytest.mark.full
def test_parts_kept_among_8_of_128_bring_them_back(device, stream):
    """With ``reshard_after_forward=8`` the backward gathers among 8 ranks."""
    check_gathers(True, 8, device, stream)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.full)])
def test_reductions_among_128_bring_the_mean(reduce_dtype, device, stream):
    """Each rank's shard has the mean over ranks, as computed by an all-reduce of the whole gradient."""
    check_reductions(reduce_dtype, device, stream)


def test_threads_share_nothing(device):
    """Two models in turn, trained by 4 threads on their own batches, have the expected weights after three steps."""

    def body(rank):
        for _ in range(2):
            model = shard(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            for _ in range(3):
                model(torch.tensor(float(rank), device=device)).backward()
                optimizer.step()
                optimizer.zero_grad()
            moved = [start - 3 * 1.5 * grad_of(start) for start in params(device)]
            whole = [param.full_tensor() for param in model.parameters()]
            assert all(torch.equal(one, value) for one, value in zip(whole, moved, strict=True))

    run_threads(body, world_size=4)
