"""StoCFL: D. Zeng, X. Hu, S. Liu, Y. Yu, Q. Wang, Z. Xu. Stochastic Clustered Federated Learning. arXiv:2303.00897, Algorithm 1.

    Psi_i <- grad f_i(psi) / ||grad f_i(psi)||                        once per client, psi = omega_0 never trained
    merge all clusters k, l with cos(mean Psi_k, mean Psi_l) >= tau
    theta_i <- SGD on f_i + (lambda / 2) ||theta - omega_t||^2, from theta_k(i);   theta_k <- Avg over the cluster's participants
    omega_i <- SGD on f_i from omega_t;                                           omega <- Avg over all participants

Departures: averages are weighted by samples (official code: uniform; `weights`). The mean signature of a cluster covers all
its known members, and all clusters with a known member are compared (official code: this round's; `active_only`). The official
code trains omega as a chain, each client from the one before (`global_update: chain`, a relay and not federated averaging), and
takes as signature the displacement after ten epochs, not normalised (`signature: displacement`; normalised here). Signatures
are projected to `sketch` features where they are made; traffic counts the P floats of the paper. A cluster that everybody has
left keeps its model and the mean signature of its last members: an unseen client that is similar enough revives it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from cfl_ray.core.clients import Pull
from cfl_ray.core.grouping import by_cluster, everyone
from cfl_ray.core.merging import cluster_means, merge_similar, most_similar
from cfl_ray.core.method import Method, option, weighting
from cfl_ray.core.rounds import serve_per_cluster
from cfl_ray.core.signatures import SignatureState, sketching, unplaced
from cfl_ray.core.state import UNKNOWN


def anchor_gradient(client, anchor_P):
    """Psi_i: direction of the gradient at the anchor over the client's whole training data."""
    return normalize(client.gradient(anchor_P), dim=0)


@dataclass(frozen=True)
class AnchorDisplacement:
    """Psi_i of the official code: direction in which local training moves the anchor."""

    epochs: int
    batch_size: int

    def __call__(self, client, anchor_P):
        trained_P = client.train(anchor_P, epochs=self.epochs, steps=None, batch_size=self.batch_size)
        return normalize((anchor_P - trained_P)[: client.spec.trained], dim=0)


@dataclass(frozen=True)
class StoCFLState(SignatureState):
    anchor_KP: Tensor = None  # psi (1, P)
    global_KP: Tensor = None  # omega (1, P)
    empty_E: np.ndarray = None  # int64: clusters whose members have all left, kept for newcomers
    mean_EF: Tensor = None  # mean signature of the last members of each

    def mean_KF(self):
        """Mean signature of every cluster."""
        mean_KF, _ = cluster_means(self.signature_SF, self.cluster_S, self.num_clusters)
        mean_KF[self.empty_E] = self.mean_EF
        return mean_KF

    def settle(self, ids_M, feature_MF, cluster_M):
        """With these clients in these clusters, which are empty no longer."""
        stay_E = ~np.isin(self.empty_E, cluster_M)
        state = self.advance(empty_E=self.empty_E[stay_E], mean_EF=self.mean_EF[torch.from_numpy(stay_E)])
        return state.remember(ids_M, feature_MF).advance(assign_N=self.place(ids_M, cluster_M))

    def forget(self, ids):
        left = super().forget(ids)
        emptied = np.setdiff1d(self.cluster_S, left.cluster_S)
        last_S = np.isin(self.cluster_S, emptied)
        mean_EF, _ = cluster_means(self.signature_SF[torch.from_numpy(last_S)], np.searchsorted(emptied, self.cluster_S[last_S]), len(emptied))
        return left.advance(empty_E=np.concatenate([self.empty_E, emptied]), mean_EF=torch.cat([self.mean_EF, mean_EF]))


