"""Pauses of Python's garbage collection."""

import gc

import pytest

from cfl_ray.system.collection import paused_collection, uncollected


@pytest.mark.parametrize("before", [True, False])
def test_it_is_as_before_afterwards_also_after_an_error(before):
    was = gc.isenabled()
    (gc.enable if before else gc.disable)()
    try:
        with pytest.raises(KeyError), paused_collection():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == before
    finally:
        (gc.enable if was else gc.disable)()


def test_imports_are_not_collected_and_what_was_imported_is_skipped_later():
    frozen = gc.get_freeze_count()
    try:
        with pytest.raises(ImportError), uncollected():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() and gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
