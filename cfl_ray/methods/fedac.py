"""FedAC: Y. Zhang, H. Chen, Z. Lin, Z. Chen, J. Zhao. FedAC: An Adaptive Clustered Federated Learning Framework for
Heterogeneous Data. arXiv:2403.16460. The equations are reconstructed; the authors' LCFed (ICASSP 2025) confirms their
form.

    min sum_i f_i(omega_i) + (mu / 2) ||omega_i - Omega_{r(i)}||^2 + (lambda / 2) ||phi_i - Phi||^2
                                                                        phi: all but the last layer
    omega_i <- SGD on this objective from the client's own omega_i, which the client keeps
                                                                        `start: cluster`: from phi of Omega_{r(i)} and
                                                                        its own last layer; `global`: from Phi and it
    M-step: Phi <- mean of phi_i;   Omega_k <- mean of omega_i over r(i) = k
    E-step: r(i) <- argmax_k cos(z_i, z_k)                              z = M^T (omega - mean)
    PCA: M <- q leading principal components of the latest uploads      in the first round, then every 100 rounds
    CNT: rho_k = mean cosine distance of members to z_k / distance of z_k to the nearest other centre;
         split if > rho_hi, merge if < rho_lo                           the adaptation of the number of clusters

In the first round all clients train from the same w_0, and k-means of z gives the centres.

Deviations: clients start from the embedding of their cluster (paper: `start: own`). The paper's numeric settings are
not known; the defaults are ours. The server does the PCA on centred uploads, so M is never sent. CNT takes a step every
10 rounds, after round 20. A client that never took part trains from Phi and the mean head, and has its first r(i) from
the E-step of that round, so that its omega_i is in Phi but in no Omega_k. The number of clusters in the first round is
at most that of its clients. Longer uploads are projected (`sketch`).

With the paper's start, the client's own omega_i, the clusters have little effect: with a small mu clients follow their
own data, with a large mu they stay at the Omega_k of the previous round. On three rotations of Fashion-MNIST, FedAC
with mu 0.1, 0.5 or 2 is at most about a point above clients that train alone (two points, if rounds are half as long
and twice as many), and IFCA is nearly seven points above them (`jobs/experiments/fedac/start.yaml`). With the start
from the cluster's embedding, and the same mu and lambda, FedAC is four points above them, so this start is the default.

The paper states that CNT reaches the best number of clusters from both sides (4.5, 5.5, Fig. 4). The rule of rho does
not: two centres in the same group are near each other, so their rho is high and they split; a single cluster has no
other for comparison and never splits. By default (`adaptation: significance`) two clusters merge if the cosine of their
means of z, centred again, is at least `merge_cosine`. A cluster splits into parts by a test of a single cluster against
two on the directions of its members' z (`clustering/significance.py`). A step makes all merges or, without merges, all
splits. The test cannot decide merges: members of two clusters of the same group differ by more than their spread, since
each cluster's members are drawn to its Omega_k. For the same reason the number of clusters does not fall on data
without groups. `adaptation: rho` is the rule above, with at most one split or merge in a step. It splits no cluster
with fewer than 4 remembered members and merges no cluster with 4 or more members: the further clusters are apart, the
lower is rho. Neither rule splits a cluster if a part of it has no participant. After a split, the next E-step is in the
next round.

`similarity: l2` is the paper's ablation: uploads and cluster models are compared by their Euclidean distance, without
PCA.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from cfl_ray.clustering.agglomerative import nearest_centre
from cfl_ray.clustering.kmeans import kmeans
from cfl_ray.clustering.merging import cluster_means
from cfl_ray.clustering.signature_diagnostics import record_distance, record_signatures, record_similarity
from cfl_ray.clustering.signatures import SignatureState, sketch_option
from cfl_ray.clustering.significance import significant_parts
from cfl_ray.core.clients import Clients, ClientState, LocalTraining, Proximal, UpdateFeatures, Updates
from cfl_ray.core.method import Method, Start, option, weights_option
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.rounds import row_or_last, with_mean
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import UNASSIGNED
from cfl_ray.core.weights import cluster_weights

CLUSTERS = 1  # number of the average that gives the Omega_k; the average of Phi has number 0
FEW = 4  # clusters with fewer members may merge, others may split


@dataclass(frozen=True, kw_only=True)
class FedACState(SignatureState):
    """`models_KP` are the Omega_k; `signature_SF` are the clients' latest uploads, the newest last."""

    global_KP: Tensor  # Phi, in a row of a whole model (1, P)
    mean_F: Tensor  # mean of the uploads from which M was computed
    basis_FQ: Tensor | None  # M; None: whole uploads are compared

    def z(self, feature_MF: Tensor) -> Tensor:
        """Low-rank representation of uploads, (M, q); without M, the centred uploads, (M, F)."""
        centred_MF = feature_MF - self.mean_F
        return centred_MF if self.basis_FQ is None else centred_MF @ self.basis_FQ


