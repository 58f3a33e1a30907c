"""A report made by hand, whose numbers are known."""

from dataclasses import replace

import numpy as np

from cfl_ray.core.events import ClusterEvent
from cfl_ray.core.reassigned import Reassigned
from cfl_ray.report.report_data import Comparison, MethodRun, PerClient, RecordedMatrix, Report, ReportedExperiment
from cfl_ray.tracking import RoundRecord

ROUNDS, CLIENTS, GROUPS = 4, 12, 3
SPLIT = {"mean": 0.25}  # what decided the split of `with_phases`
HOSTILE = "<img src=x onerror=alert(1)>"


def records(end: float, clusters: int | None = None) -> list[RoundRecord]:
    """Scores that rise to `end`; with clusters, also their number, agreement and the share of the largest."""
    found = []
    for round in range(1, ROUNDS + 1):
        score = end * round / ROUNDS
        metrics = {"accuracy": score, "accuracy_local": score + 0.01, "accuracy_tuned": score + 0.02}
        metrics |= {"accuracy_std": 0.1, "accuracy_p10": score - 0.1, "mbit_down": 1.0 * round, "mbit_up": 0.5 * round}
        if clusters:
            metrics |= {"num_clusters": float(clusters), "ari": 0.5, "largest_cluster_share": 0.75}
        found.append(RoundRecord(round, metrics))
    return found


def clustered(seed: int, end: float) -> MethodRun:
    """Clusters 0 and 7: clients 0 to 8 are in 0 at first, of which 0, 1 and 2 go to 7 in round 3."""
    first = [[client, 0 if client < 9 else 7] for client in range(CLIENTS)]
    ids = np.arange(CLIENTS)
    signatures = np.eye(GROUPS)[ids % GROUPS].astype(np.float32)
    labels = 10 * signatures  # each group has a label of its own
    return MethodRun(
        seed=seed,
        records=records(end, clusters=2),
        reassignments=[(1, Reassigned.of(first)), (3, Reassigned.of([[0, 7], [1, 7], [2, 7]]))],
        scores={"client": ids, "accuracy": np.linspace(end - 0.1, end + 0.1, CLIENTS)},
        matrices={
            "similarity": RecordedMatrix(4, ids, signatures @ signatures.T, of_pairs=True, label_counts_SC=labels),
            "signatures": RecordedMatrix(4, ids, signatures, of_pairs=False),
        },
    )


def per_client(value_of: dict[int, int]) -> PerClient:
    """From values by client."""
    return PerClient(np.array(sorted(value_of)), np.array([value_of[client] for client in sorted(value_of)], np.int32))


def plain(seed: int, end: float) -> MethodRun:
    """One model for all."""
    return MethodRun(seed, records(end), scores={"client": np.arange(CLIENTS), "accuracy": np.full(CLIENTS, end)})


def with_phases(runs: list[MethodRun], phase: str) -> None:
    """Puts the first two rounds of these runs into a phase, and the others into the phase federate."""
    change, split = ClusterEvent(2, "phase", before=phase, phase="federate"), ClusterEvent(3, "split", 0, (0, 1), SPLIT)
    for run in runs:
        run.records[:] = [
            replace(record, phase=phase if record.round < 3 else "federate", events=events)
            for record, events in zip(run.records, ((), (change,), (split,), ()), strict=True)
        ]


def experiment(name: str = "digits", other: str = "fedavg") -> ReportedExperiment:
    """Two methods with two seeds: ifca ends at 0.8 and 0.9, the other one at 0.5 and 0.6."""
    return ReportedExperiment(
        name=name,
        run_info={"data": "digits", "clients": f"{CLIENTS}"},
        command="cfl-ray run experiment.yaml seed=0",
        config="rounds: 4\n",
        methods={other: [plain(0, 0.5), plain(1, 0.6)], "ifca": [clustered(0, 0.8), clustered(1, 0.9)]},
        groups=per_client({client: client % GROUPS for client in range(CLIENTS)}),
    )


def report(name: str = "digits", other: str = "fedavg") -> Report:
    """The experiment with its table and two published numbers, the second of which is a misprint."""
    untested = {"p": float("nan"), "effect": float("nan")}
    rows = [
        {"experiment": name, "method": label, "runs": 2, "accuracy": mean, "accuracy_std": 0.0707, **untested}
        for label, mean in ((other, 0.55), ("ifca", 0.85))
    ]
    shared = {"table": "table1", "column": "digits", "metric": "accuracy", "unit": "percent", "seeds": 2}
    comparisons = [
        Comparison(row=other, ours=55.0, ours_std=7.0, published=57.0, published_std=1.0, **shared),
        Comparison(row="ifca", ours=85.0, ours_std=7.0, published=8.5, published_std=1.0, misprint=HOSTILE, **shared),
    ]
    return Report(name, [experiment(name, other)], ["accuracy"], rows, comparisons, paper="A paper", notes=[HOSTILE])
