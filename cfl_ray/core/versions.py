"""Earlier versions of the server's models, from which clients of asynchronous rounds start.

A round of a method in which clients deliver updates of earlier versions differs from a synchronous round in two places:

    sending      each client receives the models that the server had when the client began
    averaging    a model moves by the weighted mean of the changes of its clients, each from its own start

so methods need no code for it. The key of a model is the checksum of its values (as in `core.server_optimizers`). Its
past follows the averages: an average has the past of the model that it moved (`Updates.averaged`), and a copy has the
past of its original. A model that a method computed from an average has the past of the same row of the same field.

FedBuff: J. Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, AISTATS 2022, arXiv:2106.06639.
FedAsync: C. Xie, S. Koyejo, I. Gupta, Asynchronous Federated Optimization, 2019, arXiv:1903.03934.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.server_optimizers import checksum
from cfl_ray.core.state import State


class NotAsynchronous(ValueError):
    """A round that cannot be asynchronous; the message is the reason."""


@dataclass
class Past:
    """The models of one version."""

    rows_XP: Tensor
    row_of: dict[bytes, int]  # row by the checksum of the present version of the model


@dataclass
class Versions:
    """The models of the versions that clients in flight have received.

    Version v is the state after v server steps. The present version is in the method's state.
    strict: whether a model without a past is an error; False: its present version is sent.
    """

    past: dict[int, Past] = field(default_factory=dict)
    parents: dict[bytes, bytes] = field(default_factory=dict)  # average -> the model that it moved, in this round
    strict: bool = False

    def sent(self, models_RP: Tensor, version_M: np.ndarray) -> tuple[Tensor, np.ndarray] | None:
        """A table (X, P) of these R models in all versions, and the row (M, R) that each client has of each of them.

        None: all clients have the present version.
        """
        wanted = [version for version in np.unique(version_M).tolist() if version in self.past]
        if not wanted:
            return None
        count, keys = len(models_RP), [checksum(row_P) for row_P in models_RP]
        tables, row_MR, first = [models_RP], np.tile(np.arange(count), (len(version_M), 1)), count
        for version in wanted:
            past = self.past[version]
            known = [(row, past.row_of[key]) for row, key in enumerate(keys) if key in past.row_of]
            if self.strict and len(known) < count:
                raise NotAsynchronous("its clients are sent models that the server computes within the round")
            row_R = np.arange(count)
            row_R[[row for row, _ in known]] = first + np.arange(len(known))
            row_MR[version_M == version] = row_R
            tables.append(past.rows_XP[[old for _, old in known]])
            first += len(known)
        return torch.cat(tables), row_MR

    def is_past_of(self, start_P: Tensor, model_P: Tensor) -> bool:
        """Whether `start_P` is this present model, or an earlier version of it."""
        key = checksum(model_P)
        earlier = (past.rows_XP[past.row_of[key]] for past in self.past.values() if key in past.row_of)
        return any(torch.equal(start_P, one_P) for one_P in (model_P, *earlier))

    def follow(self, before_RP: Tensor, after_RP: Tensor) -> None:
        """Records that the models `before_RP` became `after_RP`."""
        for before_P, after_P in zip(before_RP, after_RP, strict=True):
            self.parents.setdefault(checksum(after_P), checksum(before_P))

    def advance(self, version: int, before: State, after: State, kept: Collection[int]) -> None:
        """Begins the next version.

        before: the state of this version. kept: versions that clients in flight have.
        """
        self.past = {old: past for old, past in self.past.items() if old in kept}
        origins = self._origins(before, after) if kept else {}
        if version in kept:
            rows_XP = _rows(before)
            self.past[version] = Past(rows_XP, {checksum(row_P): row for row, row_P in enumerate(rows_XP)})
        for past in self.past.values():
            past.row_of = {new: past.row_of[old] for new, old in origins.items() if old in past.row_of}
        self.parents = {}

    def _origins(self, before: State, after: State) -> dict[bytes, bytes]:
        """The checksum of a model of `after` -> that of the model of `before` that it came from."""
        tables_before, origin_of = _tables(before), dict[bytes, bytes]()
        keys_before = {name: [checksum(row_P) for row_P in rows] for name, rows in tables_before.items()}
        known = {key for keys in keys_before.values() for key in keys}
        for name, rows in _tables(after).items():
            before_K = keys_before.get(name, [])
            for row, row_P in enumerate(rows):
                key = old = checksum(row_P)
                for _ in range(len(self.parents)):
                    if old in known or old not in self.parents:
                        break
                    old = self.parents[old]
                if old in known:
                    origin_of[key] = old
                elif len(before_K) == len(rows):
                    origin_of.setdefault(key, before_K[row])
        return origin_of

    def to_tensors(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint."""
        tensors: dict[str, Tensor] = {}
        for version, past in self.past.items():
            keys = np.frombuffer(b"".join(past.row_of), np.uint8).reshape(-1, 32).copy()
            tensors |= {
                f"models.{version}": past.rows_XP,
                f"checksums.{version}": torch.from_numpy(keys),
                f"rows.{version}": torch.tensor(list(past.row_of.values()), dtype=torch.int64),
            }
        return tensors

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor]) -> "Versions":
        """The versions in the output of `to_tensors`."""
        past = {}
        for name, rows_XP in tensors.items():
            kind, _, version = name.partition(".")
            if kind == "models":
                keys = map(bytes, tensors[f"checksums.{version}"].numpy())
                row_of = dict(zip(keys, tensors[f"rows.{version}"].tolist(), strict=True))
                past[int(version)] = Past(rows_XP, row_of)
        return cls(past)


