"""The commands `run`, `resume` and `prepare`."""

from pathlib import Path
from typing import Annotated

import typer

from cfl_ray.cli.arguments import File, InProcess, Overrides, RunDir, Trust
from cfl_ray.cli.console import out, say
from cfl_ray.cli.inputs import deliver_earlier_results, folder_option, is_trusted, load_experiment
from cfl_ray.cli.study_commands import run_all, study_from
from cfl_ray.errors import ConfigError, command
from cfl_ray.system.imports import uncollected


def run(
    file: File = None,
    overrides: Overrides = None,
    run_dir: Annotated[Path | None, folder_option("Directory of the run; default: a new one below `output`.")] = None,
    in_process: InProcess = False,
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
            help="A run of this config with fewer rounds: this run begins with a copy of them.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run an experiment: all its methods, with live progress and a table of results at the end."""
    with uncollected():
        from cfl_ray.cli.progress import Display
        from cfl_ray.lifecycle import launch

    experiment = load_experiment(file, overrides)
    with Display(out, experiment.rounds) as display:
        results = launch.run(experiment, run_dir, display, replay, extend, on_ray=not in_process)
    display.finish(results)


def resume(run_dir: RunDir, trust: Trust = False, in_process: InProcess = False) -> None:
    """Resume a run that was stopped or has died, from its last checkpoint.

    RUN may be the folder of a study: its unfinished runs continue, and failed runs are repeated.
    """
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
        is_trusted(lambda: load_study_record(run_dir), trust)
        run_all(study_from(RunDirectory(run_dir).study, None), run_dir, (None, None, None), None, dry_run=False)
        return
    RunDirectory(run_dir).require_run()
    trust = is_trusted(lambda: load_record(run_dir), trust)
    experiment = load_record(run_dir, trust)
    with Display(out, experiment.rounds) as display:
        results = launch.resume(run_dir, watcher=display, on_ray=not in_process, trust=trust)
    if display.experiment is not None:  # it has started
        display.finish(results)
        return
    say(f"{run_dir} is finished: nothing is left to do.")
    deliver_earlier_results(experiment)
    display.show(results)


def prepare(file: File = None, overrides: Overrides = None) -> None:
    """Write the clients' data of an experiment as shards; existing shards are reused."""
    from cfl_ray.cli.progress import Display
    from cfl_ray.data.from_config import with_shards
    from cfl_ray.setup.prepare import prepare as prepare_setup
    from cfl_ray.setup.prepare import shards_folder

    experiment = load_experiment(file, overrides)
    with Display(out, experiment.rounds) as display:
        federation = prepare_setup(experiment, display.preparing).federation
    uri = getattr(federation, "uri", None)
    if uri is None:
        name = experiment.data.source.rpartition(":")[2] or "arrays"
        uri = with_shards(federation.at(0), name, shards_folder(experiment)).uri
    samples_N = federation.num_samples_N
    say(
        f"{federation.num_clients} clients, {samples_N.min()} to {samples_N.max()} training samples each, "
        f"{federation.shape.targets_in_words}"
    )
    say(f"Shards: {uri}")
    say(f"Next: {command('run', file, *(overrides or ()))}")
