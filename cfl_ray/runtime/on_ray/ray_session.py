"""A session on a Ray cluster: a server actor on the driver's node, client hosts on any node with free resources."""

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, RayError, RayTaskError, RuntimeEnvSetupError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cfl_ray.errors import ConfigError, RunError, RunStopped, class_and_text, command, duration
from cfl_ray.plugins.calling import place_of
from cfl_ray.plugins.loading import sent_by_value
from cfl_ray.results.environment import Environment
from cfl_ray.results.user_code import objects_of
from cfl_ray.run_directory import RunDirectory
from cfl_ray.run_directory.session_file import NAMESPACE, ServerAddress, publish_server, withdraw_server
from cfl_ray.runtime.journal import Journal, JournalEvent
from cfl_ray.runtime.on_ray.ask import StopRequests
from cfl_ray.runtime.on_ray.connect import as_user_error, connect, end_cluster, listens_on_loopback, short_reason
from cfl_ray.runtime.on_ray.host_actor import server_runtime_env
from cfl_ray.runtime.on_ray.placement import host_count, machines
from cfl_ray.runtime.on_ray.retry import RetryPolicy
from cfl_ray.runtime.on_ray.server_actor import server_actor_class
from cfl_ray.runtime.on_ray.stall import Progress, ProgressWatch, StallRule
from cfl_ray.runtime.session import checkpoint_store
from cfl_ray.setup.setup import Setup
from cfl_ray.system.signals import sigterm_interrupts
from cfl_ray.tracking import RoundRecord
from cfl_ray.tracking.record import Status

_POLL_SECONDS, _ANSWER_SECONDS = 2.0, 1.0  # between two polls of the server's progress, and for the answer
_HEAD_SECONDS = 20.0  # for which Ray's head does not answer, until the user is told


class ServerStalled(Exception):
    """The server makes no progress."""


