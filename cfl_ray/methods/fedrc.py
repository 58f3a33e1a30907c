"""FedRC: Y. Guo, X. Tang, T. Lin. FedRC: Tackling Diverse Distribution Shifts Challenge in Federated Learning by Robust
Clustering. ICML 2024, arXiv:2301.12379, Algorithm 1.

    gamma_i(s, k) ~ omega_ik exp(-loss(theta_k; s)) / C(y_s, k)      E step: each client i, sample s and model k
    omega_ik <- (1 / n_i) sum_s gamma_i(s, k)                        M step: omega_i stays with the client
    theta_ik <- SGD_i(theta_k), on the loss (1 / n_i) sum_s gamma_i(s, k) loss(theta; s)
    theta_k <- sum_i n_i theta_ik / sum_i n_i                        over the cohort
    C(y, k) <- sum of gamma(s, k) over the samples with label y / sum of gamma(s, k) over all, of the cohort

C(y, k) is the share of label y in model k. Without it, a model trained on a single label would become likelier for that
label, and label skew alone would separate clients. With equal shares this is FedEM. A client predicts with
sum_k omega_ik softmax(f(x; theta_k)).

A client uploads K models and K C label masses, and receives K models and the table.

Deviations: a client trains its K models on the same batches; before the first round, C(y, k) = 1 / C for all labels;
models are not removed; C(y, k) is at least 1e-8. The official code (LINs-lab/FedRC, ce79229) computes C(y, k) over all
clients, with the last sums of those outside the cohort, each at least 1e-8; lets a newcomer take an E and an M step
without C(y, k) whenever a round is logged (`fit_steps`); and has weight decay 5e-4 and momentum 0.9, which is kept
between rounds (`local.persist`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.clients import Clients, Held, LocalTraining, ProgramClient, Sent
from cfl_ray.core.method import Start, option, weights_option
from cfl_ray.core.mixtures import Mixture, MixtureMethod, MixtureState
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.rng import Draws

_LEAST_SHARE = 1e-8


@dataclass(frozen=True, kw_only=True)
class FedRCState(MixtureState):
    """The models and mixtures, and the share of each label in each model."""

    share_CK: Tensor  # float32 (C, K), C(y, k); columns add up to 1


@dataclass(frozen=True)
class LabelFree(Mixture):
    """gamma_i(s, k) ~ omega_ik exp(-loss(theta_k; s)) / C(y_s, k), whose sums over each label a client reports."""

    num_classes: int
    num_models: int

    def reports(self, spec: ParamSpec) -> Mapping[str, int]:
        return {"label masses": self.num_classes * self.num_models}

    def responsibilities(self, loss_nK: Tensor, y_n: Tensor, held: Held) -> Tensor:
        return (held["mixture"].log() - loss_nK - held["share"][y_n].log()).softmax(1)

    def weigh(self, client: ProgramClient, loss_nK: Tensor, held: Held) -> Tensor:
        gamma_nK = super().weigh(client, loss_nK, held)
        held["label masses"] = torch.zeros(self.num_classes, self.num_models).index_add_(0, client.y.cpu(), gamma_nK)
        return gamma_nK


@dataclass(frozen=True)
class FedRC(MixtureMethod[FedRCState], name="fedrc"):
    """FedEM with mixtures that do not depend on label skew: models separate concepts, not labels."""

    needs_classes = "its responsibilities count labels"

    num_models: int = option(3, "K, number of models that are mixed; 1 is FedAvg", source="paper", low=1)
    fit_steps: int = option(10, "E and M steps of a client that has not trained yet", source="ours", low=1)
    weights: str = weights_option()

    def init(self, start: Start) -> FedRCState:
        (num_classes,) = start.output_shape
        share_CK = torch.full((num_classes, self.num_models), 1 / num_classes)
        return FedRCState.first(start, self.num_models, share_CK=share_CK)

    def round(self, state: FedRCState, clients: Clients, rng: Draws) -> FedRCState:
        received = self.broadcast(state, clients)
        # gamma_i and omega_i, then theta_ik
        how = self.how(state, state.weights_of(clients.ids_M))
        updates = clients.train_mixture(received, how, average=clients.weights(self.weights))
        # C(y, k)
        mass_CK = updates.reported("label masses").nan_to_num().double().sum(0).reshape(state.share_CK.shape)
        share_CK = (mass_CK / mass_CK.sum(0)).clamp(min=_LEAST_SHARE).float()
        return state.with_weights(
            clients,
            updates.weight_MK,
            models_KP=updates.averaged(default=state.models_KP),  # theta_k
            share_CK=torch.where(mass_CK.sum(0) > 0, share_CK, state.share_CK),
        )

    def broadcast(self, state: FedRCState, clients: Clients) -> Sent:
        """Sends every client the models and the table C."""
        clients.count_download(state.share_CK.numel())
        return super().broadcast(state, clients)

    def how(self, state: FedRCState, omega_MK: np.ndarray) -> LocalTraining:
        share_MCK = np.broadcast_to(state.share_CK.numpy(), (len(omega_MK), *state.share_CK.shape))
        return LocalTraining(program=LabelFree(*state.share_CK.shape), given={"mixture": omega_MK, "share": share_MCK})
