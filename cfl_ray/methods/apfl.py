"""APFL: Y. Deng, M. M. Kamani, M. Mahdavi. Adaptive Personalized Federated Learning. arXiv:2003.13461, Algorithm 1.

    w_i <- w_t;  for every batch:  vbar_i = alpha v_i + (1 - alpha) w_i
                                   v_i <- v_i - eta alpha grad f_i(vbar_i)       grad of f_i(vbar_i) with respect to v_i
                                   w_i <- w_i - eta grad f_i(w_i)                the same batch, w_i before its step
    w_{t+1} <- Avg(w_i)                                                          over the cohort

v_i stays with the client, which predicts with alpha v_i + (1 - alpha) w_t. It starts as the first global model that the
client receives; a client that never took part predicts with w_t.

Deviations: alpha is the same for all clients and fixed (the paper also adapts it). Clients are averaged by samples
(paper: uniformly). Both models take plain SGD steps, without `local.momentum`; `local.clip_norm` is for w_i alone. The
official code (FedTorch) mixes the outputs of the two models; here, as in the paper, their parameters.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from cfl_ray.core.clients import Clients, ClientState, LocalTraining
from cfl_ray.core.method import Method, Start, option, weights_option
from cfl_ray.core.rng import Draws
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import State
from cfl_ray.core.weights import global_weights


@dataclass(frozen=True)
class Interpolated:
    """The gradient of w_i. The companion v_i is stepped in place, by the gradient at the mixture of both models."""

    alpha: float
    lr: float
    weight_decay: float
    batches_per_step: int = 1

    def __call__(self, gradient: Callable[[Tensor, int], Tensor], w: Tensor, v: Tensor) -> Tensor:
        direction = gradient(w, 0)
        v.sub_(self.lr * (self.alpha * gradient(v.lerp(w, 1 - self.alpha), 0) + self.weight_decay * v))
        return direction


@dataclass(frozen=True)
class APFL(Method[State], name="apfl"):
    """Every client predicts with a mixture of the global model and a personal model."""

    alpha: float = option(
        0.5,
        "alpha: share of the client's own model; 0: the global one, 1: as local training; grid {0.25, 0.5, 0.75}",
        source="ours, the middle of the paper's grid",
        low=0,
        high=1,
    )
    weights: str = weights_option()

    @property
    def needs_sgd(self) -> str:
        return "both models take plain SGD steps"

    @property
    def personal(self) -> ClientState:
        """v_i, and its share in the model that the client predicts with."""
        return ClientState("personal", private=False, share=self.alpha)

    def init(self, start: Start) -> State:
        return start.one_model()

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        w, sgd = clients.send(state.models_KP), replace(clients.local, momentum=0.0)
        step = Interpolated(self.alpha, sgd.lr, sgd.weight_decay)
        updates = clients.train(
            w,
            client_state=self.personal,
            how=LocalTraining(sgd=sgd, local_step=step, companion=w),
            average=global_weights(clients.weights(self.weights)),
        )
        return state.advance(models_KP=updates.averaged(default=state.models_KP))

    def serve(self, state: State, clients: Clients) -> Serving:
        return Serving(state.models_KP, clients.first_row(), client_state=self.personal)
