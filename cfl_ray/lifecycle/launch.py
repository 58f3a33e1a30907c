"""Running an experiment from start to end: `run` on Ray, `simulate` in this process, `resume` for a stopped run."""

import contextlib
import itertools
import os
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cfl_ray import config
from cfl_ray.config import Experiment
from cfl_ray.config.section import check_path
from cfl_ray.errors import ConfigError, Interrupted, RunError, RunStopped, shown
from cfl_ray.lifecycle.driver import Driver, StudyPlace, Watcher
from cfl_ray.lifecycle.extension import begin_extended, check_extension
from cfl_ray.lifecycle.load import opener, verify_saved
from cfl_ray.results.environment import Environment, read_environment, write_environment
from cfl_ray.results.kept_code import keep_code, with_code_of
from cfl_ray.results.recorded_runs import finished_results
from cfl_ray.results.results import Results
from cfl_ray.results.run_record import (
    check_hash_of_run,
    check_is_of_run,
    check_not_edited,
    how_to_resume,
    write_config,
)
from cfl_ray.results.trust import load_record, sign_record
from cfl_ray.results.user_code import edited_files
from cfl_ray.run_directory import RunDirectory
from cfl_ray.run_directory.session_file import cluster_address, withdraw_server
from cfl_ray.runtime.journal import copy_events
from cfl_ray.runtime.session import InProcessSession, Session
from cfl_ray.setup.prepare import prepare
from cfl_ray.setup.setup import Setup
from cfl_ray.system.signals import interrupts_noted, raise_interrupt


def run(
    experiment: Experiment | None = None,
    run_dir: str | Path | None = None,
    watcher: Watcher | None = None,
    replay: str | Path | None = None,
    extend: str | Path | None = None,
    on_ray: bool = True,
    code: str | None = None,
) -> Results:
    """Runs every method of the experiment on Ray and returns their results.

    experiment: None runs the built-in example.
    run_dir: where files go; None makes a new folder below `experiment.output`.
    replay: directory of another run of this experiment, whose requested joins and leaves are repeated in this run.
    extend: directory of a run of this experiment with fewer `rounds`. This run begins with a copy of its rounds; the
        results are the same as without `extend`.
    on_ray: False runs it in the calling process, as `simulate` does.
    code: with `extend`, as in `load_run`.

    Raises ConfigError for bad input and for a folder that belongs to another config, RunError if the run cannot
    continue (saved rounds are kept), RunStopped if a request ended it early.
    """
    return _Launch(
        experiment or config.load(),
        watcher or Watcher(),
        on_ray=on_ray,
        run_dir=_path(run_dir),
        replay=_path(replay),
        extend=_path(extend),
        code=code,
    ).run()


def simulate(
    experiment: Experiment | None = None,
    run_dir: str | Path | None = None,
    watcher: Watcher | None = None,
    replay: str | Path | None = None,
    extend: str | Path | None = None,
    code: str | None = None,
) -> Results:
    """Like `run`, with the same results, but in the calling process and without Ray.

    Writes no files but shards unless `run_dir` is given, which `replay` and `extend` require.
    """
    return _Launch(
        experiment or config.load(),
        watcher or Watcher(),
        on_ray=False,
        run_dir=_path(run_dir),
        keep=run_dir is not None,
        in_python=True,
        replay=_path(replay),
        extend=_path(extend),
        code=code,
    ).run()


def resume(
    run_dir: str | Path,
    watcher: Watcher | None = None,
    on_ray: bool = True,
    experiment: Experiment | None = None,
    trust: bool = False,
    code: str | None = None,
) -> Results:
    """Continues a stopped run from its last checkpoint; for a finished run, returns its results.

    Raises ConfigError if `run_dir` holds no run, RunError if the run is live. RAY_ADDRESS takes precedence over
    `runtime.address` of the run.

    experiment: the experiment of the run, required if it has objects made in Python (a Federation, a model, a method).
    trust: True uses the Python files, the cluster and the MLflow server that the run names, even if this user did not
        start it on this machine; False raises ConfigError for such a run.
    code: as in `load_run`. With "now" after an edit, the results are of both versions of the code.
    """
    directory = RunDirectory(run_dir)
    directory.require_run()
    if experiment is not None:
        check_is_of_run(directory, experiment)
    else:
        experiment = load_record(Path(run_dir), trust)
        check_not_edited(directory, experiment)
    watcher = watcher or Watcher()
    experiment = with_code_of(directory.path, experiment, code, watcher.warn)
    open_trained = opener(Path(run_dir).absolute(), partial(prepare, experiment))
    if (finished := finished_results(run_dir, experiment, open_trained)) is not None:
        return finished
    return _Launch(
        _with_current_cluster(experiment, watcher), watcher, on_ray, _path(run_dir), resumed=True, code=code
    ).run()


