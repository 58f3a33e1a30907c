"""The resources of a study: how many runs run at once, and how many hosts each has."""

import os
from dataclasses import dataclass

from cfl_ray.config import RuntimeConfig
from cfl_ray.run_directory.session_file import cluster_address
from cfl_ray.system.machine import available_memory, usable_cpus

_MOST_AT_ONCE = 64
_RUN_BYTES = 1e9  # available memory per process; torch alone takes 0.5 GB


@dataclass(frozen=True)
class Resources:
    """How many runs run at the same time, with how many hosts and which GPUs."""

    at_once: int
    hosts: int | None  # of each run on a Ray cluster; None: each run in a process of this machine, without Ray
    gpus: tuple[str, ...] = ()  # of this machine, as in CUDA_VISIBLE_DEVICES, assigned to the processes in turn

    def __str__(self) -> str:
        if self.hosts is None:
            return f"{self.at_once} at a time, each in a process of its own"
        return f"{self.at_once} at a time, each with {self.hosts} client host{'s' * (self.hosts > 1)}"

    def gpu_of(self, process: int) -> str | None:
        """The GPU of a process (numbered from 0); None: Ray decides, or the machine has no GPU."""
        return self.gpus[process % len(self.gpus)] if self.gpus and self.hosts is None else None


def resources_for(runtime: RuntimeConfig, runs: int, at_once: int | None = None, processes: int = 0) -> Resources:
    """The resources for this number of runs: this machine, or the cluster of `runtime.address` or RAY_ADDRESS.

    A run with a single host is most efficient, since no data pass between processes. So as many runs are parallel as
    hosts fit; if more hosts than runs fit, the runs share them. The processes of the runs are always on this machine,
    whose available memory limits their number.

    at_once: largest number of parallel runs; None: as many as fit. processes: of earlier runs, which wait for further
        runs and hold their memory already.
    """
    address = cluster_address(runtime.address) if runtime.backend == "ray" else None
    memory = processes + int(available_memory() / _RUN_BYTES)
    limit = max(1, min(at_once or _MOST_AT_ONCE, runs, memory))
    if address is None:
        gpus = _gpus() if runtime.device != "cpu" else ()
        room = _room_here(runtime, len(gpus))
        return Resources(max(1, min(room, limit)), None, gpus)
    room = max(1, _room_of_cluster(runtime, address))
    if runtime.clients_per_host:
        return Resources(1, room)  # the number of hosts follows from the number of clients
    if runtime.hosts is not None:
        return Resources(max(1, min(room // runtime.hosts, limit)), runtime.hosts)
    together = min(room, limit)
    return Resources(together, room // together)


def _room_here(runtime: RuntimeConfig, gpus: int) -> int:
    """Number of runs that the CPUs and GPUs of this machine allow; 1 per GPU if `gpus_per_host` is 0."""
    by_cpus = usable_cpus() / runtime.cpus_per_host
    by_gpus = gpus / (runtime.gpus_per_host or 1.0) if gpus else float("inf")
    return int(min(by_cpus, by_gpus) + 1e-9)


def _gpus() -> tuple[str, ...]:
    """The GPUs that are visible to this process."""
    import torch

    count = torch.cuda.device_count()
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return tuple(visible[:count] if len(visible) >= count else map(str, range(count)))


def _room_of_cluster(runtime: RuntimeConfig, address: str) -> int:
    from cfl_ray.runtime.on_ray.connect import connect  # imports ray
    from cfl_ray.runtime.on_ray.placement import room_of_cluster

    connect(address)
    return room_of_cluster(runtime)
