"""A session on a Ray cluster: a server actor beside the driver, client hosts wherever there is room."""

import signal
import sys
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cfl_ray.core.errors import DataError, RunError
from cfl_ray.core.plugin import PREFIX
from cfl_ray.data import Federation, open_shards
from cfl_ray.runtime.atwork import NAMESPACE, Session, announce, withdraw
from cfl_ray.runtime.connect import connect, first_line, told
from cfl_ray.runtime.hosts import fetched
from cfl_ray.runtime.journal import Shards
from cfl_ray.runtime.lifecycle import Failed, Lost, Plan, Starting, next_state
from cfl_ray.runtime.placement import host_count
from cfl_ray.runtime.pool import FORGIVEN_SECONDS, Pool
from cfl_ray.runtime.port import OnRay
from cfl_ray.runtime.server import Report, Server
from cfl_ray.runtime.session import store_of
from cfl_ray.runtime.setup import Setup

LIVE = "live"  # the concurrency group of what is asked from outside
_LIVE_THREADS = 4
_OPEN_SECONDS = 120


class ServerActor:
    """The server in a process of its own; it owns the hosts.

    One thread does the rounds; others answer what people ask meanwhile (`ask`), so that nobody waits for a round.
    """

    def start(self, packed: list[ray.ObjectRef], run_dir: Path | None, hosts: int, session: str, fault: tuple[float, str] | None) -> None:
        """Starts the hosts. Not in the constructor, for the reason given in `ClientHost.start`.

        session: names the driver's session. fault: when the last server died, and of what.
        """
        torch.set_num_threads(1)
        self.setup: Setup = fetched(packed[0])
        self.run_dir, self.session, self.last_fault = run_dir, session, fault
        self.server: Server | None = None
        self.replacing = threading.Lock()  # held while a server is made: it must know every request that was granted
        self.pool = Pool(self.setup)
        self.pool.start(hosts, packed[0])
        self.network = self.setup.network()

    def begin(self, label: str) -> Report:
        self.label = label
        with self.replacing:
            server = Server(self.setup, label, self.network, OnRay(self.pool), store_of(self.setup, self.run_dir, label), self.session)
            report, self.server = server.advance(), server
        return self._with_notes(report)

    def advance(self) -> Report:
        try:
            return self._with_notes(self.server.advance())
        except ObjectLostError as error:  # what clients own went down with a node: the last checkpoint has it
            self.pool.fault(f"what clients own was lost with a node ({first_line(error)})")
            return self.begin(self.label)

    def _with_notes(self, report: Report) -> Report:
        notes, self.pool.notes = self.pool.notes, []
        return replace(report, notes=(*notes, *report.notes))

    def facts(self) -> dict[str, str]:
        nodes = self.pool.nodes()
        return {"hosts": f"{len(self.pool.hosts)} on {nodes} node{'s' * (nodes > 1)}", "device": self.pool.device, "engine": self.pool.choice.reason}

    # ---- asked from outside, while a round may be at work

    @ray.method(concurrency_group=LIVE)
    def ask(self, verb: str, *arguments) -> Any:
        """What `cfl-ray status`, `join`, `leave` and `stop` ask of a live run. Raises ConfigError for a request that is refused."""
        if getattr(self, "server", None) is None:
            raise RunError("the run is only starting; ask again in a moment")
        if verb == "status":
            return self._status()
        if verb == "join_shards":
            arguments = self._opened(*arguments)
        with self.replacing:
            requests = self.server.requests
            grant = {"join": requests.join, "join_shards": requests.join_shards, "leave": requests.leave, "stop": requests.stop}[verb]
            return grant(*arguments)

    def _status(self) -> dict[str, Any]:
        server, hosts = self.server, list(self.pool.hosts)
        population, ready = server.requests.population, [host for host in hosts if not host.starting]
        return {
            "method": server.requests.label,
            "state": type(server.now).__name__.lower(),
            "round": server.now.round,
            "hosts": len(ready),
            "hosts_starting": len(hosts) - len(ready),
            "nodes": len({host.node for host in ready}),
            "clients_online": len(population.online),
            "clients": population.num_clients,
            "last_fault": self.pool.last_fault or self.last_fault,
            "pending": server.requests.pending(),
        }

    def _opened(self, uri: str) -> tuple[Shards, Federation]:
        """Shards, read whole once here, and opened on every other node that has a host. Raises DataError where they cannot be."""
        added = open_shards(uri, verify=True)
        here = ray.get_runtime_context().get_node_id()
        for node in {host.node for host in list(self.pool.hosts) if host.node} - {here}:
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            try:
                ray.get(ray.remote(_openable).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(added.uri), timeout=_OPEN_SECONDS)
            except RayTaskError as error:
                raise DataError(f"a host on node {node[:8]} cannot read these shards ({told(error)}); put them where every node finds them") from error
            except RayError as error:
                raise RunError(f"whether node {node[:8]} can read these shards could not be found out ({first_line(error)}); ask again") from error
        return Shards(added.uri, added.digest), added


def _openable(uri: str) -> None:
    open_shards(uri)


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
        kind = ray.remote(concurrency_groups={LIVE: _LIVE_THREADS})(ServerActor)
        self.actor = kind.options(num_cpus=0, scheduling_strategy=here, name=name, namespace=NAMESPACE).remote()
        self.started = self.actor.start.remote([self.setup_ref], self.run_dir, self.hosts, self.name, self.last_fault)
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
