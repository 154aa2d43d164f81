"""What large honest files take, beside pickle and torch, which do not limit what a file may do.

    python -m tests.checkpoint.large_files

``.metadata`` of 100 MB, and a ``.pt`` of 5 GB whose tensor is all zeros, so that it needs no disk. Each is read in a
process of its own: seconds of CPU, and the peak of its memory above that before, the mapped pages of a file included.
"""

import gc
import pickle
import tempfile
from pathlib import Path

import torch

from fairshard.checkpoint.objects import read_object_file
from fairshard.checkpoint.reader import CheckpointReader
from tests.checkpoint.hostile_files import Archive, pickled_tensor
from tests.checkpoint.limited import run_limited

NUM_TENSORS, NUM_PIECES = 80_000, 8
NUMEL = 5 * 10**9 // 4
REPEATS = 3


def write_metadata(path):
    """Metadata of 80,000 tensors on eight ranks."""
    from tests.checkpoint.test_hostile import metadata_of

    path.write_bytes(pickle.dumps(metadata_of(NUM_TENSORS, NUM_PIECES)))


def write_archive(path):
    """A file of ``torch.save`` with one tensor of zeros."""
    records = {"data.pkl": pickled_tensor(NUMEL, (NUMEL,), (1,)), "byteorder": b"little", "version": b"3\n"}
    Archive(records).write_sparse(path, "data/0", 4 * NUMEL)


def unpickle(path):
    """Read metadata as torch does."""
    return len(pickle.loads(path.read_bytes()).storage_data)


def unpickle_without_garbage(path):
    """Read metadata as torch does, but without Python's garbage collector, as ours."""
    gc.disable()
    return unpickle(path)


def read_metadata(path):
    """Read metadata as a load does."""
    return len(CheckpointReader(str(path.parent)).read_metadata().storage_data)


def torch_load(path):
    """Map the file, and read all of it."""
    return torch.load(path, weights_only=True, mmap=True).sum().item()


def read_file(path):
    """Map the file, and read all of it."""
    return read_object_file(path).sum().item()


def read_head(path):
    """Map the file."""
    return read_object_file(path)[-1].item()


def main():
    """Write the files, read them in each way, and print what that took."""
    with tempfile.TemporaryDirectory() as folder:
        metadata, archive = Path(folder, ".metadata"), Path(folder, "large.pt")
        write_metadata(metadata)
        write_archive(archive)
        for path, reads in (
            (metadata, (unpickle, unpickle_without_garbage, read_metadata)),
            (archive, (torch_load, read_file, read_head)),
        ):
            print(f"{path.name}: {path.stat().st_size / 1e6:,.0f} MB")
            for read in reads:
                found = [run_limited(read, path, room_nbytes=1 << 34) for _ in range(REPEATS)]
                assert all(one.error is None for one in found), found
                seconds = sorted(one.seconds for one in found)
                nbytes = max(one.nbytes for one in found)
                print(f"  {read.__name__:25} {seconds[0]:6.2f} to {seconds[-1]:5.2f} s {nbytes / 1e6:8,.0f} MB")


if __name__ == "__main__":
    main()
