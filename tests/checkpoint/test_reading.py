"""Reading the files of a checkpoint once: into place, summed on the way, and nothing kept of a damaged one."""

import io
import itertools
import os
import zlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.planner import LoadPlan

from fairshard.checkpoint import load, loading, targets
from fairshard.checkpoint.crc import join_crcs
from fairshard.checkpoint.local_file import Cut, Entry, EntryError, can_read, read_entries
from fairshard.checkpoint.manifest import FileEntry, Manifest
from fairshard.checkpoint.reader import METADATA, CheckpointReader
from fairshard.checkpoint.stored_tensor import HEAD_NBYTES, find_tensor
from fairshard.checkpoint.writer import _save_tensor
from fairshard.nn import FullyShardedDataParallel as FSDP
from tests.checkpoint.saved_steps import assert_agreed, attempt, is_same, memory_of, trained
from tests.checkpoint.test_damage import DAMAGES
from tests.kit import fake_group, run_ranks

PLAIN = [
    torch.arange(24.0).view(2, 3, 4),
    torch.tensor(3.0),
    torch.arange(300_000),
    torch.linspace(0, 1, 60_000).view(200, 300).bfloat16(),
    torch.tensor([True, False, True]),
]
ODD = [
    torch.zeros(0, 3),
    torch.arange(24.0).view(4, 6).t(),
    torch.arange(8.0)[2:4],
    torch.zeros(8, 8).to(torch.float8_e4m3fn),
]


def saved(tensors, save=_save_tensor):
    """The bytes of ``tensors`` in one file, and an entry with an empty target for each."""
    stream = io.BytesIO()
    entries = []
    for number, tensor in enumerate(tensors):
        start = stream.tell()
        save(tensor, stream)
        target = torch.empty(tensor.shape, dtype=tensor.dtype)
        cut = Cut(target, [0] * tensor.dim(), tensor.shape)
        entries.append(Entry(str(number), start, stream.tell() - start, [cut]))
    return stream.getvalue(), entries


def written(tmp_path, data):
    """The path of a new file with the bytes ``data``."""
    path = tmp_path / "file"
    path.write_bytes(data)
    return str(path)


# ---- bytes


@pytest.mark.parametrize("cuts", [(), (0,), (1, 2, 70_000), (50_000, 50_000, 99_999)])
def test_checksums_of_parts_join_to_that_of_the_whole(cuts):
    """Wherever bytes are cut, also into empty parts, the joined checksum is that of all of them."""
    data = torch.arange(100_000, dtype=torch.int32).to(torch.uint8).numpy().tobytes()
    parts = [data[start:stop] for start, stop in itertools.pairwise((0, *cuts, len(data)))]
    assert join_crcs((zlib.crc32(part), len(part)) for part in parts) == zlib.crc32(data)


@pytest.mark.parametrize("save", [_save_tensor, torch.save])
def test_plain_tensors_are_read_into_place(tmp_path, save):
    """Bits and checksum are right, and torch.load is not needed for any of them."""
    data, entries = saved(PLAIN, save)
    with mock.patch.object(torch, "load", side_effect=AssertionError):
        assert read_entries(written(tmp_path, data), len(data), entries, sums=True) == zlib.crc32(data)
    for tensor, entry in zip(PLAIN, entries, strict=True):
        assert torch.equal(entry.cuts[0].target, tensor)


def test_other_tensors_are_read_by_torch(tmp_path):
    """Empty, transposed and cut tensors, and dtypes without a storage class, are not recognised, and right."""
    data, entries = saved(ODD, torch.save)
    assert [find_tensor(data[entry.start :][:HEAD_NBYTES]) for entry in entries] == [None] * len(ODD)
    assert read_entries(written(tmp_path, data), len(data), entries, sums=True) == zlib.crc32(data)
    for tensor, entry in zip(ODD, entries, strict=True):
        assert torch.equal(entry.cuts[0].target.float(), tensor.float())


