"""Work orders: one exchange with the clients, described by value so that any host can carry out any chunk of it.

There is one class per kind of work. It declares the fields that are per client (`PER_CLIENT`), the models that the work
uses (`rows`), and the result of an excluded client (`empty_result`). `engine.worker` carries the work out.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.client_program import ClientProgram
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.params import Columns
from cfl_ray.core.sketch import sketch

Anchor = TypeVar("Anchor")
OtherAnchor = TypeVar("OtherAnchor")


@dataclass(frozen=True)
class Address:
    """The seed, round and number of an exchange: the first parts of the random key of every draw in it (`core.rng`)."""

    seed: int
    round: int
    exchange: int  # from 1 in the training of a round, negative in its evaluation

    @property
    def in_evaluation(self) -> bool:
        """Whether the exchange belongs to the evaluation of the round."""
        return self.exchange < 0

    @property
    def stage(self) -> tuple[int, bool]:
        """The round, and whether it is evaluated or trained: models and results are shared within a stage."""
        return self.round, self.in_evaluation


# ---- parts of a work order: `take(index_m)` returns the part for some of the clients


@dataclass(frozen=True)
class Rows:
    """The row of a model table that each of M clients uses."""

    table: int  # index into `Work.tables`
    row_M: np.ndarray  # int64 (M,)

    def take(self, index_m: np.ndarray) -> Self:
        return replace(self, row_M=self.row_M[index_m])


@dataclass(frozen=True)
class Proximal(Generic[Anchor]):
    """A term (weight / 2) * ||w - anchor||^2 of the local objective.

    The anchor is a `Sent` in a method, `Rows` in a work order, and a row (P,) in an engine.
    With `follow` > 0 it moves too: anchor <- anchor - follow * weight * (anchor - w) after `every` steps and after the
    last step. The client then uploads the anchor and keeps w.
    """

    weight: float  # mu, lambda
    anchor: Anchor
    columns: Columns | None = None  # of whole tensors; None: all trained columns
    follow: float = 0.0
    every: int = 1
    # factor (M,) of each client's weight, only if the anchor does not move; None: 1
    factor_M: np.ndarray | None = None

    @property
    def acts(self) -> bool:
        """Whether the term has any effect."""
        return bool(self.weight or self.follow) and (self.columns is None or self.columns.count > 0)

    def moves_after(self, step: int, steps: int) -> bool:
        """Whether the anchor moves after step `step` (counted from 0) of `steps`."""
        return self.follow > 0 and ((step + 1) % self.every == 0 or step + 1 == steps)

    def with_anchor(self, anchor: OtherAnchor) -> "Proximal[OtherAnchor]":
        """The term with its anchor in another form."""
        return Proximal(self.weight, anchor, self.columns, self.follow, self.every, self.factor_M)

    def of_client(self, index: int, anchor: OtherAnchor) -> "Proximal[OtherAnchor]":
        """The term of the client at this position."""
        factor = 1.0 if self.factor_M is None else float(self.factor_M[index])
        return replace(self.with_anchor(anchor), weight=self.weight * factor, factor_M=None)

    def take(self: "Proximal[Rows]", index_m: np.ndarray) -> "Proximal[Rows]":
        """The term for the clients at `index_m`."""
        factor_M = None if self.factor_M is None else self.factor_M[index_m]
        return replace(self, anchor=self.anchor.take(index_m), factor_M=factor_M)


@dataclass(frozen=True)
class Averaging:
    """Weighted averages (R, P) of the results of M clients, as a sparse weight matrix of E entries."""

    num_rows: int  # R
    out_E: np.ndarray  # int64: output row
    client_E: np.ndarray  # int64: index into the M clients
    weight_E: np.ndarray  # float64; the weights of each output row add up to 1
    total_R: np.ndarray  # float64: sum of the weights of each output row before they were normalised
    # True: a row is the mean change W - w of its clients; False: their mean model
    of_changes: bool = False
    fixed: bool = False  # sums of changes are divided by `total_R`, whatever weight arrived
    # further uploads of each client, with the same weights: output row r of upload u is (u + 1) num_models + r
    uploads: tuple[str, ...] = ()

    @classmethod
    def of(cls, weight_RM: np.ndarray, num_clients: int) -> Self:
        """From weights >= 0 of any scale, (R, M), or (M,) for a single row. Raises ValueError for anything else."""
        weight_RM = np.atleast_2d(np.asarray(weight_RM, np.float64))
        if weight_RM.ndim != 2 or weight_RM.shape[1] != num_clients or not (weight_RM >= 0).all():
            shape = f"shape {weight_RM.shape}, least {weight_RM.min(initial=np.inf):g}"
            raise ValueError(f"average must be weights >= 0, (M,) or (R, M) with M = {num_clients}, got {shape}")
        total_R = weight_RM.sum(1)
        out_E, client_E = np.nonzero(weight_RM)
        return cls(len(weight_RM), out_E, client_E, weight_RM[out_E, client_E] / total_R[out_E], total_R)

    @property
    def num_models(self) -> int:
        """Number of output rows that are averages of models."""
        return self.num_rows // (1 + len(self.uploads))

    def with_uploads(self, names: Iterable[str]) -> Self:
        """The same averages of models and of these further uploads."""
        names = tuple(names)
        if not names:
            return self
        count, shift = 1 + len(names), self.num_rows * np.arange(1 + len(names))[:, None]
        return replace(
            self,
            num_rows=count * self.num_rows,
            out_E=(self.out_E + shift).reshape(-1),
            client_E=np.tile(self.client_E, count),
            weight_E=np.tile(self.weight_E, count),
            total_R=np.tile(self.total_R, count),
            uploads=names,
        )

    def subset(self, keep_E: np.ndarray) -> Self:
        """The entries at `keep_E`, bool (E,) or indices."""
        return replace(self, out_E=self.out_E[keep_E], client_E=self.client_E[keep_E], weight_E=self.weight_E[keep_E])

    def take(self, index_m: np.ndarray) -> Self:
        first_m, past_m = self._start_M.take(index_m, mode="clip"), self._start_M.take(index_m + 1, mode="clip")
        count_m = past_m - first_m
        client_e = np.repeat(np.arange(len(index_m)), count_m)
        # `_order_E` sorts the entries by client, so those of a client are adjacent
        at_e = np.arange(len(client_e)) + np.repeat(first_m - (np.cumsum(count_m) - count_m), count_m)
        mine = self.subset(self._order_E[at_e])
        return replace(mine, client_E=client_e)

    @cached_property
    def _order_E(self) -> np.ndarray:
        """Indices that sort the entries by client; cached for the chunks of an exchange."""
        return np.argsort(self.client_E, kind="stable")

    @cached_property
    def _start_M(self) -> np.ndarray:
        """Position in `_order_E` of each client's first entry, up to the last client with entries, and the end."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(self.client_E))])


