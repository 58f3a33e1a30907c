"""Settings of glibc's allocator for freed memory. Other C libraries stay as they are."""

import ctypes
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_KEPT_BYTES, _LARGE_BYTES, _FREE_BYTES = 1 << 30, 1 << 20, 16 << 20


class _Malloc(ctypes.Structure):
    """`struct mallinfo2` of malloc.h; `fordblks` is the bytes that are free and kept."""

    _fields_ = (("others", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t))


def keep_freed_memory() -> None:
    """Keeps freed memory in the process, on hosts: fetching pages for every gradient takes a tenth of the time."""
    _set(trim=_KEPT_BYTES, mmap=_KEPT_BYTES)


def return_large_arrays() -> None:
    """Returns each large array as soon as it is freed, on the server.

    By default glibc keeps arrays of up to 32 MB and the memory between them: several times the memory in use, if arrays
    with a number for each of a million clients are allocated and freed.
    """
    _set(trim=_FREE_BYTES, mmap=_LARGE_BYTES)


def return_freed_memory(limit: int) -> None:
    """Returns the memory that is kept, on hosts between exchanges, if it is more than `limit` bytes.

    Arrays of many sizes leave gaps, and the memory that is kept would grow with the number of clients served.
    """
    with suppress(AttributeError):  # before glibc 2.33
        libc = ctypes.CDLL(None)
        libc.mallinfo2.restype = _Malloc
        if libc.mallinfo2().fordblks > limit:
            libc.malloc_trim(0)


def _set(trim: int, mmap: int) -> None:
    with suppress(AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, trim)
        libc.mallopt(_M_MMAP_THRESHOLD, mmap)
