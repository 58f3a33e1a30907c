"""FedCAC: X. Wu, X. Liu, J. Niu, G. Zhu, S. Tang. Bold but Cautious: Unlocking the Potential of Personalized Federated
Learning through Cautiously Aggressive Collaboration. ICCV 2023, arXiv:2309.11103.

    theta_i <- SGD on f_i from m_i u_i + (1 - m_i) w            critical parameters from u_i, the others from w
    m_i <- [c >= the tau n-th largest of the layer's n values c],  c = |(theta_i - its start) theta_i|
    O_ij = 1 - sum |m_i - m_j| / (2 sum m_i)                    overlap of the critical parameters
    C_i = {i} and all j with O_ij >= mean O + (t / beta) (max O - mean O)
    u_i <- mean of theta_j over C_i;   w <- Avg of theta_i

The server keeps m_i and u_i of client i's last round; a client that never took part has w alone. A client uploads its
model and a bit for each parameter, and receives w and u_i. After beta rounds the threshold is above the largest
overlap, and u_i is the client's own model; overlaps that are all equal, as in a cohort of two, are never below it.

Deviations: with a sampled cohort, which the official code (kxzxvbk/Fling, f6c6f1e) does not have, the collaborators are
within the cohort, as in PFLlib. Layers are the trained tensors (weights and biases each), as in the official code. If a
layer's tau n-th largest c is at most 1e-10, both codes take all values above 1e-20 as critical, here the tau n largest
above 0. PFLlib (d832e76) makes no u_i in the first round: critical parameters go back to those of the first model.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.clients import Clients
from cfl_ray.core.method import Method, Start, option, weights_option
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import OwnModelsState
from cfl_ray.core.weights import averages_of

_ROUNDING = 1e-12  # an overlap that is the threshold but for rounding is not below it
_CLIENTS = 8  # whose masks are made together: a row of temporary values for each


@dataclass(frozen=True, kw_only=True)
class CriticalState(OwnModelsState):
    """The customised models u_i as the clients' models, with the masks of their critical parameters."""

    of_each_client = "a model and a mask"

    mask_SP: Tensor  # bool: m_i

    @property
    def starts(self) -> Tensor:
        """w, and m_i u_i + (1 - m_i) w of the clients, (1 + S, P)."""
        starts_KP = self.all_models
        torch.where(self.mask_SP, self.own_SP, self.models_KP, out=starts_KP[1:])
        return starts_KP


@dataclass(frozen=True)
class FedCAC(Method[CriticalState], name="fedcac"):
    """Critical parameters are averaged over clients with similar critical parameters, the others over all clients."""

    compares = "cohort"
    only_mean = "every client has collaborators of its own, over whom the server averages"

    tau: float = option(0.5, "tau: share of critical parameters in a layer", source="paper", low=0, high=1)
    beta: int = option(100, "beta: rounds until clients no longer collaborate on them", source="paper", low=1)
    weights: str = weights_option()

    def init(self, start: Start) -> CriticalState:
        first_KP = start.new_model(0)[None]
        return CriticalState(
            models_KP=first_KP,
            assign_N=start.one_cluster(),
            own_SP=first_KP[:0],
            mask_SP=first_KP[:0].bool(),
        )

    def round(self, state: CriticalState, clients: Clients, rng: Draws) -> CriticalState:
        # theta_i <- SGD on f_i from m_i u_i + (1 - m_i) w
        row_M, spec = state.rows_of(clients.ids_M), clients.spec
        start = clients.send(state.starts, row_M)
        clients.select(row_M > 0).send(state.models_KP)  # w and u_i are two models
        updates = clients.train(start, average=clients.weights(self.weights), features=spec.all)
        clients.count_upload(-(-spec.trained // 32))  # m_i
        valid_M = updates.valid_M
        if not valid_M.any():
            return state
        # m_i <- [c >= the tau n-th largest of the layer's n values c]
        theta_MP = updates.valid_features_MF
        mask_MP = critical(theta_MP, start.models_KP, row_M[valid_M], spec, self.tau)
        # O_ij = 1 - sum |m_i - m_j| / (2 sum m_i);   C_i
        together_MM = collaborators(overlaps(mask_MP), clients.round / self.beta)
        clients.record("collaborators", float(together_MM.sum(1).mean()))
        # u_i <- mean of theta_j over C_i;   w <- Avg of theta_i
        own_MP = averages_of(together_MM / together_MM.sum(1, keepdims=True), theta_MP)
        state = state.with_values(clients.ids_M[valid_M], mask_SP=mask_MP, own_SP=own_MP)
        return state.advance(models_KP=updates.averaged(default=state.models_KP))

    def serve(self, state: CriticalState, clients: Clients) -> Serving:
        return Serving(state.starts, state.rows_of(clients.ids_M))


def critical(theta_MP: Tensor, start_KP: Tensor, row_M: np.ndarray, spec: ParamSpec, tau: float) -> Tensor:
    """m_i, bool (M, P), of clients that started from the rows `row_M`.

    Values of c that are 0 are not critical, so a layer may have fewer than tau n.
    """
    mask_MP = torch.zeros_like(theta_MP, dtype=torch.bool)
    stops = spec.ends[: spec.num_params]
    for at in range(0, len(theta_MP), _CLIENTS):
        some = slice(at, at + _CLIENTS)
        for start, stop in zip((0, *stops), stops, strict=False):
            if count := int(tau * (stop - start)):
                layer_mn = theta_MP[some, start:stop]
                layer_mn = ((layer_mn - start_KP[row_M[some], start:stop]) * layer_mn).abs()
                least_m1 = layer_mn.topk(count, dim=1).values[:, -1:]
                mask_MP[some, start:stop] = (layer_mn >= least_m1) & (layer_mn > 0)
    return mask_MP


def overlaps(mask_MP: Tensor) -> np.ndarray:
    """O_ij, float64 (M, M); 1 if client i has no critical parameter."""
    both_MM = sum(part.double() @ part.double().T for part in mask_MP.split(4096, dim=1)).numpy()
    count_M = both_MM.diagonal()
    differ_MM = count_M[:, None] + count_M - 2 * both_MM
    return 1 - differ_MM / np.maximum(2 * count_M, 1)[:, None]


def collaborators(overlap_MM: np.ndarray, progress: float) -> np.ndarray:
    """C_i as bool (M, M): client i, and clients with an overlap of at least mean O + progress (max O - mean O)."""
    own_MM = np.eye(len(overlap_MM), dtype=bool)
    others = overlap_MM[~own_MM]
    if not len(others):
        return own_MM
    threshold = others.mean() + progress * (others.max() - others.mean())
    return own_MM | (overlap_MM >= threshold - _ROUNDING)
