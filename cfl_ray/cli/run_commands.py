"""The commands `run`, `resume`, `status`, `join`, `leave`, `stop` and `prepare`; `compare` and `sweep` for studies."""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cfl_ray.cli import inputs
from cfl_ray.cli.console import go_on_without_output, out, say
from cfl_ray.errors import ConfigError, RunError, command, counted
from cfl_ray.runtime.on_ray.fork_server import forkable_imports
from cfl_ray.system.collection import uncollected

if TYPE_CHECKING:  # the help text does not wait for torch
    from cfl_ray.config.study import Study
    from cfl_ray.study.study_plan import Selection


def run(
    file: inputs.File = None,
    overrides: inputs.Overrides = None,
    run_dir: Annotated[
        Path | None, inputs.folder_option("Directory of the run; default: a new one below `output`.")
    ] = None,
    in_process: inputs.InProcess = False,
    replay: Annotated[
        Path | None,
        typer.Option(
            parser=inputs.place,
            metavar="RUN",
            help="Another run of this config, whose requests to join and leave are repeated in the same rounds.",
            show_default=False,
        ),
    ] = None,
    extend: Annotated[
        Path | None,
        typer.Option(
            parser=inputs.place,
            metavar="RUN",
            help="A run of this config with fewer rounds: this run begins with a copy of them.",
            show_default=False,
        ),
    ] = None,
    code: inputs.Code = None,
    trust: inputs.Trust = False,
) -> None:
    """Run an experiment: all its methods, with live progress and a table of results at the end."""
    with uncollected() if in_process else forkable_imports():
        from cfl_ray.cli.progress import Display
        from cfl_ray.lifecycle import launch

    experiment = inputs.load_experiment(file, overrides, trust, extend, code)
    go_on_without_output()
    with Display(out, experiment.rounds) as display:
        results = launch.run(experiment, run_dir, display, replay, extend, on_ray=not in_process, code=code)
    display.finish(results)


def resume(
    run_dir: inputs.RunDir,
    trust: inputs.Trust = False,
    in_process: inputs.InProcess = False,
    code: inputs.Code = None,
) -> None:
    """Resume a run that was stopped or has died, from its last checkpoint.

    RUN may be the folder of a study: its unfinished runs continue, and failed runs are repeated.
    """
    with uncollected() if in_process else forkable_imports():
        from cfl_ray.cli.progress import Display
        from cfl_ray.lifecycle import launch
        from cfl_ray.results.trust import load_record, load_study_record
        from cfl_ray.run_directory import RunDirectory

    if RunDirectory(run_dir).is_study:
        if in_process:
            raise ConfigError(
                f"--in-process is for a run, and {run_dir} is a study, whose runs are in processes of their own: name "
                f"one of them, {run_dir}/SETTING/METHOD/seed-SEED"
            )
        inputs.check_code(partial(load_study_record, run_dir), trust)
        run_all(study_from(RunDirectory(run_dir).study, None, trust), run_dir, code=code)
        return
    RunDirectory(run_dir).require_run()
    inputs.check_code(partial(load_record, run_dir), trust)
    experiment = load_record(run_dir, trust)
    inputs.say_earlier_results(experiment, run_dir)
    go_on_without_output()
    with Display(out, experiment.rounds) as display:
        results = launch.resume(run_dir, watcher=display, on_ray=not in_process, trust=trust, code=code)
    if display.experiment is not None:  # it has started
        display.finish(results)
        return
    say(f"{run_dir} is finished: nothing is left to do.")
    display.show(results)


def status(
    run_dir: inputs.RunDir, as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False
) -> None:
    """Show the progress of a run: round, accuracy, clusters, hosts, clients online and last fault.

    For a run that is not live it also shows the command that resumes it. RUN may be the folder of a study; then it
    shows how many of its runs are finished and left, which are live, and why others failed.
    """
    import dataclasses
    import json

    from cfl_ray.cli import live_client, printed_tables
    from cfl_ray.run_directory import RunDirectory
    from cfl_ray.study.status import study_status

    status = study_status(run_dir) if RunDirectory(run_dir).is_study else live_client.status(run_dir)
    if as_json:
        values = json.dumps(dataclasses.asdict(status))  # JSON has no NaN: null
        say(json.dumps(json.loads(values, parse_constant=lambda constant: None), indent=1))
    elif isinstance(status, live_client.RunStatus):
        printed_tables.show_status(status, out)
    else:
        printed_tables.show_study_status(status, out)


