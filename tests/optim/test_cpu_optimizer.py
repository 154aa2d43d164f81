"""CPUOptimizer behaves like any other optimizer, and raises where it cannot."""

import copy
import functools
import gc
import pickle
import weakref
from unittest import mock

import pytest
import torch
from torch import nn

from fairshard.errors import FairshardError, HeldGradientError, ShardOptimizerError
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.optim import CPUOptimizer, cpu_worker
from fairshard.optim.shard_step import Twin
from fairshard.params.grads import grads_of
from tests.kit import rank_device
from tests.models import mlp, wrap_each
from tests.on_ranks import on_ranks
from tests.reference import randn, sgd

HELD = {"cpu_offload": True, "move_grads_to_cpu": False}


def model_and_twin(**placement):
    """The same wrapped model twice: for CPUOptimizer, and on the compute device for the plain optimizer."""
    return wrap_each(mlp(4, 9, 7, 5), **placement), wrap_each(mlp(4, 9, 7, 5))


def backward(model, step):
    model(randn(3, 4, key=step)).square().sum().backward()


def assert_same_params(one, other):
    for name, value in other.state_dict().items():
        ours, expected = one.state_dict()[name].cpu(), value.cpu()
        if rank_device().type == "cpu":
            assert torch.equal(ours, expected), name
        else:  # the kernels of the device are others
            torch.testing.assert_close(ours, expected)


def train_both(*pairs):
    """Train a model and its twin for three steps, each with its optimizer; they must end equal."""
    for step in range(3):
        for model, optimizer in pairs:
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    (model, _), (twin, _) = pairs
    assert_same_params(model, twin)


@on_ranks(2)
@pytest.mark.parametrize("placement", [{}, {"cpu_offload": True}, {"move_grads_to_cpu": True}, HELD])
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad", "RMSprop", "NAdam"])
def test_any_elementwise_optimizer_gives_its_own_numbers(placement, name):
    """Over any class the result is the plain optimizer's on the same shards; it is fused if the class supports it."""
    optimizer_class = getattr(torch.optim, name)
    fused = {"fused": True} if name in ("AdamW", "Adam", "SGD", "Adagrad") else {}
    model, twin = model_and_twin(**placement)
    optimizer = CPUOptimizer(model, optimizer_class, lr=0.01)
    plain = optimizer_class(twin.parameters(), lr=0.01, **fused)
    train_both((model, optimizer), (twin, plain))
    assert all(group.get("fused", False) == bool(fused) for group in optimizer.param_groups)


@on_ranks(2)
def test_param_groups_schedulers_and_state_dicts_work():
    """Two groups and a scheduler work; state dicts load into a plain optimizer and back into a new CPUOptimizer."""
    model, twin = model_and_twin(cpu_offload=True)

    def groups(one):
        first, *others = one.parameters()
        return [{"params": [first], "lr": 0.05}, {"params": others, "weight_decay": 0.1}]

    ours = CPUOptimizer(model, torch.optim.AdamW, params=groups(model), lr=0.01)
    plain = torch.optim.AdamW(groups(twin), lr=0.01, fused=True)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in (ours, plain)]
    for step in range(4):
        for one, optimizer, scheduler in zip((model, twin), (ours, plain), schedulers, strict=True):
            backward(one, step)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if step == 1:
            state = copy.deepcopy(ours.state_dict())
            assert state["param_groups"] == plain.state_dict()["param_groups"]
            for index, entries in plain.state_dict()["state"].items():
                assert all(torch.equal(state["state"][index][name], value) for name, value in entries.items())
            schedulers[0].optimizer = ours = CPUOptimizer(model, torch.optim.AdamW, params=groups(model), lr=0.7)
            ours.load_state_dict(state)
    assert_same_params(model, twin)


@on_ranks(2)
def test_parameters_outside_of_all_units_are_stepped_too():
    """In a plain module that contains units, the module's own parameters follow the plain optimizer."""

    def build(**placement):
        torch.manual_seed(3)
        first = nn.Linear(4, 4, device=rank_device())
        return nn.Sequential(first, FSDP(nn.Linear(4, 2, device=rank_device()), **placement))

    model, twin = build(cpu_offload=True), build()
    ours = CPUOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, fused=True)
    train_both((model, ours), (twin, plain))


