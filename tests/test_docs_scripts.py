"""The scripts of the docs do what their pages say: on two ranks, and on three where the page says so."""

import contextlib
import importlib.util
import io
import json
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fairshard.cli.main import main
from fairshard.engine import residency
from tests.kit import run_ranks

DOCS = Path(__file__).parents[1] / "docs"
SCRIPTS = DOCS / "scripts"
ELSEWHERE = {"fairscale_before", "deepspeed_before"}  # need fairscale and a GPU, DeepSpeed and a GPU

pytestmark = pytest.mark.cpu_only("the scripts say gloo")


def run_script(name, folder):
    """Run a script as torchrun would, in ``folder``, in the process group that is there; return what it prints."""
    printed = io.StringIO()
    before = os.getcwd()
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(printed),
    ):
        os.chdir(folder)
        try:
            names = runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
        finally:
            os.chdir(before)
    loss = names.get("loss")
    return printed.getvalue(), loss.item() if isinstance(loss, torch.Tensor) else None


def run_on(num_ranks, name, folder):
    """What each rank prints, and each rank's last loss."""
    results = run_ranks(num_ranks, run_script, name, str(folder), timeout=120.0)
    return [text for text, _ in results], [loss for _, loss in results]


def free_port():
    """A port that nothing uses now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def needs(*packages):
    """Skip if one of ``packages`` is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}: pip install {package}")


def falls(line):
    """Whether a line like ``loss 6.24 -> 5.80`` tells of a smaller loss."""
    first, last = re.search(r"loss ([\d.]+) -> ([\d.]+)", line).groups()
    return float(last) < float(first)


def test_gpt2_with_groups_of_weight_decay_is_saved_for_from_pretrained(tmp_path):
    """A GPT-2 of transformers trains in two groups, and `from_pretrained` reads what `save_pretrained` wrote."""
    needs("transformers")
    printed, _ = run_on(2, "hf_gpt2", tmp_path)
    assert all(falls(text) for text in printed)
    assert (tmp_path / "gpt2-trained" / "model.safetensors").exists()


@pytest.mark.full
def test_lora_adapters_are_trained_and_saved_alone(tmp_path):
    """peft's adapters train inside the wrapper; the folder holds them, and not the base model."""
    needs("transformers", "peft")
    printed, _ = run_on(2, "hf_lora", tmp_path)
    assert all(falls(text) for text in printed)
    adapter = tmp_path / "lora-adapter" / "adapter_model.safetensors"
    assert 0 < adapter.stat().st_size < 20_000


@pytest.mark.parametrize("system", ["fsdp1", pytest.param("fsdp2", marks=pytest.mark.full)])
def test_losses_before_and_after_a_change_of_engine_are_equal(system, tmp_path):
    """PyTorch's engine and ours print the same losses, to the rounding of kernels, and both save."""
    folders = [tmp_path / "before", tmp_path / "after"]
    losses = []
    for folder in folders:
        folder.mkdir()
        losses.append(run_on(2, f"{system}_{folder.name}", folder)[1])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    saved = {name for folder in folders for name in os.listdir(folder)}
    assert saved == {"fsdp1": {"whole.pt"}, "fsdp2": {"checkpoint"}}[system]
    assert all(os.listdir(folder) for folder in folders)


def test_a_script_for_fairscale_trains_with_other_imports(tmp_path):
    """The fairscale script needs only other imports, and no GPU; its whole state dicts are written."""
    run_on(2, "fairscale_after", tmp_path)
    saved = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert saved["model"]["1.linear1.weight"].shape == (64, 32)
    assert set(saved["optimizer"]) >= {"state", "param_groups"}


def test_the_script_that_replaces_deepspeed_saves_both(tmp_path):
    """The checkpoint and the weights in bf16 are there."""
    run_on(2, "deepspeed_after", tmp_path)
    assert torch.load(tmp_path / "weights.bin", weights_only=True)["0.weight"].dtype == torch.bfloat16
    assert json.loads((tmp_path / "checkpoints" / "step-4" / "fairshard.json").read_text())["step"] == 4


def changed_lines(before, after):
    """The lines that only one of two scripts has, without their docstrings."""
    texts = [(SCRIPTS / f"{name}.py").read_text().splitlines()[1:] for name in (before, after)]
    return [{line for line in one if line.strip()} - set(other) for one, other in (texts, texts[::-1])]


@pytest.mark.parametrize("system", ["fairscale", "fsdp1", "fsdp2"])
def test_only_imports_and_devices_change(system):
    """Between before and after only imports differ; fairscale's script also loses what names CUDA."""
    for lines in changed_lines(f"{system}_before", f"{system}_after"):
        rest = [line for line in lines if not line.startswith("from ")]
        assert not rest or system == "fairscale"
    old, _ = changed_lines("fairscale_before", "fairscale_after")
    allowed = r"from .*|dist\.init_process_group.*|torch\.cuda\.set_device.*"
    kept = {line.replace(".cuda()", "") for line in old if not re.fullmatch(allowed, line)}
    assert kept <= set((SCRIPTS / "fairscale_after.py").read_text().splitlines())


