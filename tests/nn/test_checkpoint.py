"""``checkpoint_wrapper`` changes what is kept for the backward, but no number and no name."""

import contextlib
import copy
import pickle
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import checkpoint, checkpoint_wrapper, disable_checkpointing
from tests.models import Block, mlp, tiny, tiny_batch, tiny_loss, wrap_tiny
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, average_grads_, randn, sgd, train_alike

offloaded_or_not = pytest.mark.parametrize("offload_to_cpu", [False, True])


def same_gradients(plain, checkpointed, call, num_steps=2):
    """Losses, gradients and buffers of both modules must be equal, bit for bit, over some steps."""
    for step in range(num_steps):
        results = []
        for model in (plain, checkpointed):
            torch.manual_seed(step)
            model.zero_grad()
            x = torch.randn(6, 4, requires_grad=True)
            loss = call(model, x)
            loss.backward()
            results.append((loss, x.grad, [param.grad for param in model.parameters()], list(model.buffers())))
        for expected, actual in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def block(*layers):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *layers, nn.ReLU(), nn.Linear(8, 4))


@offloaded_or_not
@pytest.mark.parametrize(
    "layer", [nn.Dropout(0.5), nn.BatchNorm1d(8), nn.BatchNorm1d(8, momentum=None)], ids=["dropout", "norm", "average"]
)
@pytest.mark.parametrize("training", [True, False])
def test_gradients_and_buffers_are_the_plain_modules(layer, training, offload_to_cpu):
    """The same random numbers are drawn again; statistics and their count are updated once."""
    plain = block(layer).train(training)
    checkpointed = checkpoint_wrapper(copy.deepcopy(plain), offload_to_cpu)
    same_gradients(plain, checkpointed, lambda model, x: model(x).square().sum())


def test_instance_norm_keeps_statistics_too():
    """InstanceNorm, which writes its statistics even if told not to track them, updates them once."""
    for training in (True, False):
        plain = nn.Sequential(nn.Conv1d(2, 4, 1), nn.InstanceNorm1d(4, track_running_stats=True)).train(training)
        checkpointed = checkpoint_wrapper(copy.deepcopy(plain))
        same_gradients(plain, checkpointed, lambda model, x: model(x.view(3, 2, 4)).square().sum())


def test_activations_are_not_kept():
    """Between forward and backward only the inputs are kept; the forward runs twice."""
    kept, calls = [], []
    model = checkpoint_wrapper(block(nn.Dropout(0.5)))
    model[0].register_forward_hook(lambda *_: calls.append(1))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        loss = model(torch.randn(6, 4)).sum()
    assert set(kept) <= {0, 6 * 4}
    assert len(calls) == 1
    loss.backward()
    assert len(calls) == 2


@dataclass
class Pair:
    first: torch.Tensor
    second: torch.Tensor


