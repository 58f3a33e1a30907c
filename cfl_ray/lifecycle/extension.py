"""Runs with more rounds than an earlier run: they begin with a copy of its rounds and continue as a resumed run.

The earlier run stays as it is. The results are bit for bit those of a run that made all the rounds itself.
"""

import os
import shutil
import tempfile
from pathlib import Path

from cfl_ray import config
from cfl_ray.checkpoint.store import CheckpointStore
from cfl_ray.config import Experiment
from cfl_ray.errors import ConfigError, RunError, counted
from cfl_ray.methods import resolve
from cfl_ray.results.kept_code import copy_kept
from cfl_ray.results.run_record import check_not_edited, differences, recorded_hash, rounds_at_start, write_config
from cfl_ray.run_directory import RunDirectory
from cfl_ray.runtime.journal import copy_events
from cfl_ray.runtime.parts.private_run import copy_key
from cfl_ray.setup.prepare import resolve_learning
from cfl_ray.system.files import sync
from cfl_ray.tracking import read_end


def check_extension(earlier: Path, experiment: Experiment) -> None:
    """Raises ConfigError unless `earlier` is a run of this experiment with fewer rounds; RunError if it is live."""
    directory = RunDirectory(earlier)
    try:
        directory.require_run()
    except ConfigError as error:
        raise ConfigError(f"extend: {error}") from None
    recorded = config.load(directory.config)
    recorded = recorded.model_copy(update={"rounds": rounds_at_start(directory, recorded)})
    check_not_edited(directory, recorded)
    if (same := experiment.model_copy(update={"rounds": recorded.rounds})).config_hash != recorded_hash(directory):
        differing = differences(directory, same)
        raise ConfigError(f"extend: only `rounds` may differ from those of {earlier}, and so do {differing}")
    if recorded.rounds >= experiment.rounds:
        raise ConfigError(
            f"extend: {earlier} has {counted(recorded.rounds, 'round')} and this run {experiment.rounds}; "
            "give this run more"
        )
    if directory.is_live:
        raise RunError(f"extend: {earlier} is live; wait for its end, or stop it with: cfl-ray stop {earlier}")
    _check_schedules(earlier, recorded.rounds, experiment)


def _check_schedules(earlier: Path, rounds: int, experiment: Experiment) -> None:
    """Raises ConfigError for a learning rate, or for noise, that depends on the number of all rounds."""
    if experiment.private_clients is not None and experiment.private_clients.noise_multiplier is None:
        raise ConfigError(
            "extend: privacy.target_epsilon alone makes the noise depend on the number of rounds; a run with "
            "privacy.noise_multiplier can be extended"
        )
    _, local, own = resolve_learning(experiment, resolve(experiment.methods))
    for schedule in filter(None, (sgd.schedule for sgd in (local, *own.values()))):
        for round in range(1, rounds + 1):
            before, now = (schedule(round, count) for count in (rounds, experiment.rounds))
            if before != now:
                raise ConfigError(
                    f"extend: local.schedule depends on the number of all rounds: in round {round} its factor is "
                    f"{before:.4g} of {rounds} rounds ({earlier}) and {now:.4g} of {experiment.rounds}; run this "
                    "config from its first round"
                )


def begin_extended(earlier: Path, run_dir: Path, experiment: Experiment) -> None:
    """Makes a run directory in one step, like that of a run that stopped after the last checkpoints of the earlier run.

    Raises ConfigError if the folder is not empty, RunError if a method has no checkpoint that can be used.
    """
    run_dir.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{run_dir.name}-", dir=run_dir.parent))
    try:
        source, target = RunDirectory(earlier), RunDirectory(draft)
        if source.environment.is_file():
            shutil.copyfile(source.environment, target.environment)
        copy_kept(earlier, draft)
        hashes = recorded_hash(source), experiment.config_hash
        for label in resolve(experiment.methods):
            _copy_method(source.method(label), target.method(label), *hashes)
        write_config(draft, experiment, run_dir)
        sync(draft)
        os.rename(draft, run_dir)
    except OSError as error:
        if run_dir.is_dir() and any(run_dir.iterdir()):
            raise ConfigError(f"extend: {run_dir} is not empty; choose another folder for the longer run") from error
        raise RunError(f"extend: {run_dir} could not be made: {error.strerror or error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    sync(run_dir.parent)


def _copy_method(earlier: RunDirectory, target: RunDirectory, earlier_hash: str, target_hash: str) -> None:
    """Copies the saved rounds of a method; without a checkpoint it begins at its first round.

    Raises RunError for a method that is finished and has no checkpoint any more.
    """
    if not earlier.path.is_dir():
        return
    target.path.mkdir(mode=0o700)
    round = CheckpointStore(earlier.path, earlier_hash).copy_to(CheckpointStore(target.path, target_hash))
    if round is None and (end := read_end(earlier.path)) is not None and end.status == "FINISHED":
        raise RunError(f"extend: {earlier.path} has no checkpoint any more, so nothing can begin with its rounds")
    copy_events(earlier.path, target.path)
    if round is not None:
        copy_key(earlier.path, target.path)
    for source in earlier.records if round is not None else ():
        if source.is_file():
            copy = target.path / source.name  # a file of an earlier format keeps its name
            shutil.copyfile(source, copy)
            sync(copy)
    sync(target.path)
