"""FedProto: Y. Tan, G. Long, L. Liu, T. Zhou, Q. Lu, J. Jiang, C. Zhang. FedProto: Federated Prototype Learning across
Heterogeneous Clients. AAAI 2022, arXiv:2105.00243, Algorithm 1.

A client keeps its whole model, with features f(x), the inputs of the last layer. Clients and server exchange C
prototypes of F numbers alone.

    w_i <- SGD_i on CE + lambda mean of (f(x) - gbar_y)^2          over batch and F; without the term if y has no gbar_y
    c_iy <- mean of f(x) over i's samples of label y               sent with their number n_iy
    gbar_y <- sum_i n_iy c_iy / sum_i n_iy                         (Eq. 6), over the cohort

A client predicts with the label of the nearest prototype, argmin_y ||f(x) - gbar_y||. Since ||f - g||^2 = ||f||^2 -
(2 f . g - ||g||^2), this is a linear last layer with the weights 2 gbar_y and the biases -||gbar_y||^2, in the place of
the client's own. P-local measures the own last layer, so both accuracies are in one run; `predict: classifier` serves
it.

A newcomer receives the prototypes, trains, and uploads nothing. Any other client that never took part has the features
of the untrained w_0.

Deviations: Eq. 6 also divides by the number of clients that have the label, which would shrink the prototypes; the
official code (yuetan031/FedProto, 97e42e2) has the mean over clients (`weights: uniform`). A label without samples in a
cohort keeps its prototype. All clients start from the common w_0 (paper: also other architectures). The official code
collects c_iy in the last epoch, while the model changes (`prototypes: running`; here of the models before each step in
evaluation mode), and compares samples with the prototypes of the client's own labels alone. Its accuracies are running
means: those of client k have the samples of the clients 0 .. k, and "with prototypes" also those predicted without.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.classifier import Classifier, Prototypes
from cfl_ray.core.clients import (
    Batch,
    ClientProgram,
    Clients,
    ClientState,
    Gradient,
    Held,
    LocalTraining,
    ProgramClient,
    Updates,
)
from cfl_ray.core.method import Method, Start, option
from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import State
from cfl_ray.errors import ConfigError
from cfl_ray.methods.fedas import check_classifier

_FARTHER = 1e4  # how much farther than the farthest prototype a label without one is


@dataclass(frozen=True)
class NearPrototypes(ClientProgram):
    """SGD on loss + lambda (f(x) - gbar_y)^2. Given: the prototypes (C, F), NaN for none.

    After it the client reports its own, (C, F + 1) with the numbers of samples in the last column.
    """

    lam: float
    classifier: Classifier
    uploads_prototypes: bool
    only_tensors: ClassVar = True

    def reports(self, spec: ParamSpec) -> Mapping[str, int]:
        count = self.classifier.num_classes * (self.classifier.num_features + 1)
        return {"prototypes": count} if self.uploads_prototypes else {}

    def loss(self, batch: Batch, held: Held) -> Tensor:
        return batch.loss + self.lam * batch.mean(squared_distances(batch, held["global"]))

    def finish(self, client: ProgramClient, start_P: Tensor, row_P: Tensor, held: Held) -> None:
        if self.uploads_prototypes:
            held["prototypes"] = Prototypes(self.classifier)(client, row_P)


@dataclass(frozen=True)
class RunningPrototypes(NearPrototypes):
    """Reports the sums of the features in the steps from number `first` on. Given: `first`, and zeros as `sums`."""

    moves: ClassVar = ("sums",)

    def step(self, gradient: Gradient, w: Tensor, held: Held, number: Any) -> Tensor:
        seen = gradient.forward(w, 0)
        labels_C = torch.arange(self.classifier.num_classes, device=w.device)
        label_BC = (seen.y[..., None] == labels_C) * seen.real_B[..., None]
        ones_B1 = torch.ones_like(seen.real_B)[..., None]
        counts = (held["first"] <= number).to(w.dtype)[..., None, None]
        held["sums"].add_(counts * (label_BC.mT @ torch.cat([seen.features, ones_B1], -1)))
        return gradient(w, 0)

    def finish(self, client: ProgramClient, start_P: Tensor, row_P: Tensor, held: Held) -> None:
        sums_CF, count_C1 = held["sums"][:, :-1], held["sums"][:, -1:]
        held["prototypes"] = torch.cat([sums_CF / count_C1.clamp(min=1), count_C1], 1)


def squared_distances(batch: Batch, prototype_CF: Tensor) -> Tensor:
    """Mean over F of (f(x) - gbar_y)^2, (B,); 0 for a sample whose label has no prototype."""
    known_C = prototype_CF.isfinite().all(1)
    squared_B = (batch.features - prototype_CF.nan_to_num()[batch.y]).square().mean(1)
    return squared_B * known_C[batch.y]


@dataclass(frozen=True)
class WithPrototypes:
    """The received last layer on the client's other columns."""

    base: Columns

    def __call__(self, received_P: Tensor, value: Tensor) -> Tensor:
        self.base.put(received_P, self.base.of(value[: len(received_P)]))
        return received_P


@dataclass(frozen=True, kw_only=True)
class PrototypeState(State):
    """w_0, from which every client begins, and the prototypes gbar_y."""

    prototype_CF: Tensor  # float32; NaN: none yet