@dataclass(frozen=True)
class ClientState:
    """Columns that stay on the client under a name between rounds: a personal model, a private head."""

    name: str
    columns: Columns | None = None  # None: the whole row
    private: bool = True  # False: the columns are also uploaded
    # weight of these columns in the model that the client predicts with; 1 - share is that of the received columns
    share: float = 1.0
    # with `columns` None: whether the last number that the client program keeps is the client's share
    learned_share: bool = False
    # with `columns` None: the columns that the next training starts from; None: all of them
    resumed: Columns | None = None
    # (received row (P,) with the client's `norms`, stored value: the columns without those that `keeping` added, then
    # the numbers of the client program) -> the row that the client predicts with; with an attribute `reads_data`, also
    # of the client (`ClientData`), in tests. None: as above
    predicts: Callable[..., Tensor] | None = None
    # set by `keeping`: the normalisation layers among the columns, and the columns without those that it added
    norms: Columns | None = None
    own_columns: Columns | None = None

    @property
    def private_columns(self) -> Columns | None:
        """The columns that are not uploaded; None: all are."""
        if not self.private:
            return None
        return self.columns if self.own_columns is None else self.own_columns

    @property
    def reads_data(self) -> bool:
        """Whether the model that a client predicts with depends on its training data."""
        return getattr(self.predicts, "reads_data", False)

    @property
    def predicts_alone(self) -> bool:
        """Whether a client with a value predicts with it, whatever it receives."""
        return self.columns is None and self.share == 1 and not self.learned_share and self.predicts is None

    def keeping(self, more: Columns) -> "ClientState":
        """This state, which also keeps normalisation layers, with which the client trains and predicts.

        They are also uploaded.
        """
        if self.columns is None:
            resumed = None if self.resumed is None else self.resumed.joined(more)
            return replace(self, resumed=resumed, norms=more)
        return replace(self, columns=self.columns.joined(more), norms=more, own_columns=self.columns)

    def norms_alone(self) -> "ClientState":
        """This state for predictions with the received model, in which only normalisation layers are the client's."""
        return replace(self, predicts=_received)


