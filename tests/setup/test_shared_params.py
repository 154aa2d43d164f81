"""``append_shared_param``: a weight of one unit that others use trains, is saved and is copied as tied weights are."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fairshard.checkpoint import load, save
from fairshard.engine.tree import units_below
from fairshard.errors import TrainingStateError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import MixedPrecision
from tests.kit import rank_device
from tests.on_ranks import in_full, on_ranks
from tests.reference import Reference, assert_same_state, average_grads_, randn, sgd, train_alike

FULL = pytest.mark.full


class Tied(nn.Module):
    """Two Linears use the weight of a third one, registered between them, and a fourth has its own.

    ``path`` lists the layers to call, in order; ``checkpointing`` says how each call is recomputed.
    """

    def __init__(self, path=("owner", "middle", "sharer", "other"), checkpointing=None):
        super().__init__()
        torch.manual_seed(6)
        self.path, self.checkpointing = path, checkpointing
        self.other, self.owner, self.middle, self.sharer = (nn.Linear(5, 5) for _ in range(4))
        self.other.weight = self.sharer.weight = self.owner.weight

    def forward(self, x):
        for name in self.path:
            layer = getattr(self, name)
            if self.checkpointing is None:
                x = torch.tanh(layer(x))
            else:
                x = torch.tanh(checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant"))
        return x


def tied(*args, **kwargs):
    return Tied(*args, **kwargs).to(rank_device())


def wrap(model, **kwargs):
    """Wrap each Linear; ``sharer`` gets the weight as ``owner`` has it, ``other`` gets it as its own attribute."""
    for name in ("owner", "middle", "sharer", "other"):
        setattr(model, name, FSDP(getattr(model, name), **kwargs))
    model.sharer.append_shared_param(model.owner.module.weight)
    model.other.append_shared_param(model.other.module.weight)
    return FSDP(model, **kwargs)


def loss_of(model, key):
    return model(randn(3, 5, key=key).requires_grad_()).square().sum()


OPTIONS = [
    {},
    {"use_orig_params": True, "cpu_offload": True},
    pytest.param({"flatten_parameters": False}, marks=FULL),
    pytest.param({"reshard_after_forward": False}, marks=FULL),
    pytest.param({"cpu_offload": True}, marks=FULL),
    pytest.param({"cpu_offload": True, "move_grads_to_cpu": True, "flatten_parameters": False}, marks=FULL),
]
PATHS = [
    ("owner", "middle", "sharer", "other"),
    ("sharer", "middle", "owner"),
    ("sharer", "other"),
    ("middle", "sharer", "owner", "sharer"),
]


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training(options):
    """Losses and weights are the plain model's, bit for bit, whichever unit runs first, even if the owner never runs.

    Nothing stays gathered, and each element is stored once.
    """
    for path in PATHS:
        wrapped = train_alike(tied(path), lambda model: wrap(model, **options), loss_of)
        assert not any(unit.is_gathered for _, unit in units_below(wrapped))
    assert sum(fp.line.layout.numel for _, unit in units_below(wrapped) for fp in unit.flat_params) == 5 * 5 * 2 + 5 * 4


@on_ranks(2, in_full(1))
@pytest.mark.parametrize("checkpointing", ["reentrant", "not_reentrant"])
def test_recomputed_and_accumulated(checkpointing):
    """Training is exact with activation checkpoints, and with a ``no_sync`` pass before each pass that reduces.

    Reentrant checkpoints add each use to the gradient on its own: plain training adds those of the second pass one by
    one to the sum of the first, a unit adds their sum.
    """
    plain = tied(checkpointing=checkpointing)
    wrapped = wrap(copy.deepcopy(plain))
    steps = [(model, sgd(model)) for model in (plain, wrapped)]
    for step in range(3):
        for model, optimizer in steps:
            if model is wrapped:
                with wrapped.no_sync():
                    loss_of(model, (step, 0)).backward()
            else:
                loss_of(model, (step, 0)).backward()
            loss_of(model, (step, 1)).backward()
            if model is plain:
                average_grads_(plain.parameters())
            optimizer.step()
            optimizer.zero_grad()
    exact = {"rtol": 0, "atol": 0} if checkpointing == "not_reentrant" else {"rtol": 1e-6, "atol": 1e-7}
    torch.testing.assert_close(wrapped.state_dict(), dict(plain.state_dict()), **exact)


@on_ranks(2)
def test_low_precision():
    """In bf16 with clipping, gradients of all uses are added in bf16, as autograd does on one device."""
    plain = tied()
    reduce_dtype = None if rank_device().type == "cpu" else torch.float32  # devices may add bf16 in bf16
    wrapped = wrap(copy.deepcopy(plain), mixed_precision=MixedPrecision(torch.bfloat16, reduce_dtype))
    reference = Reference(plain, torch.bfloat16)
    optimizers = sgd(wrapped), sgd(reference.master)
    for step in range(3):
        x = randn(3, 5, key=step)
        losses = [model(x.bfloat16()).square().sum() for model in (wrapped, reference)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        reference.reduce_grads()
        norm = wrapped.clip_grad_norm_(1e9)
        torch.testing.assert_close(norm.double(), reference.grad_norm(2), rtol=1e-6, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(wrapped.state_dict(), reference.master.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"use_orig_params": True}, {"flatten_parameters": False}], ids=str)
def test_state(options, tmp_path):
    """State dicts of all forms, whole parameters and optimizer state have the plain model's names."""
    plain = tied()
    wrapped, fresh = wrap(copy.deepcopy(plain), **options), wrap(Tied(), **options)
    assert_same_state(wrapped.state_dict(), plain.state_dict())
    optimizers = [torch.optim.Adam(model.parameters()) for model in (plain, wrapped)]
    for model, optimizer in zip((plain, wrapped), optimizers, strict=True):
        loss_of(model, 0).backward()
        if model is plain:
            average_grads_(plain.parameters())
        optimizer.step()
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    assert_same_state(wrapped.state_dict(), expected)
    with FSDP.summon_full_params(wrapped):
        assert wrapped.module.other.module.weight is wrapped.module.owner.module.weight
        names = [name for name, _ in wrapped.named_parameters()]
        assert names == [name for name, _ in plain.named_parameters()]
    fresh.load_state_dict(expected)
    assert_same_state(fresh.state_dict(), expected)

    with FSDP.summon_full_params(wrapped.module.sharer):
        assert [name for name, _ in wrapped.module.sharer.named_parameters()] == ["weight", "bias"]
    for model in (plain, wrapped):
        model.apply(lambda module: isinstance(module, nn.Linear) and nn.init.constant_(module.weight, 0.5))
    assert_same_state(wrapped.state_dict(), plain.state_dict())
    wrapped.load_state_dict(expected)

    fresh = wrap(Tied(), **options)
    fresh_optimizer = torch.optim.Adam(fresh.parameters())
    save(tmp_path / "step", wrapped, optimizers[1])
    load(tmp_path / "step", fresh, fresh_optimizer)
    assert_same_state(fresh.state_dict(), expected)

    names = {id(param): name for name, param in plain.named_parameters()}
    for model, optimizer in ((wrapped, optimizers[1]), (fresh, fresh_optimizer)):
        state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
        assert set(state) == {names[id(param)] for param in plain.parameters()}
        for param, kept in optimizers[0].state.items():
            assert torch.equal(state[names[id(param)]]["exp_avg"], kept["exp_avg"])

    metadata = [None, None]
    weights = [None, None]
    torch.distributed.all_gather_object(metadata, wrapped.local_metadata_dict())
    torch.distributed.all_gather_object(weights, wrapped.local_state_dict())
    consolidated = FSDP.consolidate_shard_weights(weights, metadata)
    assert {name: value.tolist() for name, value in consolidated.items()} == {
        name: value.tolist() for name, value in expected.items()
    }


