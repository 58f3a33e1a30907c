"""Per-FedAvg: A. Fallah, A. Mokhtari, A. Ozdaglar. Personalized Federated Learning: A Meta-Learning Approach. NeurIPS 2020,
arXiv:2002.07948, Algorithm 1; first-order and Hessian-free variants of its Section 5.

    w' = W - alpha grad f_i(W; b);   W <- W - beta grad f_i(w'; b')                          first-order (FO)
    g' = grad f_i(w'; b');   W <- W - beta [g' - alpha (grad f_i(W + delta g'; b'') - grad f_i(W - delta g'; b'')) / (2 delta)]      (HF)
    w_{t+1} <- Avg(W_i)

b, b', b'' are fresh batches; a client with too few of them splits its samples. A client predicts after one epoch of SGD(alpha)
on its training data.

Departures: beta is the learning rate of the run (FedClust: 0.001, with which a model hardly moves in 20 rounds). Plain SGD whatever
`local.momentum` says. (The code of PACFL runs both steps through one optimiser with momentum, and evaluates without adaptation.)
"""

from dataclasses import dataclass, replace

from cfl_ray.core.grouping import everyone
from cfl_ray.core.method import Method, option, weighting
from cfl_ray.core.serving import Serving


@dataclass(frozen=True)
class FirstOrder:
    """Gradient at the adapted model."""

    alpha: float
    batches: int = 2

    def __call__(self, gradient, w):
        return gradient(w - self.alpha * gradient(w, 0), 1)


@dataclass(frozen=True)
class HessianFree:
    """The same, less its change along itself by finite differences: the second-order term."""

    alpha: float
    delta: float
    batches: int = 3

    def __call__(self, gradient, w):
        g = gradient(w - self.alpha * gradient(w, 0), 1)
        curvature = (gradient(w + self.delta * g, 2) - gradient(w - self.delta * g, 2)) / (2 * self.delta)
        return g - self.alpha * curvature


@dataclass(frozen=True)
class PerFedAvg(Method, name="per_fedavg"):
    """A model that is good after one step of adaptation (MAML)."""

    order: str = option("first", "first: FO, gradients alone; second: HF, with the second-order term by finite differences", source="FedClust's comparison", choices=("first", "second"))
    alpha: float = option(1e-2, "alpha: learning rate of the adaptation", source="FedClust's comparison", low=0)
    beta: float | None = option(None, "beta: learning rate of the meta step; null: local.lr", source="the same optimiser as every method; FedClust: 1e-3", low=0)
    delta: float = option(1e-3, "delta: step of the finite differences (HF)", source="ours", low=1e-6)
    weights: str = weighting()

    def init(self, start):
        return start.one_model()

    def round(self, state, clients, rng):
        rule = FirstOrder(self.alpha) if self.order == "first" else HessianFree(self.alpha, self.delta)
        local = replace(clients.local, momentum=0.0, lr=clients.local.lr if self.beta is None else self.beta)
        updates = clients.train(clients.send(state.models_KP), rule=rule, local=local, mix=everyone(clients.weights(self.weights)))
        return state.advance(models_KP=updates.mixed(empty=state.models_KP))

    def serve(self, state, clients):
        adapt = replace(clients.local, epochs=1, steps=None, lr=self.alpha, momentum=0.0)
        return Serving(state.models_KP, clients.first(), tune=adapt)
