"""What a wrapped model must compute, spelled out with plain torch: every rank trains a whole replica."""

import contextlib
import copy
import functools
import math
import zlib

import pytest
import torch
import torch.distributed as dist

from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.kit import rank_device
from tests.kit.doors import no_sync, whole


def mean_over_ranks(tensor, group=None, num_shards=None, divisor=None):
    """Sum over ranks, in rank order and in fp32 (or wider), divided by the number of ranks, or by ``divisor``.

    With ``num_shards``, each run of ``num_shards`` consecutive ranks is summed first, then those sums.
    """
    wide = torch.promote_types(tensor.dtype, torch.float32)
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    parts = [part.to(wide) for part in parts]
    step = num_shards or len(parts)
    sums = [functools.reduce(torch.add, parts[first : first + step]) for first in range(0, len(parts), step)]
    return functools.reduce(torch.add, sums) / (divisor or len(parts))


def means_of(grads, mean):
    """The ``mean`` of each of ``grads``; all of one dtype are concatenated, to send few messages."""
    found = dict.fromkeys(range(len(grads)))
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        own = [number for number, grad in enumerate(grads) if grad.dtype == dtype]
        line = mean(torch.cat([grads[number].reshape(-1) for number in own]))
        for number, part in zip(own, line.split([grads[number].numel() for number in own]), strict=True):
            found[number] = part.reshape(grads[number].shape).clone()
    return list(found.values())


def average_grads_(params, group=None, keeps_none=False):
    """Replace every gradient by its `mean_over_ranks`; a missing one is zeros, or None with ``keeps_none``."""
    params = [param for param in params if param.grad is not None or (param.requires_grad and not keeps_none)]
    grads = [torch.zeros_like(param) if param.grad is None else param.grad for param in params]
    means = means_of(grads, functools.partial(mean_over_ranks, group=group))
    for param, mean in zip(params, means, strict=True):
        param.grad = mean.to(param.dtype)


class Reference:
    """A replica with fp32 masters, computing in ``compute_dtype`` and reducing in ``reduce_dtype``.

    Step by step: masters are cast; the local gradient is computed in the compute dtype, cast to the reduce dtype,
    summed over ranks in rank order in fp32, divided by the number of ranks, and added to the master's gradient.

    ``mean`` replaces the mean over ranks. The submodules named in ``alone`` are neither cast nor reduced. With
    ``keeps_none``, a parameter that has no gradient on any rank keeps None, as when shards are not flat.
    """

    def __init__(
        self, model, compute_dtype=torch.float32, reduce_dtype=None, mean=mean_over_ranks, alone=(), keeps_none=False
    ):
        self.keeps_none = keeps_none
        self.compute_dtype = compute_dtype
        self.reduce_dtype = reduce_dtype or compute_dtype
        self.master = copy.deepcopy(model)
        self.replica = copy.deepcopy(model).to(compute_dtype)
        for name in alone:
            setattr(self.replica, name, getattr(self.master, name))
        both = zip(self.master.parameters(), self.replica.parameters(), strict=True)
        self._copied = [(master, replica) for master, replica in both if master is not replica]
        self._pairs = [pair for pair in self._copied if pair[0].requires_grad]
        self._alone = [param for name in alone for param in getattr(self.master, name).parameters()]
        self._mean = mean
        self._kept = {}

    def __call__(self, *inputs):
        with torch.no_grad():
            for master, replica in self._copied:
                replica.copy_(master)
        return self.replica(*(x.to(self.compute_dtype) if x.is_floating_point() else x for x in inputs))

    def keep_grads(self):
        """End a backward under ``no_sync``: gradients stay local, in the wider of the two dtypes."""
        wide = torch.promote_types(self.reduce_dtype, self.compute_dtype)
        if wide != self.compute_dtype:
            for master, replica in self._pairs:
                if self.keeps_none and replica.grad is None:
                    continue
                kept = self._kept.setdefault(master, torch.zeros_like(replica, dtype=wide))
                if replica.grad is not None:
                    kept.add_(replica.grad)
                replica.grad = None

    def reduce_grads(self):
        """End any other backward: reduce the gradients; a missing one counts as zeros."""
        if self._kept:
            self.keep_grads()
        pairs = self._pairs
        if self.keeps_none:
            pairs = [(master, replica) for master, replica in pairs if replica.grad is not None or master in self._kept]
        grads = [self._kept.get(master, replica.grad) for master, replica in pairs]
        for number, (_, replica) in enumerate(pairs):
            own = torch.zeros_like(replica) if grads[number] is None else grads[number]
            grads[number] = own.to(self.reduce_dtype)
        for (master, replica), mean in zip(pairs, means_of(grads, self._mean), strict=True):
            own = mean.to(master.dtype)
            master.grad = own if master.grad is None else master.grad + own
            replica.grad = None
        self._kept.clear()

    def grad_norm(self, norm_type):
        """The norm of all gradients as one vector, in fp64.

        Gradients of the ``alone`` submodules differ per rank: their sums of powers are averaged over ranks.
        """
        norm = _norm([master.grad for master, _ in self._pairs if master.grad is not None], norm_type)
        alone = _norm([param.grad for param in self._alone if param.grad is not None], norm_type)
        if math.isinf(norm_type):
            dist.all_reduce(alone, dist.ReduceOp.MAX)
            return torch.maximum(norm, alone)
        power = alone**norm_type
        dist.all_reduce(power)
        return (norm**norm_type + power / dist.get_world_size()) ** (1 / norm_type)

    def scale_grads(self, factor):
        """Multiply every gradient by ``factor``, a 0-d tensor."""
        for param in self.master.parameters():
            if param.grad is not None:
                param.grad.mul_(factor)


