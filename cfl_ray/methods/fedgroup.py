"""FedGroup: M. Duan, D. Liu, X. Ji, R. Liu, L. Liang, X. Chen, Y. Tan. FedGroup: Efficient Federated Learning via Decomposed
Similarity-Based Clustering. ISPA 2021, arXiv:2010.06870, Algorithms 1 to 3; inter-group mixing as in FlexCFL (arXiv:2108.09749).

    Delta_i <- 50 steps of SGD_i(w_0) - w_0                       cold start: min(alpha K, N) clients in the first round
    v_1 .. v_K <- leading singular directions of the Delta_i;   e_i <- [cos(Delta_i, v_j)]_j        decomposed cosine similarity (EDC)
    K-means on e_i;   w_k <- mean of w_0 + Delta_i,  Delta_k <- mean of Delta_i over group k
    a client without a group trains the same from w_0 and joins argmin_k (1 - cos(Delta_i, Delta_k)) / 2
    w_k <- Avg of SGD_i(w_k) over the group's participants
    w_k <- (w_k + eta_G sum_{l != k} w_l / |w_l|) / (1 + eta_G sum_{l != k} 1 / |w_l|)             optional, the official code's form

    a client whose data changed leaves its group and is cold-started again                         FlexCFL, `regroup`

Departures: a client is told that its data changed; it does not measure its label distribution. K-means has 10 starts of up to 300
iterations (official code: one of 20). Updates longer than `sketch` are projected. P-server is over clients that have a group. Where few
clients can be reached for the cold start, there are no more groups than clients.
"""

from dataclasses import dataclass

import numpy as np
import scipy
import torch
from torch.nn.functional import normalize

from cfl_ray.core import hierarchy
from cfl_ray.core.grouping import by_cluster
from cfl_ray.core.kmeans import kmeans
from cfl_ray.core.merging import cluster_means
from cfl_ray.core.method import Method, option, weighting
from cfl_ray.core.rounds import fedavg_per_cluster
from cfl_ray.core.serving import Serving
from cfl_ray.core.signatures import CentreState, placed_by_training, sketching, unplaced, update_of


def decomposed(delta_MF: torch.Tensor, components: int) -> torch.Tensor:
    """e_i (M, K): cosines of updates with the leading singular directions of all of them; fewer than K where there are no more."""
    delta_MF = delta_MF.double()
    v_KF = torch.linalg.svd(delta_MF, full_matrices=False).Vh[:components]
    return (normalize(delta_MF, dim=1) @ v_KF.T).float()


def madc(delta_MF: torch.Tensor) -> np.ndarray:
    """Condensed mean absolute difference of two clients' cosines with all others."""
    distance = hierarchy.distances(delta_MF, "cosine")
    cos_MM = 1 - scipy.spatial.distance.squareform(distance)
    sums = scipy.spatial.distance.pdist(cos_MM, "cityblock") - 2 * np.abs(distance)  # without i and j themselves, where the cosines are 1 and cos_ij
    return np.maximum(sums, 0) / max(len(cos_MM) - 2, 1)


@dataclass(frozen=True)
class FedGroup(Method, name="fedgroup"):
    """One-shot grouping of a sample of clients by the directions of their updates; FedAvg per group."""

    num_clusters: int = option(5, "K, number of groups (MNIST: 3)", source="paper", low=1)
    alpha: int = option(20, "alpha: clients of the cold start per group", source="paper", low=1)
    pretrain_steps: int = option(50, "mini-batch steps of a cold start", source="official code", low=1)
    similarity: str = option("edc", "decomposed cosine similarity with K-means, or MADC with complete linkage", source="paper", choices=("edc", "madc"))
    eta_g: float = option(0.0, "eta_G: rate of mixing between groups (FlexCFL: 0 or 0.1)", source="paper", low=0)
    regroup: bool = option(True, "group a client anew when its data have changed (FlexCFL)", source="FlexCFL")
    sketch: int = sketching()
    weights: str = weighting()

    State = CentreState

    def init(self, start):
        first_KP = start.new_model(0)[None]
        return CentreState(models_KP=first_KP[:0], assign_N=start.unassigned(), phase="cluster", start_KP=first_KP, centre_KF=first_KP[:0])

    def round(self, state, clients, rng):
        if state.phase == "cluster":
            state = self.cold_start(state, clients.all(), rng)
        state = self.join(state, unplaced(state, clients))
        state = fedavg_per_cluster(state, clients, self.weights)
        return state.advance(models_KP=self.mixed(state.models_KP)) if self.eta_g else state

    def cold_start(self, state, everybody, rng):
        wanted = min(self.alpha * self.num_clusters, len(everybody))
        clients = everybody.select(np.sort(rng.stream("cold start").choice(len(everybody), wanted, replace=False)))
        updates = clients.train(
            clients.send(state.start_KP), keep=update_of(clients.spec, self.sketch), steps_M=self.steps(clients), mix_later=True, held=False
        )
        ok_M = updates.ok_M
        if not ok_M.any():
            return state
        delta_MF = updates.sound_MF
        found = self.groups(delta_MF, rng.seed)
        assign_N = state.place(clients.ids_M[ok_M], found)
        centre_KF, _ = cluster_means(delta_MF, found, found.max() + 1)
        mix = by_cluster(assign_N[clients.ids_M], clients.weights("uniform"), len(centre_KF))
        models_KP = clients.mix(updates, mix).mixed(empty=state.start_KP.repeat(len(centre_KF), 1))
        return state.advance(models_KP=models_KP, assign_N=assign_N, centre_KF=centre_KF, phase="federate")

    def groups(self, delta_MF, seed):
        if self.similarity == "madc":
            return hierarchy.cut(hierarchy.tree(madc(delta_MF), "complete"), num_clusters=self.num_clusters, size=len(delta_MF))
        return kmeans(decomposed(delta_MF, self.num_clusters), self.num_clusters, seed)[0]

    def steps(self, clients):
        return np.full(len(clients), self.pretrain_steps)

    def mixed(self, models_KP):
        unit_KP = models_KP / models_KP.norm(dim=1, keepdim=True)
        inverse_K = 1 / models_KP.norm(dim=1, keepdim=True)
        others = unit_KP.sum(0) - unit_KP
        return (models_KP + self.eta_g * others) / (1 + self.eta_g * (inverse_K.sum() - inverse_K))

    def join(self, state, clients):
        if state.phase == "cluster":
            return state
        return placed_by_training(state, clients, update_of(clients.spec, self.sketch), "cosine", self.steps(clients))

    def drift(self, state, clients):
        return state.forget(clients.ids_M) if self.regroup else state

    def serve(self, state, clients):
        if state.phase == "cluster":
            return Serving(state.start_KP, clients.first())
        return Serving(state.models_KP, state.assign_N[clients.ids_M])
