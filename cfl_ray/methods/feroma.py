"""Feroma: M. Li, D. Fenoglio, M. Gjoreski, M. Langheinrich. Federated Learning with Profile Mapping under Distribution
Shifts and Drifts. ICLR 2026, arXiv:2602.07671.

    rounds of FedAvg; the global model is then kept as the extractor of profiles
    c_i <- profile of client i's present data                       FLUX's descriptor, under the extractor
    w_ij <- softmax over j of -||c_i - p_j||                        p_j: last profile of each client j that has one
    theta_i <- sum_j n_j w_ij theta_j / sum_j n_j w_ij              theta_j: its last model, n_j its samples
    theta_i <- SGD_i(theta_i);  p_i <- c_i

Parents j further than `threshold` are left out; a client without a parent starts from the global model, the average of
the latest round. The server keeps p_j, theta_j and n_j by the ids of the clients. Clients, newcomers among them,
predict with the model of the nearest last profile, by the part of it that needs no labels, of their present data.

Deviations: distances are between profiles scaled in blocks, as in FLUX (`blocks`), and profiles are of all training
samples, in every round (official code, dariofenoglio98/FEROMA, 8109aca: of random halves of validation data). That code
has weights of the inverse distance, without threshold (`weighting: inverse`), with which a client whose data stay keeps
to its own model. It stores parents in the order in which results arrived and multiplies them with the results of the
next round, so that weights belong to other clients unless the order repeats.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cfl_ray.clustering.agglomerative import centre_distances, nearest_centre
from cfl_ray.core.classifier import Classifier
from cfl_ray.core.clients import Clients
from cfl_ray.core.method import Method, Start, option, weights_option
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import OwnModelsState
from cfl_ray.core.weights import averages_of
from cfl_ray.methods.fedas import check_classifier
from cfl_ray.methods.flux import Descriptor, blocks_option, dimensions_of, scaled, scales


@dataclass(frozen=True, kw_only=True)
class FeromaState(OwnModelsState):
    """The extractor, and of each client that has taken part after the first phase its last model and profile."""

    of_each_client = "a model and a profile"

    extractor_KP: Tensor  # (1, P), after the first phase
    profile_SF: Tensor  # float32
    samples_S: np.ndarray  # float64: n_j


@dataclass(frozen=True)
class Feroma(Method[FeromaState], name="feroma"):
    """Each client starts from a mean of the clients' last models, weighted by the distances of their profiles."""

    placement = "the last model of the client with the nearest profile of its inputs, which needs no labels"
    phases = {"warmup": ("federate",), "federate": ()}
    only_synchronous = "its clients start from models of their own, which are averages over all others"
    compares = "participants"
    only_mean = "every client has weights of its own, by which the server averages"
    needs_classes = "its profiles have a part for each label"

    warmup_rounds: int = option(5, "rounds of FedAvg before the first profiles", source="official code", low=1)
    weighting: str = option(
        "softmax",
        "weights of parents: softmax of negative distances, or inverse distances",
        source="paper; official code: inverse",
        choices=("softmax", "inverse"),
    )
    threshold: float | None = option(
        None, "tau: largest distance of a parent, of scaled profiles; null: no limit", source="paper", low=0
    )
    blocks: str = blocks_option()
    weights: str = weights_option()  # of the global model

    def check_model(self, spec: ParamSpec) -> None:
        check_classifier(self, spec)

    def init(self, start: Start) -> FeromaState:
        models_KP, num_classes = start.new_model(0)[None], Classifier.of(start.spec).num_classes
        return FeromaState(
            models_KP=models_KP,
            assign_N=start.one_cluster(),
            phase="warmup",
            own_SP=models_KP[:0],
            extractor_KP=models_KP[:0],
            profile_SF=torch.zeros(0, 2 * dimensions_of(start.spec) * (num_classes + 1)),
            samples_S=np.zeros(0),
        )

    def round(self, state: FeromaState, clients: Clients, rng: Draws) -> FeromaState:
        clients.require_readable("the models")  # of all rounds after the first phase
        if state.phase == "warmup":
            updates = clients.train(clients.send(state.models_KP), average=clients.weights(self.weights))
            models_KP = updates.averaged(default=state.models_KP)
            if clients.round < self.warmup_rounds:
                return state.advance(models_KP=models_KP)
            return state.advance(models_KP=models_KP, extractor_KP=models_KP, phase="federate")
        # c_i <- profile of client i's present data
        if len(state.seen_S):  # in the first of these rounds the extractor is the global model, which all receive
            clients.select(state.positions(clients.ids_M) < 0).count_download(clients.spec.sent())
        descriptor = Descriptor.of(clients, blocks=self.blocks)
        profile_MF, valid_M = clients.describe(descriptor, clients.known_models(state.extractor_KP))
        clients, profile_MF = clients.select(valid_M), profile_MF[torch.from_numpy(valid_M)]
        if not len(clients):
            return state
        # theta_i <- sum_j n_j w_ij theta_j / sum_j n_j w_ij
        theta_MP = averages_of(self.shares(state, profile_MF, descriptor), state.all_models)
        # theta_i <- SGD_i(theta_i)
        start = clients.send(theta_MP, np.arange(len(clients)))
        updates = clients.train(start, average=clients.weights(self.weights), features=clients.spec.all)
        trained_M = updates.valid_M
        state = state.with_values(
            clients.ids_M[trained_M],
            own_SP=updates.valid_features_MF,
            profile_SF=profile_MF[torch.from_numpy(trained_M)],
            samples_S=clients.num_samples_M[trained_M].astype(np.float64),
        )
        return state.advance(models_KP=updates.averaged(default=state.models_KP))

    def shares(self, state: FeromaState, profile_MF: Tensor, descriptor: Descriptor) -> np.ndarray:
        """Share of each of `state.all_models` in theta_i, float64 (M, 1 + S); column 0 is the global model."""
        share_MX = np.zeros((len(profile_MF), 1 + len(state.seen_S)))
        if len(state.seen_S):
            distance_MS = centre_distances(*scaled_together(profile_MF, state.profile_SF, descriptor), "l2")
            if self.weighting == "inverse":
                share_MX[:, 1:] = 1 / (distance_MS + 1e-8)
            else:  # the nearest parent is taken out of the exponent, which the shares do not depend on
                share_MX[:, 1:] = np.exp(distance_MS.min(1, keepdims=True) - distance_MS)
            share_MX[:, 1:] *= state.samples_S
            if self.threshold is not None:
                share_MX[:, 1:][distance_MS > self.threshold] = 0
        alone_M = share_MX.sum(1) == 0
        share_MX[alone_M, 0] = 1
        return share_MX / share_MX.sum(1, keepdims=True)

    def serve(self, state: FeromaState, clients: Clients) -> Serving:
        row_M = clients.first_row()
        if len(state.seen_S) and len(clients):
            descriptor = Descriptor.of(clients, by_label=False)
            profile_MF, valid_M = clients.describe(descriptor, clients.known_models(state.extractor_KP))
            if valid_M.any():
                some = torch.from_numpy(valid_M)
                parent_SF = state.profile_SF[:, : profile_MF.shape[1]]
                near_MF, parent_SF = scaled_together(profile_MF[some], parent_SF, descriptor)
                row_M[valid_M] = nearest_centre(near_MF, parent_SF, "l2")[0] + 1
        return Serving(state.all_models, row_M)


def scaled_together(profile_MF: Tensor, parent_SF: Tensor, descriptor: Descriptor) -> tuple[Tensor, Tensor]:
    """Profiles of clients and of parents, in blocks scaled such that the values of both are from 0 to 1."""
    both_XF, edges = torch.cat([profile_MF, parent_SF]), descriptor.edges(profile_MF.shape[1])
    both_XF = scaled(both_XF, edges, scales(both_XF, edges))
    return both_XF[: len(profile_MF)], both_XF[len(profile_MF) :]
