"""Carries out pieces of exchanges; the same code runs in `simulate` and on a client host.

`Worker` has one method per kind of work; `core.work` defines the kinds and the form of their results.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cfl_ray.core.sketch import sketch
from cfl_ray.core.work import (
    AverageDeferred,
    CombineColumns,
    Describe,
    EvaluateClients,
    EvaluateShared,
    Exclusion,
    Losses,
    PieceResult,
    Rows,
    Train,
    UpdateFeatures,
    Work,
)
from cfl_ray.data.federation import Federation
from cfl_ray.engine import manual, scoring, sequential, span, vectorised
from cfl_ray.engine.attack import Attack
from cfl_ray.engine.client_state import client_state_value, stored_velocity, with_client_state
from cfl_ray.engine.client_view import ClientView
from cfl_ray.engine.failure import naming_client
from cfl_ray.engine.network import Network
from cfl_ray.engine.reduce import HostSums, PieceSums, combine_columns, upload_distance
from cfl_ray.engine.task import ProximalTask, TrainingResult, TrainingTask
from cfl_ray.engine.validation import ANY_POWER, invalid_data_reason, invalid_update_reason, invalid_value_reason

RowLookup = Callable[[int, int], Tensor]  # (table, row) -> the model (P,)
Samples = tuple[Tensor, Tensor]  # x (n, *shape), y (n,)
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class KeptByClients:
    """Client states and deferred results of a piece, by position in the piece."""

    states: dict[int, Tensor] = field(default_factory=dict)
    deferred: dict[int, Tensor] = field(default_factory=dict)  # results that a later exchange averages


@dataclass(frozen=True)
class _Piece:
    """A piece while it is carried out: the work, access to its models, and its clients' stored values."""

    work: Work
    row: RowLookup
    stored: Mapping[int, Tensor] | Sequence[Tensor]  # by position: client state, or deferred results
    kept: KeptByClients = field(default_factory=KeptByClients)
    excluded: dict[int, Exclusion] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.work.ids_M)

    def client(self, index: int) -> int:
        return int(self.work.ids_M[index])

    def model(self, rows: Rows, index: int) -> Tensor:
        """The model (P,) of one client under this use of a table."""
        return self.row(rows.table, int(rows.row_M[index]))

    def frozen(self, index: int) -> Tensor | None:
        return None if self.work.frozen_model is None else self.model(self.work.frozen_model, index)

    def value_of(self, index: int) -> Tensor | None:
        """The stored value of one client, if it has one."""
        return self.stored.get(index) if isinstance(self.stored, Mapping) else self.stored[index]

    def exclude(self, index: int, reason: str) -> None:
        self.excluded[index] = Exclusion(reason)


