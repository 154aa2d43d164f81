"""Consolidation writes every weight under its name, to the bit, in bounded memory, completely or not at all."""

import json
import os
import resource
import subprocess
import sys

import fsspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fairshard.checkpoint.consolidate import consolidate_safetensors, consolidate_torch
from fairshard.errors import CheckpointError
from tests.checkpoint.written import change_byte, save_alone, save_cut, sign
from tests.kit import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.* has no fairshard.json")

MB = 1 << 20
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool]


def weights_of(dtype=torch.float32):
    """Weights whose shapes are cut inside a row, empty, 0-dim, and one large among small ones."""
    random = torch.Generator().manual_seed(0)
    shapes = {"emb.weight": (7, 5), "layers.0.w": (3, 4, 2), "layers.10.b": (4,), "scale": (), "none": (0, 3)}
    return {name: torch.randn(shape, generator=random).mul(9).to(dtype) for name, shape in shapes.items()}


def tree_of(weights):
    """A tree as a `Checkpointer` saves it: a model and what goes along with it."""
    state = {name: {"exp_avg": torch.ones(3), "step": torch.tensor(7.0)} for name in weights}
    return {
        "model": dict(weights),
        "optim": {"state": state, "param_groups": [{"lr": 0.1, "params": list(weights)}]},
        "scheduler": {"last_epoch": 3},
        "rank": {"0": {"seed": 1}},
    }


def equal(found, expected):
    """Both have the same names, and values of the same dtype, shape and bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name


def read_folder(folder):
    """The tensors of a Hugging Face folder, through its index if there is one."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    found = {file: load_file(folder / file) for file in set(weight_map.values())}
    assert sum(map(len, found.values())) == len(weight_map)
    return {name: found[file][name] for name, file in weight_map.items()}


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of ours, with a manifest; its weights are `weights_of`."""
    folder = tmp_path / "step-00000100"
    save_alone(folder, tree_of(weights_of()))
    sign(folder)
    return folder


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_both_formats_hold_every_weight_to_the_bit(tmp_path, dtype):
    """The file holds the weights that were saved, in any dtype, and nothing of optimizer, scheduler or ranks."""
    expected = weights_of(dtype)
    save_alone(tmp_path / "ckpt", tree_of(expected))
    found = consolidate_torch(tmp_path / "ckpt", tmp_path / "out.pt")
    consolidate_safetensors(tmp_path / "ckpt", tmp_path / "out")
    equal(torch.load(tmp_path / "out.pt", weights_only=True), expected)
    equal(torch.load(tmp_path / "out.pt", weights_only=True, mmap=True), expected)
    equal(read_folder(tmp_path / "out"), expected)
    assert (found.num_tensors, found.nbytes) == (5, sum(value.nbytes for value in expected.values()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ckpt", "out", "out.pt"]


def test_pieces_of_several_ranks_are_put_together(tmp_path):
    """Two ranks hold shards cut inside rows; the files hold full weights again."""
    expected = {name: value for name, value in weights_of().items() if value.numel()}
    run_ranks(2, save_cut, folder=str(tmp_path / "ckpt"), whole=expected)
    consolidate_torch(tmp_path / "ckpt", tmp_path / "out.pt")
    equal(torch.load(tmp_path / "out.pt", weights_only=True), expected)


W = torch.ones(2)
LAYOUTS = {
    "ours": ({"model": {"a.w": W}, "optim": {"state": {"a.w": {"m": W}}}}, {"a.w"}),
    "FSDP2's application state": ({"app": {"model": {"a.w": W}, "optim": {"state": {"model": {"m": W}}}}}, {"a.w"}),
    "a model that has a model": ({"model": {"model.a.w": W, "head.w": W}}, {"model.a.w", "head.w"}),
    "bare names": ({"a.w": W, "optim.state.a.w.m": W}, {"a.w"}),
    "bare names, as nested dicts": ({"a": {"w": W}, "optimizer": {"a.w": W}}, {"a.w"}),
    "bare names of a model that has a model": ({"model.a.w": W, "lm_head.w": W}, {"model.a.w", "lm_head.w"}),
    "ours, already flat": ({"model.a.w": W, "optim.state.model.a.w.m": W, "rank.0.rng": W}, {"a.w"}),
}


@pytest.mark.parametrize(("tree", "names"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_the_model_is_found_whoever_saved_it(tmp_path, tree, names):
    """Prefixes of the saved dict are stripped, parts of parameter names never; optimizers are left out."""
    save_alone(tmp_path / "ckpt", tree)
    consolidate_torch(tmp_path / "ckpt", tmp_path / "out.pt")
    assert torch.load(tmp_path / "out.pt", weights_only=True).keys() == names


@pytest.mark.parametrize("limit", [1, 100, 160, 255, 256])
def test_shards_are_what_hugging_face_expects(tmp_path, saved, limit):
    """Files are numbered, hold ``limit`` bytes or one tensor, have ``format`` pt; an index has the sum of bytes."""
    expected = weights_of()
    total = sum(value.nbytes for value in expected.values())
    consolidate_safetensors(saved, tmp_path / "out", max_shard_nbytes=limit)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    for number, path in enumerate(files, 1):
        assert path.name == (
            "model.safetensors" if limit >= total else f"model-{number:05}-of-{len(files):05}.safetensors"
        )
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(value.nbytes for value in tensors.values()) <= limit
        with safe_open(path, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    equal(read_folder(tmp_path / "out"), expected)
    if limit < total:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": total}


def test_tied_weights_share_memory_or_are_written_once(tmp_path):
    """In torch's file both names share one storage; safetensors has only the first name."""
    weight = torch.arange(1000.0)
    save_alone(tmp_path / "ckpt", {"model": {"emb.weight": weight, "head.weight": weight, "b": torch.ones(1)}})
    sign(tmp_path / "ckpt", aliases={"head.weight": "emb.weight"})
    consolidate_torch(tmp_path / "ckpt", tmp_path / "out.pt")
    consolidate_safetensors(tmp_path / "ckpt", tmp_path / "out")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found["emb.weight"].data_ptr() == found["head.weight"].data_ptr()
    assert (tmp_path / "out.pt").stat().st_size < 2 * weight.nbytes
    equal(found, {"emb.weight": weight, "head.weight": weight, "b": torch.ones(1)})
    equal(read_folder(tmp_path / "out"), {"emb.weight": weight, "b": torch.ones(1)})


