"""Client state kept on the hosts: personal columns between rounds, and deferred results of the present round."""

import itertools
from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.backend import ClientStateKey, SavedState, StateFile
from cfl_ray.core.describing import ClientData
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.work import ClientState, Train, Work
from cfl_ray.errors import RunError
from cfl_ray.plugins.calling import call_plugin, described, place_of


def client_state_value(
    client_state: ClientState, row_P: Tensor, numbers: Iterable[Tensor], velocity: Tensor | None
) -> Tensor:
    """The stored value of a client state: its columns of a row, the numbers of the program, and the momentum buffer."""
    columns = row_P if client_state.columns is None else client_state.columns.of(row_P)
    values = [columns, *(number.reshape(-1).to(columns) for number in numbers)]
    return torch.cat(values if velocity is None else [*values, velocity]).cpu()


def with_client_state(start_P: Tensor, client_state: ClientState | None, value: Tensor | None) -> Tensor:
    """The start row with the columns of the client state written into it; unchanged if there is no value yet."""
    if client_state is None or value is None:
        return start_P
    if client_state.columns is None:
        return value[: len(start_P)]
    row_P = start_P.clone()
    client_state.columns.put(row_P, value)
    return row_P


def with_norms(row_P: Tensor, client_state: ClientState | None, value: Tensor | None) -> Tensor:
    """The row with the normalisation layers that the client keeps; unchanged if there are none."""
    if client_state is None or value is None or client_state.norms is None:
        return row_P
    kept_P, row_P = with_client_state(row_P, client_state, value), row_P.clone()
    client_state.norms.put(row_P, client_state.norms.of(kept_P))
    return row_P


def starting_row(start_P: Tensor, client_state: ClientState | None, value: Tensor | None) -> Tensor:
    """The initial row for the training of a client that received `start_P` and keeps `value`."""
    if client_state is None or value is None or client_state.resumed is None:
        return with_client_state(start_P, client_state, value)
    row_P = start_P.clone()
    client_state.resumed.put(row_P, client_state.resumed.of(value[: len(start_P)]))
    return row_P


def predicting_row(
    received_P: Tensor,
    client_state: ClientState | None,
    value: Tensor | None,
    client: Callable[[], ClientData] | None = None,
) -> Tensor:
    """The row for the predictions of a client that received `received_P` and keeps `value`.

    client: returns the client's data, if `client_state.reads_data`.
    """
    if client_state is not None and client_state.predicts is not None and value is not None:
        return _predicted(received_P, client_state, value, client)
    row_P, received_P = with_client_state(received_P, client_state, value), with_norms(received_P, client_state, value)
    if client_state is None or value is None:
        return row_P
    share = float(value[-1]) if client_state.learned_share else client_state.share
    return row_P if share == 1 else torch.lerp(received_P, row_P.to(received_P.device), share)


def _predicted(
    received_P: Tensor, client_state: ClientState, value: Tensor, client: Callable[[], ClientData] | None
) -> Tensor:
    """The row that `client_state.predicts` returns. Raises RunError if it is no row."""
    function = client_state.predicts
    received = with_norms(received_P, client_state, value).cpu().clone()
    if client_state.own_columns is not None:  # the function knows the method's columns alone
        assert client_state.columns is not None
        own = client_state.own_columns.of(with_client_state(received_P, client_state, value))
        value = torch.cat([own.to(value), value[client_state.columns.count :]])
    arguments: list[Any] = [received, value.cpu().clone()]
    assert function is not None
    if client_state.reads_data:
        assert client is not None
        arguments.append(client())
    row_P = call_plugin("predicts", function, *arguments, where=" of a client state")
    if not isinstance(row_P, Tensor) or row_P.shape != received_P.shape:
        raise RunError(
            f"{place_of(function)}: predicts of the client state {client_state.name!r} returned {described(row_P)}, "
            f"expected a row of {len(received_P)} numbers"
        )
    return row_P.detach().to(received_P)


def stored_numbers(
    value: Tensor | None, client_state: ClientState | None, first: dict[str, Tensor], spec: ParamSpec
) -> tuple[dict[str, Tensor], Tensor | None]:
    """The numbers that a client keeps for its program, and its momentum buffer or None.

    first: the numbers, by name, of a client without a value. Raises RunError if the value has others than these.
    """
    if value is None or client_state is None:
        return first, None
    at, numbers = spec.size if client_state.columns is None else client_state.columns.count, {}
    expected = at + sum(number.numel() for number in first.values())
    if len(value) not in (expected, expected + spec.trained):
        raise RunError(
            f"a client keeps {len(value) - at} numbers under {client_state.name!r}, but the client program now keeps "
            f"{expected - at} ({', '.join(f'{name}: {number.numel()}' for name, number in first.items())}); keep the "
            "same numbers in all rounds, also of a resumed run, or use another name for the client state"
        )
    for name, number in first.items():
        numbers[name] = value[at : at + number.numel()].reshape(number.shape)
        at += number.numel()
    return numbers, value[at:] if len(value) > at else None


