"""The results of a run as objects; recovery of clients from changes of their data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from torch import Tensor, nn

from cfl_ray.core.events import ClusterEvent
from cfl_ray.core.reported import Diagnostic, ReportedDiagnostic
from cfl_ray.data.federation import TensorSamples
from cfl_ray.errors import ConfigError
from cfl_ray.report.report_data import RecordedConfusion
from cfl_ray.results.arrow_log import ClientMetrics, by_name, read_client_metrics, read_diagnostics
from cfl_ray.results.environment import read_environment
from cfl_ray.results.newcomers import adapt, place
from cfl_ray.results.trained import Newcomer, TrainedMethod
from cfl_ray.run_directory import RunDirectory
from cfl_ray.tracking import RoundRecord
from cfl_ray.tracking.record import BEST_ROUND, CONFUSION, PAST_SCORES, is_evaluated, why_diverged

if TYPE_CHECKING:  # pandas is imported when a frame is made
    import pandas as pd

WITHIN = 0.02  # largest difference to the mean score before the change that counts as recovered, unless told otherwise
RECOVERY_METRICS = ("rounds_to_recover", "backward_transfer")


def recovery_frame(
    client_metrics: pd.DataFrame,
    changed: Mapping[int, Sequence[int]],
    within: float,
    higher_is_better: bool = True,
    past_scores: Mapping[int, Diagnostic] | None = None,
) -> pd.DataFrame:
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


def recovery_metrics(frame: pd.DataFrame) -> dict[str, float]:
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
    own: pd.DataFrame,
    score: str,
    round: int,
    ids: set[int],
    changed: Mapping[int, Sequence[int]],
    past_scores: Mapping[int, Diagnostic],
) -> float:
    before = own[own["round"] < round].dropna(subset=score).groupby("client")[score].last()
    now: dict[int, float] = {}
    for evaluated in sorted(set(own["round"][own["round"] >= round].tolist())):
        # scores that are as in the evaluation before are not reported again
        reported = max((at for at in past_scores if at <= evaluated), default=None)
        if reported is not None:
            labels, scores = past_scores[reported].labels[0].tolist(), past_scores[reported].value.tolist()
            again = {client for at, others in changed.items() if round < at <= evaluated for client in others}
            kept = ids.intersection(own["client"][own["round"] == evaluated]) - again
            now |= {client: value for client, value in zip(labels, scores, strict=True) if client in kept}
    differences = [value - before[client] for client, value in now.items() if client in before.index]
    return float("nan") if np.isnan(differences).all() else float(np.nanmean(differences))


@dataclass(frozen=True)
class MethodResult:
    """The records of a method, its metrics of the whole run, and the trained method."""

    label: str
    records: list[RoundRecord] = field(repr=False)
    summary: dict[str, float] = field(repr=False)  # the RUN_METRICS that apply
    directory: Path | None = None  # of its files; None: no files
    # opens the trained method; None: the method has not begun
    open_trained: Callable[[], TrainedMethod] | None = field(default=None, repr=False, compare=False)
    reported: Sequence[ReportedDiagnostic] = field(default=(), repr=False, compare=False)  # if there are no files
    clients: pa.Table | None = field(default=None, repr=False, compare=False)  # metrics of clients, likewise
    ended: str = field(default="", compare=False)  # why `stopping` ended it before its last round; empty: it did not

    @property
    def events(self) -> list[ClusterEvent]:
        """Splits, merges, births and deaths of clusters with the deciding numbers, and changes of the phase."""
        return [event for record in self.records for event in record.events]

    def events_frame(self) -> pd.DataFrame:
        """A row for each of `events`: its fields, and a column for each value in `because`."""
        import pandas as pd

        rows = [
            {
                "round": event.round,
                "event": event.event,
                "cluster": event.cluster,
                "into": event.into,
                "before": event.before,
                "phase": event.phase,
                **event.because,
            }
            for event in self.events
        ]
        first = ["round", "event", "cluster", "into", "before", "phase"]
        return pd.DataFrame(rows, columns=None if rows else first).astype({"cluster": "Int64"})

    @property
    def seconds(self) -> float:
        """Wall time of all rounds."""
        return self.seconds_until("last")

    def seconds_until(self, round: str = "kept") -> float:
        """Wall time of the rounds up to a round, as of `metrics_of`."""
        best = None if round == "last" else self.best_round
        rounds = (record for record in self.records if best is None or record.round <= best)
        return sum(record.metrics.get("round_seconds", 0.0) for record in rounds)

    @property
    def best_round(self) -> int | None:
        """The best evaluated round so far, whose models are kept; None: the models of the last round are (`keep`)."""
        rounds = (record.metrics[BEST_ROUND] for record in reversed(self.records) if BEST_ROUND in record.metrics)
        best = next(rounds, None)
        return None if best is None else int(best)

    @property
    def final(self) -> dict[str, float]:
        """Metrics of the best round if its models are kept, otherwise of the last evaluated round; empty before it."""
        return self.metrics_of("kept")

    def metrics_of(self, round: str = "kept") -> dict[str, float]:
        """Metrics of a round: "best", "last" (the last evaluated one), or "kept": the best one if its models are kept.

        Empty if there is none.
        """
        best = self.best_round
        if round == "best" or (round == "kept" and best is not None):
            return dict(next((record.metrics for record in self.records if record.round == best), {}))
        return dict(next((record.metrics for record in reversed(self.records) if is_evaluated(record.metrics)), {}))

    def to_frame(self) -> pd.DataFrame:
        """A row per round: `round`, then a column for each metric (docs/metrics.md); NaN if it does not apply."""
        import pandas as pd

        rows = [{"round": record.round, **record.metrics} for record in self.records]
        return pd.DataFrame(rows, columns=None if rows else ["round"])

    def client_metrics(self, clients: Iterable[int] | None = None) -> pd.DataFrame:
        """P-server of these clients (None: all) in every evaluated round: round, client, the task's metrics, loss.

        For classification the metrics are accuracy and macro_f1, and those of `evaluation.metrics`.
        """
        if self.directory is None:
            table = ClientMetrics(None).kept if self.clients is None else self.clients
        else:
            table = read_client_metrics(RunDirectory(self.directory).client_metrics)
        if clients is not None:
            table = table.filter(pc.field("client").isin(pa.array(clients, pa.int64())))
        return table.to_pandas()

    def recovery(
        self,
        changed: Mapping[int, Sequence[int]] | None = None,
        *,
        within: float = WITHIN,
        higher_is_better: bool | None = None,
    ) -> pd.DataFrame:
        """A row for each change of data, with recovery time and forgetting; see `recovery_frame`.

        changed: ids of clients by the round before which their data changed; None: from the schedule.
        within: largest difference to the mean of the first metric before the change that counts as recovered.
        higher_is_better: whether higher values of this metric are better; None: as the task says.
        """
        if changed is None:
            changed = {round: ids.tolist() for round, ids in self.trained.federation.changed_in.items()}
        if higher_is_better is None:
            higher_is_better = self.trained.task.metrics[0].higher_is_better
        own = self.client_metrics({client for ids in changed.values() for client in ids})
        return recovery_frame(own, changed, within, higher_is_better, self.diagnostics.get(PAST_SCORES))

    @property
    def diagnostics(self) -> dict[str, dict[int, Diagnostic]]:
        """Values that the method reported in addition to its metrics (docs/metrics.md): {name: {round: diagnostic}}.

        An array is listed only for evaluated rounds in which it differs from the previous array, under the round in
        which the method reported it.
        """
        reported = (
            self.reported if self.directory is None else read_diagnostics(RunDirectory(self.directory).diagnostics)
        )
        return by_name(reported, self.records)

    def diagnostics_frame(self) -> pd.DataFrame:
        """A row per round: `round`, then a column for each numeric diagnostic; NaN if it was not reported."""
        return self.to_frame().reindex(columns=["round", *self.last_numbers])

    def recorded_confusion(self, round: str = "kept") -> RecordedConfusion | None:
        """Test samples by cluster, true and predicted class in an evaluation, as of `metrics_of`, read from the files.

        None: without `evaluation.confusion`.
        """
        best = None if round == "last" else self.best_round
        by_round = self.diagnostics.get(CONFUSION, {})
        rounds = [reported for reported in by_round if best is None or reported <= best]
        if not rounds:
            return None
        last = by_round[max(rounds)]
        names = self.class_names if self.directory is None else _recorded_names(self.directory)
        numbers = tuple(map(str, range(last.value.shape[1])))
        return RecordedConfusion(max(rounds), names or numbers, last.labels[0].tolist(), last.value.astype(np.int64))

    @property
    def last_numbers(self) -> dict[str, float]:
        """The last value of each numeric diagnostic."""
        return self.numbers_until("last")

    def numbers_until(self, round: str = "kept") -> dict[str, float]:
        """The value of each numeric diagnostic after a round, as of `metrics_of`, or the last one before."""
        best = None if round == "last" else self.best_round
        last = {}
        for name, by_round in self.diagnostics.items():
            if until := [reported for reported in by_round if best is None or reported <= best]:
                last[name] = by_round[max(until)]
        return {name: float(diagnostic.value) for name, diagnostic in last.items() if not diagnostic.axes}

    # ---- the trained method

    @cached_property
    def trained(self) -> TrainedMethod:
        """The method after its last round or, in a run that is live or was stopped, after the last saved round.

        With `keep: best`, after its best round so far, `trained.round`.
        """
        if self.open_trained is None:
            raise ConfigError(f"{self.label} has not begun, so it has no models yet")
        return self.open_trained()

    def model(self, cluster: int | None = None) -> nn.Module:
        """A cluster's model, in evaluation mode; see `TrainedMethod.model`."""
        return self.trained.model(cluster)

    def state_dict(self, cluster: int | None = None) -> dict[str, Tensor]:
        """Parameters and buffers of a cluster's model; see `TrainedMethod.state_dict`."""
        return self.trained.state_dict(cluster)

    def personal_model(self, client: int) -> nn.Module:
        """The model that a client would predict with now; see `TrainedMethod.personal_model`."""
        return self.trained.personal_model(client)

    def test(self, client: int, round: int | None = None) -> TensorSamples:
        """The test samples (x, y) of a client, as its data were in a round; None: in the last round."""
        return self.trained.test(client, round)

    def train(self, client: int, round: int | None = None) -> TensorSamples:
        """The training samples (x, y) of a client, as its data were in a round; None: in the last round."""
        return self.trained.train(client, round)

    def validation(self, client: int, round: int | None = None) -> TensorSamples:
        """The validation samples (x, y) of a client, as its data were in a round; None: in the last round."""
        return self.trained.validation(client, round)

    def place(self, x: Tensor | np.ndarray, y: Tensor | np.ndarray | None = None) -> Newcomer:
        """The model of a client outside the federation with these samples, and the reason for it.

        x: normalised inputs (n, *shape). y: their targets, with which the client is placed like a newcomer in a run
            (`Method.join`). None: it gets the cluster model whose predictions have the least mean entropy.
        docs/concepts/newcomers.md has the rule of every method. Raises ConfigError, with the reason, if the method has
        no model for such a client. The trained method does not change.
        """
        return place(self.trained, x, y)

    def adapt(self, x: Tensor | np.ndarray, y: Tensor | np.ndarray) -> Newcomer:
        """As `place`, after training on these samples.

        A method with personal columns trains them in a separate round. The models of other methods are trained as in a
        round, or as the method prescribes before predictions.
        """
        return adapt(self.trained, x, y)

    def predict(self, x: Any, like: Any) -> np.ndarray:
        """Predictions for normalised inputs by the model of a client or a newcomer; see `TrainedMethod.predict`."""
        return self.trained.predict(x, like)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes by label, if the data set has them (words of a CSV file, folders of images)."""
        recorded = () if self.directory is None else _recorded_names(self.directory)
        return recorded or self.trained.federation.shape.class_names

    def confusion(self, cluster: int | None = None) -> pd.DataFrame:
        """Numbers of test samples by true and predicted class of a cluster's clients; see `TrainedMethod.confusion`."""
        return self.trained.confusion(cluster)

    def class_accuracy(self) -> pd.DataFrame:
        """The accuracy of each class in each cluster; see `TrainedMethod.class_accuracy`."""
        return self.trained.class_accuracy()

    def assignments(self) -> pd.DataFrame:
        """A row per client: client, name, cluster, group, served_by, why; see `TrainedMethod.assignments`."""
        return self.trained.assignments()