def test_weights_of_one_file_have_storages_of_their_own(tmp_path, saved):
    """Keeping one weight alive keeps only its own bytes, not the model's."""
    consolidate_torch(saved, tmp_path / "out.pt")
    for value in torch.load(tmp_path / "out.pt", weights_only=True).values():
        assert value.untyped_storage().nbytes() == value.nbytes


def test_aliases_that_do_not_fit_the_tensors_are_refused(tmp_path, saved):
    """A manifest that ties tensors of different shapes does not belong to this checkpoint."""
    sign(saved, aliases={"scale": "emb.weight"})
    with pytest.raises(CheckpointError, match=r"`scale` and `emb\.weight`"):
        consolidate_torch(saved, tmp_path / "out.pt")


def test_the_config_and_the_tokenizer_are_copied(tmp_path, saved):
    """``config.json`` and its companions are copied; a folder without one is refused before anything is written."""
    config = tmp_path / "config"
    config.mkdir()
    with pytest.raises(CheckpointError, match=r"config has none"):
        consolidate_safetensors(saved, tmp_path / "out", config=config)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "README.md"):
        (config / name).write_text(name)
    consolidate_safetensors(saved, tmp_path / "out", config=config)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"}
    assert (tmp_path / "out" / "config.json").read_text() == "config.json"


def consolidate(format, folder, out):
    return (consolidate_torch if format == "torch" else consolidate_safetensors)(folder, out)


