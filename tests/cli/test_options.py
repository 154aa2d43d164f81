"""Bad input: one line on stderr and exit code 2, before any rank starts."""

import argparse
import itertools
import json
import math
import os
import re
import signal
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from fairshard.cli import launch, loop, options
from fairshard.cli.main import build_parser, main
from fairshard.cli.options import TrainOptions
from fairshard.cli.trainer import learning_rate

FORGED = {"layers": "many", "steps": [1], "data": {}, "lr": True}

# The command line, and what the line on stderr must name. ``{tmp}`` is a folder that holds what ``places`` put there.
BAD = {
    "data missing": ("--data {tmp}/nowhere", "nowhere must be a file or a folder"),
    "data an empty file": ("--data {tmp}/empty.txt", "empty.txt holds no text"),
    "data an empty folder": ("--data {tmp}/emptydir", "emptydir holds no text"),
    "data binary": ("--data {tmp}/zeros.bin", "zeros.bin holds no text"),
    "data a device": ("--data /dev/null", "/dev/null must be a file or a folder"),
    "context longer than the data": ("--data {tmp}/short.txt --context 20", "context of 20 needs 21 tokens"),
    "more ranks than the batch feeds": ("--nproc 4 --batch-size 2", "--batch-size 2 cannot feed 4 ranks"),
    "more passes than the batch feeds": ("--nproc 2 --batch-size 8 --accumulate 5", "2 ranks in --accumulate 5 passes"),
    "timeout zero": ("--timeout 0", "--timeout must be at least 0.001"),
    "timeout endless": ("--timeout inf", "--timeout must be at least 0.001 and at most 1e+06, but is inf"),
    "grace negative": ("--grace -1", "--grace must be at least 0.001"),
    "signal unknown": ("--signal KILL", "invalid choice: 'KILL'"),
    "schedule shorter than its warmup": (
        "--lr-steps 5 --warmup 6",
        "--warmup must be at most 5, the steps of the schedule",
    ),
    "dim not divisible by heads": ("--dim 100 --heads 3", "--dim must be a multiple of --heads = 3"),
    "out holds a run": ("--out {tmp}/run", "holds a run without its config.json (metrics.jsonl)"),
    "out is a file": ("--out {tmp}/short.txt", "short.txt is not a writable folder"),
    "out below a file": ("--out {tmp}/short.txt/run", "cannot be created"),
    "no ranks": ("--nproc 0", "--nproc must be at least 1"),
    "less than no ranks": ("--nproc -1", "--nproc must be at least 1"),
    "precision unknown": ("--precision int8", "--precision: invalid choice: 'int8'"),
    "not a number": ("--steps many", "--steps: invalid int value: 'many'"),
    "rate not a number": ("--lr nan", "--lr must be at least"),
    "rate zero": ("--lr 0", "--lr must be at least"),
    "clip infinite": ("--clip inf", "--clip must be at least 0"),
    "bucket negative": ("--bucket-cap-mb -1", "--bucket-cap-mb must be at least 0"),
    "warmup longer than the run": ("--steps 10 --warmup 11", "--warmup must be at most 10, the steps of the schedule"),
    "trace after the last step": ("--steps 10 --trace 11", "--trace must be at most --steps = 10"),
    "trace before the first": ("--trace 0", "--trace must be at least 1"),
    "seed too large": ("--seed 9223372036854775808", "--seed must be at least 0 and at most"),
    "optimizer unknown": ("--optimizer adam", "invalid choice: 'adam'"),
    "gradients nobody fetches": ("--cpu-offload --no-move-grads-to-cpu", "needs --optimizer cpu-adamw"),
    "engine unknown": ("--engine fsdp", "--engine: invalid choice: 'fsdp'"),
    "gradients elsewhere": ("--engine fully_shard --move-grads-to-cpu", "--engine fully_shard keeps gradients where"),
    "policy unknown": ("--policy layers", "--policy must be size:N, class:NAME, blocks or none, but is layers"),
    "policy of no size": ("--policy size:0", "--policy size:N needs a number of parameters of at least 1"),
    "tokens and text": ("--tokens {tmp}/ids.bin --data {tmp}/short.txt", "--data and --tokens cannot be combined"),
    "tokens missing": ("--tokens {tmp}/nowhere.bin", "--tokens {tmp}/nowhere.bin cannot be read"),
    "tokens of another format": ("--tokens {tmp}/short.txt", "context of 64 needs 65 tokens to train on"),
    "tokens of odd length": ("--tokens {tmp}/odd.bin", "odd.bin cannot be read"),
    "tokens that are too wide": ("--tokens {tmp}/wide.bin", "looks like uint32"),
    "tokens given twice": ("--tokens {tmp}/ids.bin {tmp}/ids.bin", "one is given twice"),
    "tokens in rows": ("--tokens {tmp}/rows.npy", "must be one dimension of uint16, uint32"),
    "tokens that are pickled": ("--tokens {tmp}/objects.npy", "objects.npy cannot be read"),
    "tokens below 0": ("--tokens {tmp}/negative.npy", "must hold token ids of at least 0, but holds -1"),
    "tokens too few": ("--tokens {tmp}/ids.bin --context 20", "context of 20 needs 21 tokens to validate on"),
    "tokens unknown to the model": ("--tokens {tmp}/ids.bin --context 8", "ids.bin holds token 300, but the model has"),
    "token dtype without tokens": ("--token-dtype uint16", "--token-dtype needs --tokens"),
    "vocabulary without all bytes": ("--vocab-size 255", "text needs all 256 bytes, but the model has"),
    "two models": ("--hf {tmp} --factory own_models:build", "--hf and --factory cannot be combined"),
    "sizes of another model": ("--factory own_models:build --layers 3", "--layers describes the GPT"),
    "factory without a function": ("--factory own_models", "--factory must be PKG.MOD:FN"),
    "factory that is not there": ("--factory own_models:nothing", "--factory own_models:nothing cannot be imported"),
    "factory of something else": ("--factory own_models:number", "must return a module, but returned int"),
    "factory with a bad loss": ("--factory own_models:half", "must return a function as its loss, but returned str"),
    "class that is not there": ("--factory own_models:build --policy class:Conv", "class:Conv must be a class"),
    "hf without a config": ("--hf {tmp}", "--hf must be a config file or a folder with a config.json"),
    "tracker unknown": ("--log mlflow", "--log: invalid choice: 'mlflow'"),
    "tracker missing": ("--log trackio", "trackio must be installed. Run: pip install trackio"),
    "sample negative": ("--sample -1", "--sample must be at least 0"),
    **{
        f"{name} of the wrong type": (f"--resume --out {{tmp}}/forged-{name}", "config.json cannot be read")
        for name in FORGED
    },
    "output at a URL": ("--out s3://bucket/run", "must name a file or folder on this machine"),
    "no name": ("--out=", "must name a file or folder"),
    "copies in memory, of 0.6": ("--memory-every 5", "Pass a smaller --save-every"),
    "flag unknown": ("--bogus", "unrecognized arguments: --bogus. See fairshard train --help."),
    "flag abbreviated": ("--step 5", "unrecognized arguments: --step"),
    **{
        f"{flag} zero": (f"--{flag} 0", f"--{flag} must be at least 1")
        for flag in "steps batch-size accumulate context layers dim heads eval-every threads vocab-size".split()  # noqa: SIM905
    },
}


