"""LG-FedAvg: P. P. Liang, T. Liu, L. Ziyin, N. B. Allen, R. P. Auerbach, D. Brent, R. Salakhutdinov, L.-P. Morency. Think Locally,
Act Globally: Federated Learning with Local and Global Representations. arXiv:2001.01523, Algorithm 1.

    (l_i, g_i) <- SGD_i(l_i, g_t)              private lower and shared upper layers trained jointly
    g_{t+1} <- Avg(g_i)                        over the cohort

Departures: training starts from the common initial model (official code: from a model trained with FedAvg), and the shared layers
go to the cohort alone (official code: to all clients in every round).
"""

from dataclasses import dataclass

from cfl_ray.core.clients import Own
from cfl_ray.core.grouping import everyone
from cfl_ray.core.method import Method, option, weighting
from cfl_ray.core.serving import Serving


@dataclass(frozen=True)
class LGFedAvg(Method, name="lg_fedavg"):
    """Shared upper layers on private lower ones."""

    private_layers: int | None = option(None, "lower layers that stay with the client; 0: none, which is FedAvg; null: all but two, at least one (of a single layer nothing is shared then)", source="FedClust's comparison: 3 of LeNet-5's 5", low=0)
    weights: str = weighting()

    def init(self, start):
        return start.one_model()

    def round(self, state, clients, rng):
        sent = clients.send(state.models_KP, columns=clients.spec.top(self.shared_layers(clients)))
        updates = clients.train(sent, own=self.private(clients), mix=everyone(clients.weights(self.weights)))
        return state.advance(models_KP=updates.mixed(empty=state.models_KP))

    def shared_layers(self, clients):
        layers = len(clients.spec.layers)
        private = max(layers - 2, 1) if self.private_layers is None else self.private_layers
        return max(layers - private, 0)

    def private(self, clients):
        lower = clients.spec.bottom(self.shared_layers(clients))
        return Own("base", lower) if lower.count else None

    def serve(self, state, clients):
        return Serving(state.models_KP, clients.first(), own=self.private(clients))