@dataclass(frozen=True)
class FedAC(Method[FedACState], name="fedac"):
    """Personal models near their cluster's model and a global embedding; clients are clustered in a low-rank space."""

    placement = "the cluster with the highest cosine, by a local training from the global embedding and the mean head"
    without_cluster = "the global embedding with the mean head"
    phases = {"cluster": ("federate",), "federate": ()}

    # CNT
    adapt_clusters: bool = option(True, "CNT: adapt the number of clusters", source="FedAC")
    adapt_every: int = option(10, "rounds between two steps of CNT", source="ours: not known from the paper", low=1)
    adapt_after: int = option(20, "rounds before the first step of CNT", source="ours: not known from the paper", low=0)
    adaptation: str = option(
        "significance",
        "rule of CNT: a significance test of one cluster against several, or rho",
        source="ours; rho: FedAC",
        choices=("significance", "rho"),
    )
    level: float = option(
        0.05, "p-value up to which the members of a cluster split (significance)", source="ours", low=0.01, high=0.5
    )
    merge_cosine: float = option(
        0.75,
        "cosine of two clusters' means of z from which on they merge (significance)",
        source="ours",
        low=-1,
        high=1,
    )
    rho_low: float = option(
        0.2,
        "rho_lo: below this a cluster of a few clients merges into its nearest",
        source="ours: not known from the paper",
        low=0,
    )
    rho_high: float = option(
        1.0, "rho_hi: above this a cluster splits; at least 3 rho_lo", source="ours: not known from the paper", low=0
    )
    max_clusters: int = option(20, "K_max", source="ours", low=1)
    # training and E-step
    num_clusters: int = option(5, "K_0, clusters at first", source="ours: not known from the paper", low=1)
    mu: float = option(
        0.1,
        "mu: proximal term to the cluster model (grid 0.01, 0.1, 1)",
        source="ours: not known from the paper",
        low=0,
    )
    lam: float = option(
        0.1,
        "lambda: proximal term of the embedding to the global embedding (grid 0.01, 0.1, 1)",
        source="ours: not known from the paper",
        low=0,
    )
    start: str = option(
        "cluster",
        "embedding from which a client starts: its cluster's, its own, or the global embedding Phi; the last layer is "
        "its own",
        source="ours; paper: own",
        choices=("cluster", "own", "global"),
    )
    rank: int = option(20, "q: principal components", source="ours: not known from the paper", low=1)
    pca_every: int = option(100, "rounds between two PCAs", source="paper", low=1)
    similarity: str = option(
        "low_rank_cosine",
        "how uploads are compared with cluster models; l2: the Euclidean distance of whole uploads, the ablation",
        source="FedAC",
        choices=("low_rank_cosine", "l2"),
    )
    memory: int = option(100, "latest uploads that PCA and CNT see", source="ours", low=4)
    sketch: int = sketch_option()
    weights: str = weights_option("uniform")

    def __post_init__(self) -> None:
        super().__post_init__()
        least = 3 * self.rho_low
        if self.rho_high < least * (1 - 1e-9):  # in floating point, 3 * 0.2 > 0.6
            raise ValueError(f"{self.name}.rho_high must be at least 3 rho_low = {least:g}, got {self.rho_high}")
        if self.adapt_clusters and self.num_clusters > self.max_clusters:
            raise ValueError(
                f"{self.name}.num_clusters must be at most max_clusters = {self.max_clusters}, got {self.num_clusters}"
            )

    def init(self, start: Start) -> FedACState:
        first_KP, size = start.new_model(0)[None], self.update_features(start.spec).count
        return FedACState(
            models_KP=first_KP,
            assign_N=start.unassigned(),
            phase="cluster",
            global_KP=first_KP,
            mean_F=torch.zeros(size),
            basis_FQ=torch.zeros(size, 0),
            signature_SF=torch.zeros(0, size),
        )

    def round(self, state: FedACState, clients: Clients, rng: Draws) -> FedACState:
        spec, weight_M, before_K = clients.spec, clients.weights(self.weights), state.members_K
        # Local training: omega_i near Omega_r(i), and its embedding near Phi.
        context = clients.send(self.contexts(state, spec), row_or_last(state, clients))
        embedding = clients.send(state.global_KP, columns=spec.base)
        proximal = [Proximal(self.mu, context), Proximal(self.lam, embedding, spec.base)]
        updates = clients.train(
            replace(context, models_KP=self.start_models(state, spec)),
            how=LocalTraining(proximal=proximal),
            client_state=self.personal(spec),
            features=self.update_features(spec),
            average=weight_M,
            defer_aggregation=True,
        )
        if not updates.valid_M.any():
            return state
        ids_M, upload_MF = clients.ids_M[updates.valid_M], updates.valid_features_MF
        state = self.remember_uploads(state, ids_M, upload_MF, rng)
        # M-step: Phi
        state = state.advance(global_KP=updates.averaged(default=state.global_KP))
        # PCA
        had_no_clusters = state.phase == "cluster"
        if had_no_clusters or clients.round % self.pca_every == 0:
            state = self.principal_components(state)
        # First clusters: k-means of z
        if had_no_clusters:
            cluster_M, centre_KQ = kmeans(state.z(upload_MF), self.num_clusters, rng.seed, cosine=self.by_cosine)
            models_KP, assign_N = state.models_KP.repeat(len(centre_KQ), 1), state.place(ids_M, cluster_M)
            state = state.advance(models_KP=models_KP, assign_N=assign_N, phase="federate")
        # M-step: Omega_k
        weight_KM = cluster_weights(state.assign_N[clients.ids_M], weight_M, state.num_clusters)
        averages, start_KP = clients.average(updates, weight_KM, average_number=CLUSTERS), state.models_KP
        state = state.advance(models_KP=averages.averaged(default=start_KP))
        # E-step
        state = self.e_step(state, clients, ids_M, upload_MF)
        clients.member_events(before_K, state.members_K, clients=len(ids_M), num_clusters=state.num_clusters)
        if had_no_clusters or clients.round % self.pca_every == 0 or self.adapts_in(clients.round):
            record = record_similarity if self.by_cosine else record_distance
            record(clients, state.seen_S, state.z(state.signature_SF))
            record_signatures(clients, state.seen_S, state.z(state.signature_SF))
        # CNT
        return self.adapt(state, start_KP, clients, updates, rng) if self.adapts_in(clients.round) else state

    @property
    def by_cosine(self) -> bool:
        return self.similarity == "low_rank_cosine"

    def contexts(self, state: FedACState, spec: ParamSpec) -> Tensor:
        """(K + 1, P): Omega_1 .. Omega_K and, last, Phi with the mean head, for clients that never took part."""
        models_KP = with_mean(state.models_KP)
        spec.base.put(models_KP[-1:], spec.base.of(state.global_KP))
        return models_KP

    def start_models(self, state: FedACState, spec: ParamSpec) -> Tensor:
        """(K + 1, P): the contexts, with the embedding from which a client starts."""
        models_KP = self.contexts(state, spec)
        if self.start == "global":
            spec.base.put(models_KP, spec.base.of(state.global_KP))
        return models_KP

    def personal(self, spec: ParamSpec) -> ClientState:
        """The columns of omega_i from which a client continues."""
        return ClientState("personal", None if self.start == "own" else spec.head, private=False)

    def update_features(self, spec: ParamSpec) -> UpdateFeatures:
        """The features of the uploaded omega_i, by which clients are compared."""
        return UpdateFeatures(spec.trainable, sketch=self.sketch)

    def remember_uploads(self, state: FedACState, ids_M: np.ndarray, upload_MF: Tensor, rng: Draws) -> FedACState:
        """The state with these uploads as the newest, in random order, and only the newest `memory` uploads."""
        order_M = rng.stream("memory").permutation(len(ids_M))
        state = state.subset(~np.isin(state.seen_S, ids_M))
        state = state.remember(ids_M[order_M], upload_MF[torch.from_numpy(order_M)])
        return state.subset(np.arange(len(state.seen_S)) >= len(state.seen_S) - self.memory)

    def principal_components(self, state: FedACState) -> FedACState:
        """The state with M from the latest uploads, of rank q or the highest that they allow."""
        from sklearn.decomposition import PCA  # takes a second to load, and hosts do not need it

        uploads_SF = state.signature_SF
        if not self.by_cosine:
            return state.advance(mean_F=uploads_SF.mean(0), basis_FQ=None)
        rank = max(min(self.rank, len(uploads_SF) - 1, len(state.mean_F)), 1)
        with np.errstate(invalid="ignore", divide="ignore"):  # 0 / 0 in the shares of variance of a single upload
            pca = PCA(rank, svd_solver="full").fit(uploads_SF.numpy())
        basis_FQ = torch.from_numpy(pca.components_.T.copy()).float()
        return state.advance(mean_F=uploads_SF.mean(0), basis_FQ=basis_FQ)

    def centres(self, state: FedACState, clients: Clients) -> Tensor:
        """z_k (K, q) of the cluster models."""
        return state.z(self.update_features(clients.spec).of_rows(state.models_KP, clients.seed))

    def e_step(self, state: FedACState, clients: Clients, ids_M: np.ndarray, upload_MF: Tensor) -> FedACState:
        """r(i) <- argmax_k cos(z_i, z_k)"""
        metric = "cosine" if self.by_cosine else "l2"
        cluster_M, _ = nearest_centre(state.z(upload_MF), self.centres(state, clients), metric)
        return state.advance(assign_N=state.place(ids_M, cluster_M))

    def adapts_in(self, round: int) -> bool:
        """Whether CNT takes a step at the end of this round."""
        return self.adapt_clusters and round > self.adapt_after and round % self.adapt_every == 0

    def adapt(self, state: FedACState, start_KP: Tensor, clients: Clients, updates: Updates, rng: Draws) -> FedACState:
        """The state after a step of CNT. start_KP: the Omega_k before this round's M-step."""
        if self.adaptation == "rho":
            return self.adapt_by_rho(state, start_KP, clients, updates)
        z_SQ, z_MQ = self.compared(state, state.signature_SF), self.compared(state, updates.valid_features_MF)
        draw, before = rng.stream("significance"), state.num_clusters
        while pair := most_similar_pair(state.z(state.signature_SF), state.cluster_S, self.merge_cosine):
            larger, smaller = sorted(pair[:2], key=lambda k: (-state.members_K[k], k))
            clients.restart_moments(state.models_KP[larger][None])
            because = {"cosine": pair[2], "merge_cosine": self.merge_cosine}
            clients.event("merge", cluster=smaller, into=[larger - (larger > smaller)], because=because)
            state = merge_cluster(state, smaller, larger)
        if state.num_clusters < before:  # members of a merged cluster first need rounds with their common model
            return state
        for k in range(before):
            part_s, p = significant_parts(z_SQ[torch.from_numpy(state.cluster_S == k)], draw, self.level)
            if 0 < part_s.max(initial=0) <= self.max_clusters - state.num_clusters:
                because = {"p": p, "level": self.level, "clients": len(part_s)}
                state = self.split(state, start_KP[k], k, part_s, z_SQ, z_MQ, clients, updates, because)
        return state

    def split(
        self,
        state: FedACState,
        start_P: Tensor,
        k: int,
        part_s: np.ndarray,
        z_SQ: Tensor,
        z_MQ: Tensor,
        clients: Clients,
        updates: Updates,
        because: dict[str, float],
    ) -> FedACState:
        """The state with cluster k split into its parts: part 0 is cluster k, the others are new clusters.

        Their models are the means of this round's participants in them. If a part has no valid participant, the state
        is unchanged.

        start_P: Omega_k before this round's M-step, from which all parts take the step of a server optimiser.
        part_s: part of each remembered member of k. z_SQ: z of all remembered uploads. z_MQ: z of this round's valid
            participants; participants that are not remembered go to the part with the nearest mean.
        updates: result of `train(..., defer_aggregation=True)` in this round.
        because: the numbers that decided the split, for its event.
        """
        ids_M, parts = clients.ids_M[updates.valid_M], int(part_s.max()) + 1
        number_K = np.concatenate([[k], state.num_clusters + np.arange(parts - 1)])  # cluster of each part
        member_S, member_M = state.cluster_S == k, state.assign_N[ids_M] == k
        centre_KQ, _ = cluster_means(z_SQ[torch.from_numpy(member_S)], part_s, parts)
        part_m, _ = nearest_centre(z_MQ[torch.from_numpy(member_M)], centre_KQ, "l2")
        members, part = np.concatenate([ids_M[member_M], state.seen_S[member_S]]), np.concatenate([part_m, part_s])
        assign_N = state.place(members, number_K[part])
        assign_M = assign_N[clients.ids_M]
        assign_M = np.where(updates.valid_M & np.isin(assign_M, number_K), assign_M, UNASSIGNED)
        if not {*number_K.tolist()} <= {*assign_M.tolist()}:
            return state
        clients.event("split", cluster=k, into=number_K.tolist(), because=because)
        before_KP = torch.cat([state.models_KP, start_P.expand(parts - 1, -1)])
        before_KP[k] = start_P
        weight_KM = cluster_weights(assign_M, clients.weights(self.weights), len(before_KP))
        averages = clients.average(updates, weight_KM, average_number=CLUSTERS)
        return state.advance(models_KP=averages.averaged(default=before_KP), assign_N=assign_N)

    def compared(self, state: FedACState, upload_SF: Tensor) -> Tensor:
        """The vectors that CNT compares: z, or with cosines the directions of z."""
        z_SQ = state.z(upload_SF)
        return normalize(z_SQ, dim=1) if self.by_cosine else z_SQ

    def adapt_by_rho(self, state: FedACState, start_KP: Tensor, clients: Clients, updates: Updates) -> FedACState:
        """The state after a step of CNT by rho, with at most a single split or merge."""
        z_SQ = state.z(state.signature_SF)
        rho_K, nearest_K, remembered_K = compactness(z_SQ, state.cluster_S, self.centres(state, clients))
        split, merge = self.choose_adaptation(rho_K, remembered_K, state.members_K)
        if split is not None:
            unit_SQ, unit_MQ = normalize(z_SQ, dim=1), normalize(state.z(updates.valid_features_MF), dim=1)
            half_s, _ = kmeans(unit_SQ[torch.from_numpy(state.cluster_S == split)], 2, clients.seed)
            because = {"rho": rho_K[split], "rho_high": self.rho_high, "clients": len(half_s)}
            return self.split(state, start_KP[split], split, half_s, unit_SQ, unit_MQ, clients, updates, because)
        if merge is None:
            return state
        because = {"rho": rho_K[merge], "rho_low": self.rho_low, "clients": state.members_K[merge]}
        into = [nearest_K[merge] - (nearest_K[merge] > merge)]
        clients.event("merge", cluster=merge, into=into, because=because)
        clients.restart_moments(state.models_KP[nearest_K[merge]][None])
        return merge_cluster(state, merge, nearest_K[merge])

    def choose_adaptation(
        self, rho_K: np.ndarray, remembered_K: np.ndarray, members_K: np.ndarray
    ) -> tuple[int | None, int | None]:
        """(cluster to split, None), (None, cluster to merge), or (None, None).

        remembered_K: number of members whose uploads are remembered: 4 are needed for a split, 1 for a merge.
        members_K: number of all members: a cluster with 4 or more does not merge.
        """
        loose = np.flatnonzero((rho_K > self.rho_high) & (remembered_K >= FEW))
        if len(loose) and len(rho_K) < self.max_clusters:
            return int(loose[rho_K[loose].argmax()]), None
        tight = np.flatnonzero((rho_K < self.rho_low) & (remembered_K > 0) & (members_K < FEW))
        if len(tight) and np.count_nonzero(remembered_K) > 1:
            return None, int(tight[rho_K[tight].argmin()])
        return None, None

    def join(self, state: FedACState, clients: Clients) -> FedACState:
        """Newcomers train once from Phi and the mean head, and join the cluster with the highest cosine."""
        if state.phase == "cluster":
            return state
        context = clients.send(self.contexts(state, clients.spec)[-1:])
        updates = clients.train(
            context,
            how=LocalTraining(proximal=[Proximal(self.mu, context), Proximal(self.lam, context, clients.spec.base)]),
            features=self.update_features(clients.spec),
            keep_as_local_model=False,
        )
        return self.e_step(state, clients, clients.ids_M[updates.valid_M], updates.valid_features_MF)

    def serve(self, state: FedACState, clients: Clients) -> Serving:
        spec = clients.spec
        return Serving(self.start_models(state, spec), row_or_last(state, clients), client_state=self.personal(spec))


