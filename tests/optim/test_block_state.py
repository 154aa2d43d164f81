"""torchao's optimizers, which quantise their state in blocks, have the bits of one process where no block is cut."""

import io
import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from fairshard import checkpoint
from fairshard.checks.block_state import rows_for_blocks
from fairshard.errors import FairshardError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import RowBlocks, fully_shard
from fairshard.optim import CPUOptimizer
from tests.kit import rank_device
from tests.on_ranks import in_full, on_ranks
from tests.reference import Reference, assert_same_state, randn
from tests.torch_gaps import needs_torchao

pytestmark = needs_torchao

NAMES = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]
BLOCK = {"AdamW8bit": 256, "AdamW4bit": 128, "AdamWFp8": 256}
MESSAGE = r"quantises its state in blocks of \d+ elements"


def plain_model():
    """Matrices that are quantised, one that is not (5,400 elements, no multiple of a block), and small vectors."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(60, 192), nn.Tanh(), nn.Linear(192, 64), nn.Linear(64, 90), nn.Linear(90, 60))


def placed(block_numel):
    """Blocks that an optimizer with blocks of ``block_numel`` elements needs."""
    return lambda param: RowBlocks(rows_for_blocks(param.shape, block_numel))


def wrapped(block_numel, **settings):
    return FSDP(plain_model().to(rank_device()), use_orig_params=True, placement_fn=placed(block_numel), **settings)


def columns(param):
    return Shard(1) if param.dim() > 1 and not param.shape[1] % dist.get_world_size() else None


LAYOUTS = {
    "blocks": lambda block: fully_shard(plain_model().to(rank_device()), shard_placement_fn=placed(block)),
    "views of blocks": wrapped,
    "rows": lambda block: fully_shard(plain_model().to(rank_device())),
    "columns": lambda block: fully_shard(plain_model().to(rank_device()), shard_placement_fn=columns),
    "single rows": lambda block: fully_shard(plain_model().to(rank_device()), shard_placement_fn=lambda _: RowBlocks()),
    "views": lambda block: FSDP(plain_model().to(rank_device()), use_orig_params=True),
    "flat": lambda block: FSDP(plain_model().to(rank_device())),
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
    """Placed by the rows that their blocks need, parameters are trained as in one process, without a warning."""
    model = LAYOUTS[layout](BLOCK[name])
    optimizer = optimizer_of(name, model.parameters())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", MESSAGE)
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


@on_ranks(in_full(2), 3)
@pytest.mark.parametrize("layout", [in_full("rows"), "columns", in_full("single rows"), "views", "flat"])
def test_cut_blocks_are_warned_of_with_the_cure(layout):
    """The warning names parameters of which blocks are cut, and rows with which each has the bits of one process."""
    model = LAYOUTS[layout](256)
    optimizer = optimizer_of("AdamW8bit", model.parameters())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        weights = train(model, optimizer)
    texts = [str(each.message) for each in caught if re.search(MESSAGE, str(each.message))]
    expected = trained_reference("AdamW8bit")
    if all(torch.equal(weights[name], expected[name]) for name in expected):
        assert not texts
        return
    (text,) = texts
    (place,) = [each for each in caught if str(each.message) == text]
    assert place.filename == __file__
    cures = dict(re.findall(r"`([\w.]+)` .*?RowBlocks\(rows=(\d+)\)", text))
    shapes = {name: param.shape for name, param in plain_model().named_parameters()}
    assert cures
    for name, rows in cures.items():
        assert int(rows) == rows_for_blocks(shapes[name], 256)


@on_ranks(2)
def test_even_rows_that_cut_no_block_are_not_warned_of():
    """The default rows of a layer that ranks cut between blocks have the bits of one process, and no warning."""
    layer = fully_shard(nn.Linear(64, 128, device=rank_device()))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", MESSAGE)
        for optimizer in (optimizer_of("AdamW8bit", layer.parameters()), torch.optim.AdamW(layer.parameters())):
            layer(randn(2, 64)).sum().backward()
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()


@pytest.mark.parametrize("block", [128, 256])
@pytest.mark.parametrize(
    "shape", [(192, 60), (64, 192), (90, 60), (4096,), (5000,), (8192,), (3, 64, 64), (1, 4096), (1031, 256), (70, 3)]
)
def test_runs_of_the_rows_that_blocks_need_are_quantised_like_the_whole(shape, block):
    """Any run of such blocks of rows is quantised if the whole parameter is, and begins and ends between blocks."""

    def is_quantised(numel):
        return numel >= 4096 and numel % block == 0

    numel, row = torch.Size(shape).numel(), torch.Size(shape[1:]).numel()
    rows = rows_for_blocks(shape, block)
    ends = [*range(0, shape[0], rows), shape[0]]
    for index, start in enumerate(ends):
        for end in ends[index + 1 :]:
            assert is_quantised((end - start) * row) == is_quantised(numel)
            assert not is_quantised(numel) or start * row % block == 0 == end * row % block


@on_ranks(2)
@pytest.mark.parametrize("offload", [False, True])
def test_cpu_optimizer_steps_quantised_state(offload):
    """CPUOptimizer has the bits of one process too; options that would copy or convert the state are refused."""
    model = wrapped(256, cpu_offload=offload)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", MESSAGE)
        import torchao.optim

        optimizer = CPUOptimizer(model, torchao.optim.AdamW8bit, lr=0.01, weight_decay=0.1)
        assert_same_state(train(model, optimizer), trained_reference("AdamW8bit"))
    with pytest.raises(ValueError, match="AdamW8bit keeps quantised state, which cannot be converted"):
        CPUOptimizer(model, torchao.optim.AdamW8bit, state_dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=MESSAGE):
        CPUOptimizer(FSDP(plain_model().to(rank_device()), cpu_offload=offload), torchao.optim.AdamW8bit)


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
