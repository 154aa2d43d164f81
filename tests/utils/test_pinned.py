"""Host memory is pinned at its exact size, or not at all, with a warning."""

import gc
import mmap
import warnings

import pytest
import torch

from fairshard.setup import placement
from fairshard.utils import pinned
from fairshard.utils.host import free_host_memory

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def test_pinned_memory_starts_at_a_page_and_is_registered_at_its_exact_size(monkeypatch):
    """The driver pins exactly the requested bytes, and releases them when the last tensor on them is deleted.

    They are the whole storage, because `is_pinned` checks the start of the storage.
    """
    asked, released = [], []
    monkeypatch.setattr(pinned, "host_register", lambda data, _: asked.append((data.data_ptr(), data.nbytes)) or True)
    monkeypatch.setattr(pinned, "host_unregister", lambda address, _: released.append(address))
    made = pinned.host_empty_like(torch.zeros(3, 37, dtype=torch.bfloat16), CUDA)
    assert (made.shape, made.dtype) == ((3, 37), torch.bfloat16)
    assert asked == [(made.data_ptr(), 3 * 37 * 2)]
    assert made.data_ptr() % mmap.PAGESIZE == 0
    assert (made.storage_offset(), made.untyped_storage().nbytes()) == (0, made.nbytes)
    made.fill_(1)
    part = made[1:]
    del made
    gc.collect()
    assert not released
    del part
    gc.collect()
    assert released == [asked[0][0]]


def test_the_limit_of_locked_memory_is_a_warning_once(monkeypatch):
    """Memory that cannot be pinned is pageable and works; only the first time warns."""
    monkeypatch.setattr(pinned, "host_register", lambda *_: False)
    pinned._warn_not_pinned.cache_clear()
    with pytest.warns(UserWarning, match=r"could not be pinned.*ulimit -l"):
        made = pinned.host_empty_like(torch.zeros(5), CUDA)
    assert made.fill_(2).sum() == 10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pinned.host_empty_like(torch.zeros(5), CUDA)


def test_without_a_gpu_and_without_elements_nothing_is_pinned(monkeypatch):
    """Memory for a model that computes on the CPU is ordinary; the driver is not asked for 0 bytes."""
    monkeypatch.setattr(pinned, "host_register", None)
    assert pinned.host_empty_like(torch.zeros(5), CPU).shape == (5,)
    assert pinned.host_empty_like(torch.zeros(0), CUDA).shape == (0,)


@pytest.mark.parametrize(("nbytes", "refused"), [(80, False), (81, True)])
def test_four_fifths_of_the_free_memory_may_be_pinned(monkeypatch, nbytes, refused):
    """Of 100 free bytes, 80 may be pinned and 81 may not."""
    monkeypatch.setattr(placement, "free_host_memory", lambda: 100)
    assert bool(placement.too_much_to_pin(nbytes, 2)) == refused


def test_free_memory_is_that_of_the_control_group_where_it_is_less(monkeypatch, tmp_path):
    """A limit of 1000 with 400 used leaves 600; "max" is no limit."""
    unlimited = free_host_memory()
    assert unlimited > 1 << 20
    (tmp_path / "max").write_text("1000\n")
    (tmp_path / "current").write_text("400\n")
    files = (str(tmp_path / "max"), str(tmp_path / "current"))
    monkeypatch.setattr("fairshard.utils.host._CGROUP_MEMORY", (files,))
    assert free_host_memory() == 600
    (tmp_path / "max").write_text("max\n")
    assert free_host_memory() > 1 << 20