def _received(received_P: Tensor, value: Tensor) -> Tensor:
    return received_P


@dataclass(frozen=True)
class UpdateFeatures:
    """Columns of each client's upload, returned as features (M, F) to methods that compare clients."""

    columns: Columns
    change: bool = False  # True: of W - w, with w the model that the client started from
    sketch: int | None = None  # number of features after projection on the host (`core.sketch`); None: no projection

    def of_rows(self, rows_XP: Tensor, seed: int) -> Tensor:
        """Features (..., F), float32, of clients whose results are the rows (..., P)."""
        values = self.columns.of(rows_XP)
        if self.sketch is None or self.sketch >= values.shape[-1]:
            return values
        flat = values.reshape(-1, values.shape[-1])
        return torch.stack([sketch(row, self.sketch, seed) for row in flat]).reshape(*rows_XP.shape[:-1], self.sketch)

    @property
    def count(self) -> int:
        """F, the number of features."""
        return min(self.columns.count, self.sketch or self.columns.count)


@dataclass(frozen=True)
class Clip:
    """Clipping of a client's upload before the sum: the changes W - w of all its models, as one vector."""

    norm: float  # C, of the whole upload
    ends: tuple[int, ...]  # stop columns of the parts, each of which is clipped to norm / sqrt(parts)
    private: Columns | None = None  # columns that are not uploaded; they are zeros in the sums


@dataclass(frozen=True)
class RingNoise:
    """The noise that each client adds to every number of its upload in a secure sum."""

    secret: bytes = field(repr=False)  # of the random key of its draws
    scale: int  # sigma of the discrete Gaussian of one client; 0: no noise
    norm: int  # bound of the Euclidean norm of a client's whole numbers


@dataclass(frozen=True)
class SecureSum:
    """Masked uploads: each of M clients uploads every output row in the ring (`core.secure_aggregation`)."""

    clip: float  # c
    unit: int  # L, of a whole weight
    bits: int  # b
    needed: int  # neighbours that have to report, so that the masks of a client can be removed
    least: int  # clients that have to report
    neighbour_MX: np.ndarray  # int64: the clients with which each client has a pair mask
    private: Columns | None = None  # columns that are not uploaded; they are zeros in the sums
    noise: RingNoise | None = None  # of a private run

    def take(self, index_m: np.ndarray) -> Self:
        return replace(self, neighbour_MX=self.neighbour_MX[index_m])


@dataclass(frozen=True)
class Given:
    """Models and numbers that each of M clients gets for its client program, beside the model from which it starts."""

    models: Mapping[str, Rows] = field(default_factory=dict)  # by name
    number_of: Mapping[str, np.ndarray] = field(default_factory=dict)  # by name: (M, ...)
    proximal: tuple[Proximal[Rows], ...] = ()

    def take(self, index_m: np.ndarray) -> Self:
        models = {name: rows.take(index_m) for name, rows in self.models.items()}
        number_of = {name: values_M[index_m] for name, values_M in self.number_of.items()}
        return replace(self, models=models, number_of=number_of, proximal=tuple(p.take(index_m) for p in self.proximal))

    def rows(self) -> list[Rows]:
        """All rows of tables that these models and anchors are."""
        return [*(term.anchor for term in self.proximal), *self.models.values()]


@dataclass(frozen=True)
class Replay:
    """The rounds whose data, as a union, each of M clients uses in place of its present data."""

    rounds_M: tuple[tuple[int, ...], ...]

    def take(self, index_m: np.ndarray) -> Self:
        return replace(self, rounds_M=tuple(self.rounds_M[index] for index in index_m.tolist()))


# ---- kinds of work

TEST, VALIDATION = "test", "validation"  # the parts of a client's data that models are tested on


def scores_name(part: str) -> str:
    """The name of the scores on a part, among the arrays of a result."""
    return "scores" if part == TEST else f"{part}_scores"


