"""Reuse of test results and losses: an unchanged model is not tested again on unchanged data.

Such a result depends only on the values of the model and on the samples, not on the round or on other clients, so reuse
changes no bit of any metric. It applies to the model of a cluster without participants in a round, to the models that
clients choose from (the models of the previous evaluation), to personal models of clients that did not train, and to
the initial model.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from cfl_ray.core.backend import Backend, ClientStateKey, ClientStateSource, SavedState
from cfl_ray.core.server_optimizers import checksum
from cfl_ray.core.work import Evaluate, EvaluateClients, EvaluateShared, Exclusion, Losses, Outcome, Rows, Train, Work
from cfl_ray.data.federation import Federation
from cfl_ray.errors import RunError
from cfl_ray.plugins.calling import described, place_of

_OWN_MODEL = -1  # instead of a row: the client state is the whole model
_NO_MODEL = -2  # instead of a row: no such model
_NO_LIMIT = 2**62  # samples


class _Model(NamedTuple):
    """The first part of a result's key: the kind of work, checksums of its models, and the limit of its samples."""

    kind: str
    models: bytes  # a single model, or all voting models
    frozen: bytes
    limit: int | None = None


@dataclass(frozen=True)
class _Results:
    """Results of one model on U units, which are clients or test sets."""

    ids_U: np.ndarray  # int64, ascending
    version_U: np.ndarray  # int64: of the client state, or the number of samples
    arrays: dict[str, np.ndarray]  # (U, ...)

    def find(self, ids_M: np.ndarray, version_M: np.ndarray) -> np.ndarray:
        """Position of each unit, int64 (M,); -1 for an unknown unit."""
        at_M = np.minimum(np.searchsorted(self.ids_U, ids_M), len(self.ids_U) - 1)
        return np.where((self.ids_U[at_M] == ids_M) & (self.version_U[at_M] == version_M), at_M, -1)

    def updated(self, other: "_Results") -> "_Results":
        """These results and those of `other`, which replace these for shared units."""
        ids_U, first_U = np.unique(np.concatenate([other.ids_U, self.ids_U]), return_index=True)
        version_U = np.concatenate([other.version_U, self.version_U])[first_U]
        arrays = {name: np.concatenate([array, self.arrays[name]])[first_U] for name, array in other.arrays.items()}
        return _Results(ids_U, version_U, arrays)


# a model, its units as positions among the M units of the work, and its column (M,) in arrays (M, K); None: no column
_Group = tuple[_Model, np.ndarray, int | None]


