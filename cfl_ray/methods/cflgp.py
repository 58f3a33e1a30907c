"""CFL-GP: H. Kim, H. Kim, G. de Veciana. Clustered Federated Learning via Gradient-based Partitioning. ICML 2024,
https://proceedings.mlr.press/v235/kim24p.html.

    Delta_i <- SGD_i(w_k) - w_k                  every P rounds, while clients are clustered: from model k = 0 .. K-1 in
                                                 turn, which all clients receive next to that of their cluster
    G_ki <- (1 - beta) G_ki + beta Delta_i       block k of client i's column of the profile matrix G; 1 / beta is the
                                                 number of client i's updates from model k so far
    G = U S V';  y_i <- U_K' G_i                 the columns on the K leading left singular vectors
    c <- k-means of y_i, numbered to agree with the clusters before for as many clients as possible
    w_k <- Avg of SGD_i(w_b(i)) over c(i) = k    b(i): the cluster before the new clustering

All clients train w_0 in the first round, and the first w_k are means of the results. With a single full-batch step
Delta_i is -eta times the gradient, and the average is a step of gradient averaging. After `cluster_rounds` rounds the
clusters do not change.

Deviations: K is given. In the official code (docs/official.md) updates are compared in all rounds from a single model,
as with `criterion: first`, but each is taken from the model of the client's own cluster; beta is 1 until round 8 and
1/2 in round 9, the last with a clustering; it begins with K separate models, to which the changes from the first are
added; and it tries all K! numberings of the clusters, instead of solving an assignment problem. Profiles longer than
`sketch` are projected (official code: 1 % of the columns, drawn at random). A client without a profile joins as a
newcomer. With a sampled cohort, blocks of models that a client has not trained are zero, which separates clients by
their rounds: prefer `criterion: first`.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from cfl_ray.clustering.kmeans import kmeans, renumbered
from cfl_ray.clustering.signature_diagnostics import record_signatures, record_similarity
from cfl_ray.clustering.signatures import SignatureState, sketch_option, whole_update
from cfl_ray.clustering.spectral import leading_coordinates
from cfl_ray.core.clients import Clients, UpdateFeatures, Updates
from cfl_ray.core.method import Method, Start, option, weights_option
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.rounds import fedavg_per_cluster, place_in_any, placed
from cfl_ray.core.state import UNASSIGNED
from cfl_ray.core.weights import cluster_weights


@dataclass(frozen=True, kw_only=True)
class ProfileState(SignatureState):
    """The clients' columns of G as signatures, (S, K F): block k has the F features of updates from model k."""

    updates_SK: np.ndarray  # int64: number of each client's updates from each model

    def with_updates(self, k: int, ids_M: np.ndarray, delta_MF: Tensor) -> Self:
        """This state after updates of these clients from model k."""
        state = self.with_values(ids_M)
        at_M, updates_SK, signature_SF = state.positions(ids_M), state.updates_SK.copy(), state.signature_SF.clone()
        updates_SK[at_M, k] += 1
        beta_M = torch.from_numpy(1 / updates_SK[at_M, k]).float()
        size = signature_SF.shape[1] // updates_SK.shape[1]
        block_SF = signature_SF[:, k * size : (k + 1) * size]
        block_SF[torch.from_numpy(at_M)] = torch.lerp(block_SF[torch.from_numpy(at_M)], delta_MF, beta_M[:, None])
        return state.advance(signature_SF=signature_SF, updates_SK=updates_SK)


@dataclass(frozen=True)
class CFLGP(Method[ProfileState], name="cflgp"):
    """Clusters by k-means of accumulated updates on their leading singular vectors; FedAvg per cluster."""

    phases = {"cluster": ("federate",), "federate": ()}

    num_clusters: int = option(4, "K, number of clusters", source="official code, rotated MNIST", low=1)
    period: int = option(2, "P: rounds from one clustering to the next", source="official code", low=1)
    cluster_rounds: int = option(10, "rounds in which clients are clustered", source="official code", low=1)
    criterion: str = option(
        "rotate", "models of the updates: rotate (all), first (model 0)", source="paper", choices=("rotate", "first")
    )
    sketch: int = sketch_option()
    weights: str = weights_option()

    def init(self, start: Start) -> ProfileState:
        return ProfileState(
            models_KP=start.new_model(0)[None],
            assign_N=start.unassigned(),
            updates_SK=np.zeros((0, self.num_clusters), np.int64),
            phase="cluster",
            signature_SF=torch.zeros(0, self.num_clusters * self.features(start.spec).count),
        )

    def round(self, state: ProfileState, clients: Clients, rng: Draws) -> ProfileState:
        past = clients.round - 1
        if state.phase == "federate" or past % self.period:
            return fedavg_per_cluster(place_in_any(state, clients), clients, self.weights)
        # Delta_i <- SGD_i(w_k) - w_k
        k = past // self.period % state.num_clusters if self.criterion == "rotate" else 0
        own_M = state.assign_N[clients.ids_M].astype(np.int64)
        own_M[own_M == UNASSIGNED] = k
        updates = clients.train(
            clients.send(state.models_KP, own_M), features=self.features(clients.spec), defer_aggregation=True
        )
        state = self.with_profiles(state, clients, updates, own_M, k)
        if not len(state.seen_S):
            return state
        # y_i <- U_K' G_i;  c <- k-means of y_i
        y_SK = leading_coordinates(state.signature_SF, self.num_clusters)
        record_similarity(clients, state.seen_S, y_SK)
        record_signatures(clients, state.seen_S, y_SK)
        cluster_S = renumbered(kmeans(y_SK, self.num_clusters, rng.seed)[0], state.cluster_S, self.num_clusters)
        if state.num_clusters < self.num_clusters:
            state = state.advance(models_KP=state.models_KP.repeat(self.num_clusters, 1))
        because = {"clients": len(cluster_S), "num_clusters": self.num_clusters}
        state = placed(state, clients, state.seen_S, cluster_S, **because)
        # w_k <- Avg of SGD_i(w_b(i)) over c(i) = k
        weight_KM = cluster_weights(state.assign_N[clients.ids_M], clients.weights(self.weights), self.num_clusters)
        models_KP = clients.average(updates, weight_KM).averaged(default=state.models_KP)
        last = past + self.period >= self.cluster_rounds
        return state.advance(models_KP=models_KP, phase="federate" if last else "cluster")

    def features(self, spec: ParamSpec) -> UpdateFeatures:
        """Delta_i, projected so that the K blocks of a profile have `sketch` features together."""
        return whole_update(spec, max(self.sketch // self.num_clusters, 16))

    def with_profiles(
        self, state: ProfileState, clients: Clients, updates: Updates, own_M: np.ndarray, k: int
    ) -> ProfileState:
        """The state after G_ki <- (1 - beta) G_ki + beta Delta_i.

        A client whose cluster's model is not model k also trains model k.
        """
        same_M = (own_M == k) & updates.valid_M
        ids, delta_MF = [clients.ids_M[same_M]], [updates.features_MF[torch.from_numpy(same_M)]]
        others = clients.select((own_M != k) & updates.valid_M)
        if len(others):
            more = others.train(
                others.send(state.models_KP, np.full(len(others), k)),
                features=self.features(clients.spec),
                keep_as_local_model=False,
            )
            ids.append(others.ids_M[more.valid_M])
            delta_MF.append(more.valid_features_MF)
        return state.with_updates(k, np.concatenate(ids), torch.cat(delta_MF))
