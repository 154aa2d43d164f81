"""``fairshard.optim.Muon`` over shards has the bits of ``torch.optim.Muon`` over whole matrices."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.nn import fully_shard
from fairshard.optim import CPUOptimizer, Muon, ShardedGradScaler
from fairshard.utils.collectives import counters, reset_counters
from tests.extras.muon.mixture import (
    LAYOUTS,
    OPTIONS,
    Experts,
    Mixture,
    PlainMuon,
    backward,
    batch,
    full,
    in_dtype,
    muon_of,
    train,
    trained_reference,
)
from tests.kit import rank_device
from tests.on_ranks import in_full, on_ranks
from tests.reference import Reference, assert_same_state, randn
from tests.torch_gaps import needs_muon

FEW = ["rows", "flat", "views held"]
ON_FOUR = ("rows hybrid", "owned hybrid", "hybrid")


@needs_muon
@on_ranks(1, in_full(2), 3)
@pytest.mark.parametrize("layout", [name if name in FEW else in_full(name) for name in LAYOUTS if name not in ON_FOUR])
def test_every_layout_has_torchs_bits(layout):
    """Three steps: matrices, experts and all others have the bits of torch's Muon and AdamW in one process."""
    model, _ = train(layout)
    assert_same_state(full(model.state_dict()), trained_reference(layout))


@needs_muon
@on_ranks(2)
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in (*FEW, *ON_FOUR)])
def test_more_layouts_have_torchs_bits(layout):
    """The same on two ranks, where dimensions other than the first can be cut too."""
    model, _ = train(layout)
    assert_same_state(full(model.state_dict()), trained_reference(layout))


@needs_muon
@on_ranks(4)
@pytest.mark.parametrize("layout", ON_FOUR)
def test_replicas_step_alike(layout):
    """Two replicas, each cut in two, are equal to the bit, and close to torch's.

    Gradients add in another order than the reference's, and bf16 rounds at 2**-8 what Newton-Schulz is given.
    """
    model, _ = train(layout)
    state = full(model.state_dict())
    assert_same_state(state, trained_reference(layout), rtol=1e-2, atol=1e-2)
    for value in state.values():
        first = value.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, value)


def _step_both(ours, theirs, step):
    """Step a sharded model and a `Reference`, each with its optimizer, on the batches of ``step``."""
    for model, _ in (ours, theirs):
        backward(model, step)
    theirs[0].reduce_grads()
    for _, optimizer in (ours, theirs):
        optimizer.step()
        optimizer.zero_grad()


OTHER_OPTIONS = {
    "no nesterov": {"nesterov": False},
    "rms": {"adjust_lr_fn": "match_rms_adamw"},
    "original": {"adjust_lr_fn": "original", "momentum": 0.0},
    "numbers": {"ns_coefficients": (2.0, -1.5, 0.5), "ns_steps": 3, "eps": 1e-3, "momentum": 0.4},
}


@needs_muon
@on_ranks(2)
@pytest.mark.parametrize("name", OTHER_OPTIONS)
def test_torchs_options_mean_the_same(name):
    """Each option of torch's Muon has the same bits here."""
    options = OTHER_OPTIONS[name]
    model, _ = train("views", 2, **options)
    assert_same_state(full(model.state_dict()), trained_reference("views", 2, **options))


@needs_muon
@on_ranks(2)
def test_a_rate_in_a_tensor_and_a_schedule():
    """``lr`` may be a tensor, as in torch; a scheduler changes Muon's rate and AdamW's together."""
    model = LAYOUTS["rows"](Mixture())
    reference = Reference(Mixture(), keeps_none=True)
    ours = Muon(model.parameters(), **{**OPTIONS, "lr": torch.tensor(0.1)})
    theirs = PlainMuon(reference.master, {"lr": torch.tensor(0.1)})
    for step in range(2):
        _step_both((model, ours), (reference, theirs), step)
        for each in (ours, theirs.muon, theirs.adamw):
            each.param_groups[0]["lr"] = each.param_groups[0]["lr"] / 2
    assert_same_state(full(model.state_dict()), reference.master.state_dict())


