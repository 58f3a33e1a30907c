"""Server time and traffic of a round at sizes that no one machine has: `python jobs/benchmark.py scale`.

The code of the server is the real one (`runtime.on_ray`: cutting, schedule, dispatch, collection). Hosts and object
store are simulated in virtual time, and count what would move. Traffic is counted where it crosses between nodes.
"""

import heapq
import itertools
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import Address, Averaging, PieceResult, Rows, Train
from cfl_ray.engine.autotune import EngineChoice
from cfl_ray.runtime.on_ray import backend as backend_module
from cfl_ray.runtime.on_ray import collect as collect_module
from cfl_ray.runtime.on_ray import dispatch as dispatch_module
from cfl_ray.runtime.on_ray.backend import RayBackend

GBIT = 1e9 / 8  # bytes a second
HOSTS_PER_NODE = 10
SERVER = "node 0"


@dataclass(eq=False)
class Ref:
    """An object in the simulated object store."""

    value: Any
    size: float  # bytes
    node: str


@dataclass
class Traffic:
    """Bytes that crossed between nodes, by node and direction, and bytes put into object stores."""

    sent: Counter = field(default_factory=Counter)
    received: Counter = field(default_factory=Counter)
    stored: Counter = field(default_factory=Counter)
    copies: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))  # nodes that hold an object

    def put(self, value: Any, size: float, node: str) -> Ref:
        ref = Ref(value, size, node)
        self.stored[node] += size
        self.copies[id(ref)].add(node)
        return ref

    def fetch(self, ref: Ref, node: str) -> None:
        """Copies an object to a node, from the holder that has sent least, as the object managers of Ray may do."""
        holders = self.copies[id(ref)] or {ref.node}
        if node in holders:
            return
        self.sent[min(sorted(holders), key=lambda holder: self.sent[holder])] += ref.size
        self.received[node] += ref.size
        self.stored[node] += ref.size
        self.copies[id(ref)].add(node)

    def seconds(self, gbit: float) -> float:
        """Time of the busiest link at this bandwidth in each direction."""
        return max([0.0, *self.sent.values(), *self.received.values()]) / (gbit * GBIT)


class SimulatedHost:
    """A host, which takes the given time for each client, and its actor."""

    def __init__(self, number: int, node: str, pool: "SimulatedPool"):
        self.number, self.node, self.pool, self.starting, self.actor = number, node, pool, None, self
        self.free_at = self.busy = 0.0
        self.kind = ""

    def __getattr__(self, kind: str) -> "SimulatedHost":
        """`actor.work`, `actor.collect` and `actor.combine`, of which each is used at once."""
        self.kind = kind
        return self

    def options(self, num_returns: int) -> "SimulatedHost":
        self.returns = num_returns
        return self

    def remote(self, *arguments: Any) -> Any:
        return getattr(self, f"_{self.kind}")(*arguments)

    def _work(
        self, _: int, order: Train, index_m: np.ndarray, __: Any, models: dict, ___: Any, return_sums: bool, *____: Any
    ) -> Ref:
        traffic = self.pool.traffic
        for model in models.values():
            # one that travels in the call itself
            traffic.fetch(model if isinstance(model, Ref) else Ref(None, model.nbytes, SERVER), self.node)
        if return_sums:
            assert order.averaging is not None
            rows = len(np.unique(order.averaging.out_E))
            traffic.fetch(Ref(None, 16 * self.pool.columns * rows, self.node), SERVER)
        seconds = float(self.pool.seconds_M[index_m].sum())
        begin = max(self.pool.now, self.free_at)
        self.free_at, self.busy = begin + seconds, self.busy + seconds
        arrays = {"valid": np.ones(len(index_m), bool), "train_loss": np.zeros(len(index_m))}
        ref = Ref((PieceResult(index_m, arrays), {}), 0, self.node)
        heapq.heappush(self.pool.ends, (self.free_at, next(self.pool.order), ref))
        return ref

    def _collect(self, _: int, rows: list[int]) -> list[Ref]:
        size = 16 * self.pool.columns  # two float64 for each column
        return [self.pool.traffic.put(None, size, self.node) for _ in rows]

    def _combine(self, last: bool, *totals: Ref) -> Ref:
        for total in totals:
            self.pool.traffic.fetch(total, self.node)
        return self.pool.traffic.put(None, (4 if last else 16) * self.pool.columns, self.node)


class SimulatedPool:
    """Hosts in virtual time. seconds_M: time of each client."""

    def __init__(self, hosts: int, seconds_M: np.ndarray, columns: int):
        self.seconds_M, self.columns = seconds_M, columns
        self.now, self.changes, self.finished, self.order = 0.0, 0, 0, itertools.count()
        self.ends: list[tuple[float, int, Ref]] = []
        self.traffic = Traffic()
        self.hosts = [SimulatedHost(number, f"node {1 + number // HOSTS_PER_NODE}", self) for number in range(hosts)]
        self.choice = EngineChoice("sequential", "")
        runtime = SimpleNamespace(clients_per_host=None, round_deadline=None)
        shape = SimpleNamespace(num_classes=2)
        federation = SimpleNamespace(num_samples_N=seconds_M, shape=shape, files_of=lambda clients: None)
        self.setup = SimpleNamespace(experiment=SimpleNamespace(runtime=runtime), federation=federation)

    def next_exchange(self) -> int:
        return 1

    def ready(self) -> list[SimulatedHost]:
        return self.hosts

    def host(self, number: int) -> SimulatedHost:
        return self.hosts[number]

    def wait(self, calls: list[Ref], seconds: float | None) -> list[Ref]:
        self.now, _, ref = heapq.heappop(self.ends)
        return [ref]


