"""Running an experiment from start to end: `run` on Ray, `simulate` in this process, `resume` where a run stopped."""

import contextlib
import itertools
import os
import sys
import time
from pathlib import Path

from cfl_ray import config
from cfl_ray.config import Experiment
from cfl_ray.core.errors import ConfigError, Interrupted, RunError, Stopped
from cfl_ray.runtime.atwork import CONFIG, cluster_address, held
from cfl_ray.runtime.driver import Driver, Watcher
from cfl_ray.runtime.journal import copy_events
from cfl_ray.runtime.results import Results
from cfl_ray.runtime.session import InProcessSession, Session
from cfl_ray.runtime.setup import Setup, prepare
from cfl_ray.tracking.files import write_text

_HASH = "# config hash "


def run(
    experiment: Experiment | None = None, run_dir: str | Path | None = None, watcher: Watcher | None = None, replay: str | Path | None = None
) -> Results:
    """Runs every method of the experiment (None: the built-in example) on Ray and returns what they came to.

    run_dir: where files go; None: a new folder below `experiment.output`. replay: another run of this experiment; what was asked of
    it while it was live happens here in the same rounds. Raises ConfigError for bad input and for a folder that belongs to another
    config, RunError when the run cannot go on (everything saved stays), Stopped when it was asked to end early.
    """
    return _launch(experiment or config.load(), run_dir, watcher or Watcher(), on_ray=True, keep=True, replay=replay)


def simulate(
    experiment: Experiment | None = None, run_dir: str | Path | None = None, watcher: Watcher | None = None, replay: str | Path | None = None
) -> Results:
    """The same in this process, without Ray and with the same numbers. Keeps files only where `run_dir` is given, as `replay` needs it."""
    return _launch(experiment or config.load(), run_dir, watcher or Watcher(), on_ray=False, keep=run_dir is not None, replay=replay)


def resume(run_dir: str | Path, watcher: Watcher | None = None, on_ray: bool = True, experiment: Experiment | None = None) -> Results:
    """Goes on with a run that stopped, from its last checkpoints. Raises ConfigError where `run_dir` holds no run.

    experiment: the one that was run, where it has objects made in Python (a Federation, a model, a method) that no file can hold.
    """
    file = Path(run_dir) / CONFIG
    if not file.is_file():
        raise ConfigError(f"{run_dir} holds no run: there is no {file}")
    if experiment is not None and (there := _hash_of(file)) != experiment.config_hash:
        raise ConfigError(f"{run_dir} belongs to another config (hash {there}, this one has {experiment.config_hash})")
    return _launch(experiment or config.load(file), run_dir, watcher or Watcher(), on_ray, keep=True, resumed=True)


def _launch(
    experiment: Experiment, run_dir: str | Path | None, watcher: Watcher, on_ray: bool, keep: bool, resumed: bool = False, replay: str | Path | None = None
) -> Results:
    if replay is not None:
        _check_replay(Path(replay), experiment, keep)
    directory, session = Path(run_dir).absolute() if resumed else None, None
    with contextlib.ExitStack() as at_work:
        try:
            if resumed:
                at_work.enter_context(held(directory / CONFIG))
            watcher.preparing("federation")
            setup = prepare(experiment, watcher.preparing)
            directory = _directory(experiment, run_dir, resumed) if keep else None
            watcher.preparing("Ray and the client hosts" if on_ray else "the engine")
            session = _session(setup, directory, on_ray)
            facts = session.facts()
            if directory is not None and not resumed:
                for label in setup.methods if replay is not None else ():
                    copy_events(Path(replay) / label, directory / label)
                _write_config(directory, experiment)
                at_work.enter_context(held(directory / CONFIG))
            watcher.started(setup, directory, facts)
            return Driver(setup, session, directory, watcher, facts).all_methods()
        except KeyboardInterrupt:
            raise Interrupted(f"stopped. {_how_to_go_on(directory)}") from None
        except (RunError, Stopped) as error:
            raise type(error)(f"{error}. {_how_to_go_on(directory)}") from error
        except OSError as error:  # a full disk, or a folder that is gone
            raise RunError(f"{f'{error.filename}: ' if error.filename else ''}{error.strerror or error}. {_how_to_go_on(directory)}") from error
        finally:
            if session is not None:
                _close(session)


def _close(session: Session) -> None:
    try:
        session.close()
    except KeyboardInterrupt:
        pass  # Ctrl-C once more: what is left of Ray goes with this process


def _check_replay(replay: Path, experiment: Experiment, keep: bool) -> None:
    """Raises ConfigError where `replay` is no run of this experiment."""
    if not (replay / CONFIG).is_file():
        raise ConfigError(f"replay: {replay} holds no run: there is no {replay / CONFIG}")
    if (there := _hash_of(replay / CONFIG)) != experiment.config_hash:
        raise ConfigError(f"replay: {replay} belongs to another config (hash {there}, this one has {experiment.config_hash}); run {replay / CONFIG}")
    if not keep:
        raise ConfigError("replay: name a run_dir; what happens in a run is kept there")


def _how_to_go_on(directory: Path | None) -> str:
    if directory is None or not (directory / CONFIG).exists():
        return "Nothing was kept"
    return f"Every saved round is kept; go on with: cfl-ray resume {directory}"


def _write_config(directory: Path, experiment: Experiment) -> None:
    """config.yaml, readable by its owner alone: a tracking URI may hold a password. Its first line says the hash."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory / CONFIG, f"{_HASH}{experiment.config_hash}\n{experiment.to_yaml()}", mode=0o600)


def _hash_of(file: Path) -> str:
    """The hash of the config that a run directory belongs to; objects made in Python have no other trace."""
    first = file.read_text().partition("\n")[0]
    return first.removeprefix(_HASH) if first.startswith(_HASH) else config.load(file).config_hash


def _session(setup: Setup, directory: Path | None, on_ray: bool) -> Session:
    if not on_ray:
        return InProcessSession(setup, directory)
    if cluster_address(setup.experiment.runtime.address) is None and "ray" not in sys.modules:
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when ray is imported: a cluster of our own is never open to others
    from cfl_ray.runtime.cluster import RaySession  # imports ray, which `simulate` does without

    return RaySession(setup, directory)


def new_run_dir(experiment: Experiment) -> Path:
    """A folder below `output` that does not exist yet."""
    first = Path(experiment.output) / f"{experiment.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    others = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([first], others) if not path.exists())


def _directory(experiment: Experiment, run_dir: str | Path | None, resumed: bool) -> Path:
    """The run directory, not yet made. Raises ConfigError where it holds a run that is not to be resumed."""
    directory = Path(run_dir or new_run_dir(experiment)).absolute()
    file = directory / CONFIG
    if file.is_file() and not resumed:
        if (there := _hash_of(file)) != experiment.config_hash:
            raise ConfigError(f"{directory} belongs to another config (hash {there}, this one has {experiment.config_hash}); choose another folder")
        raise ConfigError(f"{directory} holds a run of this config already; go on with it by `cfl-ray resume {directory}` or choose another folder")
    return directory
