"""Inside ``summon_full_params`` parameters are whole, under their own names; writes to them are kept."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.errors import FairshardError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import register_forward_method
from fairshard.nn.data_parallel import TrainingState
from tests.models import mlp, tiny, tiny_batch, wrap_each, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, await_device, randn

flattened = pytest.mark.parametrize("flatten", [True, False], ids=["flat", "apart"])


@on_ranks(1, 2, 3)
@flattened
def test_names_shapes_and_values_are_the_plain_models(flatten):
    """``named_parameters`` inside equals that of the plain model; outside it shows shards again."""
    plain = tiny()
    wrapped = wrap_tiny(copy.deepcopy(plain), flatten_parameters=flatten)
    outside = [(name, param.shape) for name, param in wrapped.named_parameters()]
    for _ in range(2):
        with wrapped.summon_full_params():
            inside = dict(wrapped.named_parameters())
            assert set(inside) == set(dict(plain.named_parameters()))
            for name, param in plain.named_parameters():
                assert isinstance(inside[name], nn.Parameter)
                assert torch.equal(inside[name], param), name
            assert wrapped.head.weight is wrapped.embed.weight
            assert torch.equal(wrapped.first.up.weight, plain.first.up.weight)
        assert [(name, param.shape) for name, param in wrapped.named_parameters()] == outside


@on_ranks(1, 2, 3)
@flattened
def test_what_is_written_is_kept(flatten):
    """In-place changes to whole parameters reach the shards and the next forward."""
    plain = tiny()
    wrapped = wrap_tiny(copy.deepcopy(plain), flatten_parameters=flatten)
    *inputs, _ = tiny_batch(0)
    wrapped(*inputs)
    with torch.no_grad():
        for model in (plain, wrapped):
            with wrapped.summon_full_params() if model is wrapped else torch.no_grad():
                for param in model.parameters():
                    param.mul_(2).add_(1)
        assert_same_state(wrapped.state_dict(), plain.state_dict())
        assert torch.equal(wrapped(*inputs), plain(*inputs))


@on_ranks(2)
@flattened
@pytest.mark.parametrize("kwargs", [{"writeback": False}, {"volatile": True}], ids=str)
def test_without_writeback_nothing_is_kept(flatten, kwargs):
    """``writeback=False`` and fairscale's ``volatile=True`` discard changes."""
    wrapped = wrap_tiny(tiny(), flatten_parameters=flatten)
    with wrapped.summon_full_params(**kwargs), torch.no_grad():
        for param in wrapped.parameters():
            param.zero_()
    assert_same_state(wrapped.state_dict(), tiny().state_dict())


@on_ranks(2)
def test_as_a_function_of_any_module():
    """``FSDP.summon_full_params(module)`` works on a wrapper, and on a plain module that contains several."""
    plain = nn.Sequential(mlp(4, 5, seed=1), nn.Linear(5, 5), mlp(5, 3, seed=2))
    wrapped = nn.Sequential(FSDP(copy.deepcopy(plain[0])), copy.deepcopy(plain[1]), FSDP(copy.deepcopy(plain[2])))
    with FSDP.summon_full_params(wrapped):
        inside = {name.replace("module.", ""): param for name, param in wrapped.named_parameters()}
        for name, param in plain.named_parameters():
            assert torch.equal(inside[name], param)
    with FSDP.summon_full_params(wrapped[0]):
        assert torch.equal(wrapped[0][0].weight, plain[0][0].weight)


@on_ranks(2)
def test_recurse_false_shows_this_unit_only():
    """``recurse=False`` shows the parameters of this unit only."""
    wrapped = wrap_tiny(tiny())
    with wrapped.summon_full_params(recurse=False):
        names = [name for name, _ in wrapped.named_parameters()]
        assert "embed.weight" in names
        assert "first.flat_param_0" in names
        assert "first.norm.weight" not in names


@on_ranks(2)
def test_of_an_inner_unit():
    """On an inner unit it shows that unit, and those inside it."""
    wrapped = wrap_tiny(tiny())
    with wrapped.first.summon_full_params():
        assert torch.equal(wrapped.first.up.weight, tiny().first.up.weight)
        assert torch.equal(wrapped.first.down.weight, tiny().first.down.weight)
        assert [name for name, _ in wrapped.second.named_parameters()] == ["flat_param_0"]


@on_ranks(2)
def test_each_rank_keeps_its_part():
    """If ranks write different values, each element keeps the value that its owner wrote."""
    wrapped = FSDP(nn.Linear(3, 2, bias=False))
    with wrapped.summon_full_params(), torch.no_grad():
        wrapped.weight.fill_(dist.get_rank() + 1)
    assert wrapped.state_dict()["weight"].flatten().tolist() == [1, 1, 1, 2, 2, 2]


@on_ranks(2)
def test_state_inside_and_after():
    """Units are in state SUMMON_FULL_PARAMS inside and IDLE afterwards, even after an exception."""
    wrapped = wrap_each(mlp(4, 5, 3))

    def fail():
        with wrapped.summon_full_params():
            wrapped.assert_state(TrainingState.SUMMON_FULL_PARAMS)
            wrapped[0].assert_state(TrainingState.SUMMON_FULL_PARAMS)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    wrapped.assert_state(TrainingState.IDLE)
    wrapped[0].assert_state(TrainingState.IDLE)
    assert wrapped(randn(2, 4)).shape == (2, 3)


