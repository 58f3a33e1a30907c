"""The first models of a method: independent initialisations; with noise if a network has only one initialisation."""

from functools import cache

import torch
from torch import Tensor

from cfl_ray.config import Experiment
from cfl_ray.core.method import Start
from cfl_ray.core.rng import torch_stream
from cfl_ray.errors import ConfigError
from cfl_ray.nn.network import Network


def start_of(experiment: Experiment, label: str, network: Network, num_clients: int) -> Start:
    """The arguments of a method's first state.

    Its `new_model` raises ConfigError for a second model that equals the first, unless `start.noise` is set.
    """
    seed, noise, trained = experiment.seed, experiment.start.noise, network.spec.trained

    @cache
    def common() -> Tensor:
        return network.new_model(seed, 0)

    def new_model(index: int) -> Tensor:
        if not index:
            return common().clone()
        row_P = network.new_model(seed, index)
        if not torch.equal(row_P, common()):
            return row_P
        if noise is None:
            raise ConfigError(
                f"{label} begins with several models that must differ, and the model has the same first weights every "
                "time; set start.noise, e.g. start.noise=0.01, which moves all but one of them by random numbers of "
                "that standard deviation"
            )
        row_P[:trained] += noise * torch.randn(trained, generator=torch_stream(seed, -1, -1, index, "start-noise"))
        return row_P

    return Start(num_clients, network.spec, new_model, network.input_shape, network.output_shape, seed)
