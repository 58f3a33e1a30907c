"""Engine and device of a run."""

from collections.abc import Callable

import torch

from cfl_ray.config import Experiment
from cfl_ray.engine.choice import Compiling, EngineChoice, choice_of
from cfl_ray.errors import ConfigError
from cfl_ray.nn.network import Network
from cfl_ray.setup.setup import Setup


def engine_choice(setup: Setup, by_rule: Callable[[], EngineChoice], kept: str | None = None) -> EngineChoice:
    """The configured engine, the engine that the run began with, or the engine by the rule.

    by_rule: returns `engine_by_rule` on the device of the hosts. kept: the engine of the run before it was interrupted;
    None: a new run.
    """
    wanted = setup.experiment.runtime.engine
    if wanted != "auto":
        return EngineChoice(wanted, f"{wanted}: as configured")
    if kept is not None:
        return EngineChoice(kept, f"{kept}: as at the start of the run")
    return by_rule()


def engine_by_rule(setup: Setup, network: Network, tried: bool = True) -> EngineChoice:
    """The engine for the experiment by the rule.

    network: one of the setup, on the device of the hosts. tried: as `Compiling.tried`.
    """
    experiment, division = setup.experiment, setup.division
    trained = experiment.rounds * division.cohort * len(setup.methods)
    compiling = Compiling(experiment.runtime.compile, trained, tried)
    return choice_of(network, setup.federation, setup.local, division, compiling)


def compute_device(experiment: Experiment, has_gpu: bool) -> str:
    """The device "cpu" or "cuda". Raises ConfigError if the config demands cuda and there is none."""
    wanted, present = experiment.runtime.device, torch.cuda.is_available()
    if wanted == "cuda" and not present:
        raise ConfigError("runtime.device: cuda, but torch finds no GPU here; set runtime.device=cpu or auto")
    return "cuda" if present and (wanted == "cuda" or (wanted == "auto" and has_gpu)) else "cpu"


def device_name(device: str) -> str:
    """The device as text: "cpu", or "cuda" with the name of this process's GPU."""
    return f"cuda, {torch.cuda.get_device_name()}" if device == "cuda" else device
