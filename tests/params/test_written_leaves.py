"""A forward that writes to its own gathered parameters raises, by name, because the write would be lost."""

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fairshard.errors import ParameterShardedError, ShardChangedError
from tests.engine.random_nets import shard
from tests.kit import rank_device
from tests.on_ranks import on_ranks
from tests.reference import randn


class Normed(nn.Linear):
    """Writes to its weight as ``how`` says, then computes with it."""

    how = None

    def forward(self, x):
        if self.how == "copy_":
            with torch.no_grad():
                self.weight.copy_(F.normalize(self.weight))
        elif self.how == "data":
            self.weight.data = F.normalize(self.weight.data)
        return super().forward(x)


class Words(nn.Embedding):
    """An embedding that limits the norm of its rows."""

    def forward(self, x):
        return super().forward(x.abs().long() % self.num_embeddings).sum(-2)


def build(make, door, **kwargs):
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Linear(4, 2)).to(rank_device())
    model.is_unit = model[0].is_unit = True
    return shard(model, door, **kwargs)


@pytest.mark.pairs
@on_ranks(1, 2)
@pytest.mark.parametrize("door", ["wrapper", "no_flatten", "orig_params", "fully_shard"])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("how", ["copy_", "data", "max_norm"])
def test_a_write_inside_the_forward_raises(door, reshard, how):
    """The write raises with and without gradients; a later forward that writes nothing works."""
    make = (lambda: Words(5, 4, max_norm=0.1)) if how == "max_norm" else (lambda: Normed(4, 4))
    model = build(make, door, reshard_after_forward=reshard)
    layer = next(module for module in model.modules() if isinstance(module, Normed | Words))
    layer.how = how
    for is_trained in (True, False):
        with torch.set_grad_enabled(is_trained), pytest.raises(ShardChangedError, match=r"`0\.weight`.*inside the for"):
            model(randn(3, 4))
    layer.how = layer.max_norm = None
    model(randn(3, 4)).sum().backward()


class Forces(nn.Module):
    """Takes the gradient of its energy inside its forward, as molecular models do."""

    def __init__(self):
        super().__init__()
        self.energy, self.scale = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)), nn.Linear(4, 4)

    def forward(self, x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            (forces,) = torch.autograd.grad(self.energy(x).sum(), x)
        return self.scale(forces)


class ForcesOfBackward(Forces):
    """Ends with `backward`, which frees the parameters before the forward returns."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            self.energy(self.scale(x)).sum().backward()
        return x.grad


@on_ranks(1, 2)
@pytest.mark.parametrize("door", ["wrapper", "orig_params", "fully_shard"])
@pytest.mark.parametrize("kind", [Forces, ForcesOfBackward])
def test_a_backward_inside_the_forward_writes_nothing(door, kind):
    """A forward with a backward in it, or at its end, returns the plain module's forces, with and without grad."""
    torch.manual_seed(0)
    plain = kind().to(rank_device())
    model = copy.deepcopy(plain)
    model.is_unit = True
    model = shard(model, door)
    for step in range(2):
        x = randn(3, 4, key=step)
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
        assert torch.equal(model(x), plain(x))


def lost_writes(act):
    """The warnings of ``act()`` about writes between passes."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        act()
    return [str(warning.message) for warning in found if "stays gathered" in str(warning.message)]


DOORS = pytest.mark.parametrize("door", ["wrapper", "no_flatten", "orig_params", "fully_shard"])


@on_ranks(1, 2)
@DOORS
def test_a_write_after_the_forward_reaches_the_shards(door):
    """Although the outermost unit stays gathered; where one flat parameter is registered for all, there are none."""
    model = build(lambda: nn.Linear(4, 4), door)
    layer = next(part for part in model.modules() if isinstance(part, nn.Linear) and part.out_features == 2)
    for _ in range(2):
        model(randn(3, 4))
        with torch.no_grad(), pytest.raises(ParameterShardedError) if door == "wrapper" else nullcontext():
            layer.weight.zero_()
            layer.bias.zero_()
            assert not model(randn(3, 4)).any()
            layer.bias.fill_(1.0)
            assert model(randn(3, 4)).eq(1.0).all()


@on_ranks(1, 2)
def test_a_lost_write_to_a_unit_that_the_user_gathered_warns():
    """What frees it, or computes with it, names what was written, once; on one rank the shard itself is written."""
    model = build(lambda: nn.Linear(4, 4), "fully_shard")
    model(randn(3, 4)).sum().backward()
    for then in (model.reshard, lambda: model(randn(3, 4))):
        model.unshard()
        with torch.no_grad():
            model[1].weight.zero_()
        found = lost_writes(then)
        assert len(found) == (dist.get_world_size() > 1)
        assert all("`1.weight`" in text for text in found)
        assert not lost_writes(lambda: model(randn(3, 4)).sum().backward())


@on_ranks(2)
def test_a_unit_that_the_user_gathered_computes_with_assigned_memory():
    """The forward warns that the change is lost, and raises nothing; the next one has the weights of the shards."""
    model = build(lambda: nn.Linear(4, 4), "fully_shard")
    before = model(randn(3, 4))
    before.sum().backward()
    model.unshard()
    model[1].bias.data = torch.full_like(model[1].bias, 9.0)
    model[1].weight.data = torch.zeros_like(model[1].weight)
    outputs = []
    model[1].register_forward_hook(lambda _module, _args, output: outputs.append(output.detach().clone()))
    with torch.no_grad():
        assert len(lost_writes(lambda: model(randn(3, 4)))) == 1
        assert outputs[0].eq(9.0).all()
        assert torch.equal(model(randn(3, 4)), before)


@on_ranks(1, 2)
@DOORS
def test_steps_that_write_to_shards_do_not_warn(door):
    """Steps, a forward without a backward, evaluation, loading a state dict, writes to whole parameters shown."""
    model = build(lambda: nn.Linear(4, 4), door, reshard_after_forward=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        for _ in range(2):
            model(randn(3, 4)).sum().backward()
            optimizer.step()
            with torch.no_grad():
                model(randn(3, 4))
            model(randn(3, 4))
            model.load_state_dict(model.state_dict())
            optimizer.zero_grad()

    assert not lost_writes(train)