@on_ranks(2)
def test_passes_inside_and_summons_in_a_pass_are_refused():
    """A forward or another summon inside raises, and so does a summon inside a forward or a backward."""
    wrapped = wrap_each(mlp(4, 5, 3))
    with wrapped.summon_full_params():
        with pytest.raises(FairshardError, match="summon"):
            wrapped(randn(2, 4))
        with pytest.raises(ValueError, match="summon"), wrapped.summon_full_params():
            pass
    seen = []

    def summon(*_):
        with pytest.raises(ValueError, match="summon"), wrapped.summon_full_params():
            pass
        seen.append(wrapped[0].training_state)

    hooks = [
        wrapped[0].module.register_forward_hook(summon),
        wrapped[0].module.register_full_backward_pre_hook(summon),
    ]
    wrapped(randn(2, 4)).sum().backward()
    assert seen == [TrainingState.FORWARD, TrainingState.BACKWARD_PRE]
    for hook in hooks:
        hook.remove()
    loss = wrapped(randn(2, 4)).sum()
    with wrapped.summon_full_params():
        with pytest.raises(FairshardError, match="backward must not run inside summon_full_params"):
            loss.backward()
    assert wrapped(randn(2, 4)).shape == (2, 3)


@on_ranks(2)
def test_between_forward_and_backward_a_change_is_noticed():
    """Weights written between a forward and its backward raise in the backward instead of giving wrong gradients."""
    wrapped = wrap_each(mlp(4, 5, 3))
    loss = wrapped(randn(2, 4)).sum()
    with wrapped.summon_full_params(), torch.no_grad():
        wrapped[0].weight.add_(1)
    await_device()  # the backward's gather, whose result is refused, does not wait for the write
    with pytest.raises(FairshardError, match="between its forward and its backward"):
        loss.backward()
    wrapped(randn(2, 4)).sum().backward()


@on_ranks(1, 2)
@flattened
def test_apply_sees_whole_parameters(flatten):
    """``apply`` runs the function on every module with its parameters whole, and keeps what it writes."""
    plain, wrapped = tiny(), wrap_tiny(tiny(), flatten_parameters=flatten)
    seen = []

    @torch.no_grad()
    def init(module):
        seen.append(type(module).__name__)
        if isinstance(module, nn.Linear):
            assert module.weight.dim() == 2
            module.weight.fill_(0.25)
            module.bias.zero_()

    plain.apply(init)
    of_plain, seen = seen, []
    assert wrapped.apply(init) is wrapped
    assert [name for name in seen if name != "FullyShardedDataParallel"] == of_plain
    assert_same_state(wrapped.state_dict(), plain.state_dict())


class Generator(nn.Module):
    """Its method calls its blocks, as `generate` of Hugging Face's models does."""

    def __init__(self):
        super().__init__()
        self.first, self.block, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.head(self.block(self.first(x)))

    def generate(self, x):
        for _ in range(3):
            x = self(x)
        return x


@on_ranks(1, 2)
@flattened
@pytest.mark.parametrize("recurse", [True, False])
def test_a_summoned_model_runs_without_gradients(flatten, recurse):
    """A method returns what that of the plain model returns; with gradients enabled the error names the cure."""
    plain = Generator()
    net = copy.deepcopy(plain)
    net.block = FSDP(net.block, flatten_parameters=flatten)
    model = FSDP(net, flatten_parameters=flatten)
    for _ in range(2):
        with FSDP.summon_full_params(model, recurse=recurse):
            with torch.no_grad():
                for method in ("generate", "__call__"):
                    given = randn(2, 4)
                    assert torch.equal(getattr(model, method)(given), getattr(plain, method)(given))
            summoned = "block" if recurse else "root"
            with pytest.raises(FairshardError, match=rf"unit `{summoned}` is summoned.*no_grad.*recurse=False"):
                model.generate(randn(2, 4))
        model(randn(2, 4)).sum().backward()
        with FSDP.summon_full_params(model.block), torch.no_grad():
            with pytest.raises(FairshardError, match=r"unit `block` is summoned.*recurse=False"):
                model(randn(2, 4))


@on_ranks(2)
def test_a_summoned_model_computes_with_what_is_written():
    """Under mixed precision it computes in fp32, on each rank as often as that rank wants; writes are kept."""
    plain = Generator()
    net = copy.deepcopy(plain)
    net.block = FSDP(net.block, mixed_precision=True)
    model = FSDP(net, mixed_precision=True)
    register_forward_method(model, "generate")
    given = randn(2, 4)
    with FSDP.summon_full_params(model):
        with torch.no_grad():
            for shown in (plain, net):
                for param in shown.parameters():
                    param.mul_(2)
            for _ in range(1 + dist.get_rank()):
                output = model.generate(given)
        with pytest.raises(FairshardError, match=r"is summoned.*no_grad"):
            model.generate(given)
    assert torch.equal(output, plain.generate(given))
    assert_same_state(model.state_dict(), plain.state_dict())
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True), torch.no_grad():
        with pytest.raises(FairshardError, match=r"is summoned.*on all ranks"):
            model(given)
