"""What ``fairshard train`` trains: through both entry points, a user's model, and models of transformers."""

import contextlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from fairshard.cli.gpt import GPT, Block, GPTConfig
from fairshard.cli.loop import sample, train
from fairshard.cli.model import blocks, build_model, make_task, parts_of
from fairshard.cli.options import TrainingStopped, TrainOptions
from fairshard.planning.summary import unit_table
from tests.cli import own_models
from tests.cli.processes import COMMAND, lines_of, run
from tests.cli.test_trainer import CPU, _text, _trainer
from tests.on_ranks import in_full, on_ranks

SMALL = TrainOptions(layers=2, dim=16, heads=2, context=8, batch_size=12, steps=6, warmup=2, lr=1e-2)
WORDS = "the quick brown fox jumps over the lazy dog\n"
LLAMA = {
    **{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "vocab_size": 256},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32},
}


def _losses(options):
    """Losses and gradient norms of all steps, and the validation loss at the end."""
    trainer = _trainer(options)
    steps = [trainer.step(step) for step in range(1, options.steps + 1)]
    return [(each.loss, each.grad_norm) for each in steps], trainer.validate(0)


@pytest.mark.cpu_only("the trainer is told to use the CPU")
@on_ranks(2)
@pytest.mark.parametrize(
    "changes",
    [{"accumulate": 3}, {"cpu_offload": True, "optimizer": "cpu-adamw"}, in_full({"precision": "bf16"})],
    ids=str,
)
def test_both_entry_points_train_alike(changes):
    """`fully_shard` has the losses and norms of the wrapper, up to the rounding of kernels, and the same units."""
    options = replace(SMALL, **changes)
    (expected, last), (found, other) = (_losses(replace(options, engine=door)) for door in ("wrapper", "fully_shard"))
    tolerance = 2**-7 if "precision" in changes else 1e-4
    assert np.allclose(found, expected, rtol=tolerance)
    assert other == pytest.approx(last, rel=tolerance)


@on_ranks(2)
@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
def test_a_users_model_trains_with_its_own_loss(door):
    """The loss is that of one process with the plain model; each repeated layer is a unit."""
    options = replace(SMALL, layers=4, dim=128, heads=4, factory="tests.cli.own_models:with_loss", engine=door)
    torch.manual_seed(options.seed)
    plain = own_models.Bytes()
    trainer = _trainer(options)
    assert [row.fqn for row in unit_table(trainer.model)] == ["", "layers.0", "layers.1"]
    own, given = (make_task(replace(options, factory=factory)) for factory in (options.factory, None))
    assert own.has_own_loss  # the log must not call it nats
    assert not given.has_own_loss
    batch = np.concatenate(_trainer(options)._batches.next())
    every = [None, None]
    dist.all_gather_object(every, batch)
    expected = own_models.own_loss(plain, torch.from_numpy(np.concatenate(every))).item()
    assert trainer.step(1).loss == pytest.approx(expected, rel=1e-5)


@on_ranks(1)
@pytest.mark.parametrize(
    ("factory", "says"),
    [("with_a_loss_for_each_row", r"has the shape \[12\]"), ("with_a_number", "is float"),
     ("without_the_model", "does not depend on a trained parameter")],
)  # fmt: skip
def test_a_loss_that_cannot_be_trained_is_refused(factory, says):
    """The error names the factory, says what its loss must be, and what it is."""
    trainer = _trainer(replace(SMALL, layers=4, dim=128, heads=4, factory=f"tests.cli.own_models:{factory}"))
    with pytest.raises(TrainingStopped, match=rf"--factory tests.cli.own_models:{factory} must be .*, but {says}\."):
        trainer.step(1)


@on_ranks(2)
def test_a_factory_must_build_the_same_weights_on_every_rank(tmp_path):
    """Both ranks raise before a step, with the name of the parameter that differs."""
    (tmp_path / "text").write_text(WORDS * 30)
    paths = {"data": tmp_path / "text", "out": tmp_path / "run", "factory": "tests.cli.own_models:unlike"}
    with pytest.raises(UserWarning, match=r"same weights, but `head\.bias` differed between ranks 0 and 1"):
        train(replace(SMALL, layers=4, dim=128, heads=4, **paths))


def test_the_blocks_of_a_model():
    """Repeated modules, outermost only: blocks of the GPT, layers of a Sequential; none where nothing repeats."""
    gpt = GPT(GPTConfig(2, 16, 2, 8))
    assert blocks(gpt) == list(gpt.blocks)
    assert all(isinstance(block, Block) for block in blocks(gpt))
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert blocks(nn.ModuleDict({"layers": layers})) == [layers[0], layers[2]]
    assert blocks(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))) == []


@on_ranks(2)
@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
def test_a_model_writes_a_text(door):
    """The ranks call the model equally often; the text begins with that of the validation."""
    options = replace(SMALL, sample=12, engine=door)
    written = sample(
        build_model(options, CPU), _text(), options, SimpleNamespace(decode=lambda ids: f"<{len(ids)}>"), CPU
    )
    assert written.splitlines()[1:] == ["  <8>|<12>"]
    options = replace(SMALL, layers=4, dim=128, heads=4, factory="tests.cli.own_models:with_loss", sample=2)
    sharded = build_model(options, CPU)
    sharded.model.register_forward_hook(lambda module, args, output: output[:, 0])
    assert "none: the model's output is not logits" in sample(sharded, _text(), options, None, CPU)


