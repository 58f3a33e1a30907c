"""The report of runs: reads their records and renders the page."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from cfl_ray.config import Experiment
from cfl_ray.config.schedule import EventConfig
from cfl_ray.config.study import load_study
from cfl_ray.core.diagnostics import CLIENTS, CLUSTERS, MIXTURE_WEIGHTS
from cfl_ray.core.reported import Diagnostic
from cfl_ray.errors import FOREIGN, ConfigError, DataError, class_and_text, command, counted
from cfl_ray.errors.redaction import redact
from cfl_ray.methods import full_label
from cfl_ray.report.drawing import listed
from cfl_ray.report.ranks import ranks_of
from cfl_ray.report.report_data import Comparison, MethodRun, PerClient, RecordedMatrix, Report, ReportedExperiment
from cfl_ray.results import comparison, published_comparison
from cfl_ray.results.arrow_log import read_client_metrics, read_reassignments
from cfl_ray.results.published import load_published
from cfl_ray.results.recorded_runs import FoundRun, find_runs, recorded_methods, say_code
from cfl_ray.results.results import RECOVERY_METRICS, MethodResult
from cfl_ray.results.run_record import default_params
from cfl_ray.results.study_folder import is_finished, run_folders
from cfl_ray.run_directory import RunDirectory
from cfl_ray.setup.criterion import Criterion
from cfl_ray.system.files import SHARED, write_text
from cfl_ray.tracking import flatten, read_info
from cfl_ray.tracking.record import (
    BEST_ROUND,
    LABEL_COUNTS,
    METRICS,
    NEUTRAL,
    OFF,
    is_evaluated,
    primary_of,
    score_metrics_of,
    validation_metric,
)

_logger = logging.getLogger(__name__)


def write_report(
    paths: Sequence[str | Path],
    output: str | Path,
    against: str | Path | None = None,
    column: str | None = None,
    trust: bool = False,
    code: str | None = None,
) -> Path:
    """Writes the page of the runs in and below these folders, and returns its path.

    against: file of published tables; None: the tables of the study if its folder is the only path. column: column of
        the tables for runs outside of studies; runs of a study belong to the column of their setting. trust,
        code: as in `load_run`.
    Raises ConfigError unless the name ends in .html or .htm, if a path holds no run, or if no run is in the tables.
    """
    path = Path(output)
    if path.suffix not in (".html", ".htm") and not path.is_dir():  # folders have a separate message below
        raise ConfigError(f"{path}: a report is written as .html, got {path.suffix or 'no ending'!r}")
    text = report_page(paths, against, column, trust, code)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text, SHARED)
    return path


def report_page(
    paths: Sequence[str | Path],
    against: str | Path | None = None,
    column: str | None = None,
    trust: bool = False,
    code: str | None = None,
) -> str:
    """The page that `write_report` writes, as HTML."""
    if column is not None and against is None:
        raise ConfigError(f"column {column!r} is one of published tables; name their file, too (--against)")
    runs = find_runs(paths, trust, code)
    say_code(runs, _logger.warning)
    if against is not None:
        published = load_published(against)
        return _page(runs, published_comparison.compare_with(runs, published, column), published.paper.reference)
    return _page(runs, *(_published_of(Path(paths[0]), runs) if len(paths) == 1 else ((), "")))


def _page(runs: Sequence[FoundRun], comparisons: Sequence[Comparison], paper: str) -> str:
    from cfl_ray.report.page import render  # imports jinja2, which other commands do not need

    return render(report_of(runs, comparisons, paper))


def _published_of(
    folder: Path, runs: Sequence[FoundRun], warn: Callable[[str], None] = lambda text: None
) -> tuple[Sequence[Comparison], str]:
    """The comparisons with the published numbers that a study names, and the paper.

    Both are empty if the folder is not a study, the file of the numbers is missing, or none of our runs is in the
    tables. warn: receives a line if a published metric is not known.
    """
    file = load_study(RunDirectory(folder).study).published if RunDirectory(folder).is_study else None
    if file is None or not Path(file).is_file():
        return (), ""
    published = load_published(file)
    if unknown := published_comparison.unknown_metric(runs, published):
        warn(f"the report has no published numbers: {file}: {unknown}")
    try:
        return published_comparison.compare_with(runs, published), published.paper.reference
    except ConfigError:
        return (), ""


def report_at_the_end(folder: Path, runs: Callable[[], Sequence[FoundRun]], warn: Callable[[str], None]) -> None:
    """Writes the page of a run or a study into its folder. A failure is only a warning, since the results are saved."""
    try:
        found, path = runs(), RunDirectory(folder).report
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, _page(found, *_published_of(folder, found, warn)))
    except FOREIGN as error:
        again = command("report", folder)
        warn(f"the report was not written: {class_and_text(error)}; `{again}` tries it again")


# ---- the data of the page


def report_of(runs: Sequence[FoundRun], comparisons: Sequence[Comparison] = (), paper: str = "") -> Report:
    """The data of the page. Runs of a setting of a study, or that differ only in the seed, form an experiment."""
    groups = comparison.experiments_of(runs)
    run_metrics = comparison.metrics_by_run(comparison.results_of(groups))
    experiments = [_experiment(name, group) for name, group in groups]
    scores = [experiment.score for experiment in experiments if experiment.methods]
    metrics = _columns(run_metrics, scores, [result for run in runs for result in run.methods.values()])
    frame = comparison.table_of(run_metrics, metrics)
    rows = [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]
    studies = {run.study for run in runs if run.study}
    # the trials of a sweep are no independent settings; its tables have no ranks either
    is_ranked = bool(studies) and all(load_study(RunDirectory(study).study).sweep is None for study in studies)
    less_is_better = bool(metrics) and comparison.is_less_better(metrics[0], comparison.metrics_of(run_metrics))
    title = groups[0][0] if len(groups) == 1 else f"{len(groups)} experiments"
    return Report(
        title=" and ".join(sorted({study.name for study in studies})) or title,
        experiments=[experiment for experiment in experiments if experiment.methods],
        columns=metrics,
        rows=rows,
        ranks=ranks_of(run_metrics, metrics[0], less_is_better) if metrics and is_ranked else None,
        comparisons=comparisons,
        paper=paper,
        notes=_notes(runs),
        has_best=any(result.best_round is not None for run in runs for result in run.methods.values()),
    )


def _notes(runs: Sequence[FoundRun]) -> list[str]:
    """Sentences on runs that are not shown or not finished, and on how models and ends were chosen."""
    studies = dict.fromkeys(run.study for run in runs if run.study is not None)
    failed = [run for study in studies for *_, run in run_folders(study, RunDirectory.failure)]
    without_records = [str(run) for run in failed if not RunDirectory(run).info.is_file()]
    notes = {
        "Not shown, since not finished or without an evaluation yet": [
            *(str(run.directory) for run in runs if not run.methods),
            *without_records,
        ],
        "Not finished": [
            f"{label} of {run.directory} (round {result.records[-1].round} of {run.experiment.rounds})"
            for run in runs
            for label, result in run.methods.items()
            if result.directory is not None and not is_finished(result.directory)
        ],
        "Ended by stopping": [
            f"{label} of {run.directory} {result.ended}"
            for run in runs
            for label, result in run.methods.items()
            if result.ended
        ],
        "Chosen by data that are meant for the test alone, which favours the method": [
            text for run in runs for text in _chosen_by_test(run)
        ],
    }
    return [f"{what}: {listed(which)}." for what, which in notes.items() if which]


def _chosen_by_test(run: FoundRun) -> Iterator[str]:
    """The choices of a run that were made by test data or true groups, as text."""
    stopping, keep = run.experiment.stopping, run.experiment.keep
    finals = [result.final for result in run.methods.values()]
    score = next(map(primary_of, finals), "accuracy")
    on_validation = validation_metric(score)
    first = on_validation if any(on_validation in final for final in finals) else score
    of_stopping = None if stopping is None else stopping.metric or first
    if of_stopping is not None and (data := Criterion(of_stopping).chosen_by):
        yield f"the end of the methods of {run.directory} by {of_stopping} ({data})"
    if keep.which == "best" and (data := Criterion(metric := keep.metric or of_stopping or first).chosen_by):
        yield f"the round of the kept models of {run.directory} by {metric} ({data})"


def _columns(run_metrics: comparison.RunMetrics, scores: Sequence[str], results: Sequence[MethodResult]) -> list[str]:
    """The recorded metrics, as columns of the table. scores: of the experiments' tasks."""
    usual = METRICS.keys() | {name for score in scores for name in score_metrics_of([score])}
    added = [name for result in results for name in result.final if name not in usual | result.last_numbers.keys()]
    present = {
        name
        for of_seeds in run_metrics.values()
        for values in of_seeds.values()
        for name, value in values.items()
        if not math.isnan(value)
    }
    of_scores = [
        f"{score}{ending}"
        for score in dict.fromkeys(scores)
        for ending in ("", "_local", "_tuned", "_honest", "_p10", "_p90")
    ]
    of_scores += [validation_metric(f"{score}{end}") for score in dict.fromkeys(scores) for end in ("", "_local")]
    others = ["macro_f1", *added, "ari", "num_clusters", "mbit", "rounds_to_target"]
    others += ["rounds_to_recover", "backward_transfer", "virtual_seconds", "seconds", BEST_ROUND]
    return [name for name in dict.fromkeys([*of_scores, *others]) if name in present]