class Nested(nn.Module):
    """Takes nested inputs, and checks whether two of them are the same object."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, pair, items, *, scale, mask=None, offsets=None):
        x = self.a(pair.first) * items["x"][0] + self.b(pair.second)
        if pair.first is pair.second:  # attention does this, and then saves other tensors
            x = x.exp().log()
        return {"out": [F.dropout(x, scale) if mask is None else x * mask], "same": offsets}


@offloaded_or_not
@pytest.mark.parametrize("same", [False, True])
def test_nested_arguments(same, offload_to_cpu):
    """Tensors in dataclasses, dictionaries, lists and keywords are restored, and one object stays one."""

    def call(model, x):
        y = x if same else x + 1
        out = model(Pair(x, y), {"x": [x * 2, None]}, scale=0.5, offsets="text")
        assert out["same"] == "text"
        return out["out"][0].square().sum()

    plain = Nested()
    same_gradients(plain, checkpoint_wrapper(copy.deepcopy(plain), offload_to_cpu), call)


@offloaded_or_not
def test_packed_sequences(offload_to_cpu):
    """An LSTM over a PackedSequence has the gradients of the plain module."""

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(4, 5)

        def forward(self, packed):
            return self.lstm(packed)[0].data

    plain = Packed()
    checkpointed = checkpoint_wrapper(copy.deepcopy(plain), offload_to_cpu)
    same_gradients(plain, checkpointed, lambda model, x: model(pack_padded_sequence(x.view(3, 2, 4), [3, 2])).sum())


@offloaded_or_not
def test_checkpoints_in_checkpoints(offload_to_cpu):
    """A checkpointed module inside another works, with statistics in both."""
    plain = nn.Sequential(block(nn.BatchNorm1d(8)), nn.BatchNorm1d(4), block(nn.Dropout(0.5)))
    checkpointed = copy.deepcopy(plain)
    checkpoint_wrapper(checkpointed[0], offload_to_cpu)
    checkpoint_wrapper(checkpointed, offload_to_cpu)
    same_gradients(plain, checkpointed, lambda model, x: model(x).square().sum())


def test_a_backward_that_keeps_the_graph():
    """The recomputation may run twice, for a graph that is kept."""
    model = checkpoint_wrapper(block(nn.BatchNorm1d(8)))
    loss = model(torch.randn(6, 4)).square().sum()
    loss.backward(retain_graph=True)
    once = [param.grad.clone() for param in model.parameters()]
    loss.backward()
    assert all(torch.equal(param.grad, grad + grad) for param, grad in zip(model.parameters(), once, strict=True))
    assert model[1].num_batches_tracked == 1


def test_without_grad_it_is_a_plain_call():
    """Without grad nothing is kept, and nothing runs twice."""
    plain = block(nn.BatchNorm1d(8))
    checkpointed = checkpoint_wrapper(copy.deepcopy(plain))
    x = torch.randn(6, 4)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(checkpointed(x), plain(x))
    assert_same_state(checkpointed.state_dict(), plain.state_dict())


def test_an_input_changed_in_place_is_noticed():
    """An input changed in place raises, because gradients recomputed from it would be wrong."""
    x = torch.randn(6, 4)
    loss = checkpoint_wrapper(block())(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autocast_is_the_same_both_times():
    """The recomputation runs in the precision of the forward."""
    plain = block()
    checkpointed = checkpoint_wrapper(copy.deepcopy(plain))

    def call(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
        return out.float().square().sum()

    same_gradients(plain, checkpointed, call)


def test_it_is_the_module_itself():
    """`checkpoint_wrapper` returns the same object, as a subclass of its class, with the same names."""
    model = mlp(4, 9, 5)
    names = [list(dict(f())) for f in (model.named_parameters, model.named_modules, model.state_dict)]
    assert checkpoint_wrapper(model, offload_to_cpu=True) is model
    assert isinstance(model, nn.Sequential)
    assert [list(dict(f())) for f in (model.named_parameters, model.named_modules, model.state_dict)] == names
    assert checkpoint_wrapper(model) is model  # again, with the other option
    assert isinstance(model, nn.Sequential)
    assert model._offloads_inputs is False
    assert type(model).__mro__.count(checkpoint._Checkpointed) == 1


@pytest.mark.parametrize("copied_by", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_checkpointed_too(copied_by):
    """deepcopy and pickle give a checkpointed module that computes the same."""
    model = checkpoint_wrapper(block(nn.BatchNorm1d(8)), offload_to_cpu=True)
    copied = copied_by(model)
    assert type(copied) is type(model)
    same_gradients(model, copied, lambda model, x: model(x).square().sum())
    assert copied[0].weight is not model[0].weight


def test_what_cannot_be_checkpointed_is_refused():
    """Anything but a module raises, and so does a module whose ``forward`` is not a method."""
    with pytest.raises(TypeError, match=r"must be an nn\.Module, but is function"):
        checkpoint_wrapper(lambda x: x)
    model = nn.Linear(4, 4)
    model.forward = lambda x: x
    with pytest.raises(ValueError, match=r"`forward` must be a method .* this Linear has it"):
        checkpoint_wrapper(model)


WRAPS = {
    "outside of units": lambda layer, offload: checkpoint_wrapper(FSDP(layer), offload),
    "inside of units": lambda layer, offload: FSDP(checkpoint_wrapper(layer, offload)),
    "both": lambda layer, offload: checkpoint_wrapper(FSDP(checkpoint_wrapper(layer, offload)), offload),
}


@pytest.mark.pairs
@on_ranks(1, 2)
@offloaded_or_not
@pytest.mark.parametrize("where", WRAPS)
def test_around_and_inside_of_units(where, offload_to_cpu):
    """With checkpoints around and inside of units, training has the plain module's numbers and names."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)), nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))

    def wrap(model):
        for index, layer in enumerate(model):
            model[index] = WRAPS[where](layer, offload_to_cpu)
        return FSDP(model)

    wrapped = train_alike(model, wrap, lambda model, key: model(randn(5, 6, key=key)).square().mean())
    copied = copy.deepcopy(wrapped)
    assert_same_state(copied.state_dict(), wrapped.state_dict())
    assert [type(part) for part in copied.modules()] == [type(part) for part in wrapped.modules()]


