"""The port through which a method trains and queries the clients of a round.

Models and numbers that are sent or uploaded are counted as traffic, in floats of 32 bits.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.aggregation.apply import aggregate, range_cuts
from cfl_ray.core.aggregation.rules import ClippingRule, Mean
from cfl_ray.core.client_exchanges import ClientExchanges, require_local_training
from cfl_ray.core.client_program import Batch, ClientProgram, Gradient, Held, ProgramClient, lengths
from cfl_ray.core.describing import CheckedFunction, ClientData
from cfl_ray.core.events import births_and_deaths, cluster_event
from cfl_ray.core.exchange import LocalTraining, ModelTables, Sent, with_numbers_kept
from cfl_ray.core.params import Columns
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import UNASSIGNED
from cfl_ray.core.updates import MixtureUpdates, RoundStats, Traffic, Updates, local_scores_of
from cfl_ray.core.versions import NotAsynchronous
from cfl_ray.core.work import (
    AverageDeferred,
    ClientState,
    Describe,
    EvaluateClients,
    Proximal,
    Replay,
    UpdateFeatures,
    Weigh,
)

__all__ = [
    "Batch",
    "ClientData",
    "ClientProgram",
    "ClientState",
    "Clients",
    "Gradient",
    "Held",
    "LocalTraining",
    "ProgramClient",
    "Proximal",
    "RoundStats",
    "Sent",
    "Traffic",
    "UpdateFeatures",
    "Updates",
]


@dataclass(frozen=True)
class Clients(ClientExchanges):
    """The clients of a round, in a fixed order.

    Methods read `ids_M`, `num_samples_M`, `spec`, `local`, `seed` and `round`; the round loop sets the other fields. In
    an exchange, `send`, `broadcast` or `known_models` is followed by `train`, `choose`, `losses` or `describe`.
    """

    def replaying(self, rounds_M: Sequence[Sequence[int]]) -> "Clients":
        """The clients, whose exchanges use the union of their data of earlier rounds in place of the present data.

        Equal data of several rounds count once. `num_samples_M` is that of the union.

        rounds_M: rounds of each client, from 0 (the first data) to the present one, at least one.
        """
        if self.history is None:
            return self
        distinct_M, num_samples_M = self.history(self.ids_M, rounds_M)
        is_present = all(rounds == (self.round,) for rounds in distinct_M)
        return replace(self, num_samples_M=num_samples_M, replay=None if is_present else Replay(distinct_M))

    def all_reachable(self, *, waits: bool = True) -> "Clients":
        """All clients that are online, reachable and do not drop out in this round, including this cohort.

        waits: whether the round waits for them, in virtual time; False if only their weights are read.
        """
        if self.reachable is None:
            return self
        ids, num_samples = self.reachable(waits)
        return replace(self.not_drawn(), ids_M=ids, num_samples_M=num_samples, replay=None)

    def not_drawn(self) -> "Clients":
        """The same clients, which are not a random cohort, so that their privacy is not amplified."""
        return replace(self, protection=self.protection.of_all_reachable())

    def weights(self, kind: str = "samples") -> np.ndarray:
        """Weight of each client in an average, float64 (M,): n_i for "samples", 1 for "uniform" and in private runs."""
        by_samples = kind == "samples" and self.protection.noise is None
        return self.num_samples_M.astype(np.float64) if by_samples else np.ones(len(self))

    def first_row(self) -> np.ndarray:
        """Row 0 for every client, int64 (M,)."""
        return np.zeros(len(self), np.int64)

    # ---- diagnostics

    def record(
        self,
        name: str,
        value: Any,
        axes: Sequence[str] = (),
        *,
        ids: np.ndarray | None = None,
    ) -> None:
        """Reports a diagnostic of this round: a number, which is recorded like a metric, or an array.

        The last array of each name is recorded with the next evaluated round, if it differs from the array recorded
        before.

        name: of a-z, 0-9 and _; not that of a metric. Common ones are in docs/metrics.md.
        value: a number, an array with one or two axes, or a function without arguments that returns such an array and
            is called only if the array is recorded. All values are finite or NaN. A symmetric matrix with diagonal 0
            may have the condensed form (pairs (0, 1), (0, 2) .., as `clustering.agglomerative.distances` returns it).
        axes: name of each axis of an array: "clients", "clusters", or any other word.
        ids: clients of the axis "clients"; None: these clients.

        An axis has at most 10,000 clients or clusters; if both axes are of clients or clusters, 1,000 clients or 256
        clusters. Of more clients a random sample is recorded, the same in all rounds, and of more clusters the first
        ones. Raises RunError for anything else.
        """
        self.stats.diagnostics.add(name, value, axes, self.ids_M if ids is None else ids)

    def event(
        self, kind: str, *, cluster: int | None = None, into: Iterable[int] = (), because: Mapping[str, Any]
    ) -> None:
        """Reports a split, merge, birth or death of clusters for the record of the round.

        Fields: `core.events.ClusterEvent`. because: the values and thresholds that decided it. Raises ValueError for
        invalid fields, and in `serve` and `diagnose`, which change no clusters.
        """
        if self.evaluated:
            raise ValueError(
                f"the event {kind!r} was reported in an evaluation; clusters change in round, join and drift"
            )
        self.stats.events.append(cluster_event(self.round, kind, cluster, into, because))

    def member_events(self, before_K: np.ndarray, after_K: np.ndarray, **because: Any) -> None:
        """Reports the clusters that became non-empty as births, and those that became empty as deaths.

        before_K, after_K: `State.members_K` before and after clients were assigned; clusters keep their numbers.
        """
        if not self.evaluated:
            self.stats.events += births_and_deaths(self.round, before_K, after_K, because)

    def test(self, serving: Serving) -> np.ndarray:
        """Scores (M, V) of the models of `serving` on each client's test data: the task's metrics, then the loss.

        For `Method.diagnose`, to score other models than those served; no traffic. NaN for a client without test data
        or model. Raises ValueError outside of an evaluation: training must not see test data.
        """
        if self.tester is None:
            raise ValueError("clients are tested in `diagnose` only, after a round that is evaluated")
        return self.tester(self, serving)

    # ---- sending

    def send(self, models_KP: Tensor, row_M: np.ndarray | None = None, *, columns: Columns | None = None) -> Sent:
        """Sends each client one model.

        row_M: row of `models_KP` for each client; None: row 0. columns: the columns that are sent; None: all.
        Raises ValueError for rows that do not exist.
        """
        row_M = np.zeros(len(self), np.int64) if row_M is None else np.asarray(row_M, np.int64)
        if len(row_M) != len(self) or (len(row_M) and not 0 <= row_M.min() <= row_M.max() < len(models_KP)):
            unplaced = "; -1 is a client without a cluster" if (row_M < 0).any() else ""
            raise ValueError(
                f"send: {len(self)} clients and {len(models_KP)} models, got rows {row_M}; each client needs a row in "
                f"0 .. {len(models_KP) - 1}{unplaced}"
            )
        self.count_download(self.spec.sent(columns))
        if self.received is not None:
            used, at_M = np.unique(row_M, return_inverse=True)
            if (sent := self._versions(models_KP[used])) is not None:
                return sent.choose(at_M)
        return Sent(models_KP, row_M)

    def broadcast(self, models_KP: Tensor, *, shared: Columns | None = None) -> Sent:
        """Sends all models to every client. shared: columns that are equal in all models, and sent once."""
        once = self.spec.sent(shared) if shared and len(models_KP) else 0
        self.count_download(len(models_KP) * (self.spec.sent() - once) + once)
        return self._versions(models_KP) or Sent(models_KP)

    def known_models(self, models_KP: Tensor) -> Sent:
        """Models that the clients already have, such as the common start or an earlier broadcast; no traffic."""
        return Sent(models_KP, self.first_row() if len(models_KP) == 1 else None)

    def count_upload(self, floats: int) -> None:
        """Counts `floats` numbers per client as uploaded to the server, besides models and features.

        Raises PrivacyError in a private run, and with secure aggregation.
        """
        if floats:
            self.require_readable("further numbers")
        self._count_upload(floats)

    def count_download(self, floats: int) -> None:
        """Counts `floats` numbers per client as downloaded, besides models."""
        self.stats.traffic.down_bits += 32 * floats * len(self)

    # ---- exchanges

    def train(
        self,
        start: Sent,
        *,
        client_state: ClientState | None = None,
        how: LocalTraining = LocalTraining(),
        average: np.ndarray | None = None,
        features: UpdateFeatures | Columns | None = None,
        defer_aggregation: bool = False,
        keep_as_local_model: bool | np.ndarray = True,
        average_number: int | None = None,
    ) -> Updates:
        """Trains every client on its own data, from its row of `start`.

        client_state: columns that start from the client's state, if it has one, and are kept as its new state.
        how: client program, proximal terms and steps.
        average: weights >= 0 of any scale: (M,) of a single average, or (R, M). Sums form on the hosts; only the
            averages (R, P) are returned.
        features: columns of each client's upload that are returned, (M, F), for methods that compare clients.
        defer_aggregation: leave the results on the hosts, until `Clients.average` averages them in the same round.
        keep_as_local_model: whether the result is the client's model, which protocol P-local measures; bool (M,) if
            that differs by client, without persistent momentum.
        average_number: identifies this average among those of a round. A server optimiser continues with the moments
            of the same number in the previous round. None: numbered in the order of the calls.
        """
        client_state = self.with_norms(client_state)
        features = UpdateFeatures(features) if isinstance(features, Columns) else features
        self._check_permitted(how, features)
        keeps = how.num_models is not None or bool(np.any(keep_as_local_model))
        local, client_state = with_numbers_kept(how.sgd or self.local, client_state, keeps, how.program, self.spec)
        private = client_state.private_columns if client_state else None
        work, averaging, secure = self._training(start, how, local), None, None
        if average is not None:
            averaging, secure = self._averaging(average, work.address, private, work.models_per_client)
        self._check_uploads(how.program, averaging)
        rule = None if averaging is None or isinstance(self.aggregation, Mean) else self.aggregation
        summed = averaging if rule is None else None  # a rule needs the results, not their sums
        work = replace(
            work,
            client_state=client_state,
            averaging=summed and summed.with_uploads(lengths(how.program, "uploads", self.spec)),
            secure=secure,
            features=features,
            defer_aggregation=defer_aggregation or rule is not None,
            deferred_cuts=range_cuts(self.aggregation, self.spec.size, client_state, work.num_clients),
            upload_distances=isinstance(self.aggregation, ClippingRule),
            clip=self._protection.clip(self.spec, private),
            local_test_samples=self.local_test_samples if keeps else 0,
            local_parts=self.local_parts,
        )
        self._count_results(work, private)
        outcome = self._run(work)
        if features is not None:
            outcome = self._protection.noisy_features(outcome, self.ids_M, work.address)
        valid_M = outcome.arrays["valid"] & keep_as_local_model
        self.stats.note_training(self.ids_M, outcome.arrays["train_loss"], local_scores_of(work, outcome), valid_M)
        if averaging is not None and rule is not None:
            aggregated = aggregate(rule, self.backend, work, outcome, self.ids_M, averaging)
            outcome = replace(outcome, means=aggregated.means, arrived_R=aggregated.arrived_R)
        return self._updates(outcome, averaging, private, work, work.address, average_number)

    def train_mixture(
        self, received: Sent, how: LocalTraining = LocalTraining(), *, average: np.ndarray
    ) -> MixtureUpdates:
        """Trains all K models on every client's own data, with the weights of its samples that the program gives.

        The models of a client are trained on the same batches, by the program of `how` (`ClientProgram.weigh`). It
        uploads all of them, and reports once. With `local.persist` it keeps a momentum buffer for each model.
        P-local measures the model with its largest mean weight.

        received: the models, after `broadcast`.
        how: as in `train`, of each client; models that were broadcast (`received`, as the anchor of a proximal term)
            stand for the model that is trained.
        average: weight (M,) >= 0, of any scale, of each client in all K averages, or (K, M): row k in that of model k.
        """
        if self.received is not None:
            raise NotAsynchronous("its clients train several models of a mixture together")
        require_local_training(how)
        count = len(received.models_KP)
        entries = self.select(np.repeat(np.arange(len(self)), count))  # (client, model), sorted by client
        weight_KMK = np.zeros((count, len(self), count))
        weight_KMK[np.arange(count), :, np.arange(count)] = average
        updates = entries.train(
            received.choose(np.tile(np.arange(count), len(self))),
            how=how.of_models(count, len(self)),
            average=weight_KMK.reshape(count, -1),
            keep_as_local_model=False,
        )
        mixtures = MixtureUpdates(updates, count)
        scores = mixtures.local_scores if self.local_test_samples else {}
        loss_Mk = updates.outcome.arrays["train_loss"].reshape(-1, count)
        self.stats.note_training(self.ids_M, np.nansum(loss_Mk, 1), scores, mixtures.valid_M)
        return mixtures

    def fit_mixture(self, received: Sent, how: LocalTraining, *, steps: int = 1) -> np.ndarray:
        """Mean weights of each client's samples, float64 (M, K), by `how.program.weigh` without training.

        Of a `core.mixtures.Mixture` they are the mixture weights after `steps` E and M steps. NaN for a client whose
        data are not valid. Raises ValueError if `steps` is below 1, or the program has no `weigh`.
        """
        if steps < 1:
            raise ValueError(f"fit_mixture: steps must be at least 1, got {steps}")
        require_local_training(how)
        if not how.program.overrides("weigh"):
            raise ValueError(f"fit_mixture: the client program {type(how.program).__name__} has no weigh")
        if not len(self):
            return np.zeros((0, len(received.models_KP)))
        tables = ModelTables(received.models_KP)
        given = tables.given(how, len(self))
        work = Weigh(
            self._next_address(),
            self.ids_M,
            num_models=len(received.models_KP),
            program=how.program,
            given=given,
            local=how.sgd or self.local,
            steps=steps,
            tables=tables.as_tuple(),
        )
        return self._run(work).arrays["weights"]

    def average(self, updates: Updates, weight_RM: np.ndarray, *, average_number: int | None = None) -> Updates:
        """Averages the results of a `train(..., defer_aggregation=True)` of this round; no further traffic.

        weight_RM: as `average` in `train`. Clients without a valid result do not take part.
        average_number: as in `train`.
        """
        work, address = updates.training, self._next_address()
        averaging, secure = self._averaging(weight_RM, address, updates.private, 1)
        if not isinstance(self.aggregation, Mean):
            outcome = aggregate(self.aggregation, self.backend, work, updates.outcome, self.ids_M, averaging)
        else:
            outcome = self._run(replace(AverageDeferred.of(work, address, self.ids_M, averaging), secure=secure))
        return self._updates(outcome, averaging, updates.private, work, address, average_number)

    def restart_moments(self, models_KP: Tensor) -> None:
        """Resets the moments of these models of merged clusters in the server optimiser, if the run has one."""
        if self.server_moments is not None:
            self.server_moments.forget(models_KP)

    def losses(
        self,
        sent: Sent,
        *,
        max_samples: int | None = None,
        frozen_model: Sent | None = None,
        errors: bool = False,
        client_state: ClientState | None = None,
    ) -> np.ndarray:
        """Mean training loss of each of the K models on each client's data, float64 (M, K); inf if it is NaN.

        errors: return the share of training samples that a model misclassifies, in place of the loss.
        max_samples: number of samples of each client to use, drawn once for all rounds, at most `choice_samples`;
            None: all.
        frozen_model: a model whose logits are added to those of every model.
        client_state: columns of the client's state, such as a private head, which replace those of every model.

        The losses are uploaded; if clients only choose among the models, use `choose`. Raises PrivacyError in a private
        run.
        """
        self.require_readable("the losses")
        return self._losses(sent, max_samples, frozen_model, errors, client_state)

    def choose(
        self,
        sent: Sent,
        *,
        max_samples: int | None = None,
        frozen_model: Sent | None = None,
        upload: bool = False,
        diagnostic: str = "",
        client_state: ClientState | None = None,
    ) -> np.ndarray:
        """The model with the least training loss for each client, int64 (M,), the lowest index on ties.

        UNASSIGNED for a client without any finite loss: its data are invalid, or it took too long. The losses stay with
        the client. In a private run the server may use the choice only as the row to which it adds the client's update.
        With secure aggregation the choice is not uploaded.

        upload: whether the choice counts as an upload of one number.
        diagnostic: name under which the losses are reported; empty: they are not reported.
        Other arguments: as in `losses`.
        """
        if self._protection.examples is not None:
            self.require_readable("the choice among models")
        loss_MK = self._losses(sent, max_samples, frozen_model, client_state=client_state)
        if diagnostic and not self.evaluated:
            self.record(diagnostic, np.where(np.isfinite(loss_MK), loss_MK, np.nan), ("clients", "clusters"))
        if upload and self._protection.masks is None:
            self._count_upload(1)
        return least_loss(loss_MK)

    def accuracies(self, sent: Sent) -> np.ndarray:
        """Accuracy of each of the K models on each client's TEST data, float64 (M, K); 0 without test data.

        Choosing a model by it leaks test labels; only for the reproduction of published results that did so.
        """
        self.require_readable("the accuracies")
        accuracy_KM = []
        for k in range(sent.num_models):
            tables = ModelTables()
            start, scores = tables.rows(sent.choose(np.full(len(self), k))), self.num_scores
            work = EvaluateClients(self._next_address(), self.ids_M, tables.as_tuple(), start=start, num_scores=scores)
            accuracy_KM.append(self._run(work).arrays["scores"][:, 0])
        return np.nan_to_num(np.stack(accuracy_KM, 1))

    def describe(
        self,
        function: Callable[..., Any],
        anchor: Sent | None = None,
        *,
        sketch: int | None = None,
        floats: int | None = None,
        client_state: ClientState | None = None,
    ) -> tuple[Tensor, np.ndarray]:
        """Applies a function to each client: its results, float32 (M, F), and bool (M,), False for an excluded client.

        function: called as `function(client, anchor_P)` with a `ClientData` on the host that reads the client's data.
            It returns a vector of finite numbers, a tensor or an array of any shape, which is flattened. Results of
            different lengths are padded with zeros.
        anchor: the model that each client passes to the function; None: no model.
        sketch: project each result to this many features on the host (`core.sketch`); None: no projection.
        floats: numbers that a client uploads, as its paper counts; None: length of its result before projection.
        client_state: columns of the client's state, which replace those of the anchor.
        """
        if self._protection.masks is not None or self._protection.examples is not None:
            self.require_readable("descriptions")
        if not len(self):
            return torch.zeros(0, sketch or 0), np.zeros(0, bool)
        tables = ModelTables()
        work = Describe(
            self._next_address(),
            self.ids_M,
            function=CheckedFunction(function),
            anchor=None if anchor is None else tables.rows(anchor),
            sketch=sketch,
            client_state=self.with_norms(client_state),
            local=self.local,
            tables=tables.as_tuple(),
        )
        arrays = self._run(work).arrays
        self.stats.traffic.up_bits += 32 * int(arrays["floats"].sum() if floats is None else floats * len(self))
        found_MF = torch.from_numpy(arrays["features"])
        if (noise := self._protection.noise) is not None:
            sampled = self._protection.sampled
            found_MF = noise.signatures_of(found_MF, self.ids_M, work.address, "descriptions", sampled)
        return found_MF, arrays["valid"]


def least_loss(loss_MK: np.ndarray) -> np.ndarray:
    """The model with the least loss for each client, int64 (M,), the lowest on ties; UNASSIGNED: no loss is finite."""
    return np.where(np.isfinite(loss_MK).any(1), loss_MK.argmin(1), UNASSIGNED)