def most_similar_pair(z_SQ: Tensor, cluster_S: np.ndarray, cosine: float) -> tuple[int, int, float] | None:
    """The two clusters whose means have the highest cosine, and this cosine; None if it is below `cosine`.

    Means are centred by the mean of all rows, which removes the common movement of all clusters since the last PCA.
    Rows of cluster -1 are excluded.
    """
    member_S = cluster_S >= 0
    numbers, cluster_s = np.unique(cluster_S[member_S], return_inverse=True)
    mean_KQ, _ = cluster_means(z_SQ[torch.from_numpy(member_S)], cluster_s, len(numbers))
    unit_KQ = normalize(mean_KQ - z_SQ[torch.from_numpy(member_S)].mean(0), dim=1)
    cosine_KK = np.triu((unit_KQ @ unit_KQ.T).numpy(), 1) - 2 * np.tri(len(numbers))
    if len(numbers) < 2 or cosine_KK.max() < cosine:
        return None
    first, second = np.unravel_index(cosine_KK.argmax(), cosine_KK.shape)
    return int(numbers[first]), int(numbers[second]), float(cosine_KK[first, second])


def compactness(z_SQ: Tensor, cluster_S: np.ndarray, centre_KQ: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each cluster: rho of CNT (K,), the nearest other centre (K,), and the number of members (K,).

    A cluster without members has a rho of 0 and is not the nearest of another. If no other cluster has members, the
    distance is 1, as to an orthogonal centre, and the nearest centre is the cluster's own. Rows of cluster -1 are
    excluded.
    """
    num_clusters, member_S = len(centre_KQ), cluster_S >= 0
    unit_SQ, unit_KQ = normalize(z_SQ[torch.from_numpy(member_S)], dim=1), normalize(centre_KQ, dim=1)
    cluster_S = cluster_S[member_S]
    members_K = np.bincount(cluster_S, minlength=num_clusters)
    # distance of z_k to the nearest other centre
    apart_KK = (1 - unit_KQ @ unit_KQ.T).fill_diagonal_(torch.inf)
    apart_KK[:, torch.from_numpy(members_K == 0)] = torch.inf
    alone_K = apart_KK.isinf().all(1)
    apart_KK[alone_K, alone_K] = 1
    apart_K, nearest_K = apart_KK.amin(1).numpy(), apart_KK.argmin(1).numpy()
    # mean cosine distance of members to z_k
    distance_S = (1 - (unit_SQ * unit_KQ[cluster_S]).sum(1)).numpy()
    within_K = np.bincount(cluster_S, distance_S, minlength=num_clusters) / np.maximum(members_K, 1)
    return within_K / np.maximum(apart_K, 1e-12), nearest_K, members_K


def merge_cluster(state: FedACState, k: int, other: int) -> FedACState:
    """The state with the members of cluster k in `other`, which keeps its model. Numbers above k fall by 1."""
    assign_N = np.where(state.assign_N == k, other, state.assign_N)
    others_K = torch.arange(state.num_clusters) != k
    return state.advance(
        models_KP=state.models_KP[others_K], assign_N=np.where(assign_N > k, assign_N - 1, assign_N).astype(np.int32)
    )