class RaySession:
    """Starts or joins a cluster, and the server on it. A server that dies is started again from its last checkpoint."""

    def __init__(self, setup: Setup, run_dir: Path | None, warn: Callable[[str], None] = lambda text: None):
        self.setup, self.run_dir, self.warn = setup, run_dir, warn
        self.reported = ""  # the last wait of the server that the user was told of
        self.record_wait: Callable[[str], None] = lambda text: None
        runtime = setup.experiment.runtime
        self.stall_rule = StallRule(runtime.stall_warning, runtime.stall_limit)
        self.retry = RetryPolicy("the server", runtime.retries)
        self.label: str | None = None
        self.faults: list[str] = []
        self.last_fault: tuple[float, str] | None = None
        self.name = uuid.uuid4().hex  # of this session; each of its servers adds a number
        self.servers = 0
        self.actor: Any = None
        self.ready = False  # the server has started
        self.started_here = connect(runtime.address, runtime.hosts, runtime.cpu_capability, warn)
        self.on_loopback = self.started_here and listens_on_loopback()
        self.signals = ExitStack()
        self.signals.enter_context(sigterm_interrupts())
        self.requests = StopRequests(self.name)
        try:
            for module in sent_by_value():  # a user's file and its neighbours cannot be imported on other nodes
                ray.cloudpickle.register_pickle_by_value(module)
            grows = runtime.wait_for_hosts != "auto" and not self.started_here
            self.hosts = host_count(setup, machines(), grows)
            self.setup_ref = _put(setup)
            self._start_server()
        except BaseException:
            self.close()
            raise

    @property
    def server_name(self) -> str:
        """Of the present server, on the cluster."""
        return f"{self.name}-{self.servers}"

    def _start_server(self) -> None:
        node = ray.get_runtime_context().get_node_id()  # the driver's, which has the run directory
        self.servers, self.ready = self.servers + 1, False
        runtime, actor_class = self.setup.experiment.runtime, server_actor_class()
        self.actor = actor_class.options(
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            name=self.server_name,
            namespace=NAMESPACE,
            runtime_env=server_runtime_env(runtime.cpu_capability),
            enable_task_events=False,  # as for hosts
        ).remote()
        self.started = self.actor.start.remote(
            [self.setup_ref], runtime, self.hosts, self.run_dir, self.name, self.last_fault
        )
        self._publish()

    def _publish(self) -> None:
        """Writes the address of the server, for other commands."""
        if self.run_dir is None or not RunDirectory(self.run_dir).is_run:  # a new run is not kept before it has started
            return
        configured = self.setup.experiment.runtime.address or ""
        address = configured if configured.startswith("ray://") else ray.get_runtime_context().gcs_address
        if self.on_loopback:
            address = f"127.0.0.1:{address.rpartition(':')[2]}"  # Ray may report another address
        publish_server(self.run_dir, ServerAddress.here(address, self.server_name, self.on_loopback))

    # ---- called by the driver

    def rounds(self, label: str, record_wait: Callable[[str], None]) -> Iterator[RoundRecord]:
        self.label, self.record_wait = label, record_wait
        self._publish()
        status: Status = "running"
        while status == "running":
            record: RoundRecord = self._ask("next_round", label)
            faults, self.faults = self.faults, []
            yield replace(record, notes=(*faults, *record.notes))
            status = record.status

    def about(self) -> tuple[dict[str, str], Environment]:
        return self._ask("about")

    def trained(self) -> None:
        """No models are in this process; they are in the checkpoints."""

    def close(self) -> None:
        if self.run_dir is not None:
            withdraw_server(self.run_dir)
        if self.actor is not None:
            ray.kill(self.actor)
        self.requests.close()
        if self.started_here:
            end_cluster()
        self.signals.close()

    def _ask(self, verb: str, *arguments: Any) -> Any:
        """The server's answer; a server that died is replaced first. Errors are UserErrors."""
        while True:
            try:
                if not self.ready:
                    self._answer(self.started, self.stall_rule.for_start())
                    self.ready = True
                return self._answer(self.actor.call.remote(verb, *arguments), self.stall_rule)
            except RayTaskError as error:
                raise as_user_error(error) from error
            except (RuntimeEnvSetupError, ActorUnschedulableError) as error:
                cause = " ".join(str(error).split())[:300]
                raise RunError(
                    f"the server cannot start: {cause}; it needs the driver's node, a free process and the environment "
                    "of runtime.cpu_capability"
                ) from error
            except (RayError, ServerStalled) as error:  # died, ended by Ray's memory monitor, out of reach, or hanging
                self._recover(error)

    def _answer(self, ref: ray.ObjectRef[Any], rule: StallRule) -> Any:
        """The server's answer. Meanwhile, waits of the server are reported to the user.

        Raises ServerStalled if it makes no progress for too long, RunStopped if a user asks to stop meanwhile.
        """
        watch = ProgressWatch(rule, time.monotonic(), "the server", ", from the last checkpoint")
        pending = None  # the progress that the server was asked for
        while True:
            self._end_if_asked()
            self._report(self._head_warning())
            if ray.wait([ref], timeout=_POLL_SECONDS)[0]:
                return ray.get(ref)
            progress: Progress | None = None
            pending = pending or self.actor.progress.remote()
            if ray.wait([pending], timeout=_ANSWER_SECONDS)[0]:  # otherwise a late answer counts at the next poll
                with suppress(RayError):  # the server died; `ref` has the same error
                    progress = ray.get(pending)
                pending = None
            watch.update(progress, now := time.monotonic())
            self._report((progress.waits_for if progress else "") or watch.warning(now))
            if watch.stops(now, progress is None and self.requests.is_asked):
                raise self._stopped(f"while the server has made no progress for {duration(now - watch.since)}")
            if watch.is_over(now):
                raise ServerStalled(f"it made no progress for {duration(now - watch.since)}")

    def _end_if_asked(self) -> None:
        """Raises RunStopped if a user asked to stop when no round was running."""
        if self.requests.is_due or (not self.ready and self.requests.is_asked):
            raise self._stopped("when no round was running")

    def _report(self, waits_for: str) -> None:
        """Shows and records a line for the user; an empty one and the latest one are not shown."""
        if waits_for and waits_for != self.reported:
            self.warn(waits_for)
            self.record_wait(waits_for)
            self.reported = waits_for

    def _head_warning(self) -> str:
        """A line for the user while Ray's head does not answer; empty otherwise."""
        if self.requests.silence(time.monotonic()) < _HEAD_SECONDS:
            return ""
        kept = f"; every saved round is kept: {command('resume', self.run_dir)}" if self.run_dir else ""
        return f"Ray's head does not answer; if it is gone, Ray ends this process after about 60 s{kept}"

    def _recover(self, error: Exception) -> None:
        """Starts another server, which loads the newest checkpoint.

        Raises RunError after too many, RunStopped if a user has asked to stop.
        """
        cause = short_reason(error)
        self.requests.read()
        if self.requests.is_asked:
            raise self._stopped(f"after the server died ({cause})")
        saved = self._saved()
        methods, rounds = list(self.setup.methods), self.setup.experiment.rounds
        before = methods.index(self.label) * rounds if self.label else 0  # rounds of the methods that are finished
        decision = self.retry.decide(progress=before + saved)
        if not decision.granted:
            raise RunError(f"the server died after round {saved}, the last one saved ({cause}); {decision}")
        self.faults.append(f"the server died and was started again: {cause}")
        self.last_fault = (time.time(), self.faults[-1])
        self.retry.started()
        ray.kill(self.actor)  # if it is only out of reach, both servers would run
        self._start_server()

    def _stopped(self, when: str) -> RunStopped:
        """The error that ends the run on request; the end is journaled, so that a resumed run can go beyond it."""
        if self.run_dir is not None and self.label:
            stop = JournalEvent(self._saved(), stop=self.name)
            Journal(RunDirectory(self.run_dir).method(self.label).path).add(stop)
        return RunStopped(f"stopped, as asked, {when}")

    def _saved(self) -> int:
        """The last saved round of the method; 0: none."""
        store = checkpoint_store(self.setup, self.run_dir, self.label) if self.label else None
        return (store.rounds() or [0])[-1] if store else 0


def _put(setup: Setup) -> ray.ObjectRef[Any]:
    """The setup in the object store. If the network cannot be pickled, every process makes its frozen parameters.

    Raises ConfigError for a part of the user that cannot be pickled.
    """
    try:
        return ray.put(setup)
    except Exception:
        _check_pickled(setup)
        if setup.template is None:
            raise
        return ray.put(replace(setup, template=None))


def _check_pickled(setup: Setup) -> None:
    """Raises ConfigError if a part of the experiment, or the user's own federation, cannot be pickled."""
    for part in (*objects_of(setup.experiment), setup.federation):
        try:
            ray.cloudpickle.dumps(part)
        except Exception as error:
            raise ConfigError(
                f"{place_of(part)} cannot be sent to Ray's processes: {class_and_text(error)}; make what it refers to "
                "inside the function that needs it, or run in this process (cfl_ray.simulate, --in-process)"
            ) from error
