"""IFCA: A. Ghosh, J. Chung, D. Yin, K. Ramchandran. An Efficient Framework for Clustered Federated Learning. NeurIPS 2020,
arXiv:2006.04088, Algorithm 1 with model or gradient averaging, and weight sharing (Section 5).

    j_i <- argmin_j f_i(theta_j)                         each client, on its training data, among the K models it received
    W_i <- SGD_i(theta_{j_i});   theta_j <- Avg of W_i over the clients that chose j               model averaging
    g_i = grad f_i(theta_{j_i});   theta_j <- theta_j - (gamma / m) sum of g_i over those          gradient averaging, m participants

A model that nobody chose stays. The K models start from independent initialisations: equal ones could never separate. With weight
sharing they have one base, averaged over all participants, and a head each.

Departures: ties go to the lowest j. The base of weight sharing is not trained beforehand. Traffic books the choice j_i as one number
with model averaging and as none with gradient averaging; in warm-up rounds, where nobody chooses, one model down and no choice.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from cfl_ray.core.grouping import by_cluster, everyone
from cfl_ray.core.method import Method, option, weighting
from cfl_ray.core.rng import Draws
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import State


@dataclass(frozen=True)
class IFCA(Method, name="ifca"):
    """K models; in every round each client trains the one that fits its data best."""

    num_clusters: int = option(4, "K, number of cluster models", source="paper", low=1)
    average: str = option("models", "what is averaged: models after local SGD, or one full-batch gradient each (gamma is local.lr)", source="paper: both", choices=("models", "gradients"))
    share_base: bool = option(False, "weight sharing: one base for all clusters, a head for each", source="paper: FEMNIST only")
    warmup_rounds: int = option(0, "rounds in which clients train by a random equal split, so that no model wins everybody (official FEMNIST code: 20)", source="official FEMNIST code; off by default", low=0)
    select: str = option("train_loss", "how clients choose; test_accuracy leaks labels, and is there to reproduce results that did so (PACFL's code)", source="paper", choices=("train_loss", "test_accuracy"))
    select_samples: int | None = option(None, "training samples on which a client compares the models; null: all of them", source="paper", low=1)
    weights: str = weighting()  # of models; gradients are averaged uniformly

    def init(self, start):
        models_KP = torch.stack([start.new_model(k) for k in range(self.num_clusters)])
        if self.share_base:
            start.spec.base.put(models_KP, start.spec.base.of(models_KP[:1]))
        return State(models_KP=models_KP, assign_N=start.unassigned(), phase="warmup" if self.warmup_rounds else "federate")

    def round(self, state, clients, rng):
        warm_up = clients.number <= self.warmup_rounds
        if warm_up:
            sent = clients.send(state.models_KP, self.split(clients.ids_M, rng.seed))
        else:
            sent = clients.broadcast(state.models_KP, shared=clients.spec.base if self.share_base else None)
            sent = sent.choose(self.choose(clients, sent))
        one_step = replace(clients.local, steps=1, batch_size=None, momentum=0.0) if self.average == "gradients" else None
        weight_M = clients.weights("uniform" if one_step else self.weights)
        mix = by_cluster(sent.row_M, weight_M, self.num_clusters)
        if self.share_base:
            mix = torch.cat([mix, everyone(weight_M)])  # one row more: all participants
        updates = clients.train(sent, mix=mix, local=one_step)
        if not one_step and not warm_up:
            clients.upload(1)  # j_i
        assign_N = state.place(clients.ids_M[updates.ok_M], sent.row_M[updates.ok_M])
        phase = "warmup" if clients.number < self.warmup_rounds else "federate"
        return state.advance(models_KP=self.averaged(state.models_KP, updates, clients.spec), assign_N=assign_N, phase=phase)

    def split(self, ids_M, seed):
        """A random equal split, the same in all rounds: of every K clients with consecutive numbers, one in each cluster."""
        block_M, place_M = np.divmod(ids_M, self.num_clusters)
        order = {block: Draws(seed, 0).stream("warm-up", block).permutation(self.num_clusters) for block in np.unique(block_M).tolist()}
        return np.array([order[block][place] for block, place in zip(block_M.tolist(), place_M.tolist())], np.int64)

    def averaged(self, models_KP, updates, spec):
        before = torch.cat([models_KP, models_KP[:1]]) if self.share_base else models_KP
        if self.average == "gradients":
            after = updates.damped(before, total=updates.weight_R[: self.num_clusters].sum())
        else:
            after = updates.mixed(empty=before)
        if self.share_base:
            spec.base.put(after, spec.base.of(after[-1:]))
        return after[: self.num_clusters]

    def choose(self, clients, sent):
        if self.select == "test_accuracy":
            return clients.accuracies(sent).argmax(1)
        return clients.losses(sent, max_samples=self.select_samples).argmin(1)

    def serve(self, state, clients):
        if state.phase == "warmup":
            return Serving(state.models_KP, self.split(clients.ids_M, clients.seed))
        return Serving(state.models_KP, self.choose(clients, clients.known(state.models_KP)))
