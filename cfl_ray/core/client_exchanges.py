"""The exchanges of clients: how work orders are assembled, counted as traffic, and protected."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from torch import Tensor

from cfl_ray.core.aggregation.rules import AggregationRule, Mean
from cfl_ray.core.backend import Backend
from cfl_ray.core.client_program import ClientProgram, first_numbers, lengths
from cfl_ray.core.exchange import LocalTraining, ModelTables, Sent
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.privacy import PrivacyError, Protection
from cfl_ray.core.secure_aggregation import missing
from cfl_ray.core.server_optimizers import ServerMoments
from cfl_ray.core.serving import Serving
from cfl_ray.core.updates import RoundStats, Updates
from cfl_ray.core.versions import NotAsynchronous, Received
from cfl_ray.core.work import (
    TEST,
    Address,
    Averaging,
    ClientState,
    Losses,
    Outcome,
    Replay,
    SecureSum,
    Train,
    UpdateFeatures,
    Work,
)
from cfl_ray.errors import ConfigError
from cfl_ray.plugins.calling import place_of

# (ids (M,), rounds of each) -> (distinct rounds of each, numbers of samples (M,))
History = Callable[[np.ndarray, Sequence[Sequence[int]]], tuple[tuple[tuple[int, ...], ...], np.ndarray]]


@dataclass(frozen=True)
class ClientExchanges:
    """The exchanges of the clients of a round, from which `Clients` makes what a method says."""

    ids_M: np.ndarray  # int64
    num_samples_M: np.ndarray  # int64: n_i, number of training samples
    spec: ParamSpec
    local: LocalSGD  # the method's local training, with the learning rate of this round
    backend: Backend = field(repr=False)
    seed: int
    round: int  # t, from 1
    stats: RoundStats = field(repr=False, default_factory=RoundStats)
    local_test_samples: int = 0  # test samples per client for P-local; 0: P-local is not measured
    local_parts: tuple[str, ...] = (TEST,)  # parts of the data that P-local is measured on
    evaluated: bool = False  # the clients are evaluated and do not train: their exchanges count down from -2
    choice_samples: int | None = None  # most training samples for `losses`; None: only its argument limits them
    # (whether the round waits for them) -> ids and sample counts of all clients that could take part in the round;
    # None: these clients are all
    reachable: Callable[[bool], tuple[np.ndarray, np.ndarray]] | None = field(repr=False, default=None)
    # the rounds in which clients' data differ, and their samples in all of them; None: no data change
    history: History | None = field(repr=False, default=None)
    replay: Replay | None = field(repr=False, default=None)  # set by `replaying`
    aggregation: AggregationRule = Mean()  # used in every average
    server_moments: ServerMoments | None = field(repr=False, default=None)  # None: models are the means themselves
    num_scores: int = 3  # of a test: the metrics of the task, then the loss
    protection: Protection = field(repr=False, default=Protection())  # hides uploads of single clients
    # returns the scores (M, num_scores) of the clients with the models of a Serving; None: outside of an evaluation
    tester: Callable[[Any, Serving], np.ndarray] | None = field(repr=False, default=None)
    received: Received | None = field(repr=False, default=None)  # of asynchronous rounds; None: a synchronous round
    # normalisation layers that clients keep beside the columns that the method says (`Method.norm`); None: none
    kept_norms: Columns | None = None

    def __len__(self) -> int:
        return len(self.ids_M)

    def select(self, mask_M: np.ndarray) -> Self:
        """The clients at `mask_M` (bool or indices), with the same `stats`."""
        index_m = np.arange(len(self))[mask_M]
        replay = None if self.replay is None else self.replay.take(index_m)
        return replace(self, ids_M=self.ids_M[index_m], num_samples_M=self.num_samples_M[index_m], replay=replay)

    def with_norms(self, client_state: ClientState | None) -> ClientState | None:
        """The client state with the normalisation layers that clients keep, which are also averaged."""
        if self.kept_norms is None:
            return client_state
        if client_state is None:
            return ClientState("norm", self.kept_norms, private=False)
        return client_state.keeping(self.kept_norms)

    def norms_in(self, client_state: ClientState) -> ClientState | None:
        """The client state in `serve` of a method whose clients keep this state but predict with the received model.

        None if clients keep no normalisation layers.
        """
        return None if self.kept_norms is None else client_state.norms_alone()

    def require_readable(self, values: str) -> None:
        """Raises PrivacyError if the server must not read these values of single clients.

        For methods whose server computes with values of single clients that no other call shows.
        """
        self._protection.require_readable(values)

    def reads(self, values: str) -> None:
        """The former name of `require_readable`."""
        warnings.warn("clients.reads is now called clients.require_readable", DeprecationWarning, stacklevel=2)
        self.require_readable(values)

    @property
    def _protection(self) -> Protection:
        """The protection of these uploads; none in an evaluation, whose uploads are no part of the training."""
        return Protection() if self.evaluated else replace(self.protection, examples=self.local.examples)

    def _check_permitted(self, how: LocalTraining, features: UpdateFeatures | None) -> None:
        """Raises PrivacyError or NotAsynchronous if the server would get results that this run does not have.

        Raises TypeError if `how` is no LocalTraining.
        """
        require_local_training(how)
        if how.program.trace:
            self.require_readable("the losses of local steps")
        for name in lengths(how.program, "reports", self.spec):
            self.require_readable(f"the {name} that clients report")
        if features is not None and self._protection.masks is not None:
            self.require_readable("the updates")
        if self._protection.examples is not None:  # noise protects the gradient of one batch
            own = [hook for hook in ("begin", "loss", "finish") if how.program.overrides(hook)]
            unlike = {
                "results of steps of its own, such as steps of several gradients": how.program.overrides("step"),
                f"results of a client program with its own {' and '.join(own)}": bool(own),
                "results of weighted samples": how.program.overrides("weigh"),
                "results of several models": how.num_models is not None,
                "results of clients one after another": how.chained,
            }
            for values, holds in unlike.items():
                if holds:
                    self.require_readable(values)
        if how.chained and self.received is not None:
            raise NotAsynchronous("its clients start from each other's results (chained)")
        if how.chained and self._protection.noise is not None:
            raise PrivacyError(
                "its clients start from each other's results (chained), so one client changes the uploads of others"
            )

    def _training(self, start: Sent, how: LocalTraining, local: LocalSGD) -> Train:
        """The work order for local training, without the use of its results (averages, features, client states)."""
        steps_M = self._steps_of(how, local)
        for term in how.proximal:
            self.spec.require_whole(term.columns or self.spec.trainable)
        if (examples := self._protection.examples) is not None:
            local = replace(local, examples=examples)
            self.stats.example_steps.append((self.ids_M, local, self.num_samples_M, steps_M))
        tables, kept = ModelTables(), first_numbers(how.program, self.spec)
        if taken := kept.keys() & {*how.given, how.program.kept_model}:
            raise ValueError(
                f"{place_of(how.program)} keeps numbers named {sorted(taken)}, which are also names of given values or "
                "of the kept model; rename one of them"
            )
        return Train(
            self._next_address(),
            self.ids_M,
            start=tables.rows(start),
            program=how.program,
            given=tables.given(how, len(self)),
            frozen_model=None if how.frozen_model is None else tables.rows(how.frozen_model),
            kept_numbers=sum(first.numel() for first in kept.values()),
            reports=lengths(how.program, "reports", self.spec),
            local=local,
            steps_M=steps_M,
            chained=how.chained,
            num_models=how.num_models,
            tables=tables.as_tuple(),
        )

    def _steps_of(self, how: LocalTraining, local: LocalSGD) -> np.ndarray:
        """Number of local steps of each client, int64 (M,)."""
        if how.steps_M is not None:
            return np.asarray(how.steps_M, np.int64)
        batches = how.program.batches_per_step
        return np.asarray(local.steps_of(self.num_samples_M, batches_per_step=batches), np.int64)

    def _check_uploads(self, program: ClientProgram, averaging: Averaging | None) -> None:
        """Raises an error if further uploads of a program cannot be averaged in this run."""
        for name, length in lengths(program, "uploads", self.spec).items():
            if averaging is None or not 0 < length <= self.spec.size:
                raise ValueError(
                    f"{place_of(program)} uploads {name} of {length} numbers beside the model: pass `average` to "
                    f"`train`, with 1 to P = {self.spec.size} numbers for each upload"
                )
            if self.received is not None:
                raise NotAsynchronous(f"its clients upload {name} beside their models")
            if self._protection.masks is not None or self._protection.noise is not None:
                self.require_readable(f"the {name} that clients upload beside their models")
            if not isinstance(self.aggregation, Mean):
                raise ConfigError(
                    f"{place_of(program)} uploads {name} beside the model, which only the mean averages; "
                    "set aggregation: mean"
                )

    def _averaging(
        self, average: np.ndarray, address: Address, private: Columns | None, models: int
    ) -> tuple[Averaging, SecureSum | None]:
        """The averages, and with secure aggregation the masks of their sums, whose traffic is counted.

        In a private run they are sums with fixed denominators. private: columns that are not uploaded. models: number
        of models that each client trains.
        """
        if self.received is not None:
            weighted = Averaging.of(np.asarray(average, np.float64) * self.received.weights(self.ids_M), len(self))
            of_changes = not self.received.mix_models  # their sums, which `Received.moved` divides
            averaging = replace(weighted, of_changes=of_changes, fixed=of_changes)
        else:
            averaging = self._protection.sums(Averaging.of(average, len(self)), len(self), models)
        if self._protection.masks is None:
            return averaging, None
        averaging, secure, (down, up) = self._protection.masked(
            averaging, address, self.ids_M, self.spec, private, models
        )
        clients = len(np.unique(self.ids_M))
        self.stats.traffic.down_bits += down * clients
        self.stats.traffic.up_bits += up * clients
        return averaging, secure

    def _count_results(self, work: Train, private: Columns | None) -> None:
        """Counts what clients upload after local training, but for masked models, which `_averaging` counts."""
        sends_models = work.averaging is not None or work.defer_aggregation
        if sends_models and self._protection.masks is None:
            self._count_upload(self.spec.sent() - (self.spec.sent(private) if private else 0))
        elif work.features is not None:
            self._count_upload(self.spec.sent(work.features.columns))
        self._count_upload(sum(lengths(work.program, "uploads", self.spec).values()))
        # once for all models of a client
        self.stats.traffic.up_bits += 32 * sum(work.reports.values()) * work.num_clients

    def _updates(
        self,
        outcome: Outcome,
        averaging: Averaging | None,
        private: Columns | None,
        work: Train,
        address: Address,
        number: int | None,
    ) -> Updates:
        """The updates of the exchange `work`, with noise on the sums of the exchange `address` in a private run."""
        uploads = lengths(work.program, "uploads", self.spec)
        means, models = outcome.means, 0 if averaging is None else averaging.num_rows
        if uploads and outcome.arrived_R is not None:
            own = {row: mean_P for row, mean_P in means.items() if row < models}
            outcome = replace(outcome, means=own, arrived_R=outcome.arrived_R[:models])
        if averaging is not None:
            outcome = self._protection.noisy_sums(outcome, averaging, address, self.spec, work)
            if number is None and self.server_moments is not None:
                number = self.server_moments.next_average()
        return Updates(
            outcome,
            averaging,
            private,
            work,
            self.spec.trained,
            average=number or 0,
            server_moments=self.server_moments,
            received=self.received,
            protection=self._protection,
            uploads={
                name: {row: means[at][:length] for row in range(models) if (at := number * models + row) in means}
                for number, (name, length) in enumerate(uploads.items(), 1)
            },
        )

    def _losses(
        self,
        sent: Sent,
        max_samples: int | None,
        frozen_model: Sent | None,
        errors: bool = False,
        client_state: ClientState | None = None,
    ) -> np.ndarray:
        if not len(self):
            return np.zeros((0, sent.num_models))
        if sent.row_MK is not None:
            return self._losses_by_version(sent, sent.row_MK, max_samples, frozen_model, errors, client_state)
        tables = ModelTables(sent.models_KP)
        work = Losses(
            self._next_address(),
            self.ids_M,
            num_models=len(sent.models_KP),
            max_samples=min((most for most in (max_samples, self.choice_samples) if most is not None), default=None),
            frozen_model=None if frozen_model is None else tables.rows(frozen_model),
            errors=errors,
            client_state=client_state,
            tables=tables.as_tuple(),
        )
        loss_MK = self._run(work).arrays["losses"]
        return np.nan_to_num(loss_MK, nan=np.inf, posinf=np.inf)  # argmin would select NaN

    def _losses_by_version(
        self,
        sent: Sent,
        row_MK: np.ndarray,
        max_samples: int | None,
        frozen_model: Sent | None,
        errors: bool,
        client_state: ClientState | None,
    ) -> np.ndarray:
        """`_losses` of the clients of each version, one version after another."""
        rows_VK, version_M = np.unique(row_MK, axis=0, return_inverse=True)
        loss_MK = np.empty(row_MK.shape)
        for version, row_K in enumerate(rows_VK):
            index = np.flatnonzero(version_M.reshape(-1) == version)
            frozen = frozen_model
            if frozen is not None and frozen.row_M is not None:
                frozen = Sent(frozen.models_KP, frozen.row_M[index])
            models = Sent(sent.models_KP[row_K])
            loss_MK[index] = self.select(index)._losses(models, max_samples, frozen, errors, client_state)
        return loss_MK

    def _versions(self, models_KP: Tensor) -> Sent | None:
        """These models in the versions that the clients have received; None: all clients have the present version."""
        versions = None if self.received is None else self.received.of(models_KP, self.ids_M)
        return None if versions is None else Sent(versions[0], row_MK=versions[1])

    def _count_upload(self, floats: int) -> None:
        self.stats.traffic.up_bits += 32 * floats * len(self)

    def _next_address(self) -> Address:
        self.stats.exchanges += 1
        return Address(self.seed, self.round, -1 - self.stats.exchanges if self.evaluated else self.stats.exchanges)

    def _run(self, work: Work) -> Outcome:
        if self._protection.noise is not None and len(np.unique(self.ids_M)) * work.models_per_client < len(self):
            raise PrivacyError(
                "a client is in an exchange more than once, so that it changes sums by more than the norm"
            )
        if not len(self) and self._protection.noise is not None:  # the sums have noise all the same
            arrived_R = None if work.averaging is None else np.zeros(work.averaging.num_rows)
            return Outcome(work.empty_result(0), arrived_R=arrived_R)
        outcome = self.backend.run(work if self.replay is None else replace(work, replay=self.replay))
        self.stats.excluded.update({int(work.ids_M[i]): exclusion for i, exclusion in outcome.excluded.items()})
        self.stats.fallbacks |= outcome.fallbacks
        if work.secure is not None and (reason := missing(work.secure, self.ids_M, outcome.arrays["reported"])):
            self.stats.lost_sums.append(reason)
        return outcome


def require_local_training(how: object) -> None:
    """Raises TypeError for what methods pass by mistake in place of a LocalTraining."""
    if not isinstance(how, LocalTraining):
        program = f"; for a client program write LocalTraining(program={type(how).__name__}(...))"
        hint = program if isinstance(how, ClientProgram) else ""
        raise TypeError(f"train: how must be a LocalTraining, got {type(how).__name__}{hint}")