def _with_current_cluster(experiment: Experiment, watcher: Watcher) -> Experiment:
    """The experiment on the cluster that RAY_ADDRESS names, since the recorded cluster may no longer exist."""
    recorded, now = experiment.runtime.address, os.environ.get("RAY_ADDRESS")
    if recorded in (None, "auto", "local", now) or not now:  # no other specific cluster is recorded
        return experiment
    watcher.warn(f"resumed on the cluster at {now} (RAY_ADDRESS); runtime.address of the run is {recorded}")
    return experiment.model_copy(update={"runtime": experiment.runtime.model_copy(update={"address": now})})


def run_of_study(
    experiment: Experiment,
    run_dir: Path,
    place: StudyPlace,
    hosts: int | None,
    watcher: Watcher | None = None,
    extend: Path | None = None,
    code: str | None = None,
) -> Results:
    """The results of a run of a study, which is started or continued.

    hosts: number of client hosts on the Ray cluster; None: in this process.
    extend: directory of the same run with fewer rounds, which a new run copies first. code: as in `load_run`.
    """
    watcher = watcher or Watcher()
    on_ray = hosts is not None
    if on_ray:
        runtime = experiment.runtime.model_copy(update={"hosts": hosts})
        experiment = experiment.model_copy(update={"runtime": runtime})
    directory = RunDirectory(run_dir)
    if resumed := directory.is_run:
        check_hash_of_run(directory, experiment)
        if (finished := finished_results(run_dir, experiment)) is not None:
            return finished
        experiment = with_code_of(run_dir, experiment, code, watcher.warn)
    return _Launch(
        experiment,
        watcher,
        on_ray=on_ray,
        run_dir=run_dir,
        resumed=resumed,
        extend=None if resumed else extend,
        study=place,
        code=code,
    ).run()


def new_run_dir(experiment: Experiment) -> Path:
    """A folder below `output` that does not exist yet."""
    first = Path(experiment.output) / f"{experiment.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    others = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(path for path in itertools.chain([first], others) if not path.exists())


