"""The commands for the results of runs: `table`, `report`, `figure` and `export`."""

import html
import sys
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cfl_ray.cli.console import say, warn
from cfl_ray.cli.inputs import STDOUT, Code, RunDir, Trust, check_code, check_runs, place
from cfl_ray.errors import ConfigError, command

if TYPE_CHECKING:
    from cfl_ray.report.report_data import ReportedExperiment
    from cfl_ray.results.client_scores import ClientScores
    from cfl_ray.results.comparison import RunMetrics
    from cfl_ray.results.significance import ChosenTest


RunDirs = Annotated[
    list[Path],
    typer.Argument(
        parser=place, metavar="RUN...", help="Folders of runs or studies, or folders above them.", show_default=False
    ),
]


def table(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(parser=place, metavar="RUN...", help="Folders of runs or studies.", show_default=False),
    ],
    metric: Annotated[
        list[str] | None, typer.Option(help="Metric to show; can be repeated.", show_default=False)
    ] = None,
    style: Annotated[str, typer.Option("--format", help="md, csv, latex or html.")] = "md",
    of_round: Annotated[
        str,
        typer.Option(
            "--round",
            help="The evaluation that is shown: kept (of the round whose models are kept: the best with keep: best, "
            "otherwise the last), best or last.",
        ),
    ] = "kept",
    test: Annotated[
        str, typer.Option(help="ttest: paired t-test over seeds; wilcoxon: signed-rank test over clients.")
    ] = "ttest",
    correction: Annotated[str, typer.Option(help="none, or holm: Holm's correction over methods.")] = "none",
    against: Annotated[
        str | None,
        typer.Option(help="The method against which the others are tested; default: the best.", show_default=False),
    ] = None,
    p_values: Annotated[
        bool, typer.Option("--p-values", help="With --format latex: a column of p-values after each metric.")
    ] = False,
    best_trials: Annotated[
        bool, typer.Option("--best-trials", help="Of a sweep: each method with its best trial, as one experiment.")
    ] = False,
    classes: Annotated[
        bool,
        typer.Option("--classes", help="Print the accuracy of each class, of all clients and of each cluster's."),
    ] = False,
    confusion: Annotated[
        bool, typer.Option("--confusion", help="Print the confusion matrix of all clients and of each cluster's.")
    ] = False,
    trust: Trust = False,
    code: Code = None,
) -> None:
    """Print a table of the methods of some runs: mean and standard deviation over seeds.

    Runs that differ only in the seed form an experiment, as do the runs of a setting of a study. With a single
    --metric and without --against, several experiments are columns, unless most methods lack most of them. p is the
    p-value of a test against the best method, or --against another: of a paired t-test, with three seeds or more, or of
    Wilcoxon's signed-rank test over clients. LaTeX tables name the test.

    --classes and --confusion print tables of classes instead, of runs with evaluation.confusion: true.
    """
    from cfl_ray.results.class_tables import accuracy_tables, confusion_tables, recorded_classes
    from cfl_ray.results.comparison import FORMATS, ROUNDS, of_best_trials, rounds_in_words, unfinished_in_words
    from cfl_ray.results.significance import ChosenTest
    from cfl_ray.run_directory import RunDirectory
    from cfl_ray.study.status import left_out_of

    metrics = metric or []
    _check_word("--format", style, FORMATS)
    _check_word("--round", of_round, ROUNDS)
    chosen = ChosenTest(test, correction, against)
    _check_together(style, metrics, against, p_values, classes, confusion)
    if best_trials and len(run_dirs) > 1:
        raise ConfigError("--best-trials is of a single sweep; name one folder")
    run_metrics, scores = _evaluated(run_dirs, metrics, of_round, trust, code)
    tried: dict[tuple[str, str], str] = {}
    if best_trials:
        run_metrics, scores, tried = of_best_trials(run_dirs[0], run_metrics, scores)
    of_trials = [f"{name}: {values}" for (_, name), values in tried.items()]
    best = "" if of_round == "last" else rounds_in_words(run_metrics)
    studies = [folder for folder in run_dirs if RunDirectory(folder).is_study]
    unfinished = " ".join(filter(None, [unfinished_in_words(scores.results), *map(left_out_of, studies)]))
    if unfinished and (classes or confusion or style == "csv"):
        warn(unfinished)
    if classes or confusion:
        tables = accuracy_tables if classes else confusion_tables
        print(tables(recorded_classes(scores.results, of_round), style))
    elif style == "latex":
        from cfl_ray.results.latex_table import latex_table

        print("".join(f"% {line}\n" for line in [*of_trials, *filter(None, [unfinished])]), end="")
        print(latex_table(run_metrics, metrics, scores, chosen, p_values, bool(best)))
    else:
        notes = [*filter(None, [f"Of {best}." if best else "", unfinished])]
        notes += ["The best trial of each method: " + "; ".join(of_trials)] if of_trials else []
        _print_table(run_metrics, scores, metrics, style, chosen, notes)


