"""FeSEM-CAM: J. Ma, T. Zhou, G. Long, J. Jiang, C. Zhang. Structured Federated Learning through Clustered Additive
Modeling. NeurIPS 2023, Equations 9 to 15.
https://papers.nips.cc/paper_files/paper/2023/hash/8668fdc7b2ddf55a0e235824c66f2eee-Abstract-Conference.html

    F_i(x) = h(x; Theta_g) + f(x; Theta_{c(i)})                 prediction: logits of a global and a cluster model added
    theta_i <- SGD on loss(h(x; Theta_g) + f(x; theta_i)) + (lambda / 2) ||theta_i - Theta_{c(i)}||^2, from Theta_{c(i)}
    theta0_i <- SGD on loss(h(x; theta0_i) + f(x; Theta_{c(i)})), from Theta_g
    Theta_g <- Avg of theta0_i over all participants
    c <- k-means of the uploaded theta_i from the present centres, weighted by samples
    Theta_k <- Avg of theta_i over c(i) = k

The first round is the warm-up: beta local epochs of theta_i alone, with h taken as 0, and k-means++. Epochs move
clients with many samples further than those with few, and k-means then separates clients by size as well as by labels:
if sizes differ, count the warm-up in `warmup_steps`.

Deviations: Equation 13 multiplies the loss by n_i / n but not the proximal term; this factor is dropped. Equation 15 is
read with theta_i frozen at Theta_{c(i)}. The last layer of Theta_g starts with zeros, so that Theta_g has no effect at
first. k-means runs over the participants and the last uploads of all others, on the fully connected layers; features
longer than `sketch` are projected. A client that never took part, or a newcomer, trains from the mean of the centres.
The number of centres is at most the number of clients in the first round.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cfl_ray.clustering.agglomerative import nearest_centre
from cfl_ray.clustering.kmeans import kmeans
from cfl_ray.clustering.signature_diagnostics import record_centre_distances
from cfl_ray.clustering.signatures import SignatureState, sketch_option
from cfl_ray.core.clients import Clients, LocalTraining, Proximal, UpdateFeatures, Updates
from cfl_ray.core.method import Method, Start, option, weights_option
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.rounds import placed, row_or_last, serve_per_cluster, with_mean
from cfl_ray.core.serving import Serving
from cfl_ray.core.weights import cluster_weights


@dataclass(frozen=True, kw_only=True)
class FeSEMCAMState(SignatureState):
    """Signatures are the features of each client's last upload theta_i."""

    global_KP: Tensor  # Theta_g (1, P)
    weight_S: np.ndarray  # weight of each client in k-means


