"""How files are chosen, split, mapped and cut into windows."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairshard.cli.data import (
    STANDARD_LIBRARY_NBYTES,
    DataPlan,
    Ids,
    Piece,
    check_tokens,
    plan_data,
    read_data,
    split,
)
from fairshard.cli.options import OptionError, TrainingStopped, TrainOptions
from fairshard.cli.trainer import check_known, even_starts

sizes = st.lists(st.integers(1, 1000), min_size=2, max_size=30)
WORDS = "the quick brown fox jumps over the lazy dog\n"

FORMATS = {
    "bin": ("uint16", None, lambda path, ids: ids.astype("<u2").tofile(path)),
    "wide.bin": ("uint32", "uint32", lambda path, ids: ids.astype("<u4").tofile(path)),
    "npy": ("int64", None, np.save),
}


def _pieces(tmp_path, sizes):
    return [Piece(tmp_path / f"{number:03}.txt", size) for number, size in enumerate(sizes)]


def _text(data, seed, context):
    return plan_data(TrainOptions(data=data, seed=seed, context=context))


def _tokens(paths, dtype=None, seed=0, context=8):
    return plan_data(TrainOptions(tokens=tuple(paths), token_dtype=dtype, seed=seed, context=context))


def everything(ids):
    """All tokens, in order."""
    return ids[np.arange(len(ids))].tolist()


@pytest.fixture
def folder(tmp_path):
    """Thirty files of one hundred bytes, each of one letter, in two folders."""
    for number in range(30):
        path = tmp_path / "text" / f"part{number % 2}" / f"{number:02}.txt"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(bytes([65 + number]) * 100)
    return tmp_path / "text"


@given(sizes=sizes, seed=st.integers(0, 10))
def test_a_tenth_of_the_files_at_most_is_for_validation(tmp_path_factory, sizes, seed):
    """Each file is on one side; validation has at most a tenth of the bytes, or one smallest file."""
    pieces = _pieces(tmp_path_factory.getbasetemp(), sizes)
    train, validation = split(pieces, seed)
    assert train
    assert sorted([*train, *validation], key=lambda piece: piece.path) == pieces
    num = sum(piece.num for piece in validation)
    assert 0 < 10 * num <= sum(sizes) or [piece.num for piece in validation] == [min(sizes)]


def test_the_split_is_the_seeds_and_not_that_of_the_listing(tmp_path):
    """Files in another order are split alike; another seed splits them differently."""
    pieces = _pieces(tmp_path, [10] * 40)
    assert split(pieces, 3) == split(pieces[::-1], 3)
    assert split(pieces, 3) != split(pieces, 4)


def test_a_folder_is_read_whole_and_no_byte_twice(folder, tmp_path):
    """Each file's letter is on one side only, and both sides together hold every byte of the folder."""
    data = read_data(_text(folder, 0, 8), tmp_path, 0, 8, None)
    train, validation = everything(data.train), everything(data.validation)
    assert set(train) | set(validation) == set(range(65, 95))
    assert not set(train) & set(validation)
    assert len(train) + len(validation) == 30 * 100
    assert data.bytes_per_token == 1


def test_hidden_empty_and_binary_files_are_left_out(folder):
    """Files that are not text do not change the plan."""
    before = _text(folder, 0, 8)
    (folder / ".hidden").write_text("secret")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref")
    (folder / "empty.txt").touch()
    (folder / "image.bin").write_bytes(b"abc\0def")
    assert _text(folder, 0, 8) == before


@pytest.mark.parametrize("num", [100, 101, 109, 110])
def test_a_single_file_is_cut_at_its_last_tenth(tmp_path, num):
    """The last tenth of a single file, rounded up, is the validation side, whatever the seed."""
    (tmp_path / "text").mkdir()
    path = tmp_path / "text" / "one.txt"
    content = bytes(range(1, num + 1))
    path.write_bytes(content)
    last = (num + 9) // 10
    for number, given_path in enumerate((path, tmp_path / "text")):
        plan = _text(given_path, num, 4)
        assert plan.train == (Piece(path, num - last),)
        (tmp_path / str(number)).mkdir()
        data = read_data(plan, tmp_path / str(number), 0, 4, None)
        assert bytes(everything(data.train)) == content[:-last]
        assert bytes(everything(data.validation)) == content[-last:]


def test_by_default_the_text_is_the_standard_librarys():
    """The default is some 10 MB of Python sources, the same for the same seed."""
    plan = _text(None, 0, 64)
    pieces = (*plan.train, *plan.validation)
    assert 0.5 * STANDARD_LIBRARY_NBYTES < sum(piece.num for piece in pieces) <= STANDARD_LIBRARY_NBYTES
    assert {piece.path.suffix for piece in pieces} == {".py"}
    assert _text(None, 0, 64) == plan


@pytest.mark.parametrize("context", [1, 7, 99])
def test_windows_are_the_tokens_from_their_starts(context):
    """Row ``i`` is the text at ``[starts[i], starts[i] + context + 1)``, to the last byte of the text."""
    text = np.random.default_rng(0).integers(0, 256, 100).astype(np.uint8)
    starts = even_starts(len(text), context, 5)
    found = Ids([text]).windows(starts, context)
    assert starts[0] == 0
    assert starts[-1] + context + 1 == len(text)
    assert found.dtype == np.int64
    for row, start in zip(found, starts, strict=True):
        assert bytes(row.astype(np.uint8)) == bytes(text[start : start + context + 1])


