"""A checkpoint is data: whatever someone wrote into its files, loading runs none of it."""

import io
import json
import pickle
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo

from fairshard.checkpoint import Checkpointer, load
from fairshard.errors import CheckpointError
from tests.checkpoint.written import Exploit, change_metadata, poison_entry, poison_tensor, sign
from tests.kit import run_ranks
from tests.models import mlp, wrap_each


class ByEval:
    """Runs code through a builtin."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return eval, (f"__import__('os').mkdir({str(self.mark)!r})",)


def build():
    """A model after a step, its optimizer and scheduler; sharded if there is a process group."""
    model = mlp(3, 5, 2)
    if torch.distributed.is_initialized():
        model = wrap_each(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def save_run(root):
    """Save one step."""
    Checkpointer(root, async_save=False).save(1, *build(), extra={"position": 7})


def resume(root, how):
    """Load; return the text of the error on this rank, or the extra."""
    model, optimizer, scheduler = build()
    extra = {}
    try:
        if how == "load":
            load(f"{root}/step-00000001", model, optimizer, scheduler, extra=extra)
        else:
            Checkpointer(root).load_latest(model, optimizer, scheduler, extra=extra)
    except CheckpointError as error:
        return str(error)
    return extra


@pytest.fixture(scope="module", params=[None, 2], ids=["alone", "two ranks"])
def written(request, tmp_path_factory):
    """A root with one step, and the number of ranks that saved it (None: a single process)."""
    root = tmp_path_factory.mktemp("run") / "root"
    if request.param is None:
        save_run(root)
    else:
        run_ranks(request.param, save_run, str(root))
    return root, request.param


@pytest.fixture(params=["load", "load_latest"])
def attempt(request, written, tmp_path):
    """``attempt(poison)`` loads a copy after ``poison(folder, mark)``; the ranks' errors; ``mark`` must not appear."""
    root, num_ranks = written

    def run(poison):
        copy, mark = Path(shutil.copytree(root, tmp_path / "root")), tmp_path / "mark"
        poison(copy / "step-00000001", mark)
        if num_ranks is None:
            said = [resume(copy, request.param)]
        else:
            said = run_ranks(num_ranks, resume, str(copy), request.param)
        assert not mark.exists()
        return said

    return run


def assert_refused(said, *words):
    """Every rank got a `CheckpointError` with these words."""
    for text in said:
        assert isinstance(text, str), text
        for word in words:
            assert word in text, text


# Whoever can write files can also write a matching manifest, so most of these are signed.


def test_the_exploits_work(tmp_path):
    """Plain pickle runs the exploits; if it did not, the other tests would show nothing."""
    for number, kind in enumerate((Exploit, ByEval)):
        mark = tmp_path / f"mark-{number}"
        pickle.loads(pickle.dumps(kind(mark)))
        assert mark.exists()
        file = io.BytesIO()
        torch.save(kind(tmp_path / f"saved-{number}"), file)
        file.seek(0)
        torch.load(file, weights_only=False)
        assert (tmp_path / f"saved-{number}").exists()


@pytest.mark.parametrize("exploit", [Exploit, ByEval])
@pytest.mark.parametrize("signed", [True, False])
def test_metadata_that_are_code(attempt, exploit, signed):
    """A metadata file that is an exploit is refused, with a matching manifest or not."""

    def poison(folder, mark):
        (folder / ".metadata").write_bytes(pickle.dumps(exploit(mark)))
        sign(folder) if signed else None

    assert_refused(attempt(poison), "step-00000001/.metadata", "made to run code" if signed else "must have")


@pytest.mark.parametrize("where", ["planner_data", "state_dict_metadata", "storage_data", "storage_meta"])
def test_metadata_with_code_inside(attempt, where):
    """An exploit inside otherwise valid metadata is refused."""

    def poison(folder, mark):
        def change(metadata):
            held = getattr(metadata, where)
            if isinstance(held, dict):
                held["more"] = Exploit(mark)
            else:
                held.save_id = Exploit(mark)

        change_metadata(folder, change)
        sign(folder)

    assert_refused(attempt(poison), "step-00000001/.metadata", "mkdir")


