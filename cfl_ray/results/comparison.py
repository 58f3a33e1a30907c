"""Methods of several runs side by side: mean and spread over seeds."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cfl_ray.config import Experiment
from cfl_ray.config.data import NOT_IN_RECIPE
from cfl_ray.config.experiment import NOT_HASHED
from cfl_ray.core.method import Method
from cfl_ray.core.metrics import METRICS, Metric
from cfl_ray.errors import ConfigError, did_you_mean, some_of
from cfl_ray.errors.redaction import redact
from cfl_ray.methods import full_label
from cfl_ray.report.drawing import tested_in_words, with_spread
from cfl_ray.report.report_data import mean_and_std
from cfl_ray.results.client_scores import ClientPairs, ClientScores, RunResults
from cfl_ray.results.kept_code import versions_in_words
from cfl_ray.results.recorded_runs import (
    FoundRun,
    lost_method,
    open_run,
    recorded_methods,
    recorded_result,
    say_code,
)
from cfl_ray.results.results import MethodResult
from cfl_ray.results.significance import (
    EFFECTS,
    USUAL_TEST,
    ChosenTest,
    PairedTest,
    common,
    corrected,
    paired_test,
    range_in_words,
    signed_rank_test,
)
from cfl_ray.results.study_folder import is_finished, run_folders
from cfl_ray.run_directory import RunDirectory
from cfl_ray.tracking import flatten
from cfl_ray.tracking.record import BEST_ROUND, is_evaluated, primary_of, test_metric, validation_metric

if TYPE_CHECKING:
    import pandas as pd

_logger = logging.getLogger(__name__)

ROUNDS = ("kept", "best", "last")  # whose metrics a table can have
FORMATS = ("md", "csv", "latex", "html")  # latex: `latex_table`
# shown after the score of the task, by which methods are compared, if a method has them
_SHOWN = (
    "reported",
    "accuracy",
    "accuracy_local",
    "accuracy_p10",
    "macro_f1",
    "test_loss",
    "num_clusters",
    "ari",
    "virtual_seconds",
    BEST_ROUND,
)
_LESS = (  # metrics of which lower values are better
    *("test_loss", "train_loss", "mbit", "mbit_down", "mbit_up", "seconds"),
    *("round_seconds", "virtual_seconds", "seconds_to_target", "epsilon", "example_epsilon"),
    *("rounds_to_target", "mbit_to_target", "rounds_to_target_local", "mbit_to_target_local"),
    "rounds_to_recover",
)
_WHOLE = re.compile(f"num_clusters|correct_clients|cohort_size|clients_.*|updates_.*|rounds_to_.*|{BEST_ROUND}")
_FEWER_NAMED = 6  # means of fewer runs than others
_SHOWN_KEYS, _SHOWN_LETTERS = 3, 40  # in the name of an experiment: number of keys, length of a value


# the metrics of every run, by (experiment, method) and seed; in a study, the experiment is the setting
RunMetrics = dict[tuple[str, str], dict[int, dict[str, float]]]


def compare_runs(
    runs: Sequence[str | Path],
    metrics: Sequence[str] = (),
    trust: bool = False,
    round: str = "kept",
    code: str | None = None,
    test: str = "ttest",
    correction: str = "none",
    against: str | None = None,
) -> pd.DataFrame:
    """A row for each method of each experiment: mean and spread of its last evaluation over the runs.

    Runs that differ only in the seed form an experiment. A study's folder stands for all its runs, and each setting is
    an experiment. Columns: experiment, method, runs (their number), and for each metric METRIC (mean) and
    METRIC_std (sample standard deviation; NaN for 1 run); mbit (per client, download plus upload), seconds (both up to
    the round that is compared), p (p-value of a paired t-test of the first metric against the best method of the
    experiment, over common seeds; NaN for the best method and for fewer than 3 common seeds), and effect (size: mean of
    the differences over their standard deviation). A method that lacks the metric for a seed, or has fewer seeds than
    another method that has it for all, cannot be the best. Methods without an evaluation are excluded, and a
    warning names those that are not finished.

    metrics: names (docs/metrics.md) of the last evaluation or of the whole run, or numeric diagnostics (their last
        values); empty: the score of the task, its P-local, that of honest clients and 10th percentile, macro F1, test
        loss, number of clusters, ARI and virtual seconds, if recorded.
    round: an element of ROUNDS: the evaluation whose metrics are compared: of the round whose models are kept (the best
        one with `keep: best`, otherwise the last), of the best, or of the last.
    trust, code: as in `load_run`.
    test: "ttest", or "wilcoxon", the signed-rank test over the clients (`ClientScores.pairs`), whose effect is the
        rank-biserial correlation; NaN for a metric that is not one of clients. correction: "none", or "holm" over
        the methods. against: the method with which the others are compared; None: the best of the experiment.
    Raises ConfigError for a metric that no run has, and for the best round of methods that have none. If `accuracy` is
    in the table, the metric `accuracy_std` has the column `accuracy_std_over_clients`.
    """
    chosen = ChosenTest(test, correction, against)
    run_metrics, scores = collected(runs, metrics, trust, round, code)
    if unfinished := unfinished_in_words(scores.results):
        _logger.warning("%s", unfinished)
    return table_of(run_metrics, metrics, scores, chosen)


def collected(
    runs: Sequence[str | Path],
    metrics: Sequence[str] = (),
    trust: bool = False,
    round: str = "kept",
    code: str | None = None,
) -> tuple[RunMetrics, ClientScores]:
    """The metrics of runs and studies, as `compare_runs` compares them, and the scores of their clients."""
    if round not in ROUNDS:
        raise ConfigError(f"round must be one of {', '.join(ROUNDS)}, got {round!r}")
    for name, given in (("runs", runs), ("metrics", metrics)):
        if isinstance(given, str | Path):
            raise ConfigError(f"compare_runs takes a list of {name}, got {str(given)!r}; write [{str(given)!r}]")
    run_metrics: RunMetrics = {}
    results: RunResults = {}
    studies = _names_of_studies([Path(run) for run in runs if RunDirectory(run).is_study])
    for study, study_name in studies.items():
        for setting, label, seed, result in _results_in(study):
            key = (f"{study_name}, {setting}" if len(runs) > 1 else setting, label)
            run_metrics.setdefault(key, {})[seed] = values_of(result, round)
            last = [record for record in result.records if is_evaluated(record.metrics)][-1:]  # all take much memory
            results.setdefault(key, {})[seed] = replace(result, records=last)
    plain = [open_run(Path(run), trust, code=code) for run in runs if Path(run) not in studies]
    say_code(plain, _logger.warning)
    for line in versions_in_words(folder for study in studies for _, _, folder in run_folders(study)):
        _logger.warning("%s", line)
    of_plain = results_of(experiments_of(plain))
    if both := [key for key in of_plain if key in results]:
        experiment, label = both[0]
        raise ConfigError(f"a study and a run both have method {label} in experiment {experiment!r}; name one of them")
    return run_metrics | metrics_by_run(of_plain, round), ClientScores(results | of_plain, round)


def of_best_trials(
    study: Path, run_metrics: RunMetrics, scores: ClientScores
) -> tuple[RunMetrics, ClientScores, dict[tuple[str, str], str]]:
    """The metrics and scores of the best trial of each method in each setting of a sweep, and its values as text.

    The trials of a setting are one experiment, so that methods are compared, each with its own best trial. Raises
    ConfigError for a folder that has no ranked trials.
    """
    import pandas as pd

    file = RunDirectory(study).trials_table
    trials = pd.read_csv(file, dtype=object, keep_default_na=False) if file.is_file() else pd.DataFrame()
    if "folder" not in trials:
        raise ConfigError(f"{study} has no best trials: it is the folder of no sweep, or of one that has not ended")
    swept = [key for key in map(str, trials) if "." in key or key in Experiment.model_fields]
    chosen: dict[tuple[str, str], tuple[str, str]] = {}
    values: dict[tuple[str, str], str] = {}
    for row in trials.astype(str).to_dict("records"):
        key, of_runs = (row["setting"], row["method"]), (row["folder"], row["method"])
        if row["place"] == "1" and key not in chosen and of_runs in run_metrics:
            chosen[key] = of_runs
            # a column of whole numbers with gaps is written as 4.0
            named = ((name, re.sub(r"^(-?\d+)\.0$", r"\1", row[name])) for name in swept if row[name])
            values[key] = " ".join(f"{name}={value}" for name, value in named)
    results = {key: scores.results[of_runs] for key, of_runs in chosen.items()}
    return {key: run_metrics[of] for key, of in chosen.items()}, ClientScores(results, scores.round), values


def metrics_by_run(results: RunResults, round: str = "kept") -> RunMetrics:
    """The metrics of an evaluation and of the whole run of these results. round: as in `compare_runs`."""
    return {
        key: {seed: values_of(result, round) for seed, result in of_seeds.items()} for key, of_seeds in results.items()
    }


def _names_of_studies(studies: Sequence[Path]) -> dict[Path, str]:
    """The folder name of each study, or its path if two folders have the same name.

    Raises ConfigError for a study that is listed twice.
    """
    places = [study.resolve() for study in studies]
    if twice := [str(study) for study, place in zip(studies, places, strict=True) if places.count(place) > 1]:
        raise ConfigError(f"{' and '.join(twice)} are one study; name it once")
    names = [place.name for place in places]
    return {study: name if names.count(name) == 1 else str(study) for study, name in zip(studies, names, strict=True)}


def experiments_of(runs: Sequence[FoundRun]) -> list[tuple[str, list[FoundRun]]]:
    """The experiments with their names: the runs of a setting of a study, or runs that differ only in the seed."""
    groups: dict[str, list[FoundRun]] = {}
    for run in runs:
        groups.setdefault(f"{run.study}/{run.setting}" if run.setting else settings_of(run.experiment), []).append(run)
    names = names_of([(group[0].setting or group[0].experiment.name, group[0].experiment) for group in groups.values()])
    return list(zip(names, groups.values(), strict=True))


def results_of(experiments: Sequence[tuple[str, Sequence[FoundRun]]]) -> RunResults:
    """The results of the runs of these experiments.

    Raises ConfigError for two runs with the same seed, and for two that give a method other options under one label.
    """
    results: RunResults = {}
    for name, runs in experiments:
        known: dict[str, tuple[Method[Any], FoundRun]] = {}  # by label
        for run in runs:
            methods = {} if run.setting else recorded_methods(run.directory, run.experiment)  # a study has checked them
            for label, result in run.methods.items():
                if (method := methods.get(label)) is not None:
                    first, other = known.setdefault(label, (method, run))
                    if _options_of(method) != _options_of(first):
                        raise ConfigError(
                            f"{run.directory}: its method {label} is {full_label(method)}, and that of "
                            f"{other.directory} is {full_label(first)}, so they are not seeds of one method; name one "
                            "of the two"
                        )
                of_seeds = results.setdefault((name, label), {})
                if run.experiment.seed in of_seeds:
                    raise ConfigError(
                        f"{run.directory}: another run has the same settings, method {label} and seed "
                        f"{run.experiment.seed}; name one of the two"
                    )
                of_seeds[run.experiment.seed] = result
    return results


def _options_of(method: Method[Any]) -> tuple[str, dict[str, Any]]:
    """Name and options of a method; its class may come from copies of one file."""
    return method.name, {item.name: getattr(method, item.name) for item in fields(method)}


def rounds_in_words(run_metrics: RunMetrics) -> str:
    """The best rounds of the runs that have one, as the end of a sentence; empty if none has."""
    rounds = [int(values[BEST_ROUND]) for of in run_metrics.values() for values in of.values() if BEST_ROUND in values]
    return f"the best round of each run, whose models are kept (round {range_in_words(rounds)})" if rounds else ""


def unfinished_in_words(results: RunResults) -> str:
    """The methods of runs that are not finished, each with its last round, as a sentence; empty if all are."""
    unfinished = [
        f"{label} of {result.directory.parent} (round {result.records[-1].round})"
        for (_, label), seeds in results.items()
        for result in seeds.values()
        if result.directory is not None and result.records and not is_finished(result.directory)
    ]
    return f"Not finished, so compared after fewer rounds: {', '.join(unfinished)}." if unfinished else ""


def metrics_of(run_metrics: RunMetrics) -> list[str]:
    """Names of all metrics of the runs, each once."""
    return list(dict.fromkeys(name for seeds in run_metrics.values() for values in seeds.values() for name in values))


def measured(run_metrics: RunMetrics, metrics: Sequence[str]) -> list[str]:
    """The metrics that at least one run has, in the given order."""
    present = metrics_of(run_metrics)
    return [name for name in metrics if name in present]


def table_of(
    run_metrics: RunMetrics,
    metrics: Sequence[str] = (),
    scores: ClientScores | None = None,
    test: ChosenTest = USUAL_TEST,
) -> pd.DataFrame:
    """The table of `compare_runs`. scores: of the clients, for a test over clients."""
    import pandas as pd

    chosen = chosen_metrics(run_metrics, metrics)
    rows = [_row(key, of_seeds, chosen) for key, of_seeds in run_metrics.items()]
    names = [f"{column_of(name, chosen)}{ending}" for name in chosen for ending in ("", "_std")]
    frame = pd.DataFrame(rows, columns=["experiment", "method", "runs", *names])
    tests = tests_of(run_metrics, chosen[0], scores, test) if chosen else {}
    frame["p"], frame["effect"] = [one.p for one in tests.values()], [one.effect for one in tests.values()]
    return frame


# ---- studies


def runs_frame(run_metrics: RunMetrics) -> pd.DataFrame:
    """A row for each run of a study: setting, method, seed, then a column for each metric."""
    import pandas as pd

    rows = [
        {"setting": setting, "method": method, "seed": seed, **values}
        for (setting, method), of_seeds in run_metrics.items()
        for seed, values in of_seeds.items()
    ]
    return pd.DataFrame(rows, columns=None if rows else ["setting", "method", "seed"])


def read_study(folder: str | Path, only: Collection[Path] | None = None) -> RunMetrics:
    """The metrics of the finished runs of a study, of the kept round and of the whole run, read from its folder.

    only: folders of the runs to read; None: all. Raises DataError for a finished run whose method or metrics are
    missing or damaged.
    """
    run_metrics: RunMetrics = {}
    for setting, method, seed, result in _results_in(folder, only):
        run_metrics.setdefault((setting, method), {})[seed] = values_of(result)
    return run_metrics


def _results_in(
    folder: str | Path, only: Collection[Path] | None = None
) -> Iterator[tuple[str, str, int, MethodResult]]:
    """Setting, method, seed and result of each finished run of a study."""
    for setting, method, run in run_folders(folder):
        if only is not None and run not in only:
            continue
        directories = sorted(path for path in run.iterdir() if path.is_dir())
        finished = [path for path in directories if is_finished(path)]
        if not finished and is_finished(run):
            raise lost_method(run / method)
        for directory in finished:
            result = recorded_result(method, directory)
            if result.final:
                yield setting, method, RunDirectory.seed_of(run), result


def by_experiment(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """A metric of a frame of `compare_runs`, mean ± spread: a row for each method, a column for each experiment."""
    cells = frame[["experiment", "method"]].assign(
        cell=[
            mean_and_spread(mean, std, metric) for mean, std in zip(frame[metric], frame[f"{metric}_std"], strict=True)
        ]
    )
    wide = cells.pivot(index="method", columns="experiment", values="cell").fillna("")
    wide = wide.reindex(index=frame["method"].unique(), columns=frame["experiment"].unique())
    wide.columns.name = None
    return wide.reset_index(allow_duplicates=True)  # an experiment may be called "method"


def unequal_runs(frame: pd.DataFrame) -> str:
    """Which means of a frame of `compare_runs` are of fewer runs than others, as a sentence; empty if none is."""
    most = frame["runs"].max()
    of_one = frame["experiment"].nunique() < 2
    fewer = [
        f"{method if of_one else f'{method} in {experiment}'} {runs}"
        for experiment, method, runs in frame[["experiment", "method", "runs"]].itertuples(index=False)
        if runs < most
    ]
    return f"The means are of {most} runs, but those of {some_of(fewer, _FEWER_NAMED)}." if fewer else ""


def is_dense(run_metrics: RunMetrics) -> bool:
    """Whether most methods are in most experiments, so that a table has a column for each experiment.

    The trials of a sweep of several methods' own options are not.
    """
    experiments, methods = ({key[place] for key in run_metrics} for place in (0, 1))
    return 2 * len(run_metrics) > len(experiments) * len(methods)


def format_table(frame: pd.DataFrame, style: str, test: str = "ttest") -> str:
    """A frame of `compare_runs` as Markdown (md), CSV (csv, all digits) or HTML (html): mean ± spread in a cell.

    test: `ChosenTest.how` of the frame.
    """
    if style == "csv":
        return str(frame.to_csv(index=False)).rstrip("\n")
    if frame.columns[0] == "method":  # of `by_experiment`
        return formatted(frame, style)
    shown = frame.drop(columns="experiment") if frame["experiment"].nunique() < 2 else frame.copy()
    for name in [name for name in frame.columns if f"{name}_std" in frame.columns]:
        spreads = zip(frame[name], frame[f"{name}_std"], strict=True)
        shown[name] = [mean_and_spread(mean, std, name) for mean, std in spreads]
        shown = shown.drop(columns=f"{name}_std")
    rivals = frame["experiment"].map(frame["experiment"].value_counts())
    cells = zip(frame["p"], frame["effect"], frame["runs"], rivals, strict=True)
    shown["p"] = [tested_in_words(*cell, EFFECTS[test]) for cell in cells]
    shown = shown.drop(columns="effect")
    return formatted(shown, style)


def formatted(shown: pd.DataFrame, style: str) -> str:
    """A frame of texts as Markdown (md) or HTML (html)."""
    if style == "html":
        return str(shown.to_html(index=False, border=0))
    lines = [shown.columns.tolist(), ["---"] * shown.shape[1], *shown.astype(str).to_numpy().tolist()]
    escaped = [[" ".join(cell.split()).replace("|", r"\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


def settings_of(experiment: Experiment) -> str:
    """Hash of the settings that results depend on, without seed and methods: equal for all runs of an experiment."""
    return experiment.model_copy(update={"seed": 0, "methods": []}).config_hash


def names_of(experiments: Sequence[tuple[str, Experiment]]) -> list[str]:
    """A name for each experiment: the given name, with the keys that distinguish it from others of that name.

    A number is added if no key distinguishes it, for example if only the content of a file differs.
    """
    settings = [_keys_that_count(experiment) for _, experiment in experiments]
    names: list[str] = []
    times: Counter[str] = Counter()
    for (name, _), own in zip(experiments, settings, strict=True):
        rivals = [other for (rival, _), other in zip(experiments, settings, strict=True) if rival == name]
        differing = [
            f"{key}={value if len(value) <= _SHOWN_LETTERS else f'{value[:_SHOWN_LETTERS]}...'}"
            for key, value in own.items()
            if any(other.get(key, "null") != value for other in rivals)
        ]
        more = [f"{len(differing) - _SHOWN_KEYS} more"] if len(differing) > _SHOWN_KEYS else []
        full = f"{name} ({', '.join([*differing[:_SHOWN_KEYS], *more])})" if differing else name
        times[full] += 1
        names.append(f"{full} ({times[full]})" if times[full] > 1 else full)
    return names


def _keys_that_count(experiment: Experiment) -> dict[str, str]:
    """The keys on which `settings_of` depends, with their values, without credentials."""
    values = flatten(experiment.to_dict_as_written())
    without = {*NOT_HASHED, "seed", "methods", *(f"data.{key}" for key in NOT_IN_RECIPE)}
    return {
        key: redact(value)
        for key, value in values.items()
        if without.isdisjoint((key, key.partition(".")[0])) or key == "runtime.precision"
    }


def values_of(result: MethodResult, round: str = "kept") -> dict[str, float]:
    """Metrics of an evaluation and of the whole run; traffic as `mbit` and wall time as `seconds`, up to this round.

    round: as in `compare_runs`. Raises ConfigError for the best round of a method that has none.
    """
    final = result.metrics_of(round)
    if round == "best" and not final:
        run = f" of {result.directory.parent}" if result.directory else ""
        raise ConfigError(f"{result.label}{run} has no best round: it keeps the models of the last one (keep)")
    mbit = final.get("mbit_down", np.nan) + final.get("mbit_up", np.nan)
    return result.numbers_until(round) | final | result.summary | {"mbit": mbit, "seconds": result.seconds_until(round)}


def chosen_metrics(run_metrics: RunMetrics, metrics: Sequence[str]) -> list[str]:
    """The metrics that a table shows. metrics: those asked for; empty: the usual ones. Raises ConfigError."""
    present = metrics_of(run_metrics)
    for name in metrics if run_metrics else ():
        if name not in present:
            raise ConfigError(f"no run has the metric {name!r}{did_you_mean(name, present)}")
    scores = dict.fromkeys(primary_of(values) for seeds in run_metrics.values() for values in seeds.values())
    endings = ("", "_local", "_honest", "_p10", "_p90")
    usual = [*(f"{score}{ending}" for score in scores for ending in endings), *map(validation_metric, scores), *_SHOWN]
    shown = list(dict.fromkeys(metrics or [name for name in usual if name in present])) or present[:3]
    return [*shown, *(name for name in ("mbit", "seconds") if name in present and name not in shown)]


def column_of(metric: str, metrics: Sequence[str]) -> str:
    """The column of a metric in a table of `metrics`: METRIC; METRIC_over_clients for METRIC_std next to METRIC.

    In such a table, METRIC_std is the spread of METRIC over the seeds.
    """
    of_clients = metric.endswith("_std") and metric.removesuffix("_std") in metrics
    return f"{metric}_over_clients" if of_clients else metric


def _row(key: tuple[str, str], of_seeds: dict[int, dict[str, float]], chosen: list[str]) -> list[Any]:
    row: list[Any] = [*key, len(of_seeds)]
    for name in chosen:
        values = np.array([values.get(name, np.nan) for values in of_seeds.values()])
        row += mean_and_std(values)
    return row


def is_less_better(metric: str, present: Collection[str] = ()) -> bool:
    """Whether lower values of a metric are better; False for a metric that is not known.

    present: metrics of the runs, which have the 90th percentile of a score of which less is better.
    """
    metric = test_metric(metric)
    if metric.endswith(("_gini", "_jain")):  # whether more or less of the score itself is better
        return metric.endswith("_gini")
    ending = r"_(local|local_trained|tuned|past|honest|p10|p90|worst_10|best_10)$"
    score = re.sub(ending, "", metric.removeprefix("newcomer_"))
    known = METRICS.builtin.get(score)
    is_error = f"{score}_p90" in present or (isinstance(known, Metric) and not known.higher_is_better)
    return is_error or metric in _LESS or metric.endswith("_std")  # the spread over clients


def tests_of(
    run_metrics: RunMetrics,
    metric: str,
    scores: ClientScores | None = None,
    test: ChosenTest = USUAL_TEST,
) -> dict[tuple[str, str], PairedTest]:
    """The test of each method against the best of its experiment or `test.against`, by (experiment, method).

    The best has the metric with every seed; of these methods, only those with the most seeds are compared. An
    experiment without the method `test.against` has no tests. scores: of the clients, for a test over clients.
    """
    values = {
        key: {seed: values_of_seed.get(metric, np.nan) for seed, values_of_seed in seeds.items()}
        for key, seeds in run_metrics.items()
    }
    best = _best_of(values, metric, metrics_of(run_metrics))
    if (against := test.against) is not None and against not in (labels := {label for _, label in values}):
        raise ConfigError(f"no run is of the method {against!r}, to test against{did_you_mean(against, labels)}")
    tested: dict[tuple[str, str], PairedTest] = {}
    for key, of_seeds in values.items():
        winner = best.get(key[0], key)
        other = winner if against is None else (key[0], against)
        pairs = ClientPairs(of_seeds, values.get(other, {}))
        if test.how == "wilcoxon":
            pairs = ClientPairs() if scores is None else scores.pairs(key, other, metric)
        run = paired_test if test.how == "ttest" else signed_rank_test
        p, effect = run(pairs.ours, pairs.theirs)
        is_best, count = key == winner and key[0] in best, common(pairs.ours, pairs.theirs)
        tested[key] = PairedTest(p, effect, count, is_best, pairs.clients, pairs.overlap)
    for experiment in dict.fromkeys(key[0] for key in tested):
        keys = [key for key in tested if key[0] == experiment]
        tested |= zip(keys, corrected([tested[key] for key in keys], test.correction), strict=True)
    return tested


def _best_of(
    values: Mapping[tuple[str, str], Mapping[int, float]], metric: str, present: Collection[str]
) -> dict[str, tuple[str, str]]:
    """The (experiment, method) with the best mean of a metric, by experiment."""
    sign = -1 if is_less_better(metric, present) else 1
    # means over fewer seeds are not comparable
    goodness = {key: (len(of_seeds), sign * np.mean(list(of_seeds.values()))) for key, of_seeds in values.items()}
    best: dict[str, tuple[str, str]] = {}
    for key, (seeds, mean) in goodness.items():
        if not np.isnan(mean) and (key[0] not in best or (seeds, mean) > goodness[best[key[0]]]):
            best[key[0]] = key
    return best


def mean_and_spread(mean: float, std: float, metric: str = "", thousands: str = "") -> str:
    """Mean and spread as text, e.g. 0.912 ± 0.004; the mean alone for a single run, empty without a mean.

    A metric of whole numbers, such as num_clusters, has a decimal, or none for a single run. thousands: separator.
    """
    if np.isnan(mean):
        return ""
    if _WHOLE.fullmatch(metric) and math.isfinite(mean):
        if math.isnan(std):
            return f"{mean:.0f}" if mean == round(mean) else f"{mean:.1f}"
        return f"{mean:.1f} ± {std:.1f}"
    return with_spread(mean, std).replace("\u00a0", " ").replace(",", thousands)