def join(
    run_dir: inputs.RunDir,
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
        say(live_client.ask(run_dir, "join", parse_ids(clients or ())))
        return
    location = shards if "://" in shards else os.path.abspath(Path(shards).expanduser())
    say(live_client.ask(run_dir, "join_shards", location))


def leave(
    run_dir: inputs.RunDir,
    clients: Annotated[
        list[str], typer.Argument(help="Ids or ranges, e.g. 7 0-9.", metavar="CLIENT...", show_default=False)
    ],
) -> None:
    """Let clients leave a live run before its next round; their client state is dropped."""
    from cfl_ray.cli import live_client
    from cfl_ray.config.client_ids import parse_ids

    say(live_client.ask(run_dir, "leave", parse_ids(clients)))


def stop(run_dir: inputs.RunDir) -> None:
    """Stop a live run after its current round, which is saved; `cfl-ray resume` resumes it."""
    from cfl_ray.cli import live_client

    say(live_client.ask(run_dir, "stop"))


def prepare(file: inputs.File = None, overrides: inputs.Overrides = None, trust: inputs.Trust = False) -> None:
    """Write the clients' data of an experiment as shards; shards of these data are reused."""
    from cfl_ray.cli.progress import Display
    from cfl_ray.data.from_config import with_shards
    from cfl_ray.security.credentials import remember_credentials
    from cfl_ray.setup.prepare import prepare as prepare_setup
    from cfl_ray.setup.prepare import shards_folder

    experiment = inputs.load_experiment(file, overrides, trust)
    with Display(out, experiment.rounds) as display:
        federation = prepare_setup(experiment, display.preparing, converts_changed=True).federation.at(0).whole
    uri = getattr(federation, "uri", None)
    if uri is None:
        name = experiment.data.source.rpartition(":")[2] or "arrays"
        uri = with_shards(federation, name, shards_folder(experiment)).uri
    samples_N = federation.num_samples_N
    say(
        f"{counted(federation.num_clients, 'client')}, {samples_N.min()} to {samples_N.max()} training samples each, "
        f"{federation.shape.targets_in_words}"
    )
    say(f"Shards: {uri}")
    remember_credentials(experiment.to_dict())  # the next line has none, and is run as it is printed
    say(f"Next: {command('run', file, *(overrides or ()))}")


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
    folder: Annotated[
        Path | None, inputs.folder_option("Folder of the study; default: its name below `output`.")
    ] = None,
    at_once: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Largest number of parallel runs; default: as many as there is room for.",
            show_default=False,
        ),
    ] = None,
    settings: inputs.OnlySettings = None,
    methods: inputs.OnlyMethods = None,
    seeds: inputs.OnlySeeds = None,
    extend: Annotated[
        Path | None,
        typer.Option(
            parser=inputs.place,
            metavar="FOLDER",
            help="The folder of this study with fewer rounds: runs begin with a copy of those there.",
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the runs and which of them are finished; run nothing.")
    ] = False,
    code: inputs.Code = None,
    trust: inputs.Trust = False,
) -> None:
    """The command `compare` for a study, `sweep` for a study with a sweep."""
    study = study_from(file, overrides, trust)
    verb, what = ("compare", "has no `sweep`") if study.sweep is None else ("sweep", "is a sweep")
    if context.info_name != verb:
        raise ConfigError(f"{file} {what}; run it with: {command(verb, file, *(overrides or ()))}")
    from cfl_ray.study.study_plan import Selection

    run_all(study, folder, Selection(settings or (), methods or (), seeds or ()), at_once, dry_run, extend, code)


def study_from(file: Path, overrides: list[str] | None, trust: bool = False) -> "Study":
    """The study in a file, with these overrides of its experiment. trust: as in `inputs.load_experiment`."""
    from cfl_ray.config.study import load_study
    from cfl_ray.results.trust import check_config

    study = load_study(file, overrides or (), inputs.output_base())
    inputs.check_code(lambda trusts: check_config(str(file), study, overrides or (), trusts), trust)
    return study


def run_all(
    study: "Study",
    folder: Path | None,
    only: "Selection | None" = None,
    at_once: int | None = None,
    dry_run: bool = False,
    extend: Path | None = None,
    code: str | None = None,
) -> None:
    """Runs the selected runs (None: all) of a study, or lists them (dry_run)."""
    from cfl_ray.cli.study_progress import StudyDisplay
    from cfl_ray.study.run import plan_study, run_study
    from cfl_ray.study.study_plan import ALL

    only = only or ALL
    if dry_run:
        runs, root = plan_study(study, folder, only)
        for run in runs:
            say(f"{run.name}{': finished' if run.is_finished(root) else ''}")
        say(f"{counted(len(runs), 'run')}{' at the ends of the ranges' * study.learns}; folder: {root}")
        return
    go_on_without_output()
    with StudyDisplay(out) as display:
        results = run_study(study, folder, only, at_once, display, extend, code)
    display.finish(results)
    if results.failed:
        count = len(results.failed)
        verb, them = ("is", "it") if count == 1 else ("are", "them")
        raise RunError(f"{count} of the runs {verb} not finished; the same command tries {them} again")
