"""The report of runs: finds them, reads their records, and has the page drawn."""

import json
import math
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from cfl_ray.config import Experiment
from cfl_ray.config.published import PublishedNumber, PublishedTable, PublishedTables, load_published
from cfl_ray.config.schedule import EventConfig
from cfl_ray.config.study import load_study
from cfl_ray.core.diagnostics import CLIENTS, CLUSTERS, Diagnostic
from cfl_ray.errors import ConfigError, DataError, did_you_mean
from cfl_ray.methods import full_label, resolve
from cfl_ray.report.material import Comparison, MethodRun, Moves, Report, ReportedExperiment
from cfl_ray.report.snapshots import RecordedMatrix
from cfl_ray.results.comparison import Found, free_name, settings_of, table_of, values_of
from cfl_ray.results.load import load_run
from cfl_ray.results.results import MethodResult, Results, read_client_metrics
from cfl_ray.run_directory import RunDirectory
from cfl_ray.runtime.trust import load_record
from cfl_ray.study.folder import is_study, run_folders
from cfl_ray.system.files import PRIVATE, SHARED
from cfl_ray.tracking import flatten, read_info, redact
from cfl_ray.tracking.record import LABEL_COUNTS, METRICS, primary_of


@dataclass(frozen=True)
class FoundRun:
    """A run with its records, and its place in a study."""

    directory: Path
    experiment: Experiment
    results: Results
    study: Path | None = None  # its folder
    setting: str | None = None
    method: str | None = None  # its label in the study

    @property
    def methods(self) -> dict[str, MethodResult]:
        """Results by label: in a study, the name that it gives the method."""
        found = {label: result for label, result in self.results.methods.items() if result.final}
        return {self.method: next(iter(found.values()))} if self.method and len(found) == 1 else found


def write_report(
    paths: Sequence[str | Path],
    output: str | Path,
    against: str | Path | None = None,
    column: str | None = None,
    trust: bool = False,
) -> Path:
    """Writes the page of these runs, and of all runs below these folders, and returns its path.

    against: file of published tables; None: those that a study names, where its folder is the only path. column: that
        of the tables which plain runs belong to; runs of a study belong to that of their setting. trust: as in
        `load_run`.
    Raises ConfigError where a path holds no run, or nothing of ours is in the tables.
    """
    runs, comparisons, paper = _compared_runs(paths, against, column, trust)
    return write_report_of(runs, output, comparisons, paper, SHARED)


def report_page(
    paths: Sequence[str | Path],
    against: str | Path | None = None,
    column: str | None = None,
    trust: bool = False,
) -> str:
    """The page that `write_report` writes, as HTML."""
    from cfl_ray.report.page import render

    return render(report_of(*_compared_runs(paths, against, column, trust)))


def _compared_runs(
    paths: Sequence[str | Path], against: str | Path | None, column: str | None, trust: bool
) -> tuple[Sequence[FoundRun], Sequence[Comparison], str]:
    """The runs, the published numbers beside theirs, and the paper."""
    if column is not None and against is None:
        raise ConfigError(f"column {column!r} is one of published tables; name their file, too (--against)")
    runs = find_runs(paths, trust)
    if against is None:
        return runs, *_of_study(paths, runs)
    published = load_published(against)
    return runs, compare_with(runs, published, column), published.paper.reference


def _of_study(paths: Sequence[str | Path], runs: Sequence[FoundRun]) -> tuple[Sequence[Comparison], str]:
    """The published numbers that a study names beside ours, and the paper; none for other paths or without the file."""
    if len(paths) != 1 or not is_study(paths[0]):
        return (), ""
    file = load_study(RunDirectory(paths[0]).study).published
    if file is None or not Path(file).is_file():
        return (), ""
    published = load_published(file)
    try:
        return compare_with(runs, published), published.paper.reference
    except ConfigError:  # nothing of ours is in the study's tables
        return (), ""


def write_report_of(
    runs: Sequence[FoundRun],
    output: str | Path,
    comparisons: Sequence[Comparison] = (),
    paper: str = "",
    mode: int = PRIVATE,
) -> Path:
    """Writes the page of runs that are open. mode: as in `report.page.write_page`."""
    from cfl_ray.report.page import write_page  # imports plotly, which no other command waits for

    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_page(report_of(runs, comparisons, paper), path, mode)
    return path