@on_ranks(2)
@pytest.mark.parametrize("placement", [{"cpu_offload": True}, HELD], ids=["offload", "held"])
def test_the_fused_kernel_gets_whole_shards(placement):
    """One call steps all shards that have a ``grad``; shards with fetched gradients get one call each."""
    model, _ = model_and_twin(**placement)
    optimizer = CPUOptimizer(model, torch.optim.AdamW, lr=0.01)
    backward(model, 0)
    sizes = []
    original = torch._fused_adamw_

    def counted(params, *args, **kwargs):
        sizes.append([param.numel() for param in params])
        return original(params, *args, **kwargs)

    with mock.patch.object(torch, "_fused_adamw_", counted):
        optimizer.step()
    shards = [param.numel() for param in model.parameters()]
    assert sizes == ([[numel] for numel in shards] if placement == HELD else [shards])


@on_ranks(2)
def test_units_may_get_their_first_gradients_in_later_steps():
    """Fused SGD with momentum steps units that some batches do not reach, as separate optimizers would."""
    model, twin = model_and_twin(cpu_offload=True)
    ours = CPUOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    plain = [torch.optim.SGD([param], lr=0.1, momentum=0.9, fused=True) for param in twin.parameters()]
    for step, num_layers in enumerate((2, 5, 4)):
        for one, optimizers in ((model, [ours]), (twin, plain)):
            x = randn(3, 4, key=step)
            for layer in one[:num_layers]:
                x = layer(x)
            x.square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert_same_params(model, twin)


@on_ranks(2)
def test_a_failed_step_is_raised_by_step_with_the_name_of_the_unit():
    """`step` raises the worker thread's failure by name; later steps raise too, since only some shards were stepped."""
    model, _ = model_and_twin(**HELD)
    optimizer = CPUOptimizer(model, torch.optim.SGD, lr=0.1)
    backward(model, 0)
    second = list(model.parameters())[1]
    original = Twin.step_one

    def failing(twin, shard, *args):
        if shard is second:
            raise MemoryError("no more of it")
        original(twin, shard, *args)

    with mock.patch.object(Twin, "step_one", failing):
        with pytest.raises(FairshardError, match=r"`2.flat_param_0`.*no more"):
            optimizer.step()
    with pytest.raises(FairshardError, match=r"no more of it.*Load model and optimizer"):
        optimizer.step()


@on_ranks(1)
def test_state_made_at_construction_is_kept():
    """Adagrad's sums start at ``initial_accumulator_value``: they exist before the first step, and are created once."""
    model, twin = model_and_twin(cpu_offload=True)
    settings = {"lr": 0.1, "initial_accumulator_value": 0.5}
    ours = CPUOptimizer(model, torch.optim.Adagrad, **settings)
    plain = torch.optim.Adagrad(twin.parameters(), fused=rank_device().type == "cpu", **settings)  # no other has it
    assert all((ours.state[param]["sum"] == 0.5).all() for param in model.parameters())
    assert not ours._template.state
    for one, optimizer in ((model, ours), (twin, plain)):
        backward(one, 0)
        optimizer.step()
    assert_same_params(model, twin)


@on_ranks(1)
def test_a_dropped_optimizer_frees_its_moments_at_once():
    """Dropping an optimizer frees its moments without the garbage collector."""
    model, _ = model_and_twin(**HELD)
    optimizer = CPUOptimizer(model, torch.optim.AdamW, lr=0.1)
    backward(model, 0)
    optimizer.step()
    moment = weakref.ref(next(iter(optimizer.state.values()))["exp_avg"])
    gc.disable()
    del optimizer
    assert moment() is None
    gc.enable()


@on_ranks(2)
def test_held_gradients_stay_off_the_parameters_and_are_zeroed_with_them():
    """The unit holds the gradient, not ``p.grad``; gradients add up; model and optimizer can zero or drop them."""
    model, twin = model_and_twin(**HELD)
    optimizer = CPUOptimizer(model, torch.optim.SGD, lr=0.1)
    unit = model[0]._unit
    for zero in (optimizer.zero_grad, model.zero_grad):
        for set_to_none in (True, False):
            for step in range(2):
                backward(model, step)
                backward(twin, step)
            (shard,) = unit.flat_params
            assert shard.shard.grad is None
            assert torch.equal(grads_of(unit.flat_params)[shard.shard], twin[0].params[0].grad)
            assert not any(param.grad is not None for param in model.parameters())
            assert model.params_with_grad == list(model.parameters())
            zero(set_to_none)
            twin.zero_grad()
            left = grads_of(unit.flat_params).get(shard.shard)
            assert left is None if set_to_none else not left.any()
            model.zero_grad()


