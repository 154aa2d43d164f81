"""Parameters of tensor subclasses that define what is gathered of their shards."""

import copy
import functools
import gc
import io
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard

from fairshard import nn as fnn
from fairshard.checkpoint import Checkpointer
from fairshard.errors import FairshardError, ShardOptimizerError, StaleOptimizerError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import fully_shard
from fairshard.optim import CPUOptimizer
from fairshard.utils.collectives import counters, reset_counters
from fairshard.utils.subclasses import is_wrapper
from tests.kit import rank_device
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, average_grads_, randn, sgd
from tests.subclass_weights import Block, Half, Int8Rows, Net, Packed4
from tests.torch_gaps import needs_fsdp2_on_cpu

pytestmark = pytest.mark.behaviour("tensor subclasses")

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def shard(net, door=fully_shard, **kwargs):
    """One unit for each block, which mixes subclasses and plain parameters, and one for the rest."""
    for block in net.blocks:
        door(block, **kwargs)
    return door(net, **kwargs)


def own_values(net):
    """This rank's values of each parameter, dequantized."""
    values = {name: param.to_local().detach() for name, param in net.named_parameters()}
    return {name: value.whole() if hasattr(value, "whole") else value for name, value in values.items()}


def train(net, num_steps=3, num_backwards=1, clips=False, before_step=lambda: None):
    """The losses and norms of some steps; only the last of ``num_backwards`` reduces."""
    params = [param for param in net.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.02, momentum=0.9, foreach=False)  # the subclasses take no lists
    seen = []
    for step in range(num_steps):
        for part in range(num_backwards):
            if hasattr(net, "set_requires_gradient_sync"):
                net.set_requires_gradient_sync(part == num_backwards - 1)
            loss = net(randn(3, 8, key=(step, part))).float().square().mean()
            loss.backward()
            seen.append(loss.detach())
        if clips:
            norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            seen.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        before_step()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(seen)


def check_beside_torch(given, **how):
    """Train sharded by this library and by torch: the same losses and values."""
    ours, theirs = shard(Net(), **given), shard(Net(), torch_fully_shard, **given)
    assert torch.equal(train(ours, **how), train(theirs, **how))
    assert_same_state(own_values(ours), own_values(theirs))


def check_beside_replica(sharded, replica):
    """Train sharded, and as a replica: the same losses."""
    params = list(replica.parameters())
    expected = train(replica, before_step=functools.partial(average_grads_, params, keeps_none=True))
    assert torch.equal(train(sharded), expected)


PROGRAMS = {
    "plain": ({}, {}),
    "kept": ({"reshard_after_forward": False}, {}),
    "bf16": ({"mp_policy": BF16}, {}),
    "offload": ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, {}),
    "accumulation": ({}, {"num_backwards": 2}),
    "bf16 accumulation, kept": ({"mp_policy": BF16, "reshard_after_forward": False}, {"num_backwards": 2}),
    "clipping": ({}, {"clips": True}),
}


@needs_fsdp2_on_cpu
@on_ranks(2)
def test_trains_as_with_torch():
    """Int8 with scales, packed four-bit and low-precision weights beside plain ones: all values equal torch's."""
    for given, how in PROGRAMS.values():
        check_beside_torch(given, **how)
    check_beside_torch({"mesh": init_device_mesh(rank_device().type, (1, 2), mesh_dim_names=("replicas", "shards"))})


@on_ranks(1, 2, 3)
def test_trains_as_a_replica():
    """Also with rows that the number of ranks does not divide, and a rank without rows: pre-all-gather pads."""
    for rows, kinds in ((6, (Int8Rows, Packed4, Half)), (7, (Int8Rows, Half)), (1, (Half,))):
        check_beside_replica(shard(Net(rows, kinds=kinds)), Net(rows, kinds=kinds))