def _norm(grads, norm_type):
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=rank_device())
    return torch.linalg.vector_norm(torch.cat([grad.double().flatten() for grad in grads]), norm_type)


def rounding():
    """``(rtol, atol)`` of what is equal to the bit where host and device have the same kernels, and sums one order."""
    return (0.0, 0.0) if rank_device().type in ("cpu", "sim") else (1e-5, 1e-6)


def assert_same_state(actual, expected, rtol=None, atol=None):
    """Two state dicts have the same keys in the same order, and equal values of equal dtype, up to `rounding`."""
    assert list(actual) == list(expected)
    if rtol is None:
        rtol, atol = rounding()
    for name in expected:
        torch.testing.assert_close(
            actual[name],
            expected[name],
            rtol=rtol,
            atol=atol,
            check_device=False,
            msg=lambda m, name=name: f"{name}: {m}",
        )


def assert_same_step(plain, wrapped, averages=True):
    """With the gradients that both have now, one step of SGD gives the same bits."""
    if averages:
        average_grads_(plain.parameters())
    sgd(plain).step()
    sgd(wrapped).step()
    assert_same_state(wrapped.state_dict(), plain.state_dict())


def train_alike(model, wrap, loss_of, **how):
    """Run `train_both` on a plain replica and ``wrap(model)``; return the wrapped model.

    ``model`` may also be a function that builds it, for modules that cannot be copied.
    """
    build = functools.partial(copy.deepcopy, model) if isinstance(model, torch.nn.Module) else model
    plain, wrapped = build(), wrap(build())
    train_both(plain, wrapped, loss_of, **how)
    return wrapped


def train_both(
    plain, sharded, loss_of, *, num_steps=3, num_micro=1, momentum=0.9, rtol=None, atol=None, before=lambda model: None
):
    """Train a plain model and its sharded twin side by side; losses and final state agree, up to `rounding`.

    ``loss_of(model, step)`` is one forward on this rank's batch of ``step``. The optimizer is SGD with momentum, which
    reveals a wrong constant factor. With ``num_micro`` > 1 each step sums that many backwards, each of them reduced.
    ``before(model)`` runs before each step. A parameter without gradients stays None, unless it is in a flat shard.
    """
    of_plain, of_sharded = (sgd(m, momentum=momentum) for m in (plain, sharded))
    exact = rounding()
    rtol, atol = exact[0] if rtol is None else rtol, exact[1] if atol is None else atol
    for step in range(num_steps):
        before(sharded)
        for micro in range(num_micro):
            expected, actual = loss_of(plain, (step, micro)), loss_of(sharded, (step, micro))
            torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
            if expected.requires_grad:
                expected.backward()
                actual.backward()
        average_grads_(plain.parameters(), keeps_none=not isinstance(sharded, FSDP))
        of_plain.step()
        of_sharded.step()
        of_plain.zero_grad()
        of_sharded.zero_grad()
    assert_same_state(whole(sharded), plain.state_dict(), rtol, atol)


def run_steps(model, loss_of, num_steps=3, num_micro=1, *, optimizer=None, clip=lambda model: None, after=lambda: None):
    """The losses of steps of SGD with momentum, or of ``optimizer``; the last of ``num_micro`` backwards reduces.

    ``loss_of(model, (step, micro))`` is one forward. ``clip(model)`` is called before each step, ``after()`` after it.
    """
    optimizer, losses = optimizer or sgd(model), []
    for step in range(num_steps):
        for micro in range(num_micro):
            with contextlib.nullcontext() if micro == num_micro - 1 else no_sync(model):
                loss = loss_of(model, (step, micro))
                loss.backward()
            losses.append(loss.item())
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        after()
    return losses


def squares(model, key=0):
    """A loss of a model with four inputs, on this rank's batch of ``key``, whose gradient reaches the inputs."""
    return model(randn(3, 4, key=key).requires_grad_()).square().sum()


def sgd(model, lr=0.1, momentum=0.9):
    """SGD with momentum over the parameters of ``model`` that require a gradient."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=momentum)


def await_device():
    """Let the host wait for all work on this rank's device, so that no later work is at once with it."""
    if rank_device().type != "cpu":
        torch.accelerator.synchronize()


def await_autograd():
    """Let autograd's thread of this rank's device drop the last backward, which may happen after its `backward()`."""
    torch.ones((), requires_grad=True).backward()


def randn(*shape, key=()):
    """Normal numbers that depend on ``key`` and this rank only, on this rank's device."""
    random = torch.Generator("cpu").manual_seed(zlib.crc32(repr((dist.get_rank(), key)).encode()))
    return torch.randn(*shape, generator=random, device="cpu").to(rank_device())


def backward_that_raises_on(rank, loss):
    """Run the backward of ``loss``; on ``rank`` a hook at its start raises, and the exception is caught here."""
    if dist.get_rank() == rank:

        def fail(*_):
            raise KeyError("a bad batch")

        loss.grad_fn.next_functions[0][0].register_hook(fail)
        with pytest.raises(KeyError, match="a bad batch"):
            loss.backward()
    else:
        loss.backward()
