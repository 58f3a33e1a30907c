"""Speedup of a round by the number of nodes: `python -m jobs.benchmarks nodes`.

Measured: the same rounds on one and on two Ray nodes of this machine, in turn. A node is a raylet of its own with one
host, pinned to one core. Driver and server are on a third node without hosts and not pinned; on a machine with two
cores they share those of the hosts. With fewer than two cores the measured part is left out. Simulated: the real code
of the server with hosts in virtual time (`scale.py`), plus the server's own time and that of the busiest link.
"""

import itertools
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice

import numpy as np
import psutil

from jobs.benchmarks.rounds import experiment_of
from jobs.benchmarks.scale import HOSTS_PER_NODE, simulate_round

os.environ.setdefault("RAY_AUTH_MODE", "token")  # read when ray is imported

from benchmarks.workloads import WORKLOADS

NODES = (1, 2, 4, 8)


# ---- measured


@contextmanager
def cluster_of(cores: Sequence[int]) -> Iterator[str]:
    """Address of a Ray cluster with a node for one host on each of the cores, and a head without hosts."""
    from jobs.services.ray_cluster import LocalCluster

    cluster = LocalCluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for core in cores:
            node = cluster.add_node(num_cpus=1)
            for started in node.all_processes.get("raylet", ()):
                raylet = psutil.Process(started.process.pid)
                for process in (raylet, *raylet.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess):
                        process.cpu_affinity([core])  # workers that are started later inherit it
        yield cluster.address
    finally:
        cluster.shutdown()


def seconds_of_rounds(name: str, cores: Sequence[int], rounds: int) -> list[float]:
    """Seconds of each round after the first of a workload, on a cluster of its own with a node on each of the cores."""
    import ray

    from cfl_ray.runtime.on_ray.ray_session import RaySession
    from cfl_ray.setup.prepare import prepare

    work = WORKLOADS[name]
    with tempfile.TemporaryDirectory() as output, cluster_of(cores) as address:
        changes = {"address": address, "hosts": len(cores), "checkpoint_every": 10_000}
        session = RaySession(prepare(experiment_of(work, output, rounds + 2, runtime=changes)), None)
        try:
            reports = islice(session.rounds("fedavg"), 2, rounds + 2)  # without the start, and the round that warms up
            return [report.metrics["round_seconds"] for report in reports]
        finally:
            session.close()
            ray.shutdown()


def measure(names: list[str], rounds: int) -> None:
    """Prints seconds a round on one and on two nodes, their ratio, and the ratio that the cores allow.

    Two processes slow each other down where they share memory bandwidth and caches. Two clusters of one node that each
    do all of the work at the same time show how much.
    """
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        print("not measured: two nodes need two cores")
        return
    print(f"measured: nodes of one host on one core each, median of {rounds} rounds, one and two nodes in turn, twice")
    for name in names:
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:

            def started(on: Sequence[int], name: str = name, processes: Executor = processes) -> Future[list[float]]:
                return processes.submit(seconds_of_rounds, name, on, rounds)

            found = [started(on).result() for on in (cores[:1], cores, cores[:1], cores)]
            beside = [future.result() for future in [started([core]) for core in cores]]
        one, two = statistics.median(found[0] + found[2]), statistics.median(found[1] + found[3])
        allowed = 2 * one / statistics.median(beside[0] + beside[1])
        spread = ", ".join(f"{min(a + b):.2f} to {max(a + b):.2f} s" for a, b in (found[::2], found[1::2]))
        print(
            f"{name} ({WORKLOADS[name].description}): {one:.2f} s, {two:.2f} s, {one / two:.2f} times ({spread}); two "
            f"clusters of one node at the same time do {allowed:.2f} times the work of one",
            flush=True,
        )


# ---- simulated


def speedup(nodes: int, cohort: int, sigma: float, columns: int) -> tuple[float, float]:
    """The speedup of a round over one node, and the speedup with ideal schedules on both.

    The time of a round is that of the hosts, of the server and of the busiest link. A client takes 1 s on average,
    drawn log-normally with this sigma; HOSTS_PER_NODE hosts a node, four clusters. An ideal schedule takes the mean
    work of a host, or the time of the longest client.
    """
    seconds_M = np.random.default_rng(1).lognormal(-(sigma**2) / 2, sigma, cohort)

    def seconds(count: int) -> tuple[float, float]:
        hosts = count * HOSTS_PER_NODE
        found = simulate_round(hosts, cohort, 4, columns, seconds_M)
        working = float(seconds_M.sum()) / (hosts * found.busy)  # until the last host ends
        least = max(float(seconds_M.sum()) / hosts, float(seconds_M.max()))
        return working + found.server_seconds + found.traffic.seconds, least

    (one, least_one), (several, least) = seconds(1), seconds(nodes)
    return one / several, least_one / least


def simulate() -> None:
    """Prints the speedup by nodes, cohort, spread of the clients' times and size of the model."""
    print(
        f"\nsimulated: times faster than one node, in brackets with ideal schedules; {HOSTS_PER_NODE} hosts a node, "
        "clients of 1 s on average\n(all alike, or log-normal with sigma 1), four clusters, 10 Gbit/s"
    )
    print(f"{'cohort':>9}{'sigma':>7}{'P':>8}" + "".join(f"{f'{nodes} nodes':>15}" for nodes in NODES[1:]))
    for cohort, sigma, columns in itertools.product((100, 1_000, 10_000), (0, 1), (10**5, 11 * 10**6)):
        found = [speedup(nodes, cohort, sigma, columns) for nodes in NODES[1:]]
        values = "".join(f"{f'{times:.2f} ({best:.2f})':>15}" for times, best in found)
        print(f"{cohort:>9,}{sigma:>7}{f'{columns / 1e6:g} M':>8}{values}", flush=True)


def nodes(names: list[str], rounds: int) -> None:
    measure(names, rounds)
    simulate()