# Metadata of a field with a value for each of the M clients: an array (M, ...), or a part with `take`. `Work.take` cuts
# these fields, and leaves all others as they are.
PER_CLIENT = {"per_client": True}


@dataclass(frozen=True)
class Work:
    """One exchange."""

    is_per_client: ClassVar[bool] = True  # whether `ids_M` are ids of clients
    address: Address
    ids_M: np.ndarray = field(metadata=PER_CLIENT)
    tables: tuple[Tensor, ...] = field(repr=False)  # model tables (K, P) for the hosts
    client_state: ClientState | None = None  # only `Train` changes it
    # its logits are added to those of the other models
    frozen_model: Rows | None = field(default=None, metadata=PER_CLIENT)
    averaging: Averaging | None = field(default=None, metadata=PER_CLIENT)
    # masks of the uploads; None: uploads are not masked
    secure: SecureSum | None = field(default=None, metadata=PER_CLIENT)
    replay: Replay | None = field(default=None, metadata=PER_CLIENT)  # None: clients use their present data
    chained: bool = False  # all clients in one chunk; each starts from the result of the previous client
    deferred_from: int | None = None  # exchange of this round whose deferred results the work uses; None: none

    def take(self, index_m: np.ndarray) -> Self:
        """The work for the clients at `index_m`, without the tables, at a cost that depends on these clients only."""
        changes: dict[str, Any] = {"tables": ()}
        for item in fields(self):
            value = getattr(self, item.name)
            if "per_client" in item.metadata and value is not None:
                changes[item.name] = value[index_m] if isinstance(value, np.ndarray) else value.take(index_m)
        return replace(self, **changes)

    def rows(self) -> list[Rows]:
        """All rows of tables that the work uses."""
        return [self.frozen_model] if self.frozen_model else []

    def columns_of(self, rows: Rows) -> int:
        """P, the number of columns of the models in the table of `rows`."""
        return self.tables[rows.table].shape[1]

    def empty_result(self, num_classes: int) -> dict[str, np.ndarray]:
        """Per-client arrays (M, ...) of excluded clients, which have no update, no finite loss and no score.

        Empty for work that returns nothing per client.
        """
        return {}

    def cost_M(self, num_samples_M: np.ndarray) -> np.ndarray:
        """Relative cost of each client's part, (M,), from its number of training samples."""
        return num_samples_M

    @property
    def states_per_client(self) -> int:
        """Number of keys in `stored_keys` of each entry of `ids_M`, side by side."""
        return 1

    @property
    def stored_keys(self) -> np.ndarray:
        """Keys (`keys_of`) of the client states, or of the deferred results, that this work uses, in order."""
        return self.ids_M

    @property
    def models_per_client(self) -> int:
        """Models that a client trains: its id is repeated that often in `ids_M`, and its models stay in one chunk."""
        return 1

    @property
    def num_clients(self) -> int:
        """Number of clients, each counted once for all its models."""
        return len(self.ids_M) // self.models_per_client

    def keys_of(self, ids_m: np.ndarray, index_m: np.ndarray) -> np.ndarray:
        """Keys, int64 (m,), of the results of the entries at these positions: id * K + k for model k of K."""
        return ids_m * self.models_per_client + index_m % self.models_per_client

    def state_key(self, key: int) -> tuple[str, int]:
        """(name, client) of the state with this key; the state of a client's k-th of several models is named NAME-k."""
        assert self.client_state is not None
        client, model = divmod(key, self.models_per_client)
        name = self.client_state.name
        return name if self.models_per_client == 1 else state_of_model(name, model), client


def state_of_model(name: str, model: int) -> str:
    """The name of the client state of one of several models that a client trains together."""
    return f"{name}-{model}"