@dataclass
class ReusingBackend:
    """A backend that carries out tests and comparisons of models only if their result is not known.

    It keeps the results of the latest two evaluations: scores, not models. Work of a training round uses known results
    and adds none.

    attackers: clients whose training labels may depend on the round.
    """

    backend: Backend
    federation: Federation
    attackers: np.ndarray
    latest: dict[_Model, _Results] = field(default_factory=dict)
    before: dict[_Model, _Results] = field(default_factory=dict)  # of the previous evaluation
    _present: Federation | None = None
    _evaluated: int = -1  # round of the latest evaluation
    _checksums: dict[int, tuple[Tensor, dict[int, bytes]]] = field(default_factory=dict)  # as `RayBackend._rows`
    _stage: tuple[int, bool] | None = None  # of the last exchange
    _changes: int = 0  # of client states
    # by name of a client state: number of the latest change of each client's state, int32 (N,); below 0: the state was
    # dropped; 0: unchanged since the start
    _change_N: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def client_states(self) -> ClientStateSource:
        return self.backend.client_states

    def run(self, work: Work) -> Outcome:
        if work.address.stage != self._stage:  # drops checksums of the stage before, which hold its models
            self._stage, self._checksums = work.address.stage, {}
        if not _is_reusable(work):
            return self._note_states(work, self._carried_out(work))
        self._begin(work)
        return self._completed(work)

    def _begin(self, work: Work) -> None:
        """Drops outdated results."""
        address = work.address
        if (present := self.federation.at(address.round)) is not self._present:
            self._present, self.latest, self.before = present, {}, {}
        if address.in_evaluation and address.round != self._evaluated:
            self._evaluated, self.latest, self.before = address.round, {}, self.latest

    def _completed(self, work: Work) -> Outcome:
        """The outcome; computed for the units and models with an unknown result, otherwise reused."""
        version_M, groups = self._versions(work), list(self._groups(work))
        arrays = work.empty_result(self.federation.shape.num_classes)
        trusted_M = ~np.isin(work.ids_M, self.attackers if isinstance(work, Losses) else [])
        missing_M, missing_k, excluded = ~trusted_M, list[int](), dict[int, Exclusion]()
        for number, (model, index_m, column) in enumerate(groups):
            known, at_m = self._known(model, work.ids_M[index_m], version_M[index_m])
            known_m = (at_m >= 0) & trusted_M[index_m]
            missing_M[index_m[~known_m]] = True
            missing_k += [] if known_m.all() else [number]
            for name, array in known.items():
                _column(arrays[name], column)[index_m[known_m]] = array[at_m[known_m]]
        if len(missing_m := np.flatnonzero(missing_M)):
            part = replace(work.take(missing_m), tables=work.tables)
            places: tuple[np.ndarray, ...] = (missing_m,)
            if isinstance(part, Losses):
                places = np.ix_(missing_m, np.array(missing_k))
                if len(missing_k) < part.num_models:
                    tables = (work.tables[0][missing_k], *work.tables[1:])
                    part = replace(part, num_models=len(missing_k), tables=tables)
            outcome = self._carried_out(part)
            excluded = {int(missing_m[i]): exclusion for i, exclusion in outcome.excluded.items()}
            for name, array in outcome.arrays.items():
                arrays[name][places] = array
        if work.address.in_evaluation:
            kept_M = trusted_M & ~np.isin(np.arange(len(work.ids_M)), list(excluded))
            for model, index_m, column in groups:
                index_m = index_m[kept_M[index_m]]
                of_model = {name: _column(array, column)[index_m] for name, array in arrays.items()}
                self._keep(model, work.ids_M[index_m], version_M[index_m], of_model)
        return Outcome(arrays, excluded=excluded)

    def _groups(self, work: Work) -> Iterator[_Group]:
        """The units of each model."""
        if isinstance(work, Losses):
            frozen, index_M = b"", np.arange(len(work.ids_M))
            if work.frozen_model is not None:
                frozen = self._checksum(work.tables[work.frozen_model.table], int(work.frozen_model.row_M[0]))
            for k in range(work.num_models):
                model = _Model("Errors" if work.errors else "Losses", self._checksum(work.tables[0], k), frozen)
                yield model, index_M, k
            return
        assert isinstance(work, EvaluateClients | EvaluateShared)
        row_M = work.start.row_M.astype(np.int64)
        if work.weight_MK is not None:
            row_M = np.zeros_like(row_M)
        state = work.client_state
        if state is not None and state.predicts_alone:
            row_M = np.where(self._versions(work) > 0, _OWN_MODEL, row_M)
        added = Rows(0, np.full(len(row_M), _NO_MODEL)) if work.frozen_model is None else work.frozen_model
        pairs, group_M = np.unique(np.stack([row_M, added.row_M], 1), axis=0, return_inverse=True)
        order = np.argsort(group_M.reshape(-1), kind="stable")
        bounds = np.cumsum(np.bincount(group_M.reshape(-1)))[:-1]
        limit = work.max_test_samples if isinstance(work, EvaluateClients) else None
        parts = work.parts if isinstance(work, EvaluateClients) else (work.part,)
        more = [*(["counts"] if work.counts else []), *([] if state is None else [state.name])]
        name = " ".join([type(work).__name__, *parts, *more])
        for (row, added_row), index_m in zip(pairs.tolist(), np.split(order, bounds), strict=True):
            if work.weight_MK is None:
                models = self._checksum(work.tables[work.start.table], row)
            else:
                models = b"".join(self._checksum(work.tables[0], k) for k in range(work.weight_MK.shape[1]))
            yield _Model(name, models, self._checksum(work.tables[added.table], added_row), limit), index_m, None

    def _versions(self, work: Work) -> np.ndarray:
        """The versions of the clients' states, int64 (M,), 0 if the work uses none; of losses the samples they use."""
        if isinstance(work, Losses):
            assert self._present is not None
            return np.minimum(self._present.num_samples_N[work.ids_M], work.max_samples or _NO_LIMIT)
        if work.client_state is None:
            return np.zeros(len(work.ids_M), np.int64)
        return self._changes_of(work.client_state.name)[work.ids_M]

    # ---- results by model

    def _known(
        self, model: _Model, ids_M: np.ndarray, version_M: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Known results (U, ...) of a model, and the position of each unit in them; -1 for an unknown unit."""
        known = [results for kept in (self.latest, self.before) if (results := kept.get(model)) is not None]
        if not known:
            return {}, np.full(len(ids_M), -1)
        results = known[0] if len(known) == 1 else known[1].updated(known[0])
        return results.arrays, results.find(ids_M, version_M)

    def _keep(self, model: _Model, ids_M: np.ndarray, version_M: np.ndarray, arrays: dict[str, np.ndarray]) -> None:
        if not len(ids_M):
            return
        ids_U, first_U = np.unique(ids_M, return_index=True)
        new = _Results(ids_U, version_M[first_U], {name: array[first_U] for name, array in arrays.items()})
        self.latest[model] = self.latest[model].updated(new) if model in self.latest else new

    def _checksum(self, table: Tensor, row: int) -> bytes:
        """Checksum of the values of a model."""
        if row < 0:
            return b"own" if row == _OWN_MODEL else b""
        _, known = self._checksums.setdefault(id(table), (table, {}))
        if row not in known:
            known[row] = checksum(table[row])
        return known[row]

    # ---- client states

    def _changes_of(self, name: str) -> np.ndarray:
        """Number of the latest change of each client's state of this name, int32 (N,)."""
        change_N = self._change_N.setdefault(name, np.zeros(0, np.int32))
        if (more := self.federation.num_clients - len(change_N)) > 0:
            change_N = self._change_N[name] = np.pad(change_N, (0, more))
        return change_N

    def _note_states(self, work: Work, outcome: Outcome) -> Outcome:
        if isinstance(work, Train) and work.client_state is not None:
            self._changes += 1
            self._changes_of(work.client_state.name)[work.ids_M[outcome.arrays["valid"]]] = self._changes
        return outcome

    def forget(self, ids: np.ndarray) -> None:
        self.backend.forget(ids)
        self._changes += 1
        for name in self._change_N:
            self._changes_of(name)[ids] = -self._changes

    def _carried_out(self, work: Work) -> Outcome:
        """The outcome of the backend. Raises RunError if a user's backend returns anything else."""
        outcome = self.backend.run(work)
        if not isinstance(outcome, Outcome):
            raise RunError(f"backend {place_of(self.backend)}: run must return an Outcome, got {described(outcome)}")
        return outcome

    def restore(self, entries: Iterable[tuple[ClientStateKey, SavedState]]) -> None:
        self.backend.restore(entries)
        self.latest, self.before, self._change_N = {}, {}, {}

    def use(self, federation: Federation) -> None:
        self.backend.use(federation)
        self.federation = federation

    def client_state(self, name: str, client: int) -> Tensor | None:
        return self.backend.client_state(name, client)


def _column(array: np.ndarray, column: int | None) -> np.ndarray:
    """A column of an array as a view, or the array."""
    return array if column is None else array[:, column]


def _is_reusable(work: Work) -> bool:
    """Whether the result depends only on models and the current data."""
    if not len(work.ids_M) or work.replay is not None:
        return False
    if isinstance(work, Losses):
        frozen = work.frozen_model
        is_shared = frozen is None or (frozen.table > 0 and len(np.unique(frozen.row_M)) == 1)
        return is_shared and work.client_state is None
    if not isinstance(work, Evaluate) or getattr(work, "tune", None) is not None:
        return False
    if isinstance(work, EvaluateClients) and work.counts:  # those of all clients take too much memory
        return False
    return work.weight_MK is None or bool((work.weight_MK == 1 / work.weight_MK.shape[1]).all())  # a vote