@on_ranks(1, 2)
def test_a_plain_optimizer_that_would_skip_held_gradients_is_refused():
    """A plain optimizer over held gradients raises at its first step, naming the parameter and the cure."""
    model, _ = model_and_twin(**HELD)
    backward(model, 0)
    with pytest.raises(HeldGradientError, match=r"0.flat_param_0.*fairshard.optim.CPUOptimizer"):
        sgd(model).step()


@on_ranks(1)
@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Muon"])
@pytest.mark.parametrize("ours", [True, False])
def test_optimizers_that_need_shapes_or_closures_are_refused(name, ours):
    """Such a class raises with the cure: under CPUOptimizer at construction, as a plain optimizer at the first step."""
    optimizer_class = getattr(torch.optim, name, None) or type(name, (torch.optim.SGD,), {})
    if name == "Muon":  # torch's Muon checks shapes in its constructor
        optimizer_class = type("Muon", (torch.optim.SGD,), {})
    model = FSDP(mlp(4, 2))
    make = functools.partial(CPUOptimizer, model) if ours else _step_once
    with pytest.raises(ShardOptimizerError, match=rf"{name} needs .*`flat_param_0`"):
        make(optimizer_class, params=model.parameters())


def _step_once(optimizer_class, params):
    optimizer_class(params, lr=0.1).step(lambda: torch.zeros(()))


@on_ranks(2)
@pytest.mark.parametrize("ours", [True, False])
def test_low_precision_masters_on_the_cpu_are_refused(ours):
    """A bf16 model with offload raises, because its optimizer would silently keep bf16 moments."""
    model = FSDP(mlp(4, 2).bfloat16(), cpu_offload=True)
    optimizer = CPUOptimizer(model, torch.optim.AdamW) if ours else torch.optim.AdamW(model.parameters())
    model(randn(3, 4).bfloat16()).sum().backward()
    with pytest.raises(ShardOptimizerError, match=r"must step fp32 masters, but `flat_param_0` is torch\.bfloat16"):
        optimizer.step()


