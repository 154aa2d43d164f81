"""Hostile files end in an error, within 2 seconds and 256 MB; large honest ones load."""

import io
import os
import pickle
import struct
import warnings
import zipfile
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from fairshard.checkpoint import Checkpointer, load, save
from fairshard.checkpoint.consolidate import consolidate_torch
from fairshard.checkpoint.contents import read_contents
from fairshard.checkpoint.entries import rng_state
from fairshard.checkpoint.import_fairscale import import_fairscale
from fairshard.checkpoint.objects import read_object
from fairshard.checkpoint.reader import CheckpointReader
from fairshard.errors import CheckpointError
from tests.checkpoint.hostile_files import PICKLES, archive_of, pickled_tensor
from tests.checkpoint.limited import MAX_NBYTES, MAX_SECONDS, assert_refused, run_limited
from tests.checkpoint.written import change_metadata, save_alone, sign

NBYTES = 300_000  # a larger file may take more memory: each of its bytes can make an object


def read_bytes(data):
    """Read the bytes of a file of `torch.save`."""
    return read_object(memoryview(bytearray(data)))


def read_metadata(path):
    """Read the metadata of a folder."""
    return type(CheckpointReader(str(path)).read_metadata())


def as_metadata(pickled, folder):
    """Write ``pickled`` as the metadata of a checkpoint; return how to read it."""
    (folder / ".metadata").write_bytes(pickled)
    return read_metadata, folder


def as_shard(pickled, folder):
    """Write ``pickled`` as a shard of fairscale's; return how to read it."""
    (folder / "shard.pt").write_bytes(archive_of(pickled))
    return import_fairscale, [folder / "shard.pt"], folder / "out"


@pytest.mark.parametrize("place", [as_metadata, as_shard])
def test_a_hostile_pickle_is_refused_soon(place, tmp_path):
    """No pickle overflows the stack, is quadratic, or asks for memory that is not in proportion to its file."""
    for name, write in PICKLES.items():
        outcome = run_limited(*place(write(NBYTES), tmp_path))
        assert_refused(outcome, CheckpointError, str(tmp_path)), name


def test_depth_and_metadata_have_limits(tmp_path):
    """Values 200 levels deep are refused, and metadata of more bytes than the argument allows."""
    file = io.BytesIO()
    deep = [1]
    for _ in range(300):
        deep = [deep]
    torch.save(deep, file)
    with pytest.raises(pickle.UnpicklingError, match="depth of more than 200"):
        read_bytes(file.getvalue())
    save_alone(tmp_path / "saved", {"model": {"w": torch.ones(2)}})
    with pytest.raises(CheckpointError, match="more than 10 bytes"):
        CheckpointReader(str(tmp_path / "saved"), max_metadata_nbytes=10).read_metadata()


# ---- archives


