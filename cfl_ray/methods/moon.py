"""MOON: Q. Li, B. He, D. Song. Model-Contrastive Federated Learning. CVPR 2021, arXiv:2103.16257, Algorithm 1.

    W_i <- SGD_i on CE + mu l_con from w_t;   z(x): inputs of the last layer
        l_con = -log(e^{cos(z, z_glob) / tau} / (e^{cos(z, z_glob) / tau} + e^{cos(z, z_prev) / tau}))
    z_glob, z_prev: of w_t and of the client's last W_i on the same batch, without gradient
    w_{t+1} <- sum_i n_i W_i / sum_i n_i

Without a previous model, l_con is off (`first: off`, as in the official code, QinbinLi/MOON, 8fcba3c), or takes w_0 in
its place (`first: initial`, the paper). A client keeps its last model; it predicts with w_t.

Deviations: z is the output of a projection head of two layers in the paper's networks; here it is a part of the
network, such as `model: {name: lenet5, options: {projection: 256}}`, or there is none, as in PFLlib and FL-bench. With
participation below 1 the previous model of a client that never trained is a random network in the official code. The
models of z_glob and z_prev are in evaluation mode. There is one previous model (official code: a pool; of three or more
its loop copies the newest into all places).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from cfl_ray.core.clients import Batch, ClientProgram, Clients, ClientState, Held, LocalTraining, ProgramClient
from cfl_ray.core.method import Method, Start, option, weights_option
from cfl_ray.core.params import ParamSpec, layer_name
from cfl_ray.core.rng import Draws
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import State

PREVIOUS = ClientState("previous", private=False)


@dataclass(frozen=True)
class Contrastive(ClientProgram):
    """SGD on the loss + mu l_con. Given: the received model, and w_0 as the previous one of a client without one."""

    mu: float
    tau: float
    starts_at_initial: bool
    kept_model: ClassVar = "previous"
    only_tensors: ClassVar = True

    def keeps(self, spec: ParamSpec) -> Mapping[str, Tensor]:
        return {"has_previous": torch.tensor([float(self.starts_at_initial)])}

    def loss(self, batch: Batch, held: Held) -> Tensor:
        near_B, far_B = (
            cosine_similarity(batch.features, batch.forward(model).features) / self.tau
            for model in ("received", "previous")
        )
        contrast = batch.mean(torch.logaddexp(near_B, far_B) - near_B)
        return batch.loss + self.mu * held["has_previous"].sum() * contrast

    def finish(self, client: ProgramClient, start_P: Tensor, row_P: Tensor, held: Held) -> None:
        held["has_previous"] = torch.ones(1)


@dataclass(frozen=True, kw_only=True)
class InitialState(State):
    """The global model, and w_0."""

    first_KP: Tensor  # (1, P)


@dataclass(frozen=True)
class Moon(Method[InitialState], name="moon"):
    """FedAvg whose clients keep their features near those of the global model, and far from those of their last."""

    mu: float = option(5.0, "mu: weight of the contrastive loss; grid {0.1, 1, 5, 10}", source="paper, CIFAR-10", low=0)
    tau: float = option(0.5, "tau: temperature", source="paper", low=1e-6)
    first: str = option(
        "off",
        "a client without a previous model trains without the contrastive loss, or with w_0 in its place",
        source="official code; paper: initial",
        choices=("off", "initial"),
    )
    weights: str = weights_option()

    def model_warning(self, spec: ParamSpec) -> str:
        if len(spec.layers) > 1:
            return ""
        return (
            f"the model has a single layer, {layer_name(spec.layers[0])}, whose inputs are those of the model: the "
            "contrastive loss has no gradient, and it is FedAvg"
        )

    def init(self, start: Start) -> InitialState:
        first_KP = start.new_model(0)[None]
        return InitialState(models_KP=first_KP, assign_N=start.one_cluster(), first_KP=first_KP)

    def round(self, state: InitialState, clients: Clients, rng: Draws) -> InitialState:
        w, initial = clients.send(state.models_KP), self.first == "initial"
        given = {"received": w} | ({"previous": clients.known_models(state.first_KP)} if initial else {})
        updates = clients.train(
            w,
            client_state=PREVIOUS,
            how=LocalTraining(program=Contrastive(self.mu, self.tau, initial), given=given),
            average=clients.weights(self.weights),
        )
        return state.advance(models_KP=updates.averaged(default=state.models_KP))

    def serve(self, state: InitialState, clients: Clients) -> Serving:
        return Serving(state.models_KP, clients.first_row(), client_state=clients.norms_in(PREVIOUS))
