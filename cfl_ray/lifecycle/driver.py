"""Drives the methods of an experiment one after another and records their rounds.

The end of a method (figures, tables, and records that MLflow lacks) is written during the rounds of the next method.
"""

import logging
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

from cfl_ray.errors import NotReproduced, RunStopped, class_and_text
from cfl_ray.errors.redaction import redact
from cfl_ray.lifecycle.load import load_trained
from cfl_ray.lifecycle.recorder import MethodRecorder, copy_figures, finish_log, write_figures
from cfl_ray.methods import full_label
from cfl_ray.plugins.calling import reference_of
from cfl_ray.results.environment import add_fallbacks
from cfl_ray.results.export import save_models
from cfl_ray.results.kept_code import kept_code
from cfl_ray.results.recorded_runs import FoundRun, recorded_result
from cfl_ray.results.reporting import report_at_the_end
from cfl_ray.results.results import MethodResult, Results, divergence
from cfl_ray.results.run_record import params_of
from cfl_ray.results.study_folder import is_finished
from cfl_ray.results.trained import TrainedMethod
from cfl_ray.results.verification import verify
from cfl_ray.run_directory import RunDirectory
from cfl_ray.runtime.session import Session
from cfl_ray.setup.prepare import with_parts_of
from cfl_ray.setup.scheduled_changes import ignored_events
from cfl_ray.setup.setup import Setup
from cfl_ray.system.signals import raise_interrupt
from cfl_ray.system.threads import one_thread
from cfl_ray.tracking import RoundRecord, RunInfo, RunLog, new_trackers, resolve_uri
from cfl_ray.tracking.record import OFF, EndStatus, metric_names, primary_of, validation_metric

_logger = logging.getLogger(__name__)


class Watcher:
    """Receives the events of a run; the default logs warnings, which Python prints, and ignores the rest."""

    def preparing(self, what: str, done: int = 0, total: int = 0) -> None:
        """A part of the run is prepared. what: it, for the user. done, total: its steps; total 0: not known."""

    def started(self, setup: Setup, run_dir: Path | None, run_info: dict[str, str]) -> None:
        """The run begins. run_info: hosts, device, engine, CPU and PyTorch."""
        for warning in setup.warnings + setup.federation.warnings + ignored_events(setup.experiment):
            self.warn(warning)
        for note in setup.federation.notes:
            _logger.info(note)

    def method(self, label: str, record: RoundRecord) -> None:
        """A method begins, or goes on after the round of `record`."""

    def round(self, label: str, record: RoundRecord) -> None:
        """A round is complete. `record.fallbacks` are those of this round that no earlier one had."""
        for line in record.fallbacks:
            self.warn(f"{label}: {line}")

    def complete(self, results: Results) -> None:
        """All rounds of all methods are complete."""
        if reasons := divergence(results):
            self.warn(reasons)

    def warn(self, text: str) -> None:
        """Something is wrong that does not end the run."""
        _logger.warning(text)


@dataclass(frozen=True)
class StudyPlace:
    """The place of a run in a study."""

    root: Path  # folder of the study, which has the parent run of all its runs
    setting: str
    method: str  # label