def find_runs(paths: Sequence[str | Path], trust: bool = False) -> list[FoundRun]:
    """The runs among and below the paths, each once; those of a study in its order, others in that of their folders.

    Raises ConfigError where a path has none.
    """
    found: dict[Path, FoundRun] = {}
    for path in map(Path, paths):
        below = list(_runs_below(path, trust))
        if not below:
            raise ConfigError(
                f"{path} holds no run: neither it nor a folder below it has {RunDirectory.config.name} and "
                f"{RunDirectory.info.name}"
            )
        for run in below:
            found.setdefault(run.directory.resolve(), run)
    return list(found.values())


def _runs_below(path: Path, trust: bool) -> Iterator[FoundRun]:
    for folder, inner, files in os.walk(path):
        directory = Path(os.path.abspath(folder))  # the same for all runs of a study, however they are named
        if is_study(directory):
            inner.clear()
            for setting, method, run in run_folders(directory):
                if RunDirectory(run).info.is_file():
                    yield _open(run, trust, directory, setting, method)
        elif {RunDirectory.config.name, RunDirectory.info.name} <= {*files}:
            inner.clear()  # no run is inside another one
            yield _open(directory, trust, *_place_in_study(directory))
        inner.sort()


def _place_in_study(directory: Path) -> tuple[Path, str, str] | tuple[None, None, None]:
    """Study, setting and method of a run that is named by itself; None for one that is in no study."""
    parents = directory.parents
    study = parents[2] if len(parents) > 2 else None
    return (study, parents[1].name, parents[0].name) if study and is_study(study) else (None, None, None)


def _open(directory: Path, trust: bool, study: Path | None, setting: str | None, method: str | None) -> FoundRun:
    experiment = load_record(directory, trust, connects=False)
    return FoundRun(directory, experiment, load_run(directory, experiment), study, setting, method)


# ---- the material of the page


def report_of(runs: Sequence[FoundRun], comparisons: Sequence[Comparison] = (), paper: str = "") -> Report:
    """The runs as the page shows them: those that differ in their seed alone, or have one setting, are together."""
    groups: dict[str, list[FoundRun]] = {}
    for run in runs:
        groups.setdefault(f"{run.study}/{run.setting}" if run.setting else settings_of(run.experiment), []).append(run)
    names: list[str] = []
    for group in groups.values():
        names.append(free_name(group[0].setting or group[0].experiment.name, names))
    found: Found = {}
    for name, group in zip(names, groups.values(), strict=True):
        for run in group:
            for label, result in run.methods.items():
                of_seeds = found.setdefault((name, label), {})
                if run.experiment.seed in of_seeds:
                    raise ConfigError(
                        f"{run.directory}: another run has the same settings, method {label} and seed "
                        f"{run.experiment.seed}; name one of the two"
                    )
                of_seeds[run.experiment.seed] = values_of(result)
    experiments = [_experiment(name, group) for name, group in zip(names, groups.values(), strict=True)]
    metrics = _columns(found, [one.score for one in experiments if one.methods])
    frame = table_of(found, metrics)
    rows = [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]
    studies = {run.study.name for run in runs if run.study}
    title = names[0] if len(names) == 1 else f"{len(names)} experiments"
    waiting = [str(run.directory) for run in runs if not run.methods]
    return Report(
        title=" and ".join(sorted(studies)) or title,
        experiments=[one for one in experiments if one.methods],
        columns=metrics,
        rows=rows,
        comparisons=comparisons,
        paper=paper,
        notes=[f"Without an evaluation yet, and not shown: {', '.join(waiting)}"] if waiting else [],
    )


def _columns(found: Found, scores: Sequence[str]) -> list[str]:
    """Metrics of the table: those that a method has. scores: of the experiments' tasks."""
    present = {
        name
        for of_seeds in found.values()
        for values in of_seeds.values()
        for name, value in values.items()
        if not math.isnan(value)
    }
    of_scores = [
        f"{score}{ending}" for score in dict.fromkeys(scores) for ending in ("", "_local", "_tuned", "_p10", "_p90")
    ]
    others = ["macro_f1", "ari", "num_clusters", "mbit", "rounds_to_target", "seconds"]
    return [name for name in dict.fromkeys([*of_scores, *others]) if name in present]


