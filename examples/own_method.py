"""A clustering method: each client trains the model that fits its data best."""

from dataclasses import dataclass

import numpy as np
import torch

from cfl_ray import Method, Serving, State, cluster_weights, option


@dataclass(frozen=True)
class BestOf(Method[State], name="best_of"):
    """K models, each the mean of the clients that it fits best."""

    num_models: int = option(2, "K, number of models", low=1)

    def init(self, start):
        models_KP = torch.stack([start.new_model(k) for k in range(self.num_models)])
        return State(models_KP, start.unassigned())

    def round(self, state, clients, rng):
        sent = clients.broadcast(state.models_KP)
        chosen_M = clients.losses(sent).argmin(1)
        clients.count_upload(1)
        weight_KM = cluster_weights(chosen_M, clients.num_samples_M, self.num_models)
        updates = clients.train(sent.choose(chosen_M), average=weight_KM)
        models_KP = updates.averaged(default=state.models_KP)
        return state.advance(models_KP=models_KP, assign_N=state.place(clients.ids_M, chosen_M))

    def serve(self, state, clients):
        return Serving(state.models_KP, np.maximum(state.assign_N[clients.ids_M], 0))
