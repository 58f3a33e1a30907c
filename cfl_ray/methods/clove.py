"""CLoVE: R. Bhatia, N. Papadis, M. Kodialam, T. V. Lakshman, S. Chakrabarty. CLoVE: Personalized Federated Learning
through Clustering of Loss Vector Embeddings. ICML 2026, arXiv:2506.22427.

    l_i <- (f_i(theta_1) .. f_i(theta_K))            the loss vector of each client, on its training data
    S_1 .. S_K <- k-means of l_i
    S_a trains the model that the Hungarian method gives it with the costs  c_ab = sum of l_ib over S_a
    theta_b <- Avg of SGD_i(theta_b) over its clients       or  theta_b - (gamma / m) sum of their gradients, as in IFCA

In round 1 clients are divided at random. Once the last `stable_rounds` assignments of every client that has taken part
agree, the clusters are fixed: clients receive one model and send no losses, until data change. Assignments of a client
before the change of its data no longer count. With `num_clusters: null` there are `max_clusters` models, and clusters
are those of Ward's method with the largest mean silhouette; a larger K has to exceed the silhouette of a smaller one by
`margin`.

A newcomer, and a client that first takes part when clusters are fixed, joins the cluster with the nearest mean loss
vector. It receives the models with which these vectors were computed, and then that of its cluster. A cluster without
clients in the latest comparison has its vector of an earlier one. Before the first comparison, the cluster is that of
the model with the least loss.

Deviations: the official code (Nokia-Bell-Labs/Loss-Vector-based-Clustered-Federated-Learning, b602090) raises KeyError
for a client that arrives after clusters are fixed, and its branch for such clients, which cannot run, compares losses
on TEST data. It fixes no clusters in the experiments of its tables (`stable_rounds: null`), and else compares the last
assignment of a client with the third to last alone. It averages gradients within a cluster. If K is not known, K is of
Ward's method and the clusters are of k-means. Its second way to find K, FINCH, is not implemented. Models without
clients stay, as there. A loss that is not finite counts as the largest finite one. A cohort of at most K clients makes
a cluster of each client.
"""

from dataclasses import dataclass

import numpy as np
import scipy
import torch
from torch import Tensor

from cfl_ray.clustering.agglomerative import cut_tree, distances, linkage_tree, nearest_centre
from cfl_ray.clustering.kmeans import kmeans
from cfl_ray.clustering.tree_cut import silhouettes
from cfl_ray.core.clients import Clients, LocalTraining, Sent, least_loss
from cfl_ray.core.method import Method, Start, average_option, option, weights_option
from cfl_ray.core.rng import Draws, uniforms
from cfl_ray.core.rounds import placed
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import UNASSIGNED, State
from cfl_ray.core.weights import cluster_weights


@dataclass(frozen=True, kw_only=True)
class LossVectorState(State):
    """The mean loss vector of each cluster, with the models of which these are losses."""

    centre_KK: Tensor  # float32: a row for each cluster; inf for a cluster that never had clients
    compared_KP: Tensor  # float32
    # int32: number of a client's last assignments that agree; 0: it has none; -1: none since its data changed
    same_N: np.ndarray

    def forget(self, ids: np.ndarray) -> "LossVectorState":
        same_N = self.same_N.copy()
        same_N[ids] = 0
        return super().forget(ids).advance(same_N=same_N)


