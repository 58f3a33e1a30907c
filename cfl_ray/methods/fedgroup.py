"""FedGroup: M. Duan, D. Liu, X. Ji, R. Liu, L. Liang, X. Chen, Y. Tan. FedGroup: Efficient Federated Learning via
Decomposed Similarity-Based Clustering. ISPA 2021, arXiv:2010.06870, Algorithms 1 to 3; inter-group mixing as in FlexCFL
(arXiv:2108.09749).

    Delta_i <- 50 steps of SGD_i(w_0) - w_0              cold start: min(alpha K, N) clients in the first round
    v_1 .. v_K <- leading singular directions of the Delta_i;   e_i <- [cos(Delta_i, v_j)]_j
                                                         decomposed cosine similarity (EDC)
    K-means on e_i;   w_k <- mean of w_0 + Delta_i,  Delta_k <- mean of Delta_i over group k
    a client without a group trains the same from w_0 and joins argmin_k (1 - cos(Delta_i, Delta_k)) / 2
    w_k <- Avg of SGD_i(w_k) over the group's participants
    w_k <- (w_k + eta_G sum_{l != k} w_l / |w_l|) / (1 + eta_G sum_{l != k} 1 / |w_l|)
                                                         optional, the official code's form

    a client whose data changed leaves its group and is cold-started again                  FlexCFL, migration:
        if the simulation says that they changed (`regroup`), or, by the shares q of its labels,
        if sum_c |q_c - q_c at its cold start| > `migrate`                                  checked by the client

Deviations: FlexCFL's code compares the sorted numbers of samples by label, which do not change when labels are swapped;
here each label is compared with itself. K-means has 10 starts of up to 300 iterations (official code: 1 start of 20).
Updates longer than `sketch` are projected. P-server is over clients with a group. The number of groups is at most the
number of clients in the cold start.
"""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

from cfl_ray.clustering import agglomerative
from cfl_ray.clustering.kmeans import kmeans
from cfl_ray.clustering.merging import cluster_means
from cfl_ray.clustering.signature_diagnostics import record_signatures, record_similarity
from cfl_ray.clustering.signatures import CentreState, place_by_training, sketch_option, unplaced, whole_update
from cfl_ray.clustering.spectral import decomposed_cosines
from cfl_ray.core.clients import ClientData, Clients, LocalTraining
from cfl_ray.core.method import Method, Start, option, weights_option
from cfl_ray.core.rng import Draws
from cfl_ray.core.rounds import fedavg_per_cluster
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import UNASSIGNED
from cfl_ray.core.weights import cluster_weights


@dataclass(frozen=True, kw_only=True)
class GroupState(CentreState):
    """The groups, and the label shares by which a client checks whether its data changed; they are not uploaded."""

    label_NC: np.ndarray  # float32: shares at the client's cold start; zeros: not known

    def forget(self, ids: np.ndarray) -> Self:
        label_NC = self.label_NC.copy()
        label_NC[ids] = 0
        return super().forget(ids).advance(label_NC=label_NC)


