"""``torch.compile`` around sharded modules: the forward of each unit is compiled, the engine is not."""

import contextlib
import shutil
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.nn import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.utils.collectives import counters, reset_counters
from tests.kit import rank_device
from tests.models import Block, tiny, tiny_batch, tiny_loss
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, randn, sgd

NUM_BLOCKS = 3


class Stack(nn.Module):
    """Equal blocks between two layers of its own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def stack(door, **settings):
    torch.manual_seed(1)
    model = Stack().to(rank_device())
    shard = FSDP if door == "wrapper" else fully_shard
    for index, block in enumerate(model.blocks):
        model.blocks[index] = shard(block, **settings)
    return shard(model, **settings)


def counting_backend(backend="eager"):
    """A backend that keeps the graphs that it compiles in ``graphs``."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    return CompileCounterWithBackend(backend)


def num_blocks_in(backend):
    """The number of compiled graphs that compute a block: only blocks call gelu."""
    return sum(any("gelu" in node.name for node in graph.graph.nodes) for graph in backend.graphs)


def train(model, call, num_steps=4, seen=None, shape=(5, 4)):
    """Losses of steps that call ``model`` as ``call``; ``seen()`` is called after each step."""
    optimizer = sgd(model)
    losses = []
    for step in range(num_steps):
        loss = call(randn(*shape, key=step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if seen is not None:
            seen()
    return losses


def compiled(model, backend):
    return torch.compile(model, backend=backend)


def compiled_in_place(model, backend):
    model.compile(backend=backend)
    return model


def inside_another(model, backend):
    return torch.compile(nn.Sequential(model, nn.Tanh()), backend=backend)


def inside_a_function(model, backend):
    return torch.compile(lambda x: model(x).tanh(), backend=backend)


WAYS = {"module": compiled, "in place": compiled_in_place, "outer": inside_another, "function": inside_a_function}


RTOL = 0.0 if torch.__version__ >= "2.9" else 1e-6  # older compilers round the steps of an optimizer in another order


def rounded(losses):
    """``losses``, as a compiled step with its optimizer gives them."""
    return pytest.approx(losses, rel=RTOL, abs=0.0) if RTOL else losses


@on_ranks(2, timeout=180.0)  # the first import of the compiler takes a while
@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
@pytest.mark.parametrize("way", ["module", in_full("in place"), in_full("outer"), "function"])
def test_blocks_are_compiled_once_and_train_alike(door, way):
    """Losses and weights are those of the uncompiled model; equal blocks share one graph; step 3 compiles nothing."""
    twin = stack(door)
    expected = train(twin, (lambda x: twin(x).tanh()) if way in ("outer", "function") else twin)
    model, backend, num_graphs = stack(door), counting_backend("aot_eager"), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call = WAYS[way](model, backend)
        losses = train(model, call, seen=lambda: num_graphs.append(len(backend.graphs)))
    assert losses == expected
    assert_same_state(model.state_dict(), twin.state_dict())
    assert num_blocks_in(backend) == (1 if torch.__version__ >= "2.9" or door == "wrapper" else NUM_BLOCKS)
    assert num_graphs[1:] == num_graphs[1:2] * 3
    ours = [str(one.message) for one in caught if "block.compile()" in str(one.message)]
    assert len(ours) == 1


@on_ranks(2)
@pytest.mark.parametrize("door", ["wrapper", in_full("fully_shard")])
def test_a_compiled_step_does_not_trace_the_engine(door):
    """A whole step, compiled with backward and optimizer, gives the losses of the uncompiled one."""
    twin, model, backend = stack(door), stack(door), counting_backend("aot_eager")
    expected = train(twin, twin)
    optimizer, losses = sgd(model), []

    @torch.compile(backend=backend)
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for number in range(4):
        losses.append(step(randn(5, 4, key=number)).item())
        if number == 1:
            num_graphs = len(backend.graphs)
    assert losses == rounded(expected)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(whole(value), whole(twin.state_dict()[name]), rtol=RTOL, atol=RTOL)
    assert len(backend.graphs) == num_graphs


SETTINGS = {
    "wrapper": {
        "kept": {"reshard_after_forward": False},
        "bf16": {"mixed_precision": True, "compute_dtype": torch.bfloat16},
        "offload": {"cpu_offload": True},
        "not flat": {"flatten_parameters": False},
        "original": {"use_orig_params": True},
    },
    "fully_shard": {
        "kept": {"reshard_after_forward": False},
        "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    },
}


def sharded_tiny(door, checkpointing, settings):
    """Tied, twice used, frozen and uneven parameters, in units inside units."""
    model = tiny(checkpointing)
    model.norm.weight.requires_grad_(False)
    model.second.down.requires_grad_(False)
    shard = FSDP if door == "wrapper" else fully_shard
    for owner, name in ((model.first, "up"), (model, "first"), (model, "second"), (model, "shared")):
        setattr(owner, name, shard(getattr(owner, name), **settings))
    return shard(model, **settings)


def train_tiny(model, call):
    """Two steps of two backwards each, the first without communication, and an evaluation after each step."""
    optimizer, losses = sgd(model), []
    for step in range(2):
        for micro in range(2):
            *inputs, targets = tiny_batch(dist.get_rank(), step, micro)
            with no_sync(model) if micro == 0 else contextlib.nullcontext():
                loss = tiny_loss(call(*inputs), targets)
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            losses.append(tiny_loss(call(*inputs), targets).item())
        model.train()
    return losses


@contextlib.contextmanager
def no_sync(model):
    if isinstance(model, FSDP):
        with model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


IN_SHORT = {("wrapper", "offload"), ("fully_shard", "bf16")}
PAIRS = [(door, setting) for door in SETTINGS for setting in SETTINGS[door]]
MARKS = [pytest.param(*pair, marks=[] if pair in IN_SHORT else pytest.mark.full) for pair in PAIRS]


@on_ranks(in_full(1), 2)
@pytest.mark.parametrize(("door", "setting"), MARKS)
@pytest.mark.parametrize("checkpointing", [in_full(None), "not_reentrant", in_full("reentrant")])
def test_compiled_models_train_alike_with_each_setting(door, setting, checkpointing):
    """Losses and weights are those of the uncompiled model, with accumulation, evaluation and checkpoints."""
    twin, model = (sharded_tiny(door, checkpointing, SETTINGS[door][setting]) for _ in range(2))
    backend = counting_backend()
    assert train_tiny(model, torch.compile(model, backend=backend)) == train_tiny(twin, twin)
    assert_same_state(model.state_dict(), twin.state_dict())
    assert backend.graphs


def fullgraph(way, model):
    if way == "in place":
        model.compile(backend="eager", fullgraph=True)
        return model
    if way == "module":
        return torch.compile(model, backend="eager", fullgraph=True)
    return torch.compile(lambda x: model(x).tanh(), backend="eager", fullgraph=True)


@on_ranks(2)
@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
@pytest.mark.parametrize("way", ["module", in_full("in place"), in_full("function")])
def test_a_whole_graph_is_refused(door, way):
    """``fullgraph=True`` raises on all ranks, names the cure, gathers nothing inside, and the model still works."""
    model, x = stack(door), randn(5, 4)
    with torch.no_grad():
        expected = model(x)
    cure = r"compile the blocks inside units" if torch.__version__ >= "2.9" else "sharded module|fairshard|disable"
    reset_counters()
    with pytest.raises(Exception, match=cure):
        fullgraph(way, model)(x)
    only_root = way == "in place" and door == "fully_shard"  # whose call runs the compiled code
    # Its own gather, and none ahead: the only forward so far was without gradients.
    assert {kind: num for kind, (num, _) in counters().items()} == ({"all_gather": 1} if only_root else {})
    model._compiled_call_impl = None
    with torch.no_grad():
        assert torch.equal(model(x), expected)


@on_ranks(2)
@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
def test_one_graph_serves_all_batch_sizes(door):
    """With ``dynamic=True`` no batch size after the first compiles a block again."""
    twin, model, backend = stack(door), stack(door), counting_backend()
    call = torch.compile(model, backend=backend, dynamic=True)
    for size in (40, 24, 33):  # no size of a parameter: Dynamo takes sizes that are equal in the first call for one
        with torch.no_grad():
            assert torch.equal(call(randn(size, 4, key=size)), twin(randn(size, 4, key=size)))
    assert num_blocks_in(backend) == (1 if torch.__version__ >= "2.9" or door == "wrapper" else NUM_BLOCKS)


@on_ranks(2)
@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
def test_a_model_compiled_before_its_root_is_sharded_trains_alike(door):
    """A compiled module with units inside becomes the root itself; its state dict loads, also with its own names."""
    shard = FSDP if door == "wrapper" else fully_shard
    backend = counting_backend()

    def build(compiles):
        torch.manual_seed(1)
        model = Stack().to(rank_device())
        for index, block in enumerate(model.blocks):
            model.blocks[index] = shard(block)
        return shard(torch.compile(model, backend=backend) if compiles else model)

    twin, model = build(compiles=False), build(compiles=True)
    assert train(model, model) == train(twin, twin)
    assert num_blocks_in(backend) >= 1
    for (name, actual), (other, expected) in zip(model.state_dict().items(), twin.state_dict().items(), strict=True):
        assert name.replace("_orig_mod.", "") == other
        assert torch.equal(whole(actual), whole(expected))


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@on_ranks(2)
@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
def test_state_dicts_of_a_compiled_model_load(door):
    """A compiled model adds torch's prefix to the names, loads what it saved, and the model has plain names."""
    model, other = stack(door), stack(door)
    call, target = (torch.compile(one, backend="eager") for one in (model, other))
    train(model, call, num_steps=1)
    state = call.state_dict()
    assert [name.removeprefix("_orig_mod.") for name in state] == list(model.state_dict()) == list(Stack().state_dict())
    target.load_state_dict(state)
    assert_same_state(other.state_dict(), model.state_dict())


@on_ranks(2)
@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
def test_training_continues_after_an_exception_in_compiled_code(door):
    """A forward that raises inside a compiled unit leaves nothing gathered, and the next steps train alike."""
    twin, model = stack(door), stack(door)
    call = torch.compile(model, backend=counting_backend())
    expected = train(twin, twin)
    with pytest.raises(Exception, match=r"shape|size|dimension"):
        call(randn(5, 7))
    assert train(model, call) == expected


@pytest.mark.full
@on_ranks(2)
@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
def test_a_compiled_step_may_accumulate_and_clip(door):
    """A compiled step with ``no_sync`` and clipping inside gives the losses of the uncompiled one."""

    def losses_of(compiles):
        model = stack(door)
        optimizer = sgd(model)

        def step(x, y):
            with no_sync(model):
                model(x).square().mean().backward()
            loss = model(y).square().mean()
            loss.backward()
            if door == "wrapper":
                model.clip_grad_norm_(0.1)
            else:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = torch.compile(step, backend=counting_backend()) if compiles else step
        return [run(randn(5, 4, key=key), randn(5, 4, key=-key)).item() for key in range(1, 4)]

    assert losses_of(compiles=True) == rounded(losses_of(compiles=False))


@pytest.mark.full
@on_ranks(2, timeout=400.0)
@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
@pytest.mark.parametrize("way", ["module", "in place"])
def test_inductor_compiles_the_blocks(door, way):
    """With inductor, losses and weights agree with the uncompiled model to rounding: kernels sum in another order."""
    if not torch.cuda.is_available() and not shutil.which("g++"):
        pytest.skip("needs g++, with which inductor compiles for the CPU")
    twin, model = stack(door), stack(door)
    torch.compiler.reset()
    losses = train(model, WAYS[way](model, "inductor"))
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(train(twin, twin)), rtol=1e-5, atol=1e-6)
    for actual, expected in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(whole(actual), whole(expected), rtol=1e-4, atol=1e-6)