def _evaluated(
    run_dirs: list[Path], metrics: list[str], of_round: str, trust: bool, code: str | None
) -> "tuple[RunMetrics, ClientScores]":
    """The metrics of the runs, and their scores. Raises ConfigError if none is there yet."""
    from cfl_ray.results.comparison import collected
    from cfl_ray.run_directory import RunDirectory

    runs = [run_dir for run_dir in run_dirs if not RunDirectory(run_dir).is_study]
    check_runs(runs, trust)
    found = collected(run_dirs, metrics, trust, of_round, code)
    if not found[0]:
        named = ", ".join(map(str, run_dirs))
        with_study = len(runs) < len(run_dirs)
        what = f"no run of {named} is finished" if with_study else f"no method of {named} has been evaluated"
        raise ConfigError(f"{what} yet; see its progress with: {command('status', run_dirs[0])}")
    return found


def _check_word(option: str, value: str, known: Collection[str]) -> None:
    """Raises ConfigError for an unknown value of an option."""
    if value not in known:
        raise ConfigError(f"{option} must be one of {', '.join(known)}, got {value!r}")


def _check_together(
    style: str, metrics: list[str], against: str | None, p_values: bool, classes: bool, confusion: bool
) -> None:
    """Raises ConfigError for options of `table` that exclude each other."""
    if p_values and style != "latex":
        raise ConfigError(f"--p-values is an option of --format latex, got --format {style}, which has the column p")
    if (classes and confusion) or ((classes or confusion) and metrics):
        raise ConfigError("--classes, --confusion and --metric are different tables; give one of them")
    if against is not None and (style == "latex" or classes or confusion):
        raise ConfigError("--against is of the column p of a table of metrics as md, csv or html")
    if p_values and (classes or confusion):
        raise ConfigError("--p-values is of a table of metrics, not of --classes or --confusion")


def _print_table(
    run_metrics: "RunMetrics",
    scores: "ClientScores",
    metrics: list[str],
    style: str,
    test: "ChosenTest",
    notes: list[str],
) -> None:
    """Prints the table of metrics in another format than LaTeX, and below it the notes, and one on the test."""
    from cfl_ray.results.comparison import (
        by_experiment,
        chosen_metrics,
        format_table,
        is_dense,
        table_of,
        tests_of,
        unequal_runs,
    )
    from cfl_ray.results.significance import USUAL_TEST, tests_in_words

    frame = table_of(run_metrics, metrics, scores, test)
    several = len(metrics) == 1 and test.against is None and frame["experiment"].nunique() > 1
    if is_wide := several and style != "csv" and is_dense(run_metrics):
        notes = [*filter(None, [unequal_runs(frame)]), *notes]
        frame = by_experiment(frame, str(frame.columns[3]))
    print(format_table(frame, style, test.how))
    if style == "csv":
        return
    if test != USUAL_TEST and not is_wide:
        first = chosen_metrics(run_metrics, metrics)[0]
        tested = tests_of(run_metrics, first, scores, test).values()
        notes = [*notes, tests_in_words(test, [*tested])]
    for note in notes:
        print(f"<p>{html.escape(note)}</p>" if style == "html" else f"\n{note}")


def report(
    run_dirs: RunDirs,
    output: Annotated[
        Path, typer.Option("--output", "-o", parser=place, metavar="PATH", help="File of the page; -: standard output.")
    ] = Path("report.html"),
    against: Annotated[
        Path | None, typer.Option(help="File of published tables (YAML) to compare with.", show_default=False)
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(
            help="Column of the published tables for runs that are not of a study; not needed if there is only one.",
            show_default=False,
        ),
    ] = None,
    trust: Trust = False,
    code: Code = None,
) -> None:
    """Write the report of some runs, or of a study: settings, a table and figures in one self-contained HTML page.

    Runs that differ only in the seed form an experiment: curves and the table show the mean over its seeds.
    """
    from cfl_ray.results.reporting import report_page, write_report
    from cfl_ray.run_directory import RunDirectory

    check_runs((run_dir for run_dir in run_dirs if RunDirectory(run_dir).is_run), trust)
    if output == STDOUT:
        sys.stdout.buffer.write(report_page(run_dirs, against, column, trust, code).encode())
        return
    path = write_report(run_dirs, output, against, column, trust, code)
    say(f"{path} ({path.stat().st_size / 1e6:.1f} MB); it opens in a browser, without a network")


