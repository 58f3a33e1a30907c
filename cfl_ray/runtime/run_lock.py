"""Whether a run is live: its driver holds a lock on config.yaml, which the system releases when the process ends."""

import contextlib
import fcntl
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from cfl_ray.errors import ConfigError, RunError

CONFIG = "config.yaml"
_LOCK_SECONDS = 2  # `is_live` holds the lock for an instant


def no_run(run_dir: str | Path) -> ConfigError:
    """Returns the error for a folder that holds no run."""
    if (Path(run_dir) / "study.yaml").is_file():
        return ConfigError(
            f"{run_dir} is the folder of a study; name one of its runs: {run_dir}/SETTING/METHOD/seed-SEED"
        )
    return ConfigError(f"{run_dir} holds no run: there is no {Path(run_dir) / CONFIG}")


def command(verb: str, run_dir: Path) -> str:
    """Returns `cfl-ray VERB RUN`, quoted for a shell."""
    return shlex.join(["cfl-ray", verb, str(run_dir)])


@contextlib.contextmanager
def hold_run(config: Path) -> Iterator[None]:
    """Marks the run of this config.yaml as live. Raises RunError where it is live already."""
    with config.open("r+") as file:
        deadline = time.monotonic() + _LOCK_SECONDS
        while not _locked(file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise RunError(f"{config.parent} is live already; see it with: {command('status', config.parent)}")
            time.sleep(0.05)
        yield


def is_live(config: Path) -> bool:
    """Whether a driver holds the run of this config.yaml."""
    with config.open() as file:
        return not _locked(file, fcntl.LOCK_SH)


def _locked(file: IO[str], how: int) -> bool:
    """Takes the lock if it is free, and returns whether it was; closing the file releases it."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
