"""Loading of a finished, stopped or live run from its files, with its trained methods."""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from cfl_ray.config import Experiment
from cfl_ray.engine.in_process import InProcessBackend
from cfl_ray.errors import ConfigError, DataError, NotReproduced, RunError
from cfl_ray.results.environment import read_environment
from cfl_ray.results.kept_code import with_code_of
from cfl_ray.results.recorded_runs import recorded_result, recorded_run
from cfl_ray.results.results import Results
from cfl_ray.results.run_record import check_is_of_run, check_not_edited
from cfl_ray.results.study_folder import is_finished
from cfl_ray.results.trained import TrainedMethod
from cfl_ray.results.trust import load_record
from cfl_ray.results.verification import verify
from cfl_ray.run_directory import RunDirectory
from cfl_ray.runtime.round_loop import RoundLoop
from cfl_ray.runtime.session import checkpoint_store
from cfl_ray.setup.prepare import prepare
from cfl_ray.setup.setup import Setup
from cfl_ray.tracking import read_end

_logger = logging.getLogger(__name__)


def load_run(
    run_dir: str | Path, experiment: Experiment | None = None, trust: bool = False, code: str | None = None
) -> Results:
    """The recorded results of a run; for a live or stopped run, models are those of the last checkpoint.

    experiment: the experiment of the run, required if it has objects made in Python (a Federation, a model, a method).
    trust: True imports the Python files that the run names, even if this user did not start it on this machine; False
        raises ConfigError for such files.
    code: which version of Python files that the run names, if they were edited or are gone since: "run", the copy in
        the run directory, or "now", the present files. None: the copy, if there is one.
    Raises ConfigError if `run_dir` holds no run, or that of another experiment. Data are read when a model is needed.
    """
    directory, run_directory = Path(run_dir).absolute(), RunDirectory(run_dir)
    run_directory.require_run()
    if experiment is not None:
        check_is_of_run(run_directory, experiment)
    of_run = with_code_of(directory, experiment or load_record(directory, trust, connects=False), code, _logger.warning)

    def setup() -> Setup:
        if experiment is None:
            load_record(directory, trust)  # checks trust in the paths of the record, which are read now
            check_not_edited(run_directory, of_run)
        return prepare(of_run)

    return recorded_run(directory, of_run, opener(directory, setup))


def opener(run_dir: Path, setup: Callable[[], Setup]) -> Callable[[str], TrainedMethod]:
    """A function from a label to the trained method of a run, which raises NotReproduced as `verify` does.

    setup: makes the run's setup, once, on first use.
    """

    edited: list[str] = []  # the user's files

    @cache
    def prepared() -> Setup:
        try:
            made = setup()
            if (before := read_environment(run_dir)) is not None:
                before.check_data(made.federation, run_dir)
                edited.extend(before.edited_code(made.experiment))
                if edited:
                    _logger.warning("edited since %s began: %s", run_dir, ", ".join(edited))
            return made
        except ConfigError as error:
            raise type(error)(
                f"the models of {run_dir} need the run's data and network again, and these cannot be made: {error}; "
                "if the experiment has objects made in Python, pass it: load_run(RUN, experiment); the metrics "
                "(to_frame, client_metrics) need neither"
            ) from error

    def trained(label: str) -> TrainedMethod:
        of_method = load_trained(prepared(), label, run_dir)
        result = recorded_result(label, RunDirectory(run_dir).method(label).path)
        verify(of_method, result, prepared().experiment, edited)
        return of_method

    return trained


def load_trained(setup: Setup, label: str, run_dir: Path, newest: bool = False) -> TrainedMethod:
    """A method of a run as of its newest checkpoint, or of its best round so far with `keep: best`; also of a live run.

    newest: as of its newest checkpoint in any case, from which the run goes on.
    Raises ConfigError if there is no checkpoint yet, DataError if that of the last round of a finished method cannot
    be read.
    """
    store = checkpoint_store(setup, run_dir, label)
    if store is None or not store.rounds():
        method = RunDirectory(run_dir).method(label).path
        if is_finished(method):
            raise ConfigError(
                f"{method} has no checkpoint any more, only its records (cfl-ray clean --models drops it)"
            )
        raise ConfigError(f"{method} has no checkpoint yet; see `cfl-ray status {run_dir}`")
    backend = InProcessBackend(setup.worker())
    loop = RoundLoop(setup, label, backend.worker.network, backend, store)
    directory = RunDirectory(run_dir).method(label)
    end = read_end(directory.path)
    if end is not None and end.status == "FINISHED" and loop.saved < end.summary.round:
        raise DataError(
            f"{directory.checkpoints}: the checkpoint of round {end.summary.round}, the last one, is missing or "
            f"damaged, and the newest that can be read is of round {loop.saved}; restore it, or remove "
            f"{directory.end} and resume the run, which trains from round {loop.saved} on"
        )
    if newest:
        return loop.trained(backend)
    try:
        return loop.kept(backend)
    except RunError as error:
        raise DataError(
            f"{directory.checkpoints}: the models of the best round cannot be read ({error}); restore its files, or "
            "run the experiment again"
        ) from error


def verify_saved(setup: Setup, run_dir: Path, edited: Sequence[str]) -> None:
    """Raises NotReproduced if the newest saved models of a method do not give the scores that are recorded for them.

    edited: the user's files that were edited since the run began. Without any, methods that have finished, which do not
    go on, and models that cannot be read are left out: a run goes back to an earlier checkpoint if it has one.
    """
    for label in setup.methods if setup.experiment.evaluation.verify else ():
        store, directory = checkpoint_store(setup, run_dir, label), RunDirectory(run_dir).method(label).path
        if store is None or not directory.is_dir() or not store.rounds():
            continue
        if not edited and is_finished(directory):
            continue
        try:
            trained = load_trained(setup, label, run_dir, newest=True)
            verify(trained, recorded_result(label, directory), setup.experiment, edited)
        except NotReproduced:
            raise
        except Exception:  # of what cannot be read, which the run names when it reads it
            if edited:
                raise
