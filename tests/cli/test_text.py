"""How files are chosen, split, and cut into windows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairshard.cli.text import (
    STANDARD_LIBRARY_NBYTES,
    Piece,
    TextError,
    TextFile,
    even_starts,
    load,
    plan_text,
    split_files,
    split_position,
    windows,
)

sizes = st.lists(st.integers(1, 1000), min_size=2, max_size=30)


def _files(tmp_path, sizes):
    return [TextFile(tmp_path / f"{number:03}.txt", size) for number, size in enumerate(sizes)]


@pytest.fixture
def folder(tmp_path):
    """Thirty files of one hundred bytes, each of one letter, in two folders."""
    for number in range(30):
        path = tmp_path / f"part{number % 2}" / f"{number:02}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes([65 + number]) * 100)
    return tmp_path


@given(sizes=sizes, seed=st.integers(0, 10))
def test_every_file_is_on_exactly_one_side(tmp_path_factory, sizes, seed):
    """The two sides are disjoint, together have all files, and neither is empty."""
    files = _files(tmp_path_factory.getbasetemp(), sizes)
    train, validation = split_files(files, seed)
    assert train
    assert validation
    assert sorted([*train, *validation], key=lambda file: file.path) == files


@given(sizes=sizes, seed=st.integers(0, 10))
def test_validation_is_a_tenth_at_most_or_the_smallest_file(tmp_path_factory, sizes, seed):
    """The validation side has at most a tenth of the bytes; if no file is that small, it is one smallest file."""
    _, validation = split_files(_files(tmp_path_factory.getbasetemp(), sizes), seed)
    nbytes = sum(file.nbytes for file in validation)
    assert 10 * nbytes <= sum(sizes) or [file.nbytes for file in validation] == [min(sizes)]


def test_the_split_is_the_seeds_and_not_that_of_the_listing(tmp_path):
    """Files in another order are split alike; another seed splits them differently."""
    files = _files(tmp_path, [10] * 40)
    assert split_files(files, 3) == split_files(files[::-1], 3)
    assert split_files(files, 3) != split_files(files, 4)


def test_a_folder_is_read_whole_and_no_byte_twice(folder):
    """Each file's letter is on one side only, and both sides together hold every byte of the folder."""
    text = load(plan_text(folder, seed=0, context=8))
    train, validation = set(text.train.tolist()), set(text.validation.tolist())
    assert train | validation == set(range(65, 95))
    assert not train & validation
    assert len(text.train) + len(text.validation) == 30 * 100


def test_hidden_empty_and_binary_files_are_left_out(folder):
    """Files that are not text do not change the plan."""
    before = plan_text(folder, seed=0, context=8)
    (folder / ".hidden").write_text("secret")
    (folder / ".git").mkdir()
    (folder / ".git" / "HEAD").write_text("ref")
    (folder / "empty.txt").touch()
    (folder / "image.bin").write_bytes(b"abc\0def")
    assert plan_text(folder, seed=0, context=8) == before


@pytest.mark.parametrize("nbytes", [100, 101, 109, 110])
def test_a_single_file_is_cut_at_its_last_tenth(tmp_path, nbytes):
    """The last tenth of a single file, rounded up, is the validation side, whatever the seed."""
    path = tmp_path / "one.txt"
    content = bytes(range(1, nbytes + 1))
    path.write_bytes(content)
    last = (nbytes + 9) // 10
    for data in (path, tmp_path):
        plan = plan_text(data, seed=nbytes, context=4)
        assert plan.train == (Piece(path, 0, nbytes - last),)
        text = load(plan)
        assert bytes(text.train) == content[:-last]
        assert bytes(text.validation) == content[-last:]
    assert split_position(nbytes) == nbytes - last


def test_by_default_the_text_is_the_standard_librarys(tmp_path):
    """The default is some 10 MB of Python sources, the same for the same seed."""
    plan = plan_text(None, seed=0, context=64)
    nbytes = plan.train_nbytes + plan.validation_nbytes
    assert 0.5 * STANDARD_LIBRARY_NBYTES < nbytes <= STANDARD_LIBRARY_NBYTES
    assert {piece.path.suffix for piece in (*plan.train, *plan.validation)} == {".py"}
    assert plan_text(None, seed=0, context=64) == plan


@pytest.mark.parametrize("context", [1, 7, 99])
def test_windows_are_the_bytes_from_their_starts(context):
    """Row ``i`` is the text at ``[starts[i], starts[i] + context + 1)``, to the last byte of the text."""
    text = np.random.default_rng(0).integers(0, 256, 100).astype(np.uint8)
    starts = even_starts(len(text), context, 5)
    found = windows(text, starts, context)
    assert starts[0] == 0
    assert starts[-1] + context + 1 == len(text)
    assert found.dtype == np.int64
    for row, start in zip(found, starts, strict=True):
        assert bytes(row.astype(np.uint8)) == bytes(text[start : start + context + 1])


def test_a_context_may_use_all_of_a_side_and_no_more(tmp_path):
    """A side of ``n`` bytes serves a context of ``n - 1``, because a window holds one more byte; ``n`` is refused."""
    path = tmp_path / "one.txt"
    path.write_bytes(b"x" * 100)  # 90 to train on, 10 to validate on
    assert load(plan_text(path, seed=0, context=9)).validation.size == 10
    with pytest.raises(TextError, match=r"context of 10 needs 11 bytes to validate on, but .* leaves 10\."):
        plan_text(path, seed=0, context=10)