@on_ranks(2)
def test_tied_weights():
    """A weight that two modules of one unit share has one leaf; modules of two units must not share one."""
    nets = [Net(kinds=(Int8Rows, Int8Rows)) for _ in range(2)]
    for net in nets:
        net.blocks[0].layers[1].weight = net.blocks[0].layers[0].weight
    check_beside_replica(shard(nets[0]), nets[1])
    net = Net(kinds=(Half,))
    net.blocks[1].layers[0].weight = net.blocks[0].layers[0].weight
    with pytest.raises(ValueError, match=r"`layers\.0\.weight` is shared with `layers\.0\.weight` of a unit"):
        shard(net)


@on_ranks(2)
def test_activation_checkpointing():
    """A checkpoint gathers the subclasses again: the same losses as without."""
    seen = []
    for checkpoints in (False, True):
        net = Net()
        if checkpoints:
            apply_activation_checkpointing(net, check_fn=lambda module: isinstance(module, Block))
        seen.append(train(shard(net)))
    assert torch.equal(*seen)


def _leaf_nbytes(block):
    flat_params = block._fairshard_unit.flat_params
    return [
        sum(storage.nbytes() for storage, _ in each._extension._memory.values())
        for each in flat_params
        if hasattr(each, "_extension")
    ]


@on_ranks(2)
def test_memory_is_freed_and_refilled():
    """Outputs and inner tensors have memory only while the unit is gathered; a unit needs one gather."""
    net = shard(Net())
    net(randn(3, 8)).sum().backward()
    sizes = []
    handle = net.blocks[1].layers[0].register_forward_hook(lambda *_: sizes.append(_leaf_nbytes(net.blocks[1])))
    reset_counters()
    with torch.no_grad():
        net(randn(3, 8))
    handle.remove()
    rows, width = 6, 8
    int8, packed, half = rows * width + rows * 4, rows * width // 2 + rows * width * 4, rows * width * 4
    assert sizes == [[int8, packed, half]]
    assert _leaf_nbytes(net.blocks[0]) == _leaf_nbytes(net.blocks[1]) == [0, 0, 0]
    assert counters()["all_gather"][0] == 3


@on_ranks(2)
def test_registered_parameters_are_dtensors_of_the_subclass():
    """Outside of the forward, parameters are DTensors whose local tensors are this rank's rows, of the subclass."""
    net, whole = shard(Net()), Net()
    layer = net.blocks[0].layers[0]
    assert isinstance(layer.weight, DTensor)
    assert layer.weight.placements == (Shard(0),)
    assert layer.weight.shape == (6, 8)
    local = layer.weight.to_local()
    assert type(local) is Int8Rows
    rank = dist.get_rank()
    assert torch.equal(local.values, whole.blocks[0].layers[0].weight.values[3 * rank : 3 * rank + 3])
    net(randn(3, 8)).sum().backward()
    assert type(layer.weight.grad.to_local()) is torch.Tensor
    assert net.blocks[0].layers[1].weight.grad is None


@on_ranks(2)
def test_copies_and_state_dicts():
    """A deepcopy and a loaded state dict train on exactly like the original."""
    net = shard(Net())
    train(net, num_steps=1)
    twin = copy.deepcopy(net)
    other = shard(Net(kinds=(Int8Rows, Packed4, Half)))
    train(other, num_steps=2)
    other.load_state_dict(net.state_dict())
    for each in (twin, other):
        assert_same_state(own_values(each), own_values(net))
    expected = train(net)
    assert torch.equal(train(twin), expected)
    assert torch.equal(train(other), expected)


@on_ranks(2)
def test_values_copied_between_steps_are_gathered():
    """A forward uses values that were copied into a parameter since the last one, also if the unit stayed gathered."""
    net = shard(Net(kinds=(Half,)), reshard_after_forward=False)
    with torch.no_grad():
        before = net(randn(3, 8))
        weight = net.blocks[0].layers[0].weight
        weight.to_local().values.zero_()
        net.reshard()
        net.blocks[0].reshard()
        assert not torch.equal(net(randn(3, 8)), before)


@on_ranks(2)
def test_meta_device():
    """A module on the meta device gets memory after sharding."""
    net = Net(kinds=(Half,))
    with torch.device("meta"):
        empty = Net(kinds=(Half,))
    shard(empty)
    empty.to_empty(device=rank_device())
    with torch.no_grad():
        for (name, own), (_, whole) in zip(empty.named_parameters(), shard(net).named_parameters(), strict=True):
            assert own.shape == whole.shape, name
            own.copy_(whole)
    assert torch.equal(train(empty), train(net))