@pytest.mark.parametrize("format", ["torch", "safetensors"])
def test_nothing_is_overwritten(tmp_path, saved, format):
    """An existing file or folder stays unchanged."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder"):
        with pytest.raises(CheckpointError, match=f"{name} exists, and is never overwritten"):
            consolidate(format, saved, tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"
    assert not any((tmp_path / "folder").iterdir())


@pytest.mark.parametrize("format", ["torch", "safetensors"])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_changed_byte_is_found_before_anything_is_written(tmp_path, saved, format, name):
    """With a manifest, one flipped byte anywhere in a file raises an error that names the file."""
    change_byte(saved / name)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=f"{name} must have the CRC-32"):
        consolidate(format, saved, tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("format", ["torch", "safetensors"])
@pytest.mark.parametrize("signed", [True, False])
def test_a_missing_file_is_named(tmp_path, saved, format, signed):
    """With or without a manifest, the error names the file, and nothing half-written is left."""
    (saved / "__0_0.distcp").unlink()
    if not signed:
        (saved / "fairshard.json").unlink()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        consolidate(format, saved, tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_without_a_model_is_refused(tmp_path):
    """A checkpoint of only an optimizer raises an error."""
    save_alone(tmp_path / "ckpt", {"optim": {"state": {"w": W}}})
    with pytest.raises(CheckpointError, match="no tensors of one"):
        consolidate_torch(tmp_path / "ckpt", tmp_path / "out")


MEASURED = """
import resource, sys, threading, torch
threading.stack_size(1 << 18)  # stacks of threads that start late count, too
torch.set_num_threads(1)
from fairshard.checkpoint import save
from fairshard.checkpoint.consolidate import consolidate_safetensors, consolidate_torch

def private_memory():
    with open("/proc/self/status") as file:
        (line,) = [line for line in file if line.startswith("VmData")]
    return int(line.split()[1]) << 10

folder, extra = sys.argv[1], int(sys.argv[2])
consolidate_torch(folder + "/small", folder + "/warm.pt")  # imports and threads are not what is measured
consolidate_safetensors(folder + "/small", folder + "/warm")
limit = private_memory() + extra
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
consolidate_torch(folder + "/large", folder + "/out.pt")
consolidate_safetensors(folder + "/large", folder + "/out")
try:
    kept = [torch.ones(2 << 20) for _ in range(2)]
except RuntimeError as error:
    print(error)
"""


@pytest.mark.cpu_only("measures the memory of the CPU")
def test_memory_for_one_parameter_is_enough(tmp_path):
    """A process that may take only 12 MB more private memory consolidates 12 parameters of 8 MB each.

    RLIMIT_DATA counts private writable memory, touched or not, but no mapped files. To show that the limit works, the
    process fails at the end to allocate two such parameters.
    """
    save_alone(tmp_path / "small", {"model": {"w": torch.ones(2 * MB)}})
    save_alone(tmp_path / "large", {"model": {f"layers.{i}.w": torch.full((2 * MB,), float(i)) for i in range(12)}})
    # otherwise glibc keeps up to two freed blocks of this size
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(MB)}
    command = [sys.executable, "-c", MEASURED, str(tmp_path), str(12 * MB)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "can't allocate memory" in done.stdout
    for found in (torch.load(tmp_path / "out.pt", weights_only=True, mmap=True), read_folder(tmp_path / "out")):
        assert all(bool((found[f"layers.{i}.w"] == i).all()) for i in range(12))


@pytest.mark.parametrize("format", ["torch", "safetensors"])
@pytest.mark.parametrize("room", [0, 1], ids=["for nothing", "for the values only"])
def test_a_full_disk_leaves_nothing_behind(tmp_path, format, room):
    """Whether the disk fills up at the first byte or at the headers: one error, no file, no work folder.

    A limit on the file size plays the full disk; files of torch and safetensors are larger than their values.
    """
    weight = torch.zeros(MB)
    save_alone(tmp_path / "ckpt", {"model": {"w": weight}})
    before = sorted(tmp_path.rglob("*"))
    kept = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room * weight.nbytes, kept[1]))
    try:
        with pytest.raises(CheckpointError, match=r"out cannot be written: .*File too large"):
            consolidate(format, tmp_path / "ckpt", tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_where_fsspec_reaches_is_read(tmp_path, saved):
    """Checksums, metadata and values are read from fsspec's memory filesystem, through the root's ``latest``."""
    memory = fsspec.filesystem("memory")
    memory.put(str(saved), "/run/step-00000100", recursive=True)
    memory.pipe_file("/run/latest", b"step-00000100\n")
    try:
        consolidate_torch("memory://run", tmp_path / "out.pt")
        equal(torch.load(tmp_path / "out.pt", weights_only=True), weights_of())
    finally:
        memory.rm("/run", recursive=True)
