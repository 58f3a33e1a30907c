"""Engine and device of a run."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from filelock import FileLock

from cfl_ray.config import Experiment
from cfl_ray.engine import autotune
from cfl_ray.engine.engines import ENGINES
from cfl_ray.errors import ConfigError, DataError
from cfl_ray.nn.network import Network
from cfl_ray.setup.setup import Setup
from cfl_ray.system.files import SHARED, read_json, write_json

_MEASURE_SECONDS = 600.0  # longest wait for another process; filelock's Timeout is an OSError


def engine_choice(
    setup: Setup, device: str, measured: Callable[[], autotune.EngineChoice], kept: str | None = None
) -> autotune.EngineChoice:
    """The configured engine, the engine that the run began with, or the fastest engine in a measurement.

    device: name of the device of the hosts. kept: the engine of the run before it was interrupted; None: a new run.
    """
    wanted = setup.experiment.runtime.engine
    if wanted != "auto":
        return autotune.EngineChoice(wanted, f"{wanted}: as configured")
    if kept is not None:
        return autotune.EngineChoice(kept, f"{kept}: as at the start of the run")
    file = Path(setup.experiment.output) / "engine-choices.json"
    key = autotune.cache_key(setup.network(), setup.local, setup.division, device)
    return _known_choice(file, key, measured)


def _known_choice(file: Path, key: str, measured: Callable[[], autotune.EngineChoice]) -> autotune.EngineChoice:
    """The choice stored in the file for this key; if there is none, measures and stores the choice.

    So a repeated run, and the runs of a study, choose the same engine. If the file cannot be read or written, the
    engine is measured.
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
                return autotune.EngineChoice(engine, reason)
        choice = measured()
        with suppress(OSError):
            write_json(file, known | {key: [choice.engine, choice.reason]}, SHARED)
        return choice
    finally:
        lock.release()


def measured_engine(setup: Setup, network: Network) -> autotune.EngineChoice:
    """The fastest engine for the experiment in this process, measured with this network."""
    return autotune.measure(network, setup.federation, setup.local, setup.experiment.seed, setup.division)


def compute_device(experiment: Experiment, has_gpu: bool) -> str:
    """The device "cpu" or "cuda". Raises ConfigError if the config demands cuda and there is none."""
    wanted, present = experiment.runtime.device, torch.cuda.is_available()
    if wanted == "cuda" and not present:
        raise ConfigError("runtime.device: cuda, but torch finds no GPU here; set runtime.device=cpu or auto")
    return "cuda" if present and (wanted == "cuda" or (wanted == "auto" and has_gpu)) else "cpu"
