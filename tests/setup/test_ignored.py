"""Ignored parameters stay whole and registered on every rank, and take part in no collective."""

import contextlib
import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from fairshard.checkpoint import load, save
from fairshard.engine import exchange
from fairshard.nn import FullStateDictConfig, ShardingStrategy, StateDictType
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn.wrap import ModuleWrapPolicy
from fairshard.optim import CPUOptimizer, ShardedGradScaler
from tests.kit import CollectiveCounter, rank_device
from tests.models import DIM, tiny, tiny_batch, tiny_loss, wrap_tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, average_grads_, mean_over_ranks, randn, sgd
from tests.torch_gaps import needs_fsdp2_on_cpu


class Gated(nn.Module):
    """A Linear and a LayerNorm beside a gate, with a buffer; the gate is what tests ignore."""

    def __init__(self, dim=DIM):
        super().__init__()
        self.gate = nn.Linear(dim, dim)
        self.gate.register_buffer("table", torch.ones(dim) / 3)
        self.body = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        gate = torch.sigmoid(self.gate(x.to(self.gate.weight.dtype)) * self.gate.table)
        return self.norm(x + self.body(x) * gate.to(x.dtype))


def gated(num_blocks=2, seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(*(Gated() for _ in range(num_blocks)), nn.Linear(DIM, 3)).to(rank_device())


def gates(model):
    return [block.gate for block in model if isinstance(block, Gated)]


def ignored_params(model):
    return [param for gate in gates(model) for param in gate.parameters()]


def wrap_ignoring(model, how="modules", **kwargs):
    """Wrap each block and the whole model; one of the arguments ignores the gates."""
    given = {
        "modules": lambda: {"ignored_modules": gates(model)},
        "states": lambda: {"ignored_states": iter(gates(model))},
        "parameters": lambda: {"ignored_parameters": ignored_params(model)},
        "states of parameters": lambda: {"ignored_states": ignored_params(model)},
    }[how]
    for index, block in enumerate(model):
        if isinstance(block, Gated):
            model[index] = FSDP(block, **given_in(block, given()), **kwargs)
    return FSDP(model, **kwargs)  # finds what inner units ignore


def given_in(block, given):
    """The same argument, as a list for the inner wrapper."""
    return {name: list(items) for name, items in given.items()}


def loss_of(model, key):
    return model(randn(4, DIM, key=key)).float().square().sum()


def train_both(plain, wrapped, num_steps=2):
    """Train the wrapped model and a replica whose ignored gradients are not reduced; they must agree exactly."""
    of_plain, of_wrapped = sgd(plain), sgd(wrapped)
    own = {id(param) for param in ignored_params(plain)}
    for step in range(num_steps):
        expected, actual = loss_of(plain, step), loss_of(wrapped, step)
        assert torch.equal(expected, actual)
        expected.backward()
        actual.backward()
        average_grads_([param for param in plain.parameters() if id(param) not in own])
        for optimizer in (of_plain, of_wrapped):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(wrapped.state_dict(), plain.state_dict())


@pytest.mark.pairs
@on_ranks(1, in_full(2), 3)
@pytest.mark.parametrize("how", ["modules", "states", "parameters", "states of parameters"])
@pytest.mark.parametrize("flatten", [True, False], ids=["flat", "unflattened"])
def test_training_equals_that_of_a_replica(how, flatten):
    """Sharded weights train as under DDP, ignored ones with each rank's own gradient; state dicts keep their order."""
    plain, model = gated(), gated()
    whole = ignored_params(model)
    wrapped = wrap_ignoring(model, how, flatten_parameters=flatten)
    named = dict(wrapped.named_parameters())
    for index, gate in enumerate(gates_of(wrapped)):
        assert named[f"{index}.gate.weight"] is gate.weight
        assert named[f"{index}.gate.bias"] is gate.bias
    assert {id(param) for param in whole} <= {id(param) for param in wrapped.parameters()}
    train_both(plain, wrapped)


def gates_of(wrapped):
    return [wrapped.module[index].module.gate for index in (0, 1)]


@on_ranks(2)
def test_parity_with_ddp_that_ignores_the_same():
    """DDP with the same parameters ignored gives the same numbers."""
    plain, model = gated(), gated()
    names = [name for name, _ in plain.named_parameters() if ".gate." in name]
    DDP._set_params_and_buffers_to_ignore_for_model(plain, names)
    ddp, wrapped = DDP(plain), wrap_ignoring(model)
    of_ddp, of_wrapped = sgd(ddp), sgd(wrapped)
    for step in range(3):
        for one, optimizer in ((ddp, of_ddp), (wrapped, of_wrapped)):
            loss_of(one, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(wrapped.state_dict(), plain.state_dict())


@on_ranks(in_full(2), 3)
def test_nothing_of_them_travels():
    """Gathers and reductions move only the other parameters, and ignored gradients stay this rank's own."""
    model = gated()
    wrapped = wrap_ignoring(model)
    loss_of(wrapped, 0).backward()
    wrapped.zero_grad()
    with CollectiveCounter() as counter:
        loss_of(wrapped, 1).backward()
    lines = sum(flat.shard.numel() for unit in root_units(wrapped) for flat in unit.flat_params)
    assert lines * dist.get_world_size() < sum(p.numel() for p in gated().parameters())
    largest = max(flat.shard.nbytes for unit in root_units(wrapped) for flat in unit.flat_params)
    sizes = [size for method, size in counter.calls if method == "recv" and size != exchange.FIRST_NBYTES]
    assert max(sizes, default=0) <= largest * 3
    (first, *_) = ignored_params_of(wrapped)
    every = mean_over_ranks(first.grad)
    assert not torch.equal(first.grad, every)


def root_units(wrapped):
    return wrapped._unit.root.units


def ignored_params_of(wrapped):
    return [param for gate in gates_of(wrapped) for param in gate.parameters()]


@on_ranks(in_full(1), 2)
def test_they_are_neither_cast_nor_moved():
    """Under mixed precision ignored weights and buffers keep their dtype and their memory."""
    model = gated()
    before = [(id(param), param.data_ptr(), param.dtype) for param in ignored_params(model)]
    tables = [gate.table for gate in gates(model)]
    seen = []
    for gate in gates(model):
        gate.register_forward_pre_hook(lambda gate, args: seen.append((gate.weight.dtype, gate.table.dtype)))
    wrapped = wrap_ignoring(model, mixed_precision=True, compute_dtype=torch.bfloat16)
    loss_of(wrapped, 0).backward()
    assert seen == [(torch.float32, torch.float32)] * 2
    assert before == [(id(param), param.data_ptr(), param.dtype) for param in ignored_params_of(wrapped)]
    assert all(gate.table is table for gate, table in zip(gates_of(wrapped), tables, strict=True))
    assert all(param.grad.dtype == torch.float32 for param in ignored_params_of(wrapped))


@on_ranks(1, in_full(2), 3)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")], ids=str)
def test_the_norm_counts_them_once(norm_type):
    """With equal gradients on all ranks the norm is that of the plain model, and all are scaled by one factor."""
    plain, model = gated(), gated()
    wrapped = wrap_ignoring(model)
    x = torch.ones(4, DIM, device=rank_device())
    for one in (plain, wrapped):
        one(x).square().sum().backward()
    before = ignored_params_of(wrapped)[0].grad.clone()
    expected = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()], norm_type)
    actual = wrapped.clip_grad_norm_(0.5, norm_type)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0.0)
    factor = 0.5 / (actual + 1e-6)
    assert torch.equal(ignored_params_of(wrapped)[0].grad, before * factor)
    again = wrapped.clip_grad_norm_(100.0, norm_type)
    torch.testing.assert_close(again, torch.tensor(0.5), rtol=1e-4, atol=0.0)


