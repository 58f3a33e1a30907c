"""How many cells run at once, and how many hosts each has."""

import os
from dataclasses import dataclass

from cfl_ray.config import RuntimeConfig
from cfl_ray.runtime.session_file import cluster_address

_MOST_AT_ONCE = 64  # every cell has a driver and a server on this machine, each with 0.3 GB


@dataclass(frozen=True)
class Packing:
    """Cells that run at the same time."""

    at_once: int
    hosts: int | None  # of each cell on a Ray cluster; None: each cell in one process of this machine, without Ray

    def __str__(self) -> str:
        if self.hosts is None:
            return f"{self.at_once} at a time, each in a process of its own"
        return f"{self.at_once} at a time, each with {self.hosts} client host{'s' * (self.hosts > 1)}"


def pack(runtime: RuntimeConfig, cells: int, at_once: int | None = None) -> Packing:
    """The packing of so many cells onto this machine, or onto the cluster of `runtime.address` or RAY_ADDRESS.

    A cell that has one host works as fast as it can: nothing is sent. So as many cells run as there is room for hosts;
    where there is room for more, the cells share it.

    at_once: at most so many at a time; None: as many as there is room for.
    """
    address = cluster_address(runtime.address) if runtime.backend == "ray" else None
    room = _room_here(runtime) if address is None else _room_of_cluster(runtime, address)
    limit = min(at_once or _MOST_AT_ONCE, max(cells, 1))
    if address is None:
        return Packing(max(1, min(room, limit)), None)
    if runtime.hosts is not None:
        return Packing(max(1, min(room // runtime.hosts, limit)), runtime.hosts)
    together = max(1, min(room, limit))
    return Packing(together, max(1, room // together))


def _room_here(runtime: RuntimeConfig) -> int:
    import torch

    by_cpus = len(os.sched_getaffinity(0)) / runtime.cpus_per_host
    gpus = torch.cuda.device_count() if runtime.device != "cpu" else 0
    by_gpus = gpus / runtime.gpus_per_host if gpus and runtime.gpus_per_host else float("inf")
    return int(min(by_cpus, by_gpus) + 1e-9)


def _room_of_cluster(runtime: RuntimeConfig, address: str) -> int:
    from cfl_ray.runtime.on_ray.connect import connect  # imports ray
    from cfl_ray.runtime.on_ray.placement import room_of_cluster

    connect(address)
    return room_of_cluster(runtime)
