"""A session on a Ray cluster: a server actor beside the driver, client hosts wherever there is room."""

import signal
import sys
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cfl_ray.core.errors import RunError
from cfl_ray.core.plugin import PREFIX
from cfl_ray.runtime.actors import server_kind
from cfl_ray.runtime.atwork import NAMESPACE, Session, announce, withdraw
from cfl_ray.runtime.connect import connect, first_line, told
from cfl_ray.runtime.lifecycle import Failed, Lost, Plan, Starting, next_state
from cfl_ray.runtime.placement import host_count
from cfl_ray.runtime.pool import FORGIVEN_SECONDS
from cfl_ray.runtime.server import Report
from cfl_ray.runtime.session import store_of
from cfl_ray.runtime.setup import Setup


class RaySession:
    """Starts or joins a cluster, and the server on it. A server that dies is started again from its last checkpoint."""

    def __init__(self, setup: Setup, run_dir: Path | None):
        self.setup, self.run_dir = setup, run_dir
        self.plan = Plan(setup.experiment.rounds)
        self.retries, self.since = setup.experiment.runtime.retries, time.monotonic()
        self.label: str | None = None
        self.faults: list[str] = []
        self.last_fault: tuple[float, str] | None = None
        self.name = uuid.uuid4().hex  # of this session; each of its servers adds a number
        self.servers = 0
        self.actor = None
        self.started_here = connect(setup.experiment.runtime.address, setup.experiment.runtime.hosts)
        self.on_sigterm = _stop_as_by_ctrl_c()
        try:
            _send_plugins_by_value()
            self.hosts = host_count(setup, ray.cluster_resources())
            self.setup_ref = ray.put(setup)
            self._start_server()
        except BaseException:
            self.close()
            raise

    def _start_server(self) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)  # beside the run directory
        self.servers += 1
        name = f"{self.name}-{self.servers}"
        self.actor = server_kind().options(num_cpus=0, scheduling_strategy=here, name=name, namespace=NAMESPACE).remote()
        self.started = self.actor.start.remote([self.setup_ref], self.setup.experiment.runtime, self.hosts, self.run_dir, self.name, self.last_fault)
        if self.label:
            self._announce()

    def _announce(self) -> None:
        """Lets the command line find the server."""
        if self.run_dir is not None:
            configured = self.setup.experiment.runtime.address or ""
            address = configured if configured.startswith("ray://") else ray.get_runtime_context().gcs_address
            if self.started_here:
                address = f"127.0.0.1:{address.rpartition(':')[2]}"  # where it listens, whatever it says
            announce(self.run_dir, Session.here(address, f"{self.name}-{self.servers}", self.started_here))

    def begin(self, label: str) -> Report:
        self.label = label
        self._announce()
        return self._with_faults(self._ask("begin", label))

    def advance(self) -> Report:
        return self._with_faults(self._ask("advance"))

    def facts(self) -> dict[str, str]:
        return self._ask("facts")

    def _with_faults(self, report: Report) -> Report:
        faults, self.faults = self.faults, []
        return replace(report, notes=(*faults, *report.notes))

    def _ask(self, verb: str, *arguments):
        while True:
            try:
                ray.get(self.started)
                return ray.get(getattr(self.actor, verb).remote(*arguments))
            except RayTaskError as error:
                raise told(error) from error
            except RayActorError as error:
                self._recover(error)
                if self.label:
                    verb, arguments = "begin", (self.label,)  # the new server knows what is in the checkpoint, nothing else

    def _recover(self, error: RayActorError) -> None:
        """Starts another server, or raises RunError after too many. The checkpoint of the method at work is for it to load."""
        cause = first_line(error)
        store = store_of(self.setup, self.run_dir, self.label) if self.label else None
        saved = (store.rounds() or [0])[-1] if store else 0
        if time.monotonic() - self.since > FORGIVEN_SECONDS:
            self.retries = self.setup.experiment.runtime.retries
        self.since = time.monotonic()
        now = next_state(Starting(), Lost(cause, saved, self.retries), self.plan)
        if isinstance(now, Failed):
            raise RunError(f"the server died after round {now.from_round} ({now.cause})")
        self.retries -= 1
        self.faults.append(f"the server died and was started again: {cause}")
        self.last_fault = (time.time(), self.faults[-1])
        self._start_server()

    def close(self) -> None:
        if self.run_dir is not None:
            withdraw(self.run_dir)
        if self.actor is not None:
            ray.kill(self.actor)
        if self.started_here:
            ray.shutdown()
        if self.on_sigterm is not None:
            signal.signal(signal.SIGTERM, self.on_sigterm)


def _stop_as_by_ctrl_c():
    """SIGTERM, which is how a submitted job is stopped, ends the run as Ctrl-C does; Ray would abort. Returns what handled it before."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return signal.signal(signal.SIGTERM, signal.default_int_handler)


def _send_plugins_by_value() -> None:
    """A user's file is not importable on other nodes, so what it defines travels whole."""
    for name, module in list(sys.modules.items()):
        if name.startswith(PREFIX):
            ray.cloudpickle.register_pickle_by_value(module)
