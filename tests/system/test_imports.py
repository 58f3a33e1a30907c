"""The garbage collector during imports."""

import gc

import pytest

from cfl_ray.system.imports import uncollected


def test_it_is_off_inside_and_skips_what_was_imported():
    frozen = gc.get_freeze_count()
    try:
        with pytest.raises(ImportError), uncollected():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() and gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
