"""`PendingGrads`: placeholders show what the user has done to them, and the sums of what was zeroed are dropped."""

import pytest
import torch
from torch import nn

from fairshard.checks.whole_grads import check_absent
from fairshard.errors import FairshardError, PartialGradientError, PendingGradientError
from fairshard.params.shard_grad import GradTransfers, ShardGrad
from fairshard.settings.config import GradHome
from fairshard.utils.span import Span
from fairshard.views.viewed_grad import ViewedGrad

CPU = torch.device("cpu")
SIZES = (3, 1, 0, 2)  # of the views
NAMES = ["a", "b", "c", "d"]


def flat(numel, home=GradHome.SHARD):
    return ShardGrad(nn.Parameter(torch.zeros(numel)), torch.float32, home, GradTransfers(CPU))


def viewed(home=GradHome.SHARD):
    shard = nn.Parameter(torch.zeros(sum(SIZES)))
    spans, end = [], 0
    for size in SIZES:
        spans.append(Span(end, end + size))
        end += size
    grad = ViewedGrad(shard, torch.float32, home, GradTransfers(CPU))
    grad.show_on([nn.Parameter(shard.detach()[span.start : span.stop]) for span in spans], spans)
    return grad


def keep(grad, *reached):
    """Keep a whole gradient of ones for each leaf that is ``reached``."""
    pending = grad.pending_of(len(reached))
    for leaf, own in enumerate(reached):
        if own:
            pending.add(leaf, torch.ones(2))
    pending.show(bytes(reached))
    return pending


def add(grad, value):
    """Add a reduced gradient of all parameters."""
    grad.add(value, b"\1" * len(grad.shown))


def has_sums(grad):
    return [one is not None for one in grad.pending.sums] if grad.pending is not None else []


@pytest.mark.parametrize("home", [GradHome.SHARD, GradHome.HELD])
def test_what_no_one_has_reached_has_no_placeholder(home):
    """Faces that were reached show zeros, others keep None; the reduced gradient is missing."""
    grad = viewed(home)
    keep(grad, 1, 0, 1, 0)
    assert [None if one is None else one.tolist() for one in grad.shown] == [[0.0] * 3, None, [], None]
    assert grad.value is None
    assert [grad.of(index) for index in range(4)] == [None] * 4


@pytest.mark.parametrize("home", [GradHome.SHARD, GradHome.HELD])
@pytest.mark.parametrize("how", ["none", "zero_", "foreach"])
def test_each_face_is_dropped_alone(home, how):
    """The sums of faces that the user drops or zeroes go, those of others stay; zeros are real ones then."""
    for face in range(4):
        grad = viewed(home)
        keep(grad, 1, 1, 1, 1)
        if how == "none":
            grad.show(face, None)
        elif how == "zero_":
            grad.shown[face].zero_()
        else:
            torch._foreach_zero_([grad.shown[face]])
        grad.drop_zeroed(NAMES)
        assert has_sums(grad) == [index != face for index in range(4)]
        assert (grad.shown[face] is None) == (how == "none")
        if how != "none":
            assert grad.shown[face].add_(1).tolist() == [1.0] * SIZES[face]
        for index in range(4):
            if index != face:
                with pytest.raises(PendingGradientError, match=f"`{NAMES[index]}`"):
                    check_absent(grad.pending, index, NAMES[index], "rank 0")
        check_absent(grad.pending, face, NAMES[face], "rank 0")
        grad.zero(set_to_none=True)
        grad.drop_zeroed(NAMES)
        assert grad.pending is None


@pytest.mark.parametrize("numel", [1, 2])
@pytest.mark.parametrize("change", [lambda g: g.mul_(2), lambda g: g.copy_(torch.ones(1)), lambda g: g.add_(1)])
def test_other_changes_raise(numel, change):
    """In torch if elements share memory; when it is looked at if there is one element."""
    grad = flat(numel)
    keep(grad, 1)
    if numel > 1:
        with pytest.raises(RuntimeError, match="single memory location"):
            change(grad.shown[0])
        grad.drop_zeroed(["a"])
    else:
        change(grad.shown[0])
        with pytest.raises(FairshardError, match="The gradient of `a` must not be changed"):
            grad.drop_zeroed(["a"])
    assert has_sums(grad) == [True]


def test_another_gradient_in_its_place():
    """Zeros count as zeroing, whatever is not zero raises: it may have been made from the placeholder."""
    grad = flat(3)
    keep(grad, 1)
    for other in (torch.ones(3), grad.shown[0] * 0.5):
        grad.show(0, other)
        with pytest.raises(FairshardError, match="must not be changed"):
            grad.drop_zeroed(["a"])
    grad.show(0, torch.zeros(3))
    grad.drop_zeroed(["a"])
    assert grad.pending is None


