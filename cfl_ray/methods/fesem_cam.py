"""FeSEM-CAM: J. Ma, T. Zhou, G. Long, J. Jiang, C. Zhang. Structured Federated Learning through Clustered Additive Modeling. NeurIPS 2023,
Equations 9 to 15 and Algorithm 2.
https://papers.nips.cc/paper_files/paper/2023/hash/8668fdc7b2ddf55a0e235824c66f2eee-Abstract-Conference.html

    prediction F_i(x) = h(x; Theta_g) + f(x; Theta_{c(i)})                    logits of a global and a cluster model added
    theta_i <- SGD on loss(h(x; Theta_g) + f(x; theta_i)) + (lambda / 2) ||theta_i - Theta_{c(i)}||^2, from Theta_{c(i)}
    theta0_i <- SGD on loss(h(x; theta0_i) + f(x; Theta_{c(i)})) from Theta_g;    Theta_g <- Avg of theta0_i over all participants
    c <- k-means of the uploaded theta_i from the present centres, weighted by samples;   Theta_k <- Avg of theta_i over c(i) = k

The first round is the warm-up: beta local epochs of theta_i alone, with h taken as 0, and k-means++. Epochs move clients with many samples
further than those with few, and k-means then sees sizes as well as labels: where these differ, count the warm-up in `warmup_steps`.

Departures: Equation 13 multiplies the loss by n_i / n, which would leave the pull alone; that factor is dropped. Equation 15 is read with
theta_i frozen at Theta_{c(i)}. Theta_g starts with a last layer of zeros, so that it is neutral. k-means runs over the participants and the
last uploads of all others, on the fully connected layers; features longer than `sketch` are projected. A client that was never seen, and a
newcomer, trains from the mean of the centres.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.clients import Keep, Pull
from cfl_ray.core.grouping import by_cluster, everyone
from cfl_ray.core.hierarchy import nearest
from cfl_ray.core.kmeans import kmeans
from cfl_ray.core.method import Method, option, weighting
from cfl_ray.core.rounds import row_or_last, serve_per_cluster, with_mean
from cfl_ray.core.signatures import SignatureState, sketching


@dataclass(frozen=True)
class FeSEMCAMState(SignatureState):
    global_KP: Tensor = None  # Theta_g (1, P)
    weight_S: np.ndarray = None  # of each client in k-means


@dataclass(frozen=True)
class FeSEMCAM(Method, name="fesem_cam"):
    """FeSEM on what a shared global model leaves unexplained: the two predict together."""

    num_clusters: int = option(5, "K, number of centres", source="paper: 5 and 10", low=1)
    warmup_epochs: int = option(5, "beta: local epochs of the first round", source="ours: 1 to 5 are defined", low=1)
    warmup_steps: int | None = option(None, "local steps of the first round, the same for every client; null: epochs", source="ours", low=1)
    lam: float = option(0.01, "lambda: pull of theta_i to its centre (grid 0.001, 0.01, 0.1)", source="paper's grid", low=0)
    sketch: int = sketching()
    weights: str = weighting()

    State = FeSEMCAMState

    def init(self, start):
        neutral_KP = start.new_model(0)[None].clone()
        start.spec.head.put(neutral_KP, torch.zeros(1, start.spec.head.count))
        return FeSEMCAMState(
            models_KP=start.new_model(1)[None], assign_N=start.unassigned(), phase="warmup", **FeSEMCAMState.nobody(self.keep(start.spec).count),
            global_KP=neutral_KP, weight_S=np.zeros(0),
        )  # fmt: skip

    def round(self, state, clients, rng):
        if state.phase == "warmup":
            return self.warm_up(state, clients, rng)
        shared, sent = clients.send(state.global_KP), clients.send(with_mean(state.models_KP), row_or_last(state, clients))
        cluster = clients.train(sent, beside=shared, pulls=[Pull(self.lam, sent)], keep=self.keep(clients.spec), mix_later=True)
        whole = clients.train(shared, beside=sent, mix=everyone(clients.weights(self.weights)), held=False)
        state = self.remembered(state, clients, cluster)
        centre_KF = self.keep(clients.spec).features(state.models_KP, clients.seed)
        found_S, _ = kmeans(state.signature_SF, state.num_clusters, rng.seed, weight_S=state.weight_S, centres_KF=centre_KF)
        state = state.advance(assign_N=state.place(state.seen_S, found_S), global_KP=whole.mixed(empty=state.global_KP))
        return self.averaged(state, clients, cluster)

    def warm_up(self, state, clients, rng):
        local = replace(clients.local, epochs=self.warmup_epochs, steps=self.warmup_steps)
        updates = clients.train(clients.send(state.models_KP), keep=self.keep(clients.spec), local=local, mix_later=True)
        state = self.remembered(state, clients, updates)
        if not len(state.seen_S):
            return state
        found_S, centre_KF = kmeans(state.signature_SF, self.num_clusters, rng.seed, weight_S=state.weight_S)
        models_KP = state.models_KP.repeat(len(centre_KF), 1)
        state = state.advance(models_KP=models_KP, assign_N=state.place(state.seen_S, found_S), phase="federate")
        return self.averaged(state, clients, updates)

    def keep(self, spec):
        return Keep(spec.linear, sketch=self.sketch)

    def remembered(self, state, clients, updates):
        ok_M = updates.ok_M
        feature_MF, weight_M = updates.sound_MF, clients.weights(self.weights)[ok_M]
        return state.remember(clients.ids_M[ok_M], feature_MF, weight_S=weight_M)

    def averaged(self, state, clients, updates):
        """M-step: the mean of this round's participants in every cluster."""
        mix = by_cluster(state.assign_N[clients.ids_M], clients.weights(self.weights), state.num_clusters)
        return state.advance(models_KP=clients.mix(updates, mix).mixed(empty=state.models_KP))

    def join(self, state, clients):
        if state.phase == "warmup":
            return state
        sent = clients.send(with_mean(state.models_KP)[-1:])
        updates = clients.train(sent, beside=clients.send(state.global_KP), keep=self.keep(clients.spec), held=False)
        feature_MF = updates.sound_MF
        found, _ = nearest(feature_MF, self.keep(clients.spec).features(state.models_KP, clients.seed), "l2")
        return state.advance(assign_N=state.place(clients.ids_M[updates.ok_M], found))

    def serve(self, state, clients):
        serving = serve_per_cluster(state, clients)
        return serving if state.phase == "warmup" else replace(serving, beside_P=state.global_KP[0])