@dataclass
class Worker:
    """Carries out one piece at a time with a network and the federation.

    engine: "sequential", "manual", "vectorised" (the clients of a piece together) or "span". Where it does not apply,
        the sequential engine is used.
    """

    network: Network
    federation: Federation
    engine: str = "sequential"
    attack: Attack = Attack()

    def __post_init__(self) -> None:
        self.data = self.federation  # as of the current round

    def run(
        self,
        work: Work,
        index_m: np.ndarray,
        row: RowLookup,
        stored: Mapping[int, Tensor] | Sequence[Tensor],
        sums: HostSums,
    ) -> tuple[PieceResult, KeptByClients]:
        """Carries out a piece. Returns its result and the values that its clients keep; adds weighted sums to `sums`.

        stored: client states or, where the work uses deferred results, those; by position.
        """
        piece = _Piece(work, row, stored)
        self.data = self.federation.at(work.address.round)
        match work:
            case Train():
                arrays = self._train(work, piece, sums)
            case AverageDeferred():
                arrays = self._average_deferred(work, piece, sums)
            case CombineColumns():
                arrays = {"combined": combine_columns(work, stored)}
            case Losses():
                arrays = self._losses(work, piece)
            case Describe():
                arrays = self._describe(work, piece)
            case EvaluateClients():
                arrays = self._evaluate_clients(work, piece)
            case EvaluateShared():
                arrays = self._evaluate_shared(work, piece)
            case _:
                raise TypeError(f"no worker method for {type(work).__name__}")
        return PieceResult(index_m, arrays, piece.excluded), piece.kept

    # ---- training

    def _train(self, work: Train, piece: _Piece, sums: HostSums) -> Arrays:
        arrays = self._empty(work)
        averages = PieceSums(work.averaging) if work.averaging is not None else None
        summed = set() if averages is None else self._train_sums(work, piece, averages, arrays)
        for result in self._results(work, piece, summed):
            index, row_P, upload_P = result.index, result.row_P, result.upload_P
            if reason := self._invalid_reason(result):
                piece.exclude(index, reason)
                continue
            arrays["valid"][index], arrays["train_loss"][index] = True, result.train_loss
            if averages is not None:
                averages.add(index, upload_P, piece.model(work.start, index))
            if work.features is not None:
                start_P = piece.model(work.start, index) if work.features.change else None
                seed = work.address.seed
                arrays["features"][index], arrays["norm"][index] = _features(work.features, upload_P, start_P, seed)
            if work.upload_distances:
                sent_P = piece.model(work.start, index)
                arrays["upload_distance"][index] = upload_distance(work.client_state, upload_P, sent_P)
            if work.client_state is not None:
                piece.kept.states[index] = client_state_value(work.client_state, result)
            if work.defer_aggregation:
                piece.kept.deferred[index] = upload_P.cpu().clone()
            if work.local_test_samples:  # last: it may load another row into the network
                logits = scoring.additive_logits(self.network, row_P, piece.frozen(index))
                scores, _ = self._scores(piece.client(index), logits, work.local_test_samples)
                arrays["local_scores"][index] = scores[:2]  # the evaluation reports invalid test data
        if averages is not None:
            sums.add(averages)
        return arrays

    def _train_sums(self, work: Train, piece: _Piece, averages: PieceSums, arrays: Arrays) -> set[int]:
        """Trains the clients whose results are only summed, where the span engine sums them without their rows.

        Returns their positions.
        """
        needs_rows = work.features or work.client_state or work.upload_distances or work.defer_aggregation
        if self.engine != "span" or needs_rows or work.local_test_samples or work.chained:
            return set()
        honest = [i for i in range(len(piece)) if not self.attack.attacks(piece.client(i), work.address)]
        tasks = self._span_tasks(work, piece, honest)
        positions = list(tasks)
        for first, stack in span.stacks(self.network, list(tasks.values())):
            weights: dict[tuple[int, int], dict[int, float]] = {}  # of the clients, by output row and start
            for number, task in enumerate(stack.tasks):
                index = positions[first + number]
                reason = stack.invalid_reason(number) or _invalid_loss_reason(stack.losses[number])
                if reason:
                    piece.exclude(index, f"its update has {reason}")
                    continue
                arrays["valid"][index], arrays["train_loss"][index] = True, stack.losses[number]
                for out, weight in averages.terms_of.get(index, ()):
                    weights.setdefault((out, task.start_P.data_ptr()), {})[number] = weight
            for (out, _), weight_of in weights.items():
                averages.add_change(out, stack.change(weight_of))
        return set(tasks)

    def _span_tasks(self, work: Train, piece: _Piece, indices: Iterable[int]) -> dict[int, TrainingTask]:
        """The tasks, by position, that the span engine trains together."""
        if self.engine != "span" or work.chained or not span.stackable(self.network):
            return {}
        tasks = {i: task for i in indices if (task := self._training_task(work, piece, i))}
        return {i: task for i, task in tasks.items() if span.applies(self.network, task)}

    def _empty(self, work: Work) -> Arrays:
        return work.empty_result(self.federation.shape.num_classes)

    def _invalid_reason(self, result: TrainingResult) -> str | None:
        """Reason why a result is not valid; None for a valid one."""
        rows = [result.row_P] if result.replacement_P is None else [result.row_P, result.replacement_P]
        trained = self.network.spec.trained
        reason = next((found for row_P in rows if (found := invalid_update_reason(row_P, trained))), None)
        reason = reason or _invalid_loss_reason(result.train_loss)
        return reason and f"its update has {reason}"

    def train_one(self, task: TrainingTask) -> TrainingResult:
        """Trains one client, with the span or manual engine where it is configured and applies, else sequentially."""
        engine = {"span": span, "manual": manual}.get(self.engine)
        if engine is None or not engine.applies(self.network, task):
            return next(sequential.train(self.network, [task]))
        return next(engine.train(self.network, [task]))

    def _results(self, work: Train, piece: _Piece, skip: set[int]) -> Iterator[TrainingResult]:
        """Trains the clients of a piece except those to skip. Engines reuse the memory of a result for the next one."""
        if self.engine == "vectorised" and not work.chained:
            tasks = {i: task for i in range(len(piece)) if (task := self._training_task(work, piece, i))}
            positions, stack = list(tasks), list(tasks.values())
            if len(stack) > 1 and vectorised.refusal(self.network, stack) is None:
                for result in vectorised.train(self.network, stack):
                    yield self._attacked(work, piece, replace(result, index=positions[result.index]))
                return
        indices = [index for index in range(len(piece)) if index not in skip]
        stacked = self._span_tasks(work, piece, indices)
        positions = list(stacked)
        for result in span.train(self.network, list(stacked.values())):
            yield self._attacked(work, piece, replace(result, index=positions[result.index]))
        before_P = None
        for index in indices:
            if index in stacked:
                continue
            task = self._training_task(work, piece, index)
            if task is None:
                continue
            if before_P is not None:
                task = replace(task, start_P=before_P)
            with naming_client(task.client, "training"):
                result = self.train_one(task)
            result = self._attacked(work, piece, replace(result, index=index))
            if work.chained and invalid_update_reason(result.upload_P, self.network.spec.trained) is None:
                before_P = result.upload_P.clone()
            yield result

    def _attacked(self, work: Train, piece: _Piece, result: TrainingResult) -> TrainingResult:
        """The result; of an attacker, with its forged upload."""
        client = piece.client(result.index)
        if not self.attack.attacks(client, work.address):
            return result
        sent_P = piece.model(work.start, result.index)
        return replace(result, replacement_P=self.attack.upload(client, result.upload_P, sent_P, work.address))

    def _training_task(self, work: Train, piece: _Piece, index: int) -> TrainingTask | None:
        """The task of one client; None, and the client is excluded, where its data are not valid."""
        samples = self._samples(piece, index)
        if samples is None:
            return None
        value, state = piece.value_of(index), work.client_state
        start_P = with_client_state(piece.model(work.start, index), state, value)
        return TrainingTask(
            piece.client(index),
            start_P,
            *samples,
            steps=int(work.steps_M[index]),
            local=work.local,
            address=work.address,
            proximal=tuple(
                ProximalTask(term.weight, piece.model(term.anchor, index), term.columns, term.follow, term.every)
                for term in work.proximal
            ),
            local_step=work.local_step,
            frozen_P=piece.frozen(index),
            velocity=stored_velocity(value, state, start_P) if work.local.persist and state is not None else None,
        )

    def _samples(self, piece: _Piece, index: int) -> Samples | None:
        """Training samples of a client, with the labels it trains on; None, and the client is excluded, if invalid."""
        client = piece.client(index)
        with naming_client(client, "reading its data"):
            x, y = self.data.train(client)
            reason = invalid_data_reason(x, y, self.federation.shape)
        if reason:
            piece.exclude(index, f"its data have {reason}")
            return None
        return x, self.attack.labels(client, y, self.federation.shape.num_classes, piece.work.address)

    def _average_deferred(self, work: AverageDeferred, piece: _Piece, sums: HostSums) -> Arrays:
        assert work.averaging is not None and isinstance(piece.stored, Mapping)
        averages = PieceSums(work.averaging)
        for index in sorted(piece.stored):
            averages.add(index, piece.stored[index], piece.model(work.start, index))
        sums.add(averages)
        return {"valid": np.isin(np.arange(len(piece)), list(piece.stored))}

    # ---- losses and signatures

    @torch.no_grad()
    def _losses(self, work: Losses, piece: _Piece) -> Arrays:
        """A client's data are read once for all models, and a model is loaded once for all clients.

        Clients share no batch: the result of one does not depend on the others in the piece.
        """
        arrays, parts = self._empty(work), {}
        for index in range(len(piece)):
            if samples := self._samples(piece, index):
                parts[index] = tuple(part[: work.max_samples] for part in samples)
        frozen = self._frozen_logits(piece, {index: x for index, (x, _) in parts.items()})
        for model in range(work.num_models if parts else 0):
            self.network.load(piece.row(0, model))
            for index, (x, y) in parts.items():
                logits_BC = self.network.logits(x)
                if index in frozen:
                    logits_BC = logits_BC + frozen[index]
                loss_B = self.network.task.loss(logits_BC, y.to(logits_BC.device))
                arrays["losses"][index, model] = loss_B.cpu().mean().item()
        return arrays

    def _frozen_logits(self, piece: _Piece, x_of: dict[int, Tensor]) -> dict[int, Tensor]:
        """Logits of the frozen model of each client on its samples, by position in the piece; empty without any."""
        frozen = piece.work.frozen_model
        logits: dict[int, Tensor] = {}
        if frozen is not None:
            for row in np.unique(frozen.row_M[list(x_of)]).tolist():
                self.network.load(piece.row(frozen.table, row))
                logits |= {i: self.network.logits(x) for i, x in x_of.items() if frozen.row_M[i] == row}
        return logits

    def _describe(self, work: Describe, piece: _Piece) -> Arrays:
        arrays = self._empty(work)
        features = [torch.zeros(0)] * len(piece)
        for index in range(len(piece)):
            samples, client = self._samples(piece, index), piece.client(index)
            if samples is None:
                continue
            with naming_client(client, "describing itself"):
                view = ClientView(client, *samples, self.network, work.address, work.local, self.train_one)
                anchor_P = None if work.anchor is None else piece.model(work.anchor, index)
                vector = torch.as_tensor(work.function(view, anchor_P)).float().reshape(-1)
                vector = self.attack.upload(client, vector, torch.zeros_like(vector), work.address)
            arrays["floats"][index] = len(vector)
            features[index] = vector if work.sketch is None else sketch(vector, work.sketch, work.address.seed)
            if reason := invalid_value_reason(vector, ANY_POWER):
                piece.exclude(index, f"its signature has {reason}")
            else:
                arrays["valid"][index] = True
        return arrays | {"features": pad_sequence(features, batch_first=True).numpy()}

    # ---- evaluation

    def _evaluate_clients(self, work: EvaluateClients, piece: _Piece) -> Arrays:
        arrays = self._empty(work)
        for index in range(len(piece)):
            start_P = with_client_state(piece.model(work.start, index), work.client_state, piece.value_of(index))
            if work.tune is not None:
                task = self._tuning_task(work, piece, index, start_P)
                if task is None:
                    continue
                start_P = self.train_one(task).row_P
            logits = self._predictor(work, piece, index, start_P)
            arrays["scores"][index], reason = self._scores(piece.client(index), logits, work.max_test_samples)
            if reason:
                piece.exclude(index, f"its test data have {reason}")
        return arrays

    def _tuning_task(self, work: EvaluateClients, piece: _Piece, index: int, start_P: Tensor) -> TrainingTask | None:
        samples = self._samples(piece, index)
        if samples is None:
            return None
        assert work.tune is not None and work.steps_M is not None
        steps, frozen_P = int(work.steps_M[index]), piece.frozen(index)
        return TrainingTask(
            piece.client(index),
            start_P,
            *samples,
            steps=steps,
            local=work.tune,
            address=work.address,
            frozen_P=frozen_P,
        )

    def _predictor(
        self, work: EvaluateClients | EvaluateShared, piece: _Piece, index: int, row_P: Tensor
    ) -> scoring.Logits:
        """Predictor of a client: one model, the sum of its logits and a frozen model's, or a soft vote of several."""
        if work.vote:
            return scoring.soft_vote(self.network, [piece.row(0, model) for model in range(work.vote)])
        return scoring.additive_logits(self.network, row_P, piece.frozen(index))

    def _scores(
        self, client: int, logits: scoring.Logits, max_samples: int | None
    ) -> tuple[np.ndarray | Sequence[float], str | None]:
        """Metrics and mean loss on one client's own test data; NaN, with the reason, for invalid data."""
        task = self.network.task
        undefined = np.full(len(task.score_names), np.nan)
        with naming_client(client, "testing"):
            x, y = self.data.test(client, max_samples)
            if reason := invalid_data_reason(x, y, self.federation.shape, least=0):
                return undefined, reason
            if not task.by_confusion:
                return scoring.values(task, logits, x, y) if len(y) else undefined, None
            confusion_CC, loss_C = scoring.confusion(logits, x, y, self.federation.shape.num_classes)
        return scoring.scores(confusion_CC, loss_C), None

    def _evaluate_shared(self, work: EvaluateShared, piece: _Piece) -> Arrays:
        arrays, shape = self._empty(work), self.federation.shape
        for index, test_set in enumerate(work.ids_M.tolist()):
            x, y = self.data.test_set(test_set)
            if reason := invalid_data_reason(x, y, shape, least=0):
                piece.exclude(index, f"its test set {test_set} has {reason}")
                continue
            logits = self._predictor(work, piece, index, piece.model(work.start, index))
            if not work.by_confusion:
                with naming_client(test_set, "testing", "test set"):
                    arrays["scores"][index] = scoring.values(self.network.task, logits, x, y) if len(y) else np.nan
                continue
            arrays["confusion"][index], arrays["loss"][index] = scoring.confusion(logits, x, y, shape.num_classes)
        return arrays


def _invalid_loss_reason(loss: float) -> str | None:
    return None if np.isfinite(loss) else "a loss that is not finite"


def _features(
    features: UpdateFeatures, upload_P: Tensor, start_P: Tensor | None, seed: int
) -> tuple[np.ndarray, float]:
    """The features of one client, and their norm before any projection."""
    values = features.columns.of(upload_P).cpu()
    if start_P is not None:
        values = values - features.columns.of(start_P)
    norm = values.double().norm().item()
    return (values if features.sketch is None else sketch(values, features.sketch, seed)).numpy(), norm