class Driver:
    """Drives a session through the methods and records their rounds."""

    def __init__(
        self,
        setup: Setup,
        session: Session,
        directory: Path | None,
        watcher: Watcher,
        run_info: dict[str, str],
        study: StudyPlace | None = None,
    ):
        self.setup, self.session, self.directory, self.watcher = setup, session, directory, watcher
        self.run_info = run_info
        self.study = study  # None: the run is not in a study
        self.experiment = setup.experiment
        self.stopped = False  # on request
        self.parent: RunLog | None = None  # of the comparison of all methods
        self.writer = ThreadPoolExecutor(1, "end-of-method")
        self.ending: Future[None] | None = None  # of the previous method
        self.not_reproduced: list[str] = []  # by saved models of the methods so far
        self.uri: str | None = None  # of MLflow; None: results stay in files
        if self.experiment.tracking.uses_mlflow and directory:
            self.uri = resolve_uri(self.experiment.tracking, self.experiment.output)

    def all_methods(self) -> Results:
        """The results of every method. Raises RunStopped when a request ended the run."""
        parent = self._run_log(None)
        status: EndStatus = "FAILED"
        results: dict[str, MethodResult] = {}
        self.parent = parent
        try:
            for label in self.setup.methods:
                if self.stopped:
                    raise RunStopped(f"stopped before {label}, as asked")
                results[label] = self._method(label)
            self._check_ending(wait=True)
            if self.directory is not None:
                self._write_artifacts(self.directory, results)
            if self.not_reproduced:
                raise NotReproduced("; ".join(self.not_reproduced))
            status = "FINISHED"
        except (KeyboardInterrupt, RunStopped):
            status = "KILLED"
            raise
        finally:
            self.writer.shutdown()  # waits for the end of the last method
            finish_log(parent, status, _comparison(results), self.watcher.warn)
        finished = Results(results, self.directory, redact(self.uri) if self.uri else None, self.run_info)
        self.watcher.complete(finished)
        return finished

    def _write_artifacts(self, directory: Path, results: dict[str, MethodResult]) -> None:
        """Writes the figures that compare all methods, and the report. A single method's figures are copied."""
        records = {label: result.records for label, result in results.items()}
        files = RunDirectory(directory)
        if len(results) > 1 or not copy_figures(files.method(*results).artifacts, files.artifacts):
            write_figures(files.artifacts, records, self.watcher.warn)
        if self.experiment.tracking.report and self.study is None:  # a study has one page for all its runs
            run = FoundRun(directory, self.experiment, Results(results, directory))
            report_at_the_end(directory, lambda: [run], self.watcher.warn)

    def _method(self, label: str) -> MethodResult:
        """Runs one method to its end; the result of a method that finished earlier is read from its files."""
        run_dir = self.directory
        directory = run_dir and RunDirectory(run_dir).method(label).path
        if directory is not None and is_finished(directory):
            return recorded_result(label, directory, self._opens_trained(label))
        run_log = self._run_log(label)
        try:
            recorder = MethodRecorder(self.setup, label, directory, run_log)
            recorder.summarise(self._rounds(label, recorder))
            self._check_ending(wait=True)
            open_trained = cache(self._opens_trained(label))
            is_reproduced = self._verify(recorder.result(), open_trained)
            if run_dir is not None and self.uri is not None and self.experiment.tracking.log_models:
                # here, not with the end of the method: torch.export must not run while the next method trains
                save_models(open_trained(), RunDirectory(run_dir).method(label).models, self.watcher.warn)
        except BaseException as error:
            status: EndStatus = "KILLED" if isinstance(error, (KeyboardInterrupt, RunStopped)) else "FAILED"
            finish_log(run_log, status, {}, self.watcher.warn)
            raise
        end: EndStatus = "FINISHED" if is_reproduced else "FAILED"
        self.ending = self.writer.submit(recorder.finish, self.watcher.warn, end)
        return recorder.result(self._opens_trained(label))

    def _verify(self, result: MethodResult, open_trained: Callable[[], TrainedMethod]) -> bool:
        """Whether the saved models give the recorded scores. If not, the run goes on, and ends with an error."""
        if not self.experiment.evaluation.verify:
            return True
        try:
            with one_thread():  # the hosts train the next method, and a second thread would wait for them
                verify(self._opens_copy(result.label, open_trained)(), result, self.experiment)
        except NotReproduced as error:
            self.watcher.warn(str(error))
            self.not_reproduced.append(str(error))
            return False
        return True

    def _opens_copy(self, label: str, open_trained: Callable[[], TrainedMethod]) -> Callable[[], TrainedMethod]:
        """Opens the method with the run's copy of the user's code, as a copied run is loaded; without one, as it is."""
        kept = None if self.directory is None else kept_code(self.directory)
        references = {} if kept is None else kept.references(self.experiment.references)
        if self.directory is None or not references:
            return open_trained
        try:
            setup = with_parts_of(self.setup, self.experiment.with_code(references))
        except Exception as error:  # as of a file beside the code, which is not copied
            self.watcher.warn(
                f"the copy of the user's code, in {RunDirectory(self.directory).user_code}, cannot be used, so this "
                f"run needs the original files: {class_and_text(error)}"
            )
            return open_trained
        return partial(load_trained, setup, label, self.directory)

    def _opens_trained(self, label: str) -> Callable[[], TrainedMethod]:
        if self.directory is None:
            of_session = self.session.trained()
            assert of_session is not None  # a session on a cluster keeps files
            return of_session
        return partial(load_trained, self.setup, label, self.directory)

    def _rounds(self, label: str, recorder: MethodRecorder) -> RoundRecord:
        """Records the rounds of the method, and returns the last. Raises RunStopped if a request ended the run."""
        notify = self.watcher.method
        record_wait = partial(self._record_wait, label, recorder)
        for record in self.session.rounds(label, record_wait):  # first the restored one, which may not be recorded yet
            recorder.add(record)
            if record.fallbacks and self.directory is not None:
                add_fallbacks(self.directory, label, record.fallbacks)
            notify(label, record)
            notify = self.watcher.round
            self._check_ending()
            raise_interrupt()
        self.stopped = record.stop
        if not record.finished:
            raise RunStopped(f"stopped after round {record.round} of {label}, as asked")
        return record

    def _record_wait(self, label: str, recorder: MethodRecorder, text: str) -> None:
        """Records that a round waits, in the runs of its method and of the comparison. text: for what it waits."""
        where = f"{label} round {recorder.last_round + 1}"
        for run_log in filter(None, (recorder.run_log, self.parent)):
            run_log.tell(f"{where}: {text}")

    def _check_ending(self, wait: bool = False) -> None:
        """Raises the error of writing the end of the previous method, if it is complete. wait: until it is complete."""
        if self.ending is not None and (wait or self.ending.done()):
            ending, self.ending = self.ending, None
            ending.result()

    # ---- tracking

    def _run_log(self, label: str | None) -> RunLog | None:
        """The log of one method, or of the comparison of all (None), started; None if no files are kept."""
        if self.directory is None:
            return None
        in_study = self.study is not None
        if label is None:
            directory, parent, uri = self.directory, None, None if in_study else self.uri  # the study compares its runs
        else:
            directory, uri = RunDirectory(self.directory).method(label).path, self.uri
            parent = self.directory if self.study is None else self.study.root
        tracking = self.experiment.tracking
        trackers = new_trackers(tracking, uri, parent, self.watcher.warn)  # `prepare` has made them once, or refused
        run_log = RunLog(directory, trackers, self.watcher.warn, patience=tracking.patience)
        run_log.start(self._run_info(label))
        return run_log

    def _run_info(self, label: str | None) -> RunInfo:
        data, experiment = self.experiment.data, self.experiment
        tags: dict[str, Any] = {
            "name": experiment.name,
            "dataset": reference_of(data.source),
            "partition": "/".join(
                reference_of(kind) for kind in (data.shift.kind, data.partition.kind) if kind != "none"
            ),
            "seed": experiment.seed,
            "config_hash": experiment.config_hash,
            "git_commit": _git_commit(),
        }
        params = params_of(experiment) | {f"session.{key}": value for key, value in self.run_info.items()}
        if "session.engine" in params:  # its name; the reason is in environment.json
            params["session.engine"] = params["session.engine"].partition(":")[0]
        when = f"seed {experiment.seed}, {time.strftime('%Y-%m-%d %H:%M')}"
        if label is None:
            return RunInfo(f"{experiment.name}, {when}", "", tags, params)
        method = self.setup.methods[label]
        del params["methods"]  # of the comparison; the options of this method are below `method.`
        options = {f"method.{item.name}": str(getattr(method, item.name)) for item in fields(method)}
        params |= {name: value for name, value in options.items() if value not in OFF}
        tags |= {"method": method.name, "label": label, "phases": ", ".join(method.phases)}
        if (study := self.study) is not None:
            tags |= {"label": study.method, "setting": study.setting, "study": study.root.name}
            return RunInfo(f"{study.setting}, {study.method}, seed {experiment.seed}", method.name, tags, params)
        # the method first, since MLflow cuts long names in its list of runs and in legends
        return RunInfo(f"{full_label(method)}, {experiment.name}, {when}", method.name, tags, params)


def _comparison(results: Mapping[str, MethodResult]) -> dict[str, float]:
    """Metrics of the parent run, LABEL/METRIC: the last evaluation of every method."""
    comparison, names = dict[str, float](), metric_names(results)
    for label, result in results.items():
        if final := result.final:
            primary = primary_of(final)
            scores = [primary, f"{primary}_local", *(["macro_f1"] if primary == "accuracy" else [])]
            scores.append(validation_metric(primary))
            comparison |= {
                f"{names[label]}/{name}": final[name] for name in (*scores, "num_clusters", "ari") if name in final
            }
    return comparison


@cache  # that of the code which this process imported
def _git_commit() -> str:
    """The commit of the running code, or "unknown" outside a checkout."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        commit = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return commit.stdout.strip() or "unknown"
