"""Commands of `cfl-ray`. Each prints its result and the next step.

Exit status: 0 success, 1 failed run, 2 invalid input, 3 a method diverged, 130 interrupted.
"""

import io
import os
import shlex
import sys
import traceback
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

import cfl_ray
from cfl_ray.errors import ConfigError, Interrupted, RunError, RunStopped, UserError, says_where
from cfl_ray.errors.redaction import redact

if TYPE_CHECKING:  # the help text does not wait for torch
    from cfl_ray.config import Experiment
    from cfl_ray.config.study import Study
    from cfl_ray.study.plan import Selection

IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray in the entry point of a submitted job
app = typer.Typer(
    help="Clustered federated learning: groups clients with similar data and trains one model per group.",
    epilog="Start with `cfl-ray run`: it downloads nothing and takes about half a minute.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
out, err = Console(highlight=False), Console(stderr=True, highlight=False)

File = Annotated[  # as it was given: a path would take a slash out of an override, as in data.shards=s3://bucket/shards
    str | None,
    typer.Argument(help="Experiment as YAML; default: the built-in example, rotated digits.", show_default=False),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Keys of the experiment to override, e.g. rounds=50 local.lr=0.05 methods=[stocfl]",
        metavar="[SECTION.KEY=VALUE]...",
        show_default=False,
    ),
]
RunDir = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run directory, as `cfl-ray run` printed it.", show_default=False)
]


OnlySettings = Annotated[list[str] | None, typer.Option("--setting", help="Only this setting; can be repeated.")]
OnlyMethods = Annotated[list[str] | None, typer.Option("--method", help="Only this method; can be repeated.")]
OnlySeeds = Annotated[list[int] | None, typer.Option("--seed", help="Only this seed; can be repeated.")]
_STDOUT = Path("-")  # as the value of --output
_SELECTING = ("--setting", "--method", "--seed")
Selected = tuple[list[str] | None, list[str] | None, list[int] | None]  # settings, methods and seeds of a study
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Use the Python files that the run names (resume: also its cluster and MLflow server), although you did "
        "not start it on this machine.",
    ),
]


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=lambda wanted: _version(wanted))
    ] = False,
) -> None:
    """Options of the program itself; its help text is that of `app`."""


def _version(wanted: bool) -> None:
    if wanted:
        _print(f"cfl-ray {cfl_ray.__version__}")
        raise typer.Exit


@app.command(short_help="Run an experiment.")
def run(
    file: File = None,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Directory of the run; default: a new one below `output`.", show_default=False)
    ] = None,
    in_process: Annotated[
        bool,
        typer.Option("--in-process", help="Run in this process without Ray, for debugging; the results are the same."),
    ] = False,
    replay: Annotated[
        Path | None,
        typer.Option(
            help="Another run of this config, whose requests to join and leave are repeated in the same rounds.",
            show_default=False,
        ),
    ] = None,
    extend: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="A run of this config with fewer rounds: this one begins with a copy of them.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run an experiment: all its methods, with live progress and a table of results at the end."""
    from cfl_ray.cli.progress import Display
    from cfl_ray.runtime import launch

    experiment = _load(file, overrides)
    with Display(out, experiment.rounds) as display:
        if in_process:
            results = launch.simulate(experiment, run_dir or launch.new_run_dir(experiment), display, replay, extend)
        else:
            results = launch.run(experiment, run_dir, display, replay, extend)
    display.finish(results)


@app.command(short_help="Resume a run or a study.")
def resume(run_dir: RunDir, trust: Trust = False) -> None:
    """Resume a run that was stopped or has died, from its last checkpoint.

    RUN may be the folder of a study: its unfinished runs continue, and those that failed are tried again.
    """
    from cfl_ray.cli.progress import Display
    from cfl_ray.results.load import finished_results
    from cfl_ray.results.run_record import check_not_edited
    from cfl_ray.results.trust import load_record, load_study_record
    from cfl_ray.run_directory import RunDirectory
    from cfl_ray.runtime import launch

    if RunDirectory(run_dir).is_study:
        _is_trusted(lambda: load_study_record(run_dir), trust)
        _run_study(_study(RunDirectory(run_dir).study, None), run_dir, (None, None, None), None, dry_run=False)
        return
    RunDirectory(run_dir).require_run()
    trust = _is_trusted(lambda: load_record(run_dir), trust)
    experiment = load_record(run_dir, trust)
    check_not_edited(RunDirectory(run_dir), experiment)
    display = Display(out, experiment.rounds)
    results = finished_results(run_dir, experiment)
    if results is not None:
        _print(f"{run_dir} is finished: nothing is left to do.")
        _deliver_earlier_results(experiment)
        display.show(results)
        return
    with display:
        results = launch.resume(run_dir, watcher=display, trust=trust)
    display.finish(results)


