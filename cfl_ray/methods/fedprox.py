"""FedProx: T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith. Federated Optimization in Heterogeneous
Networks. MLSys 2020, arXiv:1812.06127, Algorithm 2.

    W_i <- argmin_W f_i(W) + (mu / 2) ||W - w_t||^2, by SGD from w_t, with w_t frozen      (Eq. 2)
    w_{t+1} <- sum_i n_i W_i / sum_i n_i

Deviations: clients are sampled uniformly and averaged by samples (the paper samples by n_i and averages uniformly), and
every client trains the same number of epochs, so that only mu differs from FedAvg.
"""

from dataclasses import dataclass

from cfl_ray.core.clients import Clients, LocalTraining, Proximal
from cfl_ray.core.method import OneModel, option, weights_option
from cfl_ray.core.rng import Draws
from cfl_ray.core.state import State


@dataclass(frozen=True)
class FedProx(OneModel, name="fedprox"):
    """FedAvg with a proximal term that keeps local models near the received model."""

    mu: float = option(
        0.01,
        "mu in Eq. (2): weight of the proximal term towards the received model; grid {0.001, 0.01, 0.1, 1}",
        source="ours, within the paper's grid",
        low=0,
    )
    weights: str = weights_option()

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        sent = clients.send(state.models_KP)
        updates = clients.train(
            sent,
            how=LocalTraining(proximal=[Proximal(self.mu, sent)]),
            average=clients.weights(self.weights),
        )
        return state.advance(models_KP=updates.averaged(default=state.models_KP))
