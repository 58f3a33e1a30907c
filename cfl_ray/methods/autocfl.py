"""AutoCFL: B. Gong, T. Xing, Z. Liu, W. Xi, X. Chen. Adaptive Client Clustering for Efficient Federated Learning over
Non-IID and Imbalanced Data. IEEE Transactions on Big Data 2022, doi:10.1109/TBDATA.2022.3167994, Equations 1 to 7 and
Algorithm 1.

    first phase, all clients:  W_m <- E_m epochs of SGD_m(w);  L_m its last loss, C_m <- C_m + L_m;  w <- Avg(W_m)
    E_m <- E_m + (alpha |D_s| / |D_m|)^min(1, L_m / L_s)  if C_m > C_s         s: the client with most samples
    until Var_m(C_m) rises;  then dist(m, n) = ||h_m - h_n||_2 / |h|            h: last layer
    P_m = m and all whose distance to m is below the largest gap of row m;  rep(m) = the client of P_m with most samples
    every m votes that the members of P_m follow rep(m);  n follows the representative with most votes; if this
        representative follows another, n follows that client
    theta_k <- Avg of W_m over the cluster;  later  theta_k <- Avg of SGD_i(theta_k) over its participants

The first phase needs every client online in each round. A client that cannot be reached in the clustering round is
placed later, as a newcomer. If a client misses a round, its C_m grows by the mean loss of the others. With E_0
(`local.epochs`) = 1, rounding doubles the steps of some clients, which then form separate clusters: use 2 or more.

The printed rule for the end of the first phase has no effect: C_m adds up losses, so Var_m(C_m) rises from the first
comparison on for every alpha, and the phase ends after round `min_rounds`. In Fig. 10, however, the end depends on
alpha. We tried other readings on MNIST (20 clients of at most 600 images in the paper's groups, MLP 784-64-10, eta
0.01, E_0 1, 2, 5, alpha 0, 0.25, 0.5, 1): with L_m the loss before or after training, over the last or all local
epochs, their sum, its decrease or the ratio of the two, or relative to round 1, Var(C) rises at once in nearly every
run. With C_m / t, the mean of the losses so far (`progress: mean`), the round of the first rise depends on alpha. For
the four alphas it is (-: no rise in 7, 6 and 5 rounds for E_0 = 1, 2 and 5):

                            E_0 = 1      E_0 = 2      E_0 = 5
    IID, imbalanced         5 3 3 2      4 5 3 3      2 - - 5
    input, imbalanced       5 3 2 2      4 3 3 2      2 - - -
    label, imbalanced       2 2 2 2      2 2 2 2      - - - -

Under label skew, alpha has no effect in any reading, so the default is the printed sum. Section 5.3 calls the end an
elbow, without a definition. With normalised pixels and E_0 = 2, the rise of Var(C) from round to round grows up to
round 6 in every run, so no elbow exists. With `progress: elbow`, the first phase ends in the round in which Var(C)
grows by a smaller factor than before: in rounds 3 4 4 (IID), 3 3 3 (input) and 3 3 (label) for alpha 0, 0.5 and 1
(label: 0 and 0.5). So the end depends on alpha for IID data only.

`alpha: 0` switches the adjustment of epochs off.

Deviations: the sign in Equation 3 is changed so that it is FedAvg. The gap of a row does not count its distance to
itself. Votes of row m have the weight |D_m| (`vote: literal`: |D_n| / sum over P_m, which splits IID data). The
variance is compared from round 3 on. Fractional epochs become floor(E_m ceil(n / B) + 1/2) steps. Newcomers (none in
the paper) train from the stored w and join the nearest representative.
`clustering` selects the alternatives of Table 4 on the same matrix, with our parameters: for k-means (on the rows of
the matrix) and hierarchical clustering (average linkage), K has the largest mean silhouette, or is 1 if no mean
silhouette is above 0.25; for DBSCAN, neighbours are at most as far as the middle of a row's largest gap (the median
over rows), and a client without neighbours is a cluster. Newcomers then join the cluster with the nearest mean head.
`signature: update` compares whole updates instead of last layers: with `clustering: hac` and a first phase of
`min_rounds` = `max_rounds` rounds it is FL+HC whose clients adjust their epochs, and FL+HC itself with `alpha: 0`.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import scipy
import torch

from cfl_ray.clustering.agglomerative import by_lowest_member, cut_tree, dbscan, distances, linkage_tree
from cfl_ray.clustering.kmeans import kmeans
from cfl_ray.clustering.merging import cluster_means
from cfl_ray.clustering.signature_diagnostics import record_signatures
from cfl_ray.clustering.signatures import CentreState, place_by_training, sketch_option, unplaced, whole_update
from cfl_ray.clustering.tree_cut import best_cut
from cfl_ray.core.clients import Clients, LocalTraining, UpdateFeatures, Updates
from cfl_ray.core.method import Method, Start, option, weights_option
from cfl_ray.core.params import Columns
from cfl_ray.core.rng import Draws
from cfl_ray.core.rounds import fedavg_per_cluster, serve_per_cluster
from cfl_ray.core.serving import Serving
from cfl_ray.core.weights import cluster_weights


@dataclass(frozen=True, kw_only=True)
class AutoCFLState(CentreState):
    """The clients' progress in phase "adjust"; in phase "federate" the last layers of representatives as centres."""

    more_N: np.ndarray  # float64: E_m - E_0
    loss_N: np.ndarray  # float64: C_m, with the mean loss of the others for rounds that a client missed
    variance: float = float("nan")  # variance of C_m over the clients after the last round
    growth: float = float("nan")  # factor by which the variance grew in the last round

    def forget(self, ids: np.ndarray) -> Self:
        """This state without the assignments of clients that left, with E_m = E_0 and the others' mean C_m for them."""
        gone_N = np.isin(np.arange(len(self.loss_N)), ids)
        mean = self.loss_N[~gone_N].mean() if not gone_N.all() else 0.0
        more_N, loss_N = np.where(gone_N, 0.0, self.more_N), np.where(gone_N, mean, self.loss_N)
        return super().forget(ids).advance(more_N=more_N, loss_N=loss_N)

    def grown(self, num_clients: int) -> Self:
        """This state with newcomers, whose C_m is the mean of the others."""
        new_losses = np.full(num_clients - len(self.loss_N), self.loss_N.mean())
        return super().grown(num_clients).advance(loss_N=np.append(self.loss_N, new_losses))