def test_only_what_is_wanted_is_read(tmp_path):
    """Without a checksum the bytes of other entries are not read; with one, all are, once."""
    data, entries = saved(PLAIN)
    path = written(tmp_path, data)
    for sums, expected in ((False, entries[2].nbytes), (True, len(data))):
        with mock.patch.object(os, "preadv", side_effect=os.preadv) as read:
            crc = read_entries(path, len(data), [entries[2]], sums)
        assert sum(len(call.args[1][0]) for call in read.call_args_list) == expected
        assert crc == (zlib.crc32(data) if sums else None)


def test_parts_of_an_entry_go_to_several_targets(tmp_path):
    """Boxes of one tensor are copied out of it, into targets of another dtype and other strides too."""
    data, (entry,) = saved([PLAIN[3]])
    first, second = torch.empty(2, 3, dtype=torch.float64), torch.empty(7, 5, dtype=torch.bfloat16).t()
    entry.cuts = [Cut(first, [5, 7], [2, 3]), Cut(second, [190, 0], [5, 7])]
    read_entries(written(tmp_path, data), len(data), [entry], sums=False)
    assert torch.equal(first, PLAIN[3][5:7, 7:10].double())
    assert torch.equal(second, PLAIN[3][190:195, :7])


def test_objects_keep_their_bytes(tmp_path):
    """An object's bytes are kept as they are: they are unpickled only after the file's checksum was right."""
    data = b"no pickle at all"
    entry = Entry("object", 3, 6, keeps_bytes=True)
    assert read_entries(written(tmp_path, data), len(data), [entry], sums=True) == zlib.crc32(data)
    assert entry.found == data[3:9]


def test_a_file_that_ends_early_raises(tmp_path):
    """A file that became shorter after its size was checked raises, whatever part of an entry is missing."""
    data, entries = saved(PLAIN)
    path = written(tmp_path, data)
    for nbytes in (0, 10, entries[2].start + 100, entries[2].start + 5000, len(data) - 1):
        os.truncate(path, 0)
        written(tmp_path, data[:nbytes])
        with pytest.raises(OSError, match="ends too early"):
            read_entries(path, len(data), entries, sums=True)


def test_an_entry_that_is_not_a_tensor_is_named(tmp_path):
    """Bytes that are no tensor, or a tensor of another shape, raise with the name of the entry."""
    data, entries = saved(PLAIN[:1])
    entries[0].nbytes -= 1
    damaged = bytearray(data)
    place = data.find(b"PK\x07\x08", 704)
    damaged[place] ^= 1  # the mark after the elements
    for content in (bytes(len(data)), bytes(damaged)):
        with pytest.raises(EntryError, match="0"):
            read_entries(written(tmp_path, content), len(data), entries, sums=False)
    data, entries = saved(PLAIN[:1])
    entries[0].cuts[0] = Cut(torch.empty(5), [0], [5])
    with pytest.raises(EntryError, match="0"):
        read_entries(written(tmp_path, data), len(data), entries, sums=False)


@pytest.mark.parametrize(
    ("places", "is_possible"),
    [
        *(([(0, 5), (5, 5)], True), ([(6, 4), (0, 5)], True), ([], True)),
        *(([(0, 6), (5, 5)], False), ([(0, 11)], False), ([(-1, 3)], False), ([(3, -1)], False)),
    ],
)
def test_places_outside_of_a_file_are_refused(places, is_possible):
    """Entries must lie inside the file, without overlap."""
    assert can_read([Entry("", start, nbytes) for start, nbytes in places], 10) is is_possible


@pytest.mark.parametrize("rank", range(4))
def test_padding_of_new_state_is_zero(rank):
    """Of the memory for optimizer state, which is not cleared, all that a load does not fill is zero."""
    made = torch.empty_like
    with fake_group(4, rank):
        (flat_param,) = FSDP(nn.Linear(4, 3))._unit.flat_params  # 15 elements: 4 on each rank, 3 on the last
        with mock.patch.object(torch, "empty_like", lambda *a, **options: made(*a, **options).fill_(7)):
            spans = targets._spans_to_fill(flat_param, torch.float32, fills_all=True)
            cleared = targets._spans_to_fill(flat_param, torch.float32, fills_all=False)
    line = spans[0].run.new_empty(0).set_(spans[0].run.untyped_storage())
    assert line.tolist() == ([7, 7, 7, 0] if rank == 3 else [7, 7, 7, 7])
    assert sum(span.run.numel() for span in spans) == (3 if rank == 3 else 4)
    assert not any(span.run.any() for span in cleared)


