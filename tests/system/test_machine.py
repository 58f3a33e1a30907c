"""CPUs and memory of this machine, and those that a container or a job is allowed."""

import os
from types import SimpleNamespace

import pytest

from cfl_ray.system import machine

GB = 10**9


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """Makes the process a member of cgroups with these files."""

    def write(membership: str, files: dict[str, object]) -> None:
        (tmp_path / "cgroup").write_text(membership)
        for name, value in files.items():
            (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "root" / name).write_text(f"{value}\n")

    monkeypatch.setattr(machine, "_MEMBERSHIP", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "root")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(available=100 * GB))
    return write


def memory(path: str, limit: object, use: int, cache: int = 0) -> dict[str, object]:
    stat = f"anon 1\ninactive_file {cache}"
    return {f"{path}memory.max": limit, f"{path}memory.current": use, f"{path}memory.stat": stat}


def test_without_cgroups_it_is_the_machine(cgroups):
    assert (machine.usable_cpus(), machine.available_memory()) == (64, 100 * GB)


def test_every_cgroup_up_to_the_root_has_a_limit(cgroups):
    of_job = memory("job/", 8 * GB, 5 * GB) | {"job/cpu.max": "400000 100000"}
    of_step = memory("job/step/", 6 * GB, 5 * GB, cache=GB) | {"job/step/cpu.max": "250000 100000"}
    cgroups("0::/job/step/task\n", of_job | of_step | memory("job/step/task/", "max", 5 * GB))
    assert (machine.usable_cpus(), machine.available_memory()) == (3, 2 * GB)  # 2.5 CPUs; 6 - 5 + 1 GB


def test_a_container_sees_its_own_cgroup_as_the_root(cgroups):
    cgroups("0::/kubepods/pod1/abc\n", memory("", 4 * GB, 1 * GB) | {"cpu.max": "200000 100000"})
    assert (machine.usable_cpus(), machine.available_memory()) == (2, 3 * GB)


def test_cgroups_of_version_1(cgroups):
    cpu = {"cpu/docker/cpu.cfs_quota_us": 150_000, "cpu/docker/cpu.cfs_period_us": 100_000, "cpu/cpu.cfs_quota_us": -1}
    of_memory = {
        "memory/docker/memory.limit_in_bytes": 4 * GB,
        "memory/docker/memory.usage_in_bytes": 3 * GB,
        "memory/docker/memory.stat": f"total_inactive_file {GB}",
    }
    cgroups("5:cpu,cpuacct:/docker\n4:memory:/docker\n3:pids:/docker\n", cpu | of_memory)
    assert (machine.usable_cpus(), machine.available_memory()) == (2, 2 * GB)


def test_a_full_cgroup_has_nothing_left_and_damaged_files_have_no_limit(cgroups):
    cgroups("0::/full\n", memory("full/", GB, 2 * GB) | {"full/cpu.max": "1000 100000"})
    assert (machine.usable_cpus(), machine.available_memory()) == (1, 0)
    cgroups("0::/full\n", memory("full/", "?", 2 * GB) | {"full/cpu.max": "max 100000", "cpu.max": "a b"})
    assert (machine.usable_cpus(), machine.available_memory()) == (64, 100 * GB)
