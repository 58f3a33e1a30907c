"""FedCCFA: J. Chen, J. Xue, Y. Wang, Z. Liu, L. Huang. Classifier Clustering and Feature Alignment for Federated
Learning under Distributed Concept Drift. NeurIPS 2024, arXiv:2410.18478.

A model is a shared extractor theta, with features g(x; theta), under a classifier h_i of each client, a row per label.

    v_i <- SGD on h^0 under theta, on a balanced part of client i's samples   for comparison; h^0: the first classifier
    h_i <- SGD_i on h_i alone, for one epoch
    theta_i <- SGD_i on theta alone, after round 20 with the further loss
        (H_i / gamma) CE(cos(g(x; theta), z_i1 .. z_iC) / tau, y)             H_i: entropy of the client's labels
    z_iy <- mean of g(x; theta_i) over its samples of label y
    theta <- Avg of theta_i
    for each label y: groups of the clients of the round by DBSCAN (eps, min_samples 1) of
        d_ij = mean over the other clients z of |cos(v_iy, v_zy) - cos(v_jy, v_zy)|           MADD
        h_iy, z_iy <- means of h_jy, z_jy over the group of i

A client that never took part has theta and the average of the classifiers.

Deviations: in its first round h_i starts from that average (official code: from v_i). For each label, only clients with
samples of it are compared (official code: every client has all labels). If fewer than three clients have a label, d_ij
is not defined, and they keep their own rows. The balanced part is the first 5, or fewer, samples of each label
(official code: random samples). DBSCAN with min_samples 1 gives the connected parts of the graph of d_ij <= eps. The
official code replaces the first client's prototypes by the sum of all before the means over groups: its `+=` changes
them in place. Weight decay by an optimiser other than SGD acts on both parts in both trainings, as in FedRep.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize, one_hot

from cfl_ray.clustering.agglomerative import dbscan, mean_difference_of_cosines
from cfl_ray.core.classifier import Classifier, ClassifiersState, Prototypes
from cfl_ray.core.clients import Batch, ClientData, Clients, ClientState, Held, LocalTraining
from cfl_ray.core.method import Method, Start, option
from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.serving import Serving
from cfl_ray.methods.fedas import OWN, check_classifier
from cfl_ray.methods.fedrep import OnlyColumns, training_of

RECEIVED = ClientState("model", private=False, resumed=Columns(()))  # training starts from the received model


@dataclass(frozen=True, kw_only=True)
class LabelGroupsState(ClassifiersState):
    """The classifiers h_i and the prototypes z_iy of the clients that have taken part, beside the average model."""

    prototype_SCF: Tensor  # float32; NaN: none
    first_CF: Tensor  # float32: h^0

    @classmethod
    def peak_floats(cls, spec: ParamSpec, seen: int, cohort: int, evaluated: int) -> int:
        kept = Classifier.of(spec)
        prototypes = 4 * seen * kept.num_classes * kept.num_features
        return super().peak_floats(spec, seen, cohort, evaluated) + prototypes

    def prototypes_of(self, ids_M: np.ndarray) -> Tensor:
        """z_iy, (M, C, F); NaN for a client without prototypes."""
        none_1CF = torch.full((1, *self.prototype_SCF.shape[1:]), torch.nan)
        return torch.cat([none_1CF, self.prototype_SCF])[torch.from_numpy(self.positions(ids_M) + 1)]


@dataclass(frozen=True)
class BalancedClassifier:
    """v_i, (C, F + 1), and the client's number of samples of each label, (C,)."""

    classifier: Classifier
    epochs: int
    lr: float
    momentum: float
    weight_decay: float
    per_class: int
    reads_features: ClassVar[bool] = True

    def floats(self, inputs: int, classes: int) -> int:
        return self.classifier.num_classes * (self.classifier.num_features + self.classifier.has_bias + 1)

    def __call__(self, client: ClientData, model_P: Tensor) -> Tensor:
        y_n, v_CF = client.y.cpu(), self.classifier.rows(model_P.cpu())
        label_nC = one_hot(y_n, len(v_CF))
        count_C = label_nC.sum(0)
        each = min(int(count_C[count_C > 0].min()), self.per_class)
        first_n = label_nC.cumsum(0)[torch.arange(len(y_n)), y_n] <= each  # of its label
        x_bF, y_bC = client.features(model_P)[first_n], label_nC[first_n].float()
        x_bF = torch.nn.functional.pad(x_bF, (0, int(self.classifier.has_bias)), value=1.0)
        velocity_CF = torch.zeros_like(v_CF)
        for _ in range(self.epochs):
            gradient_CF = ((x_bF @ v_CF.T).softmax(1) - y_bC).T @ x_bF / len(x_bF)
            velocity_CF = self.momentum * velocity_CF + gradient_CF + self.weight_decay * v_CF
            v_CF = v_CF - self.lr * velocity_CF
        return torch.cat([v_CF.reshape(-1), count_C.float()])