@pytest.mark.parametrize("make", [lambda: flat(6), viewed, lambda: viewed(GradHome.HELD)])
def test_earlier_gradients_come_back(make):
    """A reduced gradient is hidden while others are pending, shown again when they are sent, and added to."""
    grad = make()
    num_leaves = len(grad.shown)
    add(grad, torch.full((6,), 3.0))
    pending = keep(grad, *[1] * num_leaves)
    assert not any(one.any() for one in grad.shown)
    assert grad.value.tolist() == [3.0] * 6
    assert [one.tolist() for one in pending.sums] == [[1.0, 1.0]] * num_leaves
    add(grad, torch.ones(6))
    assert grad.pending is None
    assert grad.value.tolist() == [4.0] * 6
    assert torch.cat([one.flatten() for one in grad.shown]).tolist() == [4.0] * 6


@pytest.mark.parametrize("make", [lambda: flat(6), viewed])
def test_zeroing_reaches_earlier_gradients(make):
    """Zeroing a placeholder in place zeroes what it hides."""
    grad = make()
    add(grad, torch.full((6,), 3.0))
    keep(grad, *[1] * len(grad.shown))
    grad.zero(set_to_none=False)
    grad.drop_zeroed(NAMES)
    assert grad.pending is None
    assert grad.value.tolist() == [0.0] * 6


def test_a_sum_over_the_ranks_of_a_shard():
    """It adds up in fp32, is taken once, and loses the parts of faces that are dropped."""
    grad = viewed()
    pending = grad.pending_of(4)
    for value in (256.0, 1.0):
        pending.add_shard_sum(torch.full((6,), value, dtype=torch.bfloat16), b"\1\1\0\1")
        pending.show(b"\1\1\0\1")
    assert pending.kept(sends_shard_sum=True) == b"\1\1\0\1"
    assert pending.kept(sends_shard_sum=False) == bytes(4)
    grad.show(0, None)
    grad.drop_zeroed(NAMES)
    assert pending.kept(sends_shard_sum=True) == b"\0\1\0\1"
    assert pending.take_shard_sum().tolist() == [0.0] * 3 + [257.0] * 3
    assert pending.take_shard_sum() is None


@pytest.mark.parametrize("make", [lambda: flat(6), viewed])
def test_what_a_backward_that_raised_has_added_to_is_lost(make):
    """Sums that landed, and those that were added to or sent; later ones are dropped until the user zeroes them."""
    for what in ("landed", "added to", "sent"):
        grad = make()
        num_leaves = len(grad.shown)
        if what == "landed":
            grad.begin_backward()
            add(grad, torch.ones(6))
        else:
            pending = keep(grad, *[1] * num_leaves)
            if what == "sent":
                grad.begin_backward()
                for leaf in range(num_leaves):
                    pending.sums[leaf] = None
                grad.note_sent(b"\1" * num_leaves)
        grad.abandon(num_leaves)
        grad.begin_backward()
        keep(grad, *[1] * num_leaves)
        assert not any(has_sums(grad))
        add(grad, torch.ones(6))
        assert grad.value is None
        grad.drop_zeroed(NAMES)
        with pytest.raises(PartialGradientError, match="`a`"):
            check_absent(grad.pending, 0, "a", "rank 0")
        grad.zero(set_to_none=what == "landed")
        grad.drop_zeroed(NAMES)
        assert grad.pending is None
        add(grad, torch.ones(6))
        assert grad.value.tolist() == [1.0] * 6


@pytest.mark.parametrize("make", [lambda: flat(6), viewed])
@pytest.mark.parametrize("to_none", [True, False])
def test_what_was_zeroed_before_the_clean_up_is_not_lost(make, to_none):
    """A user may call ``zero_grad`` before the engine has cleaned up after an exception."""
    for what in ("landed", "added to"):
        grad = make()
        if what == "landed":
            grad.begin_backward()
            add(grad, torch.ones(6))
        else:
            keep(grad, *[1] * len(grad.shown))
        grad.zero(to_none)
        grad.abandon(len(grad.shown))
        grad.drop_zeroed(NAMES)
        assert grad.pending is None


def test_earlier_backwards_are_not_lost():
    """Only what the running backward has changed is lost with it."""
    grad = flat(6)
    add(grad, torch.ones(6))
    keep(grad, 1)
    grad.begin_backward()
    grad.abandon(1)
    assert has_sums(grad) == [True]
    assert grad.value.tolist() == [1.0] * 6


@pytest.mark.parametrize("make", [lambda: flat(6), viewed])
def test_a_backward_retracts_only_what_it_has_created(make):
    """Gradients of earlier backwards stay, also while those of this one are still on their way to host memory."""
    grad = make()
    none = bytearray(len(grad.shown))
    grad.begin_backward()
    add(grad, torch.ones(6))
    grad.begin_backward()
    grad.retract(none)
    assert grad.value.tolist() == [1.0] * 6
    add(grad, torch.ones(6))
    grad.retract(none)
    assert grad.value.tolist() == [2.0] * 6
    grad.zero(set_to_none=True)
    add(grad, torch.ones(6))
    grad.retract(none)
    assert grad.value is None