def _experiment(name: str, runs: Sequence[FoundRun]) -> ReportedExperiment:
    methods: dict[str, list[MethodRun]] = {}
    groups = PerClient()
    score, higher_is_better = "accuracy", True
    changes: dict[int, int] = {}
    labels = dict.fromkeys(label for run in runs for label in run.methods)
    for run in sorted(runs, key=lambda run: run.experiment.seed):
        changed = _changed(run)
        changes = changes or {round: len(ids) for round, ids in changed.items()}
        for label, result in run.methods.items():
            score = primary_of(result.final)
            higher_is_better = f"{score}_p90" not in result.final
            is_first = label not in methods  # matrices are read and drawn for a single seed
            one = _method_run(run.experiment.seed, result, is_first)
            methods.setdefault(label, []).append(_with_recovery(one, result, changed, score))
            if result.directory is not None:
                groups = groups.updated(_groups(result.directory))
    command, text = command_again(runs)
    return ReportedExperiment(
        name=name,
        run_info=run_info(runs, methods, groups),
        command=command,
        config=text,
        methods={label: methods[label] for label in labels},
        groups=groups,
        score=score,
        higher_is_better=higher_is_better,
        groups_change=bool(groups) and any(event.change for run in runs for event in run.experiment.schedule),
        changes=changes,
    )