def test_offloaded_steps_clip_to_the_bit(tmp_path):
    """The script itself compares the losses with those of a run without offload."""
    printed, _ = run_on(2, "offload_clipping", tmp_path)
    assert all(text.startswith(f"rank {rank}: losses [") for rank, text in enumerate(printed))


def test_two_ranks_save_three_go_on_and_safetensors_come_out(tmp_path):
    """Steps 1 to 10 on two ranks, 11 to 20 on three; then `fairshard consolidate` writes safetensors."""
    needs("safetensors")
    assert "rank 0 of 2: steps 1 to 10," in run_on(2, "other_ranks", tmp_path)[0][0]
    assert "rank 2 of 3: steps 11 to 20," in run_on(3, "other_ranks", tmp_path)[0][2]
    out = tmp_path / "weights"
    with mock.patch.object(sys, "argv", ["fairshard"]), contextlib.redirect_stdout(io.StringIO()):
        status = main(
            ["consolidate", str(tmp_path / "checkpoints" / "step-00000020"), str(out), "--format", "safetensors"]
        )
    assert not status
    from safetensors.torch import load_file

    weights = {name: value for file in out.glob("*.safetensors") for name, value in load_file(file).items()}
    assert weights["0.0.weight"].shape == (16, 16)


def train_own_model(name, folder):
    """A rank of ``fairshard train --factory name:build``; its training losses."""
    from fairshard.cli.loop import TrainOptions, train

    losses = []
    sizes = {"context": 16, "batch_size": 8, "steps": 6, "save_every": 0, "lr": 1e-2, "warmup": 1}
    options = TrainOptions(factory=f"{name}:build", data=folder / "text", out=folder / "run", **sizes)
    train(options, on_step=lambda metrics: losses.append(metrics.loss))
    return losses


def test_a_model_of_your_own_trains_from_the_command_line(tmp_path, monkeypatch):
    """The module is found by its name; the losses are those of its own function, equal on both ranks, and fall."""
    monkeypatch.syspath_prepend(SCRIPTS)
    (tmp_path / "text").write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    losses, other = run_ranks(2, train_own_model, "own_model", tmp_path, timeout=120.0)
    assert losses == other
    assert losses[-1] < losses[0] - 0.5
    assert (tmp_path / "run" / "run.png").exists()


@pytest.mark.full
def test_the_rank_that_diverges_is_found(tmp_path):
    """Both ranks print the ranks, modules and lines of code that differ: what the page shows."""
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPTS / "diverging.py")],
            env={**env, "RANK": str(rank), "PYTHONPATH": str(DOCS.parent)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    page = (DOCS / "guides" / "failures.md").read_text()
    for rank in ranks:
        printed, _ = rank.communicate(timeout=120)
        assert rank.returncode == 1
        lines = printed.splitlines()
        assert "Timed out waiting" in lines[0]
        assert len(lines) == 4
        for line in lines[1:]:
            assert line in page, f"the page does not show: {line}"


def main_lines(page):
    """The ``file``s and functions in the drawings of the walk."""
    part = page[page.index("## The walk in files") :]
    return [re.findall(r"(\w+\.py) +(\w+)", block) for block in re.findall(r"^```\n(.*?)^```", part, re.M | re.S)]


def test_the_walk_is_that_of_the_page(tmp_path):
    """What the page draws is a part of what the script prints, in the same order."""
    printed = run_on(2, "walk", tmp_path)[0][0]
    walks = printed.split("one gradient")
    page = (DOCS / "how_it_works" / "guided_path.md").read_text()
    for lines, walk in zip(main_lines(page), walks, strict=True):
        stays = re.findall(r"^ *\d+ +\S*?(\w+\.py) +(.*)$", walk, re.M)
        calls = iter([(file, name) for file, names in stays for name in names.split(", ")])
        assert len(lines) > 10
        for line in lines:
            assert line in calls, f"the walk does not come to {line} there"


def test_the_table_of_residency_is_on_the_page():
    """The page shows what ``python -m fairshard.engine.residency`` prints."""
    page = (DOCS / "how_it_works" / "guided_path.md").read_text()
    assert f"$ python -m fairshard.engine.residency\n{residency.table()}\n```" in page


def test_every_script_is_run_and_shown():
    """A new script must be run here, and be on a page."""
    here = Path(__file__).read_text()
    pages = "".join(page.read_text() for page in DOCS.rglob("*.md") if "_build" not in page.parts)
    for script in SCRIPTS.glob("*.py"):
        system = script.stem.rpartition("_")[0]
        assert script.stem in ELSEWHERE or f'"{script.stem}' in here or f'"{system}"' in here
        assert f"scripts/{script.name}" in pages, f"{script.name} is on no page"
