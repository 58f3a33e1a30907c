"""FedAvg: B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas. Communication-Efficient Learning of Deep Networks from
Decentralized Data. AISTATS 2017, arXiv:1602.05629, Algorithm 1.

    W_i <- SGD_i(w_t)                          every client i of the cohort S_t
    w_{t+1} <- sum_i n_i W_i / sum_i n_i       over S_t

Departures: none.
"""

from dataclasses import dataclass

from cfl_ray.core.grouping import everyone
from cfl_ray.core.method import Method, weighting
from cfl_ray.core.serving import Serving


@dataclass(frozen=True)
class FedAvg(Method, name="fedavg"):
    """One global model, the mean of what the cohort trained."""

    weights: str = weighting()

    def init(self, start):
        return start.one_model()

    def round(self, state, clients, rng):
        updates = clients.train(clients.send(state.models_KP), mix=everyone(clients.weights(self.weights)))
        return state.advance(models_KP=updates.mixed(empty=state.models_KP))

    def serve(self, state, clients):
        return Serving(state.models_KP, clients.first())
