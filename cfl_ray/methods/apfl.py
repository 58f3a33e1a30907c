"""APFL: Y. Deng, M. M. Kamani, M. Mahdavi. Adaptive Personalized Federated Learning. arXiv:2003.13461, Algorithm 1.

    w_i <- w_t;  for every batch:  vbar_i = alpha_i v_i + (1 - alpha_i) w_i
                                   v_i <- v_i - eta alpha_i grad f_i(vbar_i)     grad of f_i(vbar_i) with respect to v_i
                                   w_i <- w_i - eta grad f_i(w_i)                the same batch, w_i before its step
        if adaptive, in the first: alpha_i <- alpha_i - eta <v_i - w_i, grad f_i(vbar_i)>     in 0 .. 1, models before
    w_{t+1} <- Avg(w_i)                                                          over the cohort

v_i and alpha_i stay with the client, which predicts with alpha_i v_i + (1 - alpha_i) w_t. v_i starts as the first
global model that the client receives; a client that never took part predicts with w_t.

Deviations: clients are averaged by samples (paper: uniformly). Both models take plain SGD steps, without
`local.momentum`; `local.clip_norm` is for w_i alone. Running statistics of BatchNorm are those of all passes, of w_i
and of the mixture, the same in both models. The official code (MLOPTPSU/FedTorch, ab8068d) mixes the outputs of both
models (here, as in the paper, their parameters), and adds 0.02 alpha_i to the gradient of alpha_i. As in that code,
only the first step of a round adapts alpha_i: later w_i is no longer the global model that the client predicts with,
and alpha_i would fall to 0 while w_i fits the client's own data.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from cfl_ray.core.clients import (
    ClientData,
    ClientProgram,
    Clients,
    ClientState,
    Gradient,
    Held,
    LocalTraining,
)
from cfl_ray.core.method import OneModel, option, weights_option
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.state import State


@dataclass(frozen=True)
class Interpolated(ClientProgram):
    """The gradient of w_i. v_i takes its steps in place."""

    alpha: float
    lr: float
    weight_decay: float
    adaptive: ClassVar = False
    kept_model: ClassVar = "v"
    moves: ClassVar[tuple[str, ...]] = ("v",)

    def keeps(self, spec: ParamSpec) -> Mapping[str, Tensor]:
        return {"alpha": torch.tensor([self.alpha])} if self.adaptive else {}

    def step(self, gradient: Gradient, w: Tensor, held: Held, number: Any) -> Tensor:
        v, direction = held["v"], gradient(w, 0)
        alpha = held["alpha"].clone() if self.adaptive else self.alpha
        at_mixture = gradient(v.lerp(w, 1 - alpha), 0)
        if self.adaptive and number == 0:
            held["alpha"].sub_(self.lr * ((v - w) * at_mixture).sum(-1, keepdim=True)).clamp_(0, 1)
        v.sub_(self.lr * (alpha * at_mixture + self.weight_decay * v))
        return direction


class Adapted(Interpolated):
    """As `Interpolated`; alpha_i, at first `alpha`, takes its steps in place too."""

    adaptive: ClassVar = True
    moves: ClassVar = ("v", "alpha")


@dataclass(frozen=True)
class APFL(OneModel, name="apfl"):
    """Every client predicts with a mixture of the global model and a personal model."""

    needs_sgd = "both models take plain SGD steps"

    alpha: float = option(
        0.5,
        "alpha: share of the client's own model; 0: the global one, 1: as local training; grid {0.25, 0.5, 0.75}",
        source="ours, the middle of the paper's grid",
        low=0,
        high=1,
    )
    adaptive: bool = option(
        False,
        "every client adapts its own alpha, which starts as `alpha`, by the gradient of its loss",
        source="official code: fed_adaptive_alpha",
    )
    weights: str = weights_option()

    def kept(self, spec: ParamSpec) -> ClientState:
        """v_i, and its share in the model that the client predicts with."""
        return ClientState("personal", private=False, share=self.alpha, learned_share=self.adaptive)

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        w, sgd = clients.send(state.models_KP), replace(clients.local, momentum=0.0)
        program = (Adapted if self.adaptive else Interpolated)(self.alpha, sgd.lr, sgd.weight_decay)
        updates = clients.train(
            w,
            client_state=self.kept(clients.spec),
            how=LocalTraining(sgd=sgd, program=program),
            average=clients.weights(self.weights),
        )
        return state.advance(models_KP=updates.averaged(default=state.models_KP))

    def diagnose(self, state: State, clients: Clients) -> None:
        if self.adaptive:
            first = clients.known_models(state.models_KP.new_full((1, clients.spec.size + 1), self.alpha))
            alpha_MF, valid_M = clients.describe(_share, first, floats=0, client_state=self.kept(clients.spec))
            clients.record("alpha", alpha_MF[valid_M, 0], ("clients",), ids=clients.ids_M[valid_M])


def _share(client: ClientData, state: Tensor) -> Tensor:
    """alpha_i, which follows v_i in the state of a client."""
    return state[-1:]
