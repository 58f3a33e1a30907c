"""Arrays that may be larger than memory."""

import math
import os
import tempfile

import numpy as np

from cfl_ray.errors import DataError

_IN_MEMORY = 64 << 20  # bytes


def mapped_array(shape: tuple[int, ...], dtype: np.dtype | type[np.generic] = np.uint8) -> np.ndarray:
    """A new array; if larger than 64 MB, in a temporary file that is removed with it, so that pages can leave memory.

    The file is in `TMPDIR`. Raises DataError if there is no room.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size <= _IN_MEMORY:
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile(prefix="cfl_ray-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk later would end the process without a message
        except OSError as error:
            raise DataError(
                f"the samples need {size / 1e9:.2f} GB in {tempfile.gettempdir()} ({error.strerror}); set "
                "TMPDIR to a folder with room"
            ) from error
        return np.asarray(np.memmap(file, dtype, "r+", shape=shape))
