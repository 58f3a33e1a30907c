"""StoCFL: D. Zeng, X. Hu, S. Liu, Y. Yu, Q. Wang, Z. Xu. Stochastic Clustered Federated Learning. arXiv:2303.00897, Algorithm 1.

    Psi_i <- grad f_i(psi) / ||grad f_i(psi)||                        once per client, psi = omega_0 never trained
    merge clusters k, l while cos(mean Psi_k, mean Psi_l) >= tau
    theta_i <- SGD on f_i + (lambda / 2) ||theta - omega_t||^2, from theta_k(i);   theta_k <- Avg over the cluster's participants
    omega_i <- SGD on f_i from omega_t;                                           omega <- Avg over all participants

Departures: averages are weighted by samples (official code: uniform; `weights`). The mean signature of a cluster covers all
its known members, and all clusters with a known member are compared (official code: this round's; `active_only`). The official
code trains omega as a chain, each client from the one before (`global_update: chain`, a relay and not federated averaging), and
takes as signature the displacement after ten epochs, not normalised (`signature: displacement`; normalised here). Signatures
are projected to `sketch` features where they are made; traffic counts the P floats of the paper.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from cfl_ray.core.clients import Pull
from cfl_ray.core.grouping import by_cluster, everyone
from cfl_ray.core.merging import merge_similar, most_similar
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
        first_KP = start.new_model(0)[None]
        return StoCFLState(
            models_KP=first_KP[:0], assign_N=start.unassigned(), phase="cluster", anchor_KP=first_KP, global_KP=first_KP,
            **StoCFLState.nobody(min(self.sketch, start.spec.trained)),
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
        """Clients not seen before become clusters of their own; then all that are similar enough merge, transitively."""
        ids, features_MF = self.describe(state, unplaced(state, clients))
        state = state.remember(ids, features_MF).advance(assign_N=state.place(ids, state.num_clusters + np.arange(len(ids))))
        active = np.setdiff1d(state.assign_N[clients.ids_M], [UNKNOWN]) if self.active_only else None
        merged = merge_similar(state.signature_SF, state.cluster_S, self.tau, active)
        first_KP = state.global_KP if self.new_model == "global" else state.anchor_KP
        models_KP = merged.models(state.models_KP, first_KP[0], self.merge_model == "mean")
        return state.advance(models_KP=models_KP, assign_N=state.place(state.seen_S, merged.cluster_S), phase="federate")

    def describe(self, state, clients):
        """Signatures of these clients, and the ids of those whose signature is sound."""
        if not len(clients):
            return clients.ids_M, state.signature_SF[:0]
        kind = anchor_gradient if self.signature == "gradient" else AnchorDisplacement(self.signature_epochs, self.signature_batch)
        features_MF, ok_M = clients.describe(kind, clients.known(state.anchor_KP), sketch=self.sketch, floats=clients.spec.size)
        return clients.ids_M[ok_M], features_MF[ok_M]

    def join(self, state, clients):
        """Newcomers join the most similar cluster if the cosine is at least tau; else they found one that starts from its model."""
        ids, features_MF = self.describe(state, clients)
        best_M, cosine_M = most_similar(features_MF, state.signature_SF, state.cluster_S, state.num_clusters)
        alone_M = cosine_M < self.tau
        models_KP = torch.cat([state.models_KP, state.global_KP])  # row -1: omega, where no cluster exists yet
        cluster_M = np.where(alone_M, state.num_clusters + np.cumsum(alone_M) - 1, best_M)
        state = state.remember(ids, features_MF).advance(assign_N=state.place(ids, cluster_M))
        return state.advance(models_KP=torch.cat([state.models_KP, models_KP[best_M[alone_M]]]))

    def serve(self, state, clients):
        """The model of the client's cluster; omega for a client not seen yet."""
        return serve_per_cluster(state, clients, state.global_KP)
