"""Traffic and memory on Ray follow the number of hosts and K, not the cohort and not N. Real hosts and object store."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import ray

from cfl_ray import run
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import Address, Averaging, Rows, Train
from cfl_ray.data import shard_writer
from cfl_ray.runtime.on_ray import host_actor
from cfl_ray.runtime.on_ray.host_actor import ClientHost
from cfl_ray.runtime.on_ray.ray_backend import RayBackend
from cfl_ray.setup.prepare import prepare

MB = 1e6


class WatchedHost(ClientHost):
    """A host that counts its fetches from the object store, and keeps fetched files in a folder of the tests."""

    cache = ""

    def start(self, packed, *others):
        import ray

        os.environ["CFL_RAY_CACHE"] = self.cache
        self.fetched, get = [], ray.get

        def counted(refs, **options):
            value = get(refs, **options)
            self.fetched.append(getattr(value, "nbytes", 0))
            return value

        ray.get = counted
        return super().start(packed, *others)

    def fetches(self):
        """Bytes of each fetch since the last call, without those of the experiment itself."""
        found, self.fetched = [size for size in self.fetched if size], []
        return found


@pytest.fixture(scope="module")
def backend(module_experiment, two_hosts, tmp_path_factory):
    """The backend over two watched hosts, with the server in this process so that its transfers can be counted too.

    The shards are behind a file system that is not local to pyarrow; both hosts share this machine's cache.
    """
    pytest.importorskip("fsspec")
    folder = tmp_path_factory.mktemp("transport")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    digits = {"source": "digits", "partition": {"clients": 40, "samples": 20}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_writer, "FILE_BYTES", 2 * 20 * 64)  # two clients in a file
        patch.setattr(WatchedHost, "cache", str(folder / "cache"))
        patch.setattr(host_actor, "ClientHost", WatchedHost)
        patch.setenv("CFL_RAY_CACHE", WatchedHost.cache)
        data, model = digits | {"shards": f"fsspec+file://{folder}/shards"}, {"options": {"hidden": 10_000}}
        yield two_hosts(prepare(module_experiment(data=data, model=model, local={"epochs": 1})))


def training(row_P, ids, round) -> Train:
    """One step of these clients from one model, averaged."""
    cohort = len(ids)
    return Train(
        Address(0, round, 1),
        ids,
        (row_P[None],),
        start=Rows(0, np.zeros(cohort, np.int64)),
        local=LocalSGD(steps=1),
        steps_M=np.ones(cohort, np.int64),
        averaging=Averaging.of(np.full((1, cohort), 1 / cohort), cohort),
    )


def test_a_model_crosses_once_per_host_and_one_sum_comes_back(backend, monkeypatch):
    puts, received = [], []
    put, get = ray.put, ray.get
    monkeypatch.setattr(ray, "put", lambda value: puts.append(getattr(value, "nbytes", 0)) or put(value))
    monkeypatch.setattr(ray, "get", lambda refs, **options: received.append(value := get(refs, **options)) or value)
    network = backend.pool.setup.network()
    row_P = network.new_model(0, 0)
    for round, cohort in ((1, 10), (2, 34)):
        puts.clear(), received.clear()
        outcome = backend.run(training(row_P, np.arange(6, 6 + cohort), round))
        assert outcome.arrays["valid"].all() and abs(outcome.arrived_R[0] - 1) < 1e-6
        assert puts == [row_P.numpy().nbytes]  # down: one copy in the object store, whatever the cohort
        fetches = [get(host.actor.fetches.remote()) for host in backend.pool.hosts]
        assert fetches == [[row_P.numpy().nbytes]] * 2  # once per host
        sums = [total_2P.nbytes for value in received if isinstance(value, list) for total_2P in value]
        assert sums == [4 * row_P.numpy().nbytes] * 2  # up: one exact total, 2 x P float64, per host
        replies = [value for value in received if not isinstance(value, list)]
        assert sum(array.nbytes for reply, _ in replies for array in reply.arrays.values()) < 100 * cohort
        assert not any(totals for _, totals in replies)


@pytest.mark.slow
def test_memory_of_server_and_hosts_does_not_follow_the_cohort(experiment, cluster, memory):
    """Models of 2 MB, mostly input layer so that activations are small: 200 more of them would be 400 MB.

    Sums of a cluster have 8 MB on a host and on the server; more clients may choose more of IFCA's four clusters.
    """
    peaks = []
    for cohort in (20, 220):
        large = experiment(
            methods=["fedavg", "ifca"],
            data={"synthetic_shape": [5000], "partition": {"clients": 240}},
            cohort={"clients": cohort},
            model={"options": {"hidden": 100}},
            local={"epochs": 1, "batch_size": None},
            rounds=2,
            evaluation={"every": 2, "local": False},
        )
        with memory("ServerActor") as server, memory("ClientHost") as host:
            run(large)
        peaks.append((server[0] / MB, host[0] / MB))
    assert min(peaks[0]) > 50  # processes that hold torch were seen at all
    found = f"(server, host) MB with 20 and 220 clients a round: {peaks}"
    assert all(large - small < 100 for small, large in zip(*peaks)), found


@pytest.mark.slow
def test_a_million_clients_cost_a_few_bytes_each_and_no_reading(experiment, logged, cluster, memory):
    peaks, readings = [], []
    for clients in (1_000, 1_000_000):
        open(logged.log, "w").close()
        million = experiment(
            methods=["fedavg", "local"],
            data=logged(clients),
            cohort={"clients": 20},
            evaluation={"clients": 50},
            rounds=3,
        )
        with memory("ServerActor") as server, memory("ClientHost") as host:
            results = run(million)
        peaks.append((server[0] / MB, host[0] / MB))
        readings.append(len(logged.read()))
        assert len(results["local"].records) == 3 and results["fedavg"].final["clients_online"] == clients
    assert readings[0] == readings[1] == 2 * 3 * 20  # training of the cohorts, no other client's data
    assert min(peaks[0]) > 50
    found = f"(server, host) MB with 1,000 and 1,000,000 clients: {peaks}"
    assert peaks[1][0] - peaks[0][0] < 80 and peaks[1][1] - peaks[0][1] < 30, found


def test_hosts_fetch_files_ahead_and_the_server_knows_which_node_has_them(backend):
    files, setup = set(Path(WatchedHost.cache).glob("*.arrow")), backend.pool.setup
    assert setup.federation.files_of(np.arange(12)).max() == 5
    fresh = RayBackend(backend.pool)
    assert fresh.run(training(setup.network().new_model(0, 0), np.arange(6), 3)).arrays["valid"].all()
    assert fresh.node_of_file == dict.fromkeys(range(3), backend.pool.hosts[0].node)
    assert len({*Path(WatchedHost.cache).glob("*.arrow")} - files) == 3 and files, "of six clients; the index was there"