class KeepsClientStates:
    """The methods of a backend that read, drop and restore the states of its clients."""

    client_states: "ClientStateStore"

    def forget(self, ids: np.ndarray) -> None:
        self.client_states.forget(ids)

    def client_state(self, name: str, client: int) -> Tensor | None:
        value = self.client_states.get((name, client))
        return None if value is None else self.client_states.tensor(value)

    def restore(self, entries: Iterable[tuple[ClientStateKey, SavedState]]) -> None:
        self.client_states.restore(entries)


class ClientStateStore:
    """Client states by (name, client), with a record of added, changed and dropped states: a `ClientStateSource`.

    A saved value is a `SavedState`. The backend defines the type of other values, which has the attribute `nbytes`: a
    tensor in this process, an object reference on Ray.
    """

    def __init__(self) -> None:
        self.unsaved = 0
        self._values: dict[ClientStateKey, Any] = {}
        self._names: set[str] = set()
        self._changed: set[ClientStateKey] = set()
        self._forgotten: set[ClientStateKey] = set()
        self._deferred: dict[int, dict[int, Any]] = {}  # by exchange of the present stage, then key (`Work.keys_of`)
        self._stage: tuple[int, bool] | None = None  # of the last exchange

    def begin(self, work: Work) -> None:
        """Drops deferred results of other stages."""
        if work.address.stage != self._stage:
            self._stage, self._deferred = work.address.stage, {}

    def of(self, work: Work) -> dict[int, Any]:
        """The client states, or deferred results, that `work` uses, by position among `work.stored_keys`."""
        stored = work.stored_keys.tolist()
        if work.deferred_from is not None:
            deferred = self._deferred[work.deferred_from]
            return {i: deferred[key] for i, key in enumerate(stored) if key in deferred}
        if work.client_state is None:
            return {}
        keys = [work.state_key(key) for key in stored]
        return {i: self._values[key] for i, key in enumerate(keys) if key in self._values}

    def keep(self, work: Work, states: Mapping[int, Any], deferred: Mapping[int, Any]) -> None:
        """Stores the client states of an exchange and its deferred results, both by key (`Work.keys_of`)."""
        if work.client_state is not None:
            entries = {work.state_key(key): value for key, value in states.items()}
            self._values.update(entries)
            self._names.update(name for name, _ in entries)
            self._changed.update(entries)
            self.unsaved += sum(value.nbytes for value in entries.values())
            self._forgotten.difference_update(entries)
        if isinstance(work, Train) and work.defer_aggregation:
            self._deferred.setdefault(work.address.exchange, {}).update(deferred)

    def forget(self, ids: np.ndarray) -> None:
        """Drops every state of the clients `ids`."""
        for key in itertools.product(self._names, np.asarray(ids).tolist()):
            if key in self._values:
                del self._values[key]
                self._changed.discard(key)
                self._forgotten.add(key)

    def move(self, entries: Mapping[ClientStateKey, Any]) -> None:
        self._values.update(entries)

    def write(self, files: Sequence[StateFile]) -> list[Any]:
        return [file.write(self.tensors(file.keys)) for file in files]

    def tensors(self, keys: Iterable[ClientStateKey]) -> Iterator[Tensor]:
        """The values of these keys, one at a time."""
        return (self.tensor(self._values[key]) for key in keys)

    def tensor(self, value: Any) -> Tensor:
        """The tensor of a stored value."""
        return value.tensor() if isinstance(value, SavedState) else value

    def __getitem__(self, key: ClientStateKey) -> Any:
        return self._values[key]

    def get(self, key: ClientStateKey) -> Any | None:
        return self._values.get(key)

    def keys(self) -> KeysView[ClientStateKey]:
        return self._values.keys()

    def changed(self, everything: bool = False) -> dict[ClientStateKey, int]:
        changed, self._changed, self.unsaved = sorted(self._values if everything else self._changed), set(), 0
        return {key: self._values[key].nbytes for key in changed}

    def forgotten(self) -> set[ClientStateKey]:
        forgotten, self._forgotten = self._forgotten, set()
        return forgotten

    def restore(self, entries: Iterable[tuple[ClientStateKey, Any]]) -> None:
        """Replaces all values by the values of a checkpoint."""
        self._values, self._changed, self._forgotten, self.unsaved = dict(entries), set(), set(), 0
        self._names = {name for name, _ in self._values}
