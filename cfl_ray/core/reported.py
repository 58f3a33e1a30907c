"""Reported diagnostics as they are recorded: without torch, which commands on records do not wait for."""

from dataclasses import dataclass

import numpy as np

OTHER_CLUSTERS = -2  # label, on an axis of clusters, of the sum over those that are not listed


@dataclass(frozen=True, eq=False)
class Diagnostic:
    """A reported value."""

    value: np.ndarray  # float64 () of a number, float32 (A,), (A, B) or (A, B, C) of an array; NaN: not defined
    axes: tuple[str, ...] = ()  # of each axis "clients", "clusters" or another word
    labels: tuple[np.ndarray, ...] = ()  # int64, of each axis: client ids, numbers of clusters, or 0, 1, 2 ..

    def equals(self, other: "Diagnostic") -> bool:
        """Whether both have the same values of the same clients, clusters ..."""
        return (
            self.axes == other.axes
            and np.array_equal(self.value, other.value, equal_nan=True)
            and all(map(np.array_equal, self.labels, other.labels))
        )


@dataclass(frozen=True)
class ReportedDiagnostic:
    """A diagnostic with its name and the round in which it was reported."""

    name: str
    round: int
    diagnostic: Diagnostic