@dataclass(frozen=True)
class FedProto(Method[PrototypeState], name="fedproto"):
    """Whole models stay with the clients, which share the mean features of each label."""

    untrained = "its model is its own, and begins untrained"
    placement = "its own model, trained with the prototypes"
    only_mean = "it averages prototypes, not models"
    only_synchronous = "prototypes are averaged over the clients of a round"
    needs_classes = "its prototypes are mean features of each label"

    lam: float = option(1.0, "lambda: weight of the distance to the prototypes; CIFAR-10: 0.1", source="paper", low=0)
    predict: str = option(
        "prototype",
        "a client predicts with the label of the nearest prototype, or with its own last layer",
        source="paper",
        choices=("prototype", "classifier"),
    )
    prototypes: str = option(
        "after",
        "features of the trained model, or of the models before each step of the last epoch",
        source="paper; official code: running",
        choices=("after", "running"),
    )
    weights: str = option(
        "samples",
        "weight of a client in a prototype: its samples of the label, or the same for all that have some",
        source="paper; official code: uniform",
        choices=("samples", "uniform"),
    )

    def check_model(self, spec: ParamSpec) -> None:
        check_classifier(self, spec)
        if self.predict == "prototype" and not Classifier.of(spec).has_bias:
            raise ConfigError(
                f"{self.name}.predict is prototype, which needs biases in the last layer {spec.layers[-1]!r}, where "
                "-||gbar_y||^2 is put; add them, or set predict: classifier"
            )

    def init(self, start: Start) -> PrototypeState:
        classifier = Classifier.of(start.spec)
        return PrototypeState(
            models_KP=start.new_model(0)[None],
            assign_N=start.one_cluster(),
            prototype_CF=torch.full((classifier.num_classes, classifier.num_features), torch.nan),
        )

    def round(self, state: PrototypeState, clients: Clients, rng: Draws) -> PrototypeState:
        # w_i <- SGD_i on CE + lambda (f(x) - gbar_y)^2;  c_iy
        updates = self.train(state, clients, uploads=True)
        # gbar_y <- sum_i n_iy c_iy / sum_i n_iy
        reported_MX = updates.reported("prototypes")[torch.from_numpy(updates.valid_M)]
        c_MCF, count_MC = prototypes_of(reported_MX, Classifier.of(clients.spec))
        weight_MC = count_MC if self.weights == "samples" else (count_MC > 0).float()
        return state.advance(prototype_CF=averaged_prototypes(c_MCF, weight_MC, state.prototype_CF))

    def train(self, state: PrototypeState, clients: Clients, uploads: bool) -> Updates:
        """Every client receives the prototypes and trains its model."""
        classifier, local = Classifier.of(clients.spec), clients.local
        clients.count_download(int(state.prototype_CF.isfinite().sum()))
        given = {"global": state.prototype_CF.expand(len(clients), -1, -1)}
        program = NearPrototypes(self.lam, classifier, uploads)
        if self.prototypes == "running" and uploads:
            program = RunningPrototypes(self.lam, classifier, uploads)
            steps_M, samples_M = local.steps_of(clients.num_samples_M), clients.num_samples_M
            shape = len(clients), classifier.num_classes, classifier.num_features + 1
            given |= {"first": np.maximum(steps_M - local.batches_of(samples_M), 0), "sums": torch.zeros(shape)}
        return clients.train(
            clients.known_models(state.models_KP),
            client_state=self.kept(clients.spec),
            how=LocalTraining(program=program, given=given),
        )

    def kept(self, spec: ParamSpec) -> ClientState:
        """w_i."""
        with_prototypes = WithPrototypes(spec.head.others(spec.size)) if self.predict == "prototype" else None
        return ClientState("model", predicts=with_prototypes)

    def serve(self, state: PrototypeState, clients: Clients) -> Serving:
        models_KP, known_C = state.models_KP, state.prototype_CF.isfinite().all(1)
        if self.predict == "prototype" and known_C.any():
            models_KP = models_KP.clone()
            Classifier.of(clients.spec).put(models_KP[0], nearest_prototype(state.prototype_CF))
        return Serving(models_KP, clients.first_row(), client_state=self.kept(clients.spec))

    def join(self, state: PrototypeState, clients: Clients) -> PrototypeState:
        """The same state; newcomers receive the prototypes and train."""
        self.train(state, clients, uploads=False)
        return state


def prototypes_of(reported_MX: Tensor, classifier: Classifier) -> tuple[Tensor, Tensor]:
    """Mean features (M, C, F) and numbers of samples (M, C) of reports of `Prototypes`."""
    table_MCF = reported_MX.reshape(len(reported_MX), classifier.num_classes, classifier.num_features + 1)
    return table_MCF[..., :-1], table_MCF[..., -1]


def averaged_prototypes(c_MCF: Tensor, weight_MC: Tensor, before_CF: Tensor) -> Tensor:
    """Weighted means over the clients, (C, F); for labels without weight those before."""
    total_C1 = weight_MC.sum(0)[:, None]
    mean_CF = torch.einsum("mc,mcf->cf", weight_MC, c_MCF) / total_C1
    return torch.where(total_C1 > 0, mean_CF, before_CF)


def nearest_prototype(prototype_CF: Tensor) -> Tensor:
    """Rows (C, F + 1) of weights and bias whose largest logit is that of the nearest prototype."""
    known_C1 = prototype_CF.isfinite().all(1, keepdim=True)
    bias_C1 = -prototype_CF.square().sum(1, keepdim=True)
    farthest = bias_C1[known_C1].min() - _FARTHER
    return torch.cat([2 * prototype_CF.nan_to_num(), torch.where(known_C1, bias_C1, farthest)], 1)
