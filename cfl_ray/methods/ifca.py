"""IFCA: A. Ghosh, J. Chung, D. Yin, K. Ramchandran. An Efficient Framework for Clustered Federated Learning. NeurIPS
2020, arXiv:2006.04088, Algorithm 1 with model or gradient averaging, and weight sharing (Section 5).

    j_i <- argmin_j f_i(theta_j)                     each client, on its training data, among the K models it received
    W_i <- SGD_i(theta_{j_i});       theta_j <- Avg of W_i over the clients that chose j            model averaging
    g_i = grad f_i(theta_{j_i});     theta_j <- theta_j - (gamma / m) sum of g_i over these clients gradient averaging

m is the number of participants with a valid result. A model that no client chose does not change. The K models start
from independent initialisations, since equal models would never separate. With weight sharing they have a common base,
averaged over all participants, and separate heads.

Deviations: if losses are equal, the client chooses the lowest j. The base of weight sharing is not trained beforehand.
The choice j_i is counted as an upload of a number with model averaging, and is not counted with gradient averaging. In
warm-up rounds clients do not choose, so traffic is a model down and no choice. With gradient averaging, g_i includes
`local.weight_decay`.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.clients import Clients, LocalTraining, Sent, Updates
from cfl_ray.core.method import Method, Start, average_option, option, weights_option
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.rounds import placed
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import UNASSIGNED, State
from cfl_ray.core.weights import cluster_weights


@dataclass(frozen=True)
class IFCA(Method[State], name="ifca"):
    """K models; in every round each client trains the model that fits its data best."""

    placement = "the model with the least loss on its training samples, chosen anew whenever it predicts"
    phases = {"warmup": ("federate",), "federate": ()}

    num_clusters: int = option(4, "K, number of cluster models", source="paper", low=1)
    average: str = average_option()
    share_base: bool = option(
        False, "weight sharing: one base for all clusters, a head for each", source="paper: FEMNIST only"
    )
    warmup_rounds: int = option(
        0,
        "rounds in which clients train by a random equal split, so that no model attracts every client "
        "(official FEMNIST code: 20)",
        source="official FEMNIST code; off by default",
        low=0,
    )
    select: str = option(
        "train_loss",
        "how clients choose; test_accuracy leaks labels, and is there to reproduce results that did so (PACFL's code)",
        source="paper",
        choices=("train_loss", "test_accuracy"),
    )
    select_samples: int | None = option(
        None, "training samples on which a client compares the models; null: all of them", source="paper", low=1
    )
    weights: str = weights_option()  # for models; gradients are averaged uniformly

    @property
    def needs_classes(self) -> str:
        return "select: test_accuracy; set select: train_loss" if self.select == "test_accuracy" else ""

    @property
    def needs_sgd(self) -> str:
        return "average: gradients takes one step of SGD" if self.average == "gradients" else ""

    @property
    def needs_mean(self) -> str:
        return "share_base: the base is averaged twice" if self.share_base else ""

    @property
    def compares_models(self) -> bool:
        return self.select == "train_loss"

    def init(self, start: Start) -> State:
        models_KP = torch.stack([start.new_model(k) for k in range(self.num_clusters)])
        if self.share_base:
            start.spec.base.put(models_KP, start.spec.base.of(models_KP[:1]))
        phase = "warmup" if self.warmup_rounds else "federate"
        return State(models_KP=models_KP, assign_N=start.unassigned(), phase=phase)

    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        warm_up = clients.round <= self.warmup_rounds
        gradients = self.average == "gradients"

        # j_i <- argmin_j f_i(theta_j)
        if warm_up:
            chosen_M = self.warmup_clusters(clients.ids_M, rng.seed)
            theta = clients.send(state.models_KP, chosen_M)
        else:
            received = clients.broadcast(state.models_KP, shared=clients.spec.base if self.share_base else None)
            chosen_M = self.choose_clusters(clients, received, upload=not gradients)  # j_i
            theta = received.choose(np.maximum(chosen_M, 0))
        known_M = chosen_M != UNASSIGNED  # clients without a choice are excluded from averages

        # W_i <- SGD_i(theta_{j_i}), or theta_{j_i} - gamma g_i
        one_step = clients.local.one_gradient() if gradients else None
        weight_M = clients.weights("uniform" if gradients else self.weights) * known_M
        weight_RM = cluster_weights(chosen_M, weight_M, self.num_clusters)
        if self.share_base:
            weight_RM = np.vstack([weight_RM, weight_M])  # the last row: all participants
        updates = clients.train(theta, how=LocalTraining(sgd=one_step), average=weight_RM)

        # theta_j <- Avg of W_i, or theta_j - (gamma / m) sum of g_i, over the clients that chose j
        state = state.advance(
            models_KP=self.next_models(state.models_KP, updates, clients.spec),
            phase="warmup" if clients.round < self.warmup_rounds else "federate",
        )
        valid_M, because = updates.valid_M & known_M, {"clients": known_M.sum(), "num_clusters": self.num_clusters}
        return placed(state, clients, clients.ids_M[valid_M], chosen_M[valid_M], **because)

    def choose_clusters(self, clients: Clients, received: Sent, upload: bool = False) -> np.ndarray:
        """The choice j_i (M,) of each client among the models it received; UNASSIGNED if its losses are missing."""
        if self.select == "test_accuracy":
            clients.count_upload(int(upload))
            return clients.accuracies(received).argmax(1)
        return clients.choose(received, max_samples=self.select_samples, upload=upload, diagnostic="losses")

    def warmup_clusters(self, ids_M: np.ndarray, seed: int) -> np.ndarray:
        """Clusters, int64 (M,), of a random equal split, the same in all rounds.

        The clients 0 .. K - 1 are in K different clusters, likewise the clients K .. 2K - 1, and so on.
        """
        block_M, place_M = np.divmod(ids_M, self.num_clusters)
        order = {
            block: Draws(seed, 0).stream("warm-up", block).permutation(self.num_clusters)
            for block in np.unique(block_M).tolist()
        }
        pairs = zip(block_M.tolist(), place_M.tolist(), strict=True)
        return np.array([order[block][place] for block, place in pairs], np.int64)

    def next_models(self, models_KP: Tensor, updates: Updates, spec: ParamSpec) -> Tensor:
        """theta_j (K, P) after averaging; with weight sharing, every base is the average over all participants."""
        before_RP = torch.cat([models_KP, models_KP[:1]]) if self.share_base else models_KP
        if self.average == "gradients":  # W_i = theta_j - gamma g_i; the mean step is scaled by the share that chose j
            after_RP = updates.damped(before_RP, total=updates.weight_R[: self.num_clusters].sum())
        else:
            after_RP = updates.averaged(default=before_RP)
        if self.share_base:
            spec.base.put(after_RP, spec.base.of(after_RP[-1:]))
        return after_RP[: self.num_clusters]

    def join(self, state: State, clients: Clients) -> State:
        """The state as it is: newcomers choose a model for each prediction until they have trained."""
        return state

    def serve(self, state: State, clients: Clients) -> Serving:
        if state.phase == "warmup":
            return Serving(state.models_KP, self.warmup_clusters(clients.ids_M, clients.seed))
        chosen_M = self.choose_clusters(clients, clients.known_models(state.models_KP))
        return Serving(state.models_KP, np.maximum(chosen_M, 0))
