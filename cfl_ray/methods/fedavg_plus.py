"""FedAvg+: the ensemble baseline of J. Ma, T. Zhou, G. Long, J. Jiang, C. Zhang. Structured Federated Learning through
Clustered Additive Modeling. NeurIPS 2023,
https://papers.nips.cc/paper_files/paper/2023/hash/8668fdc7b2ddf55a0e235824c66f2eee-Abstract-Conference.html

FedAvg run K times from independent starts, with soft voting.

    theta_k <- Avg(SGD_i(theta_k))                       for every k, over the same cohort
    prediction: argmax of (1/K) sum_k softmax(F(x; theta_k))

Deviations: the K models are trained side by side by the same cohorts. P-local measures a client's local result of the
first model, and P-tune that model after local tuning. With `local.persist`, only the training of the first model
keeps its momentum.
"""

from dataclasses import dataclass

from cfl_ray.core.clients import Clients
from cfl_ray.core.method import Voting, option, weights_option
from cfl_ray.core.rng import Draws
from cfl_ray.core.rounds import fedavg_each
from cfl_ray.core.state import State


@dataclass(frozen=True)
class FedAvgPlus(Voting, name="fedavg_plus"):
    """K global models by FedAvg that vote."""

    num_models: int = option(5, "K, models that vote; 1 is FedAvg", source="Fed-CAM: 5 and 10", low=1)
    weights: str = weights_option()

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        return fedavg_each(state, clients, self.weights)
