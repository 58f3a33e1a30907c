"""The commands `compare` and `sweep`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cfl_ray.cli.arguments import OnlyMethods, OnlySeeds, OnlySettings
from cfl_ray.cli.console import counted, out, say
from cfl_ray.cli.inputs import folder_option, output_base
from cfl_ray.errors import ConfigError, RunError, command

if TYPE_CHECKING:  # the help text does not wait for torch
    from cfl_ray.config.study import Study
    from cfl_ray.study.plan import Selection

Selected = tuple[list[str] | None, list[str] | None, list[int] | None]  # settings, methods and seeds of a study


COMPARE = """\
Run a study: every method in every setting with every seed, and print tables of mean ± standard deviation.

Runs are parallel, as many as the machine or the Ray cluster has room for. Finished runs in the folder are not
repeated, and stopped ones continue.
"""
SWEEP = """\
Run a study over values of any keys: a grid, random values, or values that Optuna suggests from earlier results.

Prints the trials at the end, best first; otherwise like `compare`.
"""


def launch(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="STUDY", help="Study as YAML (docs/studies.md).", show_default=False)],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Keys to override in the experiment of every run, e.g. rounds=20",
            metavar="[SECTION.KEY=VALUE]...",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[Path | None, folder_option("Folder of the study; default: its name below `output`.")] = None,
    at_once: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Largest number of parallel runs; default: as many as there is room for.",
            show_default=False,
        ),
    ] = None,
    settings: OnlySettings = None,
    methods: OnlyMethods = None,
    seeds: OnlySeeds = None,
    extend: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="The folder of this study with fewer rounds: runs begin with a copy of those there.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs and which of them are finished; run nothing.")
    ] = False,
) -> None:
    """The command `compare` for a study, `sweep` for a study with a sweep."""

    study = study_from(file, overrides)
    verb, what = ("compare", "has no `sweep`") if study.sweep is None else ("sweep", "is a sweep")
    if context.info_name != verb:
        raise ConfigError(f"{file} {what}; run it with: {command(verb, file, *(overrides or ()))}")
    run_all(study, folder, (settings, methods, seeds), at_once, dry_run, extend)


def study_from(file: Path, overrides: list[str] | None) -> "Study":
    """The study in a file, with these overrides of its experiment."""
    from cfl_ray.config.study import load_study

    return load_study(file, overrides or (), output_base())


def selection_of(only: Selected) -> "Selection":
    """The options --setting, --method and --seed as a selection."""
    from cfl_ray.study.plan import Selection

    settings, methods, seeds = only
    return Selection(settings or (), methods or (), seeds or ())


def run_all(
    study: "Study",
    folder: Path | None,
    only: Selected,
    at_once: int | None,
    dry_run: bool,
    extend: Path | None = None,
) -> None:
    """Runs the selected runs of a study, or lists them (dry_run)."""
    from cfl_ray.cli.study_progress import StudyDisplay
    from cfl_ray.study.run import plan_study, run_study

    selection = selection_of(only)
    folder, extend = (None if path is None else (output_base() or Path()) / path for path in (folder, extend))
    if dry_run:
        runs, root = plan_study(study, folder, selection)
        for run in runs:
            say(f"{run.name}{': finished' if run.is_finished(root) else ''}")
        say(f"{counted(len(runs), 'run')}{' at the ends of the ranges' * study.learns}; folder: {root}")
        return
    with StudyDisplay(out, study.learns) as display:
        results = run_study(study, folder, selection, at_once, display, extend)
    display.finish(results)
    if results.failed:
        raise RunError(f"{len(results.failed)} of the runs are not finished; the same command tries them again")
