"""The criteria by which a method ends early and by which its best round is chosen (`stopping` and `keep`)."""

import math
from dataclasses import dataclass

from cfl_ray.errors import counted
from cfl_ray.tracking.record import is_of_validation

_ROUNDING = 1e-12  # relative error up to which a gain is `min_delta`: 0.502 - 0.5 is not 0.002
OF_GROUPS = ("ari", "nmi", "purity", "correct_clients")  # metrics that compare clusters with the true groups
_WITHOUT_TEST = ("train_loss", "num_clusters", "largest_cluster_share")


@dataclass(frozen=True)
class Criterion:
    """A metric whose values in evaluations are compared."""

    metric: str
    minimizes: bool = False
    min_delta: float = 0.0
    patience: int = 0

    def gain(self, value: float, reference: float | None) -> float:
        """By how much a value is better than another one; infinite if there is no other."""
        if reference is None:
            return math.inf
        return reference - value if self.minimizes else value - reference

    def is_improved(self, value: float, reference: float | None) -> bool:
        """Whether a value is better than another one by more than `min_delta`."""
        scale = max(abs(value), abs(reference or 0.0)) if self.min_delta else 0.0
        return self.gain(value, reference) > self.min_delta + _ROUNDING * scale

    @property
    def stalled_in_words(self) -> str:
        """The reason for the end of a method."""
        verb = "fallen" if self.minimizes else "risen"
        more = f" by more than {self.min_delta:g}" if self.min_delta else ""
        return f"{self.metric} has not {verb}{more} for {counted(self.patience, 'evaluation')}"

    @property
    def chosen_by(self) -> str:
        """The data that should choose nothing and that this metric measures; empty: none of these."""
        if is_of_validation(self.metric) or self.metric in _WITHOUT_TEST:
            return ""
        return "the true groups" if self.metric in OF_GROUPS else "the clients' test data"


@dataclass(frozen=True)
class RoundChoice:
    """The criteria of a run."""

    stops_by: Criterion | None = None  # None: a method makes all rounds
    keeps_by: Criterion | None = None  # None: the models of the last round are kept

    @property
    def warnings(self) -> list[str]:
        """A line for each criterion by which data choose that are meant for the test alone."""
        lines = []
        for key, criterion in (("stopping", self.stops_by), ("keep", self.keeps_by)):
            if criterion is not None and (data := criterion.chosen_by):
                lines.append(
                    f"{key}: {data} choose the {'end' if key == 'stopping' else 'round of the kept models'} by "
                    f"{criterion.metric}, which favours the method in its own test; set data.validation and choose by "
                    f"a metric validation/..., or name train_loss"
                )
        return lines