@app.command(short_help="Show the progress of a run or a study.")
def status(
    run_dir: RunDir, as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False
) -> None:
    """Show the progress of a run: round, accuracy, clusters, hosts, clients online and last fault.

    For a run that is not live it also shows the command that resumes it. RUN may be the folder of a study; then it
    shows how many of its runs are finished and left, which are live, and why others failed.
    """
    import dataclasses
    import json

    from cfl_ray.cli import live_client, tables
    from cfl_ray.run_directory import RunDirectory
    from cfl_ray.study.status import study_status

    found = study_status(run_dir) if RunDirectory(run_dir).is_study else live_client.status(run_dir)
    if as_json:
        _print(json.dumps(dataclasses.asdict(found), indent=1))
    elif isinstance(found, live_client.RunStatus):
        tables.show_status(found, out)
    else:
        tables.show_study_status(found, out)


@app.command(short_help="Let clients join a live run.")
def join(
    run_dir: RunDir,
    clients: Annotated[
        list[str] | None,
        typer.Argument(
            help="Known clients that are offline, as ids or ranges, e.g. 7 0-9.",
            metavar="[CLIENT]...",
            show_default=False,
        ),
    ] = None,
    shards: Annotated[
        str | None,
        typer.Option(help="Shards of newcomers, as `cfl-ray prepare` wrote them: a path or URI.", show_default=False),
    ] = None,
) -> None:
    """Let clients join a live run before its next round: known clients that are offline, or newcomers (--shards)."""
    from cfl_ray.cli import live_client
    from cfl_ray.config.client_ids import parse_ids

    if (shards is None) == (not clients):
        raise ConfigError(
            "join: name either clients of the federation or, with --shards, the location of the newcomers' shards"
        )
    if shards is None:
        _print(live_client.ask(run_dir, "join", parse_ids(clients or ())))
        return
    location = shards if "://" in shards else os.path.abspath(Path(shards).expanduser())
    _print(live_client.ask(run_dir, "join_shards", location))


@app.command(short_help="Let clients leave a live run.")
def leave(
    run_dir: RunDir,
    clients: Annotated[
        list[str], typer.Argument(help="Ids or ranges, e.g. 7 0-9.", metavar="CLIENT...", show_default=False)
    ],
) -> None:
    """Let clients leave a live run before its next round; their client state is dropped."""
    from cfl_ray.cli import live_client
    from cfl_ray.config.client_ids import parse_ids

    _print(live_client.ask(run_dir, "leave", parse_ids(clients)))


@app.command(short_help="Stop a live run after its current round.")
def stop(run_dir: RunDir) -> None:
    """Stop a live run after its current round, which is saved; `cfl-ray resume` resumes it."""
    from cfl_ray.cli import live_client

    _print(live_client.ask(run_dir, "stop"))


@app.command(short_help="Validate an experiment and estimate its cost.")
def check(
    file: File = None,
    overrides: Overrides = None,
    as_yaml: Annotated[
        bool, typer.Option("--yaml", help="Print only the whole resolved config, as a file for `cfl-ray run`.")
    ] = False,
    trust: Annotated[bool, typer.Option("--trust", help="Also import Python files of other users.")] = False,
    settings: OnlySettings = None,
    methods: OnlyMethods = None,
    seeds: OnlySeeds = None,
) -> None:
    """Validate an experiment and print what differs from the defaults, sizes, expected memory and traffic.

    Trains nothing, and refuses what `cfl-ray run` refuses. It imports the Python files that the config names
    (file.py:Name), and tries the parts in them on random numbers. FILE may be a study: then all its runs are validated,
    or those that --setting, --method and --seed select, and sizes and traffic are printed for every setting.
    """
    from cfl_ray.cli import estimate, tables
    from cfl_ray.config.study import is_study_file

    if file is not None and _is_file(file) and is_study_file(file):
        _check_study(_study(Path(file), overrides), Path(file), overrides, (settings, methods, seeds), as_yaml, trust)
        return
    if settings or methods or seeds:
        raise ConfigError("--setting, --method and --seed select runs of a study; an experiment is one run")
    experiment = _load(file, overrides, asks=not trust)
    found = estimate.estimate(experiment)
    if as_yaml:
        _print(experiment.to_yaml().rstrip())
        return
    tables.show_differences(experiment, out)
    estimate.show(found, out)
    _print(f"The config is valid. Run it with: {_command('run', file, *(overrides or ()))}")


