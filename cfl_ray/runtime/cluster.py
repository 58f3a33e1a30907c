"""A session on a Ray cluster: a server actor beside the driver, client hosts wherever there is room."""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import ray
import torch
from ray._private import ray_constants
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cfl_ray.core.errors import ConfigError, RunError
from cfl_ray.core.plugin import PREFIX
from cfl_ray.runtime.hosts import fetched
from cfl_ray.runtime.lifecycle import Failed, Lost, Plan, Starting, next_state
from cfl_ray.runtime.placement import host_count
from cfl_ray.runtime.pool import FORGIVEN_SECONDS, Pool, first_line, told
from cfl_ray.runtime.port import OnRay
from cfl_ray.runtime.server import Report, Server
from cfl_ray.runtime.session import store_of
from cfl_ray.runtime.setup import Setup, cluster_address

_CONNECT_SECONDS = 10
_ATTEMPTS = "RAY_gcs_server_port_wait_time_s"  # how often Ray tries to reach a cluster; default 20, each up to 40 s


class ServerActor:
    """The server in a process of its own; it owns the hosts."""

    def start(self, packed: list[ray.ObjectRef], run_dir: Path | None, hosts: int) -> None:
        """Starts the hosts. Not in the constructor, for the reason given in `ClientHost.start`."""
        torch.set_num_threads(1)
        self.setup: Setup = fetched(packed[0])
        self.run_dir = run_dir
        self.pool = Pool(self.setup)
        self.pool.start(hosts, packed[0])
        self.network = self.setup.network()

    def begin(self, label: str) -> Report:
        self.label = label
        self.server = Server(self.setup, label, self.network, OnRay(self.pool), store_of(self.setup, self.run_dir, label))
        return self._with_notes(self.server.advance())

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


class RaySession:
    """Starts or joins a cluster, and the server on it. A server that dies is started again from its last checkpoint."""

    def __init__(self, setup: Setup, run_dir: Path | None):
        self.setup, self.run_dir = setup, run_dir
        self.plan = Plan(setup.experiment.rounds)
        self.retries, self.since = setup.experiment.runtime.retries, time.monotonic()
        self.label: str | None = None
        self.faults: list[str] = []
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
        self.actor = ray.remote(ServerActor).options(num_cpus=0, scheduling_strategy=here).remote()
        self.started = self.actor.start.remote([self.setup_ref], self.run_dir, self.hosts)

    def begin(self, label: str) -> Report:
        self.label = label
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
        self._start_server()

    def close(self) -> None:
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


def connect(address: str | None, hosts: int | None = None) -> bool:
    """Joins the cluster at `address` (or RAY_ADDRESS), or starts one for this run on loopback. Returns whether it was started here."""
    if ray.is_initialized():
        return False
    address = cluster_address(address)
    quiet = {"log_to_driver": False, "logging_level": "error"}
    if address is None:
        cpus = max(hosts or 0, len(os.sched_getaffinity(0)))
        with _loopback_only():
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
        return True
    try:
        _join(address, quiet)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise ConfigError(
            f"no Ray cluster at {address} that takes this driver ({first_line(error)}); start one with `ray start --head` (RAY_AUTH_MODE and the token "
            "must be the same here and there), or leave out runtime.address and RAY_ADDRESS to run on this machine"
        ) from error
    return False


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Ray takes 127.0.0.1 for the address that other machines reach this one by, and listens there, unless it is told that there are none."""
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _join(address: str, quiet: dict) -> None:
    """Raises soon where there is no Ray, or one that refuses the token: Ray itself would try for minutes, which this bounds."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    before = os.environ.get(_ATTEMPTS)
    os.environ.setdefault(_ATTEMPTS, "1")
    try:
        ray.init(address=address, **quiet)
    finally:
        if before is None:
            del os.environ[_ATTEMPTS]  # it would also bound the start of a cluster of our own


def _send_plugins_by_value() -> None:
    """A user's file is not importable on other nodes, so what it defines travels whole."""
    for name, module in list(sys.modules.items()):
        if name.startswith(PREFIX):
            ray.cloudpickle.register_pickle_by_value(module)