class Careless(Packed4):
    """Refills the whole parameter as a change that autograd would count."""

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):
        whole = self.unpacked(*outputs, param_dtype)
        return (whole, (whole,)) if out is None else out.copy_(whole)


@on_ranks(2)
def test_a_refill_does_not_count_as_a_change():
    """What autograd has saved of a whole parameter is valid after the next gather."""
    losses = []
    for kind in (Packed4, Careless):
        net = Net(kinds=(kind,))
        for block in net.blocks:
            block.layers[0].weight.requires_grad_(False)
        losses.append(train(shard(net)))
    assert torch.equal(*losses)


class Growing(Half):
    """Gathers ``extra`` more rows."""

    extra = 0

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        (data,), _ = super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)
        return (torch.cat([data, data.new_zeros(self.extra, data.size(1))]),), None


@on_ranks(2)
def test_sizes_that_change_after_the_first_gather_raise():
    """The error names the parameter and both sizes, in place of a write outside its memory."""
    net = shard(Net(kinds=(Growing,)))
    train(net, num_steps=1)
    Growing.extra = 1
    try:
        with pytest.raises(FairshardError, match=r"same sizes and dtypes each time.*.*layers.0.weight`.*\(24, .*32"):
            net(randn(3, 8, key=0))
    finally:
        Growing.extra = 0


@on_ranks(1)
def test_the_original_parameters_are_freed():
    """After sharding nothing refers to a parameter of before, which holds all rows."""
    net = Net()
    originals = [weakref.ref(layer.weight) for block in net.blocks for layer in block.layers]
    shard(net)
    gc.collect()
    assert not any(original() is not None for original in originals)


class NoExtension(Half):
    """A wrapper without extension points."""

    @property
    def fsdp_pre_all_gather(self):
        raise AttributeError

    @property
    def fsdp_post_all_gather(self):
        raise AttributeError


class OneSided(Half):
    """A wrapper with one of the two extension points."""

    @property
    def fsdp_post_all_gather(self):
        raise AttributeError


class OtherArguments(Half):
    """An extension point with arguments that do not exist."""

    def fsdp_pre_all_gather(self, mesh, outer_size):
        raise NotImplementedError


class FailsOnSecond(Half):
    """Cannot be gathered by rank 1."""

    def fsdp_pre_all_gather(self, mesh):
        if mesh.get_local_rank():
            raise RuntimeError("no padding")
        return (self.values,), None


class Unpadded(Half):
    """Gathers the rows of each rank as they are."""

    def fsdp_pre_all_gather(self, mesh):
        return (self.values.to(torch.bfloat16),), None


def net_of(kind):
    return Net(7, kinds=(kind,))


@on_ranks(1)
def test_what_cannot_be_sharded_is_refused_by_name():
    """Each error names the parameter and the class, and says what to do."""
    where = r"layers\.0\.weight"
    cases = [
        (TypeError, rf"{where}` is a NoExtension.*Add `fsdp_pre_all_gather`", NoExtension, {}),
        (TypeError, rf"OneSided.*{where}`, has only `fsdp_pre_all_gather`", OneSided, {}),
        (TypeError, r"takes \(mesh, outer_size\)", OtherArguments, {}),
        (ValueError, rf"{where}`.*would be cut along None", Half, None),
    ]
    for error, message, kind, kwargs in cases:
        net = net_of(kind)
        if kwargs is None:
            net.blocks[0].layers[0].weight = nn.Parameter(Half(torch.tensor(1.0)))
        with pytest.raises(error, match=message):
            fully_shard(net)
    for kind in (Half, NoExtension):
        with pytest.raises(TypeError, match=rf"{where}` is a {kind.__name__}.*fully_shard.*ignored_modules"):
            FSDP(net_of(kind))
    net = Net(kinds=(Half,))
    optimizer = sgd(net)
    shard(net)
    net(randn(3, 8)).sum().backward()
    with pytest.raises(StaleOptimizerError, match=r"blocks\.0\.layers\.0\.weight|of a model"):
        optimizer.step()


