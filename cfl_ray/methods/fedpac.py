"""FedPAC: J. Xu, X. Tong, S.-L. Huang. Personalized Federated Learning with Feature Alignment and Classifier
Collaboration. ICLR 2023, arXiv:2306.11867, Algorithm 1.

A model is a shared body with features f(x; phi), under a head h_i of each client, a row for each label.

    mu_iy <- mean of f(x; phi) over i's samples of label y;  p_iy: share of the label
    v_i = (sum_y p_iy mean of ||f||^2 - sum_y p_iy^2 ||mu_iy||^2) / n_i,  H_iy = p_iy mu_iy
    h_i <- SGD_i on h_i alone, for one epoch
    phi_i <- SGD_i on phi alone: CE + lambda mean of (f(x) - gbar_y)^2         mu_iy without a gbar_y; from round 2 on
    c_iy <- mean of f(x; phi_i)
    phi <- sum_i n_i phi_i / sum_i n_i;  gbar_y <- sum_i n_iy c_iy / sum_i n_iy
    a_i <- argmin over the simplex of a^T (diag(v) + D_i D_i^T) a              row j of D_i: H_i - H_j
    h_i <- sum_j a_ij h_j                                                      without a_ij < 1e-3, unless all are

The server keeps h_i of the clients that have taken part, and sends it with phi; clients predict with both. P-local is
measured after the training. A client that never took part has phi and the average of the heads.

The matrix Q is a Gram matrix with a positive diagonal. Its minimum over the simplex is b / sum b for the minimum of
b^T Q b - 2 sum b over b >= 0, a problem of non-negative least squares with the Cholesky factor of Q. The official code
(JianXu95/FedPAC, 5770f4f) calls a solver of quadratic programs, after a repair of eigenvalues.

Deviations: H follows from mu_iy and the numbers n_iy, which are uploaded. Only clients of the round are mixed. Weight
decay by an optimiser other than SGD acts on both parts in both trainings, as in FedRep. The official code does not say
which of its two accuracies, before or after the training, the paper prints. In PFLlib (d832e76) a client's head is
mixed from heads that are already mixed, since they are replaced in place, and prototypes are averaged without weights.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import scipy
import torch
from torch import Tensor

from cfl_ray.core.classifier import Classifier, ClassifiersState, Prototypes
from cfl_ray.core.clients import Batch, ClientData, Clients, Held, LocalTraining
from cfl_ray.core.method import Method, Start, option
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.serving import Serving
from cfl_ray.core.weights import averages_of
from cfl_ray.methods.fedas import OWN, check_classifier
from cfl_ray.methods.fedccfa import RECEIVED
from cfl_ray.methods.fedproto import averaged_prototypes, prototypes_of, squared_distances
from cfl_ray.methods.fedrep import OnlyColumns, training_of

_LEAST_EIGENVALUE = 1e-12  # of the trace


@dataclass(frozen=True, kw_only=True)
class CollaborationState(ClassifiersState):
    """The heads h_i of the clients that have taken part, and the prototypes gbar_y, beside the average model."""

    prototype_CF: Tensor  # float32; NaN: none yet


@dataclass(frozen=True)
class Statistics:
    """For `Clients.describe`: mu_iy and n_iy as of `Prototypes`, then v_i."""

    prototypes: Prototypes
    reads_features: ClassVar[bool] = True

    def floats(self, inputs: int, classes: int) -> int:
        return self.prototypes.floats(inputs, classes) + 1

    def __call__(self, client: ClientData, model_P: Tensor) -> Tensor:
        feature_nF = client.features(model_P).double()
        table_CF = self.prototypes.of(feature_nF, client.y.cpu())
        p_C = table_CF[:, -1] / len(client.y)
        v = feature_nF.square().sum(1).mean() - (p_C.square() * table_CF[:, :-1].square().sum(1)).sum()
        return torch.cat([table_CF.reshape(-1), v[None] / len(client.y)])


@dataclass(frozen=True)
class NearPrototypesColumns(OnlyColumns):
    """SGD on some columns, on loss + lambda (f(x) - gbar_y)^2. Given: the prototypes (C, F)."""

    lam: float

    def loss(self, batch: Batch, held: Held) -> Tensor:
        return batch.loss + self.lam * batch.mean(squared_distances(batch, held["global"]))


@dataclass(frozen=True)
class FedPAC(Method[CollaborationState], name="fedpac"):
    """A shared body with aligned features; each client's head is a mixture of the heads that suits its data."""

    compares = "cohort"
    only_mean = "heads are mixed for each client"
    needs_classes = "it aligns mean features of each label"
    needs_fresh_momentum = "head and body are trained one after the other, with a buffer each"

    lam: float = option(1.0, "lambda: weight of the distance to the prototypes", source="official code", low=0)
    head_epochs: int = option(1, "epochs of h_i", source="official code", low=1, high=100_000)
    head_lr: float = option(0.1, "learning rate of h_i", source="official code", low=0)
    least: float = option(
        1e-3, "weights a_ij below this are 0, unless all of a client are", source="official code", low=0, high=1
    )

    def check_model(self, spec: ParamSpec) -> None:
        check_classifier(self, spec)

    def init(self, start: Start) -> CollaborationState:
        first_KP, classifier = start.new_model(0)[None], Classifier.of(start.spec)
        return CollaborationState(
            models_KP=first_KP,
            assign_N=start.one_cluster(),
            row_SCF=classifier.rows(first_KP)[:0],
            prototype_CF=torch.full((classifier.num_classes, classifier.num_features), torch.nan),
        )

    def round(self, state: CollaborationState, clients: Clients, rng: Draws) -> CollaborationState:
        clients.require_readable("the heads")
        spec, classifier = clients.spec, Classifier.of(clients.spec)
        prototypes, floats = Prototypes(classifier), classifier.num_classes * classifier.num_features
        received = clients.send(*state.models_of(clients.ids_M, spec))
        # mu_iy, v_i
        statistic_MX, described_M = clients.describe(Statistics(prototypes), received)
        if not described_M.any():
            return state
        mu_MCF, count_MC = prototypes_of(statistic_MX[:, :-1], classifier)
        # h_i <- SGD_i on h_i alone
        how = training_of(spec.head, clients, self.head_epochs)
        how = replace(how, sgd=replace(how.sgd or clients.local, lr=self.head_lr))
        trained_M = clients.train(received, client_state=RECEIVED, how=how, keep_as_local_model=False).valid_M
        # phi_i <- SGD_i on phi alone
        updates = clients.train(
            received,
            client_state=OWN,
            how=self.near_prototypes(state, clients, mu_MCF),
            average=clients.weights() * trained_M,  # others would go on from their last round
            features=spec.head,
            keep_as_local_model=trained_M,
        )
        # c_iy <- mean of f(x; phi_i)
        described_MX, again_M = clients.describe(prototypes, received, client_state=OWN, floats=floats)
        # phi <- sum_i n_i phi_i / sum_i n_i;  gbar_y <- sum_i n_iy c_iy / sum_i n_iy
        state = state.advance(models_KP=updates.averaged(default=state.models_KP))
        valid_M = described_M & trained_M & again_M & updates.valid_M
        if not valid_M.any():
            return state
        c_mCF, count_mC = prototypes_of(described_MX[valid_M], classifier)
        state = state.advance(prototype_CF=averaged_prototypes(c_mCF, count_mC, state.prototype_CF))
        # a_i <- argmin a^T (diag(v) + D_i D_i^T) a;  h_i <- sum_j a_ij h_j
        p_mC = count_MC[valid_M] / count_MC[valid_M].sum(1, keepdim=True)
        h_mX = (p_mC[..., None] * mu_MCF[valid_M]).reshape(len(p_mC), -1)
        weight_mm = collaboration(statistic_MX[valid_M, -1].numpy(), h_mX.numpy(), self.least)
        ids_m = clients.ids_M[valid_M]
        clients.record("graph", weight_mm, ("clients", "clients"), ids=ids_m)
        head_mX = updates.valid_features_MF[torch.from_numpy(valid_M[updates.valid_M])]
        row_mX = head_mX[:, classifier.places_in_head().reshape(-1)]
        mixed_mX = averages_of(weight_mm, row_mX)
        return state.with_values(ids_m, row_SCF=mixed_mX.reshape(len(ids_m), *state.row_SCF.shape[1:]))

    def near_prototypes(self, state: CollaborationState, clients: Clients, mu_MCF: Tensor) -> LocalTraining:
        """The training of the bodies, near the prototypes if there are any yet."""
        how, known_CF = training_of(clients.spec.base, clients), state.prototype_CF.isfinite()
        if not (self.lam and known_CF.any()):
            return how
        clients.count_download(int(known_CF.sum()))
        columns = clients.spec.base.within(0, clients.spec.trained)
        program = NearPrototypesColumns(columns, clients.local.weight_decay, self.lam)
        return replace(how, program=program, given={"global": torch.where(known_CF, state.prototype_CF, mu_MCF)})

    def serve(self, state: CollaborationState, clients: Clients) -> Serving:
        return Serving(*state.models_of(clients.ids_M, clients.spec), client_state=clients.norms_in(OWN))


