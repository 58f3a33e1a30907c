"""CGPFL: X. Tang, S. Guo, J. Guo. Personalized Federated Learning with Contextualized Generalization. IJCAI 2022,
arXiv:2106.13044. The local problem is pFedMe's (C. T. Dinh, N. H. Tran, T. D. Nguyen. NeurIPS 2020, arXiv:2006.08848,
Algorithm 1).

    y_i <- Omega_{c(i)};  R_l times:  theta_i <- S_l SGD steps on f_i + (lambda / 2) ||theta - y_i||^2;
                                      y_i <- y_i - eta lambda (y_i - theta_i)
    c <- k-means of the uploaded models;   Omega_k <- (1 - beta) Omega_k + beta mean of y_i over c(i) = k
    simple:  theta_i <- SGD on f_i + (mu / 2) ||theta - Omega_{c(i)}||^2 from the client's own theta_i;
             Omega_k <- mean of theta_i

theta_i stays with the client, which predicts with it and continues from it in its next round; a client that never took
part predicts with Omega.

Deviations: written from memory of the paper. The clients upload a single model, y_i (`simple`: theta_i), and are
clustered by it. Every SGD step takes a new batch. lambda is at most 1 / eta; with a larger lambda, a step would
overshoot its anchor. k-means continues from the present centres; their number is at most that of the clients in the
first round. K does not change (the paper has a heuristic that changes it). A client that never took part starts from
the mean of the centres. Features longer than `sketch` are projected.
"""

from dataclasses import dataclass

import torch

from cfl_ray.clustering.kmeans import kmeans
from cfl_ray.clustering.signatures import sketch_option
from cfl_ray.core.clients import Clients, ClientState, LocalTraining, Proximal, UpdateFeatures
from cfl_ray.core.method import Method, Start, option, weights_option
from cfl_ray.core.rng import Draws
from cfl_ray.core.rounds import placed, row_or_last, with_mean
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import State
from cfl_ray.core.weights import cluster_weights

PERSONAL = ClientState("personal", private=False)  # theta_i


@dataclass(frozen=True)
class CGPFL(Method[State], name="cgpfl"):
    """Personal models with a proximal term to the context model of their cluster."""

    placement = "the mean of the context models, until its first round"
    without_cluster = "the mean of the context models"
    phases = {"cluster": ("federate",), "federate": ()}

    num_clusters: int = option(4, "K, number of context models", source="ours", low=1)
    mode: str = option(
        "full",
        "full: y_i follows theta_i, as in pFedMe; simple: theta_i near Omega, centres are means of theta_i",
        source="paper",
        choices=("full", "simple"),
    )
    lam: float = option(15.0, "lambda: proximal term of theta_i to y_i (full; grid 1..20)", source="pFedMe", low=0)
    inner_steps: int = option(5, "S_l: SGD steps between two moves of y_i (full)", source="pFedMe", low=1)
    beta: float = option(1.0, "beta: how far a context model moves to its cluster's mean", source="ours", low=0, high=1)
    mu: float = option(0.1, "mu: proximal term of theta_i to Omega (simple)", source="ours", low=0)
    sketch: int = sketch_option()
    weights: str = weights_option()

    @property
    def needs_sgd(self) -> str:
        return "mode: full solves its inner problem by SGD" if self.mode == "full" else ""

    @property
    def needs_mean(self) -> str:
        return "beta below 1 mixes the mean with the model before" if self.beta < 1 else ""

    def init(self, start: Start) -> State:
        return State(models_KP=start.new_model(0)[None], assign_N=start.unassigned(), phase="cluster")

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        # theta_i, and with `full` y_i
        context = clients.send(with_mean(state.models_KP), row_or_last(state, clients))  # Omega_{c(i)}
        eta = clients.local.lr
        if self.mode == "full":
            lam = min(self.lam, 1 / eta) if eta else self.lam
            proximal = Proximal(lam, context, follow=eta, every=self.inner_steps)
        else:
            proximal = Proximal(self.mu, context)
        features = UpdateFeatures(clients.spec.trainable, sketch=self.sketch)
        updates = clients.train(
            context,
            how=LocalTraining(proximal=[proximal]),
            client_state=PERSONAL,
            features=features,
            defer_aggregation=True,
        )
        if not updates.valid_M.any():
            return state
        # c <- k-means of the uploaded models
        upload_MF = updates.valid_features_MF
        if state.phase == "cluster":
            cluster_M, centre_KF = kmeans(upload_MF, self.num_clusters, rng.seed)
            state = state.advance(models_KP=state.models_KP.repeat(len(centre_KF), 1), phase="federate")
        else:
            centre_KF = features.of_rows(state.models_KP, clients.seed)
            cluster_M, _ = kmeans(upload_MF, state.num_clusters, rng.seed, centres_KF=centre_KF)
        because = {"clients": len(cluster_M), "num_clusters": state.num_clusters}
        state = placed(state, clients, clients.ids_M[updates.valid_M], cluster_M, **because)
        # Omega_k <- (1 - beta) Omega_k + beta mean of y_i over c(i) = k
        weight_KM = cluster_weights(state.assign_N[clients.ids_M], clients.weights(self.weights), state.num_clusters)
        mean_KP = clients.average(updates, weight_KM).averaged(default=state.models_KP)
        return state.advance(models_KP=torch.lerp(state.models_KP, mean_KP, self.beta))

    def join(self, state: State, clients: Clients) -> State:
        """Newcomers start from the mean of all context models, and are clustered in their first round."""
        return state

    def serve(self, state: State, clients: Clients) -> Serving:
        return Serving(with_mean(state.models_KP), row_or_last(state, clients), client_state=PERSONAL)
