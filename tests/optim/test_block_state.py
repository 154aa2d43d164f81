"""torchao's optimizers, which quantise their state in blocks, have the bits of one process where no block is cut."""

import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fairshard import checkpoint
from fairshard.errors import FairshardError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import RowBlocks, fully_shard
from fairshard.optim import CPUOptimizer
from tests.kit import rank_device
from tests.on_ranks import on_ranks
from tests.reference import Reference, assert_same_state, randn
from tests.torch_gaps import needs_torchao

pytestmark = needs_torchao

NAMES = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]
BLOCK = {"AdamW8bit": 256, "AdamW4bit": 128, "AdamWFp8": 256}


def plain_model():
    """Matrices that are quantised, one that is not (5,400 elements, no multiple of a block), and small vectors."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(60, 192), nn.Tanh(), nn.Linear(192, 64), nn.Linear(64, 90), nn.Linear(90, 60))


def rows_for_blocks(shape, block_numel):
    """The fewest rows by which a parameter is quantised as a whole would be, as the guide to placements says."""
    row_numel = torch.Size(shape[1:]).numel()
    for rows in range(1, shape[0]) if torch.Size(shape).numel() % block_numel == 0 else ():
        rest = shape[0] % rows * row_numel
        if rows * row_numel >= 4096 and rows * row_numel % block_numel == 0 and (not rest or rest >= 4096):
            return rows
    return shape[0]


def placed(block_numel):
    """Blocks that an optimizer with blocks of ``block_numel`` elements needs."""
    return lambda param: RowBlocks(rows_for_blocks(param.shape, block_numel))


def wrapped(block_numel, **settings):
    return FSDP(plain_model().to(rank_device()), use_orig_params=True, placement_fn=placed(block_numel), **settings)


LAYOUTS = {
    "blocks": lambda block: fully_shard(plain_model().to(rank_device()), shard_placement_fn=placed(block)),
    "views of blocks": wrapped,
}


def optimizer_of(name, params):
    import torchao.optim

    return getattr(torchao.optim, name)(params, lr=0.01, weight_decay=0.1)


def backward(model, step):
    model(randn(4, 60, key=(step, dist.get_rank()))).square().sum().backward()


def train(model, optimizer, steps=range(3), stance="force_eager"):
    with torch.compiler.set_stance(stance):
        for step in steps:
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    return {key: value.full_tensor() if isinstance(value, DTensor) else value.clone()
            for key, value in model.state_dict().items()}  # fmt: skip


def trained_reference(name, num_steps=3, stance="force_eager"):
    """The weights of one process; gradients are averaged in rank order."""
    reference = Reference(plain_model().to(rank_device()))
    optimizer = optimizer_of(name, reference.master.parameters())
    with torch.compiler.set_stance(stance):
        for step in range(num_steps):
            backward(reference, step)
            reference.reduce_grads()
            optimizer.step()
            optimizer.zero_grad()
    return reference.master.state_dict()


@on_ranks(2, 3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("layout", ["blocks", "views of blocks"])
def test_blocks_have_the_bits_of_one_process(layout, name):
    """Placed by the rows that their blocks need, parameters are trained as in one process."""
    model = LAYOUTS[layout](BLOCK[name])
    optimizer = optimizer_of(name, model.parameters())
    assert_same_state(train(model, optimizer), trained_reference(name))
    states = [optimizer.state[param]["exp_avg"] for param in model.parameters()]
    assert all(type(state) is type(param.data) for state, param in zip(states, model.parameters(), strict=True)
               if isinstance(param, DTensor))  # fmt: skip
    own = [getattr(state, "_local_tensor", state) for state in states]
    assert any(hasattr(state, "dequantize") for state in own) or not any(state.numel() >= 4096 for state in own)


@pytest.mark.full
@on_ranks(2, timeout=400)
@pytest.mark.parametrize("layout", ["blocks", "views of blocks"])
def test_compiled_steps_have_the_bits_of_one_process(layout):
    """The same with torchao's own compiled steps; ranks share the cache of compiled code, but not their rows."""
    model = LAYOUTS[layout](256)
    weights = train(model, optimizer_of("AdamW8bit", model.parameters()), stance="default")
    assert_same_state(weights, trained_reference("AdamW8bit", stance="default"))


@on_ranks(2)
@pytest.mark.parametrize("offload", [False, True])
def test_cpu_optimizer_steps_quantised_state(offload):
    """CPUOptimizer has the bits of one process too; options that would copy or convert the state are refused."""
    model = wrapped(256, cpu_offload=offload)
    import torchao.optim

    optimizer = CPUOptimizer(model, torchao.optim.AdamW8bit, lr=0.01, weight_decay=0.1)
    assert_same_state(train(model, optimizer), trained_reference("AdamW8bit"))
    with pytest.raises(ValueError, match="AdamW8bit keeps quantised state, which cannot be converted"):
        CPUOptimizer(model, torchao.optim.AdamW8bit, state_dtype=torch.bfloat16)


@on_ranks(2)
@pytest.mark.parametrize("layout", ["blocks", "views of blocks"])
def test_quantised_state_is_saved_rank_by_rank(layout):
    """A state dict of each rank continues training to the bit; saving the state under names raises on all ranks."""
    model = LAYOUTS[layout](256)
    optimizer = optimizer_of("AdamW8bit", model.parameters())
    train(model, optimizer, range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    expected = train(model, optimizer, range(2, 4))
    resumed = LAYOUTS[layout](256)
    resumed.load_state_dict(weights)
    other = optimizer_of("AdamW8bit", resumed.parameters())
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=False))
    assert_same_state(train(resumed, other, range(2, 4)), expected)
    match = r"`exp_avg` of `0.weight`.* is quantised in blocks.*save `optimizer.state_dict\(\)` on each rank"
    with pytest.raises((ValueError, FairshardError), match=match):
        checkpoint.save("nowhere", model, optimizer)
    if layout == "blocks":
        for param in model.parameters():
            whole = optimizer.state[param]["exp_avg"].full_tensor()
            assert whole.shape == param.shape
            assert type(whole) is torch.Tensor
    else:
        with pytest.raises(ValueError, match=match):
            FSDP.optim_state_dict(model, optimizer)