@dataclass(frozen=True)
class AutoCFL(Method[AutoCFLState], name="autocfl"):
    """Epochs per client equalise training progress; then a single clustering by votes on last-layer distances."""

    compares = "reachable"
    placement = "the cluster with the nearest final layer, by a local training from the model before clustering"
    without_cluster = "the model before clustering"
    phases = {"adjust": ("federate",), "federate": ()}

    alpha: float = option(
        0.5, "alpha: how fast clients with few samples get more epochs; 0: not at all", source="paper", low=0, high=1000
    )
    clustering: str = option(
        "voting",
        "clustering of the distance matrix: by votes, or by an algorithm that Table 4 compares with votes",
        source="paper",
        choices=("voting", "kmeans", "hac", "dbscan"),
    )
    signature: str = option(
        "last_layer",
        "what is compared of a client: its last layer, or its whole update W - w, as FL+HC does",
        source="paper; update: for FL+HC with adjusted epochs",
        choices=("last_layer", "update"),
    )
    sketch: int = sketch_option()
    num_clusters: int | None = option(
        None, "K of kmeans and hac; null: K with the largest mean silhouette (in hac's tree)", source="ours", low=1
    )
    eps: float | None = option(
        None,
        "distance up to which clients are neighbours for dbscan, in units of the matrix; null: the median over rows of "
        "the middle of a row's largest gap",
        source="ours",
        low=0,
    )
    vote: str = option(
        "row",
        "weight of a vote (voting): samples of the voting row, the printed formula, or 1",
        source="ours: the printed formula splits IID data",
        choices=("row", "literal", "unweighted"),
    )
    max_rounds: int = option(
        6, "rounds of the first phase at most", source="paper, Table 3: clusters are stable in rounds 3 to 6", low=1
    )
    min_rounds: int = option(
        3, "rounds of the first phase at least", source="as max_rounds: earlier, every variance rises", low=1
    )
    progress: str = option(
        "sum",
        "what ends the first phase: a rise of the variance of C_m, or of C_m / t, the mean loss of the t rounds so "
        "far; elbow: the variance of C_m grows by a smaller factor than in the round before, so its logarithm bends",
        source="paper: C_m, which rises from the first round on, and an elbow (5.3), not defined; mean: ours",
        choices=("sum", "mean", "elbow"),
    )
    min_gap: float = option(
        0.0,
        "a single cluster if the median over rows of largest gap / median distance is less (voting; 0.15 is safe with "
        "equal sizes); 0: off",
        source="ours",
        low=0,
    )
    keep_epochs: bool = option(
        False, "clients keep their epochs E_m after clustering; false: E_0", source="ours: the paper is silent"
    )
    weights: str = weights_option()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, users in (("num_clusters", ("kmeans", "hac")), ("eps", ("dbscan",))):
            if getattr(self, name) is not None and self.clustering not in users:
                raise ValueError(
                    f"autocfl.{name} is for clustering {' and '.join(users)}, clustering is {self.clustering}; "
                    f"leave it out or choose another clustering"
                )

    def init(self, start: Start) -> AutoCFLState:
        zero_N = np.zeros(start.num_clients)
        return AutoCFLState.first(start, "adjust", models=1, more_N=zero_N, loss_N=zero_N)

    def round(self, state: AutoCFLState, clients: Clients, rng: Draws) -> AutoCFLState:
        if state.phase == "adjust":
            return self.adjust(state, clients.all_reachable(), rng)
        state = self.join(state, unplaced(state, clients))
        steps_M = self.steps(state, clients) if self.keep_epochs else None
        return fedavg_per_cluster(state, clients, self.weights, steps_M)

    def adjust(self, state: AutoCFLState, clients: Clients, rng: Draws) -> AutoCFLState:
        """The state after a round of FedAvg with each client's own epochs; after the last such round, the clusters."""
        # W_m <- E_m epochs of SGD_m(w)
        updates = clients.train(
            clients.send(state.models_KP),
            how=LocalTraining(steps_M=self.steps(state, clients)),
            features=self.features(clients),  # h_m
            average=clients.weights(self.weights),
            defer_aggregation=True,
        )
        clients.count_upload(2)  # |D_m|, L_m
        valid_M = updates.valid_M
        if not valid_M.any():
            return state
        previous = state
        state = self.count_progress(
            state, clients.round, clients.ids_M[valid_M], clients.num_samples_M[valid_M], updates.train_loss_M[valid_M]
        )
        clients.record("progress_variance", state.variance)
        elbow = self.progress == "elbow"
        ends = state.growth < previous.growth if elbow else state.variance > previous.variance
        if clients.round >= self.max_rounds or (clients.round >= self.min_rounds and ends):
            clustered = self.cluster(state, clients, updates, rng)
            values = {
                "variance_before": previous.variance,
                "variance": state.variance,
                "rounds": clients.round,
                "max_rounds": self.max_rounds,
            }
            because = {name: value for name, value in values.items() if not np.isnan(value)}
            clients.event("birth", into=range(clustered.num_clusters), because=because | {"clients": valid_M.sum()})
            return clustered
        return state.advance(models_KP=updates.averaged(default=state.models_KP))  # w <- Avg(W_m)

    def features(self, clients: Clients) -> Columns | UpdateFeatures:
        """The last layer, or the whole update."""
        return clients.spec.head if self.signature == "last_layer" else whole_update(clients.spec, self.sketch)

    def steps(self, state: AutoCFLState, clients: Clients) -> np.ndarray:
        """int64 (M,): floor(E_m ceil(n / B) + 1/2) local steps. If `local.steps` is set, E_0 follows from it."""
        local, num_samples_M = clients.local, clients.num_samples_M
        first_epochs: float | np.ndarray = local.epochs  # E_0
        if local.steps is not None:
            first_epochs = local.steps / local.batches_of(num_samples_M)
        return local.steps_of(num_samples_M, first_epochs + state.more_N[clients.ids_M])

    def count_progress(
        self, state: AutoCFLState, rounds: int, ids_M: np.ndarray, num_samples_M: np.ndarray, loss_M: np.ndarray
    ) -> AutoCFLState:
        """The state with losses L_m added to C_m, and more epochs for clients behind the largest client."""
        s = num_samples_M.argmax()
        loss_N = state.loss_N + loss_M.mean()  # for clients that missed the round; the others are set below
        loss_N[ids_M] = total_M = state.loss_N[ids_M] + loss_M  # C_m
        exponent_M = np.minimum(1, loss_M / max(loss_M[s], 1e-12))
        more_N = state.more_N.astype(np.float64)
        behind_M = (total_M > total_M[s]) & (self.alpha > 0)
        more_N[ids_M] += np.where(behind_M, (self.alpha * num_samples_M[s] / num_samples_M) ** exponent_M, 0)
        progress_M = total_M / rounds if self.progress == "mean" else total_M
        variance = float(progress_M.var())
        growth = variance / state.variance if state.variance > 0 else float("nan")
        return state.advance(loss_N=loss_N, more_N=more_N, variance=variance, growth=growth)

    def cluster(self, state: AutoCFLState, clients: Clients, updates: Updates, rng: Draws) -> AutoCFLState:
        """The state with clusters by the distances of this round's last layers, each with its members' mean model."""
        valid_M, head_MF = updates.valid_M, updates.valid_features_MF
        distance = distances(head_MF, "l2") / head_MF.shape[1]
        clients.record("distance", distance, ("clients", "clients"), ids=clients.ids_M[valid_M])
        record_signatures(clients, clients.ids_M[valid_M], head_MF)
        distance_MM = scipy.spatial.distance.squareform(distance)
        if self.clustering == "voting":
            representative_M = representatives(distance_MM, clients.num_samples_M[valid_M], self.vote, self.min_gap)
            cluster_M = by_lowest_member(representative_M)
            num_clusters = cluster_M.max() + 1
            centre_KF = torch.stack([head_MF[representative_M[cluster_M == k][0]] for k in range(num_clusters)])
        else:
            cluster_M = self.other_clusters(distance_MM, rng)
            num_clusters = cluster_M.max() + 1
            centre_KF, _ = cluster_means(head_MF, cluster_M, num_clusters)
        assign_N = state.place(clients.ids_M[valid_M], cluster_M)
        # theta_k <- Avg of W_m over the cluster
        weight_KM = cluster_weights(assign_N[clients.ids_M], clients.weights(self.weights), num_clusters)
        averages = clients.average(updates, weight_KM, average_number=0)  # replaces the average of w
        models_KP = averages.averaged(default=state.models_KP.repeat(num_clusters, 1))
        return state.clustered(clients, state.models_KP, models_KP, assign_N, centre_KF)

    def other_clusters(self, distance_MM: np.ndarray, rng: Draws) -> np.ndarray:
        """int64 (M,): clusters by k-means on the rows of the matrix, by its UPGMA tree, or by DBSCAN.

        Clusters are numbered in the order of their lowest members.
        """
        count = len(distance_MM)
        if self.clustering == "dbscan":
            return dbscan(distance_MM, row_gap(distance_MM) if self.eps is None else self.eps)
        distance = scipy.spatial.distance.squareform(distance_MM, checks=False)
        tree = linkage_tree(distance, "average")
        num_clusters = self.num_clusters or (best_cut(distance, tree) if count > 1 else 1)
        if self.clustering == "hac":
            return cut_tree(tree, num_clusters=num_clusters, size=count)
        seed = int(rng.stream("kmeans").integers(2**31))
        # scaling does not change the clusters of k-means, but makes its tolerance independent of the distances' size
        rows_MM = torch.from_numpy(distance_MM / max(distance_MM.max(), 1e-300))
        return kmeans(rows_MM, min(num_clusters, count), seed)[0]

    def join(self, state: AutoCFLState, clients: Clients) -> AutoCFLState:
        return place_by_training(state, clients, self.features(clients), "l2")

    def serve(self, state: AutoCFLState, clients: Clients) -> Serving:
        return serve_per_cluster(state, clients, state.models_KP if state.phase == "adjust" else state.start_KP)


