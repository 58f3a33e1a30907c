"""The share of each client's training samples that is held out for validation."""

from dataclasses import dataclass

import numpy as np

from cfl_ray.core.rng import stream


@dataclass(frozen=True)
class ValidationShare:
    """A share of each client's training samples, drawn per class (order "random") or its last ones ("last")."""

    fraction: float
    order: str
    seed: int

    @property
    def in_words(self) -> str:
        """A sentence on the share."""
        how = "the last ones" if self.order == "last" else "drawn per class"
        return f"validation: {self.fraction:.4g} of each client's training samples are held out ({how})"

    def counts(self, num_samples_N: np.ndarray) -> np.ndarray:
        """int64 (N,): validation samples of clients with so many samples: the rounded share, never all of them."""
        return np.minimum(np.rint(self.fraction * num_samples_N), num_samples_N - 1).astype(np.int64).clip(min=0)

    def rows(self, client: int, y: np.ndarray) -> tuple[slice | np.ndarray, slice | np.ndarray]:
        """The rows of a client for training and for validation, ascending. y: its targets, integers (n,) if classes."""
        kept = len(y) - int(self.counts(np.array(len(y))))
        if self.order == "last":
            return slice(0, kept), slice(kept, None)
        rng = stream(self.seed, -1, -1, client, "data/validation")
        held = drawn_per_class(y, len(y) - kept, rng)
        return np.setdiff1d(np.arange(len(y)), held, assume_unique=True), held


def drawn_per_class(y: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` rows, ascending, with the share of each class in all rows, rounded by largest remainders.

    A class gives its last sample by rounding up only if no class has others left; until then those that have some give
    more. Targets that are not integers (n,) are one class.
    """
    label_n = y if y.ndim == 1 and y.dtype.kind in "iu" else np.zeros(len(y), np.int64)
    _, class_n, size_C = np.unique(label_n, return_inverse=True, return_counts=True)
    exact_C = size_C * count / max(len(y), 1)
    count_C = np.floor(exact_C).astype(np.int64)
    ties_C = rng.random(len(size_C))
    while (missing := count - int(count_C.sum())) > 0:
        left_C = size_C - count_C
        gives_C = left_C > (1 if left_C.max() > 1 else 0)
        rounded_up = np.lexsort((ties_C, count_C - exact_C, ~gives_C))[: min(missing, int(gives_C.sum()))]
        count_C[rounded_up] += 1
    shuffled = rng.permutation(len(y))
    by_class = shuffled[np.argsort(class_n[shuffled], kind="stable")]
    first_C = np.cumsum(size_C) - size_C
    return np.sort(np.concatenate([by_class[at : at + wanted] for at, wanted in zip(first_C, count_C, strict=True)]))