def _recorded_names(directory: Path) -> tuple[str, ...]:
    """The names of the classes as recorded with `evaluation.confusion`, which needs no data; empty: they have none."""
    environment = read_environment(directory.parent)
    return () if environment is None else tuple(environment.class_names)


def divergence(results: Results) -> str | None:
    """The methods that diverged, with reasons and advice; None if none did."""
    diverged = {label: why for label, method in results.methods.items() if (why := why_diverged(method.records))}
    reasons = "; ".join(f"{label} diverged: {why}" for label, why in diverged.items())
    return f"{reasons}; lower local.lr, or set local.clip_norm" if reasons else None


@dataclass(frozen=True)
class Results:
    """All methods of an experiment, by label in the order of the config."""

    methods: dict[str, MethodResult]
    run_dir: Path | None  # None: no files
    tracking: str | None = None  # MLflow, without credentials; None: not tracked
    # hosts, device, engine, CPU and PyTorch; None: read from files
    run_info: dict[str, str] | None = field(default=None, repr=False)

    def __getitem__(self, label: str) -> MethodResult:
        return self.method(label)

    def __iter__(self) -> Iterator[str]:
        return iter(self.methods)

    def __len__(self) -> int:
        return len(self.methods)

    def method(self, label: str) -> MethodResult:
        """The results of a method. Raises ConfigError, which lists the labels, for an unknown name."""
        if label not in self.methods:
            raise ConfigError(f"no method {label!r} in this run; it has {', '.join(self.methods)}")
        return self.methods[label]

    def to_frame(self) -> pd.DataFrame:
        """A row per method and round: `method`, `round`, then a column for each metric (docs/metrics.md)."""
        import pandas as pd

        frames = [result.to_frame().assign(method=label) for label, result in self.methods.items() if result.records]
        if not frames:
            return pd.DataFrame(columns=["method", "round"])
        frame = pd.concat(frames, ignore_index=True)
        first = ["method", "round"]
        return frame[first + [name for name in frame.columns if name not in first]]
