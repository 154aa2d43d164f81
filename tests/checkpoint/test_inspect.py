"""Inspection tells what a checkpoint holds and whether it is intact, without reading a value."""

import pytest
import torch

from fairshard.checkpoint.contents import CHANGED, MISSING, OK, UNKNOWN, read_contents
from fairshard.errors import CheckpointError
from tests.checkpoint.written import change_byte, save_alone, save_cut, sign
from tests.kit import run_ranks


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with a tied weight, an optimizer and an object."""
    weight = torch.arange(6.0).view(2, 3)
    model = {"emb.weight": weight, "head.weight": weight, "layers.10.b": torch.ones(4).bfloat16()}
    tree = {
        "model": {**model, "layers.9.b": torch.ones(1, dtype=torch.int64)},
        "optim": {"state": {"emb.weight": {"step": torch.tensor(1.0)}}},
        "scheduler": [1, 2],
    }
    save_alone(tmp_path / "ckpt", tree)
    sign(tmp_path / "ckpt", step=7, world_size=4, aliases={"head.weight": "emb.weight"})
    return tmp_path / "ckpt"


def states(contents):
    return {file.name: file.state for file in contents.files}


def test_tensors_objects_and_files_are_told(folder):
    """Contents list every tensor's shape, dtype and bytes, layer 9 before 10, ties, objects, manifest and files."""
    contents = read_contents(folder)
    told = [(entry.key, entry.shape, entry.dtype, entry.nbytes, entry.tied_to) for entry in contents.tensors]
    assert told == [
        ("model.emb.weight", (2, 3), "float32", 6 * 4, None),
        ("model.head.weight", (2, 3), "float32", 6 * 4, "model.emb.weight"),
        ("model.layers.9.b", (1,), "int64", 8, None),
        ("model.layers.10.b", (4,), "bfloat16", 4 * 2, None),
        ("optim.state.emb.weight.step", (), "float32", 4, None),
    ]
    assert [entry.key for entry in contents.objects] == ["scheduler"]
    assert contents.objects[0].nbytes > 0
    assert (contents.manifest.step, contents.manifest.world_size) == (7, 4)
    assert contents.manifest.versions["torch"] == torch.__version__
    assert states(contents) == {".metadata": OK, "__0_0.distcp": OK}
    assert all(file.nbytes == (folder / file.name).stat().st_size for file in contents.files)
    assert contents.problems == []


def test_pieces_are_counted(tmp_path):
    """(4, 5), cut at element 10, is one box per rank; (3, 5), cut at 8, inside a row, is two per rank."""
    for shape in ((4, 5), (3, 5)):
        name = f"{shape[0]}x{shape[1]}"
        run_ranks(2, save_cut, folder=str(tmp_path / name), whole={"w": torch.ones(shape)})
    assert [entry.num_pieces for entry in read_contents(tmp_path / "4x5").tensors] == [2]
    assert [entry.num_pieces for entry in read_contents(tmp_path / "3x5").tensors] == [4]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_changed_or_missing_file_is_told_by_name(folder, name):
    """A changed byte, a cut or a missing file sets a state and adds a problem with the path; the other file is OK."""
    (other,) = {".metadata", "__0_0.distcp"} - {name}
    path = folder / name
    whole = path.read_bytes()
    change_byte(path, at=len(whole) // 2)
    for state, damage in ((CHANGED, lambda: path.write_bytes(whole[:-1])), (CHANGED, path.unlink), (MISSING, None)):
        contents = read_contents(folder)
        assert states(contents) == {name: state, other: OK}
        (problem,) = contents.problems
        assert str(path) in problem
        assert bool(contents.tensors) == (name != ".metadata")
        if damage is not None:
            damage()


def test_without_a_manifest_the_state_is_unknown_unless_bytes_are_missing(folder):
    """Without checksums a file's state is unknown, but one that ends before its last entry is known to be changed."""
    (folder / "fairshard.json").unlink()
    assert states(read_contents(folder)) == {".metadata": UNKNOWN, "__0_0.distcp": UNKNOWN}
    path = folder / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])
    assert states(read_contents(folder))["__0_0.distcp"] == CHANGED
    path.unlink()
    assert states(read_contents(folder))["__0_0.distcp"] == MISSING


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', '{"format": 2}'])
def test_a_damaged_manifest_is_named(folder, text):
    """A manifest that is not JSON, not ours, or of another format raises an error that names it."""
    (folder / "fairshard.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"fairshard\.json is damaged"):
        read_contents(folder)


@pytest.mark.parametrize("where", ["nowhere", "empty"])
def test_a_folder_without_a_checkpoint_is_refused(tmp_path, where):
    """A folder with neither metadata nor ``latest`` raises an error."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=f"{where} has neither"):
        read_contents(tmp_path / where)
