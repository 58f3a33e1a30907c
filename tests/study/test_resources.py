"""How many runs of a study work at the same time."""

import pytest

from cfl_ray.config import RuntimeConfig
from cfl_ray.study import worker_pool
from cfl_ray.study.worker_pool import Resources, resources_for


@pytest.fixture
def machine(monkeypatch):
    """Sets the CPUs, GPUs and available GB of this machine, and the hosts that a cluster has room for."""

    def of(cpus: int, gpus: int = 0, gb: float = 1000, cluster: int = 0):
        monkeypatch.setattr(worker_pool, "usable_cpus", lambda: cpus)
        monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
        monkeypatch.setattr(worker_pool, "available_memory", lambda: gb * 1e9)
        monkeypatch.setattr(worker_pool, "_room_of_cluster", lambda runtime, address: cluster)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return of


def test_one_run_on_each_cpu(machine):
    machine(cpus=8)
    assert resources_for(RuntimeConfig(), 100) == Resources(8, None)
    assert resources_for(RuntimeConfig(cpus_per_host=2), 100) == Resources(4, None)
    assert resources_for(RuntimeConfig(), 3) == Resources(3, None), "no more than there are runs"
    assert resources_for(RuntimeConfig(), 100, at_once=2) == Resources(2, None)
    assert resources_for(RuntimeConfig(), 100, at_once=20) == Resources(8, None), "no more than there is room for"
    assert resources_for(RuntimeConfig(), 0) == Resources(1, None)
    assert str(Resources(8, None)) == "8 at a time, each in a process of its own"


def test_the_available_memory_bounds_the_processes(machine):
    machine(cpus=64, gb=5.5)
    assert resources_for(RuntimeConfig(), 100).at_once == 5
    machine(cpus=64, gb=0.2)
    assert resources_for(RuntimeConfig(), 100).at_once == 1
    machine(cpus=200, gb=1000)
    assert resources_for(RuntimeConfig(), 1000).at_once == 64


def test_processes_that_wait_for_further_runs_have_their_memory_already(machine):
    """In a sweep that learns, a later batch of trials has as many processes as the first."""
    machine(cpus=64, gb=5.5)
    first = resources_for(RuntimeConfig(), 100).at_once
    machine(cpus=64, gb=0.5)  # the rest is held by them
    assert resources_for(RuntimeConfig(), 100, processes=first).at_once == first


def test_gpus_of_this_machine(machine, monkeypatch):
    machine(cpus=16, gpus=2)
    assert resources_for(RuntimeConfig(), 100) == Resources(2, None, ("0", "1")), "one on each"
    shared = resources_for(RuntimeConfig(gpus_per_host=0.25), 100)
    assert resources_for(RuntimeConfig(gpus_per_host=0.6), 100).at_once == 2, "two shares of 0.6 are more than one GPU"
    assert shared == Resources(8, None, ("0", "1")) and [shared.gpu_of(n) for n in range(4)] == ["0", "1", "0", "1"]
    assert (
        resources_for(RuntimeConfig(device="cpu"), 100) == Resources(16, None) and Resources(16, None).gpu_of(3) is None
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert resources_for(RuntimeConfig(), 100).gpus == ("5", "7")


def test_hosts_of_a_cluster(machine):
    machine(cpus=2, cluster=12)
    on_cluster = {"address": "head:6379"}
    assert resources_for(RuntimeConfig(**on_cluster), 100) == Resources(12, 1), (
        "as many runs as there is room for hosts"
    )
    assert resources_for(RuntimeConfig(**on_cluster), 5) == Resources(5, 2), "few runs share the room: 12 // 5"
    assert resources_for(RuntimeConfig(**on_cluster), 100, at_once=4) == Resources(4, 3)
    assert resources_for(RuntimeConfig(**on_cluster, hosts=4), 100) == Resources(3, 4)
    assert resources_for(RuntimeConfig(**on_cluster, hosts=20), 100) == Resources(1, 20), (
        "the run says that there is no room"
    )
    assert resources_for(RuntimeConfig(**on_cluster, clients_per_host=1), 100) == Resources(1, 12)
    assert resources_for(RuntimeConfig(**on_cluster, backend="in_process"), 100) == Resources(2, None)
    machine(cpus=2, cluster=12, gb=3)
    assert resources_for(RuntimeConfig(**on_cluster), 100) == Resources(3, 4), "their drivers are on this machine"
    machine(cpus=2, cluster=0)
    assert resources_for(RuntimeConfig(**on_cluster), 100) == Resources(1, 1), "a cluster that grows on demand"
    assert str(Resources(3, 4)) == "3 at a time, each with 4 client hosts"
