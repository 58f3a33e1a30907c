"""Results of a cohort's training, and the statistics of a round."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.diagnostics import Diagnostics
from cfl_ray.core.events import ClusterEvent
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.params import Columns
from cfl_ray.core.privacy import Protection
from cfl_ray.core.reassigned import NONE_REASSIGNED, Reassigned
from cfl_ray.core.server_optimizers import ServerMoments
from cfl_ray.core.versions import NotAsynchronous, Received
from cfl_ray.core.work import TEST, VALIDATION, Averaging, Exclusion, Outcome, Train, scores_name

_NOT_AVERAGED = "these updates were not averaged: pass `average` to `train`, or call `Clients.average` first"


@dataclass(frozen=True)
class Updates:
    """Results of a cohort's training."""

    outcome: Outcome
    averaging: Averaging | None  # None: the results were not averaged
    private: Columns | None  # columns that are not uploaded; None: all are uploaded
    training: Train  # the exchange in which the clients trained
    trained: int  # number of trained columns, the first ones
    average: int = 0  # number of this average in the round, for the server optimiser
    server_moments: ServerMoments | None = field(repr=False, default=None)  # None: models are the means themselves
    received: Received | None = field(repr=False, default=None)  # of asynchronous rounds; None: a synchronous round
    protection: Protection = field(repr=False, default=Protection())
    # means of the client program's further uploads: by name, then by output row
    uploads: Mapping[str, Mapping[int, Tensor]] = field(repr=False, default_factory=dict)

    def averaged(self, default: Tensor) -> Tensor:
        """Weighted mean of every output row, float32 (R, P), after the step of the server optimiser, if any.

        default: the models before (R, P), used for rows without any contribution and for private columns. Raises
        ValueError if nothing was averaged.
        """
        return self._moved(default, self.means(default))

    def _moved(self, before_RP: Tensor, mean_RP: Tensor) -> Tensor:
        if self.server_moments is not None:
            changed = set(self.outcome.means)
            mean_RP = self.server_moments.moved(self.average, before_RP, mean_RP, changed, self.trained)
        if self.received is not None:
            self.received.versions.follow(before_RP, mean_RP)
        return mean_RP

    def means(self, default: Tensor) -> Tensor:
        """As `averaged`, without the step of the server optimiser."""
        if self.outcome.arrived_R is None:
            raise ValueError(_NOT_AVERAGED)
        received, of_changes = self.received, self.averaging is not None and self.averaging.of_changes
        if not of_changes and received is None and self.private is None:
            whole_RP = _table_of(self.outcome.means, len(default))
            if whole_RP is not None:
                return whole_RP
        rows_RP = default.clone()
        if received is not None and received.versions.strict:
            self._check_starts(default, received)
        full_R = np.zeros(0) if received is None else self._full_weights(received)
        for row, mean_P in self.outcome.means.items():
            if received is not None:
                rows_RP[row] = received.moved(default[row], mean_P, full_R[row], self.outcome.arrived_R[row])
            else:
                rows_RP[row] = default[row] + mean_P if of_changes else mean_P
        if self.private is not None:
            self.private.put(rows_RP, self.private.of(default))
        return rows_RP

    def _full_weights(self, received: Received) -> np.ndarray:
        """Weight (R,) of the valid clients of each output row, not reduced by their staleness."""
        assert self.averaging is not None
        averaging = self.averaging.subset(self.valid_M[self.averaging.client_E])
        weight_M = received.weights(self.training.ids_M)
        return np.bincount(averaging.out_E, averaging.weight_E / weight_M[averaging.client_E], averaging.num_rows)

    def _check_starts(self, default: Tensor, received: Received) -> None:
        """Raises NotAsynchronous if a model would move by changes of clients that started from another model."""
        assert self.averaging is not None
        start = self.training.start
        for out, client in zip(self.averaging.out_E.tolist(), self.averaging.client_E.tolist(), strict=True):
            start_P = self.training.tables[start.table][start.row_M[client]]
            if not received.versions.is_past_of(start_P, default[out]):
                raise NotAsynchronous("its models are averages over clients that started from other models")

    def damped(self, start: Tensor, total: float) -> Tensor:
        """Rows of `start` (R, P), each moved towards its weighted mean by the share of its weight in `total`."""
        share_R = self.weight_R / total if total else np.zeros(len(start))
        means = self.means(start)
        rows = [torch.lerp(a, b, share) for a, b, share in zip(start, means, share_R.tolist(), strict=True)]
        return self._moved(start, torch.stack(rows))

    def uploaded(self, name: str, default: Tensor) -> Tensor:
        """Weighted mean of a further upload of the client program for every output row, float32 (R, length).

        default: (R, length), for rows without any contribution. Raises ValueError for other names and shapes.
        """
        if name not in self.uploads:
            raise ValueError(f"the clients uploaded no {name!r} beside their models, only {sorted(self.uploads)}")
        rows_RX = default.clone()
        for row, mean_X in self.uploads[name].items():
            if rows_RX[row].shape != mean_X.shape:
                raise ValueError(f"the default of {name!r} has rows of {rows_RX.shape[1]} numbers, not {len(mean_X)}")
            rows_RX[row] = mean_X
        return rows_RX

    def reported(self, name: str) -> Tensor:
        """Numbers that each client reported, float32 (M, length); NaN for excluded clients."""
        return torch.from_numpy(self.outcome.arrays[f"report {name}"])

    @property
    def arrived_R(self) -> np.ndarray:
        """Share of each output row's weight that arrived, float64 (R,). Raises ValueError if nothing was averaged."""
        if self.outcome.arrived_R is None:
            raise ValueError(_NOT_AVERAGED)
        return self.outcome.arrived_R

    @property
    def weight_R(self) -> np.ndarray:
        """Weight of each output row that arrived, float64 (R,), in the scale of the given weights.

        Staleness does not reduce it: it reduces the changes themselves.
        """
        if self.averaging is None:
            raise ValueError(_NOT_AVERAGED)
        share_R = self.arrived_R if self.received is None else self._full_weights(self.received)
        return share_R * np.nan_to_num(self.averaging.total_R)

    @property
    def features_MF(self) -> Tensor:
        """Requested features, float32 (M, F); NaN for excluded clients."""
        if "features" not in self.outcome.arrays:
            raise ValueError("these updates have no features: pass `features` to `train`")
        return torch.from_numpy(self.outcome.arrays["features"])

    @property
    def valid_features_MF(self) -> Tensor:
        """Rows of `features_MF` of the clients that were not excluded."""
        return self.features_MF if self.valid_M.all() else self.features_MF[torch.from_numpy(self.valid_M)]

    @property
    def norm_M(self) -> np.ndarray:
        """Euclidean norm of the features before any projection, float64 (M,); NaN for excluded clients."""
        return self.outcome.arrays["norm"]

    @property
    def valid_M(self) -> np.ndarray:
        """Bool (M,): False for an excluded client, whose data or update is invalid, or which took too long."""
        return self.outcome.arrays["valid"]

    @property
    def train_loss_M(self) -> np.ndarray:
        """Mean mini-batch loss over the last local epoch, float64 (M,); NaN for excluded clients.

        Raises PrivacyError in a private run, and with secure aggregation.
        """
        self.protection.require_readable("the training losses")
        return self.outcome.arrays["train_loss"]

    @property
    def step_loss_MS(self) -> np.ndarray:
        """Losses of the first local steps, `ClientProgram.trace` of them, float64; NaN if a client has fewer."""
        return self.outcome.arrays["step_losses"]