def _changed(run: FoundRun) -> dict[int, set[int]]:
    """Ids of the clients whose data the schedule changes, by the round before which it does, in the run's rounds."""
    changed: dict[int, set[int]] = {}
    for event in sorted(run.experiment.events, key=lambda event: event.round):
        if event.change and event.round <= run.experiment.rounds:
            changed.setdefault(event.round, set()).update(id for change in event.change for id in change.clients)
    return changed


def _with_recovery(run: MethodRun, result: MethodResult, changed: Mapping[int, set[int]], score: str) -> MethodRun:
    """The run with the mean scores of the clients whose data change, and the metrics of their recovery."""
    if not changed:
        return run
    scores = {} if result.directory is None else _mean_scores(result.directory, set().union(*changed.values()), score)
    recovery = {name: result.summary[name] for name in RECOVERY_METRICS if name in result.summary}
    return replace(run, changed_scores=scores, recovery=recovery)


def _mean_scores(directory: Path, ids: set[int], score: str) -> dict[int, float]:
    """Mean score of these clients by evaluated round; a round at a time, since the file may be larger than memory."""
    table, of_ids = read_client_metrics(RunDirectory(directory).client_metrics), np.array(sorted(ids))
    means = {}
    for batch in table.to_batches() if score in table.column_names else []:  # memory-mapped, each of a single round
        score_S = batch[score].to_numpy(zero_copy_only=False)[np.isin(batch["client"].to_numpy(), of_ids)]
        if np.isfinite(score_S).any():
            means[batch["round"][0].as_py()] = float(np.nanmean(score_S, dtype=np.float64))
    return means


