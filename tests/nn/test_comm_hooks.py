"""A hook of the user may reduce gradients, and the user's numbers may divide them."""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._comm_hooks import default_hooks as torch_hooks

from fairshard.errors import NotRootError
from fairshard.nn import MixedPrecision, ShardingStrategy, comm_hooks
from fairshard.utils.collectives import counters, reset_counters
from tests.models import mlp, tiny, tiny_batch, tiny_loss, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn, sgd

STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD]
strategies = pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)


def trained(strategy, hook=None, state=None, **kwargs):
    """The state after two steps of two micro-batches, the first without communication."""
    model = wrap_tiny(tiny(), sharding_strategy=strategy, **kwargs)
    if hook is not None:
        model.register_comm_hook(state, hook)
    optimizer = sgd(model)
    for step in range(2):
        for micro in range(2):
            *inputs, targets = tiny_batch(dist.get_rank(), step, micro)
            if micro:
                tiny_loss(model(*inputs), targets).backward()
            else:
                with model.no_sync():
                    tiny_loss(model(*inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@on_ranks(1, 2)
@strategies
@pytest.mark.parametrize("is_ours", [True, False])
def test_the_default_hook_changes_nothing(strategy, is_ours):
    """The default hooks, with our state and with PyTorch's, give the engine's mean, to the bit on 1 and 2 ranks."""
    hooks = comm_hooks if is_ours else torch_hooks
    hook = hooks.allreduce_hook if strategy is ShardingStrategy.NO_SHARD else hooks.reduce_scatter_hook
    assert_same_state(trained(strategy, hook, hooks.DefaultState(dist.group.WORLD)), trained(strategy))


@on_ranks(2, 3)
@strategies
@pytest.mark.parametrize("name", ["fp16_compress_hook", "bf16_compress_hook"])
def test_compression_rounds_gradients_once(strategy, name):
    """Gradients are sent in 16 bits: the weights differ from the exact ones by that rounding only."""
    state = comm_hooks.LowPrecisionState()
    exact, own = trained(strategy), trained(strategy, getattr(comm_hooks, name), state)
    atol = 2e-3 if name == "fp16_compress_hook" else 2e-2
    assert_same_state(own, exact, 0, atol)
    assert any(bool((own[key] != exact[key]).any()) for key in exact)


@on_ranks(1)
@pytest.mark.parametrize("name", ["fp16_compress_hook", "bf16_compress_hook", "other"])
def test_hooks_that_compress_do_all_casting(name):
    """Compressing hooks get gradients as the backward leaves them; other hooks get them in ``reduce_dtype``."""
    dtypes = set()

    def hook(state, grad, shard):
        dtypes.add(grad.dtype)
        shard.copy_(grad)

    hook.__name__ = name
    model = wrap_each(mlp(4, 9), mixed_precision=MixedPrecision(torch.bfloat16, torch.float32))
    model.register_comm_hook(None, hook)
    model(randn(3, 4)).float().sum().backward()
    assert dtypes == {torch.float32 if name == "other" else torch.bfloat16}


@on_ranks(2)
def test_a_hook_gets_the_whole_flat_gradient_and_a_shard_to_fill():
    """A hook gets each unit's padded gradient; the gradient is what it writes to the shard, undivided."""
    model = wrap_each(mlp(4, 9, 5), gradient_predivide_factor=4.0)
    calls = []

    def hook(state, grad, shard):
        calls.append((state, grad.shape, shard.shape))
        shard.copy_(grad.view(2, -1)[dist.get_rank()])

    model.register_comm_hook("state", hook)
    plain = mlp(4, 9, 5)
    x = randn(3, 4)
    reset_counters()
    model(x).sum().backward()
    plain(x).sum().backward()
    numels = [4 * 9 + 9 + 1, 9 * 5 + 5]
    assert sorted(calls, key=lambda call: call[1]) == [("state", (n,), (n // 2,)) for n in numels]
    assert "reduce_scatter" not in counters()
    flat = torch.cat([param.grad.flatten() for param in plain[0].parameters()] + [torch.zeros(1)])
    torch.testing.assert_close(model[0].params[0].grad, flat.view(2, -1)[dist.get_rank()], rtol=0, atol=0)


@on_ranks(1)
@strategies
def test_a_hook_that_returns_the_mean_is_refused(strategy):
    """A hook that returns a tensor raises, unless it is the one to fill, because nothing would read or wait for it."""
    for hook, is_good in ((lambda _, *tensors: tensors[-1].zero_(), True), (lambda _, *tensors: tensors[0] * 1, False)):
        model = wrap_each(mlp(4, 9), sharding_strategy=strategy)
        model.register_comm_hook(None, hook)
        with contextlib.nullcontext() if is_good else pytest.raises(TypeError, match="None, but returned Tensor"):
            model(randn(3, 4)).sum().backward()


@on_ranks(2)
def test_hooks_are_refused_where_they_would_be_lost():
    """Hooks raise on inner units, twice, late, and for hybrid sharding; copying a model with a hook raises."""
    model = wrap_each(mlp(4, 9, 5))
    model(randn(3, 4))
    with pytest.raises(RuntimeError, match="before the first forward"):
        model.register_comm_hook(None, lambda *_: None)
    model = wrap_each(mlp(4, 9, 5))
    model.register_comm_hook(None, lambda *_: None)
    with pytest.raises(RuntimeError, match="must be called once"):
        model.register_comm_hook(None, lambda *_: None)
    with pytest.raises(NotRootError):
        model[0].register_comm_hook(None, lambda *_: None)
    with pytest.raises(RuntimeError, match="must not be pickled or copied"):
        copy.deepcopy(model)
    with pytest.raises(TypeError, match="must be callable"):
        wrap_each(mlp(4, 9)).register_comm_hook(None, "hook")
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    hybrid = wrap_each(
        mlp(4, 9), process_group=(dist.group.WORLD, group), sharding_strategy=ShardingStrategy.HYBRID_SHARD
    )
    with pytest.raises(ValueError, match="must not be used with hybrid sharding"):
        hybrid.register_comm_hook(None, lambda *_: None)


@on_ranks(2, 3)
@strategies
def test_divisors_scale_the_sum(strategy):
    """Gradients are the sum over ranks divided by both factors, for any factors; powers of 2 are exact."""
    world_size = dist.get_world_size()

    def grads(change=lambda model: None, **kwargs):
        model = wrap_each(mlp(4, 9, 5), sharding_strategy=strategy, **kwargs)
        change(model)
        model(randn(3, 4)).sum().backward()
        return [param.grad for param in model.parameters()]

    mean = grads()
    torch.testing.assert_close(grads(gradient_predivide_factor=2.0), mean, rtol=1e-6, atol=1e-7)
    for change in (
        lambda model: model.set_gradient_divide_factor(1.0),
        lambda model: model.set_gradient_divide_factors(2.0, 0.5),
    ):
        torch.testing.assert_close(grads(change), [grad * world_size for grad in mean], rtol=1e-6, atol=1e-7)
    changed = grads(lambda model: model[0].set_gradient_divide_factor(world_size / 2))
    is_twice = [bool((own == 2 * usual).all()) for own, usual in zip(changed, mean, strict=True)]
    assert sum(is_twice) == 1, "one unit's gradients are doubled, though all share a bucket"
    alone = grads(lambda model: model.set_gradient_divide_factors(1.0, 1.0, recursive=False))
    assert all(map(torch.equal, alone, mean)), "the outermost unit has no parameters of its own"
    for factor in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="must be a positive number"):
            wrap_each(mlp(4, 9)).set_gradient_divide_factor(factor)


@on_ranks(2)
def test_gradients_may_travel_in_a_group_of_their_own():
    """``process_group_reduce_scatter`` has the same ranks and does all reductions; the result is the same."""
    own = dist.new_group()
    assert_same_state(
        trained(ShardingStrategy.FULL_SHARD, process_group_reduce_scatter=own), trained(ShardingStrategy.FULL_SHARD)
    )
    wrapped = wrap_each(mlp(4, 9), process_group_reduce_scatter=own)
    assert wrapped.process_group_reduce_scatter is wrapped[0].process_group_reduce_scatter is own
    assert wrap_each(mlp(4, 9)).process_group_reduce_scatter is dist.group.WORLD
    for wrong in ("world", [own], 0):
        with pytest.raises(TypeError, match="`process_group_reduce_scatter` must be a torch"):
            wrap_each(mlp(4, 9), process_group_reduce_scatter=wrong)
    with pytest.warns(UserWarning, match="`process_group_reduce_scatter` has no effect with NO_SHARD"):
        wrap_each(mlp(4, 9), process_group_reduce_scatter=own, sharding_strategy=ShardingStrategy.NO_SHARD)
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    with pytest.raises(ValueError, match="must have the ranks of `process_group`"):
        wrap_each(mlp(4, 9), process_group_reduce_scatter=alone)
