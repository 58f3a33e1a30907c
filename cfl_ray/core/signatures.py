"""What a server remembers of clients to tell which belong together: one signature per client, or one centre per cluster."""

from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from cfl_ray.core.clients import Clients, Keep
from cfl_ray.core.hierarchy import nearest
from cfl_ray.core.method import option
from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.state import UNKNOWN, State


def sketching() -> Any:
    """The option of methods that compare whole models or updates."""
    doc = "features that a longer model or update is projected to before clients are compared (cosines to 1.6 %)"
    return option(8192, doc, source="ours", low=16)


@dataclass(frozen=True)
class SignatureState(State):
    """A state with a signature of every client seen."""

    signature_SF: Tensor = None  # of the S clients seen so far
    seen_S: np.ndarray = None  # int64: who they are

    @classmethod
    def nobody(cls, features: int = 0) -> dict[str, object]:
        """The fields above before anybody was seen."""
        return {"signature_SF": torch.zeros(0, features), "seen_S": np.zeros(0, np.int64)}

    @property
    def cluster_S(self) -> np.ndarray:
        """Cluster of every client seen."""
        return self.assign_N[self.seen_S]

    def remember(self, ids_M: np.ndarray, feature_MF: Tensor, **more) -> Self:
        """With these signatures: new ones at the end, known clients' replaced. `more`: values (M,) of further per-client fields `*_S`."""
        if not len(ids_M):
            return self
        position = {int(client): at for at, client in enumerate(self.seen_S)}
        at_M = np.array([position.setdefault(int(client), len(position)) for client in ids_M], np.int64)
        width = max(feature_MF.shape[1], self.signature_SF.shape[1])
        signature_SF = pad(self.signature_SF, (0, width - self.signature_SF.shape[1], 0, len(position) - len(self.seen_S)))
        signature_SF[at_M] = pad(feature_MF, (0, width - feature_MF.shape[1]))
        changes: dict[str, object] = {"signature_SF": signature_SF, "seen_S": np.fromiter(position, np.int64, len(position))}
        for name, value_M in more.items():
            value_S = np.concatenate([getattr(self, name), np.zeros(len(position) - len(self.seen_S), getattr(self, name).dtype)])
            value_S[at_M] = value_M
            changes[name] = value_S
        return self.advance(**changes)

    def only(self, stay_S: np.ndarray) -> Self:
        """Without the signatures for which `stay_S` does not hold."""
        names = [field.name for field in fields(self) if field.name.endswith("_S") and field.name != "signature_SF"]
        signature_SF = self.signature_SF[torch.from_numpy(np.asarray(stay_S))]
        return self.advance(signature_SF=signature_SF, **{name: getattr(self, name)[stay_S] for name in names})

    def forget(self, ids: np.ndarray) -> Self:
        """Without the assignment and signature of clients that left."""
        return super().forget(ids).only(~np.isin(self.seen_S, ids))


@dataclass(frozen=True)
class CentreState(State):
    """A state with a centre per cluster, in the space of what training from one fixed model makes of it."""

    start_KP: Tensor = None  # (1, P): that model
    centre_KF: Tensor = None  # mean signature of the members at the time of clustering


def placed_by_training(
    state: CentreState, clients: Clients, keep: Keep, metric: str, steps_M: np.ndarray | None = None, within: float = np.inf
) -> CentreState:
    """Places clients by one local training from the state's fixed model: in the cluster with the nearest centre.

    A client further than `within` from every centre founds a cluster, with its signature as centre and the fixed model.
    """
    if not len(clients):
        return state
    updates = clients.train(clients.send(state.start_KP), keep=keep, steps_M=steps_M, held=False)
    ids_M, feature_MF = clients.ids_M[updates.ok_M], updates.sound_MF
    centre_KF, (found_M, distance_M) = state.centre_KF, nearest(feature_MF, state.centre_KF, metric)
    for at in np.flatnonzero(distance_M > within):  # one after another: the second of a kind joins the first
        (found_M[at],), (distance,) = nearest(feature_MF[at : at + 1], centre_KF, metric)
        if distance > within:
            found_M[at], centre_KF = len(centre_KF), torch.cat([centre_KF, feature_MF[at : at + 1]])
    models_KP = torch.cat([state.models_KP, state.start_KP.repeat(len(centre_KF) - len(state.centre_KF), 1)])
    return state.advance(models_KP=models_KP, assign_N=state.place(ids_M, found_M), centre_KF=centre_KF)


def update_of(spec: ParamSpec, sketch: int | None) -> Keep:
    """A client's whole update W - w as its signature."""
    return Keep(Columns(((0, spec.trained),)), change=True, sketch=sketch)


def unplaced(state: State, clients: Clients) -> Clients:
    """The clients that have no cluster yet."""
    return clients.select(state.assign_N[clients.ids_M] == UNKNOWN)
