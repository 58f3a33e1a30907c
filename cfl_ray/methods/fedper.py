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
    private: str | list[Any] | tuple[Any, ...] | None = option(
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
        phi = clients.send(state.models_KP, columns=self.shared_columns(clients.spec))
        updates = clients.train(phi, client_state=self.kept(clients.spec), average=clients.weights(self.weights))
        return state.advance(models_KP=updates.averaged(default=state.models_KP))

    def private_columns(self, spec: ParamSpec) -> Columns:
        """The columns that stay with the client."""
        return spec.top(self.private_layers) if self.private is None else spec.columns(self.private)

    def shared_columns(self, spec: ParamSpec) -> Columns:
        """All other columns."""
        return self.private_columns(spec).others(spec.size)

    def kept(self, spec: ParamSpec) -> ClientState | None:
        """h_i; None without private layers."""
        private = self.private_columns(spec)
        return ClientState("head", private) if private.count else None