@dataclass(frozen=True, kw_only=True)
class Train(Work):
    """Local training from `start`. Returns weighted means (`averaging`), features, client states, or several."""

    start: Rows = field(metadata=PER_CLIENT)
    local: LocalSGD
    steps_M: np.ndarray = field(metadata=PER_CLIENT)
    program: ClientProgram = ClientProgram()
    given: Given = field(default=Given(), metadata=PER_CLIENT)
    features: UpdateFeatures | None = None
    defer_aggregation: bool = False  # results stay on the hosts until a later exchange of the round averages them
    # int64: columns at which deferred results are cut, for work that needs some columns of all results
    deferred_cuts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    upload_distances: bool = False  # also return the distance between each upload and the model the client was sent
    clip: Clip | None = None  # clipping of uploads, which also returns whether each was within the norm; None: none
    local_test_samples: int = 0  # test samples per client for P-local; 0: no test
    local_parts: tuple[str, ...] = (TEST,)  # parts of the data that P-local is measured on
    # K: each client trains all models of table 0, and row k is the start of its k-th entry; None: one model, its start
    num_models: int | None = None
    kept_numbers: int = 0  # count of `ClientProgram.keeps`
    reports: Mapping[str, int] = field(default_factory=dict)  # `ClientProgram.reports`

    def parts(self, size: int) -> list[slice]:
        """The columns of each part of a deferred result of `size` columns."""
        return [slice(*pair) for pair in pairwise((0, *self.deferred_cuts.tolist(), size))]

    def positions_of(self, key_M: np.ndarray) -> np.ndarray:
        """Position of the entry that each of these results is of, int64 (M,); -1: there is none."""
        trained_M = self.keys_of(self.ids_M, np.arange(len(self.ids_M)))
        order = np.argsort(trained_M)
        at_M = order[np.searchsorted(trained_M, key_M, sorter=order).clip(max=len(order) - 1)]
        return np.where(trained_M[at_M] == key_M, at_M, -1)

    def rows(self) -> list[Rows]:
        return [self.start, *super().rows(), *self.given.rows(), *_first_rows(self.num_models or 0)]

    @property
    def finishes(self) -> bool:
        """Whether a client keeps, uploads or reports what its program may change from the first step on."""
        uploads = self.averaging is not None and bool(self.averaging.uploads)
        reports = bool(self.reports and self.program.moves)
        return self.program.overrides("finish") or uploads or bool(self.kept_numbers) or reports

    @property
    def models_per_client(self) -> int:
        return self.num_models or 1

    @property
    def stored_keys(self) -> np.ndarray:
        return self.ids_M if self.num_models is None else self.keys_of(self.ids_M, self.start.row_M)

    def empty_result(self, num_classes: int) -> dict[str, np.ndarray]:
        size = len(self.ids_M)
        arrays = {"valid": np.zeros(size, bool), "train_loss": np.full(size, np.nan)}
        if self.features is not None:
            arrays |= {
                "features": np.full((size, self.features.count), np.nan, np.float32),
                "norm": np.full(size, np.nan),
            }
        if self.program.trace:
            arrays["step_losses"] = np.full((size, self.program.trace), np.nan)
        for name, length in self.reports.items():
            arrays[f"report {name}"] = np.full((size, length), np.nan, np.float32)
        if self.local_test_samples:
            arrays |= {f"local_{scores_name(part)}": np.full((size, 2), np.nan) for part in self.local_parts}
        if self.upload_distances:
            arrays["upload_distance"] = np.full(size, np.nan)
        if self.clip is not None:
            arrays["unclipped"] = np.zeros(size, bool)
        if self.secure is not None:
            arrays["reported"] = np.zeros(size, bool)
        weighs = self.num_models is not None and self.program.overrides("weigh")
        return arrays | (_no_weights(size, self.models_per_client) if weighs else {})

    def cost_M(self, num_samples_M: np.ndarray) -> np.ndarray:
        return self.steps_M * np.minimum(num_samples_M, self.local.batch_size or num_samples_M)


@dataclass(frozen=True, kw_only=True)
class AverageDeferred(Work):
    """Weighted means (`averaging`) of results that an earlier exchange of the round left on the hosts."""

    start: Rows = field(metadata=PER_CLIENT)  # the models that the clients were sent in that exchange
    key_M: np.ndarray = field(metadata=PER_CLIENT)  # of the results
    clip: Clip | None = None

    @classmethod
    def of(cls, training: Train, address: Address, ids_M: np.ndarray, averaging: Averaging) -> Self:
        """The averages of the deferred results of `training`; clients without a result do not count."""
        key_M = training.keys_of(ids_M, np.arange(len(ids_M)))
        at_M = training.positions_of(key_M)
        start = Rows(0, np.where(at_M >= 0, training.start.row_M[at_M], 0))
        tables, from_ = (training.tables[training.start.table],), training.address.exchange
        kept = cls(address, ids_M, tables, deferred_from=from_, start=start, key_M=key_M)
        return replace(kept, averaging=averaging, clip=training.clip)

    @property
    def stored_keys(self) -> np.ndarray:
        return self.key_M

    def rows(self) -> list[Rows]:
        return [self.start, *super().rows()]

    def empty_result(self, num_classes: int) -> dict[str, np.ndarray]:
        given = {"valid": True, "unclipped": self.clip is not None, "reported": self.secure is not None}
        return {name: np.zeros(len(self.ids_M), bool) for name, is_given in given.items() if is_given}