def _table_of(means: Mapping[int, Tensor], num_rows: int) -> Tensor | None:
    """The tensor (R, P) of which these means are all rows, in order; None if there is no such tensor in memory."""
    table_RP = means[0]._base if 0 in means else None
    if table_RP is None or len(table_RP) != num_rows or len(means) != num_rows:
        return None
    same = all(row in means and means[row].data_ptr() == table_RP[row].data_ptr() for row in range(num_rows))
    return table_RP if same else None


@dataclass(frozen=True)
class MixtureUpdates:
    """Results of a cohort whose clients each trained K models (`Clients.train_mixture`)."""

    updates: Updates  # by client and model, those of a client side by side
    num_models: int  # K

    def averaged(self, default: Tensor) -> Tensor:
        """Weighted mean of every model, as `Updates.averaged`; default: the models before (K, P)."""
        return self.updates.averaged(default)

    def damped(self, start: Tensor, total: float) -> Tensor:
        """Every model, moved towards its weighted mean by the share of its weight in `total`."""
        return self.updates.damped(start, total)

    @property
    def valid_M(self) -> np.ndarray:
        """Bool (M,): whether the update of any model of the client was valid."""
        return np.logical_or.reduce(self._by_client(self.updates.valid_M), 1)

    @property
    def weight_MK(self) -> np.ndarray:
        """Mean weights of each client's samples, float64 (M, K); NaN for excluded clients.

        Of a `core.mixtures.Mixture` they are the mixture weights after the M step.
        """
        if "weights" in self.updates.outcome.arrays:
            return self._of_client("weights")
        return np.where(self.valid_M[:, None], 1.0, np.full((1, self.num_models), np.nan))

    def reported(self, name: str) -> Tensor:
        """Numbers that each client reported, float32 (M, length); NaN for excluded clients."""
        return torch.from_numpy(self._of_client(f"report {name}"))

    @property
    def train_loss_M(self) -> np.ndarray:
        """Sum of the weighted losses of all models, float64 (M,), and errors, as `Updates.train_loss_M`."""
        return np.nansum(self._by_client(self.updates.train_loss_M), 1)

    @property
    def local_scores(self) -> dict[str, np.ndarray]:
        """Scores of P-local of each client's trained model with the largest weight, float64 (M, 2), by part."""
        best_M = np.nan_to_num(self.weight_MK).argmax(1)
        scores = local_scores_of(self.updates.training, self.updates.outcome)
        return {part: self._by_client(table)[np.arange(len(best_M)), best_M] for part, table in scores.items()}

    def _by_client(self, array: np.ndarray) -> np.ndarray:
        return array.reshape(-1, self.num_models, *array.shape[1:])

    def _of_client(self, name: str) -> np.ndarray:
        """The value of each client: that of its first valid model."""
        first_M = self._by_client(self.updates.valid_M).argmax(1)
        return self._by_client(self.updates.outcome.arrays[name])[np.arange(len(first_M)), first_M]


