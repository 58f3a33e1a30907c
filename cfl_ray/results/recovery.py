"""Recovery of clients from changes of their data."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cfl_ray.core.diagnostics import Diagnostic

if TYPE_CHECKING:  # imported when a frame is made
    import pandas as pd


WITHIN = 0.02  # largest difference to the mean score before the change that counts as recovered, unless told otherwise


RECOVERY_METRICS = ("rounds_to_recover", "backward_transfer")


def recovery_frame(
    client_metrics: "pd.DataFrame",
    changed: Mapping[int, Sequence[int]],
    within: float,
    higher_is_better: bool = True,
    past_scores: Mapping[int, Diagnostic] | None = None,
) -> "pd.DataFrame":
    """A row for each round with changed data: round, clients, before, after, recovered, rounds, backward_transfer.

    before, after: means of the first metric over the clients whose data changed, in the last evaluation before the
    change and the first evaluation after it. recovered: the first evaluated round in which the mean is within `within`
    of `before` again, or better; rounds: rounds of training until then, the round of the change included. NaN: never,
    or not evaluated. backward_transfer: mean over these clients of their score on the data before the change, in the
    last evaluation before the next change, minus the client's `before`; if higher scores are better, a negative value
    means forgetting. NaN: not measured (`evaluation.past`).

    client_metrics: round, client, then the metrics, as `MethodResult.client_metrics`.
    changed: the clients whose data changed, by round.
    past_scores: scores of clients on the data before their last change, by the round of the report.
    """
    import pandas as pd

    score = client_metrics.columns[2]
    rows = []
    for round, ids in sorted(changed.items()):
        own = client_metrics[client_metrics["client"].isin(list(ids))]
        mean = own.groupby("round")[score].mean().dropna()
        past, later = mean[mean.index < round], mean[mean.index >= round]
        before = past.iloc[-1] if len(past) else np.nan
        worse = before - later if higher_is_better else later - before
        back = later.index[worse <= within]
        recovered = float(back[0]) if len(back) else np.nan
        after = later.iloc[0] if len(later) else np.nan
        transfer = _backward_transfer(own, score, round, set(ids), changed, past_scores or {})
        rows.append((round, len(set(ids)), before, after, recovered, recovered - round + 1, transfer))
    columns = ["round", "clients", "before", "after", "recovered", "rounds", "backward_transfer"]
    return pd.DataFrame(rows, columns=columns)


def recovery_metrics(frame: "pd.DataFrame") -> dict[str, float]:
    """Means over the changes of `recovery_frame`: rounds_to_recover and backward_transfer, if they apply.

    Changes without an evaluation before or after them are left out. rounds_to_recover is absent if clients have not
    recovered from one of the others.
    """
    metrics = {}
    rounds = frame["rounds"][frame["before"].notna() & frame["after"].notna()]
    if len(rounds) and rounds.notna().all():
        metrics["rounds_to_recover"] = float(rounds.mean())
    if frame["backward_transfer"].notna().any():
        metrics["backward_transfer"] = float(frame["backward_transfer"].mean())
    return metrics


def _backward_transfer(
    own: "pd.DataFrame",
    score: str,
    round: int,
    ids: set[int],
    changed: Mapping[int, Sequence[int]],
    past_scores: Mapping[int, Diagnostic],
) -> float:
    before = own[own["round"] < round].dropna(subset=score).groupby("client")[score].last()
    now: dict[int, float] = {}
    for reported, diagnostic in sorted(past_scores.items()):
        if reported >= round:
            again = {client for at, others in changed.items() if round < at <= reported for client in others}
            scores = zip(diagnostic.labels[0].tolist(), diagnostic.value.tolist(), strict=True)
            now |= {client: value for client, value in scores if client in ids - again}
    differences = [value - before[client] for client, value in now.items() if client in before.index]
    return float(np.nanmean(differences)) if differences else float("nan")
