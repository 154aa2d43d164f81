"""Large matrices that a GPU would compute slowly where they lie on a line are copied to aligned addresses."""

from unittest import mock

import pytest
import torch
from torch import nn

from fairshard.engine.tree import unit_of
from fairshard.extras.planning.peak import GATHERED
from fairshard.nn import FullyShardedDataParallel as FSDP
from fairshard.nn import MixedPrecision, MixedPrecisionPolicy, Owned, RowBlocks, ShardingStrategy, fully_shard
from fairshard.nn.wrap import describe
from fairshard.views import copied_out
from fairshard.views.copied_out import CopiedOut, is_to_align
from tests.models import tiny, wrap_tiny
from tests.on_ranks import in_full, on_ranks
from tests.reference import assert_same_state
from tests.trained import train

MATRIX, ODD = torch.Size((256, 256)), torch.Size((3,))


@pytest.mark.parametrize(
    ("shapes", "dtype", "device", "expected"),
    [
        ([MATRIX, ODD], torch.bfloat16, "meta", False),
        ([ODD, MATRIX], torch.bfloat16, "meta", True),
        ([ODD, MATRIX], torch.float16, "meta", True),
        ([torch.Size((8,)), MATRIX], torch.bfloat16, "meta", False),
        ([torch.Size((4,)), MATRIX], torch.bfloat16, "meta", True),
        ([ODD, MATRIX], torch.float32, "meta", False),
        ([ODD, MATRIX], torch.bfloat16, "cpu", False),
        ([ODD, torch.Size((255, 256))], torch.bfloat16, "meta", False),
        ([ODD, torch.Size((256 * 256,))], torch.bfloat16, "meta", False),
    ],
)
def test_only_what_is_slower_is_copied(shapes, dtype, device, expected):
    """A matrix of 65,536 elements of 16 bits, on an accelerator, at an address that is no multiple of 16 bytes."""
    starts = [0, shapes[0].numel()]
    assert is_to_align(shapes, starts, dtype, torch.device(device)) == expected


def test_a_plan_counts_such_units_twice():
    """On an accelerator `describe` adds the copy of a unit whose matrix begins behind a scalar."""

    class Scaled(nn.Module):
        def __init__(self, numel):
            super().__init__()
            self.scale, self.weight = nn.Parameter(torch.ones(numel)), nn.Parameter(torch.ones(256, 256))

    found = {}
    for numel in (8, 1):
        plan = describe(Scaled(numel), None, 2, device="cuda", mixed_precision=True, compute_dtype=torch.bfloat16)
        found[numel] = {term.name: term.nbytes for term in plan.terms}
    assert found[8][GATHERED] == 2 * (256 * 256 + 8)
    assert found[1][GATHERED] == 2 * 2 * (256 * 256 + 2)  # padded to two ranks


WAYS = {
    "flat": {},
    "bf16": {"mixed_precision": MixedPrecision(torch.bfloat16)},
    "views": {"use_orig_params": True},
    "offload": {"cpu_offload": True},
    "few": {"reshard_after_forward": 2},
    "grad op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "blocks": {"use_orig_params": True, "placement_fn": lambda param: RowBlocks(2)},
    "owned": {"use_orig_params": True, "placement_fn": lambda param: Owned()},
}


@on_ranks(1, 2, in_full(4))
@pytest.mark.parametrize("name", WAYS)
def test_copies_change_no_bit(name):
    """Weights are those of parameters that compute where they lie on the line."""
    states = []
    for is_aligned in (False, True):
        with mock.patch.object(copied_out, "is_to_align", lambda *_, found=is_aligned: found):
            model = wrap_tiny(tiny(), **WAYS[name])
            train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), range(3))
        units = [unit for unit in model.modules() if isinstance(unit, FSDP)]
        gathers = [each.gathered for unit in units for each in unit._unit.flat_params if not each.computes_on_shard]
        assert all(isinstance(gathered, CopiedOut) == is_aligned for gathered in gathers)
        starts = [view.storage_offset() * view.itemsize for gathered in gathers for view in gathered.views]
        assert not is_aligned or not any(start % copied_out._ALIGNMENT for start in starts)
        states.append(model.state_dict())
    assert_same_state(*states)


@on_ranks(1)
def test_fully_shard_on_one_rank():
    """A matrix behind a scalar, cast for one rank, computes and trains alike from an aligned address."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.weight = nn.Parameter(torch.ones(256, 256))

        def forward(self, x):
            return nn.functional.linear(x, self.weight) * self.scale

    torch.manual_seed(0)
    outputs = []
    for is_aligned in (False, True):
        module = Scaled()
        with mock.patch("fairshard.views.rows.is_to_align", lambda *_, found=is_aligned: found):
            fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
            output = module(torch.ones(2, 256))
        (flat_param,) = unit_of(module).flat_params
        assert isinstance(flat_param.gathered, CopiedOut) == is_aligned
        output.float().sum().backward()
        outputs.append((output.detach(), [param.grad.full_tensor() for param in module.parameters()]))
    (output, grads), (same_output, same_grads) = outputs
    assert torch.equal(output, same_output)
    assert all(map(torch.equal, grads, same_grads))
