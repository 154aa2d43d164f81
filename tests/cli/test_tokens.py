"""Token files: how they are split, mapped and checked."""

import numpy as np
import pytest

from fairshard.cli.option_error import OptionError
from fairshard.cli.sharded import TrainingStopped
from fairshard.cli.text import Pieces, TextError, TextPlan, checksum, load, windows
from fairshard.cli.tokens import check_tokens, largest_token, plan_tokens
from fairshard.cli.trainer import check_known

FORMATS = {
    "bin": ("uint16", None, lambda path, ids: ids.astype("<u2").tofile(path)),
    "wide.bin": ("uint32", "uint32", lambda path, ids: ids.astype("<u4").tofile(path)),
    "npy": ("int64", None, np.save),
}


@pytest.mark.parametrize("name", FORMATS)
def test_one_file_is_cut_and_mapped(name, tmp_path):
    """The last tenth of 1,000 tokens is for validation; both sides are views of the file, without its header."""
    dtype, given, write = FORMATS[name]
    ids = np.arange(1000) * 7 % 60_000
    path = tmp_path / f"ids.{name}"
    write(path, ids)
    plan = plan_tokens([path], given, seed=0, context=8)
    text = load(plan)
    assert (plan.dtype, plan.is_text, text.bytes_per_token) == (dtype, False, None)
    assert isinstance(text.train, np.memmap)
    assert text.train.tolist() == ids[:900].tolist()
    assert text.validation.tolist() == ids[900:].tolist()
    assert largest_token(plan) == (ids.max(), path)


def test_several_files_are_split_whole_and_read_as_one(tmp_path):
    """Windows over the edges of files have the tokens of the files end to end; nothing is copied."""
    paths = []
    for number, length in enumerate((300, 50, 400, 60)):
        paths.append(tmp_path / f"{number}.npy")
        np.save(paths[-1], np.arange(length, dtype=np.int32) + 1000 * number)
    plan = plan_tokens(paths, None, seed=3, context=8)
    text = load(plan)
    sides = [np.concatenate([np.load(piece.path) for piece in side]) for side in (plan.train, plan.validation)]
    assert sorted(np.concatenate(sides).tolist()) == sorted(np.concatenate([np.load(path) for path in paths]).tolist())
    assert isinstance(text.train, Pieces)
    assert (len(text.train), len(text.validation)) == (len(sides[0]), len(sides[1]))
    starts = np.arange(len(sides[0]) - 8)
    assert np.array_equal(windows(text.train, starts, 8), sides[0][starts[:, None] + np.arange(9)])


def test_a_checksum_of_large_files_reads_a_part_of_them(tmp_path, monkeypatch):
    """Of 64 blocks every fourth is read if 16 is the limit: a change there is seen; a resumed run is quick."""
    monkeypatch.setattr("fairshard.cli.text._BLOCK_NBYTES", 64)
    monkeypatch.setattr("fairshard.cli.text._MAX_TOKEN_BLOCKS", 16)
    path = tmp_path / "ids.bin"
    ids = np.arange(2048, dtype="<u2")
    sums = []
    for changed in (None, 0, 32):  # tokens of the first block and of the second
        now = ids.copy()
        if changed is not None:
            now[changed] = 9999
        now.tofile(path)
        sums.append(checksum(plan_tokens([path], None, 0, 8)))
    assert sums[0] == sums[2] != sums[1]


def test_a_vocabulary_must_hold_the_tokens(tmp_path):
    """The largest token counts, up to the vocabulary; batches are checked again, because files are only sampled."""
    path = tmp_path / "ids.bin"
    np.arange(500, dtype="<u2").tofile(path)
    plan = plan_tokens([path], None, 0, 8)
    check_tokens(plan, 500, "cure")
    with pytest.raises(OptionError, match=r"holds token 499, but the model has a vocabulary of 499\. cure"):
        check_tokens(plan, 499, "cure")
    check_tokens(TextPlan("text", (), ()), 256, "cure")
    check_known([np.array([[0, 9]])], 10)
    for bad in (10, -1):
        with pytest.raises(TrainingStopped, match=f"vocabulary of 10, but one of the data is {bad}"):
            check_known([np.array([[0, bad]])], 10)


def test_a_file_that_shrinks_to_nothing_is_refused(tmp_path):
    """An empty file has no tokens to split."""
    (tmp_path / "ids.bin").touch()
    with pytest.raises(TextError, match="but has 0 bytes"):
        plan_tokens([tmp_path / "ids.bin"], None, 0, 8)