@pytest.mark.parametrize("key", ["model.0.weight", "optim.state.0.weight.exp_avg"])
def test_code_in_place_of_a_tensor(attempt, key):
    """An exploit in place of a tensor, of the model or the optimizer, is refused."""
    files = []

    def poison(folder, mark):
        change_metadata(folder, lambda metadata: keep_one_piece(metadata, key))
        files.append(poison_tensor(folder, key, mark))
        sign(folder)

    said = attempt(poison)
    assert_refused(said, f"step-00000001/{files[0]}", key, "more than data", "mkdir")


def keep_one_piece(metadata, key):
    """Make one file hold all of a tensor."""
    indices = [index for index in metadata.storage_data if index.fqn == key]
    for index in indices[1:]:
        del metadata.storage_data[index]
    entry = metadata.state_dict_metadata[key]
    entry.chunks = [dcp_metadata.ChunkStorageMetadata(torch.Size([0] * len(entry.size)), entry.size)]
    place = metadata.storage_data.pop(indices[0])
    metadata.storage_data[dcp_metadata.MetadataIndex(key, torch.Size([0] * len(entry.size)))] = place


@pytest.mark.parametrize("key", ["rank.0", "scheduler", "optim.param_groups.0.lr"])
@pytest.mark.parametrize("exploit", [Exploit, ByEval])
def test_code_in_place_of_an_object(attempt, key, exploit):
    """An exploit in place of our own objects, of a scheduler or of a hyperparameter is refused."""
    words = []

    def poison(folder, mark):
        known = pickle.loads((folder / ".metadata").read_bytes()).storage_data
        own = next(index.fqn for index in known if index.fqn.startswith(key))
        words.extend((own, f"step-00000001/{poison_entry(folder, own, (exploit(mark),))}"))
        sign(folder)

    said = attempt(poison)
    assert_refused(said, *words, "more than data")


@pytest.mark.parametrize("path", ["../../outside.distcp", "/etc/passwd", "sub/../../x"])
@pytest.mark.parametrize("where", ["metadata", "manifest"])
def test_a_path_out_of_the_folder(attempt, path, where):
    """Neither metadata nor manifest can make a load read outside the folder."""

    def poison(folder, mark):
        def change(metadata):
            for place in metadata.storage_data.values():
                place.relative_path = path

        if where == "metadata":
            change_metadata(folder, change)
            sign(folder)
        else:
            change_manifest(folder, lambda content: content["files"].update({path: {"nbytes": 1, "crc32": 0}}))

    name = ".metadata" if where == "metadata" else "fairshard.json"
    assert_refused(attempt(poison), f"step-00000001/{name}", path)


def change_manifest(folder, change):
    """Change a manifest and update its checksum."""
    path = folder / "fairshard.json"
    content = json.loads(path.read_text())
    content.pop("crc32")
    change(content)
    crc = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    path.write_text(json.dumps({**content, "crc32": crc}))


@pytest.mark.parametrize("name", ["../other", "/etc", "..", "."])
def test_a_pointer_out_of_the_folder(written, tmp_path, name):
    """A `latest` that does not name a folder beside it is refused."""
    root = Path(shutil.copytree(written[0], tmp_path / "root"))
    (root / "latest").write_text(name)
    with pytest.raises(CheckpointError, match=r"root/latest must name"):
        Checkpointer(root).load_latest(*build())
    with pytest.raises(CheckpointError, match=r"root/latest must name"):
        load(root, *build())


@pytest.mark.parametrize(
    "named",
    [
        b"ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n",
        b"cpathlib\nPosixPath\n",
        b"ctorch.serialization\n_get_layout\n",
        b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n(I0\ntR",
    ],
)
def test_metadata_cannot_change_what_they_name(attempt, named):
    """A pickle can set attributes of a class, which would affect every later load: it is refused."""
    things = [_StorageInfo, Path, torch.serialization._get_layout, dcp_metadata._MEM_FORMAT_ENCODING(0)]
    before = [dict(vars(thing)) for thing in things]

    def poison(folder, mark):
        state = b"(N(Vrelative_path\nV/etc/passwd\nVunheard\nI1\ndtb."  # (None, {...}), set on the named thing
        (folder / ".metadata").write_bytes(named + state)
        sign(folder)

    assert_refused(attempt(poison), "step-00000001/.metadata")
    assert [dict(vars(thing)) for thing in things] == before
