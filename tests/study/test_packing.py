"""How many runs of a study work at the same time."""

import pytest

from cfl_ray.config import RuntimeConfig
from cfl_ray.study import packing
from cfl_ray.study.packing import Packing, pack


@pytest.fixture
def machine(monkeypatch):
    """Sets the CPUs, GPUs and available GB of this machine, and the hosts that a cluster has room for."""

    def of(cpus: int, gpus: int = 0, gb: float = 1000, cluster: int = 0):
        monkeypatch.setattr(packing, "usable_cpus", lambda: cpus)
        monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
        monkeypatch.setattr(packing, "available_memory", lambda: gb * 1e9)
        monkeypatch.setattr(packing, "_room_of_cluster", lambda runtime, address: cluster)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return of


def test_one_run_on_each_cpu(machine):
    machine(cpus=8)
    assert pack(RuntimeConfig(), 100) == Packing(8, None)
    assert pack(RuntimeConfig(cpus_per_host=2), 100) == Packing(4, None)
    assert pack(RuntimeConfig(), 3) == Packing(3, None), "no more than there are runs"
    assert pack(RuntimeConfig(), 100, at_once=2) == Packing(2, None)
    assert pack(RuntimeConfig(), 100, at_once=20) == Packing(8, None), "no more than there is room for"
    assert pack(RuntimeConfig(), 0) == Packing(1, None)
    assert str(Packing(8, None)) == "8 at a time, each in a process of its own"


def test_the_available_memory_bounds_the_processes(machine):
    machine(cpus=64, gb=5.5)
    assert pack(RuntimeConfig(), 100).at_once == 5
    machine(cpus=64, gb=0.2)
    assert pack(RuntimeConfig(), 100).at_once == 1
    machine(cpus=200, gb=1000)
    assert pack(RuntimeConfig(), 1000).at_once == 64


def test_gpus_of_this_machine(machine, monkeypatch):
    machine(cpus=16, gpus=2)
    assert pack(RuntimeConfig(), 100) == Packing(2, None, ("0", "1")), "one on each"
    shared = pack(RuntimeConfig(gpus_per_host=0.25), 100)
    assert shared == Packing(8, None, ("0", "1")) and [shared.gpu_of(n) for n in range(4)] == ["0", "1", "0", "1"]
    assert pack(RuntimeConfig(device="cpu"), 100) == Packing(16, None) and Packing(16, None).gpu_of(3) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert pack(RuntimeConfig(), 100).gpus == ("5", "7")


def test_hosts_of_a_cluster(machine):
    machine(cpus=2, cluster=12)
    on_cluster = {"address": "head:6379"}
    assert pack(RuntimeConfig(**on_cluster), 100) == Packing(12, 1), "as many runs as there is room for hosts"
    assert pack(RuntimeConfig(**on_cluster), 5) == Packing(5, 2), "few runs share the room: 12 // 5"
    assert pack(RuntimeConfig(**on_cluster), 100, at_once=4) == Packing(4, 3)
    assert pack(RuntimeConfig(**on_cluster, hosts=4), 100) == Packing(3, 4)
    assert pack(RuntimeConfig(**on_cluster, hosts=20), 100) == Packing(1, 20), "the run says that there is no room"
    assert pack(RuntimeConfig(**on_cluster, clients_per_host=1), 100) == Packing(1, 12)
    assert pack(RuntimeConfig(**on_cluster, backend="in_process"), 100) == Packing(2, None)
    machine(cpus=2, cluster=12, gb=3)
    assert pack(RuntimeConfig(**on_cluster), 100) == Packing(3, 4), "their drivers are on this machine"
    machine(cpus=2, cluster=0)
    assert pack(RuntimeConfig(**on_cluster), 100) == Packing(1, 1), "a cluster that grows on demand"
    assert str(Packing(3, 4)) == "3 at a time, each with 4 client hosts"
