"""How long clients take to recover from a change of their data."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # pandas is imported by those who ask for a frame
    import pandas as pd


def recovery_frame(
    client_metrics: "pd.DataFrame", changed: Mapping[int, Sequence[int]], within: float, higher_is_better: bool = True
) -> "pd.DataFrame":
    """One row per round before which data changed: round, clients, before, after, recovered, rounds.

    before, after: means of the first metric over the clients whose data changed, in the last evaluation before the
    change and the first one after it. recovered: the first evaluated round in which the mean is within `within` of
    `before` again, or better; rounds: rounds of training until then, the round of the change included. NaN: never, or
    not evaluated.

    client_metrics: round, client, then the metrics, as `MethodResult.client_metrics`.
    changed: the clients whose data changed, by round.
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
        rows.append(
            {
                "round": round,
                "clients": len(set(ids)),
                "before": before,
                "after": later.iloc[0] if len(later) else np.nan,
                "recovered": recovered,
                "rounds": recovered - round + 1,
            }
        )
    return pd.DataFrame(rows, columns=["round", "clients", "before", "after", "recovered", "rounds"])
