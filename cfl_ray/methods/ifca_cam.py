"""IFCA-CAM: J. Ma, T. Zhou, G. Long, J. Jiang, C. Zhang. Structured Federated Learning through Clustered Additive
Modeling. NeurIPS 2023, Equations 4 to 8 and Algorithm 1.
https://papers.nips.cc/paper_files/paper/2023/hash/8668fdc7b2ddf55a0e235824c66f2eee-Abstract-Conference.html

    F_i(x) = h(x; Theta_g) + f(x; Theta_{c(i)})                 prediction: logits of a global and a cluster model added
    c(i) <- argmin_k loss(h(x; Theta_g) + f(x; Theta_k))        each client
    theta_i <- SGD on loss(h(x; Theta_g) + f(x; theta_i)), from Theta_{c(i)}
    theta0_i <- SGD on loss(h(x; theta0_i) + f(x; Theta_{c(i)})), from Theta_g
    Theta_k <- Avg of theta_i over c(i) = k;    Theta_g <- Avg of theta0_i over all participants

Each of the two freezes the other model at its received value. The first rounds train Theta_g alone, as FedAvg with f
taken as 0.

Departures: a cluster's average is normalised (`damped` for Equation 6, which moves it by its share q_k of the cohort's
samples). The warm-up is 5 rounds (paper: 30 of 100). The cluster models start at random, not neutral: with equal
outputs every client would choose the first.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.clients import Clients, LocalTraining, Sent
from cfl_ray.core.method import Method, Start, option, weights_option
from cfl_ray.core.rng import Draws
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import State
from cfl_ray.core.weights import cluster_weights, global_weights


@dataclass(frozen=True, kw_only=True)
class CAMState(State):
    """Cluster models and the global model that predicts with each of them."""

    global_KP: Tensor  # Theta_g (1, P)


@dataclass(frozen=True)
class IFCACAM(Method[CAMState], name="ifca_cam"):
    """IFCA on what a shared global model leaves unexplained: the two predict together."""

    num_clusters: int = option(5, "K, number of cluster models", source="paper: 5 and 10", low=1)
    warmup_rounds: int = option(
        5, "beta: first rounds, in which Theta_g trains alone", source="ours; paper: 30 of 100 rounds", low=0
    )
    damped: bool = option(
        False,
        "move a cluster model by its share of the cohort's samples only (Eq. 6)",
        source="Eq. 11 is normalised, Eq. 6 is not",
    )
    select_samples: int | None = option(
        None,
        "training samples on which a client compares the models (64 are plenty); null: all of them",
        source="paper",
        low=1,
    )
    weights: str = weights_option()

    @property
    def compares_models(self) -> bool:
        return True

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
        weight_M = clients.weights(self.weights)

        # c(i) <- argmin_k loss(h(x; Theta_g) + f(x; Theta_k))
        theta_g, received = clients.send(state.global_KP), clients.broadcast(state.models_KP)
        assign_M = self.choose_clusters(clients, received, theta_g)
        theta_c = received.choose(assign_M)

        # theta_i from Theta_{c(i)} with Theta_g frozen, and theta0_i from Theta_g with Theta_{c(i)} frozen
        cluster_updates = clients.train(
            theta_c,
            how=LocalTraining(frozen_model=theta_g),
            average=cluster_weights(assign_M, weight_M, self.num_clusters),
        )
        global_updates = clients.train(
            theta_g,
            how=LocalTraining(frozen_model=theta_c),
            average=global_weights(weight_M),
            keep_as_local_model=False,
        )

        # averages: Theta_k over c(i) = k, Theta_g over all participants
        if self.damped:
            models_KP = cluster_updates.damped(state.models_KP, total=cluster_updates.weight_R.sum())
        else:
            models_KP = cluster_updates.averaged(default=state.models_KP)
        valid_M = cluster_updates.valid_M
        return state.advance(
            models_KP=models_KP,
            global_KP=global_updates.averaged(default=state.global_KP),
            assign_N=state.place(clients.ids_M[valid_M], assign_M[valid_M]),
            phase="federate",
        )

    def warm_up(self, state: CAMState, clients: Clients) -> CAMState:
        """One of the first rounds: FedAvg of Theta_g."""
        weight_1M = global_weights(clients.weights(self.weights))
        updates = clients.train(clients.send(state.global_KP), average=weight_1M)
        phase = "federate" if clients.round == self.warmup_rounds else state.phase
        return state.advance(global_KP=updates.averaged(default=state.global_KP), phase=phase)

    def choose_clusters(self, clients: Clients, received: Sent, theta_g: Sent) -> np.ndarray:
        """c(i) (M,) of each client."""
        loss_MK = clients.losses(received, frozen_model=theta_g, max_samples=self.select_samples)
        if not clients.evaluated:
            clients.record("losses", np.where(np.isfinite(loss_MK), loss_MK, np.nan), ("clients", "clusters"))
        return loss_MK.argmin(1)

    def join(self, state: CAMState, clients: Clients) -> CAMState:
        """Newcomers choose a model whenever they predict, until they have trained."""
        return state

    def serve(self, state: CAMState, clients: Clients) -> Serving:
        if state.phase == "warmup":
            return Serving(state.global_KP, clients.first_row())
        received, theta_g = clients.known_models(state.models_KP), clients.known_models(state.global_KP)
        return Serving(state.models_KP, self.choose_clusters(clients, received, theta_g), frozen_P=state.global_KP[0])
