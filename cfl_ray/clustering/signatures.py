"""States of methods that compare clients: with a signature of each client, or with a centre of each cluster.

S is the number of clients with a signature.
"""

from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from cfl_ray.clustering.agglomerative import nearest_centre
from cfl_ray.core.clients import Clients, LocalTraining, UpdateFeatures
from cfl_ray.core.method import Start, option
from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.rounds import placed
from cfl_ray.core.state import UNASSIGNED, SeenState, State


def sketch_option() -> Any:
    """The option `sketch` of methods that compare whole models or updates."""
    doc = "features to which a longer model or update is projected before clients are compared (cosines to 1.6 %)"
    return option(8192, doc, source="ours", low=16)


@dataclass(frozen=True, kw_only=True)
class SignatureState(SeenState):
    """A state with the signatures that clients have sent."""

    signature_SF: Tensor  # float32

    @property
    def cluster_S(self) -> np.ndarray:
        """Cluster of every client with a signature, int32 (S,)."""
        return self.assign_N[self.seen_S]

    def remember(self, ids_M: np.ndarray, feature_MF: Tensor, **more: np.ndarray) -> Self:
        """This state with the signatures `feature_MF` of the clients `ids_M`, which replace their earlier signatures.

        Shorter signatures are padded with zeros. more: values (M,) of further fields `*_S`, by field name.
        """
        if not len(ids_M):
            return self
        state, longer = self, feature_MF.shape[1] - self.signature_SF.shape[1]
        if longer > 0:
            state = self.advance(signature_SF=pad(self.signature_SF, (0, longer)))
        return state.with_values(ids_M, signature_SF=pad(feature_MF, (0, max(-longer, 0))), **more)


@dataclass(frozen=True, kw_only=True)
class CentreState(State):
    """A state with a centre for each cluster. Signatures result from local training of one fixed model."""

    start_KP: Tensor  # float32 (1, P): the fixed model
    centre_KF: Tensor  # float32: mean signature of each cluster's members in the clustering round
    lr: float | None = None  # learning rate of the training that gave the centres; None: no centres yet

    @classmethod
    def first(cls, start: Start, phase: str, models: int, **more: Any) -> Self:
        """The state before the clustering round. models: 1, the fixed one, or 0 if no round comes before it."""
        first_KP = start.new_model(0)[None]
        return cls(
            models_KP=first_KP[:models],
            assign_N=start.unassigned(),
            phase=phase,
            start_KP=first_KP,
            centre_KF=first_KP[:0],
            **more,
        )

    def clustered(
        self, clients: Clients, start_KP: Tensor, models_KP: Tensor, assign_N: np.ndarray, centre_KF: Tensor
    ) -> Self:
        """The state after the clustering round. Its centres result from training `start_KP` at this round's rate."""
        return self.advance(
            start_KP=start_KP,
            models_KP=models_KP,
            assign_N=assign_N,
            centre_KF=centre_KF,
            lr=clients.local.lr,
            phase="federate",
        )


C = TypeVar("C", bound=CentreState)


def place_by_training(
    state: C,
    clients: Clients,
    features: UpdateFeatures | Columns,
    metric: str,
    steps_M: np.ndarray | None = None,
    within: float = np.inf,
) -> C:
    """The state after clients have trained the fixed model and were assigned to the clusters with the nearest centres.

    Before the clustering round, when there are no centres, it is the state itself.
    They train at the learning rate `state.lr`, which gave the centres, not at the schedule's present rate.

    features: which columns of a client's result are its signature. metric: as in `agglomerative.distances`.
    steps_M: local steps of each client; None: as the experiment sets them.
    within: a client that is further than this from every centre founds a cluster: its signature becomes the centre,
        and the state's fixed model the cluster's model.
    """
    if not len(clients) or not len(state.centre_KF):
        return state
    sgd = None if state.lr is None else replace(clients.local, lr=state.lr)
    start, how = clients.send(state.start_KP), LocalTraining(sgd=sgd, steps_M=steps_M)
    updates = clients.train(start, how=how, features=features, keep_as_local_model=False)
    ids_M, feature_MF, centre_KF = clients.ids_M[updates.valid_M], updates.valid_features_MF, state.centre_KF
    cluster_M, distance_M = nearest_centre(feature_MF, centre_KF, metric)
    because: dict[str, float] = {"clients": len(ids_M)}
    # in turn: a client may join a cluster that an earlier client has founded
    for at in np.flatnonzero(distance_M > within):
        (cluster_M[at],), (distance,) = nearest_centre(feature_MF[at : at + 1], centre_KF, metric)
        if distance > within:
            cluster_M[at], centre_KF = len(centre_KF), torch.cat([centre_KF, feature_MF[at : at + 1]])
            because |= {"distance": min(distance, because.get("distance", np.inf)), "threshold": within}
    models_KP = torch.cat([state.models_KP, state.start_KP.repeat(len(centre_KF) - len(state.centre_KF), 1)])
    grown = state.advance(models_KP=models_KP, centre_KF=centre_KF)
    return placed(grown, clients, ids_M, cluster_M, **because)


def whole_update(spec: ParamSpec, sketch: int | None) -> UpdateFeatures:
    """The features for signatures that are whole updates W - w, in the trained columns."""
    return UpdateFeatures(spec.trainable, change=True, sketch=sketch)


def unplaced(state: State, clients: Clients) -> Clients:
    """The clients without a cluster."""
    return clients.select(state.assign_N[clients.ids_M] == UNASSIGNED)
