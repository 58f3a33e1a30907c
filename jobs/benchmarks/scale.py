"""Server time and traffic of a round with more hosts than one machine can run: `python -m jobs.benchmarks scale`.

The code of the server is the real one (`runtime.on_ray`: chunks, their queue, dispatch, collection). Hosts and object
store are simulated in virtual time. Traffic between nodes is counted. At the end, it compares rounds on 2, 16 and, if
memory allows, 64 real hosts of this machine with the simulation.
"""

import heapq
import itertools
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import torch

os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when ray is imported

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import Address, Averaging, ChunkResult, Rows, Train
from cfl_ray.engine.autotune import EngineChoice
from cfl_ray.runtime.on_ray import collect as collect_module
from cfl_ray.runtime.on_ray import dispatch as dispatch_module
from cfl_ray.runtime.on_ray import ray_backend as backend_module
from cfl_ray.runtime.on_ray.collect import Collected
from cfl_ray.runtime.on_ray.ray_backend import Exchange, RayBackend

GBITS = 10  # a second, of a node's link in each direction
HOSTS_PER_NODE = 10
CALL_SECONDS = 3e-3  # CPU time of the server for a real call, Ray's included: of 64 real hosts (`points`)
SERVER = "node 0"
HOST_BYTES = 0.4e9 if torch.version.cuda else 0.22e9  # memory of a host that does nothing


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

    @property
    def seconds(self) -> float:
        """Time of the busiest link at the bandwidth in each direction."""
        return max([0.0, *self.sent.values(), *self.received.values()]) / (GBITS * 1e9 / 8)


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
        traffic, self.pool.now = self.pool.traffic, self.pool.now + CALL_SECONDS
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
        ref = Ref((ChunkResult(index_m, arrays), {}), 0, self.node)
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
        self.choice, self.device = EngineChoice("sequential", ""), "cpu"
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
        self.now = max(self.now, self.ends[0][0])
        ended = []
        while self.ends and self.ends[0][0] <= self.now:
            ended.append(heapq.heappop(self.ends)[-1])
        return ended


@dataclass(frozen=True)
class Simulated:
    """Figures of one simulated round."""

    server_seconds: float  # of the server's own time
    calls: int
    busy: float  # mean share of the time until the last host ends in which a host works
    waited: float  # seconds of that time in which it does not
    traffic: Traffic


def simulate_round(
    hosts: int, cohort: int, clusters: int, columns: int, seconds_M: np.ndarray | None = None
) -> Simulated:
    """One round of training of a cohort, each client averaged into one of the clusters."""
    seconds_M = np.ones(cohort) if seconds_M is None else seconds_M
    pool = SimulatedPool(hosts, seconds_M, columns)
    work = _training(cohort, clusters, torch.zeros(clusters, 1).expand(clusters, columns))
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
    never_poll = patch.object(dispatch_module, "POLL_SECONDS", float("inf"))  # for hosts that hang or start
    with modules[0], modules[1], modules[2], finish, never_poll:
        began = time.thread_time()
        backend = RayBackend(pool)  # type: ignore[arg-type]
        backend._seconds_of_cost[Train] = 1.0  # as after the first round
        backend.run(work)
        seconds = time.thread_time() - began
    end = max(host.free_at for host in pool.hosts)
    busy = sum(host.busy for host in pool.hosts) / hosts
    return Simulated(seconds, calls, busy / end, end - busy, pool.traffic)


def _training(cohort: int, clusters: int, models_KP: torch.Tensor, round: int = 1) -> Train:
    """One step of each client, averaged into one of the clusters, which are drawn at random."""
    assign_M = np.random.default_rng(0).integers(0, clusters, cohort)
    return Train(
        Address(0, round, 1),
        np.arange(cohort),
        (models_KP,),
        start=Rows(0, assign_M),
        local=LocalSGD(),
        steps_M=np.ones(cohort, np.int64),
        averaging=Averaging(
            clusters, assign_M, np.arange(cohort), np.full(cohort, clusters / cohort), np.ones(clusters)
        ),
    )


def hand_out() -> None:
    """Prints the server's time for cutting and handing out, and how busy the hosts are."""
    print("cutting and handing out a cohort, costs of clients drawn log-normally (sigma 1); server time on one core")
    million = (1_000_000, 1_000)
    for cohort, hosts, seconds in (
        *((100, 100, 1), (4, 4, 1), (10_000, 100, 1), (1_000_000, 100, 1)),
        *((*million, 1), (*million, 0.1), (*million, 0.01), (*million, 0.001)),
    ):
        seconds_M = np.random.default_rng(1).lognormal(0, 1, cohort)
        seconds_M *= seconds / seconds_M.mean()
        found = simulate_round(hosts, cohort, 1, 10, seconds_M)
        print(
            f"cohort {cohort:>9,}, {hosts:>5,} hosts, {seconds:5g} s a client: {found.server_seconds:6.2f} s, "
            f"{found.calls:>6,} calls, {1e3 * found.server_seconds / found.calls:.3f} ms a call; "
            f"with {1e3 * CALL_SECONDS:g} ms a call hosts are busy {found.busy:.1%} and wait {found.waited:.1f} s",
            flush=True,
        )