@on_ranks(1)
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"clip_grad_norm": 0.0}, "clip_grad_norm"),
        ({"clip_mode": "guess"}, "clip_mode"),
        ({"clip_mode": "speculate"}, 'removed in fairshard 0.7.*Use "wait"'),
        ({"clip_grad_norm": 1.0, "overlap": True}, "`overlap=True` must not be used with `clip_grad_norm`"),
        ({"state_dtype": torch.float16}, "state_dtype"),
        ({"offload_fraction": 1.5}, "offload_fraction"),
        ({"num_threads": 0}, "num_threads"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(settings, words):
    """Invalid or contradictory arguments raise at construction, by name."""
    with pytest.raises(ValueError, match=words):
        CPUOptimizer(FSDP(mlp(4, 2), cpu_offload=True), torch.optim.SGD, lr=0.1, **settings)


@on_ranks(1)
def test_a_model_without_units_is_refused():
    """A plain module without units raises, and so does clipping without an outermost wrapper."""
    with pytest.raises(ValueError, match="must be sharded or contain FullyShardedDataParallel units"):
        CPUOptimizer(mlp(4, 2), torch.optim.SGD, lr=0.1)
    outer = nn.Sequential(FSDP(mlp(4, 2)))
    optimizer = CPUOptimizer(outer, torch.optim.SGD, lr=0.1, clip_grad_norm=1.0)
    backward(outer, 0)
    with pytest.raises(ValueError, match="need the outermost sharded module"):
        optimizer.step()


@on_ranks(1)
def test_an_optimizer_with_counters_in_its_groups_counts_steps_or_is_refused():
    """A class that counts steps in its groups works in one call; shard by shard it would count shards, so it raises."""

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["num_steps"] = group.get("num_steps", 0) + 1
            return super().step(closure)

    model, _ = model_and_twin(cpu_offload=True)
    optimizer = CPUOptimizer(model, Counting, lr=0.1)
    for step in range(2):
        backward(model, step)
        optimizer.step()
    assert optimizer.param_groups[0]["num_steps"] == 2
    model, _ = model_and_twin(**HELD)
    optimizer = CPUOptimizer(model, Counting, lr=0.1)
    backward(model, 0)
    with pytest.raises(FairshardError, match="counters in its param groups"):
        optimizer.step()


@on_ranks(2)
@pytest.mark.parametrize("placement", [{"cpu_offload": True}, {"move_grads_to_cpu": True}, HELD])
def test_a_part_of_the_units_can_stay_on_the_device(placement):
    """``offload_fraction``: the first units keep shard, gradient and state on the device; the numbers are the same."""
    model, twin = model_and_twin(**placement)
    ours = CPUOptimizer(model, torch.optim.AdamW, lr=0.01, offload_fraction=0.5, clip_grad_norm=0.1)
    plain = torch.optim.AdamW(twin.parameters(), lr=0.01, fused=True)
    for step in range(3):
        backward(model, step)
        backward(twin, step)
        twin.clip_grad_norm_(0.1)
        for optimizer in (ours, plain):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_params(model, twin)
    flat_params = [flat_param for one in (model[0], model[2], model[4]) for flat_param in one._unit.flat_params]
    kept = [flat_param.shard_numel for flat_param in flat_params if not flat_param.shows.on_cpu]
    assert 0 < sum(kept) <= 0.5 * sum(flat_param.shard_numel for flat_param in flat_params)
    with pytest.raises(ValueError, match="before the first forward"):
        CPUOptimizer(model, torch.optim.AdamW, offload_fraction=0.5)


@on_ranks(2)
@pytest.mark.parametrize("placement", [{"cpu_offload": True}, HELD], ids=["offload", "held"])
def test_threads_are_set_for_the_step_and_restored(placement):
    """The kernel runs with ``num_threads`` threads, and the training thread keeps its own number."""
    model, _ = model_and_twin(**placement)
    optimizer = CPUOptimizer(model, torch.optim.SGD, lr=0.1, num_threads=2)
    backward(model, 0)
    seen = []
    original = Twin.step

    def looking(twin, groups):
        seen.append(torch.get_num_threads())
        return original(twin, groups)

    before = torch.get_num_threads()
    with mock.patch.object(Twin, "step", looking):
        optimizer.step()
    assert set(seen) == {2} != {before}
    assert torch.get_num_threads() == before


@on_ranks(2)
@pytest.mark.parametrize(("local", "overlap", "threads"), [("2", False, 4), ("2", True, 3), ("16", True, 1)])
def test_threads_are_this_ranks_part_of_the_cpus(local, overlap, threads):
    """The default is CPUs over local ranks, less one with ``overlap``, when the backward runs at the same time."""
    with (
        mock.patch.object(cpu_worker, "visible_cpus", return_value=8),
        mock.patch.dict("os.environ", LOCAL_WORLD_SIZE=local),
    ):
        assert cpu_worker.default_num_threads(overlap) == threads


@on_ranks(1)
def test_it_is_not_pickled_or_copied():
    """Copying or pickling raises with the cure, because a copy would step the original's parameters."""
    optimizer = CPUOptimizer(FSDP(mlp(4, 2)), torch.optim.SGD, lr=0.1)
    for make in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="load_state_dict"):
            make(optimizer)


@on_ranks(2)
def test_a_closure_is_called_before_the_step():
    """As in any torch optimizer, `step` runs the closure first, steps its gradients and returns its loss."""
    model, twin = model_and_twin(cpu_offload=True)
    optimizer = CPUOptimizer(model, torch.optim.SGD, lr=0.1)

    def closure():
        loss = model(randn(3, 4)).square().sum()
        loss.backward()
        return loss

    expected = twin(randn(3, 4)).square().sum()
    expected.backward()
    assert torch.equal(optimizer.step(closure), expected)
    torch.optim.SGD(twin.parameters(), lr=0.1, fused=True).step()
    assert_same_params(model, twin)
