"""PACFL: S. Vahidian, M. Morafah, W. Wang, V. Kungurtsev, C. Chen, M. Shah, B. Lin. Efficient Distribution Similarity
Identification in Clustered Federated Learning via Principal Angles Between Client Data Subspaces. AAAI 2023,
arXiv:2209.10526, Algorithms 1 and 2.

    U_i <- p leading left singular vectors of each class's flattened images, side by side (once per client)
    A_ij <- smallest principal angle between span(U_i) and span(U_j), in degrees;   or tr(arccos(U_i' U_j))
    agglomerate by A until the next merge is higher than beta
    theta_k <- Avg of SGD_i(theta_k) over the cluster's participants

The first round needs the U of every client. A client that cannot be reached in it is placed as a newcomer when it first
takes part, and predicts with w_0 until then. A newcomer sends its U, and A is extended and clustered again. In the new
clustering, the newcomer joins the current cluster of most old members that share its cluster. The uploaded vectors look
like mean images of the client's classes, so they are not private.

Deviations: the angles are principal angles, after QR (`angle: code` is the official code's smallest angle between
single vectors, which are not orthogonal across classes). The trace takes |U_i' U_j|, since the sign of a singular
vector is arbitrary, over as many vectors as both clients have (`angle: trace`). Linkage is UPGMA (official code: WPGMA,
`linkage: weighted`). Images are normalised as for training (official code: stored pixels, as with `undo_normalize` and
the values of `data.normalize`). Without a threshold (in degrees) the tree is cut at half the median angle. With
FedClust's rule, the largest mean silhouette (`cut: silhouette`), the result is 2 of the four label groups of
Fashion-MNIST and 2 of the three rotations of the digits; half the median gives all of them. On IID data both give 2
clusters. If each client has two of ten labels (100 clients of 500), the smallest angles hardly differ between pairs
with 0, 1 and 2 labels in common: 13.6, 2.4 and 1.6 degrees on Fashion-MNIST, 6.0, 5.0 and 4.3 on CIFAR-10. In this case
half the median makes every client a cluster, the 4.9 degrees in the authors' script make 22 clusters, and no cut has an
ARI above 0.26 (Fashion-MNIST: 0.4). A newcomer that is clustered only with newcomers joins the cluster of its nearest
old member. If all members have left, it joins the cluster whose model has the least loss on its training samples.
"""

import math
from dataclasses import dataclass

import numpy as np
import scipy
import torch
from torch import Tensor

from cfl_ray.clustering.signatures import SignatureState, unplaced
from cfl_ray.clustering.subspaces import KINDS, angles, angles_between, principal_vectors
from cfl_ray.clustering.tree_cut import CUTS, TreeCut
from cfl_ray.core.clients import ClientData, Clients
from cfl_ray.core.method import Method, Start, option, weights_option
from cfl_ray.core.rng import Draws
from cfl_ray.core.rounds import fedavg_per_cluster, place_in_any, serve_per_cluster
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import UNASSIGNED
from cfl_ray.errors import DataError


@dataclass(frozen=True)
class PrincipalVectors:
    """Computes U_i: p vectors for each class, or `budget` vectors divided among classes by their shares of samples."""

    p: int
    budget: int | None
    undo_normalize: list[list[float]] | None = None  # [means, standard deviations] per channel

    def __call__(self, client: ClientData, anchor_P: Tensor | None) -> Tensor:
        """U_i as a row (vectors * D,); NaN, which excludes the client, if its data have no principal vectors."""
        inputs = client.x[0].numel()  # D
        if not client.x.is_floating_point():
            raise DataError("pacfl compares subspaces of the inputs, which token ids do not have; leave pacfl out")
        if not client.x.isfinite().all():
            return torch.full((inputs,), torch.nan)
        x = client.x
        if self.undo_normalize is not None:
            mean, std = (x.new_tensor(part).view(-1, *[1] * (x.dim() - 2)) for part in self.undo_normalize)
            x = x * std + mean
        labels, count = client.y.unique(return_counts=True)
        if self.budget is None:
            vectors_per_class = [self.p] * len(labels)
        else:
            vectors_per_class = [max(1, round(self.budget * n / len(client.y))) for n in count.tolist()]
        vectors = [
            principal_vectors(x[client.y == label].flatten(1), p).T
            for label, p in zip(labels, vectors_per_class, strict=True)
        ]
        return torch.cat(vectors).flatten() if sum(map(len, vectors)) else torch.full((inputs,), torch.nan)

    def floats(self, inputs: int, classes: int) -> int:
        """Length of U_i for a client that has samples of every class."""
        return inputs * (self.p * classes if self.budget is None else max(self.budget, classes))


@dataclass(frozen=True, kw_only=True)
class PACFLState(SignatureState):
    """Signatures are the concatenated principal vectors U_i."""

    start_KP: Tensor  # w_0 (1, P)
    angle_SS: Tensor  # A, float32, degrees
    inputs: int  # D, length of a vector