def local_scores_of(training: Train, outcome: Outcome) -> dict[str, np.ndarray]:
    """Scores of P-local, float64 (M, 2), by the part of the data that it was measured on; empty if it was not."""
    if not training.local_test_samples:
        return {}
    return {part: outcome.arrays[f"local_{scores_name(part)}"] for part in training.local_parts}


@dataclass
class Traffic:
    """Bits sent to (down) and by (up) clients, summed over clients."""

    down_bits: int = 0
    up_bits: int = 0


@dataclass
class RoundStats:
    """The facts of a round in progress, to which its clients, the method and the round loop add.

    The clients add traffic, losses, local scores and exclusions, the method diagnostics and events. When the round is
    complete, its `RoundRecord` is made from them.
    """

    round: int = 0
    phase: str = ""  # of the method when the round began
    evaluated: bool = False  # whether the round is evaluated at its end
    traffic: Traffic = field(default_factory=Traffic)  # of the run so far
    exchanges: int = 0  # number of exchanges so far
    excluded: dict[int, Exclusion] = field(default_factory=dict)  # by client
    train_loss: dict[int, float] = field(default_factory=dict)  # by client
    # by client: the first two scores of P-local, accuracy and macro-F1 of classes
    local_scores: dict[int, tuple[float, float]] = field(default_factory=dict)
    local_validation_scores: dict[int, tuple[float, float]] = field(default_factory=dict)  # on validation data
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    events: list[ClusterEvent] = field(default_factory=list)
    fallbacks: set[str] = field(default_factory=set)  # why the chosen engine did not train clients, or more slowly
    # clients that took local steps with privacy of single samples, how, their samples, and their steps
    example_steps: list[tuple[np.ndarray, LocalSGD, np.ndarray, np.ndarray]] = field(default_factory=list)
    lost_sums: list[str] = field(default_factory=list)  # why secure sums could not be read
    began: float = field(default_factory=time.perf_counter)
    time_ms: int = 0  # end of the training, since 1970
    assign_before_N: np.ndarray | None = None  # clusters of the clients before the round
    reassigned: Reassigned = NONE_REASSIGNED  # the clients whose cluster changed
    metrics: dict[str, float] = field(default_factory=dict)
    numbers: list[str] = field(default_factory=list)  # diagnostics of the method among the metrics, by name
    scores_MV: np.ndarray | None = None  # float64: client, the task's metrics, loss of each client; None: not evaluated
    notes: list[str] = field(default_factory=list)  # one line each, for the user

    def note_training(
        self, ids_M: np.ndarray, loss_M: np.ndarray, scores: Mapping[str, np.ndarray], valid_M: np.ndarray
    ) -> None:
        """Keeps the training losses, and the scores of P-local as `local_scores_of`, of the clients at `valid_M`."""
        ids = ids_M[valid_M].tolist()
        self.train_loss.update(zip(ids, loss_M[valid_M].tolist(), strict=True))
        for part, scores_M2 in scores.items():
            self.local_scores_on(part).update(zip(ids, map(tuple, scores_M2[valid_M].tolist()), strict=True))

    def local_scores_on(self, part: str) -> dict[int, tuple[float, float]]:
        """The first two scores of P-local by client, on this part of the data."""
        return {TEST: self.local_scores, VALIDATION: self.local_validation_scores}[part]

    @property
    def rejected(self) -> dict[int, str]:
        """Clients whose data or results were not valid, and why."""
        return {client: exclusion.reason for client, exclusion in self.excluded.items() if not exclusion.late}

    @property
    def late(self) -> dict[int, str]:
        """Clients that took too long, and how long."""
        return {client: exclusion.reason for client, exclusion in self.excluded.items() if exclusion.late}