@dataclass(frozen=True)
class AlignedColumns(OnlyColumns):
    """SGD on some columns, on loss + (H_i / gamma) CE(cos(g(x), z_i1 .. z_iC) / tau, y).

    The second term is over the samples whose label has a prototype. Given: z_iy, (C, F), NaN for none, and H_i / gamma.
    """

    temperature: float  # tau
    one_by_one: ClassVar = True  # the samples with a prototype are selected

    def loss(self, batch: Batch, held: Held) -> Tensor:
        prototype_CF, y_B = held["prototypes"], batch.y
        known_C = torch.isfinite(prototype_CF).all(1)
        known_B = known_C[y_B]
        if not known_B.any():
            return batch.loss
        cosine_BC = normalize(batch.features[known_B], dim=1) @ normalize(prototype_CF.nan_to_num(), dim=1).T
        logits_BC = (cosine_BC / self.temperature).masked_fill(~known_C, -torch.inf)
        return batch.loss + held["weight"] * cross_entropy(logits_BC, y_B[known_B])


@dataclass(frozen=True)
class FedCCFA(Method[LabelGroupsState], name="fedccfa"):
    """A shared extractor; the rows of the clients' classifiers are averaged within groups of clients for each label."""

    compares = "cohort"
    only_mean = "classifiers are averaged within groups of clients for each label"
    needs_classes = "its classifiers are compared by label"
    needs_fresh_momentum = "classifier and extractor are trained one after the other, with a buffer each"

    eps: float = option(0.1, "eps: largest d_ij of neighbours", source="official code", low=0)
    balanced_epochs: int = option(5, "epochs on the balanced part", source="official code", low=1, high=100_000)
    balanced_lr: float = option(0.1, "learning rate on the balanced part", source="official code", low=0)
    per_class: int = option(5, "most samples of a label in the balanced part", source="official code", low=1)
    classifier_epochs: int = option(1, "epochs of h_i", source="official code", low=1, high=100_000)
    classifier_lr: float = option(0.1, "learning rate of h_i", source="official code", low=0)
    align_after: int = option(20, "rounds without the loss on features", source="official code", low=0)
    gamma: float = option(
        20.0, "gamma: divisor of the entropy; inf: no loss on features", source="official code", low=1e-6
    )
    temperature: float = option(0.1, "tau: temperature of the loss on features", source="official code", low=1e-6)

    def check_model(self, spec: ParamSpec) -> None:
        check_classifier(self, spec)

    def init(self, start: Start) -> LabelGroupsState:
        first_KP, classifier = start.new_model(0)[None], Classifier.of(start.spec)
        first_CF = classifier.rows(first_KP[0])
        return LabelGroupsState(
            models_KP=first_KP,
            assign_N=start.one_cluster(),
            row_SCF=first_CF.new_zeros(0, *first_CF.shape),
            prototype_SCF=torch.zeros(0, classifier.num_classes, classifier.num_features),
            first_CF=first_CF,
        )

    def round(self, state: LabelGroupsState, clients: Clients, rng: Draws) -> LabelGroupsState:
        clients.require_readable("the classifiers")
        spec, classifier = clients.spec, Classifier.of(clients.spec)
        count = classifier.num_classes
        received = clients.send(*state.models_of(clients.ids_M, spec))
        # v_i <- SGD on h^0 under theta, on a balanced part
        local, compared_KP = clients.local, state.models_KP.clone()
        classifier.put(compared_KP, state.first_CF[None])
        balanced = BalancedClassifier(
            classifier, self.balanced_epochs, self.balanced_lr, local.momentum, local.weight_decay, self.per_class
        )
        balanced_MX, compared_M = clients.describe(balanced, clients.known_models(compared_KP))
        v_MCF, count_MC = balanced_MX[:, :-count].reshape(len(clients), count, -1), balanced_MX[:, -count:]
        # h_i <- SGD_i on h_i alone
        how = training_of(spec.head, clients, self.classifier_epochs)
        how = replace(how, sgd=replace(how.sgd or local, lr=self.classifier_lr))
        trained_M = clients.train(received, client_state=RECEIVED, how=how, keep_as_local_model=False).valid_M
        # theta_i <- SGD_i on theta alone
        how = training_of(spec.base, clients)
        if clients.round > self.align_after and self.gamma < np.inf:
            known_M = state.positions(clients.ids_M) >= 0
            clients.select(known_M).count_download(count * classifier.num_features)
            how = self.aligned(how, state, clients, count_MC)
        updates = clients.train(
            received,
            client_state=OWN,
            how=how,
            average=clients.weights() * trained_M,  # others would go on from their last round
            features=spec.head,
            keep_as_local_model=trained_M,
        )
        # z_iy <- mean of g(x; theta_i)
        floats = count * classifier.num_features  # without the counts, which are with v_i
        prototype_MX, described_M = clients.describe(Prototypes(classifier), received, client_state=OWN, floats=floats)
        # theta <- Avg of theta_i;  h_iy, z_iy <- means over the group of i
        valid_M = compared_M & trained_M & described_M & updates.valid_M
        state = state.advance(models_KP=updates.averaged(default=state.models_KP))
        if not valid_M.any():
            return state
        ids_m = clients.ids_M[valid_M]
        head_mX = updates.valid_features_MF[torch.from_numpy(valid_M[updates.valid_M])]
        row_mCF = head_mX[:, classifier.places_in_head()]
        z_mCF = prototype_MX[valid_M].reshape(len(ids_m), count, -1)[..., :-1].clone()
        group_mC = label_groups(v_MCF[valid_M], count_MC[valid_M] > 0, self.eps)
        for c in range(count):
            for group in np.unique(group_mC[group_mC[:, c] >= 0, c]):
                members = torch.from_numpy(group_mC[:, c] == group)
                row_mCF[members, c] = row_mCF[members, c].mean(0)
                z_mCF[members, c] = z_mCF[members, c].mean(0)
        z_mCF[torch.from_numpy(group_mC < 0)] = torch.nan
        clients.record("label_groups", group_mC.max(0) + 1, ("labels",))
        return state.with_values(ids_m, row_SCF=row_mCF, prototype_SCF=z_mCF)

    def aligned(self, how: LocalTraining, state: LabelGroupsState, clients: Clients, count_MC: Tensor) -> LocalTraining:
        """The training `how` with the loss on features, given the prototypes and the entropy of each client."""
        share_MC = count_MC / count_MC.sum(1, keepdim=True).clamp(min=1)
        weight_M = torch.special.entr(share_MC).sum(1) / self.gamma
        columns = clients.spec.base.within(0, clients.spec.trained)
        program = AlignedColumns(columns, clients.local.weight_decay, self.temperature)
        return replace(
            how, program=program, given={"prototypes": state.prototypes_of(clients.ids_M), "weight": weight_M}
        )

    def serve(self, state: LabelGroupsState, clients: Clients) -> Serving:
        return Serving(*state.models_of(clients.ids_M, clients.spec), client_state=clients.norms_in(OWN))


def label_groups(v_MCF: Tensor, has_MC: Tensor, eps: float) -> np.ndarray:
    """The group of each client for each label, from 0, int64 (M, C); -1 for a client without samples of the label."""
    group_MC = np.full(has_MC.shape, -1, np.int64)
    for c in range(has_MC.shape[1]):
        here = np.flatnonzero(has_MC[:, c].numpy())
        if len(here) < 3:
            group_MC[here, c] = np.arange(len(here))
        else:
            d_mm = scipy.spatial.distance.squareform(mean_difference_of_cosines(v_MCF[torch.from_numpy(here), c]))
            group_MC[here, c] = dbscan(d_mm, eps)
    return group_MC
