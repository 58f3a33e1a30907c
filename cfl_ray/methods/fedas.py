"""FedAS: X. Yang, W. Huang, M. Ye. FedAS: Bridging Inconsistency in Personalized Federated Learning. CVPR 2024,
https://openaccess.thecvf.com/content/CVPR2024/html/Yang_FedAS_Bridging_Inconsistency_in_Personalized_Federated_Learning_CVPR_2024_paper.html

A model is a shared base theta, with features g(x; theta), under a private head h_i.

    c_iy <- mean of g(x; theta_i) over i's samples of label y             theta_i: of its last round, at first theta
    theta <- SGD on sum_y mean of (g(x; theta) - c_iy)^2                  alignment of the received base, for one epoch
    theta_i, h_i <- SGD_i from theta and the client's head
    F_i = sum over batches |gradient of the batch's mean loss at theta_i, h_i|^2      trace of the Fisher information
    theta <- sum_i F_i theta_i / sum_i F_i                                over the cohort

A client that never took part has the averaged model, with the average of the heads.

Deviations: heads are also uploaded and averaged, as in the official code (xiyuanyang45/FedAS, 1a4f5fd; also in PFLlib),
for clients without a head, whose download of it is not counted; there such a client begins with the head and the
features c_iy of the first model. The alignment has the batches of local training; there they have 16 samples, and the
last samples that fill none are left out. In the authors' repository each client aligns the base that the client before
it has aligned; PFLlib copies it, as here. Both also compute F_i of clients that were not selected, which would double a
round in a deployment.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.classifier import Classifier, Prototypes
from cfl_ray.core.clients import Batch, ClientData, ClientProgram, Clients, ClientState, Held, LocalTraining
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.method import Method, OneModel, option
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.state import State
from cfl_ray.errors import ConfigError

OWN = ClientState("model", private=False)  # theta_i and h_i


@dataclass(frozen=True)
class Alignment(ClientProgram):
    """SGD on the sum over the labels of a batch of the mean squared difference of their features to c_iy.

    Given: c_iy, (C, F + 1), of `Prototypes`, with the number of samples as the last column.
    """

    one_by_one: ClassVar = True  # bincount has no batching rule

    def loss(self, batch: Batch, held: Held) -> Tensor:
        prototype_CF, y_B = held["prototypes"], batch.y
        squared_B = ((batch.features - prototype_CF[y_B, :-1]) ** 2).mean(1)
        count_C = torch.bincount(y_B, minlength=len(prototype_CF))
        return (squared_B / count_C[y_B]).sum()


@dataclass(frozen=True)
class FisherTrace:
    """F_i, a scalar."""

    batch_size: int | None
    floats: Callable[[int, int], int] = lambda inputs, classes: 1

    def __call__(self, client: ClientData, model_P: Tensor) -> Tensor:
        gradients = client.batch_gradients(model_P, self.batch_size)
        return torch.stack([gradient_P.square().sum() for gradient_P in gradients]).sum()


@dataclass(frozen=True)
class FedAS(OneModel, name="fedas"):
    """A shared base, aligned to each client's own features, under private heads; weights by Fisher information."""

    needs_classes = "its prototypes are mean features of each label"
    needs_fresh_momentum = "a client's base is replaced at the beginning of a round"

    align_epochs: int = option(1, "epochs of the alignment; 0: none", source="PFLlib", low=0, high=100_000)
    align_lr: float = option(0.01, "learning rate of the alignment", source="PFLlib", low=0)
    weights: str = option(
        "fisher",
        "weight of a client in the average: the trace of its Fisher information, its samples, or the same for all",
        source="paper",
        choices=("fisher", "samples", "uniform"),
    )

    def check_model(self, spec: ParamSpec) -> None:
        check_classifier(self, spec)

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        clients.require_readable("the Fisher information")
        spec = clients.spec
        received = clients.send(state.models_KP, columns=spec.base)
        resumed = ClientState("model", private=False, resumed=spec.head)  # h_i alone
        aligned_M = np.ones(len(clients), bool)
        if self.align_epochs and len(spec.layers) > 1:  # of a single layer, the head, no base is trained
            # c_iy <- mean of g(x; theta_i)
            prototypes = Prototypes(Classifier.of(spec))
            prototype_MX, _ = clients.describe(prototypes, received, client_state=OWN, floats=0)
            # theta <- SGD on sum_y mean of (g(x; theta) - c_iy)^2
            c_MCF = prototype_MX.reshape(len(clients), prototypes.classifier.num_classes, -1)
            size, drop_last = clients.local.batch_size, clients.local.drop_last
            sgd = LocalSGD(epochs=self.align_epochs, batch_size=size, lr=self.align_lr, drop_last=drop_last)
            how = LocalTraining(sgd=sgd, program=Alignment(), given={"prototypes": c_MCF})
            aligned_M = clients.train(received, client_state=resumed, how=how, keep_as_local_model=False).valid_M
            resumed = OWN
        # theta_i, h_i <- SGD_i
        updates = clients.train(received, client_state=resumed, defer_aggregation=True, keep_as_local_model=aligned_M)
        # theta <- sum_i F_i theta_i / sum_i F_i
        if self.weights == "fisher":
            fisher_M1, _ = clients.describe(FisherTrace(clients.local.batch_size), received, client_state=OWN)
            trace_M = fisher_M1.double().sum(1).numpy()
            # an attacker may send a trace that is none: negative or infinite
            weight_M = np.where(updates.valid_M & (trace_M > 0) & np.isfinite(trace_M), trace_M, 0.0)
        else:
            weight_M = clients.weights(self.weights)
        # a client whose alignment failed went on from its last round
        means = clients.average(updates, weight_M * aligned_M)
        return state.advance(models_KP=means.averaged(default=state.models_KP))

    def kept(self, spec: ParamSpec) -> ClientState:
        return OWN


def check_classifier(method: Method[Any], spec: ParamSpec) -> None:
    """Raises ConfigError if the model has no linear last layer."""
    try:
        Classifier.of(spec)
    except ValueError as error:
        raise ConfigError(f"{method.name}: {error}") from None
