"""On one rank nothing is cut: parameters that have their own names also keep their own shapes."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn

from fairshard.checkpoint import load, save
from fairshard.errors import FairshardError, ShardOptimizerError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import MixedPrecision, ShardingStrategy
from fairshard.optim import CPUOptimizer
from tests.checkpoint.compared import assert_same, whole
from tests.kit import run_ranks
from tests.models import mlp
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, randn

APART = {"flatten_parameters": False}
LAYOUTS = {"apart": APART, "views": {"use_orig_params": True}, "views apart": {**APART, "use_orig_params": True}}
HELD = {"cpu_offload": True, "move_grads_to_cpu": False}
PLACEMENTS = {"device": {}, "offload": {"cpu_offload": True}, "master": {"move_grads_to_cpu": True}, "held": HELD}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


class Odd(nn.Module):
    """A matrix, a tied and a frozen one, a convolution, and parameters without dimensions, elements or use."""

    def __init__(self, seed=1):
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(2, 3, 2)
        self.first = nn.Linear(12, 12)
        self.tied = nn.Linear(12, 12)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(12, 4).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.unused = nn.Parameter(torch.ones(2, 2))

    def forward(self, x):
        x = self.conv(x.view(-1, 2, 3, 3)).flatten(1)
        return self.frozen(self.tied(self.first(x).tanh())) * self.scale + self.none.sum()


def wrapped(layout, seed=1, **settings):
    model = Odd(seed)
    model.conv = FSDP(model.conv, **layout, **settings)
    return FSDP(model, **layout, **settings)


def shapes(values):
    return {name: tuple(value.shape) for name, value in values}


def backward(model, step):
    model(randn(3, 18, key=step)).float().square().sum().backward()


def train(model, optimizer, clip=None, steps=3):
    """Accumulate two backwards in each step, clip, and step."""
    for step in range(steps):
        with model.no_sync() if isinstance(model, FSDP) else contextlib.nullcontext():
            backward(model, (step, 0))
        backward(model, (step, 1))
        if clip is not None:
            is_plain = not isinstance(model, FSDP)
            (nn.utils.clip_grad_norm_(model.parameters(), clip) if is_plain else model.clip_grad_norm_(clip))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step != 1)


@on_ranks(1)
@layouts
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_parameters_gradients_and_states_are_shaped_and_train_as_plain_ones(layout, placement):
    """Shapes and bits are those of the plain module; nothing has a gradient or a state that it lacks there."""
    plain, model = Odd(), wrapped(LAYOUTS[layout], **PLACEMENTS[placement])
    assert shapes(model.named_parameters()) == shapes(plain.named_parameters())
    options = {"lr": 0.1, "amsgrad": True, "fused": False, "foreach": False}
    build = CPUOptimizer if placement == "held" else lambda model, cls, **kwargs: cls(model.parameters(), **kwargs)
    ours, theirs = build(model, torch.optim.Adam, **options), torch.optim.Adam(plain.parameters(), **options)
    train(model, ours)
    train(plain, theirs)
    assert_same_state(model.state_dict(), plain.state_dict())
    named = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        if not param.numel():
            continue  # has no gradient in a shard of its own
        expected = theirs.state.get(named[name], {})
        assert {key: value.shape for key, value in ours.state.get(param, {}).items()} == {
            key: value.shape for key, value in expected.items()
        }, name
    backward(model, 9)
    backward(plain, 9)
    if placement != "held":
        grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        expected = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
        for each in (grads, expected):
            each.pop("none", None)
        assert_same_state(grads, expected)
        assert shapes(grads.items()) == shapes(expected.items())
        assert [id(param) for param in model.params_with_grad] == [
            id(param) for param in model.parameters() if param.grad is not None
        ]


@on_ranks(1)
@layouts
@pytest.mark.parametrize("settings", [{}, {"mixed_precision": True, "compute_dtype": torch.bfloat16}], ids=["32", "16"])
def test_clipped_training_and_copies(layout, settings):
    """The norm is that of plain gradients; a deepcopy and an unpickled model have shapes too, and go on alike."""
    model = wrapped(LAYOUTS[layout], **settings)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), clip=0.5)
    if not settings:
        plain = Odd()
        train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), clip=0.5)
        assert_same_state(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)  # another order of the sum
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for other in copies:
        assert shapes(other.named_parameters()) == shapes(model.named_parameters())
        train(other, torch.optim.SGD(other.parameters(), lr=0.1))
        assert_same_state(other.state_dict(), model.state_dict())


@on_ranks(2)
def test_replicas_keep_shapes_and_shards_do_not():
    """With NO_SHARD every rank has whole parameters; cut among ranks, or with gradients in low precision, none."""
    expected = shapes(mlp(4, 6, 5).named_parameters())
    for layout in LAYOUTS.values():
        whole_model = FSDP(mlp(4, 6, 5), sharding_strategy=ShardingStrategy.NO_SHARD, **layout)
        assert shapes(whole_model.named_parameters()) == expected
        backward_of = whole_model(randn(3, 4)).square().sum()
        backward_of.backward()
        assert shapes((name, param.grad) for name, param in whole_model.named_parameters()) == expected
        cut = FSDP(mlp(4, 6, 5), **layout)
        assert {param.dim() for param in cut.parameters()} == {1}
    precision = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
    low = FSDP(mlp(4, 6, 5), sharding_strategy=ShardingStrategy.NO_SHARD, mixed_precision=precision, **APART)
    assert {param.dim() for param in low.parameters()} == {1}


class Muon(torch.optim.SGD):
    """Like its namesake it takes matrices only, and steps by the sign of their singular values."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    u, _, v = torch.linalg.svd(param.grad, full_matrices=False)  # raises for vectors
                    state = self.state[param].setdefault("momentum_buffer", torch.zeros_like(param))
                    param.add_(state.mul_(0.9).add_(u @ v), alpha=-group["lr"])


