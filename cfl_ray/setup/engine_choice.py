"""Engine and device of a run."""

from collections.abc import Callable
from pathlib import Path

import torch

from cfl_ray.config import Experiment
from cfl_ray.engine import autotune
from cfl_ray.engine.kept_choices import kept_choice
from cfl_ray.errors import ConfigError
from cfl_ray.nn.network import Network
from cfl_ray.setup.setup import Setup


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
    return kept_choice(file, key, measured)


def measured_engine(setup: Setup, network: Network) -> autotune.EngineChoice:
    """The fastest engine for the experiment in this process, measured with this network."""
    return autotune.measure(network, setup.federation, setup.local, setup.experiment.seed, setup.division)


def compute_device(experiment: Experiment, has_gpu: bool) -> str:
    """The device "cpu" or "cuda". Raises ConfigError if the config demands cuda and there is none."""
    wanted, present = experiment.runtime.device, torch.cuda.is_available()
    if wanted == "cuda" and not present:
        raise ConfigError("runtime.device: cuda, but torch finds no GPU here; set runtime.device=cpu or auto")
    return "cuda" if present and (wanted == "cuda" or (wanted == "auto" and has_gpu)) else "cpu"
