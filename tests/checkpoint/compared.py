"""Comparison of a model and its optimizer with their saved state."""

from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.reference import assert_same_state


def whole(model, optimizer):
    """Model and optimizer state under original names, on every rank."""
    state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    return {name: value.clone() for name, value in model.state_dict().items()}, state


def assert_same(actual, expected):
    assert_same_state(actual[0], expected[0])
    assert actual[1]["state"].keys() == expected[1]["state"].keys()
    for name, state in expected[1]["state"].items():
        assert_same_state(dict(sorted(actual[1]["state"][name].items())), dict(sorted(state.items())))
    ours, theirs = (
        [{k: v for k, v in group.items() if k not in ("foreach", "fused")} for group in side[1]["param_groups"]]
        for side in (actual, expected)
    )
    assert ours == theirs
