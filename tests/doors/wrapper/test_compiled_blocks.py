"""``torch.compile`` of each block inside its wrapper gives one graph per block and the same numbers."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.kit import rank_device
from tests.models import Block
from tests.on_ranks import on_ranks
from tests.reference import assert_same_state, average_grads_, randn

PRECISIONS = {"fp32": {}, "bf16": {"mixed_precision": True, "compute_dtype": torch.bfloat16}}


def blocks(backend):
    """Two blocks and a head; with a ``backend``, blocks are compiled so that a graph break is an error."""
    torch.manual_seed(1)
    model = nn.Sequential(Block(), Block(), nn.Linear(6, 3)).to(rank_device())
    if backend is not None:
        for index in range(2):
            model[index] = torch.compile(model[index], backend=backend, fullgraph=True)
    return model


def wrapped(backend, **settings):
    model = blocks(backend)
    for index in range(2):
        model[index] = FSDP(model[index], **settings)
    return FSDP(model, **settings)


def steps(model, average=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        loss = model(randn(4, 6, key=step)).float().square().mean()
        loss.backward()
        if average:
            average_grads_(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.pairs
@on_ranks(1, 2)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("backend", "orig"), [("aot_eager", True), ("eager", False)])
def test_compiled_blocks_train_as_uncompiled_ones(precision, backend, orig):
    """Losses and weights agree over several steps that free, gather and change weights."""
    torch.compiler.reset()
    settings = {**PRECISIONS[precision], "use_orig_params": orig}
    ours, twin = wrapped(backend, **settings), wrapped(None, **settings)
    names = [name for name, _ in ours.named_parameters()]
    assert steps(ours) == steps(twin)
    assert_same_state(ours.state_dict(), twin.state_dict())
    assert all("_orig_mod" not in name for name in ours.state_dict())
    if orig:
        assert len(names) == len(list(twin.named_parameters()))
    if precision == "fp32" and dist.get_world_size() < 3:
        plain = blocks(None)
        assert steps(plain, average=True) == steps(wrapped(backend, **settings))


@on_ranks(2)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_no_graph_break_inside_a_block(precision):
    """Dynamo sees one graph and no break in a gathered block, and compiles a block once for all steps."""
    torch.compiler.reset()
    model = wrapped(None, **PRECISIONS[precision], use_orig_params=True)
    from torch._dynamo.testing import CompileCounter  # slow to import

    counted = CompileCounter()
    model[0].module.forward = torch.compile(copy.copy(model[0].module.forward), backend=counted, fullgraph=True)
    steps(model)
    assert counted.frame_count == 1
    explained = []

    def explain(module, args):
        if not explained:
            explained.append(None)
            explained[0] = torch._dynamo.explain(module.forward)(*args)

    model[1].module.register_forward_pre_hook(explain)
    model(randn(4, 6))
    assert (explained[0].graph_count, explained[0].graph_break_count) == (1, 0)
