"""The soak's judgement: it sees a small leak through the noise of saves, and nothing where there is none."""

import random

import pytest

from tests.checkpoint.soak import ALLOWED_NBYTES, Broken, Growth, Sample, growth_of

NUM_SAMPLES = 300


def samples(nbytes_each=0.0, descriptors_each=0.0, threads_each=0.0):
    """Samples of a process that grows by so much with each; saves add descriptors, threads and memory for a moment."""
    chance = random.Random(0)
    found = []
    for number in range(NUM_SAMPLES):
        saves = chance.random() < 0.3
        warm = min(number, 20) * 1e6  # caches fill at first
        nbytes = 200e6 + warm + saves * chance.random() * 1e7 + number * nbytes_each
        descriptors = 40 + 5 * saves + int(number * descriptors_each)
        found.append(Sample(number, int(nbytes), descriptors, 12 + 3 * saves + int(number * threads_each)))
    return found


def test_what_fills_at_first_and_moves_with_saves_is_no_growth():
    """A warm-up and the ups and downs of saves pass."""
    assert growth_of(samples()).problems == []


@pytest.mark.parametrize(
    ("leak", "named"),
    [
        ({"nbytes_each": 3 * ALLOWED_NBYTES / NUM_SAMPLES}, "memory"),
        ({"descriptors_each": 0.05}, "descriptors"),
        ({"threads_each": 0.05}, "threads"),
    ],
)
def test_a_small_leak_is_seen(leak, named):
    """Three times the allowed memory over a life, or a descriptor or thread every 20 samples, is named."""
    (problem,) = growth_of(samples(**leak)).problems
    assert problem.startswith(named)


def test_less_of_everything_is_no_growth():
    """What shrinks is no problem, and too few samples are an error."""
    assert Growth(-1e7, -2, -1).problems == []
    with pytest.raises(Broken, match="too few"):
        growth_of(samples()[:9])
