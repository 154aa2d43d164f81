"""Checkpoints for the tests of the offline tools, as plain torch writes them, optionally with our manifest."""

import os
import pickle
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fairshard.checkpoint.manifest import FileEntry, Manifest, crc_of
from fairshard.checkpoint.storage import MANIFEST, Storage
from fairshard.utils.layout import FlatLayout
from fairshard.utils.span_tensor import SpanTensor


def save_alone(folder, tree):
    """Save with torch, in one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save_state_dict(tree, dcp.FileSystemWriter(folder), no_dist=True)  # no argument of `save` in torch 2.6


def save_cut(folder, whole):
    """Save ``{"model": whole}`` as the shards of a unit: each rank saves its row. **Collective**."""
    layout = FlatLayout([value.numel() for value in whole.values()], dist.get_world_size())
    names, spans = list(whole), {}
    for piece in layout.pieces_of(dist.get_rank()):
        value = whole[names[piece.index]]
        run = value.reshape(-1)[piece.source.start : piece.source.stop].clone()
        spans[names[piece.index]] = SpanTensor(run, piece.source.start, value.shape)
    dcp.save({"model": spans}, checkpoint_id=folder)


def sign(folder, step=100, world_size=1, aliases=None):
    """Write a manifest of the files in the folder."""
    names = [name for name in os.listdir(folder) if name != MANIFEST]
    storage = Storage()
    files = {
        name: FileEntry((Path(folder) / name).stat().st_size, crc_of(storage, f"{folder}/{name}")) for name in names
    }
    manifest = Manifest(step=step, world_size=world_size, files=files, aliases=aliases or {})
    (Path(folder) / MANIFEST).write_text(manifest.to_json())


def change_byte(path, at=-1):
    """Flip the bits of one byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


class Exploit:
    """Content of a malicious pickle: unpickling it creates ``mark``."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def poison_metadata(folder, mark):
    """Replace the metadata by a pickle that runs code."""
    (Path(folder) / ".metadata").write_bytes(pickle.dumps(Exploit(mark)))


def change_metadata(folder, change):
    """Apply ``change`` to the metadata of a folder."""
    path = Path(folder) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def poison_entry(folder, key, evil):
    """Replace the bytes of an entry by those of ``evil``; returns the name of the file."""
    files = []

    def change(metadata):
        (place,) = [place for index, place in metadata.storage_data.items() if index.fqn == key]
        file = Path(folder) / place.relative_path
        place.offset = file.stat().st_size
        with file.open("ab") as opened:
            torch.save(evil, opened)
        place.length = file.stat().st_size - place.offset
        files.append(place.relative_path)

    change_metadata(folder, change)
    return files[0]


def poison_tensor(folder, key, mark):
    """Replace the bytes of a tensor by a pickle that runs code; returns the name of the file."""
    return poison_entry(folder, key, Exploit(mark))
