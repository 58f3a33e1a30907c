"""Values in /proc/cpuinfo."""

from contextlib import suppress
from pathlib import Path


def cpu_info(name: str) -> str | None:
    """A value of the first CPU, e.g. of "vendor_id" or "model name"; None if the system does not report it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return None
