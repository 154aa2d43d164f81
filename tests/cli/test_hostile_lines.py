"""500 command lines with hostile arguments: each ends with one line and exit code 2, before any rank starts."""

import os
import random
import time

import pytest
import torch

from fairshard.checkpoint import save
from fairshard.cli.main import main
from fairshard.cli.options import TrainOptions
from tests.checkpoint.written import save_alone
from tests.cli.bad_places import make_bad_places

NUM_SEEDS = 500
MAX_SECONDS = 5.0

NUMBERS = [
    "-1", "0", "1", "2", "1e3", "1.5", "nan", "inf", "-inf", "", " ", "0x10", "\uff11", "9" * 30, "9" * 5000, "1_000",
    "2147483648", "-0", "+5", "1e400", "1e-400", "1000000", "many", "3\n4", "\x1b[31m7", "--", "None", "\udcff",
]  # fmt: skip
PATHS = [
    "{tmp}/nowhere", "{tmp}/empty.txt", "{tmp}/emptydir", "{tmp}/zeros.bin", "{tmp}/pipe", "{tmp}/dangling", "",
    "{tmp}/loop", "{tmp}/text.txt", "{tmp}/text.txt/below", "/dev/null", "/dev/zero", "/proc", "/proc/self", "/sys",
    "/proc/self/mem", "/proc/kmsg", "{tmp}/" + "n" * 300, "{tmp}/" + "d/" * 3000 + "x", "a\0b", "{tmp}/new\nline",
    "s3://bucket/run", "gs://bucket/run", "bogus://x", "://", "file://", ".", "..", "{tmp}/\x1b[2J", "{tmp}/saved",
    "{tmp}/saved/.metadata", "{tmp}/\udcff", "~", "-", "--out", "{tmp}/forged", "{tmp}/run",
]  # fmt: skip
WORDS = [
    "", "gpt", "none", "size:1e400", "size:-1", "size:nan", "class:", "class:Nothing", "os:getcwd", "sys:exit",
    "a..b:c", "json:loads", ":", "x:", ":x", "flat", "row-blocks:0", "row-blocks:" + "9" * 400, "FULL_SHARD",
    "blocks", "none@", "@flat", "blocks@rows", "wrapper",
    "cuda:0", "meta", "mps", "cpu", "fp99", "torch", "safetensors", "adamw", "5GB", "0.1B", "9" * 400 + "GB", "1e9",
    "-5MB", "\udcff",
]  # fmt: skip

