"""The arrays that a method reports as diagnostics, from one evaluated round to the next."""

import numpy as np

from cfl_ray.core.diagnostics import CLUSTERS, Diagnostics, ReportedDiagnostic
from cfl_ray.core.state import State
from cfl_ray.runtime.evaluation import Scores, cluster_vectors
from cfl_ray.runtime.round_report import RoundDraft
from cfl_ray.tracking.record import cluster_diagnostics_of


class RoundDiagnostics:
    """Of the arrays of each name, the last one that was reported goes out with the next evaluated round.

    A method may report a function in the place of an array; it is called by `resolve`, before a checkpoint is saved or
    the models are gone.
    """

    def __init__(self, restored: tuple[ReportedDiagnostic, ...] = ()):
        self.arrays = {one.name: one for one in restored}
        self._deferred: dict[str, tuple[int, Diagnostics]] = {}  # not made yet: (round, reported there)

    def take(self, draft: RoundDraft, found: Diagnostics) -> None:
        """Takes the arrays that were reported in a round; numbers are metrics of the round."""
        draft.add_numbers(found)
        self._deferred |= dict.fromkeys(found.names, (draft.round, found))

    def resolve(self) -> None:
        """Makes the arrays that were taken since the last time."""
        made = {
            name: ReportedDiagnostic(name, round, found.array(name)) for name, (round, found) in self._deferred.items()
        }
        self.arrays, self._deferred = self.arrays | made, {}

    @property
    def reported(self) -> tuple[ReportedDiagnostic, ...]:
        """The arrays that are made."""
        return tuple(self.arrays.values())


def of_clusters(label: str, primary: str, state: State, online: np.ndarray, scores: Scores) -> Diagnostics:
    """Score and size of every cluster; nothing below two clusters."""
    found = Diagnostics(label)
    if vectors := cluster_vectors(state, online, scores):
        for name, vector_K in zip(cluster_diagnostics_of(primary), vectors, strict=True):
            found.add(name, vector_K, (CLUSTERS,), scores.ids_M, 0.0)
    return found