def figure(
    run_dirs: RunDirs,
    output: Annotated[
        Path, typer.Option("--output", "-o", parser=place, metavar="PATH", help="Folder of the files.")
    ] = Path("figures"),
    style: Annotated[str, typer.Option("--format", help="pdf or svg.")] = "pdf",
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="Metric to draw; can be repeated. Default: the score of the task, on test data and, if there are any, "
            "on validation data.",
            show_default=False,
        ),
    ] = None,
    x: Annotated[str, typer.Option(help="Axis of the curves: round, mbit or virtual_seconds.")] = "round",
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="Method whose clusters are drawn; can be repeated. Default: all that have clusters.",
            show_default=False,
        ),
    ] = None,
    round: Annotated[
        int | None, typer.Option(min=1, help="Round of the clusters; default: the last one.", show_default=False)
    ] = None,
    width: Annotated[float, typer.Option(min=1, max=40, help="Width in inches; 3.3 is 84 mm, a column.")] = 3.3,
    trust: Trust = False,
) -> None:
    """Draw figures for a paper: curves of metrics, and which client is in which cluster.

    Runs that differ only in the seed form an experiment: curves are means over its seeds, with a band of one standard
    deviation. The same runs give the same bytes.
    """
    from cfl_ray.report.paper_figures import FORMATS, X_AXES, write_curves, write_matrix
    from cfl_ray.results.recorded_runs import find_runs
    from cfl_ray.results.reporting import report_of
    from cfl_ray.run_directory import RunDirectory

    _check_word("--format", style, FORMATS)
    _check_word("--x", x, X_AXES)
    check_runs((run_dir for run_dir in run_dirs if RunDirectory(run_dir).is_run), trust)
    experiments = report_of(find_runs(run_dirs, trust)).experiments
    if not experiments:
        raise ConfigError(f"no method of {', '.join(map(str, run_dirs))} has been evaluated yet")
    output.mkdir(parents=True, exist_ok=True)
    for experiment in experiments:
        prefix = f"{experiment.name}_" if len(experiments) > 1 else ""
        for name in metric or _curves_of(experiment):
            say(str(write_curves(output, experiment, name, x, width, style, prefix)))
        clustered = [label for label, runs in experiment.methods.items() if any(run.is_clustered for run in runs)]
        for label in method or clustered:
            say(str(write_matrix(output, experiment, label, width, style, round, prefix)))


def _curves_of(experiment: "ReportedExperiment") -> list[str]:
    """The metrics that are drawn by default."""
    from cfl_ray.tracking.record import validation_metric

    on_validation = validation_metric(experiment.score)
    runs = [run for of_seeds in experiment.methods.values() for run in of_seeds]
    has_validation = any(on_validation in record.metrics for run in runs for record in run.records)
    return [experiment.score, *([on_validation] if has_validation else [])]


def export(
    run_dir: RunDir,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", parser=place, metavar="PATH", help="File: .safetensors, .pt or .onnx.", show_default=False
        ),
    ],
    method: Annotated[
        str | None, typer.Option(help="Method of the run; not needed if it has only one.", show_default=False)
    ] = None,
    cluster: Annotated[
        int | None, typer.Option(help="Cluster whose model is written.", min=0, show_default=False)
    ] = None,
    client: Annotated[
        int | None, typer.Option(help="Client whose model is written instead.", min=0, show_default=False)
    ] = None,
    trust: Trust = False,
    code: Code = None,
) -> None:
    """Write the model of a cluster, or the model that a client predicts with, to a file. The run may be live."""
    from cfl_ray.lifecycle.load import load_run
    from cfl_ray.results.export import export_model
    from cfl_ray.results.trust import load_record
    from cfl_ray.run_directory import RunDirectory

    if output == STDOUT:
        raise ConfigError("a model is not written to standard output: name a file; its ending is the format")
    RunDirectory(run_dir).require_run()
    check_code(partial(load_record, run_dir), trust)
    results = load_run(run_dir, trust=trust, code=code)
    if method is None and len(results.methods) > 1:
        raise ConfigError(f"the run has several methods; name one with --method: {', '.join(results.methods)}")
    trained = results.method(method or next(iter(results.methods))).trained
    say(export_model(trained, output, cluster, client))
