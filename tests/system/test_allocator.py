"""Freed memory of a host."""

import platform
import subprocess
import sys

import pytest

_RUN = """
from pathlib import Path
import numpy as np
from cfl_ray.system.allocator import keep_freed_memory, return_freed_memory

def private_mb():
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) / 1000

keep_freed_memory()
before, arrays = private_mb(), [np.ones(100_000) for _ in range(200)]
del arrays[1::2]  # gaps of 0.8 MB between arrays in use
kept = private_mb()
return_freed_memory(1 << 30)
still_kept = private_mb()
return_freed_memory(32 << 20)
print(kept - before, still_kept - before, private_mb() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
def test_freed_memory_between_arrays_is_returned_above_the_limit():
    done = subprocess.run([sys.executable, "-c", _RUN], capture_output=True, text=True, check=True)
    kept, still_kept, returned = map(float, done.stdout.split())
    assert kept > 150
    assert still_kept > 150
    assert returned < 100
