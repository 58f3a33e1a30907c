"""FedProx: T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith. Federated Optimization in Heterogeneous Networks.
MLSys 2020, arXiv:1812.06127, Algorithm 2.

    W_i <- argmin_W f_i(W) + (mu / 2) ||W - w_t||^2, by SGD from w_t, with w_t frozen      (Eq. 2)
    w_{t+1} <- sum_i n_i W_i / sum_i n_i

Departures: clients are sampled uniformly and averaged by samples (the paper samples by n_i and averages uniformly), and every
client does the same number of epochs, so that only mu differs from FedAvg.
"""

from dataclasses import dataclass

from cfl_ray.core.clients import Pull
from cfl_ray.core.grouping import everyone
from cfl_ray.core.method import Method, option, weighting
from cfl_ray.core.serving import Serving


@dataclass(frozen=True)
class FedProx(Method, name="fedprox"):
    """FedAvg whose clients are held near the model they received."""

    mu: float = option(0.01, "mu in Eq. (2): strength of the pull to the received model; grid {0.001, 0.01, 0.1, 1}", source="ours, within the paper's grid", low=0)
    weights: str = weighting()

    def init(self, start):
        return start.one_model()

    def round(self, state, clients, rng):
        sent = clients.send(state.models_KP)
        updates = clients.train(sent, pulls=[Pull(self.mu, sent)], mix=everyone(clients.weights(self.weights)))
        return state.advance(models_KP=updates.mixed(empty=state.models_KP))

    def serve(self, state, clients):
        return Serving(state.models_KP, clients.first())
