"""Ditto: T. Li, S. Hu, A. Beirami, V. Smith. Ditto: Fair and Robust Federated Learning Through Personalization. ICML 2021,
arXiv:2012.04221, Algorithm 1.

    W_i <- SGD_i(w_t);  w_{t+1} <- Avg(W_i)                                 global model, FedAvg
    v_i <- v_i - eta (grad f_i(v_i) + lambda (v_i - w_t))                    personal model, kept by the client

w_t is the downloaded model, not W_i; v_i = w_0 at first, and w_t for a newcomer. A client that never took part predicts with w.

Departures: the personal model trains for as many steps as the global one; lambda is fixed instead of chosen per client.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.clients import Own, Pull
from cfl_ray.core.grouping import everyone
from cfl_ray.core.method import Method, option, weighting
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import State

PERSONAL = Own("personal")  # v_i


@dataclass(frozen=True)
class DittoState(State):
    first_KP: Tensor = None  # w_0 (1, P), where a personal model begins
    came_N: np.ndarray = None  # bool: a newcomer, whose personal model begins at w_t


@dataclass(frozen=True)
class Ditto(Method, name="ditto"):
    """A global model, and a personal one per client that is held near it."""

    lam: float = option(0.05, "lambda: strength of the pull of a personal model to the global one", source="StoCFL's comparison; official code: 1", low=0)
    weights: str = weighting()

    State = DittoState

    def init(self, start):
        first_KP = start.new_model(0)[None]
        return DittoState(models_KP=first_KP, assign_N=start.one_cluster(), first_KP=first_KP, came_N=np.zeros(start.num_clients, bool))

    def round(self, state, clients, rng):
        sent = clients.send(state.models_KP)
        updates = clients.train(sent, mix=everyone(clients.weights(self.weights)), held=False)
        first = replace(sent, models_KP=torch.cat([state.first_KP, state.models_KP]), row_M=state.came_N[clients.ids_M].astype(np.int64))
        clients.train(first, own=PERSONAL, pulls=[Pull(self.lam, sent)])
        return state.advance(models_KP=updates.mixed(empty=state.models_KP))

    def join(self, state, clients):
        came_N = state.came_N.copy()
        came_N[clients.ids_M] = True
        return state.advance(came_N=came_N)

    def serve(self, state, clients):
        return Serving(state.models_KP, clients.first(), own=PERSONAL)