@on_ranks(2)
def test_copies():
    """A copy shares among its own units, and trains like the original."""
    wrapped = wrap(tied(), sync_module_states=True)
    loss_of(wrapped, 0).backward()
    wrapped.zero_grad()
    copies = copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))
    for model in (wrapped, *copies):
        optimizer = sgd(model)
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_same_state(model.state_dict(), wrapped.state_dict())


@on_ranks(2)
def test_what_is_refused():
    """Raises for a weight not appended, units in two models, different precisions, a parameter that is not shared."""
    model = tied()
    model.other = nn.Identity()
    model.owner, model.sharer = FSDP(model.owner), FSDP(model.sharer)
    with pytest.raises(ValueError, match=r"`weight` is shared with `weight`.*append_shared_param"):
        model.sharer(randn(3, 5))
    with pytest.raises(ValueError, match=r"`sharer\.weight` is shared with .*append_shared_param"):
        FSDP(model)
    for param in (nn.Parameter(torch.ones(1)), model.middle.weight, model.owner.module.bias):
        with pytest.raises(ValueError, match="sharded and that a module"):
            model.sharer.append_shared_param(param)
    model.sharer.append_shared_param(model.owner.module.weight)
    model.sharer.append_shared_param(model.owner.module.weight)
    with pytest.raises(ValueError, match=r"in one model.*Wrap a module around both"):
        model.sharer(randn(3, 5))

    model = tied(("owner", "sharer"))
    model.other = nn.Identity()
    model.owner, model.sharer = FSDP(model.owner), FSDP(model.sharer, mixed_precision=MixedPrecision(torch.bfloat16))
    model.sharer.append_shared_param(model.owner.module.weight)
    with pytest.raises(ValueError, match=r"`owner\.weight`.*bfloat16.*`sharer`.*float32"):
        FSDP(model)(randn(3, 5))

    wrapped = wrap(tied())
    wrapped(randn(3, 5))
    with pytest.raises(TrainingStateError, match="before the first forward"):
        wrapped.module.sharer.append_shared_param(wrapped.module.owner.module.weight)
