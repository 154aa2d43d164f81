"""Ranks that have evaluated, stepped or counted differently raise before the next reduction, and before a save."""

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.checkpoint import Checkpointer
from fairshard.checks.histories import compare_ranks
from fairshard.errors import RanksDisagreeError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import ShardingStrategy, fully_shard
from fairshard.optim import ShardedGradScaler
from fairshard.utils import groups
from fairshard.utils.testing import rank_device
from tests.on_ranks import on_ranks
from tests.reference import randn, sgd

USUAL, OTHER = (0, 1, 2, 3), (0, 3, 1, 2)  # the other one gathers layer 1 ahead, then 3 before 2
GATHERS_AS_USUAL = (0, 2, 1, 3)  # because layer 1 is gathered ahead


class Path4(nn.Module):
    """Runs its four layers, all of one shape, in the order ``path``."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.path = USUAL

    def forward(self, x):
        for index in self.path:
            x = torch.tanh(self.layers[index](x))
        return x


def untagged():
    """Match gathers by their order alone, as NCCL and gloo of five ranks do."""
    return mock.patch.object(groups, "EXCHANGE_RANKS", ())


def built(door="wrapper", **kwargs):
    """A model, the module whose ``path`` can be changed, and its optimizer."""
    torch.manual_seed(1)
    module = Path4().to(rank_device())
    if door == "fully_shard":
        for layer in module.layers:
            fully_shard(layer, **kwargs)
        model = fully_shard(module, **kwargs)
    else:
        for index, layer in enumerate(module.layers):
            module.layers[index] = FSDP(layer, **kwargs)
        model = FSDP(module, **kwargs)
    return model, module, sgd(model)


def train(model, optimizer, key, steps=True):
    model(randn(3, 4, key=key)).square().sum().backward()
    if steps:
        optimizer.step()
    optimizer.zero_grad()


def evaluate(model, module, path=USUAL):
    module.path = path
    with torch.no_grad():
        model(randn(3, 4))
    module.path = USUAL


def kept_values(model):
    return [param.detach().clone() for param in model.parameters()]


def same_values(model, before):
    return all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def path_of_this_rank():
    return OTHER if dist.get_rank() == 1 else USUAL


@on_ranks(2)
@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
def test_an_evaluation_that_gathers_in_another_order_is_told_in_the_next_backward(door):
    """It has computed with other parameters, silently; the next backward names the gathers, and nothing steps."""
    with untagged():
        model, module, optimizer = built(door)
        train(model, optimizer, 1)
        evaluate(model, module, path_of_this_rank())
        before = kept_values(model)
        with pytest.raises(RanksDisagreeError) as raised:
            train(model, optimizer, 2)
    assert "rank 0 is at the gather of `layers.2` (forward), rank 1 at the gather of `layers.3`" in str(raised.value)
    assert same_values(model, before)


@on_ranks(2)
@pytest.mark.parametrize("async_save", [False, True])
def test_a_save_compares_first_and_keeps_the_checkpoint_before(shared_folder, async_save):
    """The save after such an evaluation raises on all ranks, and the only checkpoint kept is the one before."""
    with untagged():
        model, module, optimizer = built()
        saver = Checkpointer(shared_folder, keep_last=1, async_save=async_save)
        train(model, optimizer, 1)
        saver.save(1, model, optimizer)
        train(model, optimizer, 2)
        evaluate(model, module, path_of_this_rank())
        with pytest.raises(RanksDisagreeError, match=r"the gather of `layers\.2` \(forward\), rank 1 at"):
            saver.save(2, model, optimizer)
        saver.wait()
        assert sorted(path.name for path in Path(shared_folder).glob("[!.]*")) == ["latest", "step-00000001"]
        assert saver.load_latest(model, optimizer) == 1


@on_ranks(2)
def test_the_end_of_a_run_compares_on_request():
    """Forwards with and without gradients after the last backward are compared by `compare_ranks`."""
    for with_grad in (False, True):
        with untagged():
            model, module, optimizer = built()
            train(model, optimizer, 1)
            compare_ranks(model)
            module.path = path_of_this_rank()
            with torch.set_grad_enabled(with_grad):
                model(randn(3, 4))
            with pytest.raises(RanksDisagreeError, match=r"`layers\.[12]` \(forward\), rank 1 at .*`layers\.3`"):
                compare_ranks(model)


@on_ranks(2)
@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
def test_a_step_on_one_rank_only_is_told(shared_folder, door):
    """The next save, and the next backward before it reduces, name the numbers of steps of the ranks."""
    for told_by in ("save", "backward"):
        model, _, optimizer = built(door)
        train(model, optimizer, 1)
        train(model, optimizer, 2, steps=dist.get_rank() == 0)
        before = kept_values(model)
        with pytest.raises(RanksDisagreeError, match="The optimizer steps differ: 2 on rank 0; 1 on rank 1"):
            Checkpointer(shared_folder).save(2, model, optimizer) if told_by == "save" else train(model, optimizer, 3)
        assert same_values(model, before)


@on_ranks(2)
def test_a_backward_twice_is_not_taken_for_two_forwards():
    """Rank 1 goes backward twice through one forward; without this its second sum would have another meaning."""
    model, _, _ = built(sharding_strategy=ShardingStrategy.NO_SHARD)  # a gather would not meet a backward's exchange
    loss = model(randn(3, 4)).sum()
    loss.backward(retain_graph=True)
    if dist.get_rank() == 0:
        del loss
        loss = model(randn(3, 4)).sum()
    expected = "rank 0 is at the beginning of a forward, rank 1 at the beginning of a backward"
    with pytest.raises(RanksDisagreeError, match=expected):
        loss.backward()


@on_ranks(2)
def test_a_forward_on_one_rank_only_is_told():
    """It gathers nothing, so only the number of forwards shows it."""
    model, _, _ = built(sharding_strategy=ShardingStrategy.NO_SHARD)
    for _ in range(1 + dist.get_rank()):
        model(randn(3, 4))
    with pytest.raises(RanksDisagreeError, match="rank 0 is at the end, rank 1 at the beginning of a forward"):
        compare_ranks(model)


@on_ranks(2)
def test_an_evaluation_with_the_same_gathers_may_differ_and_does_not_change_training():
    """Rank 1 computes in another order, with the right parameters; the next forward gathers ahead in the usual one."""
    found = []
    for path in (USUAL, GATHERS_AS_USUAL if dist.get_rank() else USUAL):
        with untagged():
            model, module, optimizer = built()
            train(model, optimizer, 1)
            evaluate(model, module, path)
            train(model, optimizer, 2)
            compare_ranks(model)
            found.append(kept_values(model))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@on_ranks(2)
def test_steps_that_the_scaler_skips_are_no_difference(shared_folder):
    """An overflow on one rank makes the scaler skip the step on all: training and saves continue."""
    model, _, optimizer = built()
    scaler = ShardedGradScaler(rank_device().type, init_scale=4.0)
    before = kept_values(model)
    for key, factor in ((1, 1.0), (2, float("inf") if dist.get_rank() else 1.0), (3, 1.0)):
        scaler.scale(factor * model(randn(3, 4, key=key)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if key == 1:
            assert not same_values(model, before)
            before = kept_values(model)
        if key == 2:
            assert same_values(model, before), "skipped"
            Checkpointer(shared_folder, async_save=False).save(key, model, optimizer)
    compare_ranks(model)
    assert not same_values(model, before)


@on_ranks(2)
def test_a_join_with_uneven_batches_is_no_difference(shared_folder):
    """A rank that has run out of batches makes the other's steps; afterwards both train and save together."""
    model, _, optimizer = built()
    train(model, optimizer, 1)
    with model.join(stateful=[optimizer]):
        for key in range(2 + dist.get_rank()):
            train(model, optimizer, key)
            with torch.no_grad():
                model(randn(3, 4))
    train(model, optimizer, 5)
    Checkpointer(shared_folder, async_save=False).save(2, model, optimizer)
    compare_ranks(model)


