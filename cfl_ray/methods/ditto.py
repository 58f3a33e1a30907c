"""Ditto: T. Li, S. Hu, A. Beirami, V. Smith. Ditto: Fair and Robust Federated Learning Through Personalization.
ICML 2021, arXiv:2012.04221, Algorithm 1.

    W_i <- SGD_i(w_t);  w_{t+1} <- Avg(W_i)                                 global model, FedAvg
    v_i <- v_i - eta (grad f_i(v_i) + lambda (v_i - w_t))                    personal model, kept by the client

w_t is the downloaded model, not W_i. v_i starts as w_0, a newcomer's as w_t. A client that never took part predicts
with w.

Deviations: the personal model trains for as many steps as the global model; lambda is fixed, not chosen per client.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.clients import Clients, ClientState, LocalTraining, Proximal, Sent
from cfl_ray.core.method import Method, Start, option, weights_option
from cfl_ray.core.rng import Draws
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import State

PERSONAL = ClientState("personal")  # v_i


@dataclass(frozen=True, kw_only=True)
class DittoState(State):
    """The global model w_t, and the models from which personal models start."""

    first_KP: Tensor  # w_0 (1, P): the first personal model of clients that are not newcomers
    came_N: np.ndarray  # bool (N,): newcomers, whose personal model starts as w_t


@dataclass(frozen=True)
class Ditto(Method[DittoState], name="ditto"):
    """A global model, and for each client a personal model with a proximal term to the global model."""

    lam: float = option(
        0.05,
        "lambda: weight of the proximal term of a personal model to the global one",
        source="StoCFL's comparison; official code: 1",
        low=0,
    )
    weights: str = weights_option()

    def init(self, start: Start) -> DittoState:
        first_KP = start.new_model(0)[None]
        return DittoState(
            models_KP=first_KP,
            assign_N=start.one_cluster(),
            first_KP=first_KP,
            came_N=np.zeros(start.num_clients, bool),
        )

    def round(self, state: DittoState, clients: Clients, rng: Draws) -> DittoState:
        # W_i <- SGD_i(w_t)
        downloaded = clients.send(state.models_KP)
        updates = clients.train(downloaded, average=clients.weights(self.weights), keep_as_local_model=False)
        # v_i <- v_i - eta (grad f_i(v_i) + lambda (v_i - w_t)); the client has w_0 or w_t already, so nothing is sent
        assert downloaded.row_M is not None
        row_M = np.where(state.came_N[clients.ids_M], downloaded.row_M + 1, 0)
        first = Sent(torch.cat([state.first_KP, downloaded.models_KP]), row_M)
        clients.train(first, how=LocalTraining(proximal=[Proximal(self.lam, downloaded)]), client_state=PERSONAL)
        # w_{t+1} <- Avg(W_i)
        return state.advance(models_KP=updates.averaged(default=state.models_KP))

    def join(self, state: DittoState, clients: Clients) -> DittoState:
        came_N = state.came_N.copy()
        came_N[clients.ids_M] = True
        return state.advance(came_N=came_N)

    def serve(self, state: DittoState, clients: Clients) -> Serving:
        return Serving(state.models_KP, clients.first_row(), client_state=PERSONAL)