def traffic() -> None:
    """Prints what crosses between nodes in a round, by hosts, clusters, columns and cohort."""
    print(
        f"\ntraffic of a round of training in GB, {HOSTS_PER_NODE} hosts to a node: out of and into the server's node, "
        f"out of and into the busiest other node, stored on the fullest;\nseconds: the busiest link at {GBITS} Gbit/s"
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
            print(f"{hosts:>7}{clusters:>5}{size:>8}{cohort:>11,}{numbers}{moved.seconds:>11.2f}", flush=True)


@dataclass(frozen=True)
class Measured:
    """Figures of one round on real hosts."""

    server_seconds: float  # CPU time of this process, which is the server
    calls: int
    sent: float  # bytes of models that the server put or passed on in calls
    received: float  # bytes of sums that it fetched


def measure_round(hosts: int, cohort: int, clusters: int, hidden: int) -> Measured:
    """One round of training as in `simulate_round`, on a Ray cluster of this machine with so many light hosts.

    hidden: units of the MLP, 20 inputs and 2 classes, so P = 23 hidden + 2. A client has 20 samples and takes one step.
    """
    import ray

    from cfl_ray import Experiment
    from cfl_ray.runtime.on_ray.connect import connect
    from cfl_ray.runtime.on_ray.host_actor import start_host
    from cfl_ray.runtime.on_ray.pool import Pool
    from cfl_ray.setup.prepare import prepare

    experiment = Experiment(
        methods=["fedavg"],
        data={
            "source": "synthetic",
            "synthetic_shape": [20],
            "synthetic_samples": 20,
            "synthetic_classes": 2,
            "synthetic_groups": 1,
            "partition": {"clients": cohort},
        },
        model={"options": {"hidden": hidden}},
        tracking={"enabled": False},
        runtime={"engine": "sequential", "hosts": hosts, "cpus_per_host": 0.01},
    )
    connect(None)
    try:
        setup = prepare(experiment)
        setup_ref = ray.put(setup)
        pool = Pool(setup)
        pool.start([start_host(experiment.runtime, setup_ref) for _ in range(hosts)], setup_ref)
        pool.nodes(seconds=300)
        network, backend = setup.network(), RayBackend(pool)
        models_KP = torch.stack([network.new_model(0, k) for k in range(clusters)])
        found: list[Measured] = []
        for round in (1, 2, 3):  # the first is a warm-up
            work = _training(cohort, clusters, models_KP, round)
            counted = Counter[str]()
            with _counting(counted):
                began = time.process_time()
                backend.run(work)
                seconds = time.process_time() - began
            found.append(Measured(seconds, counted["calls"], counted["sent"], counted["received"]))
        pool.stop()
        return min(found[1:], key=lambda one: one.server_seconds)
    finally:
        ray.shutdown()


@contextmanager
def _counting(counted: Counter[str]) -> Iterator[None]:
    """Counts the calls of an exchange, the bytes of the models that go to hosts and of the sums that come back."""
    models, receive, of_host, by_tree = Exchange._models, Exchange.receive, Collected.of_host, Collected.by_tree
    put: set[int] = set()

    def counted_models(self: Any, uses: Any) -> Any:
        for model in (found := models(self, uses)).values():
            if isinstance(model, np.ndarray) or id(model) not in put:  # a reference is put once
                put.add(id(model))
                counted["sent"] += 4 * self.work.tables[0].shape[1]
        return found

    def counted_receive(self: Any, chunks: Any, returns: Any) -> None:
        counted["calls"] += 1
        counted["received"] += sum(total_2P.nbytes for total_2P in returns[0][1].values())
        receive(self, chunks, returns)

    def counted_totals(self: Any, position: int) -> Any:
        found = of_host(self, position)
        counted["received"] += sum(total_2P.nbytes for total_2P in found.values())
        return found

    def counted_sums(self: Any) -> Any:
        found = by_tree(self)
        counted["received"] += sum(sum_P.nbytes for sum_P in found.values())
        return found

    with (
        patch.object(Collected, "by_tree", counted_sums),
        patch.object(Exchange, "_models", counted_models),
        patch.object(Exchange, "receive", counted_receive),
        patch.object(Collected, "of_host", counted_totals),
    ):
        yield


def points() -> None:
    """Prints a round on real hosts of this machine beside the same round in the simulation."""
    print(
        "\n2, 16 and 64 light hosts on this machine (real), and the simulation of the same round, in which ten hosts "
        "make a node\nand bytes are counted once where they cross between nodes; ms: CPU time of the server a call"
    )
    pairs = ("calls", "ms", "MB sent", "MB received")
    print(f"{'hosts':>6}{'K':>4}{'P':>9}" + "".join(f"{pair + ' real':>17}{'simulated':>11}" for pair in pairs))
    clusters, cohort = 4, 1000
    for hidden in (100, 20_000):
        for hosts in (2, 16, 64):
            if (needs := hosts * HOST_BYTES) > (free := psutil.virtual_memory().available):
                print(f"{hosts:>6} hosts need about {needs / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")
                continue
            columns = 23 * hidden + 2
            real = measure_round(hosts, cohort, clusters, hidden)
            model = simulate_round(hosts, cohort, clusters, columns)
            sent, received = model.traffic.sent[SERVER], model.traffic.received[SERVER]
            values = (
                (f"{real.calls}", f"{model.calls}"),
                (f"{1e3 * real.server_seconds / real.calls:.2f}", f"{1e3 * model.server_seconds / model.calls:.2f}"),
                (f"{real.sent / 1e6:.1f}", f"{sent / 1e6:.1f}"),
                (f"{real.received / 1e6:.1f}", f"{received / 1e6:.1f}"),
            )
            shown = "".join(f"{one:>17}{other:>11}" for one, other in values)
            print(f"{hosts:>6}{clusters:>4}{columns:>9}{shown}", flush=True)


def scale() -> None:
    hand_out()
    traffic()
    points()