OWN = """
from torch import nn
build = lambda: nn.Sequential(nn.Embedding(256, 8), nn.Linear(8, 256))
number = lambda: 3
half = lambda: (build(), "loss")
"""


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A folder with one bad path of each kind."""
    (tmp_path / "short.txt").write_text("x" * 100)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "zeros.bin").write_bytes(bytes(100))
    for name in ("emptydir", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    np.arange(280, 301, dtype="<u2").repeat(5).tofile(tmp_path / "ids.bin")
    (tmp_path / "odd.bin").write_bytes(bytes(101))
    np.arange(1, 200, dtype="<u4").tofile(tmp_path / "wide.bin")
    np.save(tmp_path / "ids.npy", np.arange(200))
    np.save(tmp_path / "rows.npy", np.zeros((20, 20), np.int32))
    np.save(tmp_path / "negative.npy", np.arange(-1, 200))
    np.save(tmp_path / "objects.npy", np.array([{}], object))
    (tmp_path / "own_models.py").write_text(OWN)
    for name, value in FORGED.items():
        (tmp_path / f"forged-{name}").mkdir()
        (tmp_path / f"forged-{name}" / "config.json").write_text(json.dumps({"options": {name: value}}))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def meetings(monkeypatch):
    """The process groups that would have been created by a process that torchrun launched as rank 1 of 4."""
    calls = []
    monkeypatch.setattr(loop.dist, "init_process_group", lambda *args, **kwargs: calls.append(args))
    for name, value in {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    return calls


@pytest.mark.parametrize(("line", "names"), BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_exit_2_before_any_rank_starts(line, names, places, launched, capfd):
    """Each bad input is refused by the launching process alone, in one line that names what is wrong."""
    before = sorted(places.rglob("*"))
    assert main(["train", *line.format(tmp=places).split()]) == 2
    out, err = capfd.readouterr()
    assert err.startswith("fairshard: error: ")
    assert err.count("\n") == 1
    assert names.format(tmp=places) in err
    assert not out
    assert not launched
    assert sorted(path for path in places.rglob("*") if "__pycache__" not in path.parts) == before


def test_the_page_of_the_command_line_has_every_flag():
    """Every flag of every command is in docs/command_line.md, and every flag of a table there exists."""
    page = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()
    named = set(re.findall(r"`?(--[a-z][a-z-]+)", page))
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    known = {"--nproc-per-node"}
    for parser in commands.choices.values():
        known |= {flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")}
    assert {flag for flag in known if not flag.startswith("--no-")} - named == set()
    assert named - known == set()


def test_good_input_starts_the_ranks_with_the_same_words(launched, places):
    """Good input reaches the same patched launcher, which shows that the test above can fail."""
    words = f"--nproc 3 --batch-size 9 --data {places}/short.txt --context 8".split()
    assert main(["train", *words]) == 0
    assert main(["train", *words, "--max-restarts", "1", "--out", str(places / "new")]) == 0
    module = "-m", "fairshard.cli.train"
    assert launched == [(*module, *words), (*module, *words, "--max-restarts", "1", "--out", str(places / "new"),
                                            f"--out={places}/new")]  # fmt: skip


def test_a_json_file_gives_its_options(places):
    """Options of every kind become JSON, and that becomes the same options."""
    paths = (places / "a b.bin", places / "c.bin")
    given = TrainOptions(tokens=paths, token_dtype="uint32", cpu_offload=True, reshard_after_forward=False, lr=1e-5)
    assert TrainOptions.of(json.loads(json.dumps(asdict(given), default=str))) == given


@pytest.mark.parametrize(
    ("line", "names"),
    [
        *(BAD["data missing"], BAD["out holds a run"], BAD["dim not divisible by heads"], BAD["flag unknown"]),
        ("--batch-size 3", "cannot feed 4 ranks in --accumulate 1 passes: it must be at least 4"),  # 2 of them here
        ("--nproc 4", "--nproc and --max-restarts are for fairshard train"),
    ],
)
def test_under_torchrun_bad_input_is_exit_2_before_the_ranks_meet(line, names, places, meetings, capfd):
    """A rank that torchrun launched refuses by itself, in one line with its rank, and makes no process group."""
    assert main(["train", *line.format(tmp=places).split()]) == 2
    err = capfd.readouterr().err
    assert err.startswith("fairshard: error (rank 1): ")
    assert err.count("\n") == 1
    assert names in err
    assert not meetings


@pytest.mark.parametrize(
    ("gpus", "line", "names"),
    [
        (0, "--device cuda --nproc 2", "2 ranks and 0 of type cuda"),
        (2, "--device cuda --nproc 4", "4 ranks and 2 of type cuda"),
        (2, "--nproc 4", "4 ranks and 2 of type cuda"),
    ],
)
def test_each_rank_needs_a_gpu_of_its_own(gpus, line, names, monkeypatch, launched, capfd):
    """On CUDA more ranks than GPUs are refused, and so is CUDA without a GPU."""
    monkeypatch.setattr(loop, "device_count", lambda kind: gpus)
    monkeypatch.setattr(options, "device_count", lambda kind: gpus)
    monkeypatch.setattr(options, "default_device_type", lambda: "cuda" if gpus else "cpu")
    assert main(["train", *line.split()]) == 2
    assert names in capfd.readouterr().err
    assert not launched


def test_a_signal_of_your_own_stops_a_run_beside_sigterm():
    """``--signal`` adds one; without it there is SIGTERM alone."""
    assert TrainOptions().stop_signals == (signal.SIGTERM,)
    assert TrainOptions(signal="USR1").stop_signals == (signal.SIGTERM, signal.SIGUSR1)


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 2), (1, 1), (8, 8)])
def test_by_default_there_is_a_rank_for_each_gpu_else_two(gpus, ranks, monkeypatch):
    """Without ``--nproc`` there are as many ranks as GPUs, and 2 on a machine without GPUs."""
    monkeypatch.setattr(options, "device_count", lambda kind: gpus)
    monkeypatch.setattr(options, "default_device_type", lambda: "cuda" if gpus else "cpu")
    assert TrainOptions().num_ranks == ranks


def test_a_missing_package_is_bad_input(monkeypatch, launched, capfd):
    """Without the extra ``train`` the command says what to install, and starts nothing."""
    monkeypatch.setattr(loop.importlib.util, "find_spec", lambda name: None)
    assert main(["train"]) == 2
    assert "pip install 'fairshard[cli]'" in capfd.readouterr().err
    assert not launched


def test_threads_are_the_visible_cpus_over_the_local_ranks(launched, monkeypatch):
    """The ranks inherit OMP_NUM_THREADS, at least one, and glibc's thresholds, unless the user has set them."""
    seen = {}
    names = ("OMP_NUM_THREADS", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")

    def fake_launch(*args):
        return lambda *options: seen.update({name: os.environ.get(name) for name in names})

    monkeypatch.setattr(launch, "elastic_launch", fake_launch)
    monkeypatch.setattr(launch, "default_threads", lambda local_size: max(1, 6 // local_size))
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "5")
    for nproc, threads in ((2, 3), (4, 1), (8, 1)):
        assert main(["train", "--nproc", str(nproc)]) == 0
        assert seen == dict(zip(names, (str(threads), str(2**30), "5"), strict=True))


def test_the_learning_rate_rises_in_a_line_and_ends_at_a_tenth():
    """Step 1 of a warm-up of 4 has a quarter of the peak, step 4 the peak; then it falls to a tenth, and stays."""
    given = TrainOptions(steps=20, warmup=4, lr=0.5)
    rates = [learning_rate(given, step) for step in range(1, 21)]
    longer = replace(given, steps=30, lr_steps=20)
    assert [learning_rate(longer, step) for step in range(1, 31)] == rates + 10 * rates[-1:]
    assert rates[:4] == [0.5 * step / 4 for step in (1, 2, 3, 4)]
    assert math.isclose(rates[-1], 0.05)
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[3:]))
