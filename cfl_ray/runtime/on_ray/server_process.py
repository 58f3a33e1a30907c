"""The server's process: it drives the round loop on its hosts, and answers requests to a live run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cfl_ray.data import Federation, open_shards
from cfl_ray.errors import DataError, RunError, counted
from cfl_ray.results.environment import Environment, described, read_environment
from cfl_ray.runtime.journal import JoinedShards
from cfl_ray.runtime.on_ray.connect import as_user_error, short_reason
from cfl_ray.runtime.on_ray.host_process import fetch
from cfl_ray.runtime.on_ray.pool import Pool
from cfl_ray.runtime.on_ray.ray_backend import RayBackend
from cfl_ray.runtime.on_ray.retry import RetryPolicy
from cfl_ray.runtime.on_ray.stall import Progress
from cfl_ray.runtime.requests import Requests
from cfl_ray.runtime.round_loop import RoundLoop
from cfl_ray.runtime.session import store_with_lease
from cfl_ray.setup.setup import Setup
from cfl_ray.system import cpu
from cfl_ray.system.allocator import return_large_arrays
from cfl_ray.system.threads import one_thread
from cfl_ray.tracking import RoundRecord

_OPEN_SECONDS = 120  # limit for a host on another node to read shards
_GOING_BACK = 5  # times that a server goes back to the same checkpoint


class ServerProcess:
    """Rounds on the hosts, and answers to requests meanwhile.

    packed: the reference of the setup, in a list, which Ray does not resolve. session: names the driver's session.
    fault: time and cause of the last server's death; None: this is the first one.
    """

    def __init__(
        self, packed: list[ray.ObjectRef[Any]], run_dir: Path | None, session: str, fault: tuple[float, str] | None
    ):
        return_large_arrays()
        self.threads = ExitStack()  # held until this process ends
        self.threads.enter_context(one_thread())
        self.setup: Setup = fetch(packed[0])
        cpu.check_instructions(self.setup.experiment.runtime.cpu_capability, "in the server")
        self.run_dir, self.session, self.last_fault = run_dir, session, fault
        self.label = ""  # label of the present method
        self.loop: RoundLoop | None = None  # None while it is made
        self.requests: Requests | None = None  # of the loop, or of the last one while the next is made
        self.rounds: Iterator[RoundRecord] = iter(())  # records of the loop
        self.replacing = threading.Lock()  # held while a loop is made, which reads all granted requests
        kept = read_environment(run_dir)
        choice = kept.choice if kept else None
        self.pool = Pool(self.setup, kept_choice=choice, had_hosts=fault is not None, stop_asked=self._stop_asked)
        self.network = self.setup.network()

    # ---- called by the driver

    def next_round(self, label: str) -> RoundRecord:
        """The next record of a method: of the restored round (0: none), then of each round.

        If client states are lost, the newest checkpoint is restored. Raises RunError if that happens too often without
        a new checkpoint.
        """
        if self.label != label:
            self.label = label
            self.going_back = RetryPolicy("the exchange", _GOING_BACK, forgiven_seconds=0)
            self._restore()
        try:
            record = next(self.rounds)
        except ObjectLostError as error:
            self._count_loss(error)
            self._restore()
            record = next(self.rounds)
        notes, self.pool.notes = self.pool.notes, []
        return replace(record, notes=(*notes, *record.notes))

    def _restore(self) -> None:
        """Makes the method ready: before round 1, or after its newest checkpoint."""
        with self.replacing:
            self.loop, self.rounds = None, iter(())  # frees the last loop before the next one is made
            store = store_with_lease(self.setup, self.run_dir, self.label)
            backend = RayBackend(self.pool, store.lease.shared if store else None)
            self.loop = RoundLoop(self.setup, self.label, self.network, backend, store, self.session)
            self.requests, self.rounds = self.loop.requests, self.loop.rounds()

    def _count_loss(self, error: ObjectLostError) -> None:
        loop, reason = self.loop, short_reason(error)
        assert loop is not None, "the loss was in one of its rounds"
        decision = self.going_back.decide(progress=loop.saved)
        where = f"round {loop.saved}, the last one saved" if loop.saved else "the start: no round is saved"
        if not decision.granted:
            raise RunError(
                f"client states were lost with a node in round {loop.round} ({reason}), after going back to {where}, "
                f"{decision.limit} times; save more often (runtime.checkpoint_every), or use nodes that stay longer"
            ) from error
        self.pool.fault(
            f"client states were lost with a node ({reason}); back to {where} ({decision.count} of {decision.limit} "
            "times)"
        )
        time.sleep(decision.pause_seconds)

    def about(self) -> tuple[dict[str, str], Environment]:
        """(Hosts, device, engine, CPU and PyTorch of this run as text, its environment)."""
        nodes, choice = self.pool.nodes(), self.pool.choice
        assert choice is not None
        place = f"{len(self.pool.hosts)} on {counted(nodes, 'node')}"
        runtime = self.setup.experiment.runtime
        return described(runtime, choice, self.pool.device, self.pool.environments(), place)

    def progress(self) -> Progress:
        """The progress of the run; called while a round may be running."""
        loop, pool = self.loop, self.pool
        at = (loop.label, loop.status, loop.round) if loop else ()
        steps = (*at, pool.exchanges, pool.finished, pool.changes, pool.polls, pool.waiting)
        waits_for = self._waits_for(pool.reported)
        return Progress(waits_for, steps, time.process_time(), self._stop_asked())

    def _waits_for(self, slow: str) -> str:
        """The hosts that the run waits for, as text; empty: none. slow: those that make no progress in a call."""
        return self.pool.waiting or "; ".join(filter(None, (slow, *self.pool.halted_starts())))

    def _stop_asked(self) -> bool:
        return self.requests is not None and self.requests.stop_after is not None

    def _requests(self) -> Requests:
        assert self.requests is not None, "the driver begins a method first"
        return self.requests

    # ---- called for `cfl-ray status`, `join`, `leave` and `stop`, while a round may be running

    def ask(self, verb: str, *arguments: Any) -> Any:
        """The answer to a request. Raises ConfigError for a refused request."""
        if verb == "status":
            return self._status()
        if verb == "join_shards":
            arguments = self._opened(*arguments)
        with self.replacing:
            answer = getattr(self._requests(), verb)(*arguments)
        if verb == "stop" and self.pool.waiting:
            return f"{self.label}: the run ends now, for it waits for client hosts; every saved round is kept"
        return answer

    def _status(self) -> dict[str, Any]:
        requests, pool, hosts = self._requests(), self.pool, list(self.pool.hosts)
        waits_for = self._waits_for(pool.slow)
        population, ready = requests.population, [host for host in hosts if host.is_ready]
        return {
            "method": requests.label,
            "state": requests.status + (f": {waits_for}" if waits_for else ""),
            "round": requests.round,
            "hosts": len(ready),
            "hosts_starting": len(hosts) - len(ready),
            "nodes": len({host.node for host in ready}),
            "clients_online": len(population.online),
            "clients": population.num_clients,
            "last_fault": self.pool.last_fault or self.last_fault,
            "pending": requests.pending(),
        }

    def _opened(self, uri: str) -> tuple[JoinedShards, Federation]:
        """Shards, verified here and opened on every other node with a host. Raises DataError if one of these fails."""
        added = open_shards(uri, verify=True)
        here = ray.get_runtime_context().get_node_id()
        for node in {host.node for host in list(self.pool.hosts) if host.node} - {here}:
            self._open_on(node, added.uri)
        return JoinedShards(added.uri, added.digest), added

    def _open_on(self, node: str, uri: str) -> None:
        """Raises DataError if a host on this node could not read these shards."""
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        task: Any = ray.remote(_open)
        opened = task.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(uri)
        try:
            ray.get(opened, timeout=_OPEN_SECONDS)
        except RayTaskError as error:
            raise DataError(
                f"a host on node {node[:8]} cannot read these shards ({as_user_error(error)}); "
                "put them where every node finds them"
            ) from error
        except RayError as error:
            raise RunError(
                f"could not check whether node {node[:8]} can read these shards ({short_reason(error)}); try again"
            ) from error


def _open(uri: str) -> None:
    open_shards(uri)