@needs_muon
@on_ranks(2, in_full(3))
@pytest.mark.parametrize("layout", ["rows", in_full("flat"), "views"])
def test_accumulated_and_clipped_gradients(layout):
    """Two backwards in each step add up, reduced or held; clipped gradients have the norm of whole ones."""
    model, _ = train(layout, 2, num_micro=2)
    assert_same_state(full(model.state_dict()), trained_reference(layout, 2, num_micro=2))
    model = LAYOUTS[layout](Mixture())
    reference = Reference(Mixture(), keeps_none=True)
    ours, theirs = muon_of(layout, model), PlainMuon(reference.master, layout=layout)
    for one in (0, 1):
        if layout == "rows":
            model.set_requires_gradient_sync(bool(one))
        with contextlib.nullcontext() if layout == "rows" or one else model.no_sync():
            backward(model, (1, one))
        backward(reference, (1, one))
    reference.reduce_grads()
    trained = [param for param in model.parameters() if param.requires_grad]
    clip = nn.utils.clip_grad_norm_ if layout == "rows" else lambda _, norm: model.clip_grad_norm_(norm)
    clip(trained, 0.5)
    nn.utils.clip_grad_norm_(reference.master.parameters(), 0.5)
    ours.step()
    theirs.step()
    # The norm adds in another order, and bf16 rounds at 2**-8 what Newton-Schulz is given.
    assert_same_state(full(model.state_dict()), reference.master.state_dict(), rtol=1e-2, atol=1e-2)


@needs_muon
@on_ranks(2)
@pytest.mark.parametrize("layout", ["rows", "flat", "views"])
def test_mixed_precision(layout):
    """fp32 parameters that compute in bf16 are stepped as fp32."""
    model, _ = train(layout, wrap=in_dtype(layout, torch.bfloat16))
    reference = Reference(Mixture(), torch.bfloat16, torch.float32, keeps_none=True)
    assert_same_state(full(model.state_dict()), trained_reference(layout, reference=reference))


@needs_muon
@on_ranks(2)  # the sum of three gradients in bf16 depends on the backend
@pytest.mark.parametrize("layout", ["rows", in_full("views")])
def test_parameters_in_bf16(layout):
    """bf16 parameters differ from torch's in at most one rounding, in the last elements of a tensor."""
    model = LAYOUTS[layout](Mixture().bfloat16())
    reference = Reference(Mixture().bfloat16(), torch.bfloat16, keeps_none=True)
    ours, theirs = muon_of(layout, model), PlainMuon(reference.master)
    inputs, is_late = batch(1)
    model(inputs.bfloat16(), is_late).float().square().sum().backward()
    backward(reference, 1)
    reference.reduce_grads()
    ours.step()
    theirs.step()
    state = full(model.state_dict())
    assert_same_state(state, reference.master.state_dict(), rtol=2**-7, atol=2**-9)
    for value in ours.state.values():
        assert value.get("momentum_buffer", torch.zeros(0, dtype=torch.bfloat16)).dtype == torch.bfloat16


@needs_muon
@on_ranks(2)
@pytest.mark.parametrize("layout", ["rows", "views", "views held"])
def test_scaled_losses(layout):
    """With ShardedGradScaler a step has the bits of the unscaled loss, and an overflow skips it on all ranks."""
    model = LAYOUTS[layout](Mixture())
    optimizer = muon_of(layout, model)
    scaler = ShardedGradScaler(rank_device().type, init_scale=2.0**4)
    for step in range(3):
        overflows = step == 1
        before = full(model.state_dict())
        backward(model, 7 if overflows else step // 2, scaler)
        if overflows and dist.get_rank() == 1:
            grad = next(grad for grad in _gradients(model, optimizer) if grad.numel())
            grad.view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if overflows:
            assert_same_state(full(model.state_dict()), before)
    twin = LAYOUTS[layout](Mixture())
    plain = muon_of(layout, twin)
    for step in range(2):
        backward(twin, step)
        plain.step()
        plain.zero_grad()
    assert_same_state(full(model.state_dict()), full(twin.state_dict()))


@on_ranks(2)
def test_fp16_with_a_scaled_loss():
    """Models that compute in fp16 step their fp32 parameters alike in all layouts, and lose a step that overflows."""
    states = []
    for layout in ("rows", "flat", "views"):
        model = in_dtype(layout, torch.float16)(Mixture())
        optimizer = muon_of(layout, model)
        scaler = ShardedGradScaler(rank_device().type, init_scale=2.0**40)  # overflows at first
        first = {name: value.clone() for name, value in full(model.state_dict()).items()}
        for step in range(3):
            backward(model, 1, scaler)  # step 1 uses all parameters but one
            scaler.step(optimizer)
            scaler.update(2.0**4 if step == 0 else None)
            optimizer.zero_grad()
            if step == 0:
                assert_same_state(full(model.state_dict()), first)
        states.append({name: value for name, value in full(model.state_dict()).items() if name != "unused"})
        assert not torch.equal(states[-1]["late.weight"], first["late.weight"])
    assert_same_state(states[1], states[0])
    assert_same_state(states[2], states[0])


def _gradients(model, optimizer):
    if isinstance(optimizer, CPUOptimizer):
        return optimizer.gradients()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]


