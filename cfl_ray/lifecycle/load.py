"""Loading of a finished, stopped or live run from its files, with its trained methods."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

from cfl_ray.config import Experiment
from cfl_ray.engine.in_process import InProcessBackend
from cfl_ray.errors import ConfigError, DataError
from cfl_ray.results.load import recorded_run
from cfl_ray.results.results import Results
from cfl_ray.results.run_record import check_is_of_run
from cfl_ray.results.trained import TrainedMethod
from cfl_ray.results.trust import load_record
from cfl_ray.run_directory import RunDirectory
from cfl_ray.runtime.round_loop import RoundLoop
from cfl_ray.runtime.session import checkpoint_store
from cfl_ray.setup.prepare import prepare
from cfl_ray.setup.setup import Setup
from cfl_ray.tracking import read_end


def load_run(run_dir: str | Path, experiment: Experiment | None = None, trust: bool = False) -> Results:
    """The recorded results of a run; for a live or stopped run, models are those of the last checkpoint.

    experiment: the experiment of the run, required if it has objects made in Python (a Federation, a model, a method).
    trust: True imports the Python files that the run names, even if this user did not start it on this machine; False
        raises ConfigError for such files.
    Raises ConfigError if `run_dir` holds no run, or that of another experiment. Data are read when a model is needed.
    """
    directory, run_directory = Path(run_dir).absolute(), RunDirectory(run_dir)
    run_directory.require_run()
    if experiment is not None:
        check_is_of_run(run_directory, experiment)
    of_run = experiment or load_record(directory, trust, connects=False)

    def setup() -> Setup:
        if experiment is None:
            load_record(directory, trust)  # checks trust in the paths of the record, which are read now
        return prepare(of_run)

    return recorded_run(directory, of_run, opener(directory, setup))


def opener(run_dir: Path, setup: Callable[[], Setup]) -> Callable[[str], TrainedMethod]:
    """A function from a label to the trained method of a run. setup: makes the run's setup, once, on first use."""

    @cache
    def prepared() -> Setup:
        try:
            return setup()
        except ConfigError as error:
            raise type(error)(
                f"the models of {run_dir} need the run's data and network again, and these cannot be made: {error}; "
                "if the experiment has objects made in Python, pass it: load_run(RUN, experiment); the metrics "
                "(to_frame, client_metrics) need neither"
            ) from error

    return lambda label: load_trained(prepared(), label, run_dir)


def load_trained(setup: Setup, label: str, run_dir: Path) -> TrainedMethod:
    """A method of a run as of its newest checkpoint, also while the run is live.

    Raises ConfigError if there is no checkpoint yet, DataError if that of the last round of a finished method cannot
    be read.
    """
    store = checkpoint_store(setup, run_dir, label)
    if store is None or not store.rounds():
        raise ConfigError(
            f"{RunDirectory(run_dir).method(label).path} has no checkpoint yet; see `cfl-ray status {run_dir}`"
        )
    backend = InProcessBackend(setup.worker())
    trained = RoundLoop(setup, label, backend.worker.network, backend, store).trained(backend)
    directory = RunDirectory(run_dir).method(label)
    end = read_end(directory.path)
    if end is not None and end.status == "FINISHED" and trained.round < end.summary.round:
        raise DataError(
            f"{directory.checkpoints}: the checkpoint of round {end.summary.round}, the last one, is missing or "
            f"damaged, and the newest that can be read is of round {trained.round}; restore it, or remove "
            f"{directory.end} and resume the run, which trains from round {trained.round} on"
        )
    return trained
