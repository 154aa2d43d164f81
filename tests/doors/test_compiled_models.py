"""``torch.compile`` around sharded modules, and inside of them: units are compiled, the engine is not."""

import copy
import shutil
import warnings

import pytest
import torch
from torch import nn

from fairshard.utils.collectives import counters, reset_counters
from tests.kit import rank_device
from tests.kit.doors import DOORS, SETTINGS, both_apis, full, inside, no_sync, shard, sharding, whole
from tests.models import Block, loss_of_tiny, mlp, tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state, randn, run_steps, sgd

pytestmark = pytest.mark.behaviour("compiled models")

NUM_BLOCKS = 3
BLOCKS = [f"blocks.{index}" for index in range(NUM_BLOCKS)]


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


def plain_stack():
    torch.manual_seed(1)
    return Stack().to(rank_device())


def stack(door):
    return shard(plain_stack(), door, *BLOCKS)


def counting_backend(backend="eager"):
    """A backend that keeps the graphs that it compiles in ``graphs``."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()  # what other tests have compiled on this rank counts against torch's limit
    return CompileCounterWithBackend(backend)


def num_blocks_in(backend):
    """The number of compiled graphs that compute a block: only blocks call gelu."""
    return sum(any("gelu" in node.name for node in graph.graph.nodes) for graph in backend.graphs)


def num_different_blocks(door):
    """How many graphs equal blocks need."""
    return 1 if torch.__version__ >= "2.9" or door == "flat" else NUM_BLOCKS


def train(model, call, **how):
    """Losses of steps that call ``model`` as ``call``."""
    return run_steps(model, lambda _, key: call(randn(5, 4, key=key)).square().mean(), 4, **how)


def compiled(model, backend, **how):
    return torch.compile(model, backend=backend, **how)


def compiled_in_place(model, backend, **how):
    model.compile(backend=backend, **how)
    return model


def inside_another(model, backend):
    return torch.compile(nn.Sequential(model, nn.Tanh()), backend=backend)


def inside_a_function(model, backend, **how):
    return torch.compile(lambda x: model(x).tanh(), backend=backend, **how)


WAYS = {"module": compiled, "in place": compiled_in_place, "outer": inside_another, "function": inside_a_function}

RTOL = 0.0 if torch.__version__ >= "2.9" else 1e-6  # older compilers round the steps of an optimizer in another order


@on_ranks(2, timeout=180.0)  # the first import of the compiler takes a while
@both_apis
@pytest.mark.parametrize("way", ["module", in_full("in place"), in_full("outer"), "function"])
def test_blocks_are_compiled_once_and_train_alike(door, way):
    """Losses and weights are those of the uncompiled model; equal blocks share one graph; step 3 compiles nothing."""
    twin = stack(door)
    expected = train(twin, (lambda x: twin(x).tanh()) if way in ("outer", "function") else twin)
    model, backend, num_graphs = stack(door), counting_backend("aot_eager"), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = train(model, WAYS[way](model, backend), after=lambda: num_graphs.append(len(backend.graphs)))
    assert losses == expected
    assert_same_state(model.state_dict(), twin.state_dict())
    assert num_blocks_in(backend) == num_different_blocks(door)
    assert num_graphs[1:] == num_graphs[1:2] * 3
    assert sum("block.compile()" in str(one.message) for one in caught) == 1


@on_ranks(2)
@pytest.mark.parametrize("door", ["flat", in_full("fully_shard")])
@pytest.mark.parametrize("accumulates", [False, in_full(True)])
def test_a_compiled_step_does_not_trace_the_engine(door, accumulates):
    """A step, compiled with backwards, ``no_sync``, clipping and optimizer, gives the losses of the uncompiled one."""

    def losses_of(compiles):
        model, backend = stack(door), counting_backend("aot_eager")
        optimizer, losses = sgd(model), []
        clip = model.clip_grad_norm_ if door == "flat" else lambda norm: nn.utils.clip_grad_norm_(params, norm)
        params = list(model.parameters())

        def step(x, y):
            if accumulates:
                with no_sync(model):
                    model(x).square().mean().backward()
            loss = model(y).square().mean()
            loss.backward()
            if accumulates:
                clip(0.1)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = torch.compile(step, backend=backend) if compiles else step
        for key in range(1, 5):
            losses.append(run(randn(5, 4, key=key), randn(5, 4, key=-key)).item())
            if key == 2:
                num_graphs = len(backend.graphs)
        assert accumulates or len(backend.graphs) == num_graphs
        return torch.tensor(losses)

    torch.testing.assert_close(losses_of(True), losses_of(False), rtol=RTOL, atol=0.0)


def sharded_tiny(door, checkpointing, setting):
    """Tied, twice used, frozen and uneven parameters, in units inside units."""
    model = tiny(checkpointing)
    model.norm.weight.requires_grad_(False)
    model.second.down.requires_grad_(False)
    return shard(model, door, "first.up", "first", "second", "shared", setting=setting)


IN_SHORT = {("flat", "offload"), ("fully_shard", "bf16")}
PAIRS = [(door, setting) for door in DOORS for setting in SETTINGS]


@on_ranks(in_full(1), 2)
@pytest.mark.parametrize(
    ("door", "setting"), [pytest.param(*pair, marks=[] if pair in IN_SHORT else pytest.mark.full) for pair in PAIRS]
)
@pytest.mark.parametrize("checkpointing", [in_full(None), "not_reentrant", in_full("reentrant")])
def test_compiled_models_train_alike_with_each_setting(door, setting, checkpointing):
    """Losses and weights are those of the uncompiled model, with accumulation, evaluation and checkpoints."""
    found, backend = [], counting_backend()
    for compiles in (True, False):
        model = sharded_tiny(door, checkpointing, setting)
        call = torch.compile(model, backend=backend) if compiles else model
        losses = []

        def evaluate(model=model, call=call, losses=losses):
            model.eval()
            with torch.no_grad():
                losses.append(loss_of_tiny(call, ()).item())
            model.train()

        losses += run_steps(model, lambda _, key, call=call: loss_of_tiny(call, key), 2, 2, after=evaluate)
        found.append((losses, whole(model)))
    assert found[0][0] == found[1][0]
    assert_same_state(found[0][1], found[1][1])
    assert backend.graphs


@on_ranks(2)
@both_apis
@pytest.mark.parametrize("way", ["module", in_full("in place"), in_full("function")])
def test_a_whole_graph_is_refused(door, way):
    """``fullgraph=True`` raises on all ranks, names the cure, gathers nothing inside, and the model still works."""
    model, x = stack(door), randn(5, 4)
    with torch.no_grad():
        expected = model(x)
    cure = r"compile the blocks inside units" if torch.__version__ >= "2.9" else "sharded module|fairshard|disable"
    reset_counters()
    with pytest.raises(Exception, match=cure):
        WAYS[way](model, "eager", fullgraph=True)(x)
    only_root = way == "in place" and door == "fully_shard"  # whose call runs the compiled code
    # Its own gather, and none ahead: the only forward so far was without gradients.
    assert {kind: num for kind, (num, _) in counters().items()} == ({"all_gather": 1} if only_root else {})
    model._compiled_call_impl = None
    with torch.no_grad():
        assert torch.equal(model(x), expected)


@on_ranks(2)
@both_apis
def test_one_graph_serves_all_batch_sizes(door):
    """With ``dynamic=True`` no batch size after the first compiles a block again."""
    twin, model, backend = stack(door), stack(door), counting_backend()
    call = torch.compile(model, backend=backend, dynamic=True)
    for size in (40, 24, 33):  # no size of a parameter: Dynamo takes sizes that are equal in the first call for one
        with torch.no_grad():
            assert torch.equal(call(randn(size, 4, key=size)), twin(randn(size, 4, key=size)))
    assert num_blocks_in(backend) == num_different_blocks(door)


@on_ranks(2)
@both_apis
def test_state_dicts_of_a_compiled_model_load(door):
    """A compiled model adds torch's prefix to the names, also as the root; it loads what it saved; the model has none.

    A module that was compiled before it became the root trains alike.
    """
    one, backend = sharding(door), counting_backend()
    within = plain_stack()
    for name in BLOCKS:
        within.set_submodule(name, one(within.get_submodule(name)))
    root, twin, other = one(torch.compile(within, backend=backend)), stack(door), stack(door)
    assert train(root, root) == train(twin, twin)
    assert num_blocks_in(backend) >= 1
    own = {name.replace("_orig_mod.", ""): value for name, value in whole(root).items()}
    assert_same_state(own, whole(twin))
    call, target = (torch.compile(model, backend="eager") for model in (twin, other))
    state = call.state_dict()
    assert [name.removeprefix("_orig_mod.") for name in state] == list(twin.state_dict()) == list(Stack().state_dict())
    target.load_state_dict(state)
    assert_same_state(other.state_dict(), twin.state_dict())


@on_ranks(2)
@both_apis
def test_training_continues_after_an_exception_in_compiled_code(door):
    """A forward that raises inside a compiled unit leaves nothing gathered, and the next steps train alike."""
    twin, model = stack(door), stack(door)
    call = torch.compile(model, backend=counting_backend())
    expected = train(twin, twin)
    with pytest.raises(Exception, match=r"shape|size|dimension"):
        call(randn(5, 7))
    assert train(model, call) == expected


@pytest.mark.full
@on_ranks(2, timeout=400.0)
@both_apis
@pytest.mark.parametrize("way", ["module", "in place"])
def test_inductor_compiles_the_blocks(door, way):
    """With inductor, losses and weights agree with the uncompiled model to rounding: kernels sum in another order."""
    if not torch.cuda.is_available() and not shutil.which("g++"):
        pytest.skip("needs g++, with which inductor compiles for the CPU")
    twin, model = stack(door), stack(door)
    torch.compiler.reset()
    losses = train(model, WAYS[way](model, "inductor"))
    torch.testing.assert_close(losses, train(twin, twin), rtol=1e-5, atol=1e-6)
    for actual, expected in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(full(actual), full(expected), rtol=1e-4, atol=1e-6)


# ---- blocks that are compiled themselves


def compiled_before(block, one, backend):
    return one(torch.compile(block, backend=backend, fullgraph=True))


def compiled_in_place_before(block, one, backend):
    block.compile(backend=backend, fullgraph=True)
    return one(block)


def compiled_in_place_after(block, one, backend):
    one(block).compile(backend=backend, fullgraph=True)
    return block


@on_ranks(2)
@pytest.mark.parametrize(
    ("compiles", "door", "setting"),
    [
        (compiled_before, "flat", "plain"),
        (compiled_before, "orig", "bf16"),
        (compiled_before, "fully_shard", "plain"),
        (compiled_in_place_before, "fully_shard", "plain"),
        (compiled_in_place_after, "fully_shard", "plain"),
    ],
)
def test_compiled_blocks_train_as_uncompiled_ones(compiles, door, setting):
    """Blocks train alike whether compiled before sharding, in place before sharding, or in place after it."""
    one, backend = sharding(door, setting), counting_backend("aot_eager")

    def build(compiles):
        model = mlp(4, 5, 4)
        for index in (0, 2):
            model[index] = compiles(model[index], one, backend)
        return one(model)

    model, twin = build(compiles), build(lambda block, one, backend: one(block))
    assert run_steps(model, loss_of) == run_steps(twin, loss_of)
    own = whole(model)
    assert door == "fully_shard" or "_orig_mod" not in str(list(own))
    assert_same_state({name.replace("_orig_mod.", ""): value for name, value in own.items()}, whole(twin))


def loss_of(model, key):
    """The sum of squares in fp32."""
    return model(randn(3, 4, key=key)).float().square().sum()


@on_ranks(2)
@pytest.mark.parametrize("setting", ["plain", "bf16"])
def test_no_graph_break_inside_a_block(setting):
    """Dynamo sees one graph and no break in a gathered block, and compiles a block once for all steps."""
    model = shard(plain_stack(), "orig", *BLOCKS, setting=setting)
    from torch._dynamo.testing import CompileCounter  # slow to import

    torch.compiler.reset()
    counted, explained = CompileCounter(), []
    first, second = (inside(inside(model).blocks[index]) for index in (0, 1))
    first.forward = torch.compile(copy.copy(first.forward), backend=counted, fullgraph=True)

    def explain(module, args):
        if not explained:
            explained.append(None)
            explained[0] = torch._dynamo.explain(module.forward)(*args)

    train(model, model)
    assert counted.frame_count == 1
    second.register_forward_pre_hook(explain)
    model(randn(5, 4))
    assert (explained[0].graph_count, explained[0].graph_break_count) == (1, 0)
