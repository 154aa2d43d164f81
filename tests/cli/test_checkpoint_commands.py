"""``consolidate``, ``inspect`` and ``import-fairscale``: what they print, and one-line errors."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

from fairshard.cli.checkpoints import size_argument
from fairshard.cli.main import main
from fairshard.utils.size_text import size_text
from tests.checkpoint.test_import_fairscale import MODELS, write_shards
from tests.checkpoint.written import change_byte, poison_metadata, poison_tensor, save_alone, sign

pytestmark = pytest.mark.filterwarnings("ignore:.* has no fairshard.json")


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The folder of a run with one checkpoint, which is the working directory."""
    weight = torch.arange(6.0).view(2, 3)
    folder = tmp_path / "step-00000100"
    save_alone(folder, {"model": {"emb.weight": weight, "head.weight": weight, "b": torch.ones(4)}, "scheduler": [1]})
    sign(folder, world_size=2, aliases={"head.weight": "emb.weight"})
    (tmp_path / "latest").write_text("step-00000100\n")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(line, capfd):
    """Exit code, and what was printed as (stdout, stderr)."""
    code = main(line.split())
    return code, *capfd.readouterr()


def test_consolidate_writes_torchs_format_by_default(root, capfd):
    """The root means its latest checkpoint; the output says how much was written and where."""
    assert run("consolidate . out.pt", capfd) == (
        0,
        "2 tensors, 40 bytes, 1 tied\n  out.pt\n",
        "",
    )
    found = torch.load("out.pt", weights_only=True)
    assert found.keys() == {"emb.weight", "head.weight", "b"}


def test_the_folder_of_a_run_means_its_latest_checkpoint(root, capfd):
    """`fairshard train` writes checkpoints into a folder of their own, beside its other files."""
    run_folder = root / "runs" / "1"
    run_folder.mkdir(parents=True)
    for name in ("step-00000100", "latest"):
        (run_folder / "checkpoints").mkdir(exist_ok=True)
        (root / name).rename(run_folder / "checkpoints" / name)
    assert run("consolidate runs/1 out.pt", capfd)[0] == 0
    code, out, _ = run("inspect runs/1", capfd)
    assert code == 0
    assert "runs/1/checkpoints/step-00000100" in out


def test_consolidate_writes_shards_for_hugging_face(root, capfd):
    """24 bytes and 16 in shards of at most 30 are two files; the config lies beside them."""
    code, out, err = run(
        "consolidate step-00000100 out --format safetensors --max-shard-size 30B --config config", capfd
    )
    assert (code, err) == (0, "")
    names = {path.name for path in (root / "out").iterdir()}
    assert {f"  out/{name}" for name in names} == set(out.splitlines()[1:])
    assert names == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "config.json",
    }
    assert load_file("out/model-00001-of-00002.safetensors").keys() == {"emb.weight"}


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [("1B", 1), ("7", 7), ("1.5kB", 1500), ("2MiB", 2 << 20), ("5GB", 5 * 10**9), ("1 gib", 1 << 30)],
)
def test_sizes_have_units(size, nbytes):
    """kB, MB and GB are powers of a thousand, KiB, MiB and GiB of 1024; in any case of letters."""
    assert size_argument(size) == nbytes


BAD = {
    "no such checkpoint": ("consolidate nowhere out", "nowhere must be the folder of a checkpoint"),
    "output that exists": ("consolidate . latest", "latest exists, and is never overwritten"),
    "output below nothing": ("consolidate . a/b", "parent of a/b must be a folder"),
    "unknown format": ("consolidate . out --format gguf", "invalid choice: 'gguf'"),
    "shards of torch's format": ("consolidate . out --max-shard-size 5GB", "need --format safetensors"),
    "config for torch's format": ("consolidate . out --config config", "need --format safetensors"),
    "config without config.json": ("consolidate . out --format safetensors --config step-00000100", "has none"),
    "size without a number": ("consolidate . out --format safetensors --max-shard-size big", "'big'"),
    "size of nothing": ("consolidate . out --format safetensors --max-shard-size 0GB", "but is '0GB'"),
    "size in no unit": ("consolidate . out --format safetensors --max-shard-size 5PB", "but is '5PB'"),
    "nothing to inspect": ("inspect nowhere", "nowhere must be the folder of a checkpoint"),
    "no shards": ("import-fairscale out", "the following arguments are required"),
    "no such shard": (
        "import-fairscale shard_0.pt out",
        "shard_0.pt must be a file of fairscale's, but does not exist",
    ),
    "import into what exists": ("import-fairscale latest config", "config exists"),
    "flag unknown": ("inspect . --yaml", "unrecognized arguments: --yaml. See fairshard inspect --help."),
}