def _experiment(name: str, runs: Sequence[FoundRun]) -> ReportedExperiment:
    methods: dict[str, list[MethodRun]] = {}
    group_of: dict[int, int] = {}
    score, higher_is_better = "accuracy", True
    labels = dict.fromkeys(label for run in runs for label in run.methods)
    for run in sorted(runs, key=lambda run: run.experiment.seed):
        for label, result in run.methods.items():
            score = primary_of(result.final)
            higher_is_better = f"{score}_p90" not in result.final
            is_first = label not in methods  # matrices are drawn of one seed, and are not read of the others
            methods.setdefault(label, []).append(_method_run(run.experiment.seed, result, is_first))
            if result.directory is not None:
                group_of |= _groups(result.directory)
    command, text = _again(runs)
    return ReportedExperiment(
        name=name,
        facts=_facts(runs, methods, group_of),
        command=command,
        config=text,
        methods={label: methods[label] for label in labels},
        group_of=group_of,
        score=score,
        higher_is_better=higher_is_better,
    )


def _method_run(seed: int, result: MethodResult, with_matrices: bool) -> MethodRun:
    if result.directory is None:
        return MethodRun(seed, result.records)
    return MethodRun(
        seed=seed,
        records=result.records,
        moves=_moves(RunDirectory(result.directory).reassignments),
        scores=_last_scores(RunDirectory(result.directory).client_metrics),
        matrices=_matrices(result) if with_matrices else {},
    )


def _matrices(result: MethodResult) -> dict[str, RecordedMatrix]:
    """The last diagnostic of each name that has a row for each client: of pairs, or of at least two numbers each."""
    found, diagnostics = {}, result.diagnostics
    counts = list(diagnostics.pop(LABEL_COUNTS, {}).values())
    for name, by_round in diagnostics.items():
        round, last = max(by_round.items())
        if last.axes[:1] != (CLIENTS,) or len(last.axes) != 2 or last.axes[1] == CLUSTERS or min(last.value.shape) < 2:
            continue
        of_pairs = last.axes[1] == CLIENTS
        label_counts_SC = _label_counts(counts, last.labels[0]) if of_pairs else None
        found[name] = RecordedMatrix(round, last.labels[0], last.value, of_pairs, label_counts_SC)
    return found


def _label_counts(recorded: Sequence[Diagnostic], client_S: np.ndarray) -> np.ndarray | None:
    """The last label counts (S, C) of these clients; NaN for a client without any, None where no client has some."""
    of_client = {
        client: counts for one in recorded for client, counts in zip(one.labels[0].tolist(), one.value, strict=True)
    }
    if of_client.keys().isdisjoint(client_S.tolist()):
        return None
    unknown_C = np.full(recorded[-1].value.shape[1], np.nan, np.float32)
    return np.array([of_client.get(client, unknown_C) for client in client_S.tolist()])


