"""FedEM: O. Marfoq, G. Neglia, A. Bellet, L. Kameni, R. Vidal. Federated Multi-Task Learning under a Mixture of
Distributions. NeurIPS 2021, arXiv:2108.10252, Algorithm 1.

    q_i(s, k) ~ pi_ik exp(-loss(theta_k; s))         E step: each client i, for each of its n_i samples s and model k
    pi_ik <- (1 / n_i) sum_s q_i(s, k)               M step: pi_i stays with the client
    theta_ik <- SGD_i(theta_k), on the loss (1 / n_i) sum_s q_i(s, k) loss(theta; s)
    theta_k <- sum_i n_i theta_ik / sum_i n_i        over the cohort

A client predicts with sum_k pi_ik softmax(f(x; theta_k)). A client that has not trained yet, such as a newcomer, gets
pi_i by E and M steps from equal weights.

Deviations: a client trains its K models on the same batches. The official code (omarfoq/FedEM, 996fadd) differs from
the paper: it averages over all clients, with the last global model for clients outside the cohort (`damped`), has
weight decay 5e-4, lets a newcomer take an E and an M step whenever a round is logged (`fit_steps`), and keeps momentum
0.9 of each model between rounds (`local.persist`).
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cfl_ray.core.clients import Clients, Held, LocalTraining
from cfl_ray.core.method import Start, option, weights_option
from cfl_ray.core.mixtures import Mixture, MixtureMethod, MixtureState
from cfl_ray.core.rng import Draws


@dataclass(frozen=True)
class Likelihoods(Mixture):
    """q_i(s, k) ~ pi_ik exp(-loss(theta_k; s))."""

    def responsibilities(self, loss_nK: Tensor, y_n: Tensor, held: Held) -> Tensor:
        return (held["mixture"].log() - loss_nK).softmax(1)


@dataclass(frozen=True)
class FedEM(MixtureMethod[MixtureState], name="fedem"):
    """K models; each client predicts with their mixture, learned by expectation-maximisation."""

    needs_classes = "its models are mixed by their class probabilities"

    num_models: int = option(3, "K, number of models that are mixed; 1 is FedAvg", source="paper", low=1)
    damped: bool = option(
        False,
        "average over all reachable clients, those outside the cohort with the last global models",
        source="official code: true",
    )
    fit_steps: int = option(10, "E and M steps of a client that has not trained yet", source="ours", low=1)
    weights: str = weights_option()

    def init(self, start: Start) -> MixtureState:
        return MixtureState.first(start, self.num_models)

    def round(self, state: MixtureState, clients: Clients, rng: Draws) -> MixtureState:
        received, weight_M = self.broadcast(state, clients), clients.weights(self.weights)
        # q_i and pi_i, then theta_ik
        how = self.how(state, state.weights_of(clients.ids_M))
        updates = clients.train_mixture(received, how, average=weight_M)
        # theta_k
        if self.damped:
            total = clients.all_reachable(waits=False).weights(self.weights).sum()
            models_KP = updates.damped(state.models_KP, total)
        else:
            models_KP = updates.averaged(default=state.models_KP)
        return state.with_weights(clients, updates.weight_MK, models_KP=models_KP)

    def how(self, state: MixtureState, pi_MK: np.ndarray) -> LocalTraining:
        return LocalTraining(program=Likelihoods(), given={"mixture": pi_MK})
