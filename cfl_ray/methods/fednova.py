"""FedNova: J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor. Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization. NeurIPS 2020, arXiv:2007.07481, Section 4.

    a_i = [tau_i - rho (1 - rho^tau_i) / (1 - rho)] / (1 - rho)          tau_i local steps with momentum rho; tau_i for rho = 0
    d_i = (w_t - W_i) / a_i                                             what a client uploads, with a_i
    w_{t+1} <- w_t - (sum_i p_i a_i) (sum_i p_i d_i),  p_i = n_i / n      over the cohort

With a proximal term mu, a_i <- (1 - eta mu) a_i + 1 in every step. Equal a_i give FedAvg.

Departures: none. The server forms the same sum as a mean of W_i with weights p_i / a_i, so that it forms where clients train. Statistics
of batch normalisation are that mean.
"""

from dataclasses import dataclass

import numpy as np
import torch

from cfl_ray.core.clients import Pull
from cfl_ray.core.errors import ConfigError
from cfl_ray.core.grouping import everyone
from cfl_ray.core.method import Method, option, weighting
from cfl_ray.core.serving import Serving


def accumulated(steps_M: np.ndarray, momentum: float, shrink: float) -> np.ndarray:
    """a_i (M,): how often a gradient counts in the result of `steps_M` steps; `shrink` is eta mu."""
    needed = np.zeros(int(steps_M.max(initial=0)) + 1)
    velocity = 0.0
    for step in range(1, len(needed)):
        velocity = momentum * velocity + 1 - shrink * needed[step - 1]
        needed[step] = needed[step - 1] + velocity
    return needed[steps_M]


@dataclass(frozen=True)
class FedNova(Method, name="fednova"):
    """FedAvg of updates that are normalised by the number of local steps."""

    mu: float = option(0.0, "mu: strength of a proximal term in the local objective; 0: none", source="paper", low=0)
    weights: str = weighting()

    def __post_init__(self):
        super().__post_init__()
        if self.rule.name not in ("mean", "norm_clipping"):
            raise ValueError(f"fednova.aggregation must be mean or norm_clipping, got {self.aggregation!r}: normalisation is a matter of weights, and {self.rule.name} has none")

    def init(self, start):
        return start.one_model()

    def round(self, state, clients, rng):
        local, weight_M = clients.local, clients.weights(self.weights)
        a_M = accumulated(local.steps_of(clients.size_M), local.momentum, local.lr * self.mu)
        if local.lr * self.mu >= 2 or a_M.min() <= 0:
            raise ConfigError(
                f"fednova.mu * local.lr must be below 2, and small enough for every a_i to be positive, got {self.mu:g} * {local.lr:g} "
                f"and a_i = {a_M.min():g}; choose a smaller mu"
            )
        sent = clients.send(state.models_KP)
        updates = clients.train(sent, pulls=[Pull(self.mu, sent)], mix=everyone(weight_M * (a_M.max() / a_M)))
        clients.upload(1)  # a_i
        if not updates.ok_M.any():
            return state
        p_M = weight_M * updates.ok_M / weight_M[updates.ok_M].sum()
        step = float((p_M * a_M).sum() * (p_M / a_M).sum())  # 1 for equal a_i
        models_KP, trained = updates.mixed(empty=state.models_KP), slice(clients.spec.trained)
        models_KP[:, trained] = torch.lerp(state.models_KP[:, trained], models_KP[:, trained], step)
        return state.advance(models_KP=models_KP)

    def serve(self, state, clients):
        return Serving(state.models_KP, clients.first())
