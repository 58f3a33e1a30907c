"""FedProx+: the ensemble baseline of J. Ma, T. Zhou, G. Long, J. Jiang, C. Zhang. Structured Federated Learning through
Clustered Additive Modeling. NeurIPS 2023,
https://papers.nips.cc/paper_files/paper/2023/hash/8668fdc7b2ddf55a0e235824c66f2eee-Abstract-Conference.html

FedProx run K times from independent starts, with soft voting.

    theta_k <- Avg(SGD_i on f_i + (mu / 2) ||theta - theta_k||^2, from theta_k)        for every k, over the same cohort
    prediction: argmax of (1/K) sum_k softmax(F(x; theta_k))

Deviations: the K models are trained side by side by the same cohorts. P-local measures a client's local version of the
first model, and P-tune a tuned copy of the first model. With `local.persist`, only the training of the first model
keeps its momentum.
"""

from dataclasses import dataclass

from cfl_ray.core.clients import Clients
from cfl_ray.core.method import Voting, option, weights_option
from cfl_ray.core.rng import Draws
from cfl_ray.core.rounds import fedavg_each
from cfl_ray.core.state import State


@dataclass(frozen=True)
class FedProxPlus(Voting, name="fedprox_plus"):
    """K global models by FedProx that vote."""

    num_models: int = option(5, "K, models that vote; 1 is FedProx", source="Fed-CAM: 5 and 10", low=1)
    mu: float = option(0.01, "mu: weight of the proximal term towards the received model", source="as FedProx", low=0)
    weights: str = weights_option()

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        return fedavg_each(state, clients, self.weights, self.mu)
