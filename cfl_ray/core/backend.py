"""The interface of backends, which carry out the exchanges of a run and keep the states of its clients."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.work import Outcome, Work

ClientStateKey = tuple[str, int]  # (name, client)


class SavedEntry(NamedTuple):
    """An entry of a file of a checkpoint: client states (R, F)."""

    file: str
    name: str


class SavedRows(Protocol):
    """Client states (R, F), from which single rows are read."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def itemsize(self) -> int: ...

    def __getitem__(self, row: int) -> Tensor:
        """Raises RunError if the row was altered since it was saved."""


class SavedState(NamedTuple):
    """A client state in a checkpoint: a row of a memory-mapped entry (R, F) of its file.

    A removed file stays readable while any of its rows is referenced.
    """

    rows_RF: SavedRows
    row: int
    entry: SavedEntry  # for other processes

    def tensor(self) -> Tensor:
        """A copy of the value (F,)."""
        return self.rows_RF[self.row].clone()

    @property
    def nbytes(self) -> int:
        return self.rows_RF.shape[1] * self.rows_RF.itemsize


class StateFile(Protocol):
    """A file of a checkpoint for the client states of `keys`, which any process that has the values can write."""

    @property
    def keys(self) -> Sequence[ClientStateKey]:
        """The client states, in the order of the values."""

    def write(self, values: Iterable[Tensor], again: bool = False) -> Any:
        """Writes the values, in the order of `keys`. Returns the entry of the file in the manifest.

        again: after another process was asked to write them, which may still do so.
        """


class ClientStateSource(Protocol):
    """Client states, as a checkpoint saves them."""

    unsaved: int  # bytes of the values that were stored since the last call of `changed`

    def changed(self, everything: bool = False) -> dict[ClientStateKey, int]:
        """Bytes of the client states that changed since the last call, or of all.

        Those that are in one place are side by side.
        """

    def forgotten(self) -> set[ClientStateKey]:
        """Keys of the client states that were dropped since the last call."""

    def write(self, files: Sequence[StateFile]) -> list[Any]:
        """Results of `StateFile.write` for each file, called where its values are."""

    def move(self, entries: Mapping[ClientStateKey, Any]) -> None:
        """Takes the values, which did not change, from another place: the files of a checkpoint."""


class Backend(Protocol):
    """Carries out exchanges, in this process or on the hosts of a cluster. A user's backend has these methods."""

    @property
    def client_states(self) -> ClientStateSource:
        """The states of all clients."""

    def restore(self, entries: Iterable[tuple[ClientStateKey, SavedState]]) -> None:
        """Replaces the client states by those of a checkpoint."""

    def run(self, work: Work) -> Outcome:
        """Carries out one exchange."""

    def use(self, federation: Any) -> None:
        """Uses the clients of this federation from now on."""

    def forget(self, ids: np.ndarray) -> None:
        """Drops all states of the clients `ids`."""

    def client_state(self, name: str, client: int) -> Tensor | None:
        """The state that a client keeps under a name; None if it has none."""