SOME = {"data/0": bytes(64)}
CLAIMS = {
    "a storage of a terabyte": archive_of(pickled_tensor(1 << 38, (1 << 38,), (1,)), **SOME),
    "a tensor larger than its storage": archive_of(pickled_tensor(16, (1 << 38,), (1,)), **SOME),
    "a tensor expanded to a terabyte": archive_of(pickled_tensor(16, (1 << 38,), (0,)), **SOME),
    "a negative size": archive_of(pickled_tensor(16, (-16,), (1,)), **SOME),
    "a storage that is not there": archive_of(pickled_tensor(16, (16,), (1,))),
    "a pickle longer than the file": archive_of(b"N.").replace(b"\2\0\0\0", struct.pack("<I", 1 << 30)),
    "a compressed pickle": archive_of(bytes(1 << 27), zipfile.ZIP_DEFLATED),
    "two records of a name": archive_of(b"N.").replace(b"a/byteorder", b"a/data.pkl\0"),
    "no directory": archive_of(b"N.")[:-30],
    "only the beginning": b"PK\x03\x04",
    "a pickle without an archive": b"N.",
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_sizes_are_not_believed(claim, tmp_path):
    """Memory is taken for what a file has, not for what its headers claim."""
    (tmp_path / "shard.pt").write_bytes(CLAIMS[claim])
    outcome = run_limited(import_fairscale, [tmp_path / "shard.pt"], tmp_path / "out")
    assert_refused(outcome, CheckpointError, "shard.pt")
    assert outcome.nbytes < 1 << 24
    assert os.listdir(tmp_path) == ["shard.pt"]


def test_shards_that_describe_more_than_they_hold_take_no_disk(tmp_path):
    """Shapes in fairscale's metadata are compared with the shards before room is made for them."""
    described = {"names": ["w"], "shapes": [(1 << 40,)], "numels": [1 << 40], "padding": 0}
    unit = {"fsdp_path": "", "params": {"flat_param_0": described}, "no_broadcast_optim_state": False}
    shard = {
        "shard_weights": {"flat_param_0": torch.ones(4)},
        "shard_metadata": {"param_metadata": [unit], "buffer_names": []},
    }
    torch.save(shard, tmp_path / "shard.pt")
    outcome = run_limited(import_fairscale, [tmp_path / "shard.pt"], tmp_path / "out")
    assert_refused(outcome, CheckpointError, "shard.pt", "at least one is missing")


def claim_terabytes(metadata):
    """Let an entry claim a terabyte."""
    entry = metadata.state_dict_metadata["model.w"]
    entry.size = entry.chunks[0].sizes = torch.Size([1 << 38])


def claim_same_bytes(metadata):
    """Let 1,000 entries claim the same bytes."""
    (index,) = [index for index in metadata.storage_data if index.fqn == "model.w"]
    entry, place = metadata.state_dict_metadata["model.w"], metadata.storage_data[index]
    for number in range(1000):
        metadata.state_dict_metadata[f"model.w{number}"] = entry
        metadata.storage_data[dcp.MetadataIndex(f"model.w{number}", index.offset)] = place


@pytest.mark.parametrize("change", [claim_terabytes, claim_same_bytes])
def test_entries_are_not_believed(change, tmp_path):
    """An entry of signed metadata that cannot be in its file takes neither memory nor disk."""
    save_alone(tmp_path / "saved", {"model": {"w": torch.ones(256, 256)}})
    change_metadata(tmp_path / "saved", change)
    sign(tmp_path / "saved")
    outcome = run_limited(consolidate_torch, tmp_path / "saved", tmp_path / "out.pt")
    assert_refused(outcome, CheckpointError, "saved/.metadata")
    assert outcome.nbytes < 1 << 25
    assert os.listdir(tmp_path) == ["saved"]


@pytest.mark.parametrize("damage", ["position", "keys", "none"])
def test_a_state_of_generators_is_checked_before_anything_changes(damage, tmp_path):
    """numpy would read outside of its memory at a position after the end; others would fail in the middle of a load."""
    state = rng_state()
    kind, keys, _, *rest = state["numpy"]
    changed = {"position": (kind, keys, 10**6, *rest), "keys": (kind, keys[:5], 1, *rest), "none": None}[damage]
    with mock.patch("fairshard.checkpoint.entries.rng_state", return_value={**state, "numpy": changed}):
        save(tmp_path / "saved", torch.nn.Linear(2, 2))
    other = torch.nn.Linear(2, 2)
    before, state = other.weight.clone(), torch.get_rng_state()
    with pytest.raises(CheckpointError, match=r"must hold what a rank saved as `rank.0`"):
        load(tmp_path / "saved", other, extra={})
    assert other.weight.equal(before)
    assert torch.get_rng_state().equal(state)


# ---- what is no file


def replace_by_pipe(path):
    """Make ``path`` a FIFO, which blocks whoever opens it."""
    path.unlink()
    os.mkfifo(path)


def link_to(target):
    """Make the path a link to ``target``."""

    def replace(path):
        path.unlink()
        path.symlink_to(target)

    return replace


ODD = {"pipe": replace_by_pipe, "zeros": link_to("/dev/zero"), "kernel": link_to("/proc/kmsg"), "folder": link_to(".")}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("name", ["latest", "fairshard.json", ".metadata", "__0_0.distcp"])
def test_what_is_no_regular_file_is_not_opened(name, odd, tmp_path):
    """Pipes, devices, files of the kernel and folders end in an error that names them; nothing waits for them."""
    model = torch.nn.Linear(2, 2)
    Checkpointer(tmp_path / "run", async_save=False).save(1, model)
    folder = tmp_path / "run" if name == "latest" else tmp_path / "run" / "step-00000001"
    ODD[odd](folder / name)

    def attempts():
        found = []
        for read in (lambda: load(tmp_path / "run", model), lambda: consolidate_torch(folder, tmp_path / "out.pt")):
            with pytest.raises(CheckpointError) as raised:
                read()
            found.append(str(raised.value))
        if name != "latest":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                problems = read_problems(folder)
            assert any(str(folder / name) in problem for problem in problems)
        return found

    outcome = run_limited(attempts)
    assert outcome.error is None, outcome
    assert all(str(folder / name) in text for text in outcome.value), outcome.value
    assert (outcome.seconds < MAX_SECONDS, outcome.nbytes < MAX_NBYTES) == (True, True)


@pytest.mark.parametrize("name", ["latest", "fairshard.json", ".metadata", "__0_0.distcp"])
def test_what_a_file_url_names_must_be_a_regular_file(name, tmp_path):
    """``file://`` goes through fsspec, and opens as little as a path does; plain torch's files have no known sizes."""
    model, run = torch.nn.Linear(2, 2), tmp_path / "run"
    if name in ("latest", "fairshard.json"):
        Checkpointer(run, async_save=False).save(1, model)
    else:
        save_alone(run, {"model": model.state_dict()})
    path = run / "step-00000001" / name if name == "fairshard.json" else run / name
    replace_by_pipe(path)
    assert_refused(run_limited(load, f"file://{run}", model), CheckpointError, str(path), "not a regular file")


def read_problems(folder):
    """The problems that `inspect` finds."""
    try:
        return read_contents(folder).problems
    except CheckpointError as error:
        return [str(error)]


# ---- honest files


def metadata_of(num_tensors, num_pieces):
    """Metadata of weights that ``num_pieces`` ranks share."""
    properties = dcp.TensorProperties(dtype=torch.float32)
    metadata = dcp.Metadata({}, {}, {})
    for number in range(num_tensors):
        key = f"model.layers.{number}.attention.wq.weight"
        offsets = [torch.Size([64 * piece, 4096]) for piece in range(num_pieces)]
        chunks = [dcp.ChunkStorageMetadata(offset, torch.Size([64, 4096])) for offset in offsets]
        size = torch.Size([64 * num_pieces, 4096])
        metadata.state_dict_metadata[key] = dcp.TensorStorageMetadata(properties, size, chunks)
        metadata.planner_data[key] = ("model", key.removeprefix("model."))
        for piece, offset in enumerate(offsets):
            place = _StorageInfo(f"__{piece}_0.distcp", number << 21, 1 << 20)
            metadata.storage_data[dcp.MetadataIndex(key, offset)] = place
    return metadata


@pytest.mark.parametrize(
    ("num_tensors", "num_pieces"), [(1000, 1), (100, 16), (1, 1000), pytest.param(80_000, 8, marks=pytest.mark.full)]
)
def test_honest_metadata_are_within_the_limits(num_tensors, num_pieces, tmp_path):
    """Metadata of many tensors or pieces are read as they were written; the largest have 100 MB."""
    written = metadata_of(num_tensors, num_pieces)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(written))
    assert num_tensors < 80_000 or (tmp_path / ".metadata").stat().st_size > 10**8
    assert CheckpointReader(str(tmp_path)).read_metadata() == written


