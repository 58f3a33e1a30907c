"""Peak memory of a process and of all that it starts. Needs Linux and the standard library alone."""

import os
import select
import subprocess
import sys
import time
from pathlib import Path

_PAUSE = 0.5  # seconds between two samples at least, and so long that sampling takes at most 1/20 of a core


class PeakMemory:
    """Peak of the proportional set size (PSS) of this process and of all processes started inside the context.

    Shared pages count once. A process of its own takes the samples; `peak` is in bytes.
    """

    mark = "CFL_RAY_BENCHMARK"  # environment variable by which processes are found whose parent has ended

    def __enter__(self) -> "PeakMemory":
        self.peak = 0
        os.environ[self.mark] = str(os.getpid())
        command = [sys.executable, __file__, str(os.getpid())]
        self._sampler = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self

    def __exit__(self, *exception: object) -> None:
        printed, _ = self._sampler.communicate()
        self.peak = int(printed)
        del os.environ[self.mark]


def used(root: int) -> int:
    """Bytes that `root`, its descendants and the processes with its mark use now, without the calling process."""
    mark, parents, family = f"{PeakMemory.mark}={root}".encode(), {}, {root}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                family.add(int(folder.name))
        except OSError:  # it has ended, or belongs to another user
            continue
    while children := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= children
    return sum(_pss(pid) for pid in family - {os.getpid()})


def _pss(pid: int) -> int:
    """Proportional set size in bytes; 0 for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


def _sample_until_closed(root: int) -> int:
    """The peak from now until the standard input closes."""
    peak, pause = 0, 0.0
    while not select.select([sys.stdin], [], [], pause)[0]:
        began = time.perf_counter()
        peak = max(peak, used(root))
        pause = max(_PAUSE, 20 * (time.perf_counter() - began))
    return max(peak, used(root))


if __name__ == "__main__":
    print(_sample_until_closed(int(sys.argv[1])))