@on_ranks(2)
def test_one_model_of_two_may_be_stepped_more_often():
    """Each model counts the steps of its own optimizers, as an adversarial pair of models needs."""
    first, _, slow = built()
    second, _, fast = built()
    for key in range(4):
        train(second, fast, key)
        if key % 2:
            train(first, slow, key)
    for model in (first, second):
        compare_ranks(model)
    if dist.get_rank():
        second.eval()  # of this rank's own
        fast.step()
    compare_ranks(first)
    with pytest.raises(RanksDisagreeError, match="The optimizer steps differ: 4 on rank 0; 5 on rank 1"):
        compare_ranks(second)


def evaluate_both(pair, swaps):
    for model, module, _ in reversed(pair) if swaps else pair:
        evaluate(model, module)


@on_ranks(2)
@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
def test_two_models_of_one_shape_in_another_order_are_told(shared_folder, door):
    """Rank 1 evaluates them the other way round, each with the weights of the other; the next comparison says so."""
    with untagged():
        pair = [built(door), built(door)]
        evaluate_both(pair, False)
        train(pair[0][0], pair[0][2], 1)
        evaluate_both(pair, swaps=dist.get_rank() == 1)
        before = kept_values(pair[0][0])
        expected = r"at the gather of `[\w.]+` of model \d+ \(forward\), rank 1 at the gather of `[\w.]+` of model"
        with pytest.raises(RanksDisagreeError, match=expected):
            Checkpointer(shared_folder).save(1, pair[1][0], pair[1][2])
        with pytest.raises(RanksDisagreeError, match=expected):
            train(pair[0][0], pair[0][2], 2)
        assert same_values(pair[0][0], before)


