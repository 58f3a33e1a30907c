"""pFedMe: C. T. Dinh, N. H. Tran, T. D. Nguyen. Personalized Federated Learning with Moreau Envelopes. NeurIPS 2020,
arXiv:2006.08848, Algorithm 1.

    w_i <- w_t;  R times, on a new batch:  theta_i <- w_i, then K steps on this batch
                                               theta_i <- theta_i - eta_p (grad f_i(theta_i) + lambda (theta_i - w_i)
                                                                           + mu theta_i)
                                           w_i <- w_i - eta lambda (w_i - theta_i)
    w_{t+1} <- (1 - beta) w_t + beta mean_i w_i                               BatchNorm statistics: mean_i w_i

A client keeps theta_i, its personal model, and predicts with it. A client that never took part predicts with w.

The official code reports the accuracy of w_i as that of the personal model: the tensors that its optimiser returns are
those of the model, which is then overwritten by w_i. `predict: w` does the same; it does not change training, so two
entries of `methods` give both. `global_score` in the diagnostics is the score of w.

Deviations: R is the experiment's number of local steps. If `eta` is not set, it is at most 1 / lambda, since a larger
step overshoots theta_i. mu is from the official code (CharlieDinh/pFedMe, caf24b1). That code continues from the last
theta_i at a new batch, averages w_i by samples (`weights: samples`), trains all clients in every round, not the cohort
alone, and does not shuffle batches.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from cfl_ray.core.clients import ClientProgram, Clients, ClientState, Gradient, Held, LocalTraining
from cfl_ray.core.method import OneModel, option, weights_option
from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.rounds import record_global_score
from cfl_ray.core.state import State

THETA = ClientState("personal", private=False)  # theta_i
W = ClientState("personal", private=False, resumed=Columns(()))  # w_i, which begins every round as w_t


@dataclass(frozen=True)
class MoreauStep(ClientProgram):
    """The gradient lambda (w - theta) of the Moreau envelope at w."""

    lam: float
    steps: int  # K
    eta_p: float
    mu: float
    only_tensors: ClassVar = True

    def step(self, gradient: Gradient, w: Tensor, held: Held, number: Any) -> Tensor:
        theta = w.clone()
        for _ in range(self.steps):
            theta -= self.eta_p * (gradient(theta, 0) + self.lam * (theta - w) + self.mu * theta)
        if "theta" in self.moves:
            held["theta"].copy_(theta)
        return self.lam * (w - theta)


class KeptTheta(MoreauStep):
    """As `MoreauStep`; the client keeps the last theta_i."""

    kept_model: ClassVar = "theta"
    moves: ClassVar = ("theta",)


@dataclass(frozen=True)
class PFedMe(OneModel, name="pfedme"):
    """Personal models that minimise the local loss near a global model, which follows them."""

    needs_sgd = "theta_i and w_i take plain SGD steps"

    lam: float = option(15.0, "lambda: proximal term of theta_i to w_i", source="paper", low=1e-6)
    inner_steps: int = option(5, "K: steps of theta_i on a batch", source="paper", low=1)
    personal_lr: float = option(0.1, "eta_p: learning rate of theta_i", source="paper, MNIST with MCLR", low=0)
    eta: float | None = option(
        None,
        "eta: learning rate of w_i (MNIST: 0.005); null: local.lr, at most 1 / lambda",
        source="the same as every method",
        low=0,
    )
    mu: float = option(0.001, "mu: L2 penalty of theta_i", source="official code", low=0)
    beta: float = option(1.0, "beta: how far w moves to the mean of w_i (also 2)", source="paper", low=0)
    predict: str = option(
        "theta",
        "the model that a client predicts with: theta (theta_i), or w (w_i after its last training)",
        source="paper; official code: w",
        choices=("theta", "w"),
    )
    weights: str = weights_option("uniform")

    @property
    def needs_mean(self) -> str:
        return "beta other than 1 mixes the mean with the model before" if self.beta != 1 else ""

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        w = clients.send(state.models_KP)
        eta = min(clients.local.lr, 1 / self.lam) if self.eta is None else self.eta
        kind = KeptTheta if self.predict == "theta" else MoreauStep
        program = kind(self.lam, self.inner_steps, self.personal_lr, self.mu)
        updates = clients.train(
            w,
            client_state=self.kept(clients.spec),
            how=LocalTraining(
                sgd=replace(clients.local, lr=eta, momentum=0.0, weight_decay=0.0),
                program=program,
            ),
            average=clients.weights(self.weights),
        )
        models_KP = updates.averaged(default=state.models_KP)
        if self.beta != 1:  # a variance beyond the mean could be negative
            trained, mean_KP = clients.spec.trainable, models_KP
            models_KP = mean_KP.clone()
            trained.put(models_KP, torch.lerp(trained.of(state.models_KP), trained.of(mean_KP), self.beta))
        return state.advance(models_KP=models_KP)

    def kept(self, spec: ParamSpec) -> ClientState:
        return THETA if self.predict == "theta" else W

    def diagnose(self, state: State, clients: Clients) -> None:
        record_global_score(clients, state.models_KP)