def test_what_torch_saved_is_read_as_torch_reads_it():
    """Every kind of plain data has the same value and type; tensors that share memory still do."""
    flat = torch.arange(12.0)
    tensors = [flat[6:], flat[:6].view(2, 3), torch.ones(2, 3).t(), torch.empty(0, 3), torch.ones(1).expand(5)]
    tensors += [torch.arange(3), torch.tensor(1 + 2j), torch.nn.Parameter(torch.ones(2)), torch.ones(2).bfloat16()]
    tensors += [torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2).to(torch.uint16)]
    plain = [1, -7, 10**15, 2**70, 2.5, None, True, "text", b"bytes", bytearray(b"ab"), 1j, (1, (2,)), {1, "a"}]
    plain += [torch.Size([1, 2]), torch.float8_e4m3fn, torch.device("cpu"), torch.strided, {(1, 2): {5: 6}}]
    file = io.BytesIO()
    torch.save([tensors, plain, torch.nn.BatchNorm1d(2).state_dict()], file)
    found, values, state = read_bytes(file.getvalue())
    for one, other in zip(found, tensors, strict=True):
        assert (type(one), one.dtype, one.stride()) == (type(other), other.dtype, other.stride())
        assert one.untyped_storage().tolist() == other.untyped_storage().tolist()
    assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()
    assert (values, list(map(type, values))) == (plain, list(map(type, plain)))
    assert state._metadata == torch.nn.BatchNorm1d(2).state_dict()._metadata


def test_classes_that_torch_trusts_are_read_by_torch():
    """Unusual tensors, and classes that the user has trusted, still load; others do not."""
    file = io.BytesIO()
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.note = 3
    torch.save({"sparse": torch.eye(2).to_sparse(), "noted": parameter, "own": Trusted()}, file)
    with pytest.raises(pickle.UnpicklingError, match=r"more than data: it names .*Trusted"):
        read_bytes(file.getvalue())
    with torch.serialization.safe_globals([Trusted]):
        found = read_bytes(file.getvalue())
    assert found["sparse"].to_dense().equal(torch.eye(2))
    assert found["noted"].note == 3
    assert found["own"].value == 5


class Trusted:
    """A user's class."""

    def __init__(self):
        self.value = 5


# ---- marks


