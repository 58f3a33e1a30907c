"""The files of a method that grow with its rounds, and when they are on the disk.

The driver appends to them without waiting for the disk. A checkpoint of round r holds the report of round r, and counts
on all earlier rounds being recorded; so these files are flushed before it is written. What a power failure cuts off is
of round r or later, and is written again by the run that goes on.
"""

from pathlib import Path

from cfl_ray.system.files import sync
from cfl_ray.tracking.tracker import METRICS_LOG

CLIENT_METRICS, MOVES, DIAGNOSTICS = "client_metrics.arrow", "moves.jsonl", "diagnostics.arrow"
RECORD_FILES = (METRICS_LOG, MOVES, CLIENT_METRICS, DIAGNOSTICS)


def sync_records(directory: Path) -> None:
    """Flushes the record files of a method, those there are, to the disk."""
    for name in RECORD_FILES:
        if (directory / name).exists():
            sync(directory / name)
    if directory.exists():
        sync(directory)  # files may be new
