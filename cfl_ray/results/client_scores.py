"""Scores of the clients in one evaluation of each run, and their pairs in two methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from cfl_ray.results.results import MethodResult

if TYPE_CHECKING:
    import pandas as pd

RunResults = dict[tuple[str, str], dict[int, MethodResult]]  # by (experiment, method) and seed


@dataclass(frozen=True)
class ClientPairs:
    """Scores of two methods by pair, a number of a client."""

    ours: Mapping[int, float] = field(default_factory=dict)
    theirs: Mapping[int, float] = field(default_factory=dict)
    clients: int = 0  # that the pairs stand for
    overlap: bool = False  # whether clients of several pairs are tested on the same samples, with other models


def _tests_of(scores: pd.DataFrame) -> pd.Series:
    """A value for each client (index) that is equal for clients with the same rows, in the order of the clients."""
    bits = np.ascontiguousarray(scores.to_numpy(np.float64)).view(np.int64)  # NaN is equal to itself
    row = np.unique(bits, axis=0, return_inverse=True)[1]
    return scores.assign(row=row).groupby(level="client")["row"].agg(tuple)


class ClientScores:
    """The scores of clients in one evaluation of each run, read when they are first asked for."""

    def __init__(self, results: RunResults, round: str = "kept"):
        self.results, self.round = results, round  # as in `compare_runs`
        self._frames: dict[tuple[tuple[str, str], int], pd.DataFrame] = {}

    def pairs(self, key: tuple[str, str], other: tuple[str, str], metric: str) -> ClientPairs:
        """The pairs of a metric of two (experiment, method): a client's values are its means over the seeds.

        Clients whose scores, the loss included, are the same with every seed and in both methods are a single pair:
        they are tested on the same samples with the same models, as the clients of a true group are with a shared test
        set (`data.test.view`). So the records decide, not the settings. Empty if the metric is not one of clients.
        """
        import pandas as pd

        column = {"test_loss": "loss"}.get(metric, metric)
        both = []
        for seed in sorted(self.results.get(key, {}).keys() & self.results.get(other, {}).keys()):
            ours, theirs = self._frame(key, seed), self._frame(other, seed)
            if column in ours and column in theirs:
                both.append(ours.join(theirs, how="inner", lsuffix="/ours", rsuffix="/theirs").assign(seed=seed))
        if not both:
            return ClientPairs()
        scores, compared = pd.concat(both), [f"{column}/ours", f"{column}/theirs"]
        scores = scores[np.isfinite(scores[compared].to_numpy()).all(1)]
        means = scores.groupby(level="client")[compared].mean()
        tests = _tests_of(scores)
        of_one = [_tests_of(scores.filter(regex=f"/{side}$|^seed$")).nunique() for side in ("ours", "theirs")]
        is_first = ~tests.duplicated().to_numpy()
        ours_of, theirs_of = (dict(zip(means.index[is_first], means[name][is_first], strict=True)) for name in compared)
        return ClientPairs(ours_of, theirs_of, len(tests), min(of_one) < tests.nunique())

    def _frame(self, key: tuple[str, str], seed: int) -> pd.DataFrame:
        """The scores of the clients, by client."""
        if (key, seed) not in self._frames:
            result = self.results[key][seed]
            frame, best = result.client_metrics(), None if self.round == "last" else result.best_round
            frame = frame[frame["round"] == (frame["round"].max() if best is None else best)]
            self._frames[key, seed] = frame.drop(columns="round").set_index("client").astype(np.float64)
        return self._frames[key, seed]
