"""FLUX: D. Fenoglio, M. Li, P. Barbiero, N. D. Lane, M. Langheinrich, M. Gjoreski. FLUX: Efficient Descriptor-Driven
Clustered Federated Learning under Arbitrary Distribution Shifts. NeurIPS 2025, arXiv:2511.22305.

    rounds of FedAvg, until the accuracy of the clients has stopped to rise
    z <- features of a client's samples under the global model, projected to L dimensions              once
    d_i <- (mean z, std z;  mean and std of z over the samples of each label, -1 with fewer than two)
    clusters <- DBSCAN (min_samples 2) of d_i, scaled to 0 .. 1 in blocks; eps: the knee of the sorted distances of
                clients to their nearest neighbours; noise points are clusters of their own
    rounds of FedAvg in each cluster, from the global model

A newcomer, and any client that first takes part later, joins the cluster with the nearest mean of (mean z, std z), for
which it needs no labels; a client that reports other data is placed anew. It receives the model of the descriptors, and
that of its cluster. All clients that can be reached are described, and the cohort trains in the same round.

Deviations: z are inputs of the last layer (official code: the flattened output of the convolutions), and the projection
is a random orthonormal one, drawn from the run's seed (official code, dariofenoglio98/FLUX, 43aadbe: a PCA fitted to
200 uniform random points, which is one in effect). That code scales the values of each label on their own (`blocks:
labels`). The accuracy is of training samples (paper: of a validation part, and at 80 % of the rounds at the latest). If
the sorted distances have no knee, as when all are equal, eps is the largest (there: an error); that code finds it by
Kneedle (`knee: kneedle`). Noise comes with a
private run (`privacy.signatures`), for which `cluster_round` is needed; in the official code noise is drawn with one
seed, so that it is the same for all clients and hides nothing.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from cfl_ray.clustering.agglomerative import dbscan, distances, nearest_centre
from cfl_ray.clustering.signature_diagnostics import record_distance, record_signatures
from cfl_ray.core.classifier import Classifier
from cfl_ray.core.clients import ClientData, Clients
from cfl_ray.core.method import Method, Start, option, weights_option
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.rounds import fedavg_per_cluster, placed, serve_per_cluster
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import UNASSIGNED, State
from cfl_ray.methods.fedas import check_classifier

MISSING = -1.0  # mean and std of a label with fewer than two samples


@dataclass(frozen=True)
class Descriptor:
    """d_i, (2 L (C + 1),): mean and std of the projected features, of all samples, then of each label in turn.

    The order is mean z, std z, the means of all labels, their stds. Without `by_label` only the first two, (2 L,).
    """

    num_classes: int  # C
    dimensions: int  # L
    seed: int  # of the run: the projection is the same in all rounds
    by_label: bool = True
    blocks: str = "kinds"  # see `blocks_option`
    reads_features: ClassVar[bool] = True

    @classmethod
    def of(cls, clients: Clients, **how: Any) -> "Descriptor":
        """The descriptor for the model of these clients."""
        return cls(Classifier.of(clients.spec).num_classes, dimensions_of(clients.spec), clients.seed, **how)

    def floats(self, inputs: int, classes: int) -> int:
        return 2 * self.dimensions * (1 + self.by_label * self.num_classes)

    def edges(self, length: int) -> list[int]:
        """Edges of the blocks of a descriptor of this length: mean z, std z and, by label, means and stds.

        These are two blocks, or with `blocks: labels` two for each label.
        """
        dimensions = length // (2 * (1 + self.by_label * self.num_classes))  # L
        if self.blocks == "labels":
            return list(range(0, length + 1, dimensions))
        edges = [0, dimensions, 2 * dimensions]
        return [*edges, (length + edges[-1]) // 2, length] if self.by_label else edges

    def __call__(self, client: ClientData, model_P: Tensor) -> Tensor:
        feature_nF, y_n = client.features(model_P).double().cpu(), client.y.cpu()
        z_nL = feature_nF @ projection(feature_nF.shape[1], self.dimensions, self.seed)
        parts = [z_nL.mean(0), z_nL.std(0, correction=0)]
        if self.by_label:
            label_nC = one_hot(y_n, self.num_classes).double()
            count_C1 = label_nC.sum(0)[:, None]
            mean_CL = label_nC.T @ z_nL / count_C1.clamp(min=1)
            square_CL = label_nC.T @ (z_nL - mean_CL[y_n]) ** 2 / count_C1.clamp(min=1)
            parts += [torch.where(count_C1 > 1, part, MISSING).reshape(-1) for part in (mean_CL, square_CL.sqrt())]
        return torch.cat(parts)


def blocks_option() -> Any:
    """The option `blocks`, of the scaling of descriptors."""
    doc = (
        "blocks in which descriptors are scaled: kinds: mean z, std z, the means and the stds of all labels; labels: "
        "mean z, std z, and the mean and the std of each label on their own"
    )
    return option("kinds", doc, source="ours; official code: labels", choices=("kinds", "labels"))


def dimensions_of(spec: ParamSpec) -> int:
    """L = min(C, F)."""
    classifier = Classifier.of(spec)
    return min(classifier.num_classes, classifier.num_features)


@lru_cache(maxsize=4)
def projection(features: int, dimensions: int, seed: int) -> Tensor:
    """Orthonormal directions, float64 (F, L), the same for all clients of a run."""
    normal_FL = Draws(seed, 0).stream("projection").standard_normal((features, dimensions))
    return torch.from_numpy(np.linalg.qr(normal_FL)[0])


@dataclass(frozen=True, kw_only=True)
class FluxState(State):
    """The model of the descriptors, and the scaled mean (mean z, std z) of each cluster."""

    first_KP: Tensor  # (1, P), after the clustering
    centre_KF: Tensor  # float32 (K, 2 L)
    scale_22: Tensor  # float32: lowest and highest value of mean z, then of std z
    accuracy: float  # of the clients in the round before; -1: none
    slow: bool  # whether it once rose by less than `least_gain`


@dataclass(frozen=True)
class Flux(Method[FluxState], name="flux"):
    """FedAvg, then clusters of descriptors of the clients' features and labels; newcomers need no labels."""

    placement = "the cluster with the nearest descriptor of its inputs, which needs no labels"
    without_cluster = "that of the cluster with the nearest descriptor"
    phases = {"warmup": ("federate",), "federate": ()}
    compares = "reachable"
    needs_classes = "its descriptors have a part for each label"

    cluster_round: int | None = option(
        None, "round in which clients are described; null: by their accuracy", source="paper: by accuracy", low=1
    )
    least_gain: float = option(
        0.06,
        "clients are described once their accuracy rose by less than this in a round",
        source="official code",
        low=0,
    )
    earliest_round: int = option(3, "first round in which they may be described", source="official code", low=1)
    latest_round: int = option(
        8, "round in which they are described at the latest", source="official code: 80 % of 10 rounds", low=1
    )
    eps: float | None = option(None, "eps of DBSCAN, of scaled descriptors; null: the knee", source="paper", low=0)
    knee: str = option(
        "furthest",
        "which sorted distance is the knee: the one that is furthest below the line from the first to the last, or the "
        "first one of Kneedle, from the largest down",
        source="ours; official code: kneedle",
        choices=("furthest", "kneedle"),
    )
    blocks: str = blocks_option()
    weights: str = weights_option()

    def check_model(self, spec: ParamSpec) -> None:
        check_classifier(self, spec)

    def init(self, start: Start) -> FluxState:
        models_KP = start.new_model(0)[None]
        return FluxState(
            models_KP=models_KP,
            assign_N=start.unassigned(),
            phase="warmup",
            first_KP=models_KP[:0],
            centre_KF=torch.zeros(0, 0),
            scale_22=torch.zeros(2, 2),
            accuracy=-1.0,
            slow=False,
        )

    def round(self, state: FluxState, clients: Clients, rng: Draws) -> FluxState:
        if state.phase == "warmup":
            state = self.observed(state, clients)
            due = clients.round >= self.latest_round or (state.slow and clients.round >= self.earliest_round)
            if clients.round >= self.cluster_round if self.cluster_round is not None else due:
                reachable = clients.all_reachable()
                others = reachable.select(~np.isin(reachable.ids_M, clients.ids_M))
                others.count_download(clients.spec.sent())  # the cohort trains from the same model in this round
                state = self.clustered(state, reachable)
            if state.phase == "warmup":
                updates = clients.train(clients.send(state.models_KP), average=clients.weights(self.weights))
                return state.advance(models_KP=updates.averaged(default=state.models_KP))
        return fedavg_per_cluster(self.join(state, clients), clients, self.weights)

    def observed(self, state: FluxState, clients: Clients) -> FluxState:
        """The state with the clients' accuracy, before this round, and whether it rose slowly."""
        if self.cluster_round is not None:
            return state
        error_M = clients.losses(clients.known_models(state.models_KP), errors=True)[:, 0]
        clients.count_upload(1)
        valid_M = np.isfinite(error_M)
        if not valid_M.any():
            return state
        accuracy = float(1 - np.average(error_M[valid_M], weights=clients.num_samples_M[valid_M]))
        slow = state.slow or (state.accuracy >= 0 and accuracy - state.accuracy < self.least_gain)
        return state.advance(accuracy=accuracy, slow=slow)

    def clustered(self, state: FluxState, clients: Clients) -> FluxState:
        """The state with the clusters of these clients; unchanged if none of them has valid data."""
        descriptor = Descriptor.of(clients, blocks=self.blocks)
        d_MF, valid_M = clients.describe(descriptor, clients.known_models(state.models_KP))
        if not valid_M.any():
            return state
        ids_M, d_MF = clients.ids_M[valid_M], d_MF[torch.from_numpy(valid_M)]
        edges = descriptor.edges(d_MF.shape[1])
        scale_B2 = scales(d_MF, edges)
        scaled_MF = scaled(d_MF, edges, scale_B2)
        distance = distances(scaled_MF, "l2")
        record_signatures(clients, ids_M, scaled_MF)
        record_distance(clients, ids_M, scaled_MF)
        distance_MM = scipy.spatial.distance.squareform(distance)
        eps = knee(distance_MM, self.knee) if self.eps is None else self.eps
        cluster_M = dbscan(distance_MM, eps)
        count, unlabelled = int(cluster_M.max()) + 1, edges[2]
        centre_KF = torch.stack(
            [scaled_MF[torch.from_numpy(cluster_M == k), :unlabelled].mean(0) for k in range(count)]
        )
        state = state.advance(
            models_KP=state.models_KP.repeat(count, 1),
            phase="federate",
            first_KP=state.models_KP,
            centre_KF=centre_KF,
            scale_22=scale_B2[:2],
        )
        return placed(state, clients, ids_M, cluster_M, clients=len(ids_M), eps=eps)

    def nearest(self, state: FluxState, clients: Clients) -> np.ndarray:
        """The cluster with the nearest descriptor without labels, int64 (M,); UNASSIGNED for invalid data."""
        descriptor = Descriptor.of(clients, by_label=False)
        d_MF, valid_M = clients.describe(descriptor, clients.known_models(state.first_KP))
        edges = descriptor.edges(d_MF.shape[1])
        scaled_MF = scaled(torch.where(torch.from_numpy(valid_M)[:, None], d_MF, 0.0), edges, state.scale_22)
        return np.where(valid_M, nearest_centre(scaled_MF, state.centre_KF, "l2")[0], UNASSIGNED)

    def join(self, state: FluxState, clients: Clients) -> FluxState:
        """The state with those of these clients that have no cluster in that of the nearest descriptor."""
        clients = clients.select(state.assign_N[clients.ids_M] == UNASSIGNED)
        if state.phase == "warmup" or not len(clients):
            return state
        clients.count_download(clients.spec.sent())  # the model of the descriptors
        return placed(state, clients, clients.ids_M, self.nearest(state, clients), clients=len(clients))

    def drift(self, state: FluxState, clients: Clients) -> FluxState:
        """The state with these clients in the clusters of their present data."""
        return self.join(state.advance(assign_N=state.place(clients.ids_M, UNASSIGNED)), clients)

    def serve(self, state: FluxState, clients: Clients) -> Serving:
        if state.phase == "warmup":
            return serve_per_cluster(state, clients)
        row_M = state.assign_N[clients.ids_M].astype(np.int64)
        unknown_M = row_M == UNASSIGNED
        if unknown_M.any():
            row_M[unknown_M] = np.maximum(self.nearest(state, clients.select(unknown_M)), 0)
        return Serving(state.models_KP, row_M)


