"""State of a method between rounds."""

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.params import ParamSpec
from cfl_ray.errors import did_you_mean

UNASSIGNED = -1  # cluster of a client without a cluster

Array = Tensor | np.ndarray

# copies of all clients' models at the peak of the server: the states before and after a round, the table that is sent,
# the uploads, and what the method computes from them. Measured in rounds of all clients without training and without
# messages: pFedGraph 6.9, FedCAC 6.1
_OWN_MODEL_COPIES = 8

_AXES = re.compile(r"_([A-Z][A-Z0-9]*)$")  # axis letters at the end of a field's name


@dataclass(frozen=True)
class State:
    """Everything that the server of a method keeps between rounds.

    Fields are tensors, arrays and plain values (`unsaved`) only, so that any state can be saved. A method that needs
    more fields uses a subclass: `class StoCFL(Method[StoCFLState], name="stocfl")`.
    """

    models_KP: Tensor  # float32 (K, P): the cluster models
    assign_N: np.ndarray  # int32 (N,): cluster of each client, UNASSIGNED for a client without one
    # of the clustering, such as "warmup" or "federate"; by keyword, so that fields of a subclass need no default
    phase: str = field(default="federate", kw_only=True)

    of_each_client: ClassVar[str] = ""  # kept on the server for each client that has taken part, such as "a model"

    @classmethod
    def peak_floats(cls, spec: ParamSpec, seen: int, cohort: int, evaluated: int) -> int:
        """Most float32 numbers that a round needs on the server for the values kept `of_each_client`.

        seen: number of clients that have taken part. cohort: number of clients of the round. evaluated: number of
        clients that are tested after it.
        """
        return 0

    @property
    def num_clusters(self) -> int:
        """K."""
        return len(self.models_KP)

    @property
    def members_K(self) -> np.ndarray:
        """Number of clients in each cluster, int64 (K,)."""
        return np.bincount(self.assign_N[self.assign_N >= 0], minlength=self.num_clusters)

    def place(self, ids_M: np.ndarray | Sequence[int], assign_M: np.ndarray | int) -> np.ndarray:
        """A copy of `assign_N` with the clients `ids_M` in the clusters `assign_M`."""
        assign_N = self.assign_N.copy()
        assign_N[ids_M] = assign_M
        return assign_N

    def advance(self, **changes: Any) -> Self:
        """The next state: this state with the given fields replaced. Raises TypeError for a field that it lacks."""
        known = [item.name for item in fields(self)]
        if unknown := next((name for name in changes if name not in known), None):
            raise TypeError(f"{type(self).__name__} has no field {unknown!r}{did_you_mean(unknown, known)}")
        return replace(self, **changes)

    def forget(self, ids: np.ndarray) -> Self:
        """This state without the clients `ids`, which left."""
        return self.advance(assign_N=self.place(ids, UNASSIGNED))

    def grown(self, num_clients: int) -> Self:
        """This state for a federation that grew to `num_clients` clients.

        Newcomers have no cluster, and 0 in every other field with an axis N (`more_N`, `seen_NK`, `best_KN`). A
        subclass for which 0 is not the value of a newcomer overrides this.
        """
        more = num_clients - len(self.assign_N)
        return self.advance(
            **{
                name: _longer(value, places, more, UNASSIGNED if name == "assign_N" else 0)
                for name, value, places in self.with_axis("N")
            }
        )

    def with_axis(self, letter: str) -> Iterator[tuple[str, Array, list[int]]]:
        """Yields the name and the value of each field with an axis of this letter, and the positions of this axis."""
        for item in fields(self):
            value, axes = getattr(self, item.name), _AXES.search(item.name)
            if isinstance(value, Tensor | np.ndarray) and axes and letter in axes[1]:
                yield item.name, value, [place for place, axis in enumerate(axes[1]) if axis == letter]

    def unsaved(self) -> tuple[str, Any] | None:
        """The name and the value of a field that would be another value after a checkpoint; None: there is none."""
        for item in fields(self):
            value, is_array = getattr(self, item.name), "ndarray" in str(item.type)
            if isinstance(value, Tensor):
                kept = not is_array and value.layout == torch.strided and not value.requires_grad
            else:
                kept = is_array and value.dtype.kind in "biuf" if isinstance(value, np.ndarray) else _is_plain(value)
            if not kept:
                return item.name, value
        return None

    def fingerprint(self) -> dict[str, int]:
        """A number for each field, another one after its value was modified in place."""
        return {item.name: _fingerprint(getattr(self, item.name)) for item in fields(self)}

    def to_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, scalars) by field name, in the form that a checkpoint stores."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        tensors = {name: value for name, value in values.items() if isinstance(value, (Tensor, np.ndarray))}
        scalars = {name: value for name, value in values.items() if name not in tensors}
        return {name: torch.as_tensor(value) for name, value in tensors.items()}, scalars

    @classmethod
    def from_checkpoint(cls, tensors: dict[str, Tensor], scalars: dict[str, Any]) -> Self:
        """The inverse of `to_checkpoint`. Fields annotated as arrays come back as arrays."""
        arrays = {item.name for item in fields(cls) if "ndarray" in str(item.type)}
        values: dict[str, Any] = {name: value.numpy() if name in arrays else value for name, value in tensors.items()}
        return cls(**values, **scalars)


