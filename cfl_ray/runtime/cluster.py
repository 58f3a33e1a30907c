"""A session on a Ray cluster: a server actor beside the driver, client hosts wherever there is room."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cfl_ray.core.plugin import PREFIX
from cfl_ray.core.errors import ConfigError, RunError, UserError
from cfl_ray.runtime.lifecycle import Failed, Lost, Plan, Starting, next_state
from cfl_ray.runtime.pool import Pool, host_count, told
from cfl_ray.runtime.port import OnRay
from cfl_ray.runtime.server import Report, Server
from cfl_ray.runtime.session import store_of
from cfl_ray.runtime.setup import Setup, cluster_address


class ServerActor:
    """The server in a process of its own; it owns the hosts."""

    def __init__(self, setup: Setup, run_dir: Path | None, hosts: int):
        torch.set_num_threads(1)
        self.setup, self.run_dir = setup, run_dir
        self.pool = Pool(setup)
        self.pool.start(hosts)
        self.network = setup.network()

    def begin(self, label: str) -> Report:
        self.server = Server(self.setup, label, self.network, OnRay(self.pool), store_of(self.setup, self.run_dir, label))
        return self._with_faults(self.server.advance())

    def advance(self) -> Report:
        return self._with_faults(self.server.advance())

    def _with_faults(self, report: Report) -> Report:
        faults, self.pool.faults = self.pool.faults, []
        return replace(report, notes=(*report.notes, *faults))

    def facts(self) -> dict[str, str]:
        nodes = len({node["NodeID"] for node in ray.nodes() if node["Alive"]})
        return {"hosts": f"{len(self.pool.hosts)} on {nodes} node{'s' * (nodes > 1)}", "device": self.pool.device, "engine": self.pool.choice.reason}


class RaySession:
    """Starts or joins a cluster, and the server on it. A server that dies is started again from its last checkpoint."""

    def __init__(self, setup: Setup, run_dir: Path | None):
        self.setup, self.run_dir = setup, run_dir
        self.plan = Plan(setup.experiment.rounds)
        self.retries = setup.experiment.runtime.retries
        self.started_here = connect(setup.experiment.runtime.address, setup.experiment.runtime.hosts)
        _send_plugins_by_value()
        self.hosts = host_count(setup, ray.cluster_resources())
        self.label: str | None = None
        self._start_server()

    def _start_server(self) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)  # beside the run directory
        self.actor = ray.remote(ServerActor).options(num_cpus=0, scheduling_strategy=here).remote(self.setup, self.run_dir, self.hosts)

    def begin(self, label: str) -> Report:
        self.label = label
        return self._ask("begin", label)

    def advance(self) -> Report:
        return self._ask("advance")

    def facts(self) -> dict[str, str]:
        return self._ask("facts")

    def _ask(self, verb: str, *arguments):
        try:
            return ray.get(getattr(self.actor, verb).remote(*arguments))
        except RayTaskError as error:
            raise told(error) from error
        except RayActorError as error:
            if isinstance(error.cause if hasattr(error, "cause") else None, UserError):
                raise error.cause from error
            return self._recover(error)

    def _recover(self, error: RayActorError) -> Report:
        """Another server, from the last checkpoint of the method at work."""
        cause = str(error).strip().splitlines()[0]
        store = store_of(self.setup, self.run_dir, self.label) if self.label else None
        saved = (store.rounds() or [0])[-1] if store else 0
        now = next_state(Starting(), Lost(cause, saved, self.retries), self.plan)
        if isinstance(now, Failed):
            raise RunError(f"the server died ({now.cause}); everything up to round {now.from_round} is saved: `cfl-ray resume {self.run_dir}` goes on")
        self.retries -= 1
        self._start_server()
        report = self._ask("begin", self.label)
        return replace(report, notes=(f"the server died and was started again: {cause}", *report.notes))

    def close(self) -> None:
        ray.kill(self.actor)
        if self.started_here:
            ray.shutdown()


def connect(address: str | None, hosts: int | None = None) -> bool:
    """Joins the cluster at `address` (or RAY_ADDRESS), or starts one for this run on loopback. Returns whether it was started here."""
    if ray.is_initialized():
        return False
    address = cluster_address(address)
    quiet = {"log_to_driver": False, "logging_level": "error"}
    if address is None:
        cpus = max(hosts or 0, len(os.sched_getaffinity(0)))
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
        return True
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"no Ray cluster at {address} ({reason}); start one with `ray start --head`, or leave out runtime.address and RAY_ADDRESS to run on this machine"
        ) from error
    return False


def _send_plugins_by_value() -> None:
    """A user's file is not importable on other nodes, so what it defines travels whole."""
    for name, module in list(sys.modules.items()):
        if name.startswith(PREFIX):
            ray.cloudpickle.register_pickle_by_value(module)
