"""Metrics of a whole run, computed at its end from its records: rounds and traffic until a target accuracy."""

from collections.abc import Iterable

from cfl_ray.tracking.record import RoundRecord


def summarise(
    records: Iterable[RoundRecord], target: float | None, change_rounds: Iterable[int] | None
) -> dict[str, float]:
    """Returns the RUN_METRICS that apply, for `Tracker.finish`. A target that was not reached has no metrics.

    target: accuracy, or None for no target.
    change_rounds: rounds in which any cluster assignment changed, or None for a method without clusters.
    """
    summary: dict[str, float] = {}
    if reached := first_at_target(records, target):
        summary["rounds_to_target"] = float(reached.round)
        summary["mbit_to_target"] = mbit(reached)
    if change_rounds is not None:
        summary["rounds_to_stable_clusters"] = float(rounds_to_stable_clusters(change_rounds))
    return summary


def first_at_target(records: Iterable[RoundRecord], target: float | None) -> RoundRecord | None:
    """Returns the earliest record whose accuracy is at least `target`; None if there is none, or no target."""
    if target is None:
        return None
    reached = (record for record in records if record.metrics.get("accuracy", float("-inf")) >= target)
    return min(reached, key=lambda record: record.round, default=None)


def mbit(record: RoundRecord) -> float:
    """Returns the traffic of the run so far, download plus upload, in Mbit: mean over the clients of the federation."""
    return record.metrics.get("mbit_down", 0.0) + record.metrics.get("mbit_up", 0.0)


def rounds_to_stable_clusters(change_rounds: Iterable[int]) -> int:
    """Returns the last round in which any assignment changed, plus one; 0 if none changed."""
    return max(change_rounds, default=-1) + 1
