"""FedPer: M. G. Arivazhagan, V. Aggarwal, A. K. Singh, S. Choudhary. Federated Learning with Personalization Layers.
arXiv:1912.00818, Algorithms 1 and 2.

    (phi_i, h_i) <- SGD_i(phi_t, h_i)          base and private head trained jointly; h_i starts as the head of w_0
    phi_{t+1} <- Avg(phi_i)                    over the cohort; the heads never leave the clients

A client that never took part predicts with phi and the untrained head, so nearly at random.

Deviations: none.
"""

from dataclasses import dataclass
from typing import Any

from cfl_ray.core.clients import Clients, ClientState
from cfl_ray.core.method import OneModel, option, weights_option
from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.state import State
from cfl_ray.errors import ConfigError


@dataclass(frozen=True)
class FedPer(OneModel, name="fedper"):
    """A shared base with private upper layers."""

    untrained = "its private layers begin untrained"

    private_layers: int = option(
        1, "upper layers that stay with the client (K_P); 0: none, which is FedAvg", source="FedAC's comparison", low=0
    )
    private: Any = option(
        None,
        "parameters that stay with the client instead, by what their names, or the parts of their names after a dot, "
        "begin with, e.g. [lora_]; null: the upper layers",
        source="ours",
    )
    weights: str = weights_option()

    def check_model(self, spec: ParamSpec) -> None:
        try:
            self.private_columns(spec)
        except ValueError as error:
            raise ConfigError(f"{self.name}.private: {error}") from None

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        phi = clients.send(state.models_KP, columns=self.private_columns(clients.spec)[1])
        updates = clients.train(phi, client_state=self.kept(clients.spec), average=clients.weights(self.weights))
        return state.advance(models_KP=updates.averaged(default=state.models_KP))

    def private_columns(self, spec: ParamSpec) -> tuple[Columns, Columns]:
        """The columns that stay with the client, and the others."""
        if self.private is not None:
            return spec.columns(self.private), spec.columns(self.private, others=True)
        return spec.top(self.private_layers), spec.bottom(self.private_layers)

    def kept(self, spec: ParamSpec) -> ClientState | None:
        """h_i; None without private layers."""
        if not self.private_layers and self.private is None:
            return None
        return ClientState("head", self.private_columns(spec)[0])
