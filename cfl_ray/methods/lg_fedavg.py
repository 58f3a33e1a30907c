"""LG-FedAvg: P. P. Liang, T. Liu, L. Ziyin, N. B. Allen, R. P. Auerbach, D. Brent, R. Salakhutdinov, L.-P. Morency.
Think Locally, Act Globally: Federated Learning with Local and Global Representations. arXiv:2001.01523, Algorithm 1.

    (l_i, g_i) <- SGD_i(l_i, g_t)              private lower and shared upper layers trained jointly
    g_{t+1} <- Avg(g_i)                        over the cohort

Deviations: training starts from the common initial model (official code: from a model trained with FedAvg), and the
shared layers go to the cohort alone (official code: to all clients in every round).
"""

from dataclasses import dataclass

from cfl_ray.core.clients import Clients, ClientState
from cfl_ray.core.method import OneModel, option, weights_option
from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.state import State


@dataclass(frozen=True)
class LGFedAvg(OneModel, name="lg_fedavg"):
    """Shared upper layers on private lower layers."""

    untrained = "its private layers begin untrained"

    private_layers: int | None = option(
        None,
        "lower layers that stay with the client; 0: none, which is FedAvg; null: all but two, at least one "
        "(a model with a single layer then shares nothing)",
        source="FedClust's comparison: 3 of LeNet-5's 5",
        low=0,
    )
    weights: str = weights_option()

    def shared_columns(self, spec: ParamSpec) -> Columns:
        """The upper layers; all columns without private layers."""
        return spec.all if self.private_layers == 0 else spec.top(self.shared_layers(spec))

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        g = clients.send(state.models_KP, columns=self.shared_columns(clients.spec))
        updates = clients.train(g, client_state=self.kept(clients.spec), average=clients.weights(self.weights))
        return state.advance(models_KP=updates.averaged(default=state.models_KP))

    def shared_layers(self, spec: ParamSpec) -> int:
        """Number of shared upper layers."""
        layers = len(spec.layers)
        private = max(layers - 2, 1) if self.private_layers is None else self.private_layers
        return max(layers - private, 0)

    def kept(self, spec: ParamSpec) -> ClientState | None:
        """l_i; None without private layers."""
        lower = self.shared_columns(spec).others(spec.size)
        return ClientState("base", lower) if lower.count else None