def losses_of(wrapped):
    """Losses and norms of some steps with accumulation and clipping."""
    optimizer, losses = sgd(wrapped), []
    for step in range(3):
        *inputs, targets = tiny_batch(torch.distributed.get_rank(), step)
        with wrapped.no_sync():
            tiny_loss(wrapped(*inputs), targets).backward()
        loss = tiny_loss(wrapped(*inputs), targets)
        loss.backward()
        losses.append((loss.item(), wrapped.clip_grad_norm_(0.1).item()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@on_ranks(2)
@pytest.mark.parametrize("kwargs", [{"mixed_precision": True}, {"cpu_offload": True}, {"flatten_parameters": False}])
def test_with_options_of_units(kwargs):
    """A checkpoint around everything, and one inside, change no bit of a training with accumulation and clipping."""
    losses = []
    for checkpointed in (False, True):
        model = tiny()
        if checkpointed:
            checkpoint_wrapper(model.first, offload_to_cpu=True)
        wrapped = wrap_tiny(model, **kwargs)
        if checkpointed:
            checkpoint_wrapper(model.second)
            checkpoint_wrapper(wrapped)
        losses += losses_of(wrapped)
        state = wrapped.state_dict()
        assert list(state) == list(tiny().state_dict())
    assert losses[:3] == losses[3:]


@on_ranks(2)
def test_frozen_units():
    """Frozen parameters in a checkpointed unit get no gradient, and their inputs get theirs."""
    plain = mlp(4, 9, 7, 5)
    plain[2].requires_grad_(False)
    wrapped = copy.deepcopy(plain)
    for index in (0, 2, 4):
        wrapped[index] = checkpoint_wrapper(FSDP(wrapped[index]))
    wrapped = FSDP(wrapped)
    x = randn(3, 4)
    plain(x).sum().backward()
    wrapped(x).sum().backward()
    average_grads_(plain.parameters())
    with FSDP.summon_full_params(wrapped, with_grads=True):
        for expected, actual in zip(plain.parameters(), wrapped.parameters(), strict=True):
            assert (expected.grad is None) == (actual.grad is None)
            assert expected.grad is None or torch.equal(actual.grad, expected.grad)


def test_random_numbers_of_a_gpu_that_inputs_are_moved_to_are_the_same_both_times():
    """Inputs from the host may be moved to a GPU, whose random state must be saved too."""
    block = checkpoint_wrapper(nn.Linear(2, 2))
    for gpus in ([], ["meta"]):
        with (
            mock.patch.object(checkpoint, "accelerators_in_use", return_value=gpus),
            mock.patch.object(checkpoint, "checkpoint") as called,
        ):
            block(torch.ones(2))
        assert [tensor.device.type for tensor in called.call_args.args[1:]] == ["cpu", *gpus]


class Counting(nn.Linear):
    """Counts its forwards, recomputations included."""

    num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        return torch.tanh(super().forward(x))


def test_checkpointing_may_be_disabled():
    """Inside ``disable_checkpointing`` nothing is recomputed, also after an exception and in nested blocks."""
    inner = checkpoint_wrapper(Counting(4, 4))
    outer = checkpoint_wrapper(nn.Sequential(inner, nn.ReLU()))

    def calls(*contexts):
        inner.num_calls = 0
        with contextlib.ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            loss = outer(torch.ones(2, 4)).sum()
        loss.backward()
        return inner.num_calls

    as_before = calls()
    assert as_before > 2, "both run again"
    assert calls(disable_checkpointing()) == calls(disable_checkpointing(), disable_checkpointing()) == 1
    with pytest.raises(KeyError), disable_checkpointing(), disable_checkpointing():
        raise KeyError
    assert calls() == as_before


def test_a_backward_where_checkpointing_is_disabled_recomputes_as_the_forward_ran():
    """The block counts where the forward runs: a backward inside of it recomputes nested modules as outside."""
    inner = checkpoint_wrapper(Counting(4, 4))
    outer = checkpoint_wrapper(nn.Sequential(inner, nn.ReLU()))
    counts = []
    for context in (contextlib.nullcontext(), disable_checkpointing()):
        inner.num_calls = 0
        loss = outer(torch.ones(2, 4)).sum()
        with context:
            loss.backward()
            assert checkpoint._is_off.get() == isinstance(context, type(disable_checkpointing()))
        counts.append(inner.num_calls)
    assert counts[0] == counts[1]


@on_ranks(2)
def test_units_train_alike_with_checkpointing_disabled():
    """Units around and inside of checkpointed modules compute the same numbers with and without checkpointing."""

    def gradients(context):
        model = mlp(4, 9, 5)
        model[0] = checkpoint_wrapper(FSDP(model[0]))
        wrapped = FSDP(checkpoint_wrapper(model))
        for step in range(2):
            with context():
                loss = wrapped(randn(3, 4, key=step)).square().sum()
            loss.backward()
        return [param.grad for param in wrapped.parameters()]

    pairs = zip(gradients(disable_checkpointing), gradients(contextlib.nullcontext), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


class Noisy(nn.Module):
    """A module of a user's class, with statistics and random numbers: the tracer skips frames of torch's classes."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))

    def forward(self, x):
        return self.layers(x) + x


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_around_a_checkpoint(backend):
    """Results equal those without the compiler; only the module's own forward is compiled, once."""
    from torch._dynamo.testing import CompileCounterWithBackend  # slow to import

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    torch.manual_seed(0)
    plain = Noisy()
    block = checkpoint_wrapper(copy.deepcopy(plain))
    compiled = torch.compile(block, backend=counter)
    for step in range(3):
        losses = []
        for model in (plain, compiled):
            torch.manual_seed(step)
            x = torch.randn(6, 4, requires_grad=True)
            loss = model(x).square().sum()
            loss.backward()
            losses.append((loss.item(), x.grad))
        assert losses[0][0] == losses[1][0]
        assert torch.equal(losses[0][1], losses[1][1])
    for (_, one), (_, other) in zip(plain.named_parameters(), block.named_parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for one, other in zip(plain.buffers(), block.buffers(), strict=True):
        assert torch.equal(one, other)
    assert counter.frame_count == 1