@dataclass(frozen=True)
class Simulated:
    """Figures of one simulated round."""

    server_seconds: float  # of the server's own time
    calls: int
    busy: float  # mean share of the time until the last host ends in which a host works
    traffic: Traffic


def simulate_round(
    hosts: int, cohort: int, clusters: int, columns: int, seconds_M: np.ndarray | None = None
) -> Simulated:
    """One round of training of a cohort, each client averaged into one of the clusters."""
    seconds_M = np.ones(cohort) if seconds_M is None else seconds_M
    pool = SimulatedPool(hosts, seconds_M, columns)
    assign_M = np.random.default_rng(0).integers(0, clusters, cohort)
    table_KP = torch.zeros(clusters, 1).expand(clusters, columns)
    averaging = Averaging(clusters, assign_M, np.arange(cohort), np.full(cohort, clusters / cohort), np.ones(clusters))
    local, steps_M = LocalSGD(), np.ones(cohort, np.int64)
    work = Train(
        Address(0, 1, 1),
        np.arange(cohort),
        (table_KP,),
        start=Rows(0, assign_M),
        local=local,
        steps_M=steps_M,
        averaging=averaging,
    )
    calls = 0

    def get(refs: Any, timeout: float | None = None) -> Any:
        nonlocal calls
        if isinstance(refs, Ref):
            calls += 1
            return refs.value
        for ref in refs:
            pool.traffic.fetch(ref, SERVER)
        return [None] * len(refs)

    ray = SimpleNamespace(
        get=get,
        put=lambda value: pool.traffic.put(None, value.nbytes, SERVER),
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: SERVER),
    )
    finish = patch.object(backend_module, "outcome_of", lambda *_: None)  # of real sums, which there are none of
    modules = [patch.object(module, "ray", ray) for module in (backend_module, collect_module, dispatch_module)]
    with modules[0], modules[1], modules[2], finish:
        began = time.perf_counter()
        RayBackend(pool).run(work)  # type: ignore[arg-type]
        seconds = time.perf_counter() - began
    end = max(host.free_at for host in pool.hosts)
    return Simulated(seconds, calls, sum(host.busy for host in pool.hosts) / (hosts * end), pool.traffic)


def hand_out() -> None:
    """Prints the server's time for cutting and handing out, and how busy the hosts are."""
    print("cutting and handing out a cohort, costs of clients drawn log-normally (sigma 1); server time on one core")
    for cohort, hosts in ((100, 100), (4, 4), (10_000, 100), (1_000_000, 100), (1_000_000, 1_000)):
        seconds_M = np.random.default_rng(1).lognormal(0, 1, cohort)
        found = simulate_round(hosts, cohort, 1, 10, seconds_M)
        print(
            f"cohort {cohort:>9,}, {hosts:>5,} hosts: {found.server_seconds:6.2f} s, {found.calls:>6,} calls, "
            f"{1e3 * found.server_seconds / found.calls:.3f} ms a call; hosts busy {found.busy:.1%}",
            flush=True,
        )


def traffic(gbit: float = 10) -> None:
    """Prints what crosses between nodes in a round, by hosts, clusters, columns and cohort."""
    print(
        f"\ntraffic of a round of training in GB, {HOSTS_PER_NODE} hosts to a node: out of and into the server's node, "
        f"out of and into the busiest other node, stored on the fullest;\nseconds: the busiest link at {gbit:g} Gbit/s"
    )
    header = ("hosts", "K", "P", "cohort", "server out", "server in", "node out", "node in", "stored", "seconds")
    print(("{:>7}" + "{:>5}" + "{:>8}" + "{:>11}" * 7).format(*header))
    for hosts, clusters, columns in itertools.product((1, 10, 100), (1, 10, 50), (10**5, 11 * 10**6, 10**8)):
        for cohort in (10**2, 10**4, 10**6):
            moved = simulate_round(hosts, cohort, clusters, columns).traffic
            others = {node for node in (*moved.sent, *moved.received, *moved.stored) if node != SERVER}
            values = (
                moved.sent[SERVER],
                moved.received[SERVER],
                max((moved.sent[node] for node in others), default=0),
                max((moved.received[node] for node in others), default=0),
                max(moved.stored.values()),
            )
            numbers = "".join(f"{value / 1e9:>11.3f}" for value in values)
            size = f"{columns / 1e6:g} M"
            print(f"{hosts:>7}{clusters:>5}{size:>8}{cohort:>11,}{numbers}{moved.seconds(gbit):>11.2f}", flush=True)


def scale() -> None:
    hand_out()
    traffic()
