"""StoCFL: D. Zeng, X. Hu, S. Liu, Y. Yu, Q. Wang, Z. Xu. Stochastic Clustered Federated Learning. arXiv:2303.00897,
Algorithm 1.

    Psi_i <- grad f_i(psi) / ||grad f_i(psi)||                        once per client, psi = omega_0 never trained
    merge all clusters k, l with cos(mean Psi_k, mean Psi_l) >= tau
    theta_i <- SGD on f_i + (lambda / 2) ||theta - omega_t||^2, from theta_k(i)
    omega_i <- SGD on f_i, from omega_t
    theta_k <- Avg of theta_i over the cluster's participants;   omega <- Avg of omega_i over all participants

Deviations: averages are weighted by samples (official code: uniform; `weights`). The mean signature of a cluster covers
all its known members, and all clusters with a known member are compared (official code: this round's; `active_only`).
The official code trains omega as a chain, in which each client continues the previous client's model (`global_update:
chain`; it is not federated averaging). Its signature is the displacement after ten epochs, not normalised (`signature:
displacement`; normalised here). The first model of a cluster is the current omega, and a merged cluster keeps the model
of its part with more members, as in the official code. (In the paper the first model is omega_0, `new_model: initial`;
it does not say which model a merged cluster has; `merge_model: mean` averages them.) Hosts project signatures to
`sketch` features; traffic counts the P floats of the paper, and psi as sent to clients first seen after round 1. A
cluster that all members have left keeps its model and the mean signature of its last members; a new client that is
similar enough revives it. If more than `keep_empty` clusters are empty, a new cluster replaces the cluster that has
been empty longest.
"""

from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from cfl_ray.clustering.merging import Merged, cluster_means, means_of_emptied, merge_similar, most_similar
from cfl_ray.clustering.signature_diagnostics import cosines, record_signatures
from cfl_ray.clustering.signatures import SignatureState, sketch_option, unplaced
from cfl_ray.core.clients import ClientData, Clients, LocalTraining, Proximal
from cfl_ray.core.method import Method, Start, option, weights_option
from cfl_ray.core.rng import Draws
from cfl_ray.core.rounds import record_global_score, serve_per_cluster
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import UNASSIGNED, no_numbers
from cfl_ray.core.weights import cluster_weights


def anchor_gradient(client: ClientData, anchor_P: Tensor) -> Tensor:
    """Psi_i: the gradient at the anchor over the client's whole training data, scaled to norm 1."""
    return normalize(client.gradient(anchor_P), dim=0)


@dataclass(frozen=True)
class AnchorDisplacement:
    """Psi_i of the official code: the displacement of the anchor by local training, scaled to norm 1."""

    epochs: int
    batch_size: int
    lr: float

    def __call__(self, client: ClientData, anchor_P: Tensor) -> Tensor:
        trained_P = client.train(anchor_P, epochs=self.epochs, steps=None, batch_size=self.batch_size, lr=self.lr)
        return normalize((anchor_P - trained_P)[: client.spec.trained], dim=0)


@dataclass(frozen=True, kw_only=True)
class StoCFLState(SignatureState):
    """Signatures are the Psi_i of the clients seen."""

    anchor_KP: Tensor  # psi (1, P)
    global_KP: Tensor  # omega (1, P)
    # int64: clusters that all members have left, in the order in which they became empty
    empty_E: np.ndarray = field(default_factory=no_numbers)
    mean_EF: Tensor  # mean signature of the last members of each of these
    lr: float | None = None  # learning rate of all displacements, which the first round fixes; None: not fixed yet

    def mean_signatures(self) -> Tensor:
        """Mean signature (K, F) of every cluster."""
        mean_KF, _ = cluster_means(self.signature_SF, self.cluster_S, self.num_clusters)
        mean_KF[self.empty_E] = self.mean_EF
        return mean_KF

    def with_clusters(self, number_m: np.ndarray, models_mP: Tensor) -> Self:
        """The state with new clusters of these models, which replace empty clusters or follow the last cluster."""
        if not len(number_m):
            return self
        added = max(int(number_m.max()) + 1 - self.num_clusters, 0)
        models_KP = torch.cat([self.models_KP, self.models_KP.new_empty(added, models_mP.shape[1])])
        models_KP[torch.from_numpy(number_m)] = models_mP
        return self.advance(models_KP=models_KP)

    def add_members(self, ids_M: np.ndarray, feature_MF: Tensor, cluster_M: np.ndarray, lr: float) -> Self:
        """The state with these clients in these clusters, which become non-empty. lr: rate of their displacements."""
        still_empty_E = ~np.isin(self.empty_E, cluster_M)
        state = self.advance(
            empty_E=self.empty_E[still_empty_E],
            mean_EF=self.mean_EF[torch.from_numpy(still_empty_E)],
            lr=self.lr or (lr if len(ids_M) else None),
        )
        return state.remember(ids_M, feature_MF).advance(assign_N=self.place(ids_M, cluster_M))

    def forget(self, ids: np.ndarray) -> Self:
        stay_S = ~np.isin(self.seen_S, ids)
        emptied, mean_EF = means_of_emptied(self.signature_SF, self.cluster_S, stay_S)
        return (
            super()
            .forget(ids)
            .advance(empty_E=np.concatenate([self.empty_E, emptied]), mean_EF=torch.cat([self.mean_EF, mean_EF]))
        )


