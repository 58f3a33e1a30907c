"""What the server actor does: it drives a server and its hosts, and answers what people ask of a live run."""

import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cfl_ray.core.errors import DataError, RunError
from cfl_ray.core.threads import one_thread
from cfl_ray.data import Federation, open_shards
from cfl_ray.runtime.connect import first_line, told
from cfl_ray.runtime.hosts import fetched
from cfl_ray.runtime.journal import Shards
from cfl_ray.runtime.pool import Pool
from cfl_ray.runtime.port import OnRay
from cfl_ray.runtime.server import Report, Server
from cfl_ray.runtime.session import store_of
from cfl_ray.runtime.setup import Setup

_OPEN_SECONDS = 120


class ServerSide:
    """What the server actor does: rounds on its hosts, and answers to what is asked meanwhile."""

    def __init__(self, packed: list[ray.ObjectRef], begun: list, run_dir: Path | None, session: str, fault: tuple[float, str] | None):
        """begun: the hosts. session: names the driver's session. fault: when the last server died, and of what."""
        self.threads = ExitStack()  # of this process, until it ends
        self.threads.enter_context(one_thread())
        self.setup: Setup = fetched(packed[0])
        self.run_dir, self.session, self.last_fault = run_dir, session, fault
        self.server: Server | None = None
        self.replacing = threading.Lock()  # held while a server is made: it must know every request that was granted
        self.pool = Pool(self.setup)
        self.pool.start(begun, packed[0])
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

    def ask(self, verb: str, *arguments) -> Any:
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
