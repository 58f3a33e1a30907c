"""The privacy of a method's run at work, with the key of its noise."""

import os
import secrets
from pathlib import Path

from cfl_ray.checkpoint.store import CheckpointStore
from cfl_ray.core.privacy import Noise, PrivateRun
from cfl_ray.privacy.plan import PrivacyPlan
from cfl_ray.run_directory import RunDirectory
from cfl_ray.system.files import open_private

_BYTES = 32


def private_run(plan: PrivacyPlan, seed: int, store: CheckpointStore | None) -> PrivateRun:
    """A new account. Its noise is drawn from the seed, if the plan says so, or from the key of the run.

    A process that continues the run draws the same noise: a sum that is computed again is released once.
    """
    if plan.reproducible:
        return PrivateRun(plan.privacy, Noise(b"reproducible, not private" + seed.to_bytes(8, "little")))
    key = secrets.token_bytes(_BYTES) if store is None else _key(RunDirectory(store.directory).privacy_key)
    return PrivateRun(plan.privacy, Noise(key))


def _key(file: Path) -> bytes:
    """The key in the file, which is written if there is none, or not a whole one."""
    try:
        with open_private(file, "rb") as source:
            key = source.read()
    except FileNotFoundError:
        key = b""
    if len(key) != _BYTES:
        key = secrets.token_bytes(_BYTES)
        file.parent.mkdir(parents=True, exist_ok=True)
        with open_private(file, "wb") as out:
            out.write(key)
            os.fsync(out.fileno())
    return key