@dataclass(frozen=True)
class FeSEMCAM(Method[FeSEMCAMState], name="fesem_cam"):
    """FeSEM whose cluster models are added to a shared global model: clients predict with the sum of both."""

    placement = "the nearest centre, by a local training from the mean of the cluster models"
    phases = {"warmup": ("federate",), "federate": ()}

    num_clusters: int = option(5, "K, number of centres", source="paper: 5 and 10", low=1)
    warmup_epochs: int = option(
        5, "beta: local epochs of the first round", source="ours: 1 to 5 are defined", low=1, high=100_000
    )
    warmup_steps: int | None = option(
        None, "local steps of the first round, the same for every client; null: epochs", source="ours", low=1
    )
    lam: float = option(
        0.01,
        "lambda: weight of the proximal term of theta_i towards its centre (grid 0.001, 0.01, 0.1)",
        source="paper's grid",
        low=0,
    )
    sketch: int = sketch_option()
    weights: str = weights_option()

    def init(self, start: Start) -> FeSEMCAMState:
        neutral_KP = start.new_model(0)[None].clone()
        start.spec.head.put(neutral_KP, torch.zeros(1, start.spec.head.count))
        return FeSEMCAMState(
            models_KP=start.new_model(1)[None],
            assign_N=start.unassigned(),
            phase="warmup",
            global_KP=neutral_KP,
            weight_S=np.zeros(0),
            signature_SF=torch.zeros(0, self.update_features(start.spec).count),
        )

    def round(self, state: FeSEMCAMState, clients: Clients, rng: Draws) -> FeSEMCAMState:
        if state.phase == "warmup":
            return self.warm_up(state, clients, rng)

        # theta_i from Theta_{c(i)} with Theta_g frozen, and theta0_i from Theta_g with Theta_{c(i)} frozen
        theta_g = clients.send(state.global_KP)
        theta_c = clients.send(with_mean(state.models_KP), row_or_last(state, clients))
        cluster_updates = clients.train(
            theta_c,
            how=LocalTraining(frozen_model=theta_g, proximal=[Proximal(self.lam, theta_c)]),
            features=self.update_features(clients.spec),
            defer_aggregation=True,
        )
        global_updates = clients.train(
            theta_g,
            how=LocalTraining(frozen_model=theta_c),
            average=clients.weights(self.weights),
            keep_as_local_model=False,
            average_number=1,  # number 0 is the average of the cluster models, also in the warm-up
        )

        # c <- k-means from the current centres, over the last uploads of all clients seen
        state = self.remember_uploads(state, clients, cluster_updates)
        if not len(state.seen_S):  # all earlier clients have left, and no update of this cohort is valid
            return state.advance(global_KP=global_updates.averaged(default=state.global_KP))
        centre_KF = self.update_features(clients.spec).of_rows(state.models_KP, clients.seed)
        record_centre_distances(clients, state.seen_S, state.signature_SF, centre_KF)
        cluster_S, _ = kmeans(
            state.signature_SF, state.num_clusters, rng.seed, weight_S=state.weight_S, centres_KF=centre_KF
        )

        # averages: Theta_g over all participants, Theta_k over c(i) = k
        global_KP = global_updates.averaged(default=state.global_KP)
        return self.m_step(state.advance(global_KP=global_KP), clients, cluster_updates, cluster_S)

    def warm_up(self, state: FeSEMCAMState, clients: Clients, rng: Draws) -> FeSEMCAMState:
        """The state after the first round: theta_i alone from a common start, then k-means++ of the theta_i."""
        local = replace(clients.local, epochs=self.warmup_epochs, steps=self.warmup_steps)
        updates = clients.train(
            clients.send(state.models_KP),
            how=LocalTraining(sgd=local),
            features=self.update_features(clients.spec),
            defer_aggregation=True,
        )
        state = self.remember_uploads(state, clients, updates)
        if not len(state.seen_S):
            return state
        cluster_S, centre_KF = kmeans(state.signature_SF, self.num_clusters, rng.seed, weight_S=state.weight_S)
        record_centre_distances(clients, state.seen_S, state.signature_SF, centre_KF)
        state = state.advance(models_KP=state.models_KP.repeat(len(centre_KF), 1), phase="federate")
        return self.m_step(state, clients, updates, cluster_S)

    def update_features(self, spec: ParamSpec) -> UpdateFeatures:
        """The features of theta_i: its fully connected layers."""
        return UpdateFeatures(spec.linear, sketch=self.sketch)

    def remember_uploads(self, state: FeSEMCAMState, clients: Clients, updates: Updates) -> FeSEMCAMState:
        """The state with the features and weights of this round's valid uploads."""
        valid_M = updates.valid_M
        weight_M = clients.weights(self.weights)[valid_M]
        return state.remember(clients.ids_M[valid_M], updates.valid_features_MF, weight_S=weight_M)

    def m_step(self, state: FeSEMCAMState, clients: Clients, updates: Updates, cluster_S: np.ndarray) -> FeSEMCAMState:
        """The state with these clusters, and Theta_k <- the mean of this round's participants in every cluster."""
        because = {"clients": len(cluster_S), "num_clusters": self.num_clusters}
        state = placed(state, clients, state.seen_S, cluster_S, **because)
        weight_KM = cluster_weights(state.assign_N[clients.ids_M], clients.weights(self.weights), state.num_clusters)
        averages = clients.average(updates, weight_KM, average_number=0)
        return state.advance(models_KP=averages.averaged(default=state.models_KP))

    def join(self, state: FeSEMCAMState, clients: Clients) -> FeSEMCAMState:
        if state.phase == "warmup":
            return state
        features = self.update_features(clients.spec)
        updates = clients.train(
            clients.send(with_mean(state.models_KP)[-1:]),
            how=LocalTraining(frozen_model=clients.send(state.global_KP)),
            features=features,
            keep_as_local_model=False,
        )
        centre_KF = features.of_rows(state.models_KP, clients.seed)
        cluster_M, _ = nearest_centre(updates.valid_features_MF, centre_KF, "l2")
        return placed(state, clients, clients.ids_M[updates.valid_M], cluster_M, clients=len(cluster_M))

    def serve(self, state: FeSEMCAMState, clients: Clients) -> Serving:
        serving = serve_per_cluster(state, clients)
        return serving if state.phase == "warmup" else replace(serving, frozen_P=state.global_KP[0])