@dataclass(frozen=True)
class FedGroup(Method[GroupState], name="fedgroup"):
    """One-shot grouping of a sample of clients by the directions of their updates, then FedAvg per group."""

    placement = "the group with the most similar update, by a local training from the first model"
    without_cluster = "the first model"
    phases = {"cluster": ("federate",), "federate": ()}

    num_clusters: int = option(5, "K, number of groups (MNIST: 3)", source="paper", low=1)
    alpha: int = option(20, "alpha: clients of the cold start per group", source="paper", low=1)
    pretrain_steps: int = option(50, "mini-batch steps of a cold start", source="official code", low=1)
    similarity: str = option(
        "edc",
        "decomposed cosine similarity with K-means, or MADC with complete linkage",
        source="paper",
        choices=("edc", "madc"),
    )
    eta_g: float = option(0.0, "eta_G: rate of mixing between groups (FlexCFL: 0 or 0.1)", source="paper", low=0)
    regroup: bool = option(True, "group a client again when its data have changed (FlexCFL)", source="FlexCFL")
    migrate: float | None = option(
        None,
        "group a client again when the shares of its labels differ in sum by more than this (FlexCFL: 0.2); "
        "null: they are not checked",
        source="ours: `regroup` needs no check",
        low=0,
        high=2,
    )
    sketch: int = sketch_option()
    weights: str = weights_option()

    @property
    def needs_classes(self) -> str:
        return "" if self.migrate is None else "migrate compares the shares of labels"

    @property
    def needs_mean(self) -> str:
        return "eta_g above 0 mixes the means of the groups" if self.eta_g else ""

    def init(self, start: Start) -> GroupState:
        no_labels_NC = np.zeros((start.num_clients, 0), np.float32)
        return GroupState.first(start, "cluster", models=0, label_NC=no_labels_NC)

    def round(self, state: GroupState, clients: Clients, rng: Draws) -> GroupState:
        if state.phase == "cluster":
            state = self.cold_start(state, clients.all_reachable(), rng)
        if self.migrate is not None:
            state = self.migrated(state, clients, self.migrate)
        state = self.join(state, unplaced(state, clients))
        # w_k <- Avg of SGD_i(w_k) over the group's participants
        state = fedavg_per_cluster(state, clients, self.weights)
        return state.advance(models_KP=self.mix_groups(state.models_KP)) if self.eta_g else state

    def cold_start(self, state: GroupState, reachable: Clients, rng: Draws) -> GroupState:
        """The state with groups by the updates of a random sample of the reachable clients."""
        count = min(self.alpha * self.num_clusters, len(reachable))
        sample = rng.stream("cold start").choice(len(reachable), count, replace=False)
        clients = reachable.select(np.sort(sample))
        # Delta_i <- 50 steps of SGD_i(w_0) - w_0
        updates = clients.train(
            clients.send(state.start_KP),
            how=LocalTraining(steps_M=self.steps(clients)),
            features=whole_update(clients.spec, self.sketch),
            defer_aggregation=True,
            keep_as_local_model=False,
        )
        valid_M = updates.valid_M
        if not valid_M.any():
            return state
        delta_MF = updates.valid_features_MF
        record_similarity(clients, clients.ids_M[valid_M], delta_MF)
        record_signatures(clients, clients.ids_M[valid_M], delta_MF)
        group_M = self.groups(delta_MF, rng.seed)
        assign_N = state.place(clients.ids_M[valid_M], group_M)
        # w_k <- mean of w_0 + Delta_i,  Delta_k <- mean of Delta_i over group k
        centre_KF, _ = cluster_means(delta_MF, group_M, group_M.max() + 1)
        weight_KM = cluster_weights(assign_N[clients.ids_M], clients.weights("uniform"), len(centre_KF))
        without_step = replace(clients, server_moments=None)  # FedAvg begins after the cold start
        averages = without_step.average(updates, weight_KM)
        models_KP = averages.averaged(default=state.start_KP.repeat(len(centre_KF), 1))
        because = {"clients": len(group_M), "num_clusters": self.num_clusters}
        clients.event("birth", into=range(len(models_KP)), because=because)
        return self.with_labels(state.clustered(clients, state.start_KP, models_KP, assign_N, centre_KF), clients)

    def migrated(self, state: GroupState, clients: Clients, threshold: float) -> GroupState:
        """The state without the groups of the clients whose labels have changed, to be cold-started again."""
        clients = clients.select(state.assign_N[clients.ids_M] != UNASSIGNED)
        ids_M, now_MC, label_NC = self.labels(state, clients)
        moved_M = np.abs(now_MC - label_NC[ids_M]).sum(1) > threshold
        clients.record("migrated", int(moved_M.sum()))
        return state.forget(ids_M[moved_M])

    def with_labels(self, state: GroupState, clients: Clients) -> GroupState:
        """The state with the label shares of these clients, which were cold-started just now."""
        if self.migrate is None:
            return state
        ids_M, now_MC, label_NC = self.labels(state, clients)
        label_NC[ids_M] = now_MC
        return state.advance(label_NC=label_NC)

    def labels(self, state: GroupState, clients: Clients) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Ids (M',) and label shares (M', C) of the clients with valid data, and a copy of `state.label_NC`, (N, C)."""
        clients.require_readable("changes of the labels")  # the shares stay on the clients
        share_MC, valid_M = clients.describe(LabelShares(), floats=0)
        now_MC = share_MC.numpy()[valid_M]
        classes = max(now_MC.shape[1], state.label_NC.shape[1])
        now_MC, label_NC = (np.pad(rows, ((0, 0), (0, classes - rows.shape[1]))) for rows in (now_MC, state.label_NC))
        return clients.ids_M[valid_M], now_MC, label_NC

    def groups(self, delta_MF: Tensor, seed: int) -> np.ndarray:
        """int64 (M,): the group of each client of the cold start."""
        if self.similarity == "madc":
            tree = agglomerative.linkage_tree(agglomerative.mean_difference_of_cosines(delta_MF), "complete")
            return agglomerative.cut_tree(tree, num_clusters=self.num_clusters, size=len(delta_MF))
        return kmeans(decomposed_cosines(delta_MF, self.num_clusters), self.num_clusters, seed)[0]

    def steps(self, clients: Clients) -> np.ndarray:
        """int64 (M,): local steps of a cold start."""
        return np.full(len(clients), self.pretrain_steps)

    def mix_groups(self, models_KP: Tensor) -> Tensor:
        """w_k <- (w_k + eta_G sum_{l != k} w_l / |w_l|) / (1 + eta_G sum_{l != k} 1 / |w_l|)"""
        unit_KP = models_KP / models_KP.norm(dim=1, keepdim=True)
        inverse_K = 1 / models_KP.norm(dim=1, keepdim=True)
        others = unit_KP.sum(0) - unit_KP
        return (models_KP + self.eta_g * others) / (1 + self.eta_g * (inverse_K.sum() - inverse_K))

    def join(self, state: GroupState, clients: Clients) -> GroupState:
        features, steps_M = whole_update(clients.spec, self.sketch), self.steps(clients)
        return self.with_labels(place_by_training(state, clients, features, "cosine", steps_M), clients)

    def drift(self, state: GroupState, clients: Clients) -> GroupState:
        return state.forget(clients.ids_M) if self.regroup else state

    def serve(self, state: GroupState, clients: Clients) -> Serving:
        if state.phase == "cluster":
            return Serving(state.start_KP, clients.first_row())
        return Serving(state.models_KP, state.assign_N[clients.ids_M])


class LabelShares:
    """The share of each label in a client's samples."""

    def floats(self, inputs: int, classes: int) -> int:
        return classes

    def __call__(self, client: ClientData, anchor_P: Tensor | None) -> Tensor:
        return torch.bincount(client.y.reshape(-1)) / client.y.numel()
