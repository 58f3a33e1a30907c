"""Engine and device of a run."""

from collections.abc import Callable
from dataclasses import replace

import torch

from cfl_ray.config import Experiment
from cfl_ray.core.engine_names import COMPILED
from cfl_ray.engine.choice import Compiling, EngineChoice, choice_of, with_last_batch
from cfl_ray.errors import ConfigError
from cfl_ray.nn.network import Network
from cfl_ray.setup.setup import Setup

_CONFIGURED = "as configured"


def engine_choice(setup: Setup, by_rule: Callable[[], EngineChoice], kept: EngineChoice | None = None) -> EngineChoice:
    """The configured engine, the engine that the run began with, or the engine by the rule.

    by_rule: returns `engine_by_rule` on the device of the hosts. kept: the choice of the run before it was interrupted;
    None: a new run.
    """
    wanted = setup.experiment.runtime.engine
    if kept is not None and wanted in ("auto", kept.engine):
        how = "as at the start of the run" if wanted == "auto" else _CONFIGURED
        return replace(kept, reason=f"{kept.engine}: {how}")
    return by_rule() if wanted in ("auto", COMPILED) else EngineChoice(wanted, f"{wanted}: {_CONFIGURED}")


def engine_by_rule(setup: Setup, network: Network, tried: bool = True) -> EngineChoice:
    """The engine for the experiment by the rule; of `compiled`, if it is configured, the programs.

    network: one of the setup, on the device of the hosts. tried: as `Compiling.tried`.
    """
    experiment, division = setup.experiment, setup.division
    trained = experiment.rounds * division.cohort * len(setup.methods)
    compiling = Compiling(experiment.runtime.compile, trained, tried)
    if experiment.runtime.engine == COMPILED:
        configured = EngineChoice(COMPILED, f"{COMPILED}: {_CONFIGURED}")
        return with_last_batch(configured, network, setup.federation, setup.local, compiling)
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