@needs_muon
@on_ranks(1)
def test_plain_tensors_in_one_process():
    """Without a process group: matrices in any memory format, stacks by slice, all others by AdamW."""
    plain, ours = Mixture(), Mixture()
    with torch.no_grad():
        for model in (plain, ours):
            model.down.weight.data = model.down.weight.data.t().contiguous().t()
    theirs, optimizer = PlainMuon(plain), Muon([p for p in ours.parameters() if p.requires_grad], **OPTIONS)
    for step in range(3):
        for model in (plain, ours):
            backward(model, step)
        for each in (theirs, optimizer):
            each.step()
            each.zero_grad()
    assert_same_state(ours.state_dict(), plain.state_dict())


@needs_muon
@on_ranks(1)
def test_a_wide_and_a_tall_stack_equal_torchs_on_each_slice():
    """Experts of both orientations, and a matrix of zeros, whose update is zero."""
    for shape in ((2, 5, 3), (4, 3, 8)):
        stack = nn.Parameter(randn(*shape, key=shape))
        slices = [nn.Parameter(each.clone()) for each in stack.detach()]
        ours, theirs = Muon([stack], lr=0.1), torch.optim.Muon(slices, lr=0.1)
        stack.grad = randn(*shape, key="grad")
        stack.grad[0] = 0
        for index, each in enumerate(slices):
            each.grad = stack.grad[index].clone()
        ours.step()
        theirs.step()
        assert torch.equal(stack, torch.stack(list(slices)))


@needs_muon
@on_ranks(2)
def test_everything_in_a_group_without_muon_goes_to_adamw():
    """Embeddings and heads in a group with ``use_muon=False`` are stepped by AdamW at the group's own rate."""
    model, plain = LAYOUTS["rows"](Mixture()), Mixture()
    options = {"lr": 0.01, "weight_decay": 0.2}
    ours = Muon([{"params": list(model.parameters()), "use_muon": False, **options}], lr=0.5, adamw_lr_ratio=0.1)
    trained = [param for param in plain.parameters() if param.requires_grad]
    theirs = torch.optim.AdamW(trained, foreach=False, **options)
    for _ in range(2):
        backward(model, 0)
        reference = Reference(plain, keeps_none=True)
        backward(reference, 0)
        reference.reduce_grads()
        for param, master in zip(plain.parameters(), reference.master.parameters(), strict=True):
            param.grad = master.grad
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(full(model.state_dict()), plain.state_dict())


@on_ranks(2)
def test_what_one_rank_has_whole_is_not_sent():
    """After a first step two experts on two ranks need no communication; a cut matrix is sent as 2 bytes an element."""
    torch.manual_seed(1)
    experts = Experts()
    experts.weight = nn.Parameter(torch.randn(2, 6, 6))
    fully_shard(experts)
    optimizer = Muon(experts.parameters())
    experts(batch(0)[0]).sum().backward()
    optimizer.step()
    reset_counters()
    optimizer.step()
    assert counters() == {}
    model = fully_shard(nn.Linear(6, 8, bias=False))
    optimizer = Muon(model.parameters())
    model(batch(0)[0]).sum().backward()
    optimizer.step()
    reset_counters()
    optimizer.step()
    found = counters()
    # The owner sends the other rank's half back, and the other rank sends its half: each 24 elements of 2 bytes.
    assert found.pop("all_to_all") == (2, 2 * 24)
    assert found.pop("all_reduce")[0] == 1
    assert found == {}


@needs_muon
@on_ranks(2, in_full(3))
@pytest.mark.parametrize("layout", ["owned", "owned views", "owned offload"])
def test_owned_matrices_are_stepped_without_a_message(layout):
    """No step sends anything, not even the first one."""
    model = LAYOUTS[layout](Mixture().to(rank_device()))
    optimizer = muon_of(layout, model)
    for step in range(2):
        backward(model, step)
        reset_counters()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            optimizer.step()
        assert counters() == {}
        names = [event.name for event in profiler.events()]
        assert any("mm" in name for name in names)
        assert not [name for name in names if "c10d" in name or "gloo" in name]
        optimizer.zero_grad()


@needs_muon
@on_ranks(3)
@pytest.mark.parametrize("layout", ["rows", "views"])
def test_ranks_without_elements_take_part(layout):
    """A matrix of two rows on three ranks: one rank has nothing of it, and all have the same bits."""
    settings = {"rows": lambda model: LAYOUTS["rows"](model), "views": LAYOUTS["views"]}
    model, plain = Mixture(), Mixture()
    for one in (model, plain):
        one.late = nn.Linear(6, 2)
        with torch.no_grad():
            one.late.weight.fill_(0.5)
            one.late.bias.fill_(0.1)
    model, reference = settings[layout](model), Reference(plain, keeps_none=True)
    ours, theirs = muon_of(layout, model), PlainMuon(reference.master)
    for step in (1, 2):
        _step_both((model, ours), (reference, theirs), step)
    assert_same_state(full(model.state_dict()), reference.master.state_dict())
    keys = [sorted(ours.state.get(param, {})) for param in model.parameters()]
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, keys)
    assert every[1:] == every[:-1]