def _method_run(seed: int, result: MethodResult, with_matrices: bool) -> MethodRun:
    if result.directory is None:
        return MethodRun(seed, result.records)
    mixtures = result.diagnostics.get(MIXTURE_WEIGHTS, {}) if with_matrices else {}
    return MethodRun(
        seed=seed,
        records=result.records,
        reassignments=read_reassignments(RunDirectory(result.directory).reassignments),
        scores=_scores_after(RunDirectory(result.directory).client_metrics, result),
        matrices=_matrices(result) if with_matrices else {},
        mixtures=[(round, weights.labels[0], weights.value) for round, weights in sorted(mixtures.items())],
        confusion=result.recorded_confusion() if with_matrices else None,
    )


def _matrices(result: MethodResult) -> dict[str, RecordedMatrix]:
    """The last diagnostic of each name with a row per client: values of pairs, or at least two numbers per client."""
    matrices, diagnostics = {}, result.diagnostics
    counts = list(diagnostics.pop(LABEL_COUNTS, {}).values())
    for name, by_round in diagnostics.items():
        round, last = max(by_round.items())
        if last.axes[:1] != (CLIENTS,) or len(last.axes) != 2 or last.axes[1] == CLUSTERS or min(last.value.shape) < 2:
            continue
        of_pairs = last.axes[1] == CLIENTS
        label_counts_SC = _label_counts(counts, last.labels[0]) if of_pairs else None
        matrices[name] = RecordedMatrix(round, last.labels[0], last.value, of_pairs, label_counts_SC)
    return matrices


def _label_counts(recorded: Sequence[Diagnostic], client_S: np.ndarray) -> np.ndarray | None:
    """The last label counts (S, C) of these clients; NaN for a client without counts, None if no client has counts."""
    of_client = {
        client: counts
        for diagnostic in recorded
        for client, counts in zip(diagnostic.labels[0].tolist(), diagnostic.value, strict=True)
    }
    if of_client.keys().isdisjoint(client_S.tolist()):
        return None
    unknown_C = np.full(recorded[-1].value.shape[1], np.nan, np.float32)
    return np.array([of_client.get(client, unknown_C) for client in client_S.tolist()])


def _scores_after(path: Path, result: MethodResult) -> dict[str, np.ndarray]:
    """The metrics of every client in the round whose metrics are final; empty if the file lacks it."""
    table, records = read_client_metrics(path), result.records
    evaluated = next((record.round for record in reversed(records) if is_evaluated(record.metrics)), None)
    evaluated = result.best_round or evaluated
    batches = (batch for batch in table.to_batches() if batch.num_rows)  # each of a single round, memory-mapped
    last = next((batch for batch in batches if batch["round"][0].as_py() == evaluated), None)
    if last is None:
        return {}
    return {name: last[name].to_numpy(zero_copy_only=False) for name in table.column_names[1:]}


def _groups(directory: Path) -> PerClient:
    """True groups of the clients that have been in a cluster, if they are known."""
    path = RunDirectory(directory).assignments
    if not path.exists():
        return PerClient()
    try:
        table = pq.read_table(path, columns=["client", "group"])
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise DataError(
            f"{path} is damaged ({error}); restore it, or remove it to do without the true groups"
        ) from error
    table = table.drop_null()
    client_M, first_M = np.unique(table["client"].to_numpy(), return_index=True)
    return PerClient(client_M, table["group"].to_numpy()[first_M])


# ---- the settings of runs as text, and the command that repeats them


def run_info(runs: Sequence[FoundRun], methods: Mapping[str, Sequence[MethodRun]], groups: PerClient) -> dict[str, str]:
    """Data, model, training, rounds, seeds, hosts and commit of the runs, as far as they are known."""
    first = min(runs, key=lambda run: run.experiment.seed)
    settings, recorded = _shared_settings(runs), _recorded(first.directory)
    section = partial(_section, settings)
    apart = ("data.shift.", "data.partition.", "data.test.", "data.root", "data.download", "data.shards", "data.source")
    in_words = {
        "data": ", ".join(filter(None, [settings["data.source"], section("data.", without=apart)])),
        "groups differ by": section("data.shift.", ["data.shift.kind"]),
        "partition": section("data.partition.", ["data.partition.kind"]),
        "clients": _clients_in_words(first.experiment, methods, groups),
        "test data": section("data.test."),
        "model": section("model.", ["model.name"]),
        "task": settings.get("task") or section("task."),
        "local training": section("local.", ["local.epochs", "local.batch_size", "local.lr"]),
        "cohort": section("cohort.", ["cohort.fraction"]),
        "attack": section("attack."),
        "schedule": "; ".join(map(_event_in_words, first.experiment.schedule)),
        "evaluation": section("evaluation."),
        "stopping": section("stopping."),
        "models kept": section("keep."),
        "rounds": settings["rounds"],
        "seeds": ", ".join(map(str, sorted({run.experiment.seed for run in runs}))),
        "methods": ", ".join(dict.fromkeys(label for run in runs for label in _labels(run))),
        "hosts": ", ".join(recorded[key] for key in ("hosts", "device", "engine") if key in recorded),
        "commit": recorded.get("git_commit", ""),
    }
    return {name: redact(value) for name, value in in_words.items() if value}


