"""FedRep: L. Collins, H. Hassani, A. Mokhtari, S. Shakkottai. Exploiting Shared Representations for Personalized
Federated Learning. ICML 2021, arXiv:2102.07078, Algorithm 1.

    h_i <- tau_h SGD steps on f_i(h_i, phi_t)    the head alone, with the received representation; h_i starts as in w_0
    phi_i <- SGD steps on f_i(h_i, phi_i)        the representation alone, from phi_t, with the new head
    phi_{t+1} <- Avg(phi_i)                      over the cohort; the heads never leave the clients

A newcomer trains a head on its own samples with phi fixed, and uploads nothing. Any other client that never took part
predicts with phi and the untrained head, so nearly at random.

Deviations: clients are averaged by samples (paper: uniformly; official code, lgcollins/FedRep, d82e629: by samples with
FEMNIST and Sent140 alone). A client's first head is that of w_0 (official code: the average of the heads of the cohort
before, which the server computes). After its last round the official code trains the heads of all clients; here only
the cohort trains heads. Each of the two trainings has a separate momentum buffer (official code before PyTorch 2.0:
momentum and weight decay move the head on while the representation is trained), and weight decay acts on biases too.
Weight decay by an optimiser other than SGD (`local.optimizer_options`; AdamW has 0.01) acts on both parts in both
trainings.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from cfl_ray.core.clients import ClientProgram, Clients, Gradient, Held, LocalTraining, Sent
from cfl_ray.core.method import option
from cfl_ray.core.params import Columns
from cfl_ray.core.rng import Draws
from cfl_ray.core.state import State
from cfl_ray.methods.fedper import FedPer


@dataclass(frozen=True)
class OnlyColumns(ClientProgram):
    """A step in some trained columns alone; the others do not change."""

    columns: Columns
    weight_decay: float  # of these columns: decay of the whole row would also move the others
    only_tensors: ClassVar = True

    def step(self, gradient: Gradient, w: Tensor, held: Held, number: Any) -> Tensor:
        step = torch.zeros_like(w)
        self.columns.put(step, self.columns.of(gradient(w, 0)) + self.weight_decay * self.columns.of(w))
        return step


def training_of(columns: Columns, clients: Clients, epochs: int | None = None) -> LocalTraining:
    """Local training of these columns alone. epochs: None for those of the experiment."""
    local, trained = clients.local, columns.within(0, clients.spec.trained)
    return LocalTraining(
        sgd=replace(local, weight_decay=0.0),
        steps_M=None if epochs is None else local.steps_of(clients.num_samples_M, epochs),
        program=OnlyColumns(trained, local.weight_decay),
    )


@dataclass(frozen=True)
class FedRep(FedPer, name="fedrep"):
    """A shared representation under private heads, trained one after the other."""

    placement = "its own head, trained on the fixed representation"
    needs_fresh_momentum = "head and representation are trained one after the other, with a buffer each"

    head_epochs: int = option(10, "tau_h: local epochs of the head", source="paper's experiments", low=1, high=100_000)

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        shared = self.shared_columns(clients.spec)
        phi, head = clients.send(state.models_KP, columns=shared), self.kept(clients.spec)
        # h_i <- tau_h SGD steps on f_i(h_i, phi_t)
        self.train_heads(phi, clients, keep_as_local_model=False)
        # phi_i <- SGD steps on f_i(h_i, phi_i);  phi_{t+1} <- Avg(phi_i)
        how, weight_M = training_of(shared, clients), clients.weights(self.weights)
        updates = clients.train(phi, client_state=head, how=how, average=weight_M)
        return state.advance(models_KP=updates.averaged(default=state.models_KP))

    def train_heads(self, phi: Sent, clients: Clients, *, keep_as_local_model: bool = True) -> None:
        """Every client trains its head, if it has one, with the representation `phi` fixed."""
        if (head := self.kept(clients.spec)) is not None:
            how = training_of(self.private_columns(clients.spec), clients, self.head_epochs)
            clients.train(phi, client_state=head, how=how, keep_as_local_model=keep_as_local_model)

    def join(self, state: State, clients: Clients) -> State:
        """The same state; newcomers receive phi and train their heads."""
        if self.kept(clients.spec) is not None:
            self.train_heads(clients.send(state.models_KP, columns=self.shared_columns(clients.spec)), clients)
        return state
