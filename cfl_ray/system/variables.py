"""Environment variables that processes inherit."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

# for libraries that compute with one thread; they read it when they are imported
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",  # of NumPy
}


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Context in which these environment variables are set."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
