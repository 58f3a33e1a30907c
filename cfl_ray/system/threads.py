"""Computation with one thread: with more, the order of sums, and so the results, depends on the number of cores."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits


@contextmanager
def one_thread() -> Iterator[None]:
    """Context in which PyTorch, NumPy and SciPy compute with one thread in this process."""
    import scipy.linalg  # noqa: F401  loads SciPy's own BLAS; threadpoolctl limits only libraries that are loaded

    threads = torch.get_num_threads()
    try:
        with threadpool_limits(limits=1):
            torch.set_num_threads(1)
            yield
    finally:
        torch.set_num_threads(threads)
