"""Records of a run as plain numbers, their files, and the names of all metrics that trackers and reports use."""

import json
import math
import re
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, InstanceOf, Strict, TypeAdapter, ValidationError

from cfl_ray.core.events import ClusterEvent
from cfl_ray.core.over_clients import OVER_CLIENTS
from cfl_ray.core.reassigned import NONE_REASSIGNED, Reassigned
from cfl_ray.core.reported import ReportedDiagnostic
from cfl_ray.errors import ConfigError, DataError, did_you_mean
from cfl_ray.errors.redaction import redact
from cfl_ray.run_directory import RunDirectory
from cfl_ray.system.files import first_problem, opened, parse_json, read_record
from cfl_ray.system.nested import leaves_of

KEPT = "kept"  # before the slash of a tracker's metrics of the round whose models are kept, sent at the end
BEST_ROUND = "best_round"  # metric of every round with `keep: best`, once there is one
CONFUSION = "confusion"  # diagnostic (clusters, true, predicted), with `evaluation.confusion`
LABEL_COUNTS = "label_counts"  # diagnostic (clients, classes) of the clients that are in a matrix (clients, clients)
EndStatus = Literal["FINISHED", "FAILED", "KILLED"]
# of a method's run. "running": the round is training; "stopped": ended on request after a round that is saved
Status = Literal["starting", "running", "evaluating", "saving", "finished", "stopped", "failed"]

ROUND_METRICS = {
    "accuracy": (
        "P-server: mean over clients of the local test accuracy of the model the server would give each next, 0..1"
    ),
    "accuracy_local": "P-local: the same, of the model each client holds after its own last training",
    "accuracy_local_trained": "P-local over the clients that have trained",
    "trained_share": "share of the clients that have trained",
    "accuracy_tuned": "P-tune(F): the same, of the P-server model after F local epochs",
    "reported": "the metric of the protocol by which the method is scored, with evaluation.reported",
    "accuracy_past": "the same as accuracy, of clients whose data have changed, on their data before the last change",
    "accuracy_honest": "the same as accuracy over the clients that do not attack, if some do",
    "accuracy_std": "standard deviation over clients of the P-server accuracy",
    "accuracy_p10": "10th percentile over clients of the P-server accuracy",
    "macro_f1": "mean over clients of the macro-averaged F1 score, 0..1",
    "test_loss": "mean over clients of the local test loss",
    "train_loss": "mean over the clients that trained in the round of their training loss",
    "num_clusters": "clusters that have members online",
    "largest_cluster_share": "clients of the largest cluster over all assigned clients, 0..1",
    "ari": "adjusted Rand index of clusters against the true groups, at most 1",
    "nmi": "normalised mutual information of clusters and true groups, 0..1",
    "purity": "share of the clients that belong to the commonest true group of their cluster, 0..1",
    "correct_clients": "clients in the right cluster under the best matching of clusters to groups (Hungarian)",
    "clients_online": "clients that belong to the federation in the round, reachable or not",
    "clients_joined": "clients that joined before the round, by schedule or on request; absent if none did",
    "clients_left": "clients that left before the round, by schedule or on request; absent if none did",
    "cohort_size": "clients of the round: those that were selected and reached",
    "updates_rejected": "clients of the round whose data or updates were not valid",
    "clients_dropped": "clients that were selected and did not report",
    "clients_rejected": "clients that were excluded, also from evaluation, as their data or results are not valid",
    "clients_late": "clients that were excluded because their work took longer than runtime.round_deadline",
    "clients_past_deadline": "clients that finished after clock.deadline; absent if none did",
    "clients_surplus": "clients of an over-selected cohort that the round did not wait for; absent if none were",
    "staleness": "mean number of server steps since the clients of an asynchronous round received their models",
    "updates_stale": "updates that were discarded: staler than asynchronous.max_staleness; absent if none were",
    "virtual_seconds": "virtual time since the start of the run, in seconds (clock)",
    "mbit_down": "Mbit sent to a client so far, mean over the federation, 32 bits a float",
    "mbit_up": "Mbit sent by a client so far, mean over the federation, 32 bits a float",
    "epsilon": "epsilon of everything that a private run released so far, at its delta",
    "clip_norm": "C, the bound of the norm of a client's upload in the next round of a private run",
    "example_epsilon": "largest epsilon of any client's samples so far, with privacy.examples, at its delta",
    BEST_ROUND: "the best evaluated round so far, whose models are kept, with keep: best; absent before the first",
    "sums_lost": "secure sums that too few clients reported for; absent if none were",
    "round_seconds": "wall time of the round without its evaluation",
}
RUN_METRICS = {
    "rounds_to_target": "rounds until `accuracy` first reached evaluation.target",
    "mbit_to_target": "mbit_down + mbit_up at that round",
    "seconds_to_target": "virtual_seconds at that round",
    "rounds_to_target_local": "rounds until `accuracy_local` first reached evaluation.target",
    "mbit_to_target_local": "mbit_down + mbit_up at that round",
    "rounds_to_stable_clusters": "the last round in which a client changed its cluster, or clusters were first formed",
    "rounds_to_recover": "mean over the changes of data of the rounds until clients score as before, within 0.02",
    "backward_transfer": "mean over the changes of data of the score on the old data now minus before",
    "newcomer_accuracy": "mean P-server accuracy of the clients that joined after the start, 0..1",
    "newcomer_accuracy_tuned": "mean P-tune(F) accuracy of the clients that joined after the start, 0..1",
}
METRICS = ROUND_METRICS | RUN_METRICS
PAST_SCORES = "past_scores"  # diagnostic: the first metric of each client on its data before their last change
# columns of records, of client_metrics.arrow, and of tables of several runs
_OF_RECORDS = frozenset({"loss", "round", "client", "method", "time_ms", "phase", "events"})
_COLUMNS = _OF_RECORDS | {"experiment", "runs", "mbit", "seconds", "p", "effect"}
_SCORE_NAME = re.compile(r"[a-z][a-z0-9_]*")
# of the first metric of a task
_DERIVED = ("_local", "_local_trained", "_tuned", "_past", "_honest", "_std", "_p10", "_p90")


