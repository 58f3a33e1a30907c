"""FedNova: J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor. Tackling the Objective Inconsistency Problem in
Heterogeneous Federated Optimization. NeurIPS 2020, arXiv:2007.07481, Section 4.

    a_i = [tau_i - rho (1 - rho^tau_i) / (1 - rho)] / (1 - rho)   tau_i local steps with momentum rho; tau_i for rho = 0
    d_i = (w_t - W_i) / a_i                                       uploaded by each client, with a_i
    w_{t+1} <- w_t - (sum_i p_i a_i) (sum_i p_i d_i),  p_i = n_i / n over the cohort

With a proximal term mu, a_i <- (1 - eta mu) a_i + 1 in every step. Equal a_i give FedAvg. These a_i hold for a momentum
buffer that is empty when a round begins, as it is in the official code: `local.persist` with momentum is an error.

Deviations: with mu, the official code scales by sum_i p_i tau_i instead of sum_i p_i a_i. The server computes the sum
from the mean of W_i with weights p_i / a_i, so that hosts can form partial sums. For statistics of batch normalisation
this mean is the result.
"""

from dataclasses import dataclass

import numpy as np
import torch

from cfl_ray.core.aggregation.rules import ClippingRule, Mean
from cfl_ray.core.clients import Clients, LocalTraining, Proximal
from cfl_ray.core.method import OneModel, option, weights_option
from cfl_ray.core.rng import Draws
from cfl_ray.core.state import State
from cfl_ray.errors import ConfigError


def accumulation(steps_M: np.ndarray, momentum: float, eta_mu: float) -> np.ndarray:
    """a_i (M,) float64: the total weight of the gradients in the result of `steps_M` local steps, in units of eta."""
    a = np.zeros(int(steps_M.max(initial=0)) + 1)  # a[tau]: total weight after tau steps
    velocity = 0.0
    for step in range(1, len(a)):
        velocity = momentum * velocity + 1 - eta_mu * a[step - 1]
        a[step] = a[step - 1] + velocity
    return a[steps_M]


@dataclass(frozen=True)
class FedNova(OneModel, name="fednova"):
    """FedAvg of updates that are normalised by the number of local steps."""

    needs_sgd = "a_i counts the gradients in SGD steps of one learning rate"
    needs_fresh_momentum = "a_i counts this round's gradients, and a kept buffer adds those of earlier rounds"
    needs_mean = "it scales the mean by its own step"

    mu: float = option(0.0, "mu: weight of a proximal term in the local objective; 0: none", source="paper", low=0)
    weights: str = weights_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = self.aggregation_rule
        name = getattr(rule, "name", type(rule).__name__)
        if not isinstance(rule, Mean | ClippingRule):
            raise ValueError(
                f"fednova.aggregation must be mean or norm_clipping, got {self.aggregation!r}: "
                f"normalisation is a matter of weights, and {name} has none"
            )

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        weight_M, a_M = clients.weights(self.weights), self.accumulation_of(clients)
        sent = clients.send(state.models_KP)
        updates = clients.train(
            sent,
            how=LocalTraining(proximal=[Proximal(self.mu, sent)]),
            average=weight_M * (a_M.max() / a_M),
        )
        clients.count_upload(1)  # a_i
        if not updates.valid_M.any():
            return state

        # w_t - (sum p_i a_i) (sum p_i d_i) = w_t + step * (mean of W_i by p_i / a_i - w_t)
        p_M = weight_M * updates.valid_M / weight_M[updates.valid_M].sum()
        step = float((p_M * a_M).sum() * (p_M / a_M).sum())  # 1 for equal a_i
        models_KP, trained = updates.averaged(default=state.models_KP), slice(clients.spec.trained)
        models_KP[:, trained] = torch.lerp(state.models_KP[:, trained], models_KP[:, trained], step)
        return state.advance(models_KP=models_KP)

    def accumulation_of(self, clients: Clients) -> np.ndarray:
        """a_i (M,) of these clients. Raises ConfigError if training with the proximal term is not stable."""
        local = clients.local
        a_M = accumulation(local.steps_of(clients.num_samples_M), local.momentum, local.lr * self.mu)
        if local.lr * self.mu >= 2 or a_M.min() <= 0:
            raise ConfigError(
                f"fednova.mu * local.lr must be below 2, and small enough for every a_i to be positive, "
                f"got {self.mu:g} * {local.lr:g} and a_i = {a_M.min():g}; choose a smaller mu"
            )
        return a_M