@on_ranks(2)
def test_settings_that_a_subclass_cannot_have_are_refused():
    """Cutting along another dimension, keeping a part, unequal inputs and CPUOptimizer raise on all ranks."""
    with pytest.raises(ValueError, match=r"layers\.0\.weight`, a Half.*would be cut along 1"):
        fully_shard(
            Net(kinds=(Half,)).blocks[0], shard_placement_fn=lambda param: Shard(1) if param.dim() == 2 else None
        )
    net = shard(net_of(Unpadded))
    with pytest.raises(ValueError, match=r"layers\.0\.weight`.*\(4, 8\) torch.bfloat16 on rank 0 and \(3, 8\)"):
        net(randn(3, 8))
    error = (ValueError, RuntimeError)[dist.get_rank()]
    with pytest.raises(error, match="no padding"):
        shard(net_of(FailsOnSecond))(randn(3, 8))
    net = shard(Net(kinds=(Half,)), offload_policy=fnn.CPUOffloadPolicy())
    with pytest.raises(ShardOptimizerError, match=r"layers\.0\.weight` is a Half"):
        CPUOptimizer(net, torch.optim.SGD, lr=0.1)
    net = shard(Net(kinds=(Half,)))
    net(randn(3, 8))
    with pytest.raises(TypeError, match=r"layers\.0\.weight` is a Half"), FSDP.summon_full_params(net):
        pass
    with pytest.raises(TypeError, match=r"layers\.0\.weight` is a Half"):
        Checkpointer("unused").save(1, model=net)


@on_ranks(4)
def test_a_kept_part_is_refused():
    """``reshard_after_forward=2`` on four ranks would cut the gathered form again."""
    with pytest.raises(ValueError, match=r"must be True or False for a tensor subclass.*but is 2"):
        fully_shard(Net(kinds=(Half,)).blocks[0], reshard_after_forward=2)


class Named(nn.Parameter):
    """A parameter class without inner tensors."""


@on_ranks(1)
def test_parameter_classes_with_memory_work_in_both_doors():
    """Subclasses of ``nn.Parameter`` without inner tensors are sharded like any parameter."""
    plain = nn.Linear(4, 4)
    expected = plain(torch.ones(2, 4))
    for door in (fully_shard, FSDP):
        module = copy.deepcopy(plain)
        module.weight = Named(module.weight.detach())
        assert torch.equal(door(module)(torch.ones(2, 4)), expected)


@on_ranks(2)
def test_an_exception_leaves_nothing_behind():
    """After a forward that raised, the next steps equal those of a model that never did."""
    torn, smooth = shard(Net()), shard(Net())

    def fail(*_):
        raise ZeroDivisionError

    torn(randn(3, 8)).sum()
    handle = torn.blocks[1].layers[1].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        torn(randn(3, 8))
    handle.remove()
    assert torch.equal(train(torn), train(smooth))


@on_ranks(2)
def test_saved_states(tmp_path):
    """State dicts can be saved by ``torch.save`` and by torch.distributed.checkpoint, and gathered whole."""
    torch.serialization.add_safe_globals([Int8Rows, Packed4, Half])  # as a library of subclasses does
    net, first, second = shard(Net()), shard(Net()), shard(Net())
    train(net, num_steps=1)
    memory = io.BytesIO()
    torch.save(net.state_dict(), memory)
    memory.seek(0)
    first.load_state_dict(torch.load(memory, weights_only=False))
    dcp.save(net.state_dict(), checkpoint_id=tmp_path)
    state = second.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    second.load_state_dict(state)
    assert torch.equal(train(first), train(second))
    whole = net.blocks[0].layers[2].weight.full_tensor()
    own = net.blocks[0].layers[2].weight.to_local().whole()
    assert torch.equal(whole.chunk(2)[dist.get_rank()], own)


def test_a_fake_tensor_is_no_wrapper():
    """Its address is not asked for, because torch warns of that."""
    with FakeTensorMode():
        fake = torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not is_wrapper(fake)
