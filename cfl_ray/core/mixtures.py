"""Programs of clients that mix the cluster models, methods whose clients predict with mixtures, and their states."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.clients import ClientProgram, Clients, Held, LocalTraining, ProgramClient, Sent
from cfl_ray.core.diagnostics import CLIENTS, CLUSTERS, MIXTURE_WEIGHTS
from cfl_ray.core.method import Method, Start
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import State
from cfl_ray.system.mapped import mapped_array

_IN_MEMORY = 1 << 20  # bytes of mixture weights; more are in a temporary file


@dataclass(frozen=True)
class Mixture(ClientProgram, ABC):
    """E and M steps of a client that mixes K models with weights pi_i, which are in `held["mixture"]` (K,).

    E step: the responsibilities of the models for each sample weigh the samples in the loss of each model.
    M step: the client's mixture weights become the means of the responsibilities over its samples.
    """

    @abstractmethod
    def responsibilities(self, loss_nK: Tensor, y_n: Tensor, held: Held) -> Tensor:
        """How much each sample counts for each model, (n, K). loss_nK: as in `weigh`. y_n: targets."""

    def weigh(self, client: ProgramClient, loss_nK: Tensor, held: Held) -> Tensor:
        responsibility_nK = self.responsibilities(loss_nK, client.y.cpu(), held)
        if isinstance(responsibility_nK, Tensor):
            held["mixture"] = responsibility_nK.float().double().mean(0).float()
        return responsibility_nK


@dataclass(frozen=True, kw_only=True)
class MixtureState(State):
    """Cluster models, and the weights with which each client mixes them.

    The weights stay on the clients: neither sent nor uploaded. `assign_N` is the model with the largest weight.
    """

    weight_NK: np.ndarray  # float32 (N, K), pi_i; 0 for a client that has none yet

    @classmethod
    def first(cls, start: Start, num_models: int, **more: Any) -> Self:
        """K independently initialised models; no client has weights."""
        models_KP = torch.stack([start.new_model(k) for k in range(num_models)])
        weight_NK = np.zeros((start.num_clients, num_models), np.float32)
        return cls(models_KP=models_KP, assign_N=start.unassigned(), weight_NK=weight_NK, **more)

    def weights_of(self, ids_M: np.ndarray) -> np.ndarray:
        """Mixture weights, float64 (M, K); equal weights for a client that has none yet."""
        weight_MK = self.weight_NK[ids_M].astype(np.float64)
        weight_MK[~weight_MK.any(1)] = 1
        weight_MK /= weight_MK.sum(1, keepdims=True)
        return weight_MK

    def with_weights(self, clients: Clients, weight_MK: np.ndarray, **changes: Any) -> Self:
        """The next state, with these mixture weights; clients with NaN keep theirs. Reports them as diagnostics."""
        known_M = np.isfinite(weight_MK).all(1)
        ids_m, weight_mK = clients.ids_M[known_M], weight_MK[known_M]
        assign_N = self.place(ids_m, weight_mK.argmax(1))
        after = self.advance(weight_NK=self.replaced(ids_m, weight_mK), assign_N=assign_N, **changes)
        if len(ids_m):
            clients.record("mixture_entropy", float(entropy(weight_mK).mean()))
            clients.record(MIXTURE_WEIGHTS, weight_mK, (CLIENTS, CLUSTERS), ids=ids_m)
            clients.member_events(self.members_K, after.members_K, clients=len(ids_m))
        return after

    def forget(self, ids: np.ndarray) -> Self:
        return super().forget(ids).advance(weight_NK=self.replaced(ids, 0))

    def replaced(self, ids_m: np.ndarray, weight_mK: np.ndarray | int) -> np.ndarray:
        """A copy of `weight_NK` with these weights of the clients `ids_m`; of many clients, in a temporary file."""
        weight_NK = mapped_array(self.weight_NK.shape, np.float32, _IN_MEMORY)
        weight_NK[:] = self.weight_NK
        weight_NK[ids_m] = weight_mK
        return weight_NK


S = TypeVar("S", bound=MixtureState)


class MixtureMethod(Method[S]):
    """A method whose clients mix its models, with weights by E and M steps.

    A client that has not trained yet, such as a newcomer, gets its weights by `fit_steps` steps from equal weights.
    """

    placement = "a mixture of all models, with weights by E and M steps on its training samples"
    fit_steps: int

    @abstractmethod
    def how(self, state: S, weight_MK: np.ndarray) -> LocalTraining:
        """The training of clients with these weights: their `Mixture`, and what it is given."""

    def broadcast(self, state: S, clients: Clients) -> Sent:
        """Sends every client the models, and other values that its `Mixture` is given."""
        return clients.broadcast(state.models_KP)

    def join(self, state: S, clients: Clients) -> S:
        return state.with_weights(clients, self.fit(state, self.broadcast(state, clients), clients))

    def serve(self, state: S, clients: Clients) -> Serving:
        weight_MK = state.weights_of(clients.ids_M)
        new_M = state.weight_NK[clients.ids_M].sum(1) == 0
        if new_M.any():
            new = clients.select(new_M)
            weight_mK = self.fit(state, new.known_models(state.models_KP), new)
            weight_MK[new_M] = np.where(np.isfinite(weight_mK), weight_mK, 1 / state.num_clusters)
        return Serving(state.models_KP, weight_MK.argmax(1), weight_MK=weight_MK)

    def fit(self, state: S, received: Sent, clients: Clients) -> np.ndarray:
        """Weights (M, K) by E and M steps from equal weights; NaN for clients without valid data."""
        equal_MK = np.full((len(clients), state.num_clusters), 1 / state.num_clusters)
        return clients.fit_mixture(received, self.how(state, equal_MK), steps=self.fit_steps)


def entropy(weight_MK: np.ndarray) -> np.ndarray:
    """Entropy of each client's mixture weights in nats, float64 (M,): 0 for a single model, log K for equal weights."""
    return -(weight_MK * np.log(np.maximum(weight_MK, 1e-300))).sum(1)
