"""FeSEM: G. Long, M. Xie, T. Shen, T. Zhou, X. Wang, J. Jiang, C. Zhang. Multi-Center Federated Learning: Clients Clustering for Better
Personalization. World Wide Web 2023, arXiv:2005.01026, Algorithm 1.

    W_i <- SGD_i(theta_{c(i)})
    c(i) <- argmin_k ||W_i - theta_k||^2             E-step, participants
    theta_k <- Avg of W_i over c(i) = k              M-step; a centre without participants stays

In the first round clients train from one common w_0 and k-means++ on W_i gives the centres: clients that start from different centres
stay near them, and the assignment would never move.

Departures: distances are taken over the fully connected layers (`features: all` for the whole model) and averages are weighted by
samples (paper: uniform). A client that was never seen, and a newcomer, trains from the mean of the centres, which are by then far from
w_0. Features longer than `sketch` are projected. There are no more centres than clients in the first round.
"""

from dataclasses import dataclass

import numpy as np
import torch

from cfl_ray.core.clients import Keep
from cfl_ray.core.grouping import by_cluster
from cfl_ray.core.hierarchy import nearest
from cfl_ray.core.kmeans import kmeans
from cfl_ray.core.method import Method, option, weighting
from cfl_ray.core.rounds import row_or_last, serve_per_cluster, with_mean
from cfl_ray.core.signatures import sketching
from cfl_ray.core.state import State


@dataclass(frozen=True)
class FeSEM(Method, name="fesem"):
    """k-means of the clients' models, one E-step and one M-step per round."""

    num_clusters: int = option(4, "K, number of centres", source="ours", low=1)
    features: str = option("linear", "what distances are taken over: the fully connected layers, or all parameters", source="Fed-CAM's comparison", choices=("linear", "all"))
    reseed: bool = option(False, "move a centre that has lost all members to the participant furthest from its own", source="ours")
    sketch: int = sketching()
    weights: str = weighting()

    def init(self, start):
        return State(models_KP=start.new_model(0)[None], assign_N=start.unassigned(), phase="cluster")

    def round(self, state, clients, rng):
        updates, feature_MF = self.train(state, clients)
        ids_M = clients.ids_M[updates.ok_M]
        if not len(ids_M):
            return state
        if state.phase == "cluster":
            found, centre_KF = kmeans(feature_MF, self.num_clusters, rng.seed)
            state = state.advance(models_KP=state.models_KP.repeat(len(centre_KF), 1), phase="federate")
        else:
            found, distance_M = self.expect(state, clients, feature_MF)
            if self.reseed:
                self.refill(state, ids_M, found, distance_M)
        assign_N = state.place(ids_M, found)
        mix = by_cluster(assign_N[clients.ids_M], clients.weights(self.weights), state.num_clusters)
        return state.advance(models_KP=clients.mix(updates, mix).mixed(empty=state.models_KP), assign_N=assign_N)

    def train(self, state, clients, held=True):
        """Updates, and the features (M', F) of the models of those M' that are sound."""
        sent = clients.send(with_mean(state.models_KP), row_or_last(state, clients))
        updates = clients.train(sent, keep=self.keep(clients), mix_later=True, held=held)
        start_MF = self.keep(clients).features(sent.models_KP, clients.seed)[sent.row_M]
        return updates, (start_MF + updates.kept_MF)[torch.from_numpy(updates.ok_M)]

    def expect(self, state, clients, feature_MF):
        """E-step: the nearest centre of each client, and its distance."""
        return nearest(feature_MF, self.keep(clients).features(state.models_KP, clients.seed), "l2")

    def refill(self, state, ids_M, found_M, distance_M):
        """Gives an empty cluster the participant furthest from its centre, in place; one that is alone there only if all are."""
        members_K = state.advance(assign_N=state.place(ids_M, found_M)).members_K
        if not members_K.all():
            found_M[np.lexsort((distance_M, members_K[found_M] > 1))[-1]] = members_K.argmin()

    def keep(self, clients):
        columns = clients.spec.linear if self.features == "linear" else clients.spec.trainable
        return Keep(columns, change=True, sketch=self.sketch)

    def join(self, state, clients):
        if state.phase == "cluster":
            return state
        updates, feature_MF = self.train(state, clients, held=False)
        return state.advance(assign_N=state.place(clients.ids_M[updates.ok_M], self.expect(state, clients, feature_MF)[0]))

    def serve(self, state, clients):
        return serve_per_cluster(state, clients)