def _section(settings: dict[str, str], prefix: str, always: Sequence[str] = (), without: Sequence[str] = ()) -> str:
    """The settings of a section: those in `always`, then others with a value other than their default.

    In a section that is null by default, they have a value other than nothing.
    """
    defaults = default_params()

    def is_set(key: str) -> bool:
        value = settings[key]
        return value != defaults.get(key) and not (value == "null" or (key not in defaults and value in OFF | NEUTRAL))

    keys = [key for key in settings if key.startswith(prefix) and not key.startswith(tuple(without))]
    first, others = [key for key in keys if key in always], [key for key in keys if key not in always and is_set(key)]
    return ", ".join(f"{key.removeprefix(prefix)} {settings[key]}" for key in (*first, *others))


def _clients_in_words(experiment: Experiment, methods: Mapping[str, Sequence[MethodRun]], groups: PerClient) -> str:
    """The numbers of clients and of true groups; empty if that of clients is not known."""
    scored = [len(run.scores.get("client", ())) for of_method in methods.values() for run in of_method]
    clients = max([*scored, len(groups), experiment.data.known_clients or 0])
    true_groups = f", {counted(len(groups.sizes), 'true group')}" if groups else ""
    return f"{clients}{true_groups}" if clients else ""


def _labels(run: FoundRun) -> list[str]:
    """The methods of a run, with their options as far as these are known."""
    methods = recorded_methods(run.directory, run.experiment)
    return [label if method is None else full_label(method) for label, method in methods.items()]


def _shared_settings(runs: Sequence[FoundRun]) -> dict[str, str]:
    """The settings by dotted key; the value is "differs by method" if the runs of a study differ in it."""
    all_settings = [flatten(run.experiment.to_dict()) for run in runs]
    return {
        key: value if all(other.get(key) == value for other in all_settings) else "differs by method"
        for key, value in all_settings[0].items()
    }


def _event_in_words(event: EventConfig) -> str:
    kinds = {
        f"{len(event.join)} join": event.join,
        f"{len(event.leave)} leave": event.leave,
        "data change": event.change,
    }
    return f"round {event.round}: {', '.join(words for words, happens in kinds.items() if happens)}"


def _recorded(directory: Path) -> dict[str, str]:
    """Hosts, device and engine of the run, and the commit of its code, if recorded."""
    try:
        info = read_info(directory)
    except DataError:
        return {}
    session = {key.removeprefix("session."): value for key, value in info.params.items() if key.startswith("session.")}
    return session | {"git_commit": info.tags.get("git_commit", "")}


def command_again(runs: Sequence[FoundRun]) -> tuple[str, str]:
    """The command that repeats these runs, and the config or study that it names, without credentials."""
    first = min(runs, key=lambda run: run.experiment.seed)
    if first.study is not None:
        text = RunDirectory(first.study).study.read_text(encoding="utf-8")
        return _study_again(first.study, str(first.setting)), redact(text)
    seeds = sorted({run.experiment.seed for run in runs})
    commands = [f"cfl-ray run experiment.yaml seed={seed}" for seed in seeds]
    return "\n".join(commands), first.experiment.to_yaml(credentials=False)


def _study_again(folder: Path, setting: str) -> str:
    """The command that repeats a setting of a study; for a sweep, all trials of the setting."""
    study = load_study(RunDirectory(folder).study)
    if study.sweep is None:
        return command("compare", RunDirectory.study.name, "--setting", setting)
    base = next((name for name in study.settings if setting.startswith(f"{name},")), None)
    return command("sweep", RunDirectory.study.name, "--setting" if base else None, base)