@dataclass
class _Launch:
    """One start of a run, new or resumed."""

    experiment: Experiment
    watcher: Watcher
    on_ray: bool
    run_dir: Path | None  # None: a new folder
    keep: bool = True  # whether files are kept
    in_python: bool = False  # whether `simulate` has started it, which is no command
    resumed: bool = False
    replay: Path | None = None
    extend: Path | None = None
    study: StudyPlace | None = None  # of the run; None: not part of a study
    code: str | None = None  # version of the user's code, of the run to extend
    directory: Path | None = field(default=None, init=False)  # set once it is known to belong to this run
    session: Session | None = field(default=None, init=False)
    begun: bool = field(default=False, init=False)  # whether the directory holds the run

    def __post_init__(self) -> None:
        if not isinstance(self.experiment, Experiment):
            raise ConfigError(
                f"expected an Experiment, got {shown(self.experiment)}; write Experiment(**settings) or load(FILE)"
            )
        self.on_ray = self.on_ray and self.experiment.runtime.backend == "ray"
        with contextlib.suppress(FileNotFoundError):  # the working directory does not exist
            output = str(Path(self.experiment.output).absolute())  # the server has another working directory
            self.experiment = self.experiment.model_copy(update={"output": output})

    def run(self) -> Results:
        if self.replay is not None and self.extend is not None:
            raise ConfigError("replay and extend exclude each other: give one of the two")
        if self.replay is not None:
            self._check_replay(self.replay)
        if self.extend is not None:
            self._extend(self.extend)
        with interrupts_noted(), contextlib.ExitStack() as lock:
            if self.resumed and self.run_dir is not None:
                self._warn_of_moved_paths()
                self.directory = self.run_dir.absolute()
                lock.enter_context(RunDirectory(self.directory).hold())  # a live run cannot be resumed
                withdraw_server(self.directory)  # the address that a killed driver left
                sign_record(self.directory, self.experiment)  # the user trusts this run
            try:
                return self._all_methods(lock)
            except KeyboardInterrupt:
                raise Interrupted(f"stopped. {self._how_to_continue()}") from None
            except (RunError, RunStopped) as error:
                raise type(error)(f"{error}. {self._how_to_continue()}") from error
            except OSError as error:  # a full disk, or a folder that was removed
                file = f"{error.filename}: " if error.filename else ""
                raise RunError(f"{file}{error.strerror or error}. {self._how_to_continue()}") from error
            except Exception as error:  # such as one of the user's watcher
                if self.directory is not None and RunDirectory(self.directory).is_run:
                    error.add_note(self._how_to_continue())
                raise
            finally:
                if self.session is not None:
                    with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C: Ray ends with this process
                        self.session.close()

    def _all_methods(self, lock: contextlib.ExitStack) -> Results:
        self.watcher.preparing("federation")
        setup = prepare(self.experiment, self.watcher.preparing)
        if self.keep and not self.resumed:
            self.directory = self._new_directory()
            lock.enter_context(RunDirectory(self.directory).starting())  # before Ray, which takes long to start
        self.watcher.preparing("Ray and the client hosts" if self.on_ray else "the engine")
        self.session = self._session(setup)
        raise_interrupt()
        run_info, environment = self.session.about()
        if self.extend is not None:
            run_info["extends"] = str(self.extend.absolute())
        if self.directory is not None:
            self._keep_environment(self.directory, environment, setup)
            if not self.resumed:
                if self.replay is not None:
                    replayed, run = RunDirectory(self.replay), RunDirectory(self.directory)
                    for label in setup.methods:
                        copy_events(replayed.method(label).path, run.method(label).path)
                write_config(self.directory, self.experiment)  # marks the folder as a run
                lock.enter_context(RunDirectory(self.directory).hold())
                withdraw_server(self.directory)
            self.begun = True
        self.watcher.started(setup, self.directory, run_info)
        return Driver(setup, self.session, self.directory, self.watcher, run_info, self.study).all_methods()

    def _warn_of_moved_paths(self) -> None:
        for old, new in self.experiment.moved.items():
            self.watcher.warn(f"{old} of this run is not here; {new} takes its place, for the run directory has moved")
        if not Path(self.experiment.output).exists():
            self.watcher.warn(
                f"{self.experiment.output}, the output folder of this run, is not here and is made anew: its shards "
                "are prepared again, and a local MLflow store begins anew; to keep them, copy it to that place first"
            )

    def _session(self, setup: Setup) -> Session:
        if not self.on_ray:
            return InProcessSession(setup, self.directory)
        if cluster_address(self.experiment.runtime.address) is None and "ray" not in sys.modules:
            # Ray reads it when it is imported; it keeps other users out of a cluster that is started for this run
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        # Imports ray, which `simulate` does not need; before the cluster is joined, which for a while leaves a
        # submitted job without the folder of its code.
        from cfl_ray.runtime.on_ray.ray_session import RaySession

        return RaySession(setup, self.directory, self.watcher.warn)

    def _new_directory(self) -> Path:
        """The run directory, not yet created. Raises ConfigError if it holds a run or a study."""
        directory = (self.run_dir or new_run_dir(self.experiment)).absolute()
        if RunDirectory(directory).is_study:
            raise ConfigError(f"{directory} is the folder of a study; choose another folder for the run")
        run = RunDirectory(directory)
        run.require_signed([])
        if not run.is_run:
            return directory
        check_is_of_run(run, self.experiment, advice="; choose another folder")
        raise ConfigError(
            f"{directory} already holds a run of this config; continue it with `{how_to_resume(run)}` "
            "or choose another folder"
        )

    def _keep_environment(self, directory: Path, now: Environment, setup: Setup) -> None:
        """Writes the environment of a new run; warns of changes since then in a resumed run.

        Raises DataError for other data, and NotReproduced if the code gives the models from which a resumed run goes on
        other outputs, as after an edit, or if it reads a file or an environment variable that has changed.
        """
        now = now.with_inputs(self.experiment, setup.federation)
        if self.resumed and (before := read_environment(directory)) is not None:
            before.check_data(setup.federation, directory)
            for line in before.changes(now):
                self.watcher.warn(line)
            verify_saved(setup, directory, edited_files(before.code, now.code))
        else:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_environment(directory, now)
        if keep_code(self.experiment, directory, None if self.study is None else self.study.root) and self.resumed:
            sign_record(directory, self.experiment)

    def _check_replay(self, replay: Path) -> None:
        """Raises ConfigError if `replay` is not a run of this experiment."""
        run = RunDirectory(replay)
        if not run.is_run:
            raise ConfigError(f"replay: {replay} holds no run: there is no {run.config}")
        check_is_of_run(run, self.experiment, "replay: ", f"; run {run.config}")
        if not self.keep:
            raise ConfigError("replay: name a run_dir; what happens in a run is kept there")

    def _extend(self, earlier: Path) -> None:
        """Creates the run directory with the rounds of an earlier run, after which this run continues."""
        if not self.keep:
            raise ConfigError("extend: name a run_dir; the rounds of the earlier run are copied there")
        check_extension(earlier, self.experiment)
        self.experiment = with_code_of(earlier, self.experiment, self.code, self.watcher.warn)
        self.run_dir, self.resumed = self._new_directory(), True
        begin_extended(earlier, self.run_dir, self.experiment)

    def _how_to_continue(self) -> str:
        if self.directory is None or not RunDirectory(self.directory).is_run:
            if not self.keep:
                return "Nothing was kept, since simulate was given no run_dir"
            if not self.begun:
                return "Nothing was kept"
            return (
                f"{self.directory} was removed or moved while the run was live; if it was moved, go on in its new "
                "place: cfl-ray resume NEW_PLACE"
            )
        in_process = not self.on_ray and self.experiment.runtime.backend == "ray"
        how = how_to_resume(RunDirectory(self.directory), in_process, self.in_python)
        return f"Every saved round is kept; go on with: {how}"


def _path(path: str | Path | None) -> Path | None:
    if path is None:
        return None
    if not str(path).strip():  # such as "$RUN" of a variable that is not set
        raise ConfigError("the name of a run directory is empty; leave it out for a new folder")
    try:
        check_path("the run directory", path)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return Path(path)
