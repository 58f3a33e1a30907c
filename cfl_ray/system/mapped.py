"""Large arrays in files, so that the system can take their pages out of memory."""

import math
import os
import tempfile

import numpy as np

from cfl_ray.errors import DataError

IN_MEMORY = 64 << 20  # bytes of an array; larger ones are in a file


def mapped_array(
    shape: tuple[int, ...], dtype: np.dtype | type[np.generic] = np.uint8, in_memory: int | None = None
) -> np.ndarray:
    """A new array; if larger than `in_memory` bytes (None: 64 MB), in a temporary file that is removed with it.

    The file is in `TMPDIR`. Raises DataError if there is no room.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size <= (IN_MEMORY if in_memory is None else in_memory):
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile(prefix="cfl_ray-") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, size)  # a full disk later would end the process without a message
        except OSError as error:
            raise DataError(
                f"an array of {size / 1e9:.2f} GB has no room in {tempfile.gettempdir()} ({error.strerror}); set "
                "TMPDIR to a folder with room"
            ) from error
        return np.asarray(np.memmap(file, dtype, "r+", shape=shape))