_NAME_CHARS = 240  # MLflow takes 250; the rest is for a number
_VALIDATION = "validation/"  # begins the names of metrics on validation data
VALIDATION_CLIENTS, VALIDATION_SAMPLES = f"{_VALIDATION}clients", f"{_VALIDATION}samples"


def validation_metric(name: str) -> str:
    """The name, on validation data, of a metric on test data."""
    return _VALIDATION + {"test_loss": "loss"}.get(name, name)


def test_metric(name: str) -> str:
    """The name, on test data, of a metric on validation data; of any other metric its own."""
    of_test = name.removeprefix(_VALIDATION)
    return "test_loss" if name == validation_metric("test_loss") else of_test


def is_of_validation(name: str) -> bool:
    """Whether this is the name of a metric on validation data."""
    return test_metric(name) != name


def of_validation(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics under their names on validation data."""
    return {validation_metric(name): value for name, value in metrics.items()}


def score_metrics_of(names: Sequence[str]) -> set[str]:
    """Names of everything that is recorded of the metrics `names` of a task, the first of which is its score."""
    first = names[0]
    over_clients = (f"{first}_{name}" for name in OVER_CLIENTS)
    derived = (f"{first}{ending}" for ending in _DERIVED)
    of_test = {*names, *derived, *over_clients, f"newcomer_{first}", f"newcomer_{first}_tuned"}
    of_validation = {validation_metric(name) for name in {*of_test, "test_loss"} if not name.endswith("_past")}
    return {*of_test, *of_validation, VALIDATION_CLIENTS, VALIDATION_SAMPLES}


def cluster_diagnostics_of(score: str) -> tuple[str, str]:
    """Names of the diagnostics of every method with clusters: mean score, and number, of each cluster's clients."""
    return f"cluster_{score}", "cluster_sizes"


def taken_names(names: Sequence[str]) -> frozenset[str]:
    """Names that no diagnostic of a method can have, with the metrics `names` of the task."""
    return frozenset(
        {*METRICS, *_COLUMNS, *score_metrics_of(names), *cluster_diagnostics_of(names[0]), LABEL_COUNTS, PAST_SCORES}
    )


def check_score_name(name: str) -> None:
    """Raises ConfigError for a name under which a metric cannot be recorded."""
    if not _SCORE_NAME.fullmatch(name):
        raise ConfigError(f"metric {name!r}: a name consists of a-z, 0-9 and _, and begins with a letter")
    if name in (METRICS.keys() - {"accuracy", "macro_f1"}) | _OF_RECORDS or name.endswith(_DERIVED):
        raise ConfigError(f"metric {name!r} has the name of another metric (docs/metrics.md); give it another one")


def primary_of(metrics: Mapping[str, float]) -> str:
    """Name of the first metric of the task among the metrics of an evaluated round: the metric that has a spread."""
    return next((name for name in metrics if f"{name}_std" in metrics and test_metric(name) == name), "accuracy")


def is_evaluated(metrics: Mapping[str, float]) -> bool:
    """Whether these are the metrics of an evaluated round."""
    return primary_of(metrics) in metrics


def check_metrics(names: Iterable[str], of_task: Collection[str] = ()) -> None:
    """Raises ValueError for a name outside METRICS, since comparisons and notebooks rely on these names.

    of_task: names in addition to METRICS (`score_metrics_of`).
    """
    for name in names:
        if name not in METRICS and name not in of_task:
            raise ValueError(f"unknown metric {name!r}{did_you_mean(name, METRICS)}")


def now_ms() -> int:
    """Returns the wall clock in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


Count = Annotated[int, Field(strict=True, ge=0, lt=2**53)]


@dataclass(frozen=True)
class RoundRecord:
    """The facts of a complete round: the server writes it, a checkpoint keeps it, and the driver records it.

    The fields up to `events` are a line of `metrics.jsonl`; a record that is read from there has no others. Two records
    of a run with the same `round` are the same record.
    """

    round: Count  # rounds completed, 0 before the first
    # a metric that does not apply is absent; NaN and infinities: training diverged
    metrics: Mapping[str, Annotated[float, Strict()]]
    time_ms: Count = field(default_factory=now_ms)  # stored with the record, so that a second delivery changes nothing
    phase: str = ""  # of the method, in which the round began (docs/metrics.md); empty: not recorded
    events: tuple[ClusterEvent, ...] = ()  # splits, merges, births and deaths of clusters, and a change of the phase

    # in other files
    numbers: tuple[str, ...] = field(default=(), repr=False, compare=False)  # diagnostics among the metrics, by name
    # the clients whose cluster changed in this round
    reassigned: InstanceOf[Reassigned] = field(default=NONE_REASSIGNED, repr=False, compare=False)
    # float64: client, the task's metrics, loss of each client; None: not evaluated
    scores_MV: InstanceOf[np.ndarray] | None = field(default=None, repr=False, compare=False)
    # arrays since the last evaluated round; empty if the round is not evaluated
    diagnostics: tuple[InstanceOf[ReportedDiagnostic], ...] = field(default=(), repr=False, compare=False)

    # for the user and the driver
    notes: tuple[str, ...] = field(default=(), compare=False)  # one line each
    fallbacks: tuple[str, ...] = field(default=(), compare=False)  # new reasons why the chosen engine did not train
    ended: str = field(default="", compare=False)  # why the method ends with this round, before its last one
    status: Status = field(default="running", compare=False)  # of the run after the round
    stop: bool = field(default=False, compare=False)  # a request ends the run here

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", {name: float(value) for name, value in self.metrics.items()})

    @property
    def finished(self) -> bool:
        """Whether all rounds are complete."""
        return self.status == "finished"

    @property
    def next_phase(self) -> str:
        """The phase in which the next round begins; empty: not recorded."""
        return next((event.phase for event in reversed(self.events) if event.event == "phase"), self.phase)

    def to_line(self) -> str:
        """Returns the record as a line of JSON for `pandas.read_json(lines=True)`; its metrics are top-level keys."""
        clusters = {"phase": self.phase, "events": [event.to_fields() for event in self.events]}
        own = {name: value for name, value in clusters.items() if value}
        return json.dumps({"round": self.round, "time_ms": self.time_ms, **own, **self.metrics}) + "\n"

    @classmethod
    def from_line(cls, line: str | bytes) -> "RoundRecord":
        """Returns the record that `to_line` wrote. Raises ValueError for anything else."""
        metrics = parse_json(line)
        own = {name: metrics.pop(name, None) for name in ("round", "time_ms")}
        types = {"phase": str, "events": list}  # a number of that name is a diagnostic of an earlier version
        own |= {name: metrics.pop(name) for name, kind in types.items() if isinstance(metrics.get(name), kind)}
        try:
            return _RECORD.validate_python(own | {"metrics": metrics})
        except ValidationError as error:
            raise ValueError(first_problem(error)) from error


_RECORD = TypeAdapter(RoundRecord)


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
        object.__setattr__(self, "tags", {key: redact(str(value)) for key, value in self.tags.items()})
        object.__setattr__(self, "params", {key: redact(str(value)) for key, value in self.params.items()})


@dataclass(frozen=True)
class RunEnd:
    """End of a run."""

    status: EndStatus
    summary: RoundRecord  # RUN_METRICS, with the round and time of the last record
    time_ms: Count = field(default_factory=now_ms)
    reason: str = ""  # why the method ended before its last round; empty: it did not, or its records say it
    kept: Count = 0  # the round whose models are kept; 0: the last

    @property
    def remarks(self) -> dict[str, str | int]:
        """Why the method ended before its last round, and the round whose models are kept, as far as they apply."""
        return {name: value for name, value in (("ended", self.reason), ("kept_round", self.kept)) if value}


OFF = {"null", "false", "[]", "{}", "None", "False", "()"}  # values of keys and options that do nothing
NEUTRAL = {"0.0", "none", "constant", "always", "last", "random"}  # likewise, of a key whose default they are


def flatten(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns a nested config as {"local.epochs": "5", ...}; lists become JSON, None becomes "null"."""
    leaves = leaves_of(config).items()
    return {key: value if isinstance(value, str) else json.dumps(value, default=str) for key, value in leaves}


def metric_names(names: Iterable[str], more: str = "") -> dict[str, str]:
    """Each name in characters that a metric of MLflow or a file may have; names that become equal get a number.

    Names that differ in case alone are equal to MySQL, which refuses both together, and to some file systems.
    more: further characters that may stay.
    """
    plain: dict[str, str] = {}
    taken: set[str] = set()
    for name in sorted(set(names)):
        first = re.sub(rf"[^A-Za-z0-9_.{re.escape(more)}-]", "_", name)[:_NAME_CHARS]
        numbered = (first if number == 1 else f"{first}_{number}" for number in count(1))
        plain[name] = next(candidate for candidate in numbered if candidate.lower() not in taken)
        taken.add(plain[name].lower())
    return plain


# ---- files of `RunLog`


def read_info(run_dir: Path) -> RunInfo:
    """Returns the RunInfo of the run in `run_dir`. Raises DataError if the directory has no started run."""
    info = read_record(RunDirectory(run_dir).info, RunInfo)
    if info is None:
        raise DataError(f"{run_dir} holds no run: {RunDirectory.info.name} is missing")
    return info


def read_end(run_dir: Path) -> RunEnd | None:
    """Returns the end of the run, or None if it has not ended. Raises DataError for a damaged file."""
    return read_record(RunDirectory(run_dir).end, RunEnd)


def read_records(run_dir: str | Path) -> Iterator[RoundRecord]:
    """Yields the records in the order of their rounds."""
    for record, _ in read_from(Path(run_dir), 0):
        yield record


def last_record(run_dir: str | Path) -> RoundRecord | None:
    """The record of the last round; None before the first. Reads all, so that a damaged line is an error."""
    last = None
    for record in read_records(run_dir):
        last = record
    return last


def read_from(run_dir: Path, offset: int) -> Iterator[tuple[RoundRecord, int]]:
    """Yields each record after byte `offset` of the log, with the offset after it.

    A last line without a line end is still being written and is skipped. Raises DataError for a damaged line.
    """
    path = RunDirectory(run_dir).metrics
    with opened(path) as file:
        if file is None:
            return
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            try:
                record = RoundRecord.from_line(line)
            except ValueError as error:
                raise DataError(f"{path} is damaged at byte {offset} ({error}); remove that line") from error
            offset += len(line)
            yield record, offset


# ---- metrics of a whole run


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


def why_early(records: Sequence[RoundRecord], rounds: int, is_finished: bool, reason: str = "") -> str | None:
    """Returns the last round of a method that ended before `rounds`, and the reason, as text; None for other methods.

    is_finished: whether the method is finished; otherwise it was stopped on request. reason: of `stopping`, which is
    returned as it is; empty: it did not end the method.
    """
    if not records or (last := records[-1].round) >= rounds:
        return None
    if reason:
        return reason
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