@on_ranks(2)
def test_the_loop_calls_back_after_every_step(tmp_path):
    """`train` runs in the caller's process group, and `on_step` gets the lines of ``metrics.jsonl`` on every rank."""
    if dist.get_rank() == 0:
        (tmp_path / "text").write_text(WORDS * 30)
    dist.barrier()
    seen = []
    options = replace(SMALL, data=tmp_path / "text", out=tmp_path / "run", steps=3, save_every=0)
    assert train(options, on_step=lambda metrics: seen.append((metrics.step, metrics.loss))) == tmp_path / "run"
    dist.barrier()
    lines = lines_of(tmp_path / "run")
    assert seen == [(line["step"], line["loss"]) for line in lines if "loss" in line]
    assert len(seen) == 3
    assert dist.is_initialized()


@pytest.fixture
def llama(tmp_path):
    """The config of a Llama of two layers that knows 256 tokens."""
    pytest.importorskip("transformers")
    (tmp_path / "llama.json").write_text(json.dumps(LLAMA))
    return tmp_path / "llama.json"


def test_a_tokenizer_of_bytes(llama, tmp_path):
    """Its ids are the bytes of any text; it can be loaded again, and gives the text back."""
    from transformers import AutoTokenizer

    from fairshard.cli.hugging_face import byte_tokenizer

    byte_tokenizer(32).save_pretrained(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    for text in ("the  quick\n\tbrown fox", "naïve 狐 \x00\x7f", ""):
        assert loaded(text, add_special_tokens=False)["input_ids"] == list(text.encode())
        assert loaded.decode(list(text.encode())) == text


BAD = {
    "another kind of model": ({"model_type": "t5"}, "", "must be a causal language model, but"),
    "a vocabulary too small": ({**LLAMA, "vocab_size": 255}, "", "text needs all 256 bytes, but the model has"),
    "a context too long": (LLAMA, "--context 33", "--context must be at most 32, the positions of"),
    "sizes that contradict": ({**LLAMA, "num_attention_heads": 3}, "", "cannot be"),
    "no class of that name": (LLAMA, "--policy class:Block", "class:Block must be a class of a module"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_models_of_transformers_are_exit_2(case, tmp_path, launched, capfd):
    """One line, before any rank starts."""
    pytest.importorskip("transformers")
    from fairshard.cli.main import main

    config, more, says = BAD[case]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["train", "--hf", str(tmp_path), "--context", "16", *more.split()]) == 2
    err = capfd.readouterr().err
    assert says in err.splitlines()[-1]
    assert not launched
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert main(["train", "--hf", str(tmp_path), "--context", "16"]) == 0
    assert len(launched) == 1


@on_ranks(2)
@pytest.mark.parametrize("door", ["wrapper", "fully_shard"])
def test_a_model_of_transformers_trains(door, tmp_path):
    """A random Llama from its config alone: each layer a unit, the first loss near ln 256, later ones lower."""
    pytest.importorskip("transformers")
    path = tmp_path / "llama.json"
    with contextlib.suppress(FileExistsError), path.open("x") as file:
        json.dump(LLAMA, file)
    dist.barrier()
    options = replace(SMALL, layers=4, dim=128, heads=4, hf=path, engine=door)
    trainer = _trainer(options)
    assert [row.fqn for row in unit_table(trainer.model)] == ["", "model.layers.0", "model.layers.1"]
    losses = [trainer.step(step).loss for step in range(1, 7)]
    assert losses[0] == pytest.approx(5.55, abs=0.1)
    assert losses[-1] < losses[0]


@pytest.mark.full
def test_a_random_llama_from_a_config_to_a_pipeline(tmp_path):
    """20 M parameters on two ranks, a stop and a resume; what is consolidated loads, writes, and trains again."""
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 6, "hidden_size": 512, "intermediate_size": 1408, "num_key_value_heads": 8}
    config = {**LLAMA, **sizes, "num_attention_heads": 8, "max_position_embeddings": 64}
    (tmp_path / "llama.json").write_text(json.dumps(config))
    (tmp_path / "text").write_text(WORDS * 400)
    common = "--hf llama.json --data text --context 32 --batch-size 8 --eval-every 10 --save-every 5"

    def command(line):
        result = run([*COMMAND[:-1], *line.split()], tmp_path)
        assert result.returncode == 0, result.stderr
        return result.stdout

    command(f"train {common} --nproc 2 --steps 10 --lr 1e-3 --out run")
    out = command("train --resume --out run --steps 15 --sample 20")
    assert "resumed after step 10" in out
    assert "sample" in out
    lines = lines_of(tmp_path / "run")
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 15
    assert losses[-1] < losses[0] - 1
    parameters = json.loads((tmp_path / "run" / "config.json").read_text())["parameters"]
    assert 19e6 < parameters < 21e6
    command("consolidate run out --format safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert sum(param.numel() for param in model.parameters()) == parameters
    pipe = transformers.pipeline("text-generation", model=str(tmp_path / "out"), device="cpu")
    (written,) = pipe("the quick", max_new_tokens=8, do_sample=False)
    assert written["generated_text"].startswith("the quick")
    assert len(written["generated_text"]) == len("the quick") + 8
    shorter = common.replace("--hf llama.json", "--hf out").replace("--eval-every 10", "--eval-every 1")
    again = command(f"train {shorter} --nproc 2 --steps 1 --out next")
    first = lines_of(tmp_path / "next")[0]
    last = [line["val_loss"] for line in lines if "val_loss" in line][-1]
    assert first["val_loss"] == pytest.approx(last, rel=1e-4), again


def test_the_contract_has_an_example_that_runs(tmp_path):
    """The example of ``--factory`` in the docs is a short module whose function builds a model."""
    example = (Path(__file__).parents[2] / "docs" / "scripts" / "own_model.py").read_text()
    assert len(example.splitlines()) <= 32
    names = {}
    exec(example, names)
    model, loss = parts_of("example:build", names["build"]())
    assert loss(model, torch.arange(18).view(2, 9)).requires_grad