def collaboration(v_M: np.ndarray, h_MX: np.ndarray, least: float) -> np.ndarray:
    """The weights a_i as row i, (M, M): minima of a^T (diag(v) + D_i D_i^T) a over the simplex.

    Weights below `least` are 0, unless all weights of a row are below it.
    """
    v_M, gram_MM = np.asarray(v_M, np.float64), np.asarray(h_MX, np.float64) @ np.asarray(h_MX, np.float64).T
    weight_MM = np.empty_like(gram_MM)
    for i, g_M in enumerate(gram_MM):
        q_MM = gram_MM[i, i] - g_M[:, None] - g_M[None] + gram_MM + np.diag(v_M)
        # a is the minimum b >= 0 of b^T q b / 2 - sum of b, scaled: ||f b - f^-T 1||^2 with q = f^T f. Eigenvalues are
        # 0 or, by rounding, below if v_i is 0, as for equal samples of one label
        value_M, vector_MM = np.linalg.eigh(q_MM / max(np.trace(q_MM), 1e-300))
        root_M = np.sqrt(np.maximum(value_M, _LEAST_EIGENVALUE))
        b_M = scipy.optimize.nnls(root_M[:, None] * vector_MM.T, vector_MM.sum(0) / root_M)[0]
        a_M = b_M / b_M.sum()
        a_M = np.where((a_M < least) & (a_M.max() >= least), 0.0, a_M)
        weight_MM[i] = a_M / a_M.sum()
    return weight_MM