@dataclass(frozen=True)
class StoCFL(Method, name="stocfl"):
    """Clusters grow by merging similar anchor gradients; cluster models are held near a global one."""

    tau: float = option(0.5, "tau: clusters merge when the cosine of their mean signatures is at least this", source="paper; README 0.65 for CIFAR-10, 0.2 for hybrid", low=-1, high=1)
    lam: float = option(0.05, "lambda: strength of the pull of a cluster model to the global one", source="paper", low=0)
    signature: str = option("gradient", "gradient at psi, or displacement of local training from psi (under 100 samples a client)", source="paper; official code: displacement", choices=("gradient", "displacement"))
    signature_epochs: int = option(10, "local epochs of the displacement signature (obep)", source="official code", low=1)
    signature_batch: int = option(50, "batch size of the displacement signature", source="official code", low=1)
    sketch: int = sketching()
    global_update: str = option("parallel", "parallel: average of clients that start from omega; chain: each starts from the one before", source="paper; official code: chain", choices=("parallel", "chain"))
    merge_model: str = option("larger", "model of a merged cluster: that of the one with more members, or their mean weighted by members", source="official code", choices=("larger", "mean"))
    new_model: str = option("global", "first model of a cluster: the current omega, or the initial one (paper)", source="official code", choices=("global", "initial"))
    active_only: bool = option(False, "compare only clusters that have a client in this round", source="paper; official code: true")
    weights: str = weighting()

    State = StoCFLState

    def init(self, start):
        first_KP, features = start.new_model(0)[None], min(self.sketch, start.spec.trained)
        return StoCFLState(
            models_KP=first_KP[:0], assign_N=start.unassigned(), phase="cluster", anchor_KP=first_KP, global_KP=first_KP,
            empty_E=np.zeros(0, np.int64), mean_EF=torch.zeros(0, features), **StoCFLState.nobody(features),
        )  # fmt: skip

    def round(self, state, clients, rng):
        state = self.cluster(state, clients)
        clients = clients.select(state.assign_N[clients.ids_M] != UNKNOWN)  # whose signature was rejected sits this round out
        assign_M, weight_M = state.assign_N[clients.ids_M], clients.weights(self.weights)
        omega, theta = clients.send(state.global_KP), clients.send(state.models_KP, assign_M)
        updates = clients.train(theta, pulls=[Pull(self.lam, omega)], mix=by_cluster(assign_M, weight_M, state.num_clusters))
        shared = clients.train(omega, mix=everyone(weight_M), relay=self.global_update == "chain", held=False)
        return state.advance(models_KP=updates.mixed(empty=state.models_KP), global_KP=shared.mixed(empty=state.global_KP))

    def cluster(self, state, clients):
        """Clients not seen before become clusters of their own, or revive an empty one; then all that are similar enough merge, transitively."""
        ids, feature_MF = self.describe(state, unplaced(state, clients))
        empty_M, cosine_M = most_similar(feature_MF, state.mean_EF)
        alone_M = cosine_M < self.tau
        state = state.settle(ids, feature_MF, self.number(state, alone_M, np.append(state.empty_E, UNKNOWN)[empty_M]))
        active = np.setdiff1d(state.assign_N[clients.ids_M], [UNKNOWN]) if self.active_only else None
        merged = merge_similar(state.signature_SF, state.cluster_S, state.num_clusters + int(alone_M.sum()), self.tau, active)
        first_KP = state.global_KP if self.new_model == "global" else state.anchor_KP
        models_KP = merged.models(state.models_KP, first_KP[0], self.merge_model == "mean")
        assign_N = state.place(state.seen_S, merged.number_K[state.cluster_S])
        return state.advance(models_KP=models_KP, assign_N=assign_N, empty_E=merged.number_K[state.empty_E], phase="federate")

    def number(self, state, alone_M, cluster_M):
        """Clusters (M,), with new numbers for clients that found one alone."""
        return np.where(alone_M, state.num_clusters + np.cumsum(alone_M) - 1, cluster_M)

    def describe(self, state, clients):
        """Signatures of these clients, and the ids of those whose signature is sound."""
        if not len(clients):
            return clients.ids_M, state.signature_SF[:0]
        kind = anchor_gradient if self.signature == "gradient" else AnchorDisplacement(self.signature_epochs, self.signature_batch)
        feature_MF, ok_M = clients.describe(kind, clients.known(state.anchor_KP), sketch=self.sketch, floats=clients.spec.size)
        return clients.ids_M[ok_M], feature_MF[ok_M]

    def join(self, state, clients):
        """Newcomers join the most similar cluster if the cosine is at least tau; else they found one that starts from its model."""
        ids, feature_MF = self.describe(state, clients)
        best_M, cosine_M = most_similar(feature_MF, state.mean_KF())
        alone_M = cosine_M < self.tau
        models_KP = torch.cat([state.models_KP, state.global_KP])  # row -1: omega, where no cluster exists yet
        state = state.settle(ids, feature_MF, self.number(state, alone_M, best_M))
        return state.advance(models_KP=torch.cat([state.models_KP, models_KP[best_M[alone_M]]]))

    def serve(self, state, clients):
        """The model of the client's cluster; omega for a client not seen yet."""
        return serve_per_cluster(state, clients, state.global_KP)