def _moves(path: Path) -> Moves:
    """The moves on record; a line that is being written is left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    try:
        return [(row["round"], row["moved"]) for row in map(json.loads, lines)]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}); restore it, or remove it to do without its moves") from error


def _last_scores(path: Path) -> dict[str, np.ndarray]:
    """The metrics of every client in the last evaluated round."""
    table = read_client_metrics(path)
    if not table.num_rows:
        return {}
    round_R = table["round"].to_numpy()
    last = round_R == round_R.max()
    return {name: table[name].to_numpy()[last] for name in table.column_names[1:]}


def _groups(directory: Path) -> dict[int, int]:
    """True groups of the clients that have been in a cluster, where they are known."""
    path = RunDirectory(directory).assignments
    if not path.exists():
        return {}
    try:
        table = pq.read_table(path, columns=["client", "group"])
    except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
        raise DataError(
            f"{path} is damaged ({error}); restore it, or remove it to do without the true groups"
        ) from error
    pairs = zip(table["client"].to_pylist(), table["group"].to_pylist(), strict=True)
    return {client: group for client, group in pairs if group is not None}


# ---- settings in words


def _facts(
    runs: Sequence[FoundRun], methods: Mapping[str, Sequence[MethodRun]], group_of: Mapping[int, int]
) -> dict[str, str]:
    first = min(runs, key=lambda run: run.experiment.seed)
    experiment = first.experiment
    settings, defaults = _shared_settings(runs), flatten(Experiment().to_dict())

    def section(prefix: str, always: Sequence[str] = (), without: Sequence[str] = ()) -> str:
        keys = [key for key in settings if key.startswith(prefix) and not key.startswith(tuple(without))]
        chosen = [key for key in keys if key in always or settings[key] != defaults.get(key)]
        chosen.sort(key=lambda key: (key not in always, keys.index(key)))
        return ", ".join(f"{key.removeprefix(prefix)} {settings[key]}" for key in chosen)

    apart = ("data.shift.", "data.partition.", "data.test.", "data.root", "data.download", "data.shards", "data.source")
    clients = max(
        (len(run.scores.get("client", ())) for runs in methods.values() for run in runs),
        default=0,
    )
    clients = max(clients, len(group_of), experiment.data.partition.clients or 0)
    groups = f", {len(set(group_of.values()))} true groups" if group_of else ""
    info = _recorded(first.directory)
    seeds = sorted({run.experiment.seed for run in runs})
    facts = {
        "data": ", ".join(filter(None, [settings["data.source"], section("data.", without=apart)])),
        "groups differ by": section("data.shift.", ["data.shift.kind"]),
        "partition": section("data.partition.", ["data.partition.kind"]),
        "clients": f"{clients}{groups}" if clients else "",
        "test data": section("data.test."),
        "model": section("model.", ["model.name"]),
        "task": settings["task"],
        "local training": section("local.", ["local.epochs", "local.batch_size", "local.lr"]),
        "cohort": section("cohort.", ["cohort.fraction"]),
        "attack": section("attack."),
        "schedule": "; ".join(map(_event_in_words, experiment.schedule)),
        "evaluation": section("evaluation."),
        "rounds": settings["rounds"],
        "seeds": ", ".join(map(str, seeds)),
        "methods": _methods_in_words(runs),
        "hosts": ", ".join(info[key] for key in ("hosts", "device", "engine") if key in info),
        "commit": info.get("git_commit", ""),
    }
    return {name: redact(value) for name, value in facts.items() if value}


def _shared_settings(runs: Sequence[FoundRun]) -> dict[str, str]:
    """The settings by dotted keys; methods of a study may differ in some of them."""
    all_settings = [flatten(run.experiment.to_dict()) for run in runs]
    return {
        key: value if all(one.get(key) == value for one in all_settings) else "differs by method"
        for key, value in all_settings[0].items()
    }


def _event_in_words(event: EventConfig) -> str:
    kinds = {
        f"{len(event.join)} join": event.join,
        f"{len(event.leave)} leave": event.leave,
        "data change": event.change,
    }
    return f"round {event.round}: {', '.join(words for words, happens in kinds.items() if happens)}"


def _methods_in_words(runs: Sequence[FoundRun]) -> str:
    """Methods with the options that are not at their defaults."""
    names = [full_label(method) for run in runs for method in resolve(run.experiment.methods).values()]
    return ", ".join(dict.fromkeys(names))


def _recorded(directory: Path) -> dict[str, str]:
    """Hosts, device and engine of the run, and the commit of its code, as far as they are recorded."""
    try:
        info = read_info(directory)
    except DataError:
        return {}
    session = {key.removeprefix("session."): value for key, value in info.params.items() if key.startswith("session.")}
    return session | {"git_commit": info.tags.get("git_commit", "")}


def _again(runs: Sequence[FoundRun]) -> tuple[str, str]:
    """The command that runs it again, and its file, without credentials."""
    first = min(runs, key=lambda run: run.experiment.seed)
    if first.study is not None:
        text = RunDirectory(first.study).study.read_text(encoding="utf-8")
        return shlex.join(["cfl-ray", *_study_again(first.study, str(first.setting))]), redact(text)
    seeds = sorted({run.experiment.seed for run in runs})
    commands = [f"cfl-ray run experiment.yaml seed={seed}" for seed in seeds]
    return "\n".join(commands), redact(first.experiment.to_yaml())


def _study_again(folder: Path, setting: str) -> list[str]:
    """The command on a study that runs a setting again; of a sweep, all trials of the setting."""
    study = load_study(RunDirectory(folder).study)
    if study.sweep is None:
        return ["compare", RunDirectory.study.name, "--setting", setting]
    of_trial = [name for name in study.settings if setting.startswith(f"{name},")]
    return ["sweep", RunDirectory.study.name, *(part for name in of_trial[:1] for part in ("--setting", name))]


# ---- published numbers


def compare_with(runs: Sequence[FoundRun], published: PublishedTables, column: str | None = None) -> list[Comparison]:
    """Our numbers beside those of the tables, for each method that has a row there.

    A run of a study belongs to the column of its setting in the tables that the study repeats, another one to `column`,
    or to the only one there is. Raises ConfigError where that is not known, where nothing of ours is in the tables, and
    for a metric that is neither one of ours nor in a run.
    """
    if unknown := unknown_metric(runs, published):
        raise ConfigError(unknown)
    if column is not None and column not in (columns := _columns_of(published)):
        raise ConfigError(f"the published tables have no column {column!r}{did_you_mean(column, columns)}")
    tables = [name for name in _tables_of(runs) if name in published.tables] or list(published.tables)
    found: dict[tuple[str, str], dict[int, MethodResult]] = {}  # by (column, label), then seed
    for run in runs:
        for label, result in run.methods.items():
            of_seeds = found.setdefault((run.setting or column or _only_column(published), label), {})
            of_seeds[run.experiment.seed] = result
    compared = [
        _compared(name, published.tables[name], row, column, number, found[column, row])
        for name in tables
        for row, column, number in published.tables[name].cells()
        if (column, row) in found and number.mean is not None
    ]
    compared.sort(key=lambda one: (one.table, one.column))  # rows stay in their order
    comparisons = [one for one in compared if not math.isnan(one.ours)]
    if compared and not comparisons:
        metrics = ", ".join(sorted({one.metric for one in compared}))
        raise ConfigError(f"no run has a number for the published tables: {metrics} is not known with every seed")
    if not comparisons:
        rows = dict.fromkeys(row for table in published.tables.values() for row in table.rows)
        ours = "; ".join(f"{label}, {column}" for column, label in found)
        raise ConfigError(
            f"no run is in the published tables: they have the methods {', '.join(rows)} and the columns "
            f"{', '.join(_columns_of(published))}; the runs have {ours}"
        )
    return comparisons


def unknown_metric(runs: Sequence[FoundRun], published: PublishedTables) -> str:
    """A sentence on a metric of the tables that is neither one of ours nor in a run; empty where there is none."""
    present = {name for run in runs for result in run.methods.values() for name in values_of(result)}
    for name in _tables_of(runs) or published.tables:
        for row, _, number in published.tables[name].cells() if name in published.tables else ():
            if number.metric not in METRICS and number.metric not in present:
                near = did_you_mean(number.metric, present)
                return f"tables.{name}, row {row}: no run has the metric {number.metric!r}{near}"
    return ""


def _tables_of(runs: Sequence[FoundRun]) -> list[str]:
    """The published tables that the studies of these runs repeat."""
    studies = dict.fromkeys(run.study for run in runs if run.study is not None)
    return [name for study in studies for name in load_study(RunDirectory(study).study).tables]


def _columns_of(published: PublishedTables) -> list[str]:
    return list(dict.fromkeys(column for table in published.tables.values() for column in table.columns))


def _only_column(published: PublishedTables) -> str:
    columns = _columns_of(published)
    if len(columns) > 1:
        raise ConfigError(f"the published tables have several columns; name one with --column: {', '.join(columns)}")
    return columns[0]


def _compared(
    name: str,
    table: PublishedTable,
    row: str,
    column: str,
    number: PublishedNumber,
    of_seeds: Mapping[int, MethodResult],
) -> Comparison:
    ours = number.scale * np.array([values_of(result).get(number.metric, math.nan) for result in of_seeds.values()])
    return Comparison(
        table=name,
        caption=table.caption,
        row=row,
        column=column,
        metric=number.metric,
        unit=number.unit,
        ours=float(ours.mean()),
        ours_std=float(ours.std(ddof=1)) if len(ours) > 1 else math.nan,
        seeds=len(ours),
        published=math.nan if number.mean is None else number.mean,
        published_std=math.nan if number.std is None else number.std,
        misprint=number.misprint,
    )
