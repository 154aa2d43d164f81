"""Steps of the trainer on real ranks equal those of a plain model in one process."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from fairshard.cli.data import Data, Ids
from fairshard.cli.gpt import GPT, GPTConfig
from fairshard.cli.model import build_model
from fairshard.cli.options import TrainingStopped, TrainOptions
from fairshard.cli.ranks import Ranks
from fairshard.cli.trainer import Batches, Trainer, even_starts, learning_rate
from fairshard.optim import ShardedGradScaler
from fairshard.utils.messages import gather_scalars
from tests.on_ranks import in_full, on_ranks

CPU = torch.device("cpu")


def _options(**changes):
    small = {"layers": 2, "dim": 16, "heads": 2, "context": 8, "batch_size": 12, "steps": 6, "warmup": 2, "lr": 1e-2}
    return TrainOptions(**{**small, **changes})


def _text():
    generator = np.random.default_rng(7)
    sides = (generator.integers(0, 256, num).astype(np.uint8) for num in (3000, 600))
    return Data(*(Ids([side]) for side in sides), 1.0)


def _trainer(options):
    rank, size = dist.get_rank(), dist.get_world_size()
    return Trainer(build_model(options, CPU), _text(), options, Ranks(rank, size, rank, size), CPU)


def _plain_loss(model, batch):
    tokens = torch.from_numpy(batch)
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _plain_run(options):
    """``(loss, gradient norm)`` of each step, and the validation loss, of one process that sees the whole batch."""
    torch.manual_seed(options.seed)
    model = GPT(GPTConfig(options.layers, options.dim, options.heads, options.context))
    adam = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=options.weight_decay)
    batches = Batches(_text().train, options, Ranks(0, 1, 0, 1))
    curve = []
    for step in range(1, options.steps + 1):
        adam.param_groups[0]["lr"] = learning_rate(options, step)
        loss = _plain_loss(model, np.concatenate(batches.next()))
        adam.zero_grad()
        loss.backward()
        curve.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip).item()))
        adam.step()
    validation = _text().validation
    starts = even_starts(len(validation), options.context)
    with torch.no_grad():
        return curve, _plain_loss(model, validation.windows(starts, options.context)).item()


# Sums over the batch have another order, and Adam divides by roots: six steps agree to a few 1e-6.
@on_ranks(in_full(1), in_full(2), 3)
@pytest.mark.parametrize(
    ("batch_size", "accumulate"),
    [(12, 1), (11, 3), *(pytest.param(*each, marks=pytest.mark.full) for each in [(12, 2), (11, 1)])],
)
def test_steps_are_those_of_one_plain_process(batch_size, accumulate):
    """Losses, gradient norms and the validation loss do not depend on the number of ranks or of passes.

    A batch of 11 is 4, 4 and 3 sequences for three ranks; in three passes, a rank has one or two at a time.
    """
    options = _options(batch_size=batch_size, accumulate=accumulate)
    curve, val_loss = _plain_run(options)
    trainer = _trainer(options)
    steps = [trainer.step(step) for step in range(1, options.steps + 1)]
    for metrics, (loss, norm) in zip(steps, curve, strict=True):
        assert metrics.loss == pytest.approx(loss, rel=1e-5)
        assert metrics.grad_norm == pytest.approx(norm, rel=1e-4)
        assert metrics.tokens == metrics.step * batch_size * 8
        assert metrics.tokens_per_s == pytest.approx(batch_size * 8 / metrics.step_s)
        assert len(metrics.mem_bytes) == dist.get_world_size()
        assert (metrics.comm_bytes > 0) == (metrics.collectives > 0) == (dist.get_world_size() > 1)
    assert trainer.validate(0) == pytest.approx(val_loss, rel=1e-5)


@on_ranks(3)
def test_ranks_may_have_different_numbers_of_validation_batches():
    """512 windows are 171, 171 and 170, a batch each: the loss is the mean over all of them, and training goes on."""
    options = _options(batch_size=3, steps=2, warmup=1)
    trainer = _trainer(options)
    trainer.step(1)
    trainer.step(2)
    assert trainer.validate(0) == pytest.approx(_plain_run(options)[1], rel=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [36, 37])
def test_the_ranks_share_out_the_batch_that_one_rank_would_take(size, batch_size):
    """Pass by pass, the ranks' rows in rank order are the rows of a single rank, each of them once."""
    options = _options(batch_size=batch_size, accumulate=3)
    text = Ids([np.arange(250, dtype=np.uint8)])
    alone = Batches(text, options, Ranks(0, 1, 0, 1))
    together = [Batches(text, options, Ranks(rank, size, rank, size)) for rank in range(size)]
    for _ in range(4):
        whole = alone.next()
        parts = [batches.next() for batches in together]
        for number in range(3):
            assert np.array_equal(whole[number], np.concatenate([part[number] for part in parts]))
            rows = [len(part[number]) for part in parts]
            assert max(rows) - min(rows) <= 1


