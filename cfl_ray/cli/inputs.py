"""Input of commands: arguments of several commands, experiments, and consent to import files of other users."""

import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cfl_ray.cli.console import say, warn

if TYPE_CHECKING:  # the help text does not wait for torch
    from cfl_ray.config import Experiment

IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray in the entry point of a submitted job
STDOUT = Path("-")  # as the value of --output


def output_base() -> Path | None:
    """Returns the folder that a relative `output` is in; None: the working directory.

    The working directory of a submitted job is a copy that is deleted with the job.
    """
    return Path.home() if os.environ.get(IN_JOB) else None


def place(argument: str | Path) -> Path:
    """The file or folder of results that an argument names. In a submitted job it is relative to `output_base`."""
    path, base = Path(argument), output_base()
    return path if base is None or path == STDOUT else base / path


RunDir = Annotated[
    Path,
    typer.Argument(parser=place, metavar="RUN", help="Run directory, as `cfl-ray run` printed it.", show_default=False),
]
File = Annotated[  # str: a Path would drop a slash of an override such as data.shards=s3://bucket/shards
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
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Use code that is not yours: of a run or a study that you did not start on this machine (and its cluster "
        "and MLflow server), or of another user. It is asked for once.",
    ),
]
Code = Annotated[
    str | None,
    typer.Option(
        "--code",
        metavar="run|now",
        help="If Python files were edited or are gone since the run began: run, the copy in its directory (the "
        "default), or now, the present files.",
        show_default=False,
    ),
]
InProcess = Annotated[
    bool,
    typer.Option("--in-process", help="Run in this process without Ray, for debugging; the results are the same."),
]
OnlySettings = Annotated[list[str] | None, typer.Option("--setting", help="Only this setting; can be repeated.")]
OnlyMethods = Annotated[list[str] | None, typer.Option("--method", help="Only this method; can be repeated.")]
OnlySeeds = Annotated[list[int] | None, typer.Option("--seed", help="Only this seed; can be repeated.")]


def load_experiment(
    file: str | None,
    overrides: list[str] | None,
    trust: bool = False,
    extend: Path | None = None,
    code: str | None = None,
) -> "Experiment":
    """Returns the experiment. A first argument with `=` that is no file is an override of the built-in example.

    trust: whether the user trusts code that is not the user's own. extend: the run that it goes on from, whose copy of
    the code takes the place of files that were edited or are gone; so does that of a run whose record `file` is, for
    files that are gone. code: as in `load_run`.
    """
    from cfl_ray import config
    from cfl_ray.methods import resolve
    from cfl_ray.results.kept_code import with_code_of, with_code_of_record
    from cfl_ray.results.trust import check_config, load_record
    from cfl_ray.run_directory import RunDirectory

    changes = list(overrides or ())
    if file is not None and "=" in file and not is_file(file):
        changes = [file, *changes]
        file = None
    experiment = config.load(file, changes)
    check_code(lambda trusts: check_config(file, experiment, changes, trusts), trust)
    if extend is not None and RunDirectory(extend).is_run:
        check_code(partial(load_record, extend, connects=False), trust)
        experiment = with_code_of(extend, experiment, code, warn)
    elif file is not None:
        experiment = with_code_of_record(Path(file), experiment, code, warn)
    resolve(experiment.methods)
    if (base := output_base()) is not None and not Path(experiment.output).is_absolute():
        experiment = experiment.model_copy(update={"output": str(base / experiment.output)})
    say_earlier_results(experiment)
    return experiment


def say_earlier_results(experiment: "Experiment", run_dir: Path | None = None) -> None:
    """Delivers what earlier runs could not deliver to MLflow, and says so. run_dir: one that is not below `output`."""
    from cfl_ray.tracking import deliver_earlier_results

    for line in deliver_earlier_results(experiment.tracking, experiment.output, warn, run_dir):
        say(line)


def folder_option(help: str) -> Any:
    """An option that names a folder."""
    return typer.Option(parser=_folder_of, metavar="PATH", help=help, show_default=False)


def _folder_of(argument: str) -> Path:
    """The folder that an option names. Raises BadParameter for an empty name, such as "$RUN" if RUN is not set."""
    if not argument.strip():
        raise typer.BadParameter("the name of a folder is empty; leave the option out for a new one")
    return place(argument)


def is_file(argument: str) -> bool:
    """Whether an argument names a file; False for an override that is too long for a file name."""
    try:
        return Path(argument).is_file()
    except OSError:
        return False


def check_runs(run_dirs: Iterable[Path], trust: bool) -> None:
    """Asks about each run that the user does not trust, before any of them is read."""
    from cfl_ray.results.trust import load_record
    from cfl_ray.run_directory import RunDirectory

    for run_dir in run_dirs:
        RunDirectory(run_dir).require_run()
        check_code(partial(load_record, run_dir, connects=False), trust)


def check_code(check: Callable[[bool], object], trust: bool) -> None:
    """Asks on a terminal whether the user trusts what `check` refuses, and keeps the answer.

    check: called with whether it is trusted: by the option, or by the answer.
    """
    from cfl_ray.results.trust import UntrustedError

    try:
        check(trust)
    except UntrustedError as error:
        if not sys.stdin.isatty():
            raise
        warn(f"warning: {error}")
        if not typer.confirm("Trust it?", err=True):
            raise
        check(True)