@on_ranks(1)
@pytest.mark.cpu_only("singular vectors of gradients of low rank are others on another device")
@layouts
def test_optimizers_that_need_shapes_step_matrices(layout):
    """A Muon for matrices beside AdamW, and CPUOptimizer with it, give the plain module's weights."""

    def step_all(model, cpu_of=None):
        matrices = [param for param in model.parameters() if param.dim() >= 2]
        others = [param for param in model.parameters() if param.dim() < 2]
        muon = CPUOptimizer(cpu_of, Muon, params=matrices, lr=0.1) if cpu_of else Muon(matrices, lr=0.1)
        adam = torch.optim.AdamW(others, lr=0.1, foreach=False)
        for step in range(3):
            model(randn(3, 4, key=step)).square().sum().backward()
            for optimizer in (muon, adam):
                optimizer.step()
                optimizer.zero_grad()
        return model.state_dict()

    expected = step_all(mlp(4, 6, 5))
    assert_same_state(step_all(FSDP(mlp(4, 6, 5), **LAYOUTS[layout])), expected)
    model = FSDP(mlp(4, 6, 5), cpu_offload=True, **LAYOUTS[layout])
    assert_same_state(step_all(model, cpu_of=model), expected)


@on_ranks(1)
def test_flat_shards_are_still_refused_by_such_optimizers():
    """A flat parameter has no shape of its own, on one rank either; LBFGS is refused in every layout."""
    flat = FSDP(mlp(4, 6))
    flat(randn(3, 4)).sum().backward()
    with pytest.raises(ShardOptimizerError, match="needs parameters in their own shape"):
        Muon(flat.parameters(), lr=0.1).step()
    apart = FSDP(mlp(4, 6), **APART)
    with pytest.raises(ShardOptimizerError, match="LBFGS needs all parameters"):
        CPUOptimizer(apart, torch.optim.LBFGS)


def _trained_odd(folder, layout, source=None):
    """Load ``source``, or train; save to ``folder``; returns weights and optimizer state."""
    model = wrapped(layout, seed=1 if source is None else 5)
    optimizer = torch.optim.Adam([param for param in model.parameters() if param.requires_grad], lr=0.1)
    if source is None:
        train(model, optimizer)
    else:
        load(source, model, optimizer)
    save(folder, model, optimizer, step=3)
    return whole(model, optimizer)