@dataclass(frozen=True)
class CLoVE(Method[LossVectorState], name="clove"):
    """K models; clients with similar vectors of losses under all models train one of them."""

    placement = "the cluster with the nearest mean loss vector, by the losses of all models on its training samples"
    without_cluster = "that of the cluster with the nearest mean loss vector"
    phases = {"cluster": ("federate",), "federate": ("cluster",)}
    compares_models = True

    num_clusters: int | None = option(4, "K, number of cluster models; null: not known", source="ours", low=1)
    max_clusters: int = option(15, "number of models if K is not known", source="paper", low=2)
    margin: float = option(
        0.1, "if K is not known: share by which the silhouette of a larger K has to be better", source="paper", low=0
    )
    first: str = option(
        "random",
        "how clients are divided in round 1: random, or by their losses",
        source="paper's experiments",
        choices=("random", "losses"),
    )
    stable_rounds: int | None = option(
        3,
        "number of a client's last assignments that agree when clusters are fixed; null: they never are",
        source="paper; its experiments: null",
        low=2,
    )
    root: bool = option(False, "square roots of the losses are clustered", source="official code")
    average: str = average_option()
    weights: str = weights_option()  # for models; gradients are averaged uniformly

    @property
    def needs_sgd(self) -> str:
        return "average: gradients takes one step of SGD" if self.average == "gradients" else ""

    @property
    def num_models(self) -> int:
        """K, or the number of models if K is not known."""
        return self.max_clusters if self.num_clusters is None else self.num_clusters

    def warning(self, clients: int, cohort: int) -> str:
        if cohort >= 2 * (self.num_clusters or 1):
            return ""
        return (
            f"clove compares the clients of a round with each other: {cohort} are less than two for each of "
            f"{self.num_clusters} clusters, so that most make a cluster of their own"
        )

    def init(self, start: Start) -> LossVectorState:
        models_KP = torch.stack([start.new_model(k) for k in range(self.num_models)])
        return LossVectorState(
            models_KP=models_KP,
            assign_N=start.unassigned(),
            phase="cluster",
            centre_KK=torch.full((self.num_models, self.num_models), torch.inf),
            compared_KP=models_KP,
            same_N=np.zeros(start.num_clients, np.int32),
        )

    def round(self, state: LossVectorState, clients: Clients, rng: Draws) -> LossVectorState:
        clients.require_readable("the losses")  # also of the rounds that compare none
        if state.phase == "federate":
            state = self.join(state, clients)
            assign_M = state.assign_N[clients.ids_M].astype(np.int64)
            return self.trained(state, clients, clients.send(state.models_KP, np.maximum(assign_M, 0)), assign_M)[0]
        if self.first == "random" and (state.assign_N == UNASSIGNED).all():
            draw_M = uniforms(rng.seed, rng.round, -1, clients.ids_M, "method/first")
            assign_M = (draw_M * self.num_models).astype(np.int64)
            sent = clients.send(state.models_KP, assign_M)
        else:
            # l_i <- (f_i(theta_1) .. f_i(theta_K))
            received = clients.broadcast(state.models_KP)
            loss_MK, valid_M = self.loss_vectors(clients, received)
            clients.count_upload(self.num_models)
            clients.record("losses", loss_MK, ("clients", "clusters"), ids=clients.ids_M)
            # the model of each cluster of l_i
            assign_M = np.full(len(clients), UNASSIGNED, np.int64)
            assign_M[valid_M] = self.matched(loss_MK[valid_M], self.clusters(loss_MK[valid_M], rng.seed))
            centre_KK = state.centre_KK.clone()
            for k in np.unique(assign_M[valid_M]):
                centre_KK[k] = torch.from_numpy(loss_MK[assign_M == k].mean(0))
            state, sent = (
                state.advance(centre_KK=centre_KK, compared_KP=state.models_KP),
                received.choose(np.maximum(assign_M, 0)),
            )
        before_N = state.assign_N
        state, valid_M = self.trained(state, clients, sent, assign_M)
        ids_m, assign_m = clients.ids_M[valid_M], assign_M[valid_M]
        same_N = state.same_N.copy()
        same_N[ids_m] = np.where(before_N[ids_m] == assign_m, np.maximum(same_N[ids_m], 0), 0) + 1
        state = placed(state.advance(same_N=same_N), clients, ids_m, assign_m, clients=len(ids_m))
        seen_S = same_N[same_N != 0]
        is_stable = self.stable_rounds is not None and len(seen_S) and seen_S.min() >= self.stable_rounds
        return state.advance(phase="federate" if is_stable else "cluster")

    def loss_vectors(self, clients: Clients, received: Sent) -> tuple[np.ndarray, np.ndarray]:
        """l_i, float64 (M, K), finite, and bool (M,), False for a client without any finite loss."""
        loss_MK = clients.losses(received)
        finite_MK = np.isfinite(loss_MK)
        largest = loss_MK.max(where=finite_MK, initial=0)
        loss_MK = np.where(finite_MK, loss_MK, largest)
        return np.sqrt(loss_MK) if self.root else loss_MK, finite_MK.any(1)

    def clusters(self, loss_MK: np.ndarray, seed: int) -> np.ndarray:
        """The cluster of each loss vector, int64 (M,)."""
        if self.num_clusters is not None:
            return kmeans(torch.from_numpy(loss_MK), self.num_clusters, seed)[0]
        distance = distances(torch.from_numpy(loss_MK), "l2")
        tree = linkage_tree(distance, "ward")
        value_K, best = silhouettes(distance, tree, self.max_clusters), 2
        for k in range(3, len(value_K)):
            if value_K[k] > value_K[best] + self.margin * abs(value_K[best]):
                best = k
        return cut_tree(tree, num_clusters=best, size=len(loss_MK))

    def matched(self, loss_MK: np.ndarray, cluster_M: np.ndarray) -> np.ndarray:
        """The model of each client, int64 (M,): that of its cluster, such that the sum of all losses is least."""
        cost_AK = np.eye(self.num_models)[cluster_M].T @ loss_MK
        _, model_A = scipy.optimize.linear_sum_assignment(cost_AK[: cluster_M.max(initial=-1) + 1])
        return model_A[cluster_M]

    def trained(
        self, state: LossVectorState, clients: Clients, sent: Sent, assign_M: np.ndarray
    ) -> tuple[LossVectorState, np.ndarray]:
        """The state with the averages of each model's clients, and which clients had a valid result, bool (M,)."""
        known_M, gradients = assign_M != UNASSIGNED, self.average == "gradients"
        one_step = clients.local.one_gradient() if gradients else None
        weight_M = clients.weights("uniform" if gradients else self.weights)
        weight_KM = cluster_weights(assign_M, weight_M, self.num_models)
        updates = clients.train(sent, how=LocalTraining(sgd=one_step), average=weight_KM)
        if gradients:
            models_KP = updates.damped(state.models_KP, total=updates.weight_R.sum())
        else:
            models_KP = updates.averaged(default=state.models_KP)
        return state.advance(models_KP=models_KP), updates.valid_M & known_M

    def nearest(self, state: LossVectorState, clients: Clients) -> np.ndarray:
        """The cluster with the nearest mean loss vector, int64 (M,); before there are any, that of the least loss."""
        known = np.flatnonzero(torch.isfinite(state.centre_KK).all(1).numpy())
        models_KP = state.compared_KP if len(known) else state.models_KP
        loss_MK, valid_M = self.loss_vectors(clients, clients.known_models(models_KP))
        if len(known):
            nearest_M = known[nearest_centre(torch.from_numpy(loss_MK), state.centre_KK[known], "l2")[0]]
        else:
            nearest_M = least_loss(loss_MK)
        return np.where(valid_M, nearest_M, UNASSIGNED)

    def join(self, state: LossVectorState, clients: Clients) -> LossVectorState:
        """The state with those of these clients that have no cluster in that of the nearest mean loss vector."""
        clients = clients.select(state.assign_N[clients.ids_M] == UNASSIGNED)
        is_first = state.phase == "cluster" and (state.assign_N == UNASSIGNED).all()
        if not len(clients) or is_first:
            return state
        clients.count_download(self.num_models * clients.spec.sent())
        clients.count_upload(self.num_models)
        return placed(state, clients, clients.ids_M, self.nearest(state, clients), clients=len(clients))

    def drift(self, state: LossVectorState, clients: Clients) -> LossVectorState:
        """The state in which clusters are not fixed, until these clients have been compared again."""
        same_N = state.same_N.copy()
        same_N[clients.ids_M] = np.where(state.assign_N[clients.ids_M] == UNASSIGNED, 0, -1)
        return state.advance(phase="cluster", same_N=same_N)

    def serve(self, state: LossVectorState, clients: Clients) -> Serving:
        row_M = state.assign_N[clients.ids_M].astype(np.int64)
        unknown_M = row_M == UNASSIGNED
        if unknown_M.any():
            row_M[unknown_M] = np.maximum(self.nearest(state, clients.select(unknown_M)), 0)
        return Serving(state.models_KP, row_M)
