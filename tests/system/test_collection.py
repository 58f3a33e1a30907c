"""Pauses of Python's garbage collection."""

import gc

import pytest

from cfl_ray.system.collection import paused_collection


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
