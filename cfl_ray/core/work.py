"""What a port asks of the hosts: one exchange with a cohort, described by value so that any host can do any piece of it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.local import LocalSGD, Rule
from cfl_ray.core.params import Columns
from cfl_ray.core.sketch import sketch

OwnedKey = tuple[str, int]  # (name, client) of something that a client owns


@dataclass(frozen=True)
class Address:
    """Names one exchange: every draw made in it starts with these."""

    seed: int
    round: int
    exchange: int


@dataclass(frozen=True)
class Rows:
    """Which row of which model table each of M clients uses."""

    table: int
    row_M: np.ndarray


@dataclass(frozen=True)
class Own:
    """Columns that live on the client under a name and survive the round: a personal model, a private head."""

    name: str
    columns: Columns | None = None  # None: the whole row
    private: bool = True  # False: also uploaded


@dataclass(frozen=True)
class Keep:
    """Columns of what a client uploads that come back row by row, for methods that compare clients."""

    columns: Columns
    change: bool = False  # the difference to where the client started
    sketch: int | None = None  # project to this many features where it is made (`core.sketch`); None: the columns themselves

    def features(self, rows: Tensor, seed: int) -> Tensor:
        """float32 (..., F) of whole rows (..., P), for the server's own models: what a client with this row would send."""
        values = self.columns.of(rows)
        if self.sketch is None or self.sketch >= values.shape[-1]:
            return values
        return torch.stack([sketch(row, self.sketch, seed) for row in values.reshape(-1, values.shape[-1])]).reshape(*rows.shape[:-1], self.sketch)

    @property
    def count(self) -> int:
        """F."""
        return min(self.columns.count, self.sketch or self.columns.count)


@dataclass(frozen=True)
class PullRows:
    """A proximal term (weight / 2) * ||w - anchor||^2 over some columns (None: all); its anchor may move."""

    weight: float
    anchor: Rows
    columns: Columns | None = None
    follow: float = 0.0  # anchor <- anchor - follow * weight * (anchor - w)
    every: int = 1  # after so many steps, and after the last


@dataclass(frozen=True)
class Mix:
    """Weighted sums to form while training: output row `out_E` gets `weight_E` times the result of client `client_E`."""

    num_rows: int
    out_E: np.ndarray
    client_E: np.ndarray  # index into the M clients
    weight_E: np.ndarray  # float64; each output row's weights add up to 1
    total_R: np.ndarray  # what the weights of each output row added up to before

    def only(self, keep_E: np.ndarray) -> Self:
        """Without the terms for which `keep_E` does not hold."""
        return replace(self, out_E=self.out_E[keep_E], client_E=self.client_E[keep_E], weight_E=self.weight_E[keep_E])


@dataclass(frozen=True)
class Work:
    """One exchange. `tables` are the models that cross to the hosts; fields ending in `_M` and `Rows` are per client."""

    address: Address
    ids_M: np.ndarray
    tables: tuple[Tensor, ...] = field(repr=False)
    own: Own | None = None
    beside: Rows | None = None  # frozen models whose logits are added to those of the others
    in_order: bool = False  # one piece, clients one after another
    pending: int | None = None  # the exchange of this round whose results are still where they were made, if this one uses them

    def take(self, index_m: np.ndarray) -> Self:
        """The piece with these clients, without the tables."""
        changes: dict[str, object] = {"tables": ()}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name.endswith("_M") and value is not None:
                changes[item.name] = value[index_m]
            elif isinstance(value, Rows):
                changes[item.name] = replace(value, row_M=value.row_M[index_m])
            elif isinstance(value, Mix):
                changes[item.name] = _take_mix(value, index_m, len(self.ids_M))
            elif item.name == "pulls":
                changes[item.name] = tuple(replace(pull, anchor=replace(pull.anchor, row_M=pull.anchor.row_M[index_m])) for pull in value)
        return replace(self, **changes)

    def rows(self) -> list[Rows]:
        """Every use of the tables."""
        return [value for item in fields(self) if isinstance(value := getattr(self, item.name), Rows)]

    @property
    def brought_by(self) -> np.ndarray:
        """The clients whose memory, or pending results, this work uses."""
        return self.ids_M

    @property
    def of_clients(self) -> bool:
        """Whether `ids_M` are clients."""
        return True

    @property
    def stays(self) -> tuple[bool, bool]:
        """Whether something new of every client stays behind: what it owns, and its result until it is mixed."""
        return False, False


def _take_mix(mix: Mix, index_m: np.ndarray, num_clients: int) -> Mix:
    position_M = np.full(num_clients, -1)
    position_M[index_m] = np.arange(len(index_m))
    mine = mix.only(position_M[mix.client_E] >= 0)
    return replace(mine, client_E=position_M[mine.client_E])


