"""FedAMP: Y. Huang, L. Chu, Z. Zhou, L. Wang, J. Liu, J. Pei, Y. Zhang. Personalized Cross-Silo Federated Learning on
Non-IID Data. AAAI 2021, arXiv:2007.03797, Algorithm 1; with HeurFedAMP (`similarity: cosine`).

    xi_ij <- alpha A'(||w_i - w_j||^2),   A(x) = 1 - exp(-x / sigma)          for all other clients j
    u_i <- (1 - sum_j xi_ij) w_i + sum_j xi_ij w_j                            a model of each client, by the server
    w_i <- SGD on f_i(w) + lambda / (2 alpha) ||w - u_i||^2, from w_i
    HeurFedAMP:  xi_ij <- (1 - xi_ii) softmax over j of sigma cos(w_i, w_j),   xi_ii fixed

The server keeps the model w_i of each client that has taken part, and compares the clients of a round with all of them.
Clients predict with w_i. A client without a model, such as a newcomer, predicts with and starts from the mean of all
w_j. With lambda = 0 and all clients in every round this is local training.

Deviations: there is no official code. Weights xi_ij that add up to more than 1 are divided by their sum, since w_i
would have a negative weight. In PFLlib (d832e76) the term of the clients has had no gradient since March 2023, as it is
computed from detached values of the model, so its FedAMP is local training; alpha, sigma and lambda are its defaults.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy
import torch
from torch import Tensor

from cfl_ray.core.clients import Clients, LocalTraining, Proximal, Sent
from cfl_ray.core.method import Method, Start, option
from cfl_ray.core.rng import Draws
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import OwnModelsState
from cfl_ray.core.weights import averages_of

_BLOCK = 4096  # columns that are converted to float64 together


@dataclass(frozen=True)
class FedAMP(Method[OwnModelsState], name="fedamp"):
    """For each client a model that is attracted by the models of similar clients."""

    only_synchronous = "its clients are attracted by models of their own, which are averages over all others"
    compares = "participants"
    only_mean = "every client has weights of its own, by which the server averages"

    lam: float = option(1.0, "lambda: weight of the distance to u_i; 0: local training", source="PFLlib", low=0)
    alpha: float = option(1.0, "alpha: step of the server, which scales the weights xi_ij", source="PFLlib", low=1e-9)
    sigma: float = option(
        1.0, "sigma: squared distance, or inverse of the cosine, at which weights fall", source="PFLlib", low=1e-9
    )
    similarity: str = option(
        "distance",
        "how models are compared: squared distance, or cosine (HeurFedAMP)",
        source="paper: both",
        choices=("distance", "cosine"),
    )
    self_weight: float = option(
        0.5, "xi_ii of HeurFedAMP: weight of the client's own model", source="ours", low=0, high=1
    )

    def init(self, start: Start) -> OwnModelsState:
        first_KP = start.new_model(0)[None]
        return OwnModelsState(models_KP=first_KP, assign_N=start.one_cluster(), own_SP=first_KP[:0])

    def round(self, state: OwnModelsState, clients: Clients, rng: Draws) -> OwnModelsState:
        if clients.protection.noise is not None:  # its bounds are of changes
            clients.require_readable("the models")
        row_M, models_XP = state.rows_of(clients.ids_M), state.all_models
        # u_i <- (1 - sum_j xi_ij) w_i + sum_j xi_ij w_j
        weight_MX = self.attractions(models_XP, row_M)
        weight_MX[np.arange(len(clients)), row_M] = 1 - weight_MX.sum(1)
        clients.record("self_weight", float(weight_MX[np.arange(len(clients)), row_M].mean()))
        u = clients.send(averages_of(weight_MX, models_XP), np.arange(len(clients)))
        if len(state.own_SP):  # clients that come later do not have the mean, from which they start
            clients.select(row_M == 0).send(state.models_KP)
        # w_i <- SGD on f_i(w) + lambda / (2 alpha) ||w - u_i||^2
        how = LocalTraining(proximal=[Proximal(self.lam / self.alpha, u)])
        updates = clients.train(Sent(models_XP, row_M), how=how, features=clients.spec.all)
        if not updates.valid_M.any():
            return state
        state = state.with_values(clients.ids_M[updates.valid_M], own_SP=updates.valid_features_MF)
        return state.advance(models_KP=state.own_SP.mean(0, keepdim=True))

    def attractions(self, models_XP: Tensor, row_M: np.ndarray) -> np.ndarray:
        """xi_ij, float64 (M, 1 + S), of clients whose models are the rows `row_M`; 0 for j = i and for row 0, the mean.

        The sum of a row is at most 1.
        """
        xi_MX = np.zeros((len(row_M), len(models_XP)))
        if len(models_XP) == 1 or not len(row_M):
            return xi_MX
        w_MP, other_MX = models_XP[row_M], np.arange(len(models_XP)) != row_M[:, None]
        other_MX[:, 0] = False
        if self.similarity == "cosine":
            cosine_MS = np.where(other_MX[:, 1:], cosines(w_MP, models_XP[1:]), -np.inf)
            largest_M1 = cosine_MS.max(1, keepdims=True, initial=-1)  # taken out, since sigma may be large
            xi_MX[:, 1:] = np.exp(self.sigma * (cosine_MS - largest_M1))
            sum_M1 = xi_MX.sum(1, keepdims=True)
            return (1 - self.self_weight) * xi_MX / np.where(sum_M1 > 0, sum_M1, 1)
        xi_MX[:, 1:] = self.alpha / self.sigma * np.exp(-squares(w_MP, models_XP[1:]) / self.sigma)
        xi_MX *= other_MX
        return xi_MX / np.maximum(xi_MX.sum(1, keepdims=True), 1)

    def serve(self, state: OwnModelsState, clients: Clients) -> Serving:
        return Serving(state.all_models, state.rows_of(clients.ids_M))


def squares(w_MP: Tensor, other_SP: Tensor) -> np.ndarray:
    """Squared distances, float64 (M, S), of blocks of columns, which need little memory."""
    return _over_blocks(
        lambda w_mb, other_sb: scipy.spatial.distance.cdist(w_mb, other_sb, "sqeuclidean"), w_MP, other_SP
    )


def cosines(w_MP: Tensor, other_SP: Tensor) -> np.ndarray:
    """Cosines, float64 (M, S); 0 with a model of zeros."""
    inner_MS = _over_blocks(lambda w_mb, other_sb: w_mb @ other_sb.T, w_MP, other_SP)
    norm_M, norm_S = (torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).numpy() for rows in (w_MP, other_SP))
    return inner_MS / np.maximum(np.outer(norm_M, norm_S), 1e-300)


def _over_blocks(function: Callable[..., np.ndarray], w_MP: Tensor, other_SP: Tensor) -> np.ndarray:
    """The sum of a function over blocks of columns in float64, (M, S)."""
    total_MS = np.zeros((len(w_MP), len(other_SP)))
    for w_MB, other_SB in zip(w_MP.split(_BLOCK, 1), other_SP.split(_BLOCK, 1), strict=True):
        total_MS += function(w_MB.double().numpy(), other_SB.double().numpy())
    return total_MS
