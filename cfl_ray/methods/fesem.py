"""FeSEM: G. Long, M. Xie, T. Shen, T. Zhou, X. Wang, J. Jiang, C. Zhang. Multi-Center Federated Learning: Clients
Clustering for Better Personalization. World Wide Web 2023, arXiv:2005.01026, Algorithm 1.

    W_i <- SGD_i(theta_{c(i)})
    c(i) <- argmin_k ||W_i - theta_k||^2             E-step, participants
    theta_k <- Avg of W_i over c(i) = k              M-step; a centre without participants stays

In the first round all clients train from the same w_0, and k-means++ on W_i gives the centres. If clients started from
different centres, they would stay near them, and the assignment would never change.

Deviations: distances are over the fully connected layers (`features: all`: over the whole model), and averages are
weighted by samples (paper: uniform). A client that never took part, or a newcomer, trains from the mean of the centres,
which are then far from w_0. Features longer than `sketch` are projected. The number of centres is at most the number of
clients in the first round.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cfl_ray.clustering.agglomerative import nearest_centre
from cfl_ray.clustering.kmeans import kmeans
from cfl_ray.clustering.signature_diagnostics import record_centre_distances
from cfl_ray.clustering.signatures import sketch_option
from cfl_ray.core.clients import Clients, UpdateFeatures, Updates
from cfl_ray.core.method import Method, Start, option, weights_option
from cfl_ray.core.rng import Draws
from cfl_ray.core.rounds import placed, row_or_last, with_mean
from cfl_ray.core.state import State
from cfl_ray.core.weights import cluster_weights


@dataclass(frozen=True)
class FeSEM(Method[State], name="fesem"):
    """k-means of the clients' models, with an E-step and an M-step per round."""

    placement = "the nearest centre, by a local training from the mean of the cluster models"
    phases = {"cluster": ("federate",), "federate": ()}

    num_clusters: int = option(4, "K, number of centres", source="ours", low=1)
    features: str = option(
        "linear",
        "parameters over which distances are computed: the fully connected layers, or all",
        source="Fed-CAM's comparison",
        choices=("linear", "all"),
    )
    reseed: bool = option(
        False,
        "a centre that has lost all members moves to the participant that is furthest from its centre",
        source="ours",
    )
    sketch: int = sketch_option()
    weights: str = weights_option()

    def init(self, start: Start) -> State:
        return State(models_KP=start.new_model(0)[None], assign_N=start.unassigned(), phase="cluster")

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        # W_i <- SGD_i(theta_{c(i)}), or from w_0 in the first round
        updates, feature_MF = self.train(state, clients)
        ids_M = clients.ids_M[updates.valid_M]
        if not len(ids_M):
            return state

        # E-step: c(i), by k-means++ in the first round
        if state.phase == "cluster":
            cluster_M, centre_KF = kmeans(feature_MF, self.num_clusters, rng.seed)
            state = state.advance(models_KP=state.models_KP.repeat(len(centre_KF), 1), phase="federate")
        else:
            centre_KF = self.centres(state, clients)
            cluster_M, distance_M = nearest_centre(feature_MF, centre_KF, "l2")
            if self.reseed:
                self.reseed_empty_centre(state, ids_M, cluster_M, distance_M)
        record_centre_distances(clients, ids_M, feature_MF, centre_KF)
        state = placed(state, clients, ids_M, cluster_M, clients=len(ids_M), num_clusters=state.num_clusters)

        # M-step: theta_k <- Avg of W_i over c(i) = k
        weight_KM = cluster_weights(state.assign_N[clients.ids_M], clients.weights(self.weights), state.num_clusters)
        return state.advance(models_KP=clients.average(updates, weight_KM).averaged(default=state.models_KP))

    def train(self, state: State, clients: Clients, only_compared: bool = False) -> tuple[Updates, Tensor]:
        """The updates, and the features (M', F) of the local models W_i of the M' clients with valid updates.

        only_compared: whether the W_i are neither averaged nor kept, so that clients upload their features alone.
        """
        features = self.update_features(clients)
        sent = clients.send(with_mean(state.models_KP), row_or_last(state, clients))
        averaged = not only_compared
        updates = clients.train(sent, features=features, defer_aggregation=averaged, keep_as_local_model=averaged)
        start_MF = features.of_rows(sent.models_KP, clients.seed)[sent.row_M]
        return updates, (start_MF + updates.features_MF)[torch.from_numpy(updates.valid_M)]

    def update_features(self, clients: Clients) -> UpdateFeatures:
        """The features W_i - theta_{c(i)}, over the columns that distances use."""
        columns = clients.spec.linear if self.features == "linear" else clients.spec.trainable
        return UpdateFeatures(columns, change=True, sketch=self.sketch)

    def centres(self, state: State, clients: Clients) -> Tensor:
        """The features (K, F) of the cluster models."""
        return self.update_features(clients).of_rows(state.models_KP, clients.seed)

    def reseed_empty_centre(
        self, state: State, ids_M: np.ndarray, cluster_M: np.ndarray, distance_M: np.ndarray
    ) -> None:
        """Moves the participant furthest from its centre to an empty cluster, by changing `cluster_M` in place.

        A participant that is alone in its cluster is moved only if every participant is alone in its cluster.
        """
        members_K = state.advance(assign_N=state.place(ids_M, cluster_M)).members_K
        if not members_K.all():
            cluster_M[np.lexsort((distance_M, members_K[cluster_M] > 1))[-1]] = members_K.argmin()

    def join(self, state: State, clients: Clients) -> State:
        if state.phase == "cluster":
            return state
        updates, feature_MF = self.train(state, clients, only_compared=True)
        cluster_M, _ = nearest_centre(feature_MF, self.centres(state, clients), "l2")
        return placed(state, clients, clients.ids_M[updates.valid_M], cluster_M, clients=len(cluster_M))
