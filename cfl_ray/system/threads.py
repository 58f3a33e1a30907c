"""Computation with one thread: with more, the order of sums, and so the results, depends on the number of cores."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch
from threadpoolctl import ThreadpoolController


@contextmanager
def one_thread() -> Iterator[None]:
    """Context in which PyTorch, NumPy and SciPy compute with one thread in this process."""
    import scipy.linalg  # noqa: F401  loads SciPy's own BLAS; threadpoolctl limits only libraries that are loaded

    threads = torch.get_num_threads()
    try:
        with _loaded_libraries(hash(frozenset(sys.modules))).limit(limits=1):
            torch.set_num_threads(1)
            yield
    finally:
        torch.set_num_threads(threads)


@lru_cache(maxsize=1)
def _loaded_libraries(modules: int) -> ThreadpoolController:
    """The loaded libraries with threads. modules: tells the imported ones, which load them, apart."""
    return ThreadpoolController()
