"""The Ray cluster of a run and the server on it. Fast to import: a run starts them before it imports torch."""

import uuid
from contextlib import ExitStack
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cfl_ray.config import RuntimeConfig
from cfl_ray.run_directory.session_file import NAMESPACE
from cfl_ray.runtime.on_ray.connect import connect
from cfl_ray.runtime.on_ray.host_actor import server_runtime_env
from cfl_ray.runtime.on_ray.placement import host_count
from cfl_ray.runtime.on_ray.server_actor import server_actor_class
from cfl_ray.system.signals import sigterm_interrupts


class Cluster:
    """A cluster that is joined or was started for this run, with at most one server.

    On a cluster of the run's own, the server and its hosts begin at once: they import torch while the driver prepares
    the federation. Raises ConfigError if the cluster cannot be joined or lacks the resources.
    """

    def __init__(self, runtime: RuntimeConfig):
        self.runtime = runtime
        self.session = uuid.uuid4().hex  # names the driver's session; each of its servers adds a number
        self.servers, self.closed = 0, False
        self.server: Any = None  # the actor; None: there is none yet
        self.started_here = connect(runtime.address, runtime.hosts, runtime.cpu_capability)
        self.signals = ExitStack()
        self.signals.enter_context(sigterm_interrupts())
        try:
            if self.started_here and not runtime.clients_per_host:
                self.begin_server(self.host_count(runtime.hosts))
        except BaseException:
            self.close()
            raise

    def host_count(self, asked_for: int | None) -> int:
        """Number of hosts to start; `placement.host_count` says more."""
        grows = self.runtime.wait_for_hosts != "auto" and not self.started_here
        return host_count(self.runtime, asked_for, ray.cluster_resources(), grows)

    @property
    def server_name(self) -> str:
        return f"{self.session}-{self.servers}"

    def begin_server(self, hosts: int) -> None:
        """Creates a server with its hosts, on the node of the driver, which has the run directory."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self.servers += 1
        self.server = (
            server_actor_class()
            .options(
                num_cpus=0,
                scheduling_strategy=here,
                name=self.server_name,
                namespace=NAMESPACE,
                enable_task_events=False,  # as for hosts
                runtime_env=server_runtime_env(self.runtime.cpu_capability),
            )
            .remote()
        )
        self.begun = self.server.begin.remote(self.runtime, hosts)

    def end_server(self) -> None:
        """Ends the server, which may only be out of reach: it would work in addition to the next one."""
        if self.server is not None:
            ray.kill(self.server)
            self.server = None

    def close(self) -> None:
        """Ends the server with its hosts, and a cluster that was started here; once, also if that is interrupted."""
        if self.closed:
            return
        self.closed = True
        self.end_server()
        if self.started_here:
            ray.shutdown()
        self.signals.close()
