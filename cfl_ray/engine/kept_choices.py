"""Measurements of engines in a file, so that a repeated run, and the runs of a study, choose the same engine."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from cfl_ray.engine.autotune import EngineChoice
from cfl_ray.engine.engines import ENGINES
from cfl_ray.errors import DataError
from cfl_ray.system.files import SHARED, read_json, write_json

_MEASURE_SECONDS = 600.0  # longest wait for another process; filelock's Timeout is an OSError


def kept_choice(file: Path, key: str, measured: Callable[[], EngineChoice]) -> EngineChoice:
    """The choice stored in the file for this key; without one, measures and stores the choice.

    If the file cannot be read or written, the engine is measured.
    """
    lock = FileLock(f"{file}.lock")  # one process of this machine at a time measures engines
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=_MEASURE_SECONDS)
    try:
        known = {}
        with suppress(DataError, OSError):
            known = read_json(file, follow=True) or {}
        match known.get(key):
            case [str(engine), str(reason)] if engine in ENGINES:
                return EngineChoice(engine, reason)
        choice = measured()
        with suppress(OSError):
            write_json(file, known | {key: [choice.engine, choice.reason]}, SHARED)
        return choice
    finally:
        lock.release()