@on_ranks(2)
def test_two_models_of_one_shape_that_one_rank_always_swaps_are_told(shared_folder):
    """Rank 1 takes each for the other from the first pass on; a save of either, or of both, is refused."""
    with untagged():
        pair = [built(), built()]
        evaluate_both(pair, swaps=dist.get_rank() == 1)
        for model, _, optimizer in reversed(pair) if dist.get_rank() == 1 else pair:
            train(model, optimizer, 1)
        for module in (pair[0][0], nn.ModuleList([model for model, _, _ in pair])):
            with pytest.raises(RanksDisagreeError, match=r"places of the model in the order .* differ: "):
                Checkpointer(shared_folder).save(1, module)
            with pytest.raises(RanksDisagreeError, match=r"places of the model in the order .* differ: "):
                compare_ranks(module)


@on_ranks(2)
def test_a_dropped_model_that_ranks_ran_differently_does_not_concern_the_next(shared_folder):
    """A model that is built after it begins without its gathers."""
    with untagged():
        model, module, _ = built()
        evaluate(model, module)
        evaluate(model, module, path_of_this_rank())
        del model, module
        model, _, optimizer = built()
        train(model, optimizer, 1)
        train(model, optimizer, 2)
        Checkpointer(shared_folder, async_save=False).save(2, model, optimizer)


@on_ranks(2)
@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
def test_a_parameter_that_one_rank_freezes_is_told(shared_folder, door):
    """Sums would lack the gradient of that rank; the next backward names the parameters, and nothing steps."""
    model, module, optimizer = built(door)
    train(model, optimizer, 1)
    for rank in (1, 0):  # frozen on all ranks in the end
        if dist.get_rank() == rank:
            for param in module.layers[2].parameters():
                param.requires_grad_(False)
        before = kept_values(model)
        if rank == 1:
            with pytest.raises(RanksDisagreeError, match=r"frozen parameters differ: none on rank 0; 2 \(`layers.2\.w"):
                train(model, optimizer, 2)
            assert same_values(model, before)
    train(model, optimizer, 3)
    Checkpointer(shared_folder, async_save=False).save(3, model, optimizer)
