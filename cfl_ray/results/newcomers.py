"""Models of a trained method for clients outside the federation."""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.clients import RoundStats
from cfl_ray.core.method import VOTE, Method
from cfl_ray.core.rng import Draws
from cfl_ray.core.server_optimizers import ServerMoments
from cfl_ray.core.serving import Serving
from cfl_ray.data.federation import Federation, FederationView, TensorSamples
from cfl_ray.engine.client_state import predicting_row
from cfl_ray.engine.in_process import InProcessBackend
from cfl_ray.engine.validation import invalid_data_reason
from cfl_ray.engine.worker import Worker
from cfl_ray.errors import ConfigError, DataError
from cfl_ray.results.trained import Newcomer, TrainedMethod, as_tensor, cluster_of, keeps_values

_MEAN_MIXTURE = "a mixture of all models, with the mean weights of all clients"
_LARGEST = "the model with the largest weight, the first of equal ones"
_ONLY = "the only model"
_ENTROPY = "the cluster model whose predictions have the least mean entropy"


class _WithNewcomer(FederationView):
    """A federation with an additional last client that has training samples only."""

    def __init__(self, base: Federation, samples: TensorSamples):
        super().__init__(base)
        self.samples = samples
        self.num_samples_N, self.group_N = np.append(base.num_samples_N, len(samples[1])), None

    def train(self, client: int) -> TensorSamples:
        return self.samples if client == self._base.num_clients else super().train(client)


class _Joined:
    """A copy of a trained method that a newcomer has joined by `Method.join`."""

    def __init__(self, trained: TrainedMethod, samples: TensorSamples):
        self.trained, self.samples, self.checked_method = trained, samples, trained.checked_method
        federation, worker = _WithNewcomer(trained.present(), samples), trained.backend.worker
        self.client = federation.num_clients - 1
        self.backend = InProcessBackend(Worker(worker.network, federation, worker.engine))
        step = self.checked_method.method.server_step
        evaluated = replace(
            trained.clients_of(np.zeros(1, np.int64)),
            ids_M=np.array([self.client]),
            num_samples_M=np.array([len(samples[1])]),
            backend=self.backend,
            stats=RoundStats(),
            reachable=None,
            server_moments=None if step is None else ServerMoments(step),
        )
        self.clients = replace(evaluated, evaluated=False, choice_samples=None)
        self.state = self.checked_method.join(trained.state.grown(federation.num_clients), self.clients)
        self.serving: Serving = self.checked_method.serve(self.state, evaluated)

    def row(self) -> Tensor:
        """The row (P,) of the client's model, with the columns that it keeps. Raises ConfigError if it has no model."""
        row = int(self.serving.row_M[0])
        if row < 0:
            raise ConfigError(
                f"{self.trained.label} has no model for a newcomer yet; it forms clusters in a later round"
            )
        state = self.serving.client_state
        value = None if state is None else self.backend.client_state(state.name, self.client)
        view = partial(self.trained.view, self.client, lambda: self.samples)
        return predicting_row(self.serving.models_KP[row], state, value, view)

    @property
    def cluster(self) -> int:
        """The cluster of the client's model; -1: none."""
        return cluster_of(self.serving, int(self.serving.row_M[0]), self.state.num_clusters)

    @property
    def rule(self) -> str:
        """The method's reason for the client's model."""
        method = self.checked_method.method
        return method.placement if self.cluster >= 0 else method.without_cluster

    def newcomer(self, row_P: Tensor, why: str) -> Newcomer:
        return Newcomer(self.cluster, why, self.trained.module(row_P, self.serving.frozen_P))