def _fingerprint(value: Any) -> int:
    if isinstance(value, Tensor):  # the number of its changes in place, which tensors of inference mode do not count
        return 0 if value.is_inference() else value._version
    return zlib.crc32(np.ascontiguousarray(value).data if isinstance(value, np.ndarray) else repr(value).encode())


def no_numbers() -> np.ndarray:
    """The first value of a field of int64 numbers with an axis that begins empty."""
    return np.zeros(0, np.int64)


def _is_plain(value: Any) -> bool:
    """Whether JSON returns this value as it is."""
    if isinstance(value, dict):
        return all(type(key) is str for key in value) and _is_plain(list(value.values()))
    return all(map(_is_plain, value)) if isinstance(value, list) else isinstance(value, bool | int | float | str | None)


def _longer(value: Array, places: Sequence[int], more: int, fill: int = 0) -> Array:
    """A copy with more entries of this value at the end of these axes."""
    widths = [(0, more if place in places else 0) for place in range(value.ndim)]
    longer = np.pad(np.asarray(value), widths, constant_values=fill)
    return torch.from_numpy(longer) if isinstance(value, Tensor) else longer


@dataclass(frozen=True, kw_only=True)
class SeenState(State):
    """A state with values of the S clients that have taken part: fields with an axis S (`round_S`, `angle_SS`)."""

    # int64: ids of the clients, in the order in which they were added
    seen_S: np.ndarray = field(default_factory=no_numbers)

    def positions(self, ids_M: np.ndarray) -> np.ndarray:
        """Position of each of these clients on the axes S, int64 (M,); -1 for a client that has not taken part."""
        position_of = {client: position for position, client in enumerate(self.seen_S.tolist())}
        return np.array([position_of.get(client, -1) for client in ids_M.tolist()], np.int64)

    def with_values(self, ids_M: np.ndarray, **values: Array) -> Self:
        """This state with values (M, ...) of these clients, by field. A new client has 0 in the other fields."""
        if not len(ids_M):
            return self
        seen_S = np.concatenate([self.seen_S, ids_M[self.positions(ids_M) < 0]])
        added = len(seen_S) - len(self.seen_S)
        own = [field for field in self.with_axis("S") if field[0] != "seen_S" and (added or field[0] in values)]
        state = self.advance(seen_S=seen_S, **{name: _longer(value, places, added) for name, value, places in own})
        at_M = state.positions(ids_M)
        for name, value_M in values.items():
            getattr(state, name)[at_M] = value_M
        return state

    def subset(self, stay_S: np.ndarray) -> Self:
        """This state with the values of only those of the S clients that `stay_S`, bool (S,), selects."""
        stay, changes = np.flatnonzero(stay_S), dict[str, Array]()
        for name, value, places in self.with_axis("S"):
            array = np.asarray(value)
            for place in places:
                array = array.take(stay, place)
            changes[name] = torch.from_numpy(array) if isinstance(value, Tensor) else array
        return self.advance(**changes)

    def forget(self, ids: np.ndarray) -> Self:
        """This state without the clients `ids`, which have left, and without their values."""
        return super().forget(ids).subset(~np.isin(self.seen_S, ids))


@dataclass(frozen=True, kw_only=True)
class OwnModelsState(SeenState):
    """A state in which the server keeps a model for each of the S clients that have taken part.

    Other clients have the global model, row 0 of `models_KP`.
    """

    of_each_client = "a model"

    own_SP: Tensor  # float32

    @classmethod
    def peak_floats(cls, spec: ParamSpec, seen: int, cohort: int, evaluated: int) -> int:
        return _OWN_MODEL_COPIES * seen * spec.size

    @property
    def all_models(self) -> Tensor:
        """The global model and those of the clients, (1 + S, P)."""
        return torch.cat([self.models_KP[:1], self.own_SP])

    def rows_of(self, ids_M: np.ndarray) -> np.ndarray:
        """The row of `all_models` for each of these clients, int64 (M,)."""
        return self.positions(ids_M) + 1