@dataclass(frozen=True)
class StoCFL(Method[StoCFLState], name="stocfl"):
    """Clusters with similar anchor gradients merge; cluster models are kept near a global model."""

    placement = "the cluster with the most similar signature if the cosine is at least tau, else a cluster of its own"
    without_cluster = "the global model"

    tau: float = option(
        0.5,
        "tau: clusters merge when the cosine of their mean signatures is at least this",
        source="paper; README 0.65 for CIFAR-10, 0.2 for hybrid",
        low=-1,
        high=1,
    )
    lam: float = option(
        0.05, "lambda: weight of the proximal term of a cluster model towards the global one", source="paper", low=0
    )
    signature: str = option(
        "gradient",
        "gradient at psi, or displacement by local training from psi (for clients with under 100 samples)",
        source="paper; official code: displacement",
        choices=("gradient", "displacement"),
    )
    signature_epochs: int = option(
        10, "local epochs of the displacement signature (obep)", source="official code", low=1, high=100_000
    )
    signature_batch: int = option(50, "batch size of the displacement signature", source="official code", low=1)
    sketch: int = sketch_option()
    global_update: str = option(
        "parallel",
        "parallel: average of clients that start from omega; chain: each continues the previous client's model",
        source="paper; official code: chain",
        choices=("parallel", "chain"),
    )
    merge_model: str = option(
        "larger",
        "model of a merged cluster: larger: the model of the cluster with more members; mean: the mean weighted by "
        "members",
        source="official code",
        choices=("larger", "mean"),
    )
    new_model: str = option(
        "global",
        "first model of a cluster: global: the current omega; initial: omega_0 (paper)",
        source="official code",
        choices=("global", "initial"),
    )
    active_only: bool = option(
        False,
        "compare only clusters that have a client in this round, by the mean signature of those clients",
        source="paper; official code: true",
    )
    keep_empty: int = option(
        16,
        "clusters that are kept after all members left, until a similar client revives them; if there are more, new "
        "clusters take the place of those that have been empty longest",
        source="ours",
        low=0,
    )
    weights: str = weights_option()

    def init(self, start: Start) -> StoCFLState:
        first_KP, features = start.new_model(0)[None], min(self.sketch, start.spec.trained)
        return StoCFLState(
            models_KP=first_KP[:0],
            assign_N=start.unassigned(),
            anchor_KP=first_KP,
            global_KP=first_KP,
            mean_EF=torch.zeros(0, features),
            signature_SF=torch.zeros(0, features),
        )

    def round(self, state: StoCFLState, clients: Clients, rng: Draws) -> StoCFLState:
        # Psi_i of clients not seen before, and merging
        state = self.cluster(state, clients)
        clients = clients.select(state.assign_N[clients.ids_M] != UNASSIGNED)  # without clients with an invalid Psi_i
        assign_M, weight_M = state.assign_N[clients.ids_M], clients.weights(self.weights)

        # theta_i <- SGD on f_i + (lambda / 2) ||theta - omega_t||^2, from theta_k(i)
        omega, theta = clients.send(state.global_KP), clients.send(state.models_KP, assign_M)
        cluster_updates = clients.train(
            theta,
            how=LocalTraining(proximal=[Proximal(self.lam, omega)]),
            average=cluster_weights(assign_M, weight_M, state.num_clusters),
        )

        # omega_i <- SGD on f_i, from omega_t
        global_updates = clients.train(
            omega,
            how=LocalTraining(chained=self.global_update == "chain"),
            average=weight_M,
            keep_as_local_model=False,
        )

        # theta_k <- Avg of theta_i over the cluster's participants; omega <- Avg of omega_i over all participants
        return state.advance(
            models_KP=cluster_updates.averaged(default=state.models_KP),
            global_KP=global_updates.averaged(default=state.global_KP),
        )

    def cluster(self, state: StoCFLState, clients: Clients) -> StoCFLState:
        """The state with the signatures of new clients, after similar clusters were merged transitively."""
        # Psi_i of clients not seen before
        ids_M, feature_MF = self.collect_signatures(state, unplaced(state, clients))

        # each of these clients revives an empty cluster that is similar enough, or becomes a new cluster
        empty_M, cosine_M = most_similar(feature_MF, state.mean_EF)  # positions in empty_E; -1: none
        alone_M = cosine_M < self.tau
        revived_M = np.append(state.empty_E, UNASSIGNED)[empty_M]
        cluster_M = self.with_new_clusters(state, revived_M, alone_M)
        founded = cluster_M[alone_M]
        first_KP = state.global_KP if self.new_model == "global" else state.anchor_KP
        state = state.with_clusters(founded, first_KP).add_members(ids_M, feature_MF, cluster_M, clients.local.lr)
        if len(ids_M):
            record_signatures(clients, state.seen_S, state.signature_SF)

        # merge all clusters k, l with cos(mean Psi_k, mean Psi_l) >= tau
        active_S = np.isin(state.seen_S, clients.ids_M) if self.active_only else None
        merged = merge_similar(state.signature_SF, state.cluster_S, state.num_clusters, self.tau, active_S, founded)
        self.report_merges(merged, founded, clients)
        if len(revived := np.unique(revived_M[~alone_M])):
            because = {"cosine": cosine_M[~alone_M].max(), "tau": self.tau}
            clients.event("birth", into=np.unique(merged.number_K[revived]), because=because)

        # theta_k of merged clusters
        models_KP = merged.models(state.models_KP, self.merge_model == "mean")
        clients.restart_moments(models_KP[merged.merged_rows(founded)])
        return state.advance(
            models_KP=models_KP,
            assign_N=state.place(state.seen_S, merged.number_K[state.cluster_S]),
            empty_E=merged.number_K[state.empty_E],
        )

    def report_merges(self, merged: Merged, founded: np.ndarray, clients: Clients) -> None:
        """Reports merges of clusters that are older than this round, and births of clusters of newcomers only."""
        born: list[int] = []
        for number, parts in enumerate(merged.parts):
            older = [old for old in parts if old not in founded]
            born += [] if older else [number]
            for old in older[1:]:  # the first cluster is kept
                because = {"cosine": merged.closest_merged(old), "tau": self.tau}
                clients.event("merge", cluster=old, into=[number], because=because)
        if born:
            founders = [old for number in born for old in merged.parts[number]]
            nearest = merged.closest_apart(founders)
            because = {"clients": len(founders), "tau": self.tau} | ({} if np.isnan(nearest) else {"cosine": nearest})
            clients.event("birth", into=born, because=because)

    def collect_signatures(self, state: StoCFLState, clients: Clients) -> tuple[np.ndarray, Tensor]:
        """The ids (M',) and signatures Psi_i (M', F) of the M' clients with a valid signature."""
        if not len(clients):
            return clients.ids_M, state.signature_SF[:0]
        if self.signature == "gradient":
            function = anchor_gradient
        else:
            function = AnchorDisplacement(self.signature_epochs, self.signature_batch, state.lr or clients.local.lr)
        # psi = omega_0, which the participants of round 1 receive as omega
        first_round = clients.round == 1
        anchor = clients.known_models(state.anchor_KP) if first_round else clients.send(state.anchor_KP)
        feature_MF, valid_M = clients.describe(function, anchor, sketch=self.sketch, floats=clients.spec.size)
        return clients.ids_M[valid_M], feature_MF[valid_M]

    def with_new_clusters(self, state: StoCFLState, cluster_M: np.ndarray, alone_M: np.ndarray) -> np.ndarray:
        """`cluster_M`, with the number of a new cluster for every client whose `alone_M` is true.

        If more than `keep_empty` clusters are empty, the first new clusters take the numbers of the longest empty.
        """
        empty = state.empty_E[~np.isin(state.empty_E, cluster_M[~alone_M])]
        free = empty[: max(len(empty) - self.keep_empty, 0)]
        number_M = cluster_M.copy()
        number_M[alone_M] = np.append(free, state.num_clusters + np.arange(alone_M.sum()))[: alone_M.sum()]
        return number_M

    def join(self, state: StoCFLState, clients: Clients) -> StoCFLState:
        """The state with newcomers in the most similar cluster, if the cosine is at least tau.

        Each other newcomer becomes a new cluster with the model of the most similar cluster.
        """
        ids_M, feature_MF = self.collect_signatures(state, clients)
        best_M, cosine_M = most_similar(feature_MF, state.mean_signatures())
        alone_M = cosine_M < self.tau
        models_KP = torch.cat([state.models_KP, state.global_KP])  # row -1: omega, if no cluster exists yet
        cluster_M = self.with_new_clusters(state, best_M, alone_M)
        before_K = state.members_K
        state = state.with_clusters(cluster_M[alone_M], models_KP[best_M[alone_M]])
        state = state.add_members(ids_M, feature_MF, cluster_M, clients.local.lr)
        clients.member_events(before_K, state.members_K, clients=len(ids_M), tau=self.tau)
        return state

    def diagnose(self, state: StoCFLState, clients: Clients) -> None:
        """Records the score of omega, the cosines of the clusters' mean signatures, and the cosines' sum (Eq. 2)."""
        record_global_score(clients, state.global_KP)
        if state.num_clusters:
            cosine_KK = cosines(state.mean_signatures())
            clients.record("cluster_similarity", cosine_KK, ("clusters", "clusters"))
            alive_KK = np.triu(np.outer(state.members_K > 0, state.members_K > 0), 1)
            clients.record("objective", cosine_KK[alive_KK].sum(dtype=np.float64))

    def serve(self, state: StoCFLState, clients: Clients) -> Serving:
        """The model of the client's cluster; omega for a client not seen yet."""
        return serve_per_cluster(state, clients, state.global_KP)