@dataclass(frozen=True)
class PACFL(TreeCut, Method[PACFLState], name="pacfl"):
    """One-shot hierarchical clustering by the angles between the clients' data subspaces, then FedAvg per cluster."""

    compares = "reachable"
    pair_bytes = 20  # angles, and the indices of the condensed angles
    placement = "the cluster with the smallest principal angles to its data"
    without_cluster = "the first model"
    phases = {"cluster": ("federate",), "federate": ()}
    needs_classes = "it compares subspaces of the samples of each class"

    vectors: int = option(3, "p: principal vectors per class", source="paper", low=1)
    budget: int | None = option(
        None,
        "total number of a client's vectors, divided among its classes by their shares; null: p for each class",
        source="official code: 20 for Dirichlet, which an error in it leaves unused",
        low=1,
    )
    angle: str = option(
        "smallest",
        "smallest: the smallest principal angle; trace: the trace of arccos |U_i' U_j|, which adds up the angles "
        "between the two first vectors, the two second vectors and so on; sum: the sum of the principal angles; code: "
        "the official code's smallest angle between any two signed vectors",
        source="paper: smallest or trace; official code: code; sum: ours",
        choices=KINDS,
    )
    undo_normalize: list[list[float]] | None = option(
        None,
        "the run's data.normalize, to be undone for U_i only, so that clients are compared by stored pixels; "
        "null: by normalised pixels",
        source="official code: stored pixels",
    )
    cut: str = option(
        "median",
        "without threshold and num_clusters: at half the median angle, where the mean silhouette is largest, or in the "
        "largest gap of the last 20 merge heights",
        source="ours: no paper prints a threshold for all data",
        choices=CUTS,
    )
    weights: str = weights_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.linkage == "ward":
            raise ValueError(
                "pacfl.linkage ward is defined for Euclidean distances, not for angles; choose average or weighted"
            )

    def init(self, start: Start) -> PACFLState:
        first_KP = start.new_model(0)[None]
        return PACFLState(
            models_KP=first_KP[:0],
            assign_N=start.unassigned(),
            phase="cluster",
            start_KP=first_KP,
            angle_SS=torch.zeros(0, 0),
            inputs=math.prod(start.input_shape),
            signature_SF=torch.zeros(0, 0),
        )

    def round(self, state: PACFLState, clients: Clients, rng: Draws) -> PACFLState:
        newcomers = clients.all_reachable() if state.phase == "cluster" else unplaced(state, clients)
        return fedavg_per_cluster(self.place(state, newcomers), clients, self.weights)

    def place(self, state: PACFLState, clients: Clients) -> PACFLState:
        """The state after clustering these clients with all assigned clients, which keep their clusters."""
        # U_i
        feature_MF, valid_M = clients.describe(PrincipalVectors(self.vectors, self.budget, self.undo_normalize))
        if not valid_M.any():
            return state
        if state.num_clusters and not len(state.seen_S):  # all members have left
            state = place_in_any(state, clients.select(valid_M))
            valid_M &= state.assign_N[clients.ids_M] != UNASSIGNED
            ids_M, feature_MF = clients.ids_M[valid_M], feature_MF[torch.from_numpy(valid_M)]
            return self.extend_angles(state, ids_M, feature_MF) if len(ids_M) else state

        # A_ij
        old, ids_M = len(state.seen_S), clients.ids_M[valid_M]
        state = self.extend_angles(state, ids_M, feature_MF[torch.from_numpy(valid_M)])

        # agglomerate by A
        condensed = scipy.spatial.distance.squareform(state.angle_SS.double().numpy(), checks=False)
        clients.record("distance", condensed, ("clients", "clients"), ids=state.seen_S)
        cut = self.cut_tree(condensed, len(state.seen_S))
        cluster_S = cut.cluster_S
        if not old:
            models_KP = state.start_KP.repeat(cluster_S.max() + 1, 1)
            clients.event("birth", into=range(len(models_KP)), because=cut.because)
            return state.advance(models_KP=models_KP, assign_N=state.place(ids_M, cluster_S), phase="federate")

        # a newcomer joins the current cluster of most old members of its new cluster, or of the nearest old member
        nearest_M = state.angle_SS[old:, :old].argmin(1).numpy()
        together_MS = cluster_S[old:, None] == cluster_S[:old]
        voters_M = [
            together_S if together_S.any() else [nearest]
            for together_S, nearest in zip(together_MS, nearest_M, strict=True)
        ]
        assign_M = np.array([np.bincount(state.cluster_S[:old][voters]).argmax() for voters in voters_M])
        return state.advance(assign_N=state.place(ids_M, assign_M))

    def extend_angles(self, state: PACFLState, ids_M: np.ndarray, feature_MF: Tensor) -> PACFLState:
        """The state with the vectors of these new clients, and their angles to all others."""
        state = state.remember(ids_M, feature_MF)
        basis_SDR = state.signature_SF.unflatten(1, (-1, state.inputs)).transpose(1, 2)
        old = len(basis_SDR) - len(ids_M)
        new_SS = torch.from_numpy(scipy.spatial.distance.squareform(angles(basis_SDR[old:], kind=self.angle))).float()
        cross_SS = torch.from_numpy(angles_between(basis_SDR[:old], basis_SDR[old:], kind=self.angle)).float()
        angle_SS = state.angle_SS.clone()
        angle_SS[:old, old:], angle_SS[old:, :old], angle_SS[old:, old:] = cross_SS, cross_SS.T, new_SS
        return state.advance(angle_SS=angle_SS)

    def join(self, state: PACFLState, clients: Clients) -> PACFLState:
        return state if state.phase == "cluster" else self.place(state, clients)

    def serve(self, state: PACFLState, clients: Clients) -> Serving:
        return serve_per_cluster(state, clients, state.start_KP)