def _check_study(
    study: "Study", file: Path, overrides: list[str] | None, only: Selected, as_yaml: bool, trust: bool
) -> None:
    from cfl_ray.cli import estimate
    from cfl_ray.results.trust import check_owners
    from cfl_ray.study.run import plan_study
    from cfl_ray.tracking import redact

    if not trust:
        _is_trusted(lambda: check_owners(study))
    cells, root = plan_study(study, only=_selection(only))
    found = estimate.estimate_study(cells)
    if as_yaml:
        _print(redact(study.to_yaml()).rstrip())
        return
    estimate.show_study(found, study, len({cell.seed for cell in cells}), root, out)
    verb = "sweep" if study.sweep else "compare"
    options = [(option, one) for option, chosen in zip(_SELECTING, only, strict=True) for one in chosen or ()]
    selected = [str(word) for pair in options for word in pair]
    _print(redact(f"The study is valid. Run it with: {_command(verb, file, *selected, *(overrides or ()))}"))


@app.command(name="config", short_help="List the keys of an experiment, or explain one.")
def explain(
    key: Annotated[
        str | None,
        typer.Argument(help="A section or a key, e.g. local or local.lr; default: all.", show_default=False),
    ] = None,
) -> None:
    """List the keys of an experiment with their meaning, values and defaults: all, those of a section, or one."""
    from cfl_ray.cli.tables import show_keys
    from cfl_ray.config import keys

    show_keys(keys.find(key) if key else list(keys.sections()), out)


@app.command(short_help="List the methods, or the options of one.")
def methods(
    name: Annotated[str | None, typer.Argument(help="A method whose options are shown.", show_default=False)] = None,
) -> None:
    """List the methods, or the options of one method with their defaults and meaning."""
    from cfl_ray.cli import tables
    from cfl_ray.methods import REGISTRY, find

    if name is None:
        tables.list_methods(REGISTRY, out)
    else:
        tables.describe_method(find(name), out, name)


@app.command(name="list", short_help="List data sets, models, shifts, trackers ... with their parameters.")
def list_parts(
    kind: Annotated[
        str | None, typer.Argument(help="A kind of part, e.g. models; default: all kinds.", show_default=False)
    ] = None,
) -> None:
    """List the kinds of parts of an experiment; or the parts of one kind, with parameters and how to add your own."""
    from cfl_ray.cli import tables
    from cfl_ray.cli.catalogue import KINDS, OTHER_NAMES
    from cfl_ray.errors import did_you_mean

    if kind is None:
        tables.list_kinds(KINDS, out)
    elif kind in KINDS:
        tables.list_parts(KINDS[kind], out)
    else:
        near = f" (did you mean {OTHER_NAMES[kind]!r}?)" if kind in OTHER_NAMES else did_you_mean(kind, KINDS)
        raise ConfigError(f"unknown kind {kind!r}{near}")