@pytest.mark.parametrize(("line", "names"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_one_line_and_exit_2(line, names, root, capfd):
    """Each is refused in one line that names what is wrong; nothing is written."""
    before = sorted(root.rglob("*"))
    code, out, err = run(line, capfd)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("fairshard: error: ")
    assert names in err
    assert sorted(root.rglob("*")) == before


CONSOLIDATE = ["consolidate . out", "consolidate . out --format safetensors"]
DAMAGES = {
    "changed": ("__0_0.distcp", ["inspect .", *CONSOLIDATE]),
    "missing": ("__0_0.distcp", ["inspect .", *CONSOLIDATE]),
    "malicious metadata": (".metadata", ["inspect .", *CONSOLIDATE]),
    "malicious tensor": ("__0_0.distcp", CONSOLIDATE),  # inspect reads no tensors
    "manifest": ("fairshard.json", ["inspect .", *CONSOLIDATE]),
}


@pytest.mark.parametrize(
    ("damage", "command"), [(damage, line) for damage, (_, lines) in DAMAGES.items() for line in lines]
)
def test_a_damaged_checkpoint_is_exit_1_and_names_the_file(damage, command, root, capfd):
    """One line on stderr with the path; no code of the checkpoint runs, nothing is written."""
    folder = root / "step-00000100"
    name = DAMAGES[damage][0]
    if damage == "changed":
        change_byte(folder / name)
    elif damage == "missing":
        (folder / name).unlink()
    elif damage == "malicious metadata":
        poison_metadata(folder, root / "mark")
        sign(folder)
    elif damage == "malicious tensor":
        poison_tensor(folder, "model.b", root / "mark")
        (folder / "fairshard.json").unlink()
    else:
        (folder / name).write_text("{")
    before = sorted(root.rglob("*"))
    code, _, err = run(command, capfd)
    assert (code, err.count("\n")) == (1, 1)
    assert f"step-00000100/{name}" in err
    assert sorted(root.rglob("*")) == before


def test_a_lost_manifest_names_the_flag_that_reads_on(root, capfd, monkeypatch):
    """The cure is the command's flag, not the argument of a function; with it the weights are read."""
    monkeypatch.setattr("fairshard.checkpoint.reader.is_marked", lambda known: True)
    (root / "step-00000100" / "fairshard.json").unlink()
    code, _, err = run("consolidate . out.pt", capfd)
    assert (code, err.endswith("to read this one unchecked, pass --allow-unverified.\n")) == (1, True)
    assert run("consolidate . out.pt --allow-unverified", capfd)[0] == 0


def test_names_in_a_checkpoint_cannot_reach_the_terminal(tmp_path, capfd):
    """`inspect` escapes control characters, lines and surrogates in names of entries."""
    save_alone(tmp_path / "saved", {"model": {"a\x1b[2J\nb\udcff": torch.ones(2)}})
    assert main(["inspect", "--all", str(tmp_path / "saved")]) == 0
    assert r"model.a\x1b[2J\nb\udcff" in capfd.readouterr().out


def test_a_protocol_without_its_package_says_which(capfd, monkeypatch):
    """``s3://`` needs a package of fsspec's: without it the command says so, in one line."""
    monkeypatch.setitem(sys.modules, "s3fs", None)
    code, _, err = run("inspect s3://bucket/run", capfd)
    assert (code, err.count("\n")) == (1, 1)
    assert "s3:// needs a package that is not installed" in err


def test_inspect_prints_a_table(root, capfd):
    """A summary; with ``--all`` every tensor with its tie, objects, files, and totals, in aligned columns."""
    code, short, err = run("inspect .", capfd)
    assert (code, err) == (0, "")
    files = [path for path in (root / "step-00000100").iterdir() if path.name != "fairshard.json"]
    total = size_text(sum(path.stat().st_size for path in files))
    assert [line for line in short.splitlines() if not line.startswith("versions")] == [
        "checkpoint  ./step-00000100",
        "parameters  10 in 2 tensors, 1 tied, 40 B",
        "optimizer   none",
        "step        100",
        "world size  2",
        f"size        {total} in 2 files",
        "sound       yes: every file has its checksum",
    ]
    code, out, err = run("inspect . --all", capfd)
    assert (code, err) == (0, "")
    assert out.startswith(short)
    lines = out.splitlines()
    rows = [line.split() for line in lines[lines.index("") + 1 :]]
    assert rows[0] == ["tensor", "shape", "dtype", "pieces", "bytes"]
    assert rows[2:5] == [
        ["model.b", "4", "float32", "1", "16"],
        ["model.emb.weight", "2", "x", "3", "float32", "1", "24"],
        ["model.head.weight", "2", "x", "3", "float32", "1", "24", "tied", "to", "model.emb.weight"],
    ]
    assert rows[6] == ["3", "in", "all", "3", "64"]
    files = {row[0]: row[-1] for row in rows if row and row[0] in (".metadata", "__0_0.distcp")}
    assert files == {".metadata": "ok", "__0_0.distcp": "ok"}
    assert lines[-1].endswith("all ok")


def test_inspect_shows_the_rest_of_a_damaged_checkpoint(root, capfd):
    """The table is printed before the exit code says that a file is bad."""
    change_byte(root / "step-00000100" / "__0_0.distcp")
    code, out, _ = run("inspect . --all", capfd)
    assert code == 1
    assert "model.emb.weight" in out
    assert "sound       no: 1 of 2 files damaged or missing. Use another checkpoint" in out.splitlines()
    assert out.splitlines()[-1].endswith("1 bad")


def test_inspect_gives_json(root, capfd):
    """The JSON is one object with everything; without a manifest the fields that need it are null."""
    code, out, _ = run("inspect . --json", capfd)
    found = json.loads(out)
    assert code == 0
    assert (found["step"], found["world_size"], found["aliases"]) == (100, 2, {"head.weight": "emb.weight"})
    assert found["versions"]["torch"] == torch.__version__
    assert found["tensors"][0] == {
        "name": "model.b", "shape": [4], "dtype": "float32", "pieces": 1, "nbytes": 16, "tied_to": None,
    }  # fmt: skip
    assert [entry["name"] for entry in found["objects"]] == ["scheduler"]
    assert [(file["name"], file["state"]) for file in found["files"]] == [(".metadata", "ok"), ("__0_0.distcp", "ok")]
    (root / "step-00000100" / "fairshard.json").unlink()
    found = json.loads(run("inspect . --json", capfd)[1])
    assert (found["step"], found["world_size"], found["files"][0]["state"]) == (None, None, "unknown")


def test_fairscales_shards_become_a_checkpoint(root, capfd):
    """The folder can be inspected and consolidated; shards that do not fit are one line, which names the file."""
    model = MODELS["nested units, flattened"]
    paths = write_shards(root, model, 3)
    code, out, err = run(f"import-fairscale {' '.join(paths)} imported", capfd)
    assert (code, err) == (0, "")
    assert out.startswith("imported: the shards of 3 ranks, ")
    assert run("inspect imported", capfd)[0] == 0
    assert run("consolidate imported out.pt", capfd)[0] == 0
    found = torch.load("out.pt", weights_only=True)
    assert all(torch.equal(found[name], value) for name, value in model.weights().items())
    code, out, err = run(f"import-fairscale {paths[0]} {paths[2]} other", capfd)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "shard_2.pt" in err
    assert not (root / "other").exists()