def test_a_run_keeps_its_text(tmp_path):
    """Where the run has its text, that of ``--data`` may be gone."""
    (tmp_path / "text").write_text(WORDS * 100)
    (tmp_path / "run").mkdir()
    options = TrainOptions(data=tmp_path / "text", out=tmp_path / "run", context=8)
    kept = everything(read_data(plan_data(options), tmp_path / "run", 0, 8, None).train)
    (tmp_path / "text").unlink()
    assert everything(read_data(plan_data(options), tmp_path / "run", 0, 8, None).train) == kept


@pytest.mark.parametrize("number", [1, 2, 3])
def test_text_counts_as_written_when_all_of_it_is(number, tmp_path, monkeypatch):
    """If the disk fails at any of the three files, the next start writes them again."""
    (tmp_path / "a.txt").write_text(WORDS * 30)
    plan, run = _text(tmp_path / "a.txt", 0, 4), tmp_path / "run"
    run.mkdir()
    left = [number]

    def fail(_):
        left[0] -= 1
        if not left[0]:
            raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", fail)
        with pytest.raises(OSError, match="no space left"):
            read_data(plan, run, 0, 4, None)
    assert not (run / "data.json").exists()
    assert len(read_data(plan, run, 0, 4, None).train) == len(WORDS) * 27


@pytest.mark.parametrize("name", FORMATS)
def test_one_file_is_cut_and_mapped(name, tmp_path):
    """The last tenth of 1,000 tokens is for validation; both sides are views of the file, without its header."""
    dtype, given_dtype, write = FORMATS[name]
    ids = np.arange(1000) * 7 % 60_000
    path = tmp_path / f"ids.{name}"
    write(path, ids)
    plan = _tokens([path], given_dtype)
    data = read_data(plan, tmp_path, 0, 8, None)
    assert (plan.is_text, data.bytes_per_token) == (False, None)
    assert [part.dtype for part in data.train.parts] == [dtype]
    assert all(isinstance(part, np.memmap) for part in data.train.parts)
    assert everything(data.train) == ids[:900].tolist()
    assert everything(data.validation) == ids[900:].tolist()


def test_several_files_are_split_whole_and_read_as_one(tmp_path):
    """Windows over the edges of files, here of two dtypes, have the tokens of the files end to end."""
    paths, dtypes = [], ("int32", "int64", "int32", "uint16")
    for number, length in enumerate((300, 50, 400, 60)):
        paths.append(tmp_path / f"{number}.npy")
        np.save(paths[-1], np.arange(length, dtype=dtypes[number]) + 1000 * number)
    plan = _tokens(paths, seed=3)
    data = read_data(plan, tmp_path, 0, 8, None)
    sides = [np.concatenate([np.load(piece.path) for piece in side]) for side in (plan.train, plan.validation)]
    assert sorted(np.concatenate(sides).tolist()) == sorted(np.concatenate([np.load(path) for path in paths]).tolist())
    assert (len(data.train), len(data.validation)) == (len(sides[0]), len(sides[1]))
    starts = np.arange(len(sides[0]) - 8)
    assert np.array_equal(data.train.windows(starts, 8), sides[0][starts[:, None] + np.arange(9)])


def test_a_vocabulary_must_hold_the_tokens(tmp_path):
    """The largest token counts, up to the vocabulary; batches are checked again, because files are only sampled."""
    path = tmp_path / "ids.bin"
    np.arange(500, dtype="<u2").tofile(path)
    plan = _tokens([path])
    check_tokens(plan, 500)
    with pytest.raises(OptionError, match=r"holds token 499, but the model has a vocabulary of 499\."):
        check_tokens(plan, 499)
    check_tokens(DataPlan("text", (), (), True), 256)
    check_known(np.array([[0, 9]]), 10)
    for bad in (10, -1):
        with pytest.raises(TrainingStopped, match=f"vocabulary of 10, but one of the data is {bad}"):
            check_known(np.array([[0, bad]]), 10)


def test_data_are_known_again(tmp_path):
    """Another token, or another length, has another entry; the same tokens elsewhere have the same."""
    entries = []
    for number, (length, changed) in enumerate(((2048, 0), (2048, 0), (2048, 1), (2047, 0))):
        ids = np.arange(length, dtype="<u2")
        ids[7] += changed
        path = tmp_path / f"{number}.bin"
        ids.tofile(path)
        entries.append(read_data(_tokens([path]), tmp_path, 0, 8, None).entry())
    assert entries[0] == entries[1]
    assert len({json.dumps(entry) for entry in entries}) == 3


class Lengths:
    """A tokenizer whose tokens are the lengths of words."""

    eos_token_id = 99

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [len(word) for word in text.split()]}

    def get_vocab(self):
        return {"a": 0, "b": 99}


def test_text_is_cut_by_a_tokenizer_of_the_model(tmp_path):
    """The files hold the ids of each text, and its end if the tokenizer has one; a second call reads them."""
    (tmp_path / "text").write_text(WORDS * 100)
    plan = _text(tmp_path / "text", 0, 8)
    data = read_data(plan, tmp_path, 0, 8, Lengths())
    pieces = (*plan.train, *plan.validation)
    ids = [[len(word) for word in (WORDS * 100)[p.begin : p.begin + p.num].split()] for p in pieces]
    assert (everything(data.train), everything(data.validation)) == ([*ids[0], 99], [*ids[1], 99])
    assert data.bytes_per_token == plan.validation[0].num / (len(ids[1]) + 1)
    (tmp_path / "text").unlink()
    assert everything(read_data(plan, tmp_path, 0, 8, None).train) == everything(data.train)
    with pytest.raises(TrainingStopped, match="context of 2000 needs 2001 tokens to train on"):
        read_data(plan, tmp_path, 0, 2000, None)
