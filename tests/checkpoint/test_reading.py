"""Reading the files of a checkpoint: its entries into their targets, and nothing kept of a damaged one."""

import io
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fairshard.checkpoint import load
from fairshard.checkpoint.reader import CheckpointReader, SafePlanner, _in_order_of_ranks
from fairshard.checkpoint.storage import Storage
from fairshard.errors import CheckpointError
from tests.checkpoint.saved_steps import assert_agreed, attempt, is_same, memory_of, trained
from tests.checkpoint.test_damage import DAMAGES
from tests.checkpoint.written import save_alone
from tests.kit import run_ranks

SAVED = {
    "floats": torch.arange(24.0).view(2, 3, 4),
    "scalar": torch.tensor(3.0),
    "numbers": torch.arange(300_000),
    "halves": torch.linspace(0, 1, 60_000).view(200, 300).bfloat16(),
    "flags": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 3),
    "transposed": torch.arange(24.0).view(4, 6).t(),
    "cut": torch.arange(8.0)[2:4],
    "eighths": torch.zeros(8, 8).to(torch.float8_e4m3fn),
}


def read(folder, targets, change=lambda plan: plan):
    """Read into ``targets``, by name, after ``change`` of the plan."""
    reader, planner = CheckpointReader(str(folder)), SafePlanner()
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner.set_up_planner(targets, metadata, is_coordinator=True)
    reader.read_data(change(planner.create_local_plan()), planner)


# ---- entries


def test_every_kind_of_tensor_is_read_into_its_target(tmp_path):
    """Plain, empty, transposed and cut tensors, and dtypes without a storage class, have the bits that were saved."""
    save_alone(tmp_path / "saved", SAVED)
    targets = {name: torch.empty_like(value) for name, value in SAVED.items()}
    read(tmp_path / "saved", targets)
    for name, value in SAVED.items():
        assert torch.equal(targets[name].float(), value.float()), name


def test_an_entry_of_another_shape_is_named(tmp_path):
    """A tensor that is not the one that the metadata describe raises with the name of the entry and of the file."""
    save_alone(tmp_path / "saved", SAVED)
    with mock.patch.object(SafePlanner, "resolve_tensor", return_value=torch.empty(5)):
        with pytest.raises(CheckpointError, match=r"__0_0.distcp must hold `flags`, .* it has the shape \(3,\)"):
            read(tmp_path / "saved", {"flags": torch.empty(3, dtype=torch.bool)})


def test_a_file_that_ends_early_raises(tmp_path):
    """A file that became shorter after its size was checked raises."""
    save_alone(tmp_path / "saved", SAVED)
    path = tmp_path / "saved" / "__0_0.distcp"
    whole = path.read_bytes()
    for nbytes in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:nbytes])
        with pytest.raises(CheckpointError, match=r"__0_0.distcp cannot be read: the file ends too early"):
            read(tmp_path / "saved", {name: torch.empty_like(value) for name, value in SAVED.items()})


# ---- ranks


def test_each_rank_verifies_its_own_file_if_as_many_load_as_have_saved():
    """The order is that of numbers, and the metadata, which every rank verifies, come last."""
    names = [".metadata", *(f"__{rank}_0.distcp" for rank in range(12))]
    assert sorted(sorted(names), key=_in_order_of_ranks) == [*names[1:], names[0]]


def load_disturbed(folder, victim, kind):
    """Load while the disk of rank ``victim`` flips a bit or fails; what is raised, and whether memory is unchanged."""
    model, optimizer = trained(seed=7)
    before = memory_of(model, optimizer)
    original, num_opened = Storage.open, itertools.count()

    def disturbed(storage, path, mode):
        if not path.endswith(".distcp"):
            return original(storage, path, mode)
        if kind == "fails" and next(num_opened) == 0:
            raise OSError(5, "Input/output error")
        with original(storage, path, mode) as file:
            data = bytearray(file.read())
        data[703] ^= 1  # between the records of the first entry: no parser notices it
        return io.BytesIO(data)

    is_victim = dist.get_rank() == victim
    with mock.patch.object(Storage, "open", disturbed if is_victim else original):
        raised = attempt(lambda: load(folder, model, optimizer))
    return raised, is_same(before, memory_of(model, optimizer))


@pytest.mark.parametrize(
    ("world_size", "victim", "kind"),
    [(1, 0, "flips"), (2, 0, "flips"), (2, 1, "flips"), (1, 0, "fails"), (2, 1, "fails"), (3, 0, "fails")],
)
def test_a_disk_that_fails_on_one_rank_changes_nothing_on_any(root, world_size, victim, kind):
    """While files are verified, one rank's reads fail, or give other bits: all ranks raise the same error."""
    folder = root / "step-00000006"
    raised, same = zip(*run_ranks(world_size, load_disturbed, str(folder), victim, kind), strict=True)
    words = {"flips": "must have the CRC-32", "fails": "Input/output error"}[kind]
    assert_agreed(raised, str(folder), words)
    assert all(same)


def load_one(folder):
    """Load; what is raised, and whether memory is unchanged."""
    model, optimizer = trained(seed=7)
    before = memory_of(model, optimizer)
    raised = attempt(lambda: load(folder, model, optimizer))
    return raised, is_same(before, memory_of(model, optimizer))


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_changes_nothing_on_other_numbers_of_ranks(root, damage, world_size):
    """One rank and three load what two have saved: all raise the same error, which names the file."""
    path = root / "step-00000006" / "__1_0.distcp"
    assert run_ranks(world_size, load_one, str(path.parent))[0][0] is None
    DAMAGES[damage](path)
    raised, same = zip(*run_ranks(world_size, load_one, str(path.parent)), strict=True)
    assert_agreed(raised, str(path))
    assert all(same)


def load_model_alone(folder):
    """Load a model without its optimizer; what is raised."""
    return attempt(lambda: load(folder, trained(seed=7)[0]))


def test_a_file_of_which_nothing_is_wanted_is_verified_too(root):
    """All files of the manifest are verified, also if no rank reads values from them."""
    folder = root / "step-00000006"
    size = (folder / "__1_0.distcp").stat().st_size
    with open(folder / "__1_0.distcp", "r+b") as file:
        file.seek(size - 1)
        last = file.read(1)[0]
        file.seek(size - 1)
        file.write(bytes([last ^ 1]))
    assert_agreed(run_ranks(2, load_model_alone, str(folder)), "must have the CRC-32")