def place(trained: TrainedMethod, x: Tensor | np.ndarray, y: Tensor | np.ndarray | None) -> Newcomer:
    """See `MethodResult.place`."""
    if y is None:
        inputs = trained.inputs(x)
        if not len(inputs):
            raise DataError("no inputs are given, expected at least 1")
        return _without_labels(trained, inputs)
    joined, method = _Joined(trained, _samples(trained, x, y)), trained.checked_method.method
    serving = joined.serving
    if serving.weight_MK is not None:
        return Newcomer(-1, method.placement, trained.mixture(serving.models_KP, serving.weight_MK[0]))
    if serving.client_state is not None and method.untrained and method.placement == Method.placement:
        raise ConfigError(f"{trained.label}: {method.untrained}; adapt(x, y) trains it")
    row_P = joined.row()
    if serving.tune is not None:
        row_P = trained.tuned(joined.client, row_P, serving.tune, joined.samples, serving.frozen_P)
        return joined.newcomer(row_P, "the model after the method's own training on x and y")
    return joined.newcomer(row_P, joined.rule)


def adapt(trained: TrainedMethod, x: Tensor | np.ndarray, y: Tensor | np.ndarray) -> Newcomer:
    """See `MethodResult.adapt`."""
    joined = _Joined(trained, _samples(trained, x, y))
    serving, local = joined.serving, joined.clients.local
    if serving.client_state is not None:
        joined.checked_method.round(joined.state, joined.clients, Draws(joined.clients.seed, joined.clients.round))
        return joined.newcomer(joined.row(), "its own columns, trained by a round of the method")
    row_P = trained.tuned(joined.client, joined.row(), serving.tune or local, joined.samples, serving.frozen_P)
    how = "the method's own training" if serving.tune is not None else "the local training of a round"
    of = joined.rule if serving.weight_MK is None else _LARGEST
    return joined.newcomer(row_P, f"{of}, after {how}")


def _without_labels(trained: TrainedMethod, x: Tensor) -> Newcomer:
    """The newcomer's model without labels: the model with the least mean entropy."""
    serving, method, state = trained.serve(trained.online[:1]), trained.checked_method.method, trained.state
    if serving.weight_MK is not None:
        weight_MK = trained.serve(trained.online).weight_MK
        assert weight_MK is not None
        why = VOTE if method.placement == VOTE else _MEAN_MIXTURE
        return Newcomer(-1, why, trained.mixture(serving.models_KP, weight_MK.mean(0)))
    if serving.tune is not None or (serving.client_state is not None and method.untrained):
        reason = method.untrained or "clients predict after a training on labels of their own"
        raise ConfigError(f"{trained.label}: {reason}; give labels: adapt(x, y)")
    rows = range(min(state.num_clusters, len(serving.models_KP)))
    others = [row for row in serving.row_M.tolist() if row >= state.num_clusters]  # before there are clusters
    rows_K = [row for row in rows if state.members_K[row]] or others or list(rows)
    models = [trained.module(serving.models_KP[row], serving.frozen_P) for row in rows_K]
    if len(models) == 1:
        return Newcomer(cluster_of(serving, rows_K[0], state.num_clusters), _ONLY, models[0])
    if not models:
        raise ConfigError(f"{trained.label} has no cluster model yet; give labels: place(x, y)")
    if trained.federation.shape.targets != "class":
        raise ConfigError(
            f"{trained.label} has {len(models)} cluster models, and without labels they are compared by the entropy of "
            f"class probabilities; the targets are {trained.federation.shape.targets!r}: give them, place(x, y)"
        )
    with torch.no_grad():
        p = torch.stack([model(x).softmax(-1) for model in models])  # (K, n, C)
    best = int(torch.special.entr(p).sum(-1).mean(-1).argmin())
    return Newcomer(rows_K[best], _ENTROPY, models[best])


def _samples(trained: TrainedMethod, x: Tensor | np.ndarray, y: Tensor | np.ndarray) -> TensorSamples:
    """The samples as tensors. Raises DataError for samples on which a client of the federation could not train."""
    shape, values = trained.federation.shape, np.asarray(y)
    if values.dtype.kind in "US":
        raise DataError(
            f"the samples have labels as words ({str(values.flat[0])!r}), expected numbers: places in `class_names`"
        )
    given = as_tensor(y, "labels" if shape.targets == "class" else "targets")
    inputs, targets = trained.inputs(x), given.to(shape.target_dtype)
    if not keeps_values(given, targets):
        raise DataError("the samples have labels that are not whole numbers")
    if reason := invalid_data_reason(inputs, targets, shape):
        raise DataError(f"the samples have {reason}")
    return inputs, targets