@on_ranks(2)
def test_bf16_trains_to_nearly_the_losses_of_fp32():
    """In bf16 the first losses are those of fp32 to within bf16's 2**-8."""
    options = _options(precision="bf16")
    curve, _ = _plain_run(options)
    trainer = _trainer(options)
    for step, (loss, _) in enumerate(curve, start=1):
        assert trainer.step(step).loss == pytest.approx(loss, rel=2**-8)


@on_ranks(2)
def test_fp16_overflow_skips_the_step_on_all_ranks_and_halves_the_scale():
    """A scale far too large is halved once per skipped step, alike on all ranks; until then weights do not change."""
    options = _options(precision="fp16", steps=40)
    trainer = _trainer(options)
    trainer._scaler = ShardedGradScaler("cpu", init_scale=2.0**40)
    before = [shard.detach().clone() for shard in trainer.model.parameters()]
    assert trainer.step(1).grad_norm is None
    assert all(torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))
    assert gather_scalars([trainer._scaler.get_scale()]) == [[2.0**39]] * 2
    norms = [trainer.step(step).grad_norm for step in range(2, options.steps + 1)]
    assert gather_scalars([trainer._scaler.get_scale()]) == [[2.0 ** (39 - norms.count(None))]] * 2
    assert norms.count(None) < len(norms)
    assert not any(torch.equal(old, new) for old, new in zip(before, trainer.model.parameters(), strict=True))


@on_ranks(2)
def test_fp16_gradients_are_unscaled_before_they_are_clipped():
    """The first gradient norm in fp16 is that of fp32 to within fp16's rounding, whatever the scale."""
    options = _options(precision="fp16")
    ((_, norm), *_), _ = _plain_run(options)
    assert _trainer(options).step(1).grad_norm == pytest.approx(norm, rel=1e-2)


@on_ranks(2)
def test_a_loss_that_is_not_finite_stops_all_ranks_at_the_same_step():
    """One rank's weights become nan after step 1: a validation and step 2 raise on both ranks, and name the step."""
    trainer = _trainer(_options())
    trainer.step(1)
    if dist.get_rank() == 1:
        next(iter(trainer.model.parameters())).data.fill_(math.nan)
    with pytest.raises(TrainingStopped, match="nan on rank 0, nan on rank 1 in the validation after step 1"):
        trainer.validate(1)
    with pytest.raises(TrainingStopped, match="the loss is nan on rank 0, nan on rank 1 at step 2"):
        trainer.step(2)


def test_the_model_does_not_see_the_byte_it_predicts():
    """Logits at a position do not change when later bytes do."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, dim=16, heads=2, context=8))
    tokens = torch.arange(8).unsqueeze(0)
    changed = tokens.clone()
    changed[:, 5:] += 100
    assert torch.equal(model(tokens)[:, :5], model(changed)[:, :5])
    assert not torch.equal(model(tokens)[:, 5], model(changed)[:, 5])