def test_our_checkpoint_without_its_manifest_is_refused(tmp_path):
    """Metadata that we wrote say that there is a manifest: if it is lost, nothing vouches for the files."""
    model = torch.nn.Linear(2, 2)
    save(tmp_path / "saved", model, step=3)
    (tmp_path / "saved" / "fairshard.json").unlink()
    other = torch.nn.Linear(2, 2)
    folder = tmp_path / "saved"
    for read in (lambda: load(folder, other), lambda: consolidate_torch(folder, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=r"saved must have the fairshard.json .* allow_unverified=True"):
            read()
    assert [problem for problem in read_contents(tmp_path / "saved").problems if "fairshard.json" in problem]
    assert not other.weight.equal(model.weight)
    with pytest.warns(UserWarning, match="has no fairshard.json: its files are not compared"):
        load(tmp_path / "saved", other, allow_unverified=True)
    assert other.weight.equal(model.weight)


def test_a_checkpoint_of_plain_torch_is_read_with_a_warning(tmp_path):
    """Plain DCP folders have no manifest and no mark; so do ours of earlier versions, without their manifest."""
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    save_alone(tmp_path / "saved", {"model": model.state_dict()})
    with pytest.warns(UserWarning, match="has no fairshard.json: its files are not compared") as caught:
        load(tmp_path / "saved", other)
    assert {warning.filename for warning in caught} == {__file__}  # the line of the user's call
    assert other.weight.equal(model.weight)
    assert not read_contents(tmp_path / "saved").problems


def test_a_manifest_vouches_for_all_files_or_none(tmp_path):
    """Metadata that point to a file that the manifest does not list are refused."""
    model = torch.nn.Linear(2, 2)
    save(tmp_path / "saved", model)

    def point_elsewhere(metadata):
        for place in metadata.storage_data.values():
            place.relative_path = "other.distcp"

    change_metadata(tmp_path / "saved", point_elsewhere)
    sign(tmp_path / "saved")
    (tmp_path / "saved" / "other.distcp").write_bytes((tmp_path / "saved" / "__0_0.distcp").read_bytes())
    with pytest.raises(CheckpointError, match=r"fairshard.json does not list other.distcp"):
        load(tmp_path / "saved", model)


def test_a_step_is_that_of_the_manifest(tmp_path):
    """A folder that was renamed to another step is not loaded as that step."""
    model = torch.nn.Linear(2, 2)
    checkpointer = Checkpointer(tmp_path, async_save=False)
    checkpointer.save(3, model)
    assert checkpointer.load_step(3, model) == 3
    (tmp_path / "step-00000003").rename(tmp_path / "step-00000006")
    before = model.weight.clone()
    with pytest.raises(CheckpointError, match=r"must be the checkpoint of step 6, but its fairshard.json says step 3"):
        checkpointer.load_step(6, model)
    assert model.weight.equal(before)


# ---- what is not ours


def files_below(folder):
    """Every file and link below a folder, and its content."""
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


OWNED = {
    "a folder": lambda root: ((root / "step-00000002").mkdir(), (root / "step-00000002" / "notes").write_text("mine")),
    "a file": lambda root: (root / "step-00000002").write_text("mine"),
    "a checkpoint of plain torch": lambda root: save_alone(root / "step-00000002", {"model": {"w": torch.ones(2)}}),
    "a link in place of latest": lambda root: (root / "latest").symlink_to("elsewhere"),
}


@pytest.mark.parametrize("owned", OWNED)
def test_a_save_never_replaces_what_is_not_ours(owned, tmp_path):
    """A save under the name of a user's file or folder fails, names it, and leaves it as it was."""
    OWNED[owned](tmp_path)
    before = files_below(tmp_path)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Checkpointer(tmp_path, async_save=False).save(2, torch.nn.Linear(2, 2))
    assert before.items() <= files_below(tmp_path).items()


def test_a_note_in_a_checkpoint_survives(tmp_path, caplog):
    """A user's file in a checkpoint of ours keeps it from being replaced, and from being removed as an old one."""
    model = torch.nn.Linear(2, 2)
    checkpointer = Checkpointer(tmp_path, async_save=False, keep_last=1)
    checkpointer.save(2, model)
    (tmp_path / "step-00000002" / "notes").write_text("mine")
    (tmp_path / ".tmp-mine").write_text("mine")
    with pytest.raises(CheckpointError, match="step-00000002 also has notes"):
        checkpointer.save(2, model)
    again = Checkpointer(tmp_path, async_save=False, keep_last=1)
    again.save(4, model)
    again.save(6, model)
    assert (tmp_path / "step-00000002" / "notes").read_text() == "mine"
    assert (tmp_path / ".tmp-mine").exists()
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000006"]
    assert sum("step-00000002 is kept" in line for line in caplog.messages) == 1
