"""Adapting the number of clusters while they train: splitting loose ones, merging those that are nearly one."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from cfl_ray.core.clients import Clients, Updates
from cfl_ray.core.grouping import by_cluster
from cfl_ray.core.hierarchy import nearest
from cfl_ray.core.kmeans import kmeans
from cfl_ray.core.method import option
from cfl_ray.core.signatures import SignatureState
from cfl_ray.core.state import State

_FEW = 4  # members


@dataclass(frozen=True)
class ClusterTuning:
    """When a cluster splits or merges (CNT of FedAC). Mixed into a method, so that its fields are options of the method."""

    tune_clusters: bool = option(True, "CNT: adapt the number of clusters", source="FedAC")
    tune_every: int = option(10, "rounds between two steps of CNT, each one split or one merge at most", source="ours: lost", low=1)
    tune_after: int = option(20, "rounds before the first step of CNT", source="ours: lost", low=0)
    rho_low: float = option(0.2, "rho_lo: below this a cluster of a few clients merges into its nearest", source="ours: lost", low=0)
    rho_high: float = option(1.0, "rho_hi: above this a cluster splits; at least 3 rho_lo", source="ours: lost", low=0)
    max_clusters: int = option(20, "K_max", source="ours", low=1)

    def __post_init__(self):
        super().__post_init__()  # the method's own checks
        if self.rho_high < 3 * self.rho_low * (1 - 1e-9):  # 3 * 0.2 > 0.6
            raise ValueError(f"{self.name}.rho_high must be at least 3 rho_low = {3 * self.rho_low:g}, got {self.rho_high}")
        if self.tune_clusters and self.num_clusters > self.max_clusters:
            raise ValueError(f"{self.name}.num_clusters must be at most max_clusters = {self.max_clusters}, got {self.num_clusters}")

    def due(self, number: int) -> bool:
        return self.tune_clusters and number > self.tune_after and number % self.tune_every == 0

    def step(self, rho_K: np.ndarray, known_K: np.ndarray, members_K: np.ndarray) -> tuple[int | None, int | None]:
        """(the cluster to split, the cluster to merge): at most one of them.

        known_K: members whose uploads are remembered: at least 4 are needed to split, and one to merge.
        members_K: all members: fewer than 4 merge.
        """
        wide = np.flatnonzero((rho_K > self.rho_high) & (known_K >= _FEW))
        if len(wide) and len(rho_K) < self.max_clusters:
            return int(wide[rho_K[wide].argmax()]), None
        close = np.flatnonzero((rho_K < self.rho_low) & (known_K > 0) & (members_K < _FEW))
        return None, int(close[rho_K[close].argmin()]) if len(close) and np.count_nonzero(known_K) > 1 else None


def compactness(z_SQ: Tensor, cluster_S: np.ndarray, centre_KQ: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """rho (K,): mean cosine distance of members to their centre over its distance to the nearest other one; that one (K,); members (K,).

    Centres without members are nobody's other one, and have a rho of 0. A centre without others is compared with an orthogonal one, and
    is its own nearest. Rows of cluster -1 count nowhere.
    """
    total, known_S = len(centre_KQ), cluster_S >= 0
    unit_SQ, unit_KQ = normalize(z_SQ[torch.from_numpy(known_S)], dim=1), normalize(centre_KQ, dim=1)
    member_S = cluster_S[known_S]
    members_K = np.bincount(member_S, minlength=total)
    apart_KK = (1 - unit_KQ @ unit_KQ.T).fill_diagonal_(torch.inf)
    apart_KK[:, torch.from_numpy(members_K == 0)] = torch.inf
    alone_K = apart_KK.isinf().all(1)
    apart_KK[alone_K, alone_K] = 1
    within_K = np.bincount(member_S, (1 - (unit_SQ * unit_KQ[member_S]).sum(1)).numpy(), minlength=total) / np.maximum(members_K, 1)
    return within_K / np.maximum(apart_KK.amin(1).numpy(), 1e-12), apart_KK.argmin(1).numpy(), members_K


def split_in_two(
    state: SignatureState, k: int, z_SQ: Tensor, z_MQ: Tensor, clients: Clients, updates: Updates, weight_M: np.ndarray
) -> SignatureState:
    """Cluster k as two, by cosine 2-means of its remembered members; their models are means of this round's participants.

    z_MQ: of this round's sound participants, remembered or not.
    updates: of a `train(..., mix_later=True)` of the round. Nothing is split where one half has no sound participant.
    """
    mine_S, new, ids_M = state.cluster_S == k, state.num_clusters, clients.ids_M[updates.ok_M]
    mine_M = state.assign_N[ids_M] == k
    half_S, half_KQ = kmeans(z_SQ[torch.from_numpy(mine_S)], 2, clients.seed, cosine=True)
    half_M, _ = nearest(normalize(z_MQ[torch.from_numpy(mine_M)], dim=1), half_KQ, "l2")
    members = np.concatenate([state.seen_S[mine_S], ids_M[mine_M]])
    assign_N = state.place(members, np.where(np.concatenate([half_S, half_M]), new, k))
    assign_M = np.where(updates.ok_M & np.isin(assign_N[clients.ids_M], [k, new]), assign_N[clients.ids_M], -1)
    if not {k, new} <= {*assign_M.tolist()}:
        return state
    before_KP = torch.cat([state.models_KP, state.models_KP[k : k + 1]])
    mixed = clients.mix(updates, by_cluster(assign_M, weight_M, len(before_KP)))
    return state.advance(models_KP=mixed.mixed(empty=before_KP), assign_N=assign_N)


def merged_into(state: State, k: int, other: int) -> State:
    """The state with the members of cluster `k` in another one, whose model stays; clusters above k move down by one."""
    assign_N = np.where(state.assign_N == k, other, state.assign_N)
    stay_K = torch.arange(state.num_clusters) != k
    return state.advance(models_KP=state.models_KP[stay_K], assign_N=np.where(assign_N > k, assign_N - 1, assign_N).astype(np.int32))
