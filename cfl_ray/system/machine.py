"""CPUs and memory that this process may use, within the limits of the machine, container, cgroup or Slurm job."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_MEMBERSHIP, _CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def usable_cpus() -> int:
    """Number of CPUs within the affinity of this process and the quotas of all its cgroups, rounded up."""
    groups = _cgroups("cpu")
    quotas = [math.ceil(quota) for group in groups if (quota := _quota(group)) is not None]
    return max(1, min([len(os.sched_getaffinity(0)), *quotas]))


def available_memory() -> int:
    """Bytes of memory that are available on the machine and within the limits of all cgroups of this process."""
    groups = _cgroups("memory")
    return min([psutil.virtual_memory().available, *(left for group in groups if (left := _left(group)) is not None)])


def _cgroups(controller: str) -> Iterator[Path]:
    """Yields the folders of this process's cgroups, from the innermost up to the root.

    Includes cgroups of version 2 and, for the given controller, of version 1. In a container the paths may lie above
    its root.
    """
    try:
        lines = [line.split(":", 2) for line in _MEMBERSHIP.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in lines:
        if controllers and controller not in controllers.split(","):
            continue
        top = _CGROUPS / controller if controllers else _CGROUPS
        own = top / path.lstrip("/")
        yield from (group for group in (own, *own.parents) if group.is_relative_to(top))


def _quota(cgroup: Path) -> float | None:
    """Number of CPUs that a cgroup may use; None if it has no limit."""
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:  # version 1
            quota, period = ((cgroup / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return None if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _left(cgroup: Path) -> int | None:
    """Bytes that a cgroup may still use; reclaimable page cache counts as free. None if it has no limit."""
    try:
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        if (cgroup / "memory.max").exists():
            limit, use, cache = (cgroup / "memory.max").read_text().strip(), cgroup / "memory.current", "inactive_file"
        else:  # version 1, in which a very large number means no limit
            limit, use, cache = (
                (cgroup / "memory.limit_in_bytes").read_text().strip(),
                cgroup / "memory.usage_in_bytes",
                "total_inactive_file",
            )
        return None if limit == "max" else max(0, int(limit) - int(use.read_text()) + int(statistics.get(cache, 0)))
    except (OSError, ValueError):
        return None
