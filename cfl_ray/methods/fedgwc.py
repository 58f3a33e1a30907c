"""FedGWC: A. Licciardi, D. Leo, E. Fanì, B. Caputo, M. Ciccone. Interaction-Aware Gaussian Weighting for Clustered
Federated Learning. ICML 2025, arXiv:2502.03340.

    W_i <- SGD_i(w_k);  w_k <- Avg of W_i                        FedAvg in every cluster; a client also sends the losses
                                                                 l_i1 .. l_iS of its first S local steps
    r_i = mean_s exp(-(l_is - mu_s)^2 / (2 sigma_s^2))           mu_s, sigma_s^2: mean and variance of l_is over the
                                                                 cluster's participants by samples
    A_ij <- (1 - a) A_ij + a r_i / sum_l r_l                     i, j: the cluster's m participants; a = m / its size;
                                                                 at first A_ij = 1 / size^2
    v <- (1 - a) v + a mean over i, j of (change of A_ij)^2      v starts as 1
    once v < epsilon for size / m rounds:
        P_ij = exp(-gamma ||A_.i - A_.j||^2), without the entries i and j, A scaled to 0 .. 1
        spectral clustering of P in n = 2 .. min(size / m, 4) parts; the n with the least Davies-Bouldin index is taken
        if the index is below 1, else v is reset to 1
    a part splits again only if it has more clients than take part in a round

A client that has not taken part joins as a newcomer after its cluster has split.

Deviations: the cohort is drawn from the whole federation, so the number of participants of a cluster changes (official
code, davedleo/FedGWC, 24d0716: m from each cluster). The official code also clusters clients that have not taken part,
by their first A_ij, and may add losses drawn from a normal distribution if participants are few; this code does not.
With more than half of the clients in every round size / m is below 2, and no cluster splits. Clients that join later by
the schedule count in the size of the first cluster from the start.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from cfl_ray.clustering.spectral import affinities, best_parts
from cfl_ray.core.clients import ClientProgram, Clients, LocalTraining
from cfl_ray.core.method import Method, Start, option, weights_option
from cfl_ray.core.rng import Draws
from cfl_ray.core.rounds import place_in_any
from cfl_ray.core.state import UNASSIGNED, SeenState
from cfl_ray.core.weights import cluster_weights


@dataclass(frozen=True, kw_only=True)
class InteractionState(SeenState):
    """The interactions of the S clients that have taken part; interactions between clusters are not used."""

    interaction_SS: np.ndarray  # float64: A
    change_K: np.ndarray  # float64: v
    patient_K: np.ndarray  # int64: number of latest consecutive rounds with v below epsilon
    open_K: np.ndarray  # bool: whether the cluster may split

    def with_clients(self, ids: np.ndarray, first: float) -> Self:
        """This state with the new clients among `ids`, whose interactions start as `first`."""
        new = np.setdiff1d(ids, self.seen_S)
        interaction_SS = np.pad(self.interaction_SS, (0, len(new)), constant_values=first)
        return self.advance(interaction_SS=interaction_SS, seen_S=np.concatenate([self.seen_S, new]))


@dataclass(frozen=True)
class FedGWC(Method[InteractionState], name="fedgwc"):
    """Recursive spectral clustering by the typicality of the losses of each client's local steps."""

    compares = "participants"
    pair_bytes = 48  # interactions, and five arrays for their affinities

    steps_sent: int = option(
        7, "S: local steps of which a client sends the losses", source="official code", low=1, high=100_000
    )
    gamma: float = option(0.1, "gamma: width of the kernel of P", source="official code", low=0)
    epsilon: float = option(1e-5, "epsilon: v below which interactions are settled", source="official code", low=0)
    most_parts: int = option(4, "largest n, parts of a split", source="official code", low=2)
    weights: str = weights_option()

    def warning(self, clients: int, cohort: int) -> str:
        if clients // cohort >= 2:
            return ""
        return f"no cluster splits with more than half of the clients in a round: {cohort} of {clients}"

    def init(self, start: Start) -> InteractionState:
        return InteractionState(
            models_KP=start.new_model(0)[None],
            assign_N=start.one_cluster(),
            interaction_SS=np.zeros((0, 0)),
            change_K=np.ones(1),
            patient_K=np.zeros(1, np.int64),
            open_K=np.ones(1, bool),
        )

    def round(self, state: InteractionState, clients: Clients, rng: Draws) -> InteractionState:
        state = self.join(state, clients)
        cohort = len(clients)
        clients = clients.select(state.assign_N[clients.ids_M] != UNASSIGNED)
        cluster_M = state.assign_N[clients.ids_M].astype(np.int64)
        # W_i <- SGD_i(w_k);  w_k <- Avg of W_i
        weight_KM = cluster_weights(cluster_M, clients.weights(self.weights), state.num_clusters)
        how = LocalTraining(program=ClientProgram(trace=self.steps_sent))
        updates = clients.train(clients.send(state.models_KP, cluster_M), how=how, average=weight_KM)
        clients.count_upload(self.steps_sent)
        state = state.advance(models_KP=updates.averaged(default=state.models_KP))
        for k in np.unique(cluster_M[updates.valid_M & state.open_K[cluster_M]]).tolist():
            here_M = updates.valid_M & (cluster_M == k)
            reward_M = rewards(updates.step_loss_MS[here_M], clients.num_samples_M[here_M])
            state = self.interacted(state, k, clients.ids_M[here_M], reward_M)
            if state.patient_K[k] >= max(round(state.members_K[k] / here_M.sum()), 1):
                state = self.split(state, clients, k, int(here_M.sum()), cohort, rng.seed)
        return state

    def interacted(self, state: InteractionState, k: int, ids_m: np.ndarray, reward_m: np.ndarray) -> InteractionState:
        """A_ij <- (1 - a) A_ij + a r_i / sum_l r_l;  v <- (1 - a) v + a mean of (change of A_ij)^2"""
        size = int(state.members_K[k])
        state, a = state.with_clients(ids_m, 1 / size**2), len(ids_m) / size
        interaction_SS, pairs = state.interaction_SS.copy(), np.ix_(*[state.positions(ids_m)] * 2)
        before_mm = interaction_SS[pairs]
        interaction_SS[pairs] = (1 - a) * before_mm + a * (reward_m / reward_m.sum())[:, None]
        change_K, patient_K = state.change_K.copy(), state.patient_K.copy()
        change_K[k] = (1 - a) * change_K[k] + a * np.square(interaction_SS[pairs] - before_mm).mean()
        patient_K[k] = patient_K[k] + 1 if change_K[k] < self.epsilon else 0
        return state.advance(interaction_SS=interaction_SS, change_K=change_K, patient_K=patient_K)

    def split(
        self, state: InteractionState, clients: Clients, k: int, m: int, cohort: int, seed: int
    ) -> InteractionState:
        """The state with cluster k split by the best spectral clustering, or with v = 1 if no clustering qualifies."""
        member_S = state.assign_N[state.seen_S] == k
        ids, size = state.seen_S[member_S], int(state.members_K[k])
        affinity_SS = affinities(state.interaction_SS[np.ix_(member_S, member_S)], self.gamma)
        v = float(state.change_K[k])
        part_S, index = best_parts(affinity_SS, min(size // m, self.most_parts), seed)
        change_K, patient_K, open_K = state.change_K.copy(), state.patient_K.copy(), state.open_K.copy()
        change_K[k], patient_K[k] = 1, 0
        state = state.advance(change_K=change_K, patient_K=patient_K)
        if part_S is None:
            return state
        # the first part keeps the number of the cluster
        numbers = np.array([k, *range(state.num_clusters, state.num_clusters + part_S.max())])
        assign_N = state.assign_N.copy()
        assign_N[assign_N == k] = UNASSIGNED
        assign_N[ids] = numbers[part_S]
        members = np.bincount(part_S)
        open_K[k], added = members[0] > cohort, len(numbers) - 1
        because = {"davies_bouldin": index, "v": v, "epsilon": self.epsilon}
        clients.event("split", cluster=k, into=numbers, because=because)
        return state.advance(
            models_KP=torch.cat([state.models_KP, state.models_KP[k : k + 1].repeat(added, 1)]),
            assign_N=assign_N,
            change_K=np.append(state.change_K, np.ones(added)),
            patient_K=np.append(state.patient_K, np.zeros(added, np.int64)),
            open_K=np.append(open_K, members[1:] > cohort),
        )

    def join(self, state: InteractionState, clients: Clients) -> InteractionState:
        """Newcomers join the cluster with the least loss."""
        return place_in_any(state, clients)


def rewards(loss_mS: np.ndarray, num_samples_m: np.ndarray) -> np.ndarray:
    """r_i, for a client with fewer than S steps over the steps that it has."""
    has_mS = np.isfinite(loss_mS)
    loss_mS, weight_mS = np.where(has_mS, loss_mS, 0), has_mS * num_samples_m[:, None]
    share_mS = weight_mS / np.maximum(weight_mS.sum(0), 1)
    mu_S = (share_mS * loss_mS).sum(0)
    variance_S = (share_mS * (loss_mS - mu_S) ** 2).sum(0) + 1e-16
    value_mS = np.exp(-((loss_mS - mu_S) ** 2) / (2 * variance_S))
    return (value_mS * has_mS).sum(1) / has_mS.sum(1)
