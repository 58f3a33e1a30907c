"""PACFL: S. Vahidian, M. Morafah, W. Wang, V. Kungurtsev, C. Chen, M. Shah, B. Lin. Efficient Distribution Similarity Identification in
Clustered Federated Learning via Principal Angles Between Client Data Subspaces. AAAI 2023, arXiv:2209.10526, Algorithms 1 and 2.

    U_i <- p leading left singular vectors of each class's flattened images, side by side          once per client, before training
    A_ij <- smallest principal angle between span(U_i) and span(U_j), in degrees
    agglomerate by A until the next merge is higher than beta;   theta_k <- Avg of SGD_i(theta_k) over the cluster's participants

The first round needs the U of every client: who cannot be reached in it is placed when it first takes part, as newcomers are, and predicts
with w_0 until then. A newcomer sends its U, A is extended and clustered again, and the newcomer joins the cluster of most of the old
members it falls together with. The uploaded vectors look like mean images of the client's classes: they are not private.

Departures: the angles are principal angles, after QR (the official code takes the smallest angle between single vectors, which are not
orthogonal across classes: `angle: code`) and linkage is UPGMA (official code: WPGMA, `linkage: weighted`). Images are normalised as for
training. Without a threshold (in degrees) the tree is cut at half the median angle. Newcomers that fall together with newcomers alone
follow the client nearest to them.
"""

import math
from dataclasses import dataclass

import numpy as np
import scipy
import torch
from torch import Tensor

from cfl_ray.core.method import Method, option, weighting
from cfl_ray.core.rounds import fedavg_per_cluster, serve_per_cluster
from cfl_ray.core.signatures import SignatureState, unplaced
from cfl_ray.core.subspaces import angles, angles_between, principal_vectors
from cfl_ray.core.treecut import TreeCut


@dataclass(frozen=True)
class PrincipalVectors:
    """U_i, one vector after another: p per class present, or a budget spread over the classes by their shares."""

    p: int
    budget: int | None

    def __call__(self, client, anchor_P):
        if not client.x.isfinite().all():
            return torch.full((client.x[0].numel(),), torch.nan)
        labels, count = client.y.unique(return_counts=True)
        share = [self.p] * len(labels) if self.budget is None else [max(1, round(self.budget * n / len(client.y))) for n in count.tolist()]
        vectors = [principal_vectors(client.x[client.y == label].flatten(1), p).T for label, p in zip(labels, share)]
        return torch.cat(vectors).flatten() if sum(map(len, vectors)) else torch.full((client.x[0].numel(),), torch.nan)

    def floats(self, inputs: int, classes: int) -> int:
        """Length of the result of a client that holds every class."""
        return inputs * (self.p * classes if self.budget is None else max(self.budget, classes))


@dataclass(frozen=True)
class PACFLState(SignatureState):
    start_KP: Tensor = None  # w_0 (1, P)
    angle_SS: Tensor = None  # float32, degrees
    inputs: int = 0  # D, length of a vector


@dataclass(frozen=True)
class PACFL(TreeCut, Method, name="pacfl"):
    """One-shot hierarchical clustering by the angles between the clients' data subspaces, then FedAvg per cluster."""

    vectors: int = option(3, "p: principal vectors per class", source="paper", low=1)
    budget: int | None = option(None, "vectors of a client in all, spread over its classes by their shares; null: p each", source="official code: 20 for Dirichlet", low=1)
    angle: str = option("smallest", "smallest principal angle, their sum, or the official code's smallest angle between vectors", source="paper", choices=("smallest", "sum", "code"))
    weights: str = weighting()

    State = PACFLState

    def __post_init__(self):
        super().__post_init__()
        if self.linkage == "ward":
            raise ValueError("pacfl.linkage ward is defined for Euclidean distances, not for angles; choose average or weighted")

    def init(self, start):
        first_KP = start.new_model(0)[None]
        return PACFLState(
            models_KP=first_KP[:0], assign_N=start.unassigned(), phase="cluster", start_KP=first_KP,
            angle_SS=torch.zeros(0, 0), inputs=math.prod(start.input_shape), **PACFLState.nobody(),
        )  # fmt: skip

    def round(self, state, clients, rng):
        newcomers = clients.all() if state.phase == "cluster" else unplaced(state, clients)
        return fedavg_per_cluster(self.place(state, newcomers), clients, self.weights)

    def join(self, state, clients):
        return state if state.phase == "cluster" else self.place(state, clients)

    def place(self, state, clients):
        """Clusters these clients together with all that are known; who is known stays where it is."""
        feature_MF, ok_M = clients.describe(PrincipalVectors(self.vectors, self.budget))
        if not ok_M.any():
            return state
        old, ids_M = len(state.seen_S), clients.ids_M[ok_M]
        state = self.extended(state, ids_M, feature_MF[torch.from_numpy(ok_M)])
        found_S = self.clusters(scipy.spatial.distance.squareform(state.angle_SS.double().numpy(), checks=False), len(state.seen_S))
        if not old:
            models_KP = state.start_KP.repeat(found_S.max() + 1, 1)
            return state.advance(models_KP=models_KP, assign_N=state.place(ids_M, found_S), phase="federate")
        near_M = state.angle_SS[old:, :old].argmin(1).numpy()  # who falls together with newcomers alone follows the nearest client
        same_MS = found_S[old:, None] == found_S[:old]
        votes = [np.bincount(state.cluster_S[:old][same if same.any() else [near]]) for same, near in zip(same_MS, near_M)]
        return state.advance(assign_N=state.place(ids_M, [vote.argmax() for vote in votes]))

    def extended(self, state, ids_M, feature_MF):
        """With the subspaces of these clients, and their angles to all others."""
        state = state.remember(ids_M, feature_MF)
        basis_SDR = state.signature_SF.unflatten(1, (-1, state.inputs)).transpose(1, 2)
        old = len(basis_SDR) - len(ids_M)
        new_SS = torch.from_numpy(scipy.spatial.distance.squareform(angles(basis_SDR[old:], kind=self.angle))).float()
        cross_SS = torch.from_numpy(angles_between(basis_SDR[:old], basis_SDR[old:], kind=self.angle)).float()
        rows = torch.cat([torch.cat([state.angle_SS, cross_SS], 1), torch.cat([cross_SS.T, new_SS], 1)])
        return state.advance(angle_SS=rows)

    def leave(self, state, ids):
        stay_S = torch.from_numpy(~np.isin(state.seen_S, ids))
        return state.forget(ids).advance(angle_SS=state.angle_SS[stay_S][:, stay_S])

    def serve(self, state, clients):
        return serve_per_cluster(state, clients, state.start_KP)
