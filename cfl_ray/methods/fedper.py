"""FedPer: M. G. Arivazhagan, V. Aggarwal, A. K. Singh, S. Choudhary. Federated Learning with Personalization Layers.
arXiv:1912.00818, Algorithms 1 and 2.

    (phi_i, h_i) <- SGD_i(phi_t, h_i)          base and private head trained jointly; h_i of the common start at first
    phi_{t+1} <- Avg(phi_i)                    over the cohort; the heads never leave the clients

A client that never took part predicts with phi and the untrained head: nearly by chance.

Departures: none.
"""

from dataclasses import dataclass

from cfl_ray.core.clients import Own
from cfl_ray.core.grouping import everyone
from cfl_ray.core.method import Method, option, weighting
from cfl_ray.core.serving import Serving


@dataclass(frozen=True)
class FedPer(Method, name="fedper"):
    """A shared base below private upper layers."""

    private_layers: int = option(1, "upper layers that stay with the client (K_P); 0: none, which is FedAvg", source="FedAC's comparison", low=0)
    weights: str = weighting()

    def init(self, start):
        return start.one_model()

    def round(self, state, clients, rng):
        sent = clients.send(state.models_KP, columns=clients.spec.bottom(self.private_layers))
        updates = clients.train(sent, own=self.private(clients), mix=everyone(clients.weights(self.weights)))
        return state.advance(models_KP=updates.mixed(empty=state.models_KP))

    def private(self, clients):
        return Own("head", clients.spec.top(self.private_layers)) if self.private_layers else None

    def serve(self, state, clients):
        return Serving(state.models_KP, clients.first(), own=self.private(clients))