# ---- ranks


def test_each_file_is_summed_by_the_rank_that_reads_most_of_it():
    """Files that nobody reads go to the rank with the least to read; metadata are checked by everybody."""
    reader = CheckpointReader("run")
    sizes = {"a": 100, "b": 100, "c": 50, "d": 10, METADATA: 5}
    reader.manifest = Manifest(1, 2, {name: FileEntry(nbytes, 0) for name, nbytes in sizes.items()})
    reads = [{"a": 100, "b": 10}, {"b": 90}, {}]
    plans = [LoadPlan([]) for _ in reads]
    with mock.patch.object(reader, "_nbytes_read", side_effect=reads):
        assert reader.prepare_global_plan(plans) == plans  # the caller has verified the files
    reader.sums_while_reading = True
    with mock.patch.object(reader, "_nbytes_read", side_effect=reads):
        found = reader.prepare_global_plan(plans)
    assert [plan.storage_data for plan in found] == [["a"], ["b"], ["c", "d"]]


def load_disturbed(folder, verify, victim, kind):
    """Load while the disk of rank ``victim`` flips a bit or fails; what is raised, and whether memory is unchanged."""
    model, optimizer = trained(seed=7)
    before = memory_of(model, optimizer)
    original, num_reads = os.preadv, itertools.count()

    def disturbed(descriptor, buffers, place):
        if kind == "fails" and next(num_reads) == 5:
            raise OSError(5, "Input/output error")
        count = original(descriptor, buffers, place)
        if kind == "flips" and count > 700 and place < 700:
            buffers[0][703] ^= 1  # between the records of the first entry: no parser notices it
        return count

    is_victim = dist.get_rank() == victim
    with mock.patch.object(os, "preadv", disturbed if is_victim else original):
        raised = attempt(lambda: load(folder, model, optimizer, verify=verify))
    return raised, is_same(before, memory_of(model, optimizer))


@pytest.mark.parametrize(
    ("world_size", "victim", "kind"),
    [(1, 0, "flips"), (2, 0, "flips"), (2, 1, "flips"), (1, 0, "fails"), (2, 1, "fails"), (3, 0, "fails")],
)
def test_a_disk_that_fails_on_one_rank_changes_nothing_on_any(root, world_size, victim, kind):
    """While values are read, one rank's reads fail, or give other bits: all ranks raise the same error.

    On the number of ranks that saved, each rank sums the bytes that it uses; three ranks read parts of files.
    """
    folder = root / "step-00000006"
    raised, same = zip(*run_ranks(world_size, load_disturbed, str(folder), "reading", victim, kind), strict=True)
    words = {"flips": "must have the CRC-32", "fails": "Input/output error"}[kind]
    assert_agreed(raised, str(folder), words)
    assert all(same)


def load_one(folder, verify):
    """Load; what is raised, and whether memory is unchanged."""
    model, optimizer = trained(seed=7)
    before = memory_of(model, optimizer)
    raised = attempt(lambda: load(folder, model, optimizer, verify=verify))
    return raised, is_same(before, memory_of(model, optimizer))


@pytest.mark.parametrize("verify", loading.VERIFY)
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_changes_nothing_on_other_numbers_of_ranks(root, damage, world_size, verify):
    """One rank and three load what two have saved: all raise the same error, which names the file."""
    path = root / "step-00000006" / "__1_0.distcp"
    assert run_ranks(world_size, load_one, str(path.parent), verify)[0][0] is None
    DAMAGES[damage](path)
    raised, same = zip(*run_ranks(world_size, load_one, str(path.parent), verify), strict=True)
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


def test_another_moment_is_refused(root):
    """`verify` has two values; another raises before anything is communicated."""
    raised, same = load_one_alone(str(root / "step-00000006"), "after")
    assert raised == ("ValueError", "`verify` must be one of reading, before, but is 'after'.")
    assert same


def load_one_alone(folder, verify):
    """`load_one` on one rank."""
    return run_ranks(1, load_one, folder, verify)[0]
