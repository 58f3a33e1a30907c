"""Metrics of a whole run, computed at its end from its records: rounds and traffic until a target score."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from cfl_ray.tracking.record import RoundRecord, primary_of

MANY_REJECTED = 0.1  # share of a run's updates


def summarise(
    records: Iterable[RoundRecord],
    target: float | None,
    change_rounds: Iterable[int] | None,
    score: str = "accuracy",
    higher_is_better: bool = True,
) -> dict[str, float]:
    """Returns the RUN_METRICS that apply. A target that was not reached has no metrics.

    target: for the metric `score` and, separately, for its P-local; None: no target.
    change_rounds: rounds in which clients moved between clusters; None for a method without clusters.
    """
    summary: dict[str, float] = {}
    records, sign = list(records), 1 if higher_is_better else -1
    worst = -sign * math.inf  # of a record without the score
    for name, ending in ((score, ""), (f"{score}_local", "_local")):
        at_target = (
            record
            for record in records
            if target is not None and sign * record.metrics.get(name, worst) >= sign * target
        )
        if reached := next(at_target, None):
            summary[f"rounds_to_target{ending}"] = float(reached.round)
            summary[f"mbit_to_target{ending}"] = mbit(reached)
            if not ending and "virtual_seconds" in reached.metrics:
                summary["seconds_to_target"] = reached.metrics["virtual_seconds"]
    if change_rounds is not None:
        summary["rounds_to_stable_clusters"] = float(max(change_rounds, default=0))
    return summary


def mbit(record: RoundRecord) -> float:
    """Returns the traffic of the run so far, download plus upload, in Mbit, as mean over the federation's clients."""
    return record.metrics.get("mbit_down", 0.0) + record.metrics.get("mbit_up", 0.0)


def virtual_seconds(record: RoundRecord) -> float:
    """Returns the virtual time of the run so far, in seconds; NaN without a clock."""
    return record.metrics.get("virtual_seconds", math.nan)


@dataclass(frozen=True)
class RejectedUpdates:
    """Number of client updates that were rejected as invalid."""

    count: int
    total: int | None  # updates, valid or not; None: not recorded
    rounds: Sequence[int]  # rounds with a rejected update

    def __str__(self) -> str:
        return str(self.count) if self.total is None else f"{self.count} of {self.total}"


def rejected_updates(records: Iterable[RoundRecord]) -> RejectedUpdates:
    """Returns the rejected updates of all rounds."""
    metrics = {record.round: record.metrics for record in records}
    counts = {round: int(of.get("updates_rejected", 0)) for round, of in metrics.items()}
    is_known = all("cohort_size" in of for of in metrics.values())
    total = sum(int(of["cohort_size"]) for of in metrics.values()) if is_known else None
    return RejectedUpdates(sum(counts.values()), total, [round for round, count in counts.items() if count])


def why_diverged(records: Sequence[RoundRecord]) -> str | None:
    """Returns the reason why the training of a method diverged; None if it did not.

    The last updates or the last test loss are not finite, or a tenth of all updates was not and no client attacks.
    """
    if not records:
        return None
    last, size = records[-1], records[-1].metrics.get("cohort_size", 0)
    if size and last.metrics.get("updates_rejected", 0) >= size:
        return f"all {size:.0f} updates of round {last.round}, the last one, were rejected as not finite or not valid"
    rejected = rejected_updates(records)
    attacked = any(name.endswith("_honest") for record in records for name in record.metrics)
    if rejected.total and not attacked and rejected.count >= MANY_REJECTED * rejected.total:
        return f"{rejected} updates were rejected as not finite or not valid"
    final = next((record.metrics for record in reversed(records) if "test_loss" in record.metrics), {"test_loss": 0.0})
    loss, score = final["test_loss"], final.get(primary_of(final), 0.0)
    if math.isinf(loss) or (math.isnan(loss) and not math.isnan(score)):  # both are NaN without test samples
        return f"its last test loss is {loss}"
    return None


def why_early(records: Sequence[RoundRecord], rounds: int, is_finished: bool) -> str | None:
    """Returns the last round of a method that ended before `rounds`, and the reason, as text; None for other methods.

    is_finished: whether the method is finished; otherwise it was stopped on request.
    """
    if not records or (last := records[-1].round) >= rounds:
        return None
    ended = f"after round {last} of {rounds}"
    if not is_finished:
        return f"{ended}, as asked"
    if (epsilon := records[-1].metrics.get("epsilon")) is None:  # the number of rounds was edited
        return ended
    return f"{ended}, at epsilon {epsilon:.4g}: the next round would exceed privacy.target_epsilon"


def mean_of_runs(runs: Sequence[Sequence[RoundRecord]]) -> list[RoundRecord]:
    """Returns the means, over runs of several seeds, of the metrics that all runs have in a round."""
    by_round = [{record.round: record for record in records} for records in runs]
    common = sorted(set.intersection(*map(set, by_round))) if runs else []
    means = []
    for round in common:
        records = [of[round] for of in by_round]
        names = [name for name in records[0].metrics if all(name in record.metrics for record in records)]
        metrics = {name: fmean(record.metrics[name] for record in records) for name in names}
        means.append(RoundRecord(round, metrics))
    return means
