"""FedRoD: H.-Y. Chen, W.-L. Chao. On Bridging Generic and Personalized Federated Learning for Image Classification.
ICLR 2022, arXiv:2107.00778, Algorithm 1, with linear personal heads.

A model is a body with features f, under a generic head g. Each client has a personal head p_i of the shape of g.

    (f, g) <- SGD_i on CE(g(f) + log n_iy, y)                  balanced softmax; n_iy: i's samples of label y
    p_i <- p_i - eta_p grad CE(g(f) + p_i(f), y)               the same batch; f and g before their step, as constants
    f, g <- sum_i n_i (f_i, g_i) / sum_i n_i;  p_i stays       over the cohort

A client predicts with g(f) + p_i(f): both heads are linear, so this is one head with the sums of weights and biases.
The generic model g(f) is measured beside it (`global_score` in the diagnostics). p_i is 0 at first, so a client that
never took part predicts with the generic model.

Deviations: p_i takes plain SGD steps, without momentum and weight decay. PFLlib (d832e76; there is no code by the
authors) starts p_i as a copy of g (`start: copy`), and counts labels in full batches only, so that a label can have no
samples and an infinite loss; in FL-bench (06e658b) clients never load the average, since names differ, and predict with
p_i(f) alone, whose gradient moves the body.
The paper's other option, a hypernetwork that makes p_i from the shares of the labels, is not here. A label that a
client lacks has no share in its balanced softmax.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot

from cfl_ray.core.classifier import Classifier
from cfl_ray.core.clients import (
    Batch,
    ClientProgram,
    Clients,
    ClientState,
    Gradient,
    Held,
    LocalTraining,
    ProgramClient,
)
from cfl_ray.core.method import OneModel, option, weights_option
from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.rounds import record_global_score
from cfl_ray.core.state import State
from cfl_ray.methods.fedas import check_classifier

_ABSENT = (
    -1e4
)  # log n_iy without samples: its share of a softmax is 0, and a sample that only pads a batch stays finite


@dataclass(frozen=True)
class TwoHeads(ClientProgram):
    """SGD on the balanced softmax; the personal head, rows (C, F + 1), takes its steps on constant features."""

    classifier: Classifier
    lr: float  # eta_p
    copies: bool  # the personal head begins as a copy of the received one
    moves: ClassVar = ("p",)
    only_tensors: ClassVar = True

    def keeps(self, spec: ParamSpec) -> Mapping[str, Tensor]:
        return {"p": torch.zeros_like(self.classifier.rows(torch.zeros(spec.size))), "rounds": torch.zeros(1)}

    def begin(self, client: ProgramClient, start_P: Tensor, held: Held) -> Tensor:
        count_C = one_hot(client.y.cpu(), self.classifier.num_classes).sum(0)
        held["log_prior"] = torch.where(count_C > 0, count_C.clamp(min=1).log(), _ABSENT)
        if self.copies and not held["rounds"]:
            held["p"] = self.classifier.rows(start_P)
        return start_P

    def loss(self, batch: Batch, held: Held) -> Tensor:
        return batch.mean(cross_entropy(batch.outputs + held["log_prior"], batch.y, reduction="none"))

    def step(self, gradient: Gradient, w: Tensor, held: Held, number: Any) -> Tensor:
        seen, p_CF = gradient.forward(w, 0), held["p"]
        features_BF = seen.features
        if self.classifier.has_bias:
            features_BF = torch.cat([features_BF, torch.ones_like(features_BF[..., :1])], -1)
        labels_C = torch.arange(self.classifier.num_classes, device=w.device)
        share_B = seen.real_B / seen.real_B.sum(-1, keepdim=True)
        error_BC = (seen.outputs + features_BF @ p_CF.mT).softmax(-1) - (seen.y[..., None] == labels_C).to(w.dtype)
        p_CF.sub_(self.lr * (error_BC * share_B[..., None]).mT @ features_BF)
        return gradient(w, 0)

    def finish(self, client: ProgramClient, start_P: Tensor, row_P: Tensor, held: Held) -> None:
        held["rounds"] = held["rounds"] + 1


@dataclass(frozen=True)
class WithPersonalHead:
    """The received model with the personal head added to its last layer."""

    classifier: Classifier

    def __call__(self, received_P: Tensor, value: Tensor) -> Tensor:
        row_CF = self.classifier.rows(received_P)
        self.classifier.put(received_P, row_CF + value[: row_CF.numel()].reshape(row_CF.shape))
        return received_P


@dataclass(frozen=True)
class FedRoD(OneModel, name="fedrod"):
    """A generic model for balanced labels, and for each client a personal head beside its head."""

    needs_classes = "its loss is balanced by label"
    needs_sgd = "personal heads take plain SGD steps"

    personal_lr: float | None = option(
        None, "eta_p: learning rate of the personal head; null: that of local training", source="PFLlib", low=0
    )
    start: str = option(
        "zero",
        "p_i in the first round of a client: zero, or a copy of the head that it received",
        source="ours; PFLlib: copy",
        choices=("zero", "copy"),
    )
    weights: str = weights_option()

    def check_model(self, spec: ParamSpec) -> None:
        check_classifier(self, spec)

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        lr = clients.local.lr if self.personal_lr is None else self.personal_lr
        program = TwoHeads(Classifier.of(clients.spec), lr, self.start == "copy")
        updates = clients.train(
            clients.send(state.models_KP),
            client_state=self.kept(clients.spec),
            how=LocalTraining(program=program),
            average=clients.weights(self.weights),
        )
        return state.advance(models_KP=updates.averaged(default=state.models_KP))

    def kept(self, spec: ParamSpec) -> ClientState:
        """p_i."""
        with_head = WithPersonalHead(Classifier.of(spec))
        return ClientState("personal_head", Columns(()), private=False, predicts=with_head)

    def diagnose(self, state: State, clients: Clients) -> None:
        record_global_score(clients, state.models_KP)
