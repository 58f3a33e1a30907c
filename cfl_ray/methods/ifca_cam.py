"""IFCA-CAM: J. Ma, T. Zhou, G. Long, J. Jiang, C. Zhang. Structured Federated Learning through Clustered Additive
Modeling. NeurIPS 2023, Equations 4 to 8 and Algorithm 1.
https://papers.nips.cc/paper_files/paper/2023/hash/8668fdc7b2ddf55a0e235824c66f2eee-Abstract-Conference.html

    F_i(x) = h(x; Theta_g) + f(x; Theta_{c(i)})                 prediction: logits of a global and a cluster model added
    c(i) <- argmin_k loss(h(x; Theta_g) + f(x; Theta_k))        each client
    theta_i <- SGD on loss(h(x; Theta_g) + f(x; theta_i)), from Theta_{c(i)}
    theta0_i <- SGD on loss(h(x; theta0_i) + f(x; Theta_{c(i)})), from Theta_g
    Theta_k <- Avg of theta_i over c(i) = k;    Theta_g <- Avg of theta0_i over all participants

The training of theta_i and of theta0_i each freezes the other model at its received value. The first rounds train
Theta_g alone, as FedAvg with f taken as 0.

`schedule: alternating` is block-coordinate descent within a round: (i) every client chooses its cluster, (ii) Theta_g
trains with Theta_{c(i)} frozen, (i) every client receives the new Theta_g and chooses again, (iii) the cluster models
train with this Theta_g frozen. That the four steps form a single round, with the same cohort, is our reading.

`empty: zero` sets the weights of a cluster model to zero when no client is assigned to it, so that the number of
clusters in use falls: a client that chooses such a cluster predicts with Theta_g alone and trains f from zero (in a
ReLU network only the last bias has a gradient at zero). Clients that have not taken part yet belong to no cluster: with
sampled cohorts, a model that no client of the first cohort after the warm-up chose is set to zero.

Traffic: K + 1 models down, two models and c(i) up; `alternating` adds Theta_g down and a second c(i).

Deviations: a cluster's average is normalised (`damped`: Equation 6, which moves the model by its share q_k of the
cohort's samples). The warm-up is 5 rounds (paper: 30 of 100). The cluster models start at random, not at zero: if their
outputs were equal, every client would choose the first.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.clients import Clients, LocalTraining, Sent, Updates
from cfl_ray.core.method import Method, Start, option, weights_option
from cfl_ray.core.rng import Draws
from cfl_ray.core.rounds import placed
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import UNASSIGNED, State
from cfl_ray.core.weights import cluster_weights

CLUSTERS, GLOBAL = 0, 1  # numbers of the averages; their order differs between the schedules and the warm-up


@dataclass(frozen=True, kw_only=True)
class CAMState(State):
    """Cluster models, and the global model whose logits are added to theirs."""

    global_KP: Tensor  # Theta_g (1, P)


@dataclass(frozen=True)
class IFCACAM(Method[CAMState], name="ifca_cam"):
    """IFCA with cluster models that are added to a shared global model: clients predict with the sum of both."""

    placement = "the model with the least loss on its training samples, chosen anew whenever it predicts"
    without_cluster = "the global model"
    phases = {"warmup": ("federate",), "federate": ()}
    compares_models = True

    num_clusters: int = option(5, "K, number of cluster models", source="paper: 5 and 10", low=1)
    warmup_rounds: int = option(
        5, "beta: first rounds, in which Theta_g trains alone", source="ours; paper: 30 of 100 rounds", low=0
    )
    damped: bool = option(
        False,
        "move a cluster model by its share of the cohort's samples only (Eq. 6)",
        source="Eq. 11 is normalised, Eq. 6 is not",
    )
    schedule: str = option(
        "parallel",
        "parallel: Theta_g and the cluster models train against each other's received values; alternating: choice, "
        "Theta_g, choice again, cluster models",
        source="Algorithm 1: parallel",
        choices=("parallel", "alternating"),
    )
    empty: str = option(
        "keep",
        "cluster model without a client: keep it, or set it to zero, so that Theta_g predicts alone",
        source="ours: the paper says that clusters may become empty",
        choices=("keep", "zero"),
    )
    select_samples: int | None = option(
        None,
        "training samples on which a client compares the models (64 are plenty); null: all of them",
        source="paper",
        low=1,
    )
    weights: str = weights_option()

    def init(self, start: Start) -> CAMState:
        return CAMState(
            models_KP=torch.stack([start.new_model(1 + k) for k in range(self.num_clusters)]),
            assign_N=start.unassigned(),
            phase="warmup" if self.warmup_rounds else "federate",
            global_KP=start.new_model(0)[None],
        )

    def round(self, state: CAMState, clients: Clients, rng: Draws) -> CAMState:
        if clients.round <= self.warmup_rounds:
            return self.warm_up(state, clients)
        # (i) c(i) <- argmin_k loss(h(x; Theta_g) + f(x; Theta_k))
        theta_g, received = clients.send(state.global_KP), clients.broadcast(state.models_KP)
        assign_M = self.choose_clusters(clients, received, theta_g, upload=True)

        if self.schedule == "alternating":
            # (ii) Theta_g with Theta_{c(i)} frozen, (i) again, (iii) Theta_k with the new Theta_g frozen
            global_updates = self.train_global(clients, theta_g, received, assign_M)
            theta_g = clients.send(global_updates.averaged(default=state.global_KP))
            assign_M = self.choose_clusters(clients, received, theta_g, upload=True)
            cluster_updates = self.train_clusters(clients, theta_g, received, assign_M)
            global_KP = theta_g.models_KP
        else:
            # theta_i from Theta_{c(i)} with Theta_g frozen, and theta0_i from Theta_g with Theta_{c(i)} frozen
            cluster_updates = self.train_clusters(clients, theta_g, received, assign_M)
            global_updates = self.train_global(clients, theta_g, received, assign_M)
            global_KP = global_updates.averaged(default=state.global_KP)

        # averages: Theta_k over c(i) = k, Theta_g over all participants
        if self.damped:
            models_KP = cluster_updates.damped(state.models_KP, total=cluster_updates.weight_R.sum())
        else:
            models_KP = cluster_updates.averaged(default=state.models_KP)
        valid_M = cluster_updates.valid_M & (assign_M != UNASSIGNED)
        state = state.advance(models_KP=models_KP, global_KP=global_KP, phase="federate")
        because = {"clients": valid_M.sum(), "num_clusters": self.num_clusters}
        state = placed(state, clients, clients.ids_M[valid_M], assign_M[valid_M], **because)
        return self.zeroed(state, clients) if self.empty == "zero" and valid_M.any() else state

    def train_clusters(self, clients: Clients, theta_g: Sent, received: Sent, assign_M: np.ndarray) -> Updates:
        """Trains theta_i of all clients with Theta_g frozen, and averages within clusters."""
        return clients.train(
            received.choose(np.maximum(assign_M, 0)),
            how=LocalTraining(frozen_model=theta_g),
            average=cluster_weights(assign_M, clients.weights(self.weights), self.num_clusters),
            average_number=CLUSTERS,
        )

    def train_global(self, clients: Clients, theta_g: Sent, received: Sent, assign_M: np.ndarray) -> Updates:
        """Trains theta0_i of all clients with Theta_{c(i)} frozen, and averages over all."""
        return clients.train(
            theta_g,
            how=LocalTraining(frozen_model=received.choose(np.maximum(assign_M, 0))),
            average=clients.weights(self.weights) * (assign_M != UNASSIGNED),
            keep_as_local_model=False,
            average_number=GLOBAL,
        )

    def zeroed(self, state: CAMState, clients: Clients) -> CAMState:
        """The state with f = 0 for clusters without a client; their clients predict with Theta_g alone."""
        clients.require_readable("the clusters")
        models_KP = state.models_KP.clone()
        models_KP[torch.from_numpy(state.members_K == 0), : clients.spec.trained] = 0
        return state.advance(models_KP=models_KP)

    def warm_up(self, state: CAMState, clients: Clients) -> CAMState:
        """The state after a warm-up round, which is FedAvg of Theta_g."""
        theta_g, weight_M = clients.send(state.global_KP), clients.weights(self.weights)
        updates = clients.train(theta_g, average=weight_M, average_number=GLOBAL)
        phase = "federate" if clients.round == self.warmup_rounds else state.phase
        return state.advance(global_KP=updates.averaged(default=state.global_KP), phase=phase)

    def choose_clusters(self, clients: Clients, received: Sent, theta_g: Sent, upload: bool = False) -> np.ndarray:
        """The choice c(i) (M,) of each client; UNASSIGNED, which averages exclude, if its losses are missing."""
        return clients.choose(
            received, frozen_model=theta_g, max_samples=self.select_samples, upload=upload, diagnostic="losses"
        )

    def join(self, state: CAMState, clients: Clients) -> CAMState:
        """The state as it is: newcomers choose a model for each prediction until they have trained."""
        return state

    def serve(self, state: CAMState, clients: Clients) -> Serving:
        if state.phase == "warmup":
            return Serving(state.global_KP, clients.first_row())
        received, theta_g = clients.known_models(state.models_KP), clients.known_models(state.global_KP)
        assign_M = np.maximum(self.choose_clusters(clients, received, theta_g), 0)
        return Serving(state.models_KP, assign_M, frozen_P=state.global_KP[0])
