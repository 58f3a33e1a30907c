"""Per-FedAvg: A. Fallah, A. Mokhtari, A. Ozdaglar. Personalized Federated Learning: A Meta-Learning Approach. NeurIPS
2020, arXiv:2002.07948, Algorithm 1; first-order and Hessian-free variants of its Section 5.

    w' = W - alpha grad f_i(W; b);   g' = grad f_i(w'; b')                                             every local step
    W <- W - beta g'                                                                                   first-order (FO)
    W <- W - beta [g' - alpha (grad f_i(W + delta g'; b'') - grad f_i(W - delta g'; b'')) / (2 delta)] Hessian-free (HF)
    w_{t+1} <- Avg(W_i)

b, b', b'' are new batches; a client with too few batches splits its samples. A client predicts after an epoch of
SGD(alpha) on its training data.

Deviations: beta is the learning rate of the run (FedClust: 0.001, with which a model hardly changes in 20 rounds). SGD
is without momentum; `local.momentum` is ignored. (PACFL's code uses the same optimiser with momentum for both steps,
and evaluates without adaptation.)
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from cfl_ray.core.clients import ClientProgram, Clients, Gradient, Held, LocalTraining
from cfl_ray.core.method import OneModel, option, weights_option
from cfl_ray.core.rng import Draws
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import State


@dataclass(frozen=True)
class FirstOrder(ClientProgram):
    """FO: the gradient at the adapted model."""

    alpha: float
    batches_per_step: ClassVar = 2
    only_tensors: ClassVar = True

    def step(self, gradient: Gradient, w: Tensor, held: Held, number: Any) -> Tensor:
        return gradient(w - self.alpha * gradient(w, 0), 1)


@dataclass(frozen=True)
class HessianFree(ClientProgram):
    """HF: FO's gradient g' minus alpha times the Hessian-vector product with g', by finite differences."""

    alpha: float
    delta: float
    batches_per_step: ClassVar = 3
    only_tensors: ClassVar = True

    def step(self, gradient: Gradient, w: Tensor, held: Held, number: Any) -> Tensor:
        g = gradient(w - self.alpha * gradient(w, 0), 1)
        curvature = (gradient(w + self.delta * g, 2) - gradient(w - self.delta * g, 2)) / (2 * self.delta)
        return g - self.alpha * curvature


@dataclass(frozen=True)
class PerFedAvg(OneModel, name="per_fedavg"):
    """A model that is good after a step of adaptation (MAML)."""

    needs_sgd = "the adaptation and the meta step are plain SGD"

    order: str = option(
        "first",
        "first: FO, only gradients; second: HF, with the second-order term by finite differences",
        source="FedClust's comparison",
        choices=("first", "second"),
    )
    alpha: float = option(1e-2, "alpha: learning rate of the adaptation", source="FedClust's comparison", low=0)
    beta: float | None = option(
        None,
        "beta: learning rate of the meta step; null: local.lr",
        source="the same optimiser as every method; FedClust: 1e-3",
        low=0,
    )
    delta: float = option(1e-3, "delta: step of the finite differences (HF)", source="ours", low=1e-6)
    weights: str = weights_option()

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        program = FirstOrder(self.alpha) if self.order == "first" else HessianFree(self.alpha, self.delta)
        sgd = replace(clients.local, momentum=0.0, lr=clients.local.lr if self.beta is None else self.beta)
        updates = clients.train(
            clients.send(state.models_KP),
            how=LocalTraining(program=program, sgd=sgd),
            average=clients.weights(self.weights),
        )
        return state.advance(models_KP=updates.averaged(default=state.models_KP))

    def serve(self, state: State, clients: Clients) -> Serving:
        adapt = replace(clients.local, epochs=1, steps=None, lr=self.alpha, momentum=0.0)
        return Serving(state.models_KP, clients.first_row(), tune=adapt)