@pytest.mark.filterwarnings("ignore")  # random numbers are not restored
def test_checkpoints_from_one_rank_to_two_and_back(tmp_path):
    """Weights and moments stay the same bits over 1, 2 and 1 ranks, in layouts with and without shapes."""
    folders = [str(tmp_path / name) for name in "abc"]
    (first,) = run_ranks(1, _trained_odd, folder=folders[0], layout=APART)
    for actual in run_ranks(2, _trained_odd, folder=folders[1], layout=APART, source=folders[0]):
        assert_same(actual, first)
    (last,) = run_ranks(1, _trained_odd, folder=folders[2], layout={"use_orig_params": True}, source=folders[1])
    assert_same(last, first)


@on_ranks(1)
def test_local_state_dicts_have_shapes_and_load_flat_ones():
    """Local shards have the parameters' shapes, as in fairscale; those that earlier versions saved in 1-D load too."""
    model, other = wrapped(APART), wrapped(APART, seed=2)
    local = model.local_state_dict()
    assert shapes(local.items()) == shapes(Odd().named_parameters())
    flat = {name: value.view(-1) for name, value in local.items()}
    for saved in (local, flat):
        other.load_local_state_dict(saved)
        assert_same_state(other.state_dict(), model.state_dict())
        other = wrapped(APART, seed=2)


@on_ranks(1)
@layouts
def test_conversions_and_values_that_users_assign(layout):
    """`double`, another memory format and `.data` are followed; a tensor of another shape is refused by name."""
    plain, model = Odd().double(), wrapped(LAYOUTS[layout]).double()
    plain.to(memory_format=torch.channels_last)
    model.to(memory_format=torch.channels_last)
    for one in (plain, model):
        named = dict(one.named_parameters())
        named["first.weight"].data = randn(12, 12).double().t()
        one(randn(3, 18).double()).square().sum().backward()
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    assert_same_state(model.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)
    name, param = next((name, p) for name, p in model.named_parameters() if name == "first.weight")
    param.data = param.data.view(-1)
    with pytest.raises(ValueError, match=rf"`{name}` .* \(144,\), not \(12, 12\)"):
        model(randn(3, 18).double())


@on_ranks(1)
def test_counts_stay_whole_beside_narrow_moments():
    """A parameter without dimensions has a count of its own shape, which ``state_dtype`` must not round."""
    model = FSDP(Odd(), cpu_offload=True, **APART)
    optimizer = CPUOptimizer(model, torch.optim.Adam, lr=0.1, state_dtype=torch.bfloat16, fused=False)
    train(model, optimizer, steps=1)
    state = optimizer.state[dict(model.named_parameters())["scale"]]
    assert state["step"].dtype == torch.float32
    weight = optimizer.state[dict(model.named_parameters())["first.weight"]]
    assert weight["exp_avg"].dtype == torch.bfloat16
    assert weight["exp_avg"].shape == (12, 12)


@on_ranks(1)
@layouts
def test_gradients_that_users_change(layout):
    """An assigned gradient is added to, a dropped one starts again, and one scaled while `no_sync` keeps it raises."""
    model, plain = wrapped(LAYOUTS[layout]), Odd()
    for one in (model, plain):
        backward(one, 0)
        named = dict(one.named_parameters())
        named["first.weight"].grad = torch.ones(12, 12)
        named["scale"].grad = None
        backward(one, 1)
    for name, param in plain.named_parameters():
        if not param.numel():
            continue
        assert_same_state({name: dict(model.named_parameters())[name].grad}, {name: param.grad})
    model.zero_grad()
    with model.no_sync():
        backward(model, 0)
    dict(model.named_parameters())["scale"].grad.add_(1.0)
    with pytest.raises(FairshardError, match="`scale` must not be changed"):
        backward(model, 1)


@on_ranks(1)
def test_gradients_of_views_are_not_views():
    """As in plain PyTorch, a gradient may be detached in place, which raises for a view."""
    model = wrapped({"use_orig_params": True})
    model(randn(2, 18)).sum().backward()
    for param in model.parameters():
        if param.grad is not None:
            param.grad.detach_()