def representatives(distance_MM: np.ndarray, num_samples_M: np.ndarray, vote: str, min_gap: float = 0.0) -> np.ndarray:
    """int64 (M,): the representative that each client follows, by the votes of all rows. Ties go to the lowest index.

    vote: weight of a row's vote, as in the option.
    min_gap: if the median over rows of largest gap / median distance is less, all clients follow client 0.
    """
    count = len(num_samples_M)
    score_MM = np.zeros((count, count))  # [n, r]: votes that client n follows r
    gap_M = np.zeros(count)  # largest gap of each row / its median distance
    for m in range(count):
        itself_last_M = distance_MM[m] + np.where(np.arange(count) == m, np.inf, 0)
        others = np.argsort(itself_last_M, kind="stable")[: count - 1]  # nearest first
        gaps = np.diff(distance_MM[m, others])
        near = others[: gaps.argmax() + 1] if gaps.any() else others  # without a gap, all are near
        if len(gaps):
            gap_M[m] = gaps.max() / max(np.median(distance_MM[m, others]), 1e-300)
        party = np.sort(np.append(near, m))  # P_m
        sizes = num_samples_M[party]
        weight = {"row": num_samples_M[m], "literal": sizes / sizes.sum(), "unweighted": 1}[vote]
        score_MM[party, party[sizes.argmax()]] += weight
    if not count or np.median(gap_M) < min_gap:
        return np.zeros(count, np.int64)
    # A representative has more samples than its followers, or as many and a lower index, so chains have no cycles.
    follows_M = score_MM.argmax(1)
    for _ in range(count.bit_length()):
        follows_M = follows_M[follows_M]  # follows chains of 2, 4, 8, .. representatives to their end
    return follows_M


def row_gap(distance_MM: np.ndarray) -> float:
    """The median over rows of the midpoint of the largest gap between a row's sorted distances to other clients.

    A row without a gap contributes its largest distance. Returns 0 for fewer than two clients.
    """
    count = len(distance_MM)
    if count < 2:
        return 0.0
    middle_M = np.zeros(count)
    for m in range(count):
        others = np.sort(np.delete(distance_MM[m], m))
        gaps = np.diff(others)
        at = int(gaps.argmax()) if gaps.any() else -1
        middle_M[m] = others[-1] if at < 0 else (others[at] + others[at + 1]) / 2
    return float(np.median(middle_M))