StudyFile = Annotated[
    Path, typer.Argument(metavar="STUDY", help="Study as YAML (docs/studies.md).", show_default=False)
]
StudyOverrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Keys to override in the experiment of every run, e.g. rounds=20",
        metavar="[SECTION.KEY=VALUE]...",
        show_default=False,
    ),
]
StudyFolder = Annotated[
    Path | None,
    typer.Option("--folder", help="Folder of the study; default: its name below `output`.", show_default=False),
]
AtOnce = Annotated[
    int | None,
    typer.Option(
        "--at-once",
        min=1,
        help="Largest number of parallel runs; default: as many as there is room for.",
        show_default=False,
    ),
]
Extend = Annotated[
    Path | None,
    typer.Option(
        "--extend",
        metavar="FOLDER",
        help="The folder of this study with fewer rounds: runs begin with a copy of those there.",
        show_default=False,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List the runs and which of them are finished; run nothing.")]


@app.command(short_help="Run a study: methods x settings x seeds.")
def compare(
    file: StudyFile,
    overrides: StudyOverrides = None,
    folder: StudyFolder = None,
    at_once: AtOnce = None,
    settings: OnlySettings = None,
    methods: OnlyMethods = None,
    seeds: OnlySeeds = None,
    extend: Extend = None,
    dry_run: DryRun = False,
) -> None:
    """Run a study: every method in every setting with every seed, and print tables of mean ± standard deviation.

    Runs are parallel, as many as the machine or the Ray cluster has room for. Finished runs in the folder are not
    repeated, and stopped ones continue.
    """
    study = _study(file, overrides)
    if study.sweep is not None:
        raise ConfigError(f"{file} is a sweep; run it with: {_command('sweep', file, *(overrides or ()))}")
    _run_study(study, folder, (settings, methods, seeds), at_once, dry_run, extend)


@app.command(short_help="Run a study over values of any keys: grid, random or Optuna.")
def sweep(
    file: StudyFile,
    overrides: StudyOverrides = None,
    folder: StudyFolder = None,
    at_once: AtOnce = None,
    settings: OnlySettings = None,
    methods: OnlyMethods = None,
    seeds: OnlySeeds = None,
    extend: Extend = None,
    dry_run: DryRun = False,
) -> None:
    """Run a study over values of any keys: a grid, random values, or values that Optuna suggests from earlier results.

    It ends with the trials, best first. Otherwise like `compare`.
    """
    study = _study(file, overrides)
    if study.sweep is None:
        raise ConfigError(f"{file} has no `sweep`; run it with: {_command('compare', file, *(overrides or ()))}")
    _run_study(study, folder, (settings, methods, seeds), at_once, dry_run, extend)


def _study(file: Path, overrides: list[str] | None) -> "Study":
    from cfl_ray.config.study import load_study

    return load_study(file, overrides or (), _base())


def _selection(only: Selected) -> "Selection":
    from cfl_ray.study.plan import Selection

    settings, methods, seeds = only
    return Selection(settings or (), methods or (), seeds or ())


def _run_study(
    study: "Study",
    folder: Path | None,
    only: Selected,
    at_once: int | None,
    dry_run: bool,
    extend: Path | None = None,
) -> None:
    from cfl_ray.cli.study_progress import StudyDisplay
    from cfl_ray.study.run import plan_study, run_study

    selection = _selection(only)
    folder, extend = (None if one is None else (_base() or Path()) / one for one in (folder, extend))
    if dry_run:
        cells, root = plan_study(study, folder, selection)
        for cell in cells:
            _print(f"{cell.name}{': finished' if cell.is_finished(root) else ''}")
        learns = study.sweep is not None and study.sweep.sampler == "tpe"
        _print(f"{len(cells)} runs{' at the ends of the ranges' * learns}; folder: {root}")
        return
    learns = study.sweep is not None and study.sweep.sampler == "tpe"
    with StudyDisplay(out, learns) as display:
        results = run_study(study, folder, selection, at_once, display, extend)
    display.finish(results)
    if results.failed:
        raise RunError(f"{len(results.failed)} of the runs are not finished; the same command tries them again")


@app.command(short_help="Compare the methods of runs over seeds.")
def table(
    run_dirs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs or studies.", show_default=False)
    ],
    metric: Annotated[
        list[str] | None, typer.Option(help="Metric to show; can be repeated.", show_default=False)
    ] = None,
    style: Annotated[str, typer.Option("--format", help="md, csv, latex or html.")] = "md",
    trust: Trust = False,
) -> None:
    """Print a table of the methods of some runs: mean and standard deviation over seeds.

    Runs that differ only in the seed are one experiment; so are those of one setting of a study. With a single
    --metric, several experiments are columns. p is the p-value of a paired t-test against the best method, with three
    seeds or more.
    """
    from cfl_ray.results.comparison import FORMATS, by_experiment, compare_runs, format_table
    from cfl_ray.run_directory import RunDirectory
    from cfl_ray.run_directory.lock import command

    if style not in FORMATS:
        raise ConfigError(f"--format must be one of {', '.join(FORMATS)}, got {style!r}")
    for run_dir in run_dirs:
        if not RunDirectory(run_dir).is_study:
            trust = _may_import(run_dir, trust)
    frame = compare_runs(run_dirs, metric or (), trust)
    if frame.empty:
        raise ConfigError(
            f"no method of {', '.join(map(str, run_dirs))} has been evaluated yet; see its progress with: "
            f"{command('status', run_dirs[0])}"
        )
    if metric and len(metric) == 1 and frame["experiment"].nunique() > 1 and style != "csv":
        frame = by_experiment(frame, metric[0])
    print(format_table(frame, style))


@app.command(short_help="Write the report of runs: one HTML page.")
def report(
    run_dirs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders of runs or studies, or folders above them.", show_default=False),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="File of the page; -: standard output.")] = Path(
        "report.html"
    ),
    against: Annotated[
        Path | None, typer.Option(help="File of published tables (YAML) to compare with.", show_default=False)
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(
            help="Column of the published tables for runs that are not of a study; not needed where there is only one.",
            show_default=False,
        ),
    ] = None,
    trust: Trust = False,
) -> None:
    """Write the report of some runs, or of a study: settings, a table and figures in one self-contained HTML page.

    Runs that differ only in the seed are one experiment: curves and the table show the mean over its seeds.
    """
    from cfl_ray.results.reporting import report_page, write_report
    from cfl_ray.run_directory import RunDirectory

    for run_dir in run_dirs:
        if RunDirectory(run_dir).is_run:
            trust = _may_import(run_dir, trust)
    if output == _STDOUT:
        sys.stdout.buffer.write(report_page(run_dirs, against, column, trust).encode())
        return
    path = write_report(run_dirs, output, against, column, trust)
    _print(f"{path} ({path.stat().st_size / 1e6:.1f} MB); it opens in a browser, without a network")


