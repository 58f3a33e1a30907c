"""FedAvg: B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas. Communication-Efficient Learning of Deep
Networks from Decentralized Data. AISTATS 2017, arXiv:1602.05629, Algorithm 1.

    W_i <- SGD_i(w_t)                          every client i of the cohort S_t
    w_{t+1} <- sum_i n_i W_i / sum_i n_i       over S_t

Deviations: none.
"""

from dataclasses import dataclass

from cfl_ray.core.clients import Clients
from cfl_ray.core.method import OneModel, weights_option
from cfl_ray.core.rng import Draws
from cfl_ray.core.state import State


@dataclass(frozen=True)
class FedAvg(OneModel, name="fedavg"):
    """One global model, the mean of the models that the cohort trained."""

    weights: str = weights_option()

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        updates = clients.train(clients.send(state.models_KP), average=clients.weights(self.weights))
        return state.advance(models_KP=updates.averaged(default=state.models_KP))