def scales(d_MF: Tensor, edges: list[int]) -> Tensor:
    """Lowest and highest value of each block, float32 (B, 2)."""
    blocks = [d_MF[:, start:stop] for start, stop in zip(edges, edges[1:], strict=False)]
    return torch.stack([torch.stack([block.min(), block.max()]) for block in blocks])


def scaled(d_MF: Tensor, edges: list[int], scale_B2: Tensor) -> Tensor:
    """The descriptors with each block scaled such that these lowest and highest values are 0 and 1."""
    parts = []
    for (low, high), start, stop in zip(scale_B2.tolist(), edges, edges[1:], strict=False):
        parts.append((d_MF[:, start:stop] - low) / (high - low if high > low else 1.0))
    return torch.cat(parts, 1)


def knee(distance_MM: np.ndarray, rule: str = "furthest") -> float:
    """The sorted distance to the nearest neighbour that is furthest below the line from the first to the last.

    The largest one if all are equal; 0 for a single client. rule: "kneedle": that of `kneedle`.
    """
    if len(distance_MM) < 2:
        return 0.0
    nearest_M = np.sort(np.where(np.eye(len(distance_MM), dtype=bool), np.inf, distance_MM).min(1))
    span = nearest_M[-1] - nearest_M[0]
    if not span > 1e-9 * nearest_M[-1]:
        return float(nearest_M[-1])
    below_M = np.linspace(0, 1, len(nearest_M)) - (nearest_M - nearest_M[0]) / span
    at = kneedle(nearest_M) if rule == "kneedle" else None
    return float(nearest_M[below_M.argmax() if at is None else at])


def kneedle(nearest_M: np.ndarray) -> int | None:
    """The place of the first knee from the end by Kneedle (V. Satopaa et al., 2011) with S = 1; None without one.

    nearest_M: sorted, not all equal. Two clients are often each other's neighbours, and if their distance is the
    largest one, the next point is at the threshold: the order of operations, that of kneed 0.9, decides.
    """
    x_M = np.flip(1 - np.arange(len(nearest_M)) / (len(nearest_M) - 1))
    y_M = (nearest_M - nearest_M[0]) / (nearest_M[-1] - nearest_M[0])
    rise_M = np.flip(y_M.max() - y_M) - x_M
    around_M, at = np.pad(rise_M, 1, mode="edge"), None
    is_maximum_M = rise_M >= np.maximum(around_M[:-2], around_M[2:])
    is_minimum_M = rise_M <= np.minimum(around_M[:-2], around_M[2:])
    for i in range(len(x_M) - 1):
        at = i if is_maximum_M[i] else at
        at = None if is_minimum_M[i] else at  # until the next maximum
        if at is not None and rise_M[i + 1] < rise_M[at] - np.diff(x_M).mean():
            return len(x_M) - 1 - at
    return None
