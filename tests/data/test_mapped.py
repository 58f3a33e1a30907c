"""Arrays that do not fit into memory are in a file."""

import errno
import os

import numpy as np
import pytest

from cfl_ray.data import torch_dataset
from cfl_ray.errors import DataError
from cfl_ray.system import mapped
from cfl_ray.system.mapped import mapped_array


@pytest.fixture
def small_memory(monkeypatch):
    """Arrays of more than 100 bytes are in a file."""
    monkeypatch.setattr(mapped, "IN_MEMORY", 100)


def memory_maps() -> str:
    with open("/proc/self/maps") as maps:
        return "".join(line for line in maps if "/cfl_ray-" in line or "(deleted)" in line)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int64])
def test_a_large_array_is_in_a_file_that_has_no_name(small_memory, tmp_path, monkeypatch, dtype):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = memory_maps().count(str(tmp_path))
    large, small = mapped_array((50, 3), dtype), mapped_array((4, 3), dtype)
    assert memory_maps().count(str(tmp_path)) == before + 1 and not any(tmp_path.iterdir())
    assert (large.shape, large.dtype, small.shape) == ((50, 3), dtype, (4, 3))
    large[:] = np.arange(150).reshape(50, 3)
    assert large[49].tolist() == [147, 148, 149]
    del large
    assert memory_maps().count(str(tmp_path)) == before


def test_a_full_disk_is_named_before_the_array_is_used(small_memory, monkeypatch):
    def full(descriptor, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match=r"0.00 GB has no room in .* \(No space left on device\); set TMPDIR"):
        mapped_array((50, 3))


def test_a_dataset_is_read_into_it(small_memory):
    pairs = [(np.full((4, 4), row, np.float32), row % 2) for row in range(9)]
    x, y = torch_dataset._arrays(pairs, "dataset", "class")
    assert x.dtype == np.float32 and x[:, 0, 0].tolist() == list(range(9)) and y.tolist() == [0, 1] * 4 + [0]