# The value that each flag takes: of which list hostile ones are drawn, and what is right.
TRAIN = {
    **dict.fromkeys(("--nproc", "--threads", "--keep-last", "--heads", "--accumulate", "--trace"), (NUMBERS, "1")),
    **dict.fromkeys(("--seed", "--save-every", "--max-restarts", "--warmup", "--clip"), (NUMBERS, "1")),
    "--bucket-cap-mb": (NUMBERS, "1"),
    **dict.fromkeys(("--layers", "--eval-every", "--steps", "--weight-decay"), (NUMBERS, "2")),
    **dict.fromkeys(("--dim", "--batch-size", "--context"), (NUMBERS, "16")),
    **{"--lr": (NUMBERS, "0.1"), "--data": (PATHS, "{tmp}/text.txt"), "--out": (PATHS, "{tmp}/out")},
    **{"--device": (WORDS, "cpu"), "--precision": (WORDS, "fp32"), "--optimizer": (WORDS, "sgd")},
    **dict.fromkeys(("--vocab-size",), (NUMBERS, "256")),
    **{"--sample": (NUMBERS, "0"), "--engine": (WORDS, "wrapper"), "--policy": (WORDS, "blocks")},
    **{"--tokens": (PATHS, None), "--token-dtype": (WORDS, None), "--log": (WORDS, None)},
    **{"--hf": (PATHS, None), "--factory": (WORDS, None)},
    **{"--resume-from": (NUMBERS, None), "--resume": (None, None), "--cpu-offload": (None, None)},
}
PLAN = {
    **dict.fromkeys(("--layers", "--heads", "--context", "--world-size"), (NUMBERS, "2")),
    **{"--dim": (NUMBERS, "16"), "--policy": (WORDS, "none"), "--placement": (WORDS, "flat")},
    **{"--replicas": (NUMBERS, None), "--bucket-cap-mb": (NUMBERS, "1"), "--reshard-to": (NUMBERS, None)},
    **{"--hf": (PATHS, None), "--factory": (WORDS, None), "--sharding-strategy": (WORDS, "FULL_SHARD")},
    **{"--precision": (WORDS, "bf16"), "--model": (WORDS, "gpt"), "--device": (WORDS, "cpu")},
    **{"--cpu-offload": (None, None), "--json": (None, None)},
    **{"--device-memory": (WORDS, "80GB"), "--png": (PATHS, None), "--compare": (WORDS, "blocks@flat")},
}
CONSOLIDATE = {
    "--format": (WORDS, "safetensors"),
    "--max-shard-size": (WORDS, "5GB"),
    "--config": (PATHS, None),
    "--allow-unverified": (None, None),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A folder with good and bad paths of each kind."""
    folder = make_bad_places(tmp_path_factory.mktemp("places"))
    (folder / "text.txt").write_text("x" * 5000)
    (folder / "dangling").symlink_to(folder / "gone")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "forged").mkdir()
    (folder / "forged" / "config.json").write_text('{"options": {"layers": "many", "steps": [1], "data": {}}}')
    os.mkfifo(folder / "pipe")
    save(folder / "saved", torch.nn.Linear(2, 2))
    return folder


def line_of(seed):
    """A command line with at least one hostile argument; the same for the same seed."""
    chance = random.Random(seed)
    command = chance.choice(["train", "train", "train", "plan", "consolidate", "inspect", "import-fairscale"])
    if command in ("train", "plan"):
        flags = TRAIN if command == "train" else PLAN
        line = ["--data", "{tmp}/text.txt", "--out", "{tmp}/out"] if command == "train" else ["--world-size", "2"]
    else:
        flags = CONSOLIDATE if command == "consolidate" else {}
        num = {"consolidate": 2, "inspect": 1, "import-fairscale": chance.choice([2, 3])}[command]
        line = [chance.choice(PATHS) for _ in range(num)]
    chosen = chance.sample(sorted(flags), min(len(flags), chance.choice([1, 1, 2, 3])))
    for index, flag in enumerate(chosen):
        hostile, good = flags[flag]
        if hostile is None:
            line.append(flag)
            continue
        value = chance.choice(hostile) if index == 0 or good is None or chance.random() < 0.3 else good
        line += [f"{flag}={value}"] if chance.random() < 0.7 else [flag, value]
    return [command, *line]


def test_hostile_command_lines_end_with_one_line_before_any_rank(places, launched, capfd, monkeypatch):
    """Nothing but good input starts ranks; everything else is one printable line and exit code 2, soon.

    A checkpoint or a shard that cannot be read is exit code 1: the arguments themselves were good.
    """
    monkeypatch.chdir(places)
    codes = {0: 0, 1: 0, 2: 0}
    for seed in range(NUM_SEEDS):
        line = [part.replace("{tmp}", str(places)) for part in line_of(seed)]
        before, began = sorted(places.rglob("*")), time.process_time()
        launched.clear()
        code = main(line)
        err = capfd.readouterr().err
        codes[code] += 1
        assert time.process_time() - began < MAX_SECONDS, (seed, line)
        if code:
            assert not launched, (seed, line)
            assert (err.count("\n"), err.endswith("\n")) == (1, True), (seed, line, err)
            assert err.startswith("fairshard: error: "), (seed, line, err)
            assert err.strip().isprintable(), (seed, line, err)
            assert len(err) < 1200, (seed, line, err)
            assert sorted(places.rglob("*")) == before, (seed, line)
            assert code == 2 or line[0] in ("consolidate", "inspect", "import-fairscale"), (seed, line, err)
        elif line[0] == "train":
            ((options, _),) = launched
            assert isinstance(options, TrainOptions), (seed, line)
        for path in set(places.rglob("*")) - set(before):
            assert line[0] in ("consolidate", "import-fairscale"), (seed, line, path)
    assert codes[2] > NUM_SEEDS // 2, codes


GUARDED = {
    "more threads than the machine bears": ("--threads 100000", "--threads must be at most"),
    "more ranks than the machine bears": ("--nproc 100000", "--nproc must be at most"),
    "a model larger than memory": ("--layers 100 --dim 100000 --heads 1", "of memory here at least"),
    "a large batch": ("--batch-size 1000000 --context 100000 --data {tmp}/sparse.txt", "of memory here at least"),
    "text of the kernel": ("--data /proc", "made by the kernel"),
    "output of the kernel": ("--out /proc/run", "made by the kernel"),
    "output among devices": ("--out /dev/run", "made by the kernel"),
    "a long name": ("--out " + "n" * 300, "at most 255 bytes"),
    "a dangling link": ("--out {tmp}/dangling", "is a link to"),
    "text at a dangling link": ("--data {tmp}/dangling", "is a link to"),
    "output at a URL": ("--out s3://bucket/run", "must be on this machine"),
    "no name": ("--out=", "is empty"),
    "steps without end": ("--steps 99999999999", "--steps must be at most"),
}


@pytest.mark.parametrize("case", GUARDED)
def test_the_machine_is_protected(case, places, launched, capfd):
    """Options that would fill the machine are refused, in a line that names them."""
    line, names = GUARDED[case]
    if not (places / "sparse.txt").exists():
        with (places / "sparse.txt").open("wb") as file:
            file.write(b"x" * 8192)
            file.truncate(10**7)
    assert main(["train", *line.replace("{tmp}", str(places)).split()]) == 2
    err = capfd.readouterr().err
    assert names in err
    assert err.count("\n") == 1
    assert not launched


def test_a_protocol_without_its_package_says_which(capfd, monkeypatch):
    """``s3://`` needs a package of fsspec's: without it the command says so."""
    import sys

    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert main(["inspect", "s3://bucket/run"]) == 2
    err = capfd.readouterr().err
    assert "s3:// needs a package that is not installed" in err
    assert err.count("\n") == 1


def test_a_forged_run_is_not_resumed(places, launched, capfd):
    """Options of the wrong type in a run's ``config.json`` are refused before any rank starts."""
    assert main(["train", "--resume", "--out", str(places / "forged")]) == 2
    assert "cannot be read" in capfd.readouterr().err
    assert not launched


def test_names_in_a_checkpoint_cannot_reach_the_terminal(tmp_path, capfd):
    """`inspect` escapes control characters, lines and surrogates in names of entries."""
    save_alone(tmp_path / "saved", {"model": {"a\x1b[2J\nb\udcff": torch.ones(2)}})
    assert main(["inspect", "--all", str(tmp_path / "saved")]) == 0
    assert r"model.a\x1b[2J\nb\udcff" in capfd.readouterr().out