@on_ranks(in_full(2), 3)
def test_the_norm_is_the_same_on_ranks_whose_ignored_gradients_differ():
    """The norm includes the mean contribution of ignored gradients: every rank scales by the same factor."""
    wrapped = wrap_ignoring(gated())
    loss_of(wrapped, 0).backward()
    sharded = [p.grad for p in wrapped.parameters() if not any(p is q for q in ignored_params_of(wrapped))]
    power = sum(grad.double().square().sum() for grad in sharded)
    own = sum(param.grad.double().square().sum() for param in ignored_params_of(wrapped))
    total = power + own / dist.get_world_size()
    dist.all_reduce(total)
    torch.testing.assert_close(wrapped.clip_grad_norm_(1e9), total.sqrt().float(), rtol=1e-6, atol=0.0)


@on_ranks(2)
@pytest.mark.parametrize("flatten", [True, False], ids=["flat", "unflattened"])
@pytest.mark.parametrize("kind", list(StateDictType), ids=lambda kind: kind.name)
def test_state_dicts_of_every_form_hold_them(kind, flatten):
    """A state dict has copies of them, and loading it restores them."""
    wrapped = wrap_ignoring(gated(), flatten_parameters=flatten)
    loss_of(wrapped, 0).backward()
    with FSDP.state_dict_type(wrapped, kind):
        state = wrapped.state_dict()
        names = {f"{index}.gate.{name}" for index in (0, 1) for name in ("weight", "bias", "table")}
        assert names <= set(state)
        weight = gates_of(wrapped)[0].weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.zero_()
        assert torch.equal(torch.as_tensor(state["0.gate.weight"]), kept)
        keys = wrapped.load_state_dict(state)
    assert keys.missing_keys == keys.unexpected_keys == []
    assert torch.equal(weight, kept)