@dataclass(frozen=True, kw_only=True)
class CombineColumns(Work):
    """A function of column ranges of deferred results, which needs all results of an output row together.

    The units of this work are ranges, not clients: `ids_M` are their first columns. Each is a part of the results.
    """

    is_per_client = False
    stop_M: np.ndarray = field(metadata=PER_CLIENT)  # int64: stop column of each range
    part_M: np.ndarray = field(metadata=PER_CLIENT)  # int64: number of the part
    members: np.ndarray  # int64: keys of the results that are combined
    function: Callable[[Iterable[np.ndarray]], np.ndarray]  # of blocks (n, f) of the range's columns

    @property
    def stored_keys(self) -> np.ndarray:
        return self.members


@dataclass(frozen=True, kw_only=True)
class Losses(Work):
    """Mean training loss (M, K) of the K rows of table 0 on each client's data."""

    num_models: int  # K
    max_samples: int | None = None  # number of samples to use, drawn once per client; None: all
    errors: bool = False  # shares of wrong classes in place of losses

    def rows(self) -> list[Rows]:
        return [Rows(0, np.arange(self.num_models)), *super().rows()]

    def empty_result(self, num_classes: int) -> dict[str, np.ndarray]:
        return {"losses": np.full((len(self.ids_M), self.num_models), np.inf)}


@dataclass(frozen=True, kw_only=True)
class Weigh(Work):
    """`ClientProgram.weigh` without training: mean weights (M, K) of clients' samples for the K models of table 0."""

    num_models: int  # K
    program: ClientProgram
    given: Given = field(metadata=PER_CLIENT)
    local: LocalSGD
    steps: int  # calls, in which the program finds what it has changed before; the losses do not change

    def rows(self) -> list[Rows]:
        return [*_first_rows(self.num_models), *super().rows(), *self.given.rows()]

    def empty_result(self, num_classes: int) -> dict[str, np.ndarray]:
        return _no_weights(len(self.ids_M), self.num_models)


def _first_rows(num_models: int) -> list[Rows]:
    return [Rows(0, np.arange(num_models))] if num_models else []


def _no_weights(size: int, num_models: int) -> dict[str, np.ndarray]:
    """The mean weights of the samples of excluded clients."""
    return {"weights": np.full((size, num_models), np.nan)}


@dataclass(frozen=True, kw_only=True)
class Describe(Work):
    """A function of each client's data and a model, with features (M, F) as its result."""

    function: Callable[..., Any]
    anchor: Rows | None = field(default=None, metadata=PER_CLIENT)  # None: the function needs no model
    sketch: int | None = None  # number of features after projection on the host (`core.sketch`); None: no projection
    local: LocalSGD

    def rows(self) -> list[Rows]:
        return [self.anchor] if self.anchor else []

    def most_features(self, inputs: int, classes: int) -> int:
        """The largest F that is expected; 0: not known.

        By the function's attribute `floats`, else by the columns of the anchor. inputs: numbers of a sample.
        """
        if floats := getattr(self.function, "floats", None):
            length = floats(inputs, classes)
        elif self.anchor is not None:
            length = self.columns_of(self.anchor)
        else:
            length = self.sketch or 0
        return min(length, self.sketch or length)

    def empty_result(self, num_classes: int) -> dict[str, np.ndarray]:
        size = len(self.ids_M)  # the results of valid clients determine F
        return {
            "features": np.zeros((size, 0), np.float32),
            "floats": np.zeros(size, np.int64),
            "valid": np.zeros(size, bool),
        }