@app.command(short_help="Write a trained model to a file.")
def export(
    run_dir: RunDir,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="File: .safetensors, .pt or .onnx.", show_default=False)
    ],
    method: Annotated[
        str | None, typer.Option(help="Method of the run; not needed where it has only one.", show_default=False)
    ] = None,
    cluster: Annotated[
        int | None, typer.Option(help="Cluster whose model is written.", min=0, show_default=False)
    ] = None,
    client: Annotated[
        int | None, typer.Option(help="Client whose model is written instead.", min=0, show_default=False)
    ] = None,
    trust: Trust = False,
) -> None:
    """Write the model of a cluster, or the one that a client predicts with, to a file. The run may still be live."""
    from cfl_ray.results.export import export_model
    from cfl_ray.runtime.load import load_run

    if output == _STDOUT:
        raise ConfigError("a model is not written to standard output: name a file; its ending is the format")
    results = load_run(run_dir, trust=_may_import(run_dir, trust))
    if method is None and len(results.methods) > 1:
        raise ConfigError(f"the run has several methods; name one with --method: {', '.join(results.methods)}")
    trained = results.method(method or next(iter(results.methods))).trained
    _print(export_model(trained, output, cluster, client))


@app.command(short_help="Write the shards of a federation.")
def prepare(file: File = None, overrides: Overrides = None) -> None:
    """Write the clients' data of an experiment as shards; existing shards are reused."""
    from cfl_ray.cli.progress import Display
    from cfl_ray.data.from_config import with_shards
    from cfl_ray.runtime.prepare import prepare as prepare_setup
    from cfl_ray.runtime.prepare import shards_folder

    experiment = _load(file, overrides)
    with Display(out, experiment.rounds) as display:
        federation = prepare_setup(experiment, display.preparing).federation
    uri = getattr(federation, "uri", None)
    if uri is None:
        name = experiment.data.source.rpartition(":")[2] or "arrays"
        uri = with_shards(federation.at(0), name, shards_folder(experiment)).uri
    samples_N = federation.num_samples_N
    _print(
        f"{federation.num_clients} clients, {samples_N.min()} to {samples_N.max()} training samples each, "
        f"{federation.shape.targets_in_words}"
    )
    _print(f"Shards: {uri}")
    _print(f"Next: {_command('run', file, *(overrides or ()))}")