@on_ranks(2)
def test_rank_0_alone_loads_them_for_all():
    """With `rank0_only` the other ranks receive them, and give an empty dict."""
    wrapped, other = wrap_ignoring(gated()), gated(seed=7)
    with FSDP.state_dict_type(wrapped, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        state = wrapped.state_dict()
        assert bool(state) == (dist.get_rank() == 0)
        wrapped.load_state_dict(other.state_dict() if dist.get_rank() == 0 else {})
    assert_same_state(wrapped.state_dict(), other.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("form", ["full", "sharded"])
def test_optimizer_state_holds_theirs(form):
    """Optimizer state is saved under their names, and loads into another wrapping."""
    wrapped, other = wrap_ignoring(gated()), wrap_ignoring(gated(seed=5), flatten_parameters=form == "sharded")
    optimizer, of_other = (torch.optim.Adam(model.parameters()) for model in (wrapped, other))
    loss_of(wrapped, 0).backward()
    optimizer.step()
    if form == "full":
        state = FSDP.full_optim_state_dict(wrapped, optimizer, rank0_only=False)
        of_other.load_state_dict(FSDP.shard_full_optim_state_dict(state, other, optim=of_other))
    else:
        state = FSDP.sharded_optim_state_dict(wrapped, optimizer)
        of_other.load_state_dict(FSDP.flatten_sharded_optim_state_dict(state, other, of_other))
    for mine, theirs in zip(ignored_params_of(wrapped), ignored_params_of(other), strict=True):
        assert torch.equal(optimizer.state[mine]["exp_avg"], of_other.state[theirs]["exp_avg"])
    mine = optimizer.state[gates_of(wrapped)[0].weight]["exp_avg"]
    assert torch.equal(state["state"]["0.gate.weight"]["exp_avg"], mine)


@on_ranks(2)
def test_checkpoints_hold_them(tmp_path):
    """Saved and loaded into another model, weights and optimizer state alike."""
    wrapped, other = wrap_ignoring(gated()), wrap_ignoring(gated(seed=5))
    optimizer, of_other = sgd(wrapped), sgd(other)
    x = torch.ones(4, DIM, device=rank_device())
    wrapped(x).square().sum().backward()
    optimizer.step()
    save(tmp_path / "one", model=wrapped, optimizer=optimizer)
    load(tmp_path / "one", model=other, optimizer=of_other)
    assert_same_state(other.state_dict(), wrapped.state_dict())
    of_both = (optimizer, wrapped), (of_other, other)
    mine, theirs = (of.state[gates_of(model)[0].weight]["momentum_buffer"] for of, model in of_both)
    assert torch.equal(mine, theirs)


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


@on_ranks(in_full(1), 2)
@pytest.mark.parametrize("copied_by", [copy.deepcopy, by_pickle])
@pytest.mark.parametrize("num_steps", [0, 1])
def test_copies_ignore_their_own(copied_by, num_steps):
    """A copy has ignored weights of its own, trains alike, and clips with them."""
    wrapped = wrap_ignoring(gated())
    for step in range(num_steps):
        loss_of(wrapped, step).backward()
        sgd(wrapped).step()
        wrapped.zero_grad()
    copied = copied_by(wrapped)
    assert not {id(p) for p in ignored_params_of(copied)} & {id(p) for p in ignored_params_of(wrapped)}
    norms = []
    for model in (wrapped, copied):
        loss_of(model, 9).backward()
        norms.append(model.clip_grad_norm_(1e-3))
        sgd(model).step()
    assert torch.equal(*norms)
    assert_same_state(copied.state_dict(), wrapped.state_dict())


@on_ranks(2)
def test_half_before_the_first_forward_takes_them_along():
    """Converting the model converts ignored weights too."""
    plain, wrapped = gated().double(), wrap_ignoring(gated()).double()
    x = randn(4, DIM).double()
    assert torch.equal(wrapped(x), plain(x))
    assert ignored_params_of(wrapped)[0].dtype == torch.float64


@on_ranks(in_full(1), 2)
def test_frozen_weights_before_ignored_ones():
    """Frozen weights stay gathered until the gradients of ignored weights, which come last, have passed."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.short = nn.Linear(DIM, DIM).requires_grad_(False)
            self.long = nn.Linear(DIM, DIM).requires_grad_(False)
            self.prompt = nn.Parameter(torch.randn(4, DIM))

        def forward(self, x):
            prompt = self.prompt
            for _ in range(3):
                prompt = torch.tanh(self.long(prompt))
            return self.short(x) + prompt

    plain, model = Branches(), Branches()
    wrapped = FSDP(model, ignored_parameters=[model.prompt])
    x = randn(4, DIM).requires_grad_()  # a leaf: autograd reaches it first
    for one in (plain, wrapped):
        one(x).square().sum().backward()
    assert torch.equal(model.prompt.grad, plain.prompt.grad)


@on_ranks(in_full(1), 2)
def test_a_shared_weight_is_ignored_under_all_its_names():
    """An ignored embedding that the output layer shares stays whole in both."""
    plain, model = tiny(), tiny()
    weight = model.embed.weight
    wrapped = wrap_tiny(model, ignored_modules=[model.embed])
    assert wrapped.module.head.weight is wrapped.module.embed.weight is weight
    *inputs, targets = tiny_batch(0)
    for one in (plain, wrapped):
        tiny_loss(one(*inputs), targets).backward()
    assert torch.equal(weight.grad, plain.embed.weight.grad)
    assert_same_state(wrapped.state_dict(), plain.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("overlap", [False, True])
def test_cpu_optimizer_and_scaler_see_them(overlap):
    """Offload with a CPU optimizer, that clips or steps early, steps ignored weights as a plain optimizer does."""
    models = [wrap_ignoring(gated(), cpu_offload=offload) for offload in (False, True)]
    plain = sgd(models[0], momentum=0.0)
    clip = None if overlap else 0.5
    offloaded = CPUOptimizer(models[1], torch.optim.SGD, lr=0.1, clip_grad_norm=clip, overlap=overlap)
    for step in range(2):
        loss_of(models[0], step).backward()
        if not overlap:
            models[0].clip_grad_norm_(0.5)
        with offloaded.last_backward() if overlap else contextlib.nullcontext():
            loss_of(models[1], step).backward()
        for optimizer in (plain, offloaded):
            optimizer.step()
            optimizer.zero_grad()
    states = [{name: value.cpu() for name, value in model.state_dict().items()} for model in models]
    assert_same_state(states[1], states[0])


@on_ranks(2)
def test_an_overflow_of_one_rank_s_own_skips_the_step_of_all():
    """A non-finite ignored gradient on one rank is seen by the scaler of every rank."""
    wrapped = wrap_ignoring(gated())
    optimizer, scaler = sgd(wrapped), ShardedGradScaler("cpu", init_scale=4.0)
    scaler.scale(loss_of(wrapped, 0)).backward()
    if dist.get_rank() == 1:
        ignored_params_of(wrapped)[0].grad[0, 0] = float("inf")
    before = wrapped.state_dict()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert_same_state(wrapped.state_dict(), before)


@on_ranks(2)
def test_accumulation_adds_their_gradients_up():
    """`no_sync` does not change ignored gradients."""
    plain, wrapped = gated(), wrap_ignoring(gated())
    with wrapped.no_sync():
        loss_of(wrapped, 0).backward()
    loss_of(wrapped, 1).backward()
    for key in (0, 1):
        loss_of(plain, key).backward()
    for mine, theirs in zip(ignored_params_of(wrapped), ignored_params(plain), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    assert {id(p) for p in ignored_params_of(wrapped)} <= {id(p) for p in wrapped.params_with_grad}


@on_ranks(in_full(1), 2)
def test_summoned_they_are_what_they_are():
    """Inside `summon_full_params` the model has all names and shapes of the plain model."""
    wrapped = wrap_ignoring(gated())
    loss_of(wrapped, 0)
    with FSDP.summon_full_params(wrapped):
        shown = {name: param.shape for name, param in wrapped.named_parameters()}
    assert shown == {name: param.shape for name, param in gated().named_parameters()}


@on_ranks(2)
def test_meta_and_ranks_that_differ_leave_them_alone():
    """Ignored parameters on the meta device are not initialised, and `sync_module_states` does not send them."""
    model = gated(seed=dist.get_rank())
    own = [param.detach().clone() for param in ignored_params(model)]
    for block in model[:2]:
        block.body.to("meta")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped = wrap_ignoring(model, sync_module_states=True)
        loss_of(wrapped, 0)
    assert all(torch.equal(a, b) for a, b in zip(ignored_params_of(wrapped), own, strict=True))
    model = Gated().to("meta")
    model.gate.table = torch.ones(DIM)
    FSDP(model, ignored_parameters=[model.gate.bias], ignored_modules=[model.norm])
    assert model.gate.bias.is_meta
    assert model.norm.weight.is_meta


@on_ranks(2)
@pytest.mark.parametrize("is_meta", [False, True])
def test_a_policy_leaves_them_alone(is_meta):
    """Ignored parameters tie no modules together, may have other dtypes, and keep what `param_init_fn` sets."""
    with torch.device("meta" if is_meta else rank_device()):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[0].counts = nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False)
    if not is_meta:
        model[1].bias = model[0].bias

    def init(module):
        module.to_empty(device=rank_device(), recurse=False)
        module.reset_parameters()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped = FSDP(
            model,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            ignored_parameters=[model[0].bias, model[1].bias, model[0].counts],
            param_init_fn=init,
        )
    shapes = {name: tuple(param.shape) for name, param in wrapped.named_parameters()}
    own = {"0.flat_param_0": (8,), "0.bias": (4,), "0.counts": (3,), "1.flat_param_0": (8,)}
    assert shapes == ({**own, "1.bias": (4,)} if is_meta else own)
    there = [wrapped[0].bias, wrapped[1].bias, wrapped[0].counts]
    assert {id(param) for param in wrapped._unit.origin.ignored.params} == {id(param) for param in there}


# ---- what is refused


@on_ranks(1)
def test_one_that_two_units_share_cannot_be_initialised_by_both():
    """An ignored parameter on the meta device that two units share raises, because each would create its own."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].bias = model[0].bias
    ignored = {"ignored_parameters": [model[0].bias]}
    model[0] = FSDP(model[0], param_init_fn=lambda module: module.to_empty(device="cpu"), **ignored)
    with pytest.raises(ValueError, match=r"`1\.bias` is shared with `bias`"):
        FSDP(model, **ignored)


@on_ranks(1)
def test_ignored_states_are_modules_and_parameters():
    """`ignored_states` accepts both."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1), nn.Linear(1, 1))
    wrapped = FSDP(model, ignored_states=[model[0], model[1].bias])
    assert [name for name, _ in wrapped.named_parameters()] == ["flat_param_0", "0.weight", "0.bias", "1.bias"]


@on_ranks(in_full(1), 2)
def test_units_are_not_ignored():
    """A wrapper, a module that contains one, and a module inside one cannot be ignored."""
    model = gated()
    inner = FSDP(model[0].gate)
    model[0].gate = inner
    leaf = inner._unit.flat_params[0].slots[1].leaf
    for text, ignored in [
        ("is a wrapper itself", {"ignored_modules": [inner]}),
        ("its `gate` is wrapped already", {"ignored_modules": [model[0]]}),
        ("`0.gate.weight` has been sharded by the unit `0.gate`", {"ignored_modules": [inner.module]}),
        ("`0.gate.weight` has been sharded by the unit `0.gate`", {"ignored_parameters": list(inner.parameters())}),
        ("`0.gate.bias` has been sharded", {"ignored_parameters": [leaf]}),
    ]:
        with pytest.raises(ValueError, match=text):
            FSDP(model, **ignored)


@on_ranks(in_full(1), 2)
def test_the_module_itself_is_ignored_with_a_warning():
    """A wrapper whose module is ignored warns, shards nothing, and still runs."""
    plain, model = gated(), gated()
    with pytest.warns(UserWarning, match="nothing of it is sharded"):
        wrapped = FSDP(model, ignored_modules=[model])
    assert wrapped.params == []
    x = randn(4, DIM)
    assert torch.equal(wrapped(x), plain(x))
    wrapped(x).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(wrapped.clip_grad_norm_(1e9), mean_norm(plain))


def mean_norm(model):
    power = sum(param.grad.double().square().sum() for param in model.parameters())
    dist.all_reduce(power)
    return (power / dist.get_world_size()).sqrt().float()


@needs_fsdp2_on_cpu
@on_ranks(2)
def test_what_another_engine_has_sharded_may_be_ignored():
    """Ignored DTensors of FSDP2 do not change."""
    model = gated(1)
    mesh = dist.init_device_mesh(rank_device().type, (2,))
    fully_shard(model[0].gate, mesh=mesh)
    wrapped = FSDP(model, ignored_modules=[model[0].gate])
    assert isinstance(model[0].gate.weight, DTensor)
    x = randn(4, DIM)
    assert torch.equal(wrapped(x), gated(1)(x))


@on_ranks(4)
@pytest.mark.parametrize("strategy", ["NO_SHARD", "HYBRID_SHARD"])
def test_the_norm_counts_them_once_over_replicas_too(strategy):
    """With equal gradients everywhere the norm is that of the plain model, in hybrid models too."""
    kwargs = {"sharding_strategy": ShardingStrategy[strategy]}
    if strategy == "HYBRID_SHARD":
        kwargs["device_mesh"] = dist.init_device_mesh(rank_device().type, (2, 2))
    plain, wrapped = gated(), wrap_ignoring(gated(), **kwargs)
    x = torch.ones(4, DIM, device=rank_device())
    for one in (plain, wrapped):
        one(x).square().sum().backward()
    expected = torch.nn.utils.get_total_norm([param.grad for param in plain.parameters()])
    torch.testing.assert_close(wrapped.clip_grad_norm_(1e9), expected, rtol=1e-6, atol=0.0)