@dataclass(frozen=True, kw_only=True)
class Evaluate(Work):
    """Test of models."""

    start: Rows = field(metadata=PER_CLIENT)
    # weights of the K rows of table 0 in the mean of their class probabilities; None: clients predict with `start`
    weight_MK: np.ndarray | None = field(default=None, metadata=PER_CLIENT)
    num_scores: int = 3  # of a client: the metrics of the task, then the loss
    counts: bool = False  # whether to return the numbers of test samples by true and predicted class (M, C, C)

    def rows(self) -> list[Rows]:
        own = self.start if self.weight_MK is None else Rows(0, np.arange(self.weight_MK.shape[1]))
        return [own, *super().rows()]


@dataclass(frozen=True, kw_only=True)
class EvaluateClients(Evaluate):
    """Test of each client's model on its own data: its scores on each part, e.g. accuracy, macro-F1, loss (M, 3)."""

    parts: tuple[str, ...] = (TEST,)
    max_test_samples: int | None = None  # test samples per client of a shared test set; None: all
    tune: LocalSGD | None = None  # local training before the test (P-tune, or a method that adapts before it predicts)
    steps_M: np.ndarray | None = field(default=None, metadata=PER_CLIENT)  # local steps of that training

    @property
    def states_per_client(self) -> int:
        """Of a mixture of K models K + 1: the state of each model, then the state that a client has for all."""
        return 1 if self.weight_MK is None else self.weight_MK.shape[1] + 1

    @property
    def stored_keys(self) -> np.ndarray:
        return np.add.outer(self.ids_M * self.states_per_client, np.arange(self.states_per_client)).ravel()

    def state_key(self, key: int) -> tuple[str, int]:
        assert self.client_state is not None
        client, model = divmod(key, self.states_per_client)
        last = model == self.states_per_client - 1
        return self.client_state.name if last else state_of_model(self.client_state.name, model), client

    def empty_result(self, num_classes: int) -> dict[str, np.ndarray]:
        size = len(self.ids_M)
        arrays = {scores_name(part): np.full((size, self.num_scores), np.nan) for part in self.parts}
        return arrays | ({"confusion": np.zeros((size, num_classes, num_classes), np.int32)} if self.counts else {})


@dataclass(frozen=True, kw_only=True)
class EvaluateShared(Evaluate):
    """Test of models on shared test sets `ids_M`: confusion matrices (M, C, C) and losses by true class (M, C).

    For metrics that need more than the confusion matrix, the scores (M, num_scores) instead, and with `counts` both.
    """

    is_per_client = False
    part: str = TEST
    by_confusion: bool = True

    def empty_result(self, num_classes: int) -> dict[str, np.ndarray]:
        size = len(self.ids_M)
        confusion = {"confusion": np.zeros((size, num_classes, num_classes), np.int64)}
        if not self.by_confusion:
            return {"scores": np.full((size, self.num_scores), np.nan)} | (confusion if self.counts else {})
        return confusion | {"loss": np.zeros((size, num_classes))}


# ---- results


@dataclass(frozen=True)
class Exclusion:
    """Exclusion of a client from an exchange."""

    reason: str  # follows "client 3: " in messages
    late: bool = False  # True: the client took too long; False: its data or its result are not valid


@dataclass
class ChunkResult:
    """Results of one chunk: arrays with a first axis of its clients. Weighted sums stay on the host."""

    index_m: np.ndarray  # the chunk's clients, as positions among the M clients of the work
    arrays: dict[str, np.ndarray]
    excluded: dict[int, Exclusion] = field(default_factory=dict)  # by position in the chunk
    seconds: float = 0.0  # the host's time; 0: not measured
    fallbacks: frozenset[str] = frozenset()  # lines: why clients were not trained by the chosen engine, or more slowly


@dataclass(frozen=True)
class Outcome:
    """Results of an exchange: per-client arrays (M, ...) and, with `averaging`, weighted means by output row."""

    arrays: dict[str, np.ndarray]
    # mean models or changes (P,) by output row; rows without any contribution are absent
    means: dict[int, Tensor] = field(default_factory=dict)
    arrived_R: np.ndarray | None = None  # float64 (R,): sum of the normalised weights that arrived
    excluded: dict[int, Exclusion] = field(default_factory=dict)  # by position among the M clients
    fallbacks: frozenset[str] = frozenset()  # lines: why clients were not trained by the chosen engine, or more slowly
