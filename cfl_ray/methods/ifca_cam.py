"""IFCA-CAM: J. Ma, T. Zhou, G. Long, J. Jiang, C. Zhang. Structured Federated Learning through Clustered Additive Modeling. NeurIPS 2023,
Equations 4 to 8 and Algorithm 1.
https://papers.nips.cc/paper_files/paper/2023/hash/8668fdc7b2ddf55a0e235824c66f2eee-Abstract-Conference.html

    prediction F_i(x) = h(x; Theta_g) + f(x; Theta_{c(i)})                    logits of a global and a cluster model added
    c(i) <- argmin_k loss(h(x; Theta_g) + f(x; Theta_k))                                           each client
    theta_i <- SGD on loss(h(x; Theta_g) + f(x; theta_i)) from Theta_{c(i)};    Theta_k <- Avg of theta_i over c(i) = k
    theta0_i <- SGD on loss(h(x; theta0_i) + f(x; Theta_{c(i)})) from Theta_g;  Theta_g <- Avg of theta0_i over all participants

Each of the two freezes the other model at its received value. The first rounds train Theta_g alone, as FedAvg with f taken as 0.

Departures: a cluster's average is normalised (`damped` for Equation 6, which moves it by its share q_k of the cohort's samples). The
warm-up is 5 rounds (paper: 30 of 100). The cluster models start at random, not neutral: with equal outputs every client would choose the
first.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from cfl_ray.core.grouping import by_cluster, everyone
from cfl_ray.core.method import Method, option, weighting
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import State


@dataclass(frozen=True)
class CAMState(State):
    global_KP: Tensor = None  # Theta_g (1, P)


@dataclass(frozen=True)
class IFCACAM(Method, name="ifca_cam"):
    """IFCA on what a shared global model leaves unexplained: the two predict together."""

    num_clusters: int = option(5, "K, number of cluster models", source="paper: 5 and 10", low=1)
    warmup_rounds: int = option(5, "beta: first rounds, in which Theta_g trains alone", source="ours; paper: 30 of 100 rounds", low=0)
    damped: bool = option(False, "move a cluster model by its share of the cohort's samples only (Eq. 6)", source="Eq. 11 is normalised, Eq. 6 is not")
    select_samples: int | None = option(None, "training samples on which a client compares the models (64 are plenty); null: all of them", source="paper", low=1)
    weights: str = weighting()

    State = CAMState

    def init(self, start):
        models_KP = torch.stack([start.new_model(1 + k) for k in range(self.num_clusters)])
        phase = "warmup" if self.warmup_rounds else "federate"
        return CAMState(models_KP=models_KP, assign_N=start.unassigned(), phase=phase, global_KP=start.new_model(0)[None])

    def round(self, state, clients, rng):
        mix = everyone(clients.weights(self.weights))
        if clients.number <= self.warmup_rounds:
            updates = clients.train(clients.send(state.global_KP), mix=mix)
            phase = "federate" if clients.number == self.warmup_rounds else state.phase
            return state.advance(global_KP=updates.mixed(empty=state.global_KP), phase=phase)
        shared, sent = clients.send(state.global_KP), clients.broadcast(state.models_KP)
        assign_M = self.choose(clients, sent, shared)
        mine, mix_KM = sent.choose(assign_M), by_cluster(assign_M, clients.weights(self.weights), self.num_clusters)
        cluster = clients.train(mine, beside=shared, mix=mix_KM)
        whole = clients.train(shared, beside=mine, mix=mix, held=False)
        models_KP = cluster.damped(state.models_KP, total=cluster.weight_R.sum()) if self.damped else cluster.mixed(empty=state.models_KP)
        assign_N = state.place(clients.ids_M[cluster.ok_M], assign_M[cluster.ok_M])
        return state.advance(models_KP=models_KP, global_KP=whole.mixed(empty=state.global_KP), assign_N=assign_N, phase="federate")

    def choose(self, clients, sent, shared):
        return clients.losses(sent, beside=shared, max_samples=self.select_samples).argmin(1)

    def serve(self, state, clients):
        if state.phase == "warmup":
            return Serving(state.global_KP, clients.first())
        assign_M = self.choose(clients, clients.known(state.models_KP), clients.known(state.global_KP))
        return Serving(state.models_KP, assign_M, beside_P=state.global_KP[0])