def _tables(state: State) -> dict[str, Tensor]:
    """The fields of a state that hold models as rows."""
    columns = state.models_KP.shape[1]
    values = {item.name: getattr(state, item.name) for item in fields(state)}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, Tensor) and value.ndim == 2 and value.shape[1] == columns and value.is_floating_point()
    }


def _rows(state: State) -> Tensor:
    """The models of a state; the same tensor as the state's if it has one field of them."""
    tables = list(_tables(state).values())
    return tables[0] if len(tables) == 1 else torch.cat(tables)


@dataclass(frozen=True)
class Received:
    """The models that the clients of an asynchronous round have received, and the weights of their updates."""

    versions: Versions
    version_of: Mapping[int, int]  # by client; others have received the present version
    present: int  # the present version: number of server steps so far
    weight_of: Mapping[int, float] = field(default_factory=dict)  # s(tau) > 0 by client; 1 for others
    mixing: float = 1.0  # alpha, factor of the step
    mix_models: bool = False  # FedAsync: the mean of the clients' models is mixed in; False: that of their changes

    def of(self, models_RP: Tensor, ids_M: np.ndarray) -> tuple[Tensor, np.ndarray] | None:
        """As `Versions.sent`, for these clients."""
        version_M = np.array([self.version_of.get(client, self.present) for client in ids_M.tolist()], np.int64)
        return self.versions.sent(models_RP, version_M)

    def weights(self, ids_M: np.ndarray) -> np.ndarray:
        """Weight s(tau) (M,) of each client's update."""
        return np.array([self.weight_of.get(client, 1.0) for client in ids_M.tolist()])

    def moved(self, default_P: Tensor, result_P: Tensor, full: float, arrived: float) -> Tensor:
        """A model after its step.

        full, arrived: sums of the weights p_i, and of the weights p_i s_i, of the clients that count. result_P: the sum
        of p_i s_i (W_i - w_i), or with `mix_models` the mean of W_i by these weights.
        """
        if self.mix_models:
            return torch.lerp(default_P, result_P, self.mixing * arrived / full)
        return default_P.double().add_(result_P, alpha=self.mixing / full).float()