@dataclass(frozen=True)
class Train(Work):
    """Local training from `start`. Ends in weighted sums (`mix`), kept columns (`keep`), own memory, or several of them."""

    start: Rows = None
    local: LocalSGD = None
    steps_M: np.ndarray = None
    rule: Rule | None = None  # None: the gradient of one batch
    pulls: tuple[PullRows, ...] = ()
    mix: Mix | None = None
    keep: Keep | None = None
    mix_later: bool = False
    lengths: bool = False  # also say how far each upload is from what the client was sent
    measure: int = 0  # test images per client for P-local; 0: no test

    @property
    def stays(self) -> tuple[bool, bool]:
        return self.own is not None, self.mix_later

    def rows(self) -> list[Rows]:
        return [self.start, *([self.beside] if self.beside else []), *(pull.anchor for pull in self.pulls)]


@dataclass(frozen=True)
class MixPending(Work):
    """Weighted sums (`mix`) of results that an earlier exchange of the round left where they were trained."""

    mix: Mix = None


@dataclass(frozen=True)
class Combine(Work):
    """A function of column ranges of pending results, where all results of an output row are needed together.

    A unit of this work is a range and no client: `ids_M` are the first columns, `stop_M` the ends.
    """

    stop_M: np.ndarray = None
    members: np.ndarray = None  # whose results
    function: Callable[[Iterable[np.ndarray]], np.ndarray] = None  # of blocks (n, f), one after another, of the range's columns

    @property
    def of_clients(self) -> bool:
        return False

    @property
    def brought_by(self) -> np.ndarray:
        return self.members


@dataclass(frozen=True)
class Losses(Work):
    """Mean training loss (M, K) of the K rows of table 0 on each client's data."""

    num_models: int = 0
    max_samples: int | None = None

    def rows(self) -> list[Rows]:
        return [Rows(0, np.arange(self.num_models)), *([self.beside] if self.beside else [])]


@dataclass(frozen=True)
class Describe(Work):
    """A function of one client's data and a model: features (M, F)."""

    function: Callable = None
    anchor: Rows | None = None
    sketch: int | None = None  # F of a random projection done where the data are; None: the features themselves
    local: LocalSGD = None


@dataclass(frozen=True)
class TestClients(Work):
    """Tests each client's own model on its own test data: accuracy, macro-F1 and loss (M,)."""

    start: Rows = None
    vote: int = 0  # this many first rows of table 0 predict together, by the mean of their probabilities; 0: one model
    images: int | None = None  # of a shared test set, per client
    tune: LocalSGD | None = None  # train this much first (P-tune, or a method that adapts before it predicts)
    steps_M: np.ndarray | None = None

    def rows(self) -> list[Rows]:
        return [*_uses(self.start, self.vote), *([self.beside] if self.beside else [])]


@dataclass(frozen=True)
class TestShared(Work):
    """Tests row `start.row_M[j]` on shared test set `ids_M[j]`: confusion matrices (M, C, C) and loss per true class (M, C)."""

    start: Rows = None
    vote: int = 0

    @property
    def of_clients(self) -> bool:
        return False

    def rows(self) -> list[Rows]:
        return [*_uses(self.start, self.vote), *([self.beside] if self.beside else [])]


def _uses(start: Rows, vote: int) -> list[Rows]:
    return [Rows(0, np.arange(vote))] if vote else [start]


@dataclass(frozen=True)
class LeftOut:
    """Why an exchange went on without a client."""

    why: str  # follows "client 3: "
    late: bool = False  # it took too long; else what it has or made is not sound


@dataclass
class PieceResult:
    """What one piece found: arrays with a leading axis of its clients, the sums left with the host apart."""

    index_m: np.ndarray
    arrays: dict[str, np.ndarray]
    left_out: dict[int, LeftOut] = field(default_factory=dict)  # by position in the piece


@dataclass(frozen=True)
class Outcome:
    """What an exchange found: per-client arrays (M, ...) and, after training with a mix, sums (rows that got a term only)."""

    arrays: dict[str, np.ndarray]
    sums: dict[int, Tensor] = field(default_factory=dict)  # float64 (P,) by output row
    mass_R: np.ndarray | None = None  # float64: weights that actually arrived
    left_out: dict[int, LeftOut] = field(default_factory=dict)  # by position among the M clients


class Memory(Protocol):
    """What clients own, as a checkpoint saves it."""

    def changed(self, everything: bool = False) -> Iterator[tuple[OwnedKey, Tensor]]:
        """What clients own that changed since the last call, or all that they own, one at a time in a fixed order."""

    def forgotten(self) -> set[OwnedKey]:
        """What clients no longer own that they did at the last call."""

    def restore(self, entries: Iterable[tuple[OwnedKey, Tensor]]) -> None:
        """Takes over what clients owned when a checkpoint was written."""


class Backend(Memory, Protocol):
    """Does an exchange, somewhere: in this process, or on the hosts of a cluster."""

    def run(self, work: Work) -> Outcome: ...

    def use(self, federation: Any) -> None:
        """From now on, work is about the clients of this federation."""

    def forget(self, ids: np.ndarray) -> None:
        """Drops everything the clients `ids` own."""
