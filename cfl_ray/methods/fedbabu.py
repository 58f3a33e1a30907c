"""FedBABU: J. Oh, S. Kim, S.-Y. Yun. FedBABU: Toward Enhanced Representation for Federated Image Classification.
ICLR 2022, arXiv:2106.06042, Algorithm 1.

    phi_i <- SGD_i on phi alone, from phi_t, with the head h^0       random, the same for all, and never trained
    phi_{t+1} <- mean of phi_i                                       over the cohort
    (phi_i, h_i) <- SGD_i on both, from (phi, h^0)                   for `tune_epochs`, before a client predicts

Weight decay does not act on h^0 either. Clients predict with the fine-tuned model in every evaluation, so that its
accuracy is defined in all rounds (paper: after the last one). A newcomer has phi and h^0, and fine-tunes.

Deviations: FedBABU+, which also trains on data of the server, is not implemented. Decay by an optimiser other than SGD
(`local.optimizer_options`; AdamW has 0.01) also acts on the clients' copies of h^0. PFLlib (d832e76) fine-tunes the
last local phi_i of each client, since it sends no average after the last round; in FL-bench (06e658b) weight decay
shrinks h^0.
"""

from dataclasses import dataclass, replace

from cfl_ray.core.clients import Clients, ClientState
from cfl_ray.core.method import OneModel, option, weights_option
from cfl_ray.core.params import Columns, ParamSpec, layer_name
from cfl_ray.core.rng import Draws
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import State
from cfl_ray.errors import ConfigError
from cfl_ray.methods.fedrep import training_of


@dataclass(frozen=True)
class FedBABU(OneModel, name="fedbabu"):
    """A shared body, trained under a random head that stays; clients fine-tune both before they predict."""

    tune_epochs: int = option(
        5, "epochs of the fine-tuning; 0: clients predict with phi and h^0", source="paper", low=0, high=100_000
    )
    tune_lr: float | None = option(
        1e-3, "learning rate of the fine-tuning; null: local.lr", source="official code", low=0
    )
    weights: str = weights_option("uniform")

    def check_model(self, spec: ParamSpec) -> None:
        if not spec.base.within(0, spec.trained).count:
            raise ConfigError(
                f"{self.name} trains all layers but the last, and the model has a single layer, "
                f"{layer_name(spec.layers[-1])}"
            )

    def shared_columns(self, spec: ParamSpec) -> Columns:
        """Phi."""
        return spec.base

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        phi = clients.send(state.models_KP, columns=clients.spec.base)
        head = self.head(clients.spec)
        how, weight_M = training_of(clients.spec.base, clients), clients.weights(self.weights)
        updates = clients.train(phi, client_state=head, how=how, average=weight_M)
        return state.advance(models_KP=updates.averaged(default=state.models_KP))

    def head(self, spec: ParamSpec) -> ClientState:
        """h^0, neither sent nor uploaded."""
        return ClientState("head", spec.head)

    def serve(self, state: State, clients: Clients) -> Serving:
        own = clients.norms_in(self.head(clients.spec))
        if not self.tune_epochs:
            return Serving(state.models_KP, clients.first_row(), client_state=own)
        lr = clients.local.lr if self.tune_lr is None else self.tune_lr
        tune = replace(clients.local, epochs=self.tune_epochs, steps=None, lr=lr)
        return Serving(state.models_KP, clients.first_row(), client_state=own, tune=tune)
