"""pFedGraph: R. Ye, Z. Ni, F. Wu, S. Chen, Y. Wang. Personalized Federated Learning with Inferred Collaboration Graphs.
ICML 2023, https://proceedings.mlr.press/v202/ye23b.html, Algorithm 1.

    theta_i <- SGD on f_i(theta) - lambda cos(theta, a_i), from a_i            a_i: the aggregate of client i
    d_ij = -cos(theta_i - theta^0, theta_j - theta^0)                          cosines above 0.9 count as 1
    W_i <- argmin over the simplex of sum_j alpha w_j^2 + (d_ij - 2 alpha p_j) w_j,   p_j = n_j / sum n
         = projection of p - d_i / (2 alpha) onto the simplex
    a_i <- sum_j W_ij theta_j

The sum is alpha ||w - (p - d_i / (2 alpha))||^2 plus a constant, so its minimum is a projection, which a sort computes
in O(M log M) for each client (the official code calls a solver of quadratic programs).

The server keeps an aggregate for each client that has taken part. A client without an aggregate starts from the mean of
all models, without the term in lambda; newcomers predict with this mean.

Deviations: the official code adds lambda cos, which moves theta away from the aggregate (`regulariser: away`), contrary
to the text. The direction of a_i replaces the official code's sum of W_ij theta_j / ||theta_j||, which would be another
model to send. With a sampled cohort the graph covers the cohort alone (official code: stops with a KeyError). `head` is
the last layer (official code, `fc`: all fully connected layers). Models longer than `sketch` are projected for the
cosines. Clients are served their aggregates (official code: the model with the best validation accuracy).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import scipy
import torch
from torch import Tensor
from torch.nn.functional import normalize

from cfl_ray.clustering.agglomerative import distances
from cfl_ray.clustering.signature_diagnostics import record_similarity
from cfl_ray.clustering.signatures import sketch_option
from cfl_ray.core.clients import ClientProgram, Clients, Gradient, Held, LocalTraining, Sent, UpdateFeatures
from cfl_ray.core.method import Method, Start, option
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import OwnModelsState
from cfl_ray.core.weights import averages_of

SAME = 0.9  # updates with a higher cosine count as equal


@dataclass(frozen=True)
class Aligned(ClientProgram):
    """The gradient of f(w) - lambda cos(w, a), with the given model a; of f alone if a is zero."""

    lam: float
    only_tensors: ClassVar = True

    def step(self, gradient: Gradient, w: Tensor, held: Held, number: Any) -> Tensor:
        norm = torch.linalg.vector_norm(w, dim=-1, keepdim=True).clamp(min=1e-12)
        unit_w, unit_a = w / norm, normalize(held["a"], dim=-1)
        cosine = (unit_w * unit_a).sum(-1, keepdim=True)
        return gradient(w, 0) - self.lam * (unit_a - cosine * unit_w) / norm


@dataclass(frozen=True, kw_only=True)
class GraphState(OwnModelsState):
    """The aggregates a_i as the clients' models, and the mean of all models as the global model."""

    first_KP: Tensor  # theta^0, (1, P)


@dataclass(frozen=True)
class PFedGraph(Method[GraphState], name="pfedgraph"):
    """For each client an average of the cohort's models, weighted by the similarity of updates."""

    only_synchronous = "its clients start from aggregates of their own, which are averages over all others"
    compares = "cohort"
    only_mean = "every client has weights of its own, by which the server averages"

    alpha: float = option(
        0.8, "alpha: how near weights are to those of the numbers of samples", source="official code", low=1e-9
    )
    lam: float = option(0.01, "lambda: weight of the cosine to the aggregate", source="official code", low=0)
    regulariser: str = option(
        "near",
        "near: the objective has -lambda cos; away: +lambda cos, as in the official code",
        source="paper",
        choices=("near", "away"),
    )
    difference: str = option(
        "all",
        "columns that are compared: all, or head (the last layer)",
        source="official code",
        choices=("all", "head"),
    )
    sketch: int = sketch_option()

    def init(self, start: Start) -> GraphState:
        first_KP = start.new_model(0)[None]
        return GraphState(
            models_KP=first_KP,
            assign_N=start.one_cluster(),
            own_SP=first_KP[:0],
            first_KP=first_KP,
        )

    def round(self, state: GraphState, clients: Clients, rng: Draws) -> GraphState:
        if clients.protection.noise is not None:  # its bounds are of changes
            clients.require_readable("the models")
        # theta_i <- SGD on f_i(theta) - lambda cos(theta, a_i), from a_i
        start, features = clients.send(state.all_models, state.rows_of(clients.ids_M)), self.features(clients.spec)
        how, weight_M = self.training(start), clients.weights()
        updates = clients.train(start, how=how, average=weight_M, features=clients.spec.all)
        valid_M = updates.valid_M
        if not valid_M.any():
            return state
        # d_ij = -cos(theta_i - theta^0, theta_j - theta^0)
        theta_MP = updates.valid_features_MF
        delta_MF = features.of_rows(theta_MP, clients.seed) - features.of_rows(state.first_KP, clients.seed)
        record_similarity(clients, clients.ids_M[valid_M], delta_MF)
        cosine_MM = 1 - scipy.spatial.distance.squareform(distances(delta_MF, "cosine"))
        d_MM = -np.where(cosine_MM > SAME, 1.0, cosine_MM)
        # W_i <- projection of p - d_i / (2 alpha) onto the simplex
        p_M = clients.num_samples_M[valid_M] / clients.num_samples_M[valid_M].sum()
        weight_MM = projected(p_M - d_MM / (2 * self.alpha))
        clients.record("graph", weight_MM, ("clients", "clients"), ids=clients.ids_M[valid_M])
        # a_i <- sum_j W_ij theta_j
        state = state.with_values(clients.ids_M[valid_M], own_SP=averages_of(weight_MM, theta_MP))
        return state.advance(models_KP=updates.averaged(default=state.models_KP))

    def features(self, spec: ParamSpec) -> UpdateFeatures:
        """The columns of a client's model that are compared."""
        head = spec.head.within(0, spec.trained)
        return UpdateFeatures(head if self.difference == "head" else spec.trainable, sketch=self.sketch)

    def training(self, start: Sent) -> LocalTraining:
        """Local training near the aggregates; zeros for clients without an aggregate."""
        if not self.lam:
            return LocalTraining()
        assert start.row_M is not None
        regulariser = Aligned(self.lam if self.regulariser == "near" else -self.lam)
        if start.row_M.all():
            return LocalTraining(program=regulariser, given={"a": start})
        last = len(start.models_KP)
        anchors_KP = torch.cat([start.models_KP, torch.zeros_like(start.models_KP[:1])])
        aggregates = Sent(anchors_KP, np.where(start.row_M == 0, last, start.row_M))
        return LocalTraining(program=regulariser, given={"a": aggregates})

    def serve(self, state: GraphState, clients: Clients) -> Serving:
        return Serving(state.all_models, state.rows_of(clients.ids_M))


def projected(value_XM: np.ndarray) -> np.ndarray:
    """The nearest points of the simplex {w >= 0, sum w = 1} to the rows (X, M)."""
    sorted_XM = -np.sort(-value_XM, axis=1)
    excess_XM = (np.cumsum(sorted_XM, 1) - 1) / np.arange(1, value_XM.shape[1] + 1)
    support_X = (sorted_XM > excess_XM).sum(1)  # the entries that stay above 0
    return np.maximum(value_XM - excess_XM[np.arange(len(value_XM)), support_X - 1][:, None], 0)
