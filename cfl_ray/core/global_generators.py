"""The global generators of PyTorch, NumPy and `random`, which code of users draws from.

This package draws from none of them (`core.rng`). Where it calls code of users that may draw from them, they have a
seed that follows from a random key, and the state of the process is as before afterwards.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from cfl_ray.core.rng import word
from cfl_ray.core.work import Address


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context in which the CPU's global generators have this seed, a word of 64 bits; then they are as before."""
    with kept():
        seed_all(seed)
        yield


def seeded_for(part: Any, at: Address, client: int, what: str) -> AbstractContextManager[object]:
    """Context in which a user's part draws from global generators as the random key of this place and client says.

    No context for parts of this package, which draw from none. what: the part does, the last part of the key.
    """
    if not is_users(part):
        return nullcontext()
    return seeded(word(at.seed, at.round, at.exchange, client, f"global generators in {what}"))


def is_users(part: Any) -> bool:
    """Whether an object, function or class is not of this package."""
    module = getattr(part, "__module__", None) or type(part).__module__
    return not module.startswith("cfl_ray.")


@contextmanager
def kept(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Context that restores the states of the global generators of the CPU, and of these GPUs, at its end."""
    numpys, pythons = np.random.get_state(legacy=False), random.getstate()
    try:
        with torch.random.fork_rng(devices=list(devices)):
            yield
    finally:
        np.random.set_state(numpys)
        random.setstate(pythons)


def seed_all(seed: int, on_gpu: bool = False) -> None:
    """Seeds the global generators with a word of 64 bits. on_gpu: those of PyTorch on all GPUs too."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed formats tracebacks for CUDA, for 0.8 ms
    if on_gpu:
        torch.cuda.manual_seed_all(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF])
    random.seed(seed)


def states() -> tuple[Any, ...]:
    """The states of the global generators of the CPU, for comparison with `==`."""
    numpys: Any = np.random.get_state(legacy=False)
    return (
        torch.get_rng_state().numpy().tobytes(),
        repr({key: value for key, value in numpys.items() if key != "state"}),
        *(np.asarray(value).tobytes() for value in numpys["state"].values()),
        random.getstate(),
    )
