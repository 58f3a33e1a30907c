"""Metrics of a whole run, computed at its end from its records: rounds and traffic until a target score."""

from collections.abc import Iterable

from cfl_ray.tracking.record import RoundRecord


def summarise(
    records: Iterable[RoundRecord],
    target: float | None,
    change_rounds: Iterable[int] | None,
    score: str = "accuracy",
    higher_is_better: bool = True,
) -> dict[str, float]:
    """Returns the RUN_METRICS that apply, for `Tracker.finish`. A target that was not reached has no metrics.

    target: of the metric `score` and, by itself, of its P-local; None: no target.
    change_rounds: rounds in which clients changed their clusters, or None for a method without clusters.
    """
    summary: dict[str, float] = {}
    records = list(records)
    for name, ending in ((score, ""), (f"{score}_local", "_local")):
        if reached := first_at_target(records, target, name, higher_is_better):
            summary[f"rounds_to_target{ending}"] = float(reached.round)
            summary[f"mbit_to_target{ending}"] = mbit(reached)
    if change_rounds is not None:
        summary["rounds_to_stable_clusters"] = float(rounds_to_stable_clusters(change_rounds))
    return summary


def first_at_target(
    records: Iterable[RoundRecord], target: float | None, score: str = "accuracy", higher_is_better: bool = True
) -> RoundRecord | None:
    """Returns the earliest record that reaches the target; None if there is none, or no target."""
    if target is None:
        return None
    sign = 1 if higher_is_better else -1
    reached = (record for record in records if sign * record.metrics.get(score, -sign * float("inf")) >= sign * target)
    return min(reached, key=lambda record: record.round, default=None)


def mbit(record: RoundRecord) -> float:
    """Returns the traffic of the run so far, download plus upload, in Mbit: mean over the clients of the federation."""
    return record.metrics.get("mbit_down", 0.0) + record.metrics.get("mbit_up", 0.0)


def rejected_updates(records: Iterable[RoundRecord]) -> tuple[int, list[int]]:
    """Returns how many updates of clients were rejected as not valid, and in which rounds."""
    counts = {record.round: int(record.metrics.get("clients_rejected", 0)) for record in records}
    return sum(counts.values()), [round for round, count in counts.items() if count]


def rounds_to_stable_clusters(change_rounds: Iterable[int]) -> int:
    """Returns the last of these rounds; 0 if there is none."""
    return max(change_rounds, default=0)