def _load(file: str | None, overrides: list[str] | None, asks: bool = False) -> "Experiment":
    """Returns the experiment. A first argument with `=` that is no file is an override of the built-in example.

    asks: before a Python file of another user is imported.
    """
    from cfl_ray import config
    from cfl_ray.methods import resolve
    from cfl_ray.results.trust import check_owners

    changes = list(overrides or ())
    if file is not None and "=" in file and not _is_file(file):
        changes = [file, *changes]
        file = None
    experiment = config.load(file, changes)
    if asks:
        _is_trusted(lambda: check_owners(experiment))
    resolve(experiment.methods)
    if (base := _base()) is not None and not Path(experiment.output).is_absolute():
        experiment = experiment.model_copy(update={"output": str(base / experiment.output)})
    _deliver_earlier_results(experiment)
    return experiment


def _is_file(argument: str) -> bool:
    """Whether an argument names a file; an override may be longer than names of files are."""
    try:
        return Path(argument).is_file()
    except OSError:
        return False


def _may_import(run_dir: Path, trust: bool) -> bool:
    """Whether the user trusts the files that a run names; False where there is nothing to ask."""
    from cfl_ray.results.trust import load_record
    from cfl_ray.run_directory import RunDirectory

    RunDirectory(run_dir).require_run()
    return _is_trusted(lambda: load_record(run_dir, connects=False), trust)


def _is_trusted(check: Callable[[], object], trust: bool = False) -> bool:
    """Whether the user trusts what `check` refuses: by the option, or asked on a terminal."""
    from cfl_ray.results.trust import UntrustedError

    if not trust:
        try:
            check()
        except UntrustedError as error:
            if not sys.stdin.isatty():
                raise
            _warn(f"warning: {error}")
            if not typer.confirm("Trust it?", err=True):
                raise
            return True
    return trust


def _base() -> Path | None:
    """Returns the folder that a relative `output` is in; None: the working directory.

    The working directory of a submitted job is a copy that is deleted with the job.
    """
    return Path.home() if IN_JOB in os.environ else None


def _command(*parts: object) -> str:
    """Returns a command that can be pasted into a shell; a part that is None is left out."""
    return shlex.join(["cfl-ray", *(str(part) for part in parts if part is not None)])


def _deliver_earlier_results(experiment: "Experiment") -> None:
    from cfl_ray.tracking import deliver_pending, resolve_uri

    if not experiment.tracking.uses_mlflow:
        return
    uri = resolve_uri(experiment.tracking, experiment.output)
    for delivered in deliver_pending(experiment.output, uri, warn=_warn):
        _print(f"Delivered {delivered.rounds} rounds of {delivered.run_dir} to MLflow, which was out of reach before.")


def _print(text: str) -> None:
    out.print(redact(text), markup=False, soft_wrap=True)


def _warn(text: str) -> None:
    err.print(redact(text), markup=False, soft_wrap=True)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line. Every error becomes one message and an exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # of characters that the terminal lacks, such as the sign of a spread
    try:
        app(arguments, standalone_mode=True)
    except RunStopped as stopped:
        _print(str(stopped))
    except UserError as error:
        _fail(str(error), error.exit_status)
    except KeyboardInterrupt as error:  # possibly a second Ctrl-C, while the first one ends the run
        _fail(_message_of_interruption(error) or "stopped", Interrupted.exit_status)
    except OSError as error:
        _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 1)
    except Exception as error:
        if os.environ.get("CFL_RAY_DEBUG"):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        location = "" if says_where(error) else f" ({Path(frame.filename).name}, line {frame.lineno})"
        notes = "".join(f"; {note}" for note in getattr(error, "__notes__", []))
        _fail(f"{type(error).__name__}: {error}{location}{notes}; set CFL_RAY_DEBUG=1 for the whole traceback", 1)


def _message_of_interruption(error: BaseException | None) -> str | None:
    """Returns the message of the Interrupted during which `error` was raised; None if there is none."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return str(error) if error else None


def _fail(message: str, status: int) -> None:
    err.print(redact(f"error: {message}"), markup=False, soft_wrap=True, style="red")
    if status == Interrupted.exit_status and ("ray" in sys.modules or active_children()):
        # Without the exit handlers, which may wait for processes; those of Ray and of a study end when this one does.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
