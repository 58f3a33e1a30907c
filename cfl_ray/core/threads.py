"""One compute thread: more would add up in another order, and figures would depend on the number of cores."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from threadpoolctl import threadpool_limits


@contextmanager
def one_thread() -> Iterator[None]:
    """PyTorch, NumPy and SciPy compute with one thread inside, in this process."""
    import scipy.linalg  # noqa: F401  loads a BLAS of its own, so that it is there to be limited

    threads = torch.get_num_threads()
    try:
        with threadpool_limits(limits=1):
            torch.set_num_threads(1)
            yield
    finally:
        torch.set_num_threads(threads)
