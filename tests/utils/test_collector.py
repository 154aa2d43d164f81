"""Python's garbage collector is held back in a block, and only there."""

import gc

import pytest

from fairshard.utils.collector import collector_paused


def test_nothing_is_collected_in_the_block_and_what_was_on_is_on_again():
    assert gc.isenabled()
    with collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()  # the inner block leaves the outer one alone
    assert gc.isenabled()


def test_it_is_on_again_after_an_exception():
    with pytest.raises(KeyError), collector_paused():
        raise KeyError
    assert gc.isenabled()


def test_what_the_user_has_disabled_stays_disabled():
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
