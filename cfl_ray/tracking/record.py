"""Records of a run as plain numbers, and the names of all metrics that trackers, reports and notebooks use."""

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cfl_ray.core.errors import did_you_mean
from cfl_ray.tracking.uri import redact

EndStatus = Literal["FINISHED", "FAILED", "KILLED"]

ROUND_METRICS = {
    "accuracy": (
        "P-server: mean over clients of the local test accuracy of the model the server would give each next, 0..1"
    ),
    "accuracy_local": "P-local: the same, of the model each client holds after its own last training",
    "accuracy_local_trained": "P-local over the clients that have trained",
    "trained_share": "share of the clients that have trained",
    "accuracy_tuned": "P-tune(F): the same, of the P-server model after F local epochs",
    "accuracy_honest": "the same as accuracy over the clients that do not attack, where some do",
    "accuracy_std": "standard deviation over clients of the P-server accuracy",
    "accuracy_p10": "10th percentile over clients of the P-server accuracy",
    "macro_f1": "mean over clients of the macro-averaged F1 score, 0..1",
    "test_loss": "mean over clients of the local test loss",
    "train_loss": "mean over the clients of the round of their training loss",
    "num_clusters": "clusters that have members online",
    "largest_cluster_share": "clients of the largest cluster over all assigned clients, 0..1",
    "ari": "adjusted Rand index of clusters against the true groups, at most 1",
    "nmi": "normalised mutual information of clusters and true groups, 0..1",
    "purity": "share of the clients that belong to the commonest true group of their cluster, 0..1",
    "correct_clients": "clients in the right cluster under the best matching of clusters to groups (Hungarian)",
    "clients_online": "clients that belong to the federation in the round, reachable or not",
    "clients_dropped": "clients that were selected and did not report",
    "clients_rejected": "clients that were excluded because their data or results are not valid",
    "clients_late": "clients that were excluded because their work took longer than runtime.round_deadline",
    "mbit_down": "Mbit sent to a client so far, mean over the federation, 32 bits a float",
    "mbit_up": "Mbit sent by a client so far, mean over the federation, 32 bits a float",
    "round_seconds": "wall time of the round without its evaluation",
}
RUN_METRICS = {
    "rounds_to_target": "rounds until `accuracy` first reached evaluation.target",
    "mbit_to_target": "mbit_down + mbit_up at that round",
    "rounds_to_stable_clusters": "the last round in which any assignment changed, plus one",
    "newcomer_accuracy": "mean P-server accuracy of the clients that joined after the start, 0..1",
    "newcomer_accuracy_tuned": "mean P-tune(F) accuracy of the clients that joined after the start, 0..1",
}
METRICS = ROUND_METRICS | RUN_METRICS


def check_metrics(names: Mapping[str, Any]) -> None:
    """Raises ValueError for a name outside METRICS, since comparisons and notebooks rely on these names.

    Metrics of a comparison are named METHOD/METRIC.
    """
    for name in names:
        if name.rpartition("/")[2] not in METRICS:
            raise ValueError(f"unknown metric {name!r}{did_you_mean(name, METRICS)}")


def now_ms() -> int:
    """Returns the wall clock in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True)
class RoundRecord:
    """Metrics of one evaluated round. Two records of one run with the same `round` are the same record."""

    round: int  # rounds completed, 0 before the first
    metrics: Mapping[str, float]  # a metric that does not apply is absent; NaN and infinities: training diverged
    time_ms: int = field(default_factory=now_ms)  # stored with the record, so that a second delivery changes nothing

    def __post_init__(self) -> None:
        check_metrics(self.metrics)
        object.__setattr__(self, "metrics", {name: float(value) for name, value in self.metrics.items()})

    def to_line(self) -> str:
        """Returns one flat JSON line of round, time_ms and metrics, as `pandas.read_json(lines=True)` reads it."""
        return json.dumps({"round": self.round, "time_ms": self.time_ms, **self.metrics}) + "\n"

    @classmethod
    def from_line(cls, line: str | bytes) -> "RoundRecord":
        """Returns the record that `to_line` wrote. Raises ValueError or KeyError for anything else."""
        metrics = json.loads(line)
        return cls(round=metrics.pop("round"), time_ms=metrics.pop("time_ms"), metrics=metrics)


@dataclass(frozen=True)
class RunInfo:
    """Identity and configuration of a run: known before its first round and not changed by a resumption."""

    name: str
    method: str = ""  # empty: the parent of a comparison
    tags: Mapping[str, str] = field(default_factory=dict)  # dataset, partition, seed, config_hash, git_commit
    params: Mapping[str, str] = field(default_factory=dict)  # resolved config (`flatten`), credentials replaced by ***
    time_ms: int = field(default_factory=now_ms)
    uid: str = field(default_factory=lambda: uuid.uuid4().hex)  # identifies the run in every store

    def __post_init__(self) -> None:
        object.__setattr__(self, "tags", {key: str(value) for key, value in self.tags.items()})
        object.__setattr__(self, "params", {key: redact(str(value)) for key, value in self.params.items()})


@dataclass(frozen=True)
class RunEnd:
    """End of a run."""

    status: EndStatus
    summary: RoundRecord  # RUN_METRICS, with the round and time of the last record
    time_ms: int = field(default_factory=now_ms)


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns a nested config as {"local.epochs": "5", ...}; lists become JSON, None becomes "null"."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat
