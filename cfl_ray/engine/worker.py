"""Carries out chunks of exchanges; the same code runs in `simulate` and on a client host.

`Worker` has one method per kind of work; `core.work` defines the kinds and the form of their results.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cfl_ray.core.rng import stream
from cfl_ray.core.sketch import sketch
from cfl_ray.core.work import (
    AverageDeferred,
    ChunkResult,
    CombineColumns,
    Describe,
    EvaluateClients,
    EvaluateShared,
    Exclusion,
    Losses,
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
from cfl_ray.engine.reduce import ChunkSums, HostSums, combine_columns, upload_distance
from cfl_ray.engine.rows import DeviceRows, RowLookup
from cfl_ray.engine.samples import SampleCache, Samples
from cfl_ray.engine.task import ProximalTask, TrainingResult, TrainingTask
from cfl_ray.engine.validation import (
    ANY_POWER,
    invalid_data_reason,
    invalid_largest_reason,
    invalid_update_reason,
    invalid_value_reason,
)

Arrays = dict[str, np.ndarray]
Stored = Mapping[int, Tensor] | Sequence[Tensor]  # by position: client states, or deferred results
Cut = tuple[Work, np.ndarray, Stored]  # the work of a chunk, its positions in the exchange, and its stored values


@dataclass(frozen=True)
class KeptByClients:
    """Client states and deferred results of a chunk, by position in the chunk."""

    states: dict[int, Tensor] = field(default_factory=dict)
    deferred: dict[int, Tensor] = field(default_factory=dict)  # results that a later exchange averages


@dataclass(frozen=True)
class _Chunk:
    """A chunk while it is carried out: the work, access to its models, and its clients' stored values."""

    work: Work
    row: RowLookup
    device_row: DeviceRows
    stored: Stored
    kept: KeptByClients = field(default_factory=KeptByClients)
    excluded: dict[int, Exclusion] = field(default_factory=dict)
    _on_device: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # as long as the chunk is carried out

    def __len__(self) -> int:
        return len(self.work.ids_M)

    def client(self, index: int) -> int:
        return int(self.work.ids_M[index])

    def model(self, rows: Rows, index: int) -> Tensor:
        """The model (P,) of one client under this use of a table."""
        return self.row(rows.table, int(rows.row_M[index]))

    def on_device(self, rows: Rows, index: int) -> Tensor:
        """The same, on the network's device."""
        key = rows.table, int(rows.row_M[index])
        if key not in self._on_device:
            self._on_device[key] = self.device_row(*key)
        return self._on_device[key]

    def beside(self, rows: Rows, index: int, other_P: Tensor) -> Tensor:
        """The same, where `other_P` is."""
        return self.model(rows, index) if other_P.device.type == "cpu" else self.on_device(rows, index)

    def frozen(self, index: int) -> Tensor | None:
        return None if self.work.frozen_model is None else self.on_device(self.work.frozen_model, index)

    def value_of(self, index: int) -> Tensor | None:
        """The stored value of one client, if it has one."""
        return self.stored.get(index) if isinstance(self.stored, Mapping) else self.stored[index]

    def exclude(self, index: int, reason: str) -> None:
        self.excluded[index] = Exclusion(reason)


@dataclass
class Worker:
    """Carries out chunks of exchanges with a network and the federation.

    engine: "sequential", "manual", "vectorised" (the clients of a chunk together) or "span". Where it does not apply,
        the sequential engine is used.
    """

    network: Network
    federation: Federation
    engine: str = "sequential"
    attack: Attack = Attack()

    def __post_init__(self) -> None:
        self.data = self.federation  # as of the current round
        self.samples, self._sampled = SampleCache(self.network.memory), self.federation

    def run(
        self, work: Work, index_m: np.ndarray, row: RowLookup, stored: Stored, sums: HostSums
    ) -> tuple[ChunkResult, KeptByClients]:
        """Carries out a chunk. Returns its result and the values that its clients keep; adds weighted sums to `sums`.

        stored: client states or, where the work uses deferred results, those; by position.
        """
        return next(self.run_all([(work, index_m, stored)], row, sums))

    def run_all(
        self, cuts: Iterable[Cut], row: RowLookup, sums: HostSums
    ) -> Iterator[tuple[ChunkResult, KeptByClients]]:
        """Carries out chunks of one exchange, in order, and yields what `run` returns.

        On a GPU, the vectorised and span engines train clients of several chunks together.
        """
        if self._sampled is not self.federation:
            self.samples.clear()
            self._sampled = self.federation
        device_row = DeviceRows(self.network.device, row)
        chunks: Iterator[tuple[_Chunk, np.ndarray]] = (
            (_Chunk(work, row, device_row, stored), index_m) for work, index_m, stored in cuts
        )
        ahead = None
        if self._stacks_chunks():
            listed = list(chunks)
            works = [(chunk.work, chunk) for chunk, _ in listed if isinstance(chunk.work, Train)]
            ahead, chunks = self._ahead(works), iter(listed)
        for chunk, index_m in chunks:
            arrays = self._arrays(chunk.work, chunk, sums, ahead)
            yield ChunkResult(index_m, arrays, chunk.excluded), chunk.kept

    def _stacks_chunks(self) -> bool:
        """Whether clients of several chunks are trained together.

        Not with batch statistics: they need equal batches and steps, which a chunk has or not.
        """
        stacks = self.engine in ("vectorised", "span") and not self.network.batch_statistics
        return stacks and self.network.memory.measurable

    def _ahead(self, works: Sequence[tuple[Train, _Chunk]]) -> "_Ahead":
        """The results of the clients of these chunks that are trained together."""
        if self.engine == "vectorised":
            return _Ahead(self._train_stacked(works))
        return _Ahead(self._span_stacks(works))

    def _arrays(self, work: Work, chunk: _Chunk, sums: HostSums, ahead: "_Ahead | None") -> Arrays:
        """Carries out one chunk. ahead: results of clients that are trained together with those of other chunks."""
        self.data = self.federation.at(work.address.round)
        match work:
            case Train():
                return self._train(work, chunk, sums, ahead)
            case AverageDeferred():
                return self._average_deferred(work, chunk, sums)
            case CombineColumns():
                return {"combined": combine_columns(work, chunk.stored)}
            case Losses():
                return self._losses(work, chunk)
            case Describe():
                return self._describe(work, chunk)
            case EvaluateClients():
                return self._evaluate_clients(work, chunk)
            case EvaluateShared():
                return self._evaluate_shared(work, chunk)
            case _:
                raise TypeError(f"no worker method for {type(work).__name__}")

    # ---- training

    def _train(self, work: Train, chunk: _Chunk, sums: HostSums, ahead: "_Ahead | None") -> Arrays:
        arrays = self._empty(work)
        averages = ChunkSums(work.averaging) if work.averaging is not None else None
        summed = set() if averages is None else self._train_sums(work, chunk, averages, arrays, ahead)
        for result in self._results(work, chunk, summed, ahead):
            index, row_P, upload_P = result.index, result.row_P, result.upload_P
            if reason := self._invalid_reason(result):
                chunk.exclude(index, reason)
                continue
            arrays["valid"][index], arrays["train_loss"][index] = True, result.train_loss
            if averages is not None:
                averages.add(index, upload_P, chunk.beside(work.start, index, upload_P))
            if work.features is not None:
                start_P = chunk.model(work.start, index) if work.features.change else None
                seed = work.address.seed
                arrays["features"][index], arrays["norm"][index] = _features(work.features, upload_P, start_P, seed)
            if work.upload_distances:
                sent_P = chunk.model(work.start, index)
                arrays["upload_distance"][index] = upload_distance(work.client_state, upload_P, sent_P)
            if work.client_state is not None:
                chunk.kept.states[index] = client_state_value(work.client_state, result)
            if work.defer_aggregation:
                chunk.kept.deferred[index] = upload_P.cpu().clone()
            if work.local_test_samples:  # last: it may load another row into the network
                logits = scoring.additive_logits(self.network, row_P, chunk.frozen(index))
                scores, _ = self._scores(chunk.client(index), logits, work.local_test_samples)
                arrays["local_scores"][index] = scores[:2]  # the evaluation reports invalid test data
        if averages is not None:
            sums.add(averages)
        return arrays

    def _train_sums(
        self, work: Train, chunk: _Chunk, averages: ChunkSums, arrays: Arrays, ahead: "_Ahead | None"
    ) -> set[int]:
        """Trains the clients whose results are only summed, where the span engine sums them without their rows.

        Returns their positions.
        """
        found: set[int] = set()
        if self.engine != "span":
            return found
        ahead = self._ahead([(work, chunk)]) if ahead is None else ahead
        for stack, members in ahead.of(chunk):
            found |= set(members.values())
            weights: dict[tuple[int, int], dict[int, float]] = {}  # of the clients, by output row and start
            for number, index in members.items():
                reason = stack.invalid_reason(number) or _invalid_loss_reason(stack.losses[number])
                if reason:
                    chunk.exclude(index, f"its update has {reason}")
                    continue
                arrays["valid"][index], arrays["train_loss"][index] = True, stack.losses[number]
                for out, weight in averages.terms_of.get(index, ()):
                    start_P = stack.tasks[number].start_P
                    weights.setdefault((out, start_P.data_ptr()), {})[number] = weight
            for (out, _), weight_of in weights.items():
                averages.add_change(out, stack.change(weight_of))
        return found

    def _span_stacks(self, works: Sequence[tuple[Train, _Chunk]]) -> Iterator[tuple[_Chunk, "_SpanMembers"]]:
        """Trains the clients whose results are only summed, where the span engine sums them without their rows.

        Yields, for each chunk, the stacks with its clients.
        """
        places: list[tuple[_Chunk, int]] = []

        def tasks() -> Iterator[TrainingTask]:
            for work, chunk in works:
                if _uses_rows(work) or work.local_test_samples or work.chained or work.averaging is None:
                    continue
                honest = [i for i in range(len(chunk)) if not self.attack.attacks(chunk.client(i), work.address)]
                found = self._span_tasks(work, chunk, honest)
                places.extend((chunk, index) for index in found)
                yield from found.values()

        for first, stack in span.stacks(self.network, tasks()):
            members = enumerate(places[first : first + len(stack.tasks)])
            for _, of_chunk in itertools.groupby(members, key=lambda member: id(member[1][0])):
                listed = list(of_chunk)
                yield listed[0][1][0], (stack, {number: index for number, (_, index) in listed})

    def _span_tasks(self, work: Train, chunk: _Chunk, indices: Iterable[int]) -> dict[int, TrainingTask]:
        """The tasks, by position, that the span engine trains together."""
        if self.engine != "span" or work.chained or not span.stackable(self.network):
            return {}
        self.data = self.federation.at(work.address.round)
        tasks = {i: task for i in indices if (task := self._training_task(work, chunk, i))}
        return {i: task for i, task in tasks.items() if span.why_not(self.network, [task]) is None}

    def _empty(self, work: Work) -> Arrays:
        return work.empty_result(self.federation.shape.num_classes)

    def _invalid_reason(self, result: TrainingResult) -> str | None:
        """Reason why a result is not valid; None for a valid one."""
        trained, forged_P = self.network.spec.trained, result.replacement_P
        if result.largest is None:
            reason = invalid_update_reason(result.row_P, trained)
        else:
            reason = invalid_largest_reason(result.largest)
        if reason is None and forged_P is not None:
            reason = invalid_update_reason(forged_P, trained)
        reason = reason or _invalid_loss_reason(result.train_loss)
        return reason and f"its update has {reason}"

    def train_one(self, task: TrainingTask) -> TrainingResult:
        """Trains one client, with the span or manual engine where it is configured and applies, else sequentially.

        Raises DeviceMemoryError where it does not fit into the device, even without the samples of other clients.
        """
        with suppress(torch.OutOfMemoryError):
            return self._train_one(task)
        memory = self.network.memory
        self.samples.clear()
        memory.release()
        free = memory.free()
        memory.begin_peak()
        try:
            return self._train_one(task)
        except torch.OutOfMemoryError as error:
            raise memory.too_small_for(task, free, error) from error

    def _train_one(self, task: TrainingTask) -> TrainingResult:
        engine = {"span": span, "manual": manual}.get(self.engine)
        if engine is None or engine.why_not(self.network, [task]):
            return next(sequential.train(self.network, [task]))
        return next(engine.train(self.network, [task]))

    def _results(self, work: Train, chunk: _Chunk, skip: set[int], ahead: "_Ahead | None") -> Iterator[TrainingResult]:
        """Trains the clients of a chunk except those to skip. Engines reuse the memory of a result for the next one."""
        if self.engine == "vectorised":
            ahead = self._ahead([(work, chunk)]) if ahead is None else ahead
            if ahead.has(chunk):
                for result in ahead.of(chunk):
                    yield self._attacked(work, chunk, result)
                return
        indices = [index for index in range(len(chunk)) if index not in skip]
        stacked = self._span_tasks(work, chunk, indices)
        positions = list(stacked)
        for result in span.train(self.network, list(stacked.values())):
            yield self._attacked(work, chunk, replace(result, index=positions[result.index]))
        before_P = None
        for index in indices:
            if index in stacked:
                continue
            task = self._training_task(work, chunk, index)
            if task is None:
                continue
            if before_P is not None:
                task = replace(task, start_P=before_P)
            with naming_client(task.client, "training"):
                result = self.train_one(task)
            result = self._attacked(work, chunk, replace(result, index=index))
            if work.chained and self._invalid_reason(result) is None:
                before_P = result.upload_P.clone()
            yield result

    def _train_stacked(self, works: Sequence[tuple[Train, _Chunk]]) -> Iterator[tuple[_Chunk, TrainingResult]]:
        """Trains the clients of all chunks that the vectorised engine can stack, as many together as there is memory.

        Where chunks are trained on their own, those of one client are left to the sequential engine.
        """
        places: deque[tuple[_Chunk, int]] = deque()
        least = 1 if self._stacks_chunks() else 2

        def tasks() -> Iterator[TrainingTask]:
            for work, chunk in works:
                found = {} if work.chained else self._tasks(work, chunk)
                if len(found) >= least and vectorised.refusal(self.network, list(found.values())) is None:
                    places.extend((chunk, index) for index in found)
                    yield from found.values()

        on_device = not any(_uses_rows(work) for work, _ in works)
        for result in vectorised.train(self.network, tasks(), self.train_one, on_device):
            chunk, index = places.popleft()
            yield chunk, replace(result, index=index)

    def _tasks(self, work: Train, chunk: _Chunk) -> dict[int, TrainingTask]:
        """The tasks of a chunk's valid clients, by position."""
        self.data = self.federation.at(work.address.round)
        return {i: task for i in range(len(chunk)) if (task := self._training_task(work, chunk, i))}

    def _attacked(self, work: Train, chunk: _Chunk, result: TrainingResult) -> TrainingResult:
        """The result; of an attacker, with its forged upload."""
        client = chunk.client(result.index)
        if not self.attack.attacks(client, work.address):
            return result
        sent_P = chunk.beside(work.start, result.index, result.upload_P)
        return replace(result, replacement_P=self.attack.upload(client, result.upload_P, sent_P, work.address))

    def _training_task(self, work: Train, chunk: _Chunk, index: int) -> TrainingTask | None:
        """The task of one client; None, and the client is excluded, where its data are not valid."""
        samples = self._device_samples(chunk, index)
        if samples is None:
            return None
        value, state = chunk.value_of(index), work.client_state
        start_P = with_client_state(chunk.on_device(work.start, index), state, value)
        return TrainingTask(
            chunk.client(index),
            start_P,
            *samples,
            steps=int(work.steps_M[index]),
            local=work.local,
            address=work.address,
            proximal=tuple(
                ProximalTask(term.weight, chunk.on_device(term.anchor, index), term.columns, term.follow, term.every)
                for term in work.proximal
            ),
            local_step=work.local_step,
            frozen_P=chunk.frozen(index),
            velocity=stored_velocity(value, state, start_P) if work.local.persist and state is not None else None,
        )

    def _samples(self, chunk: _Chunk, index: int) -> Samples | None:
        """Training samples of a client, with the labels it trains on; None, and the client is excluded, if invalid."""
        samples = self._valid_samples(chunk, index)
        return None if samples is None else self._with_labels(chunk, index, samples)

    def _device_samples(self, chunk: _Chunk, index: int) -> Samples | None:
        """The same, on the network's device where they are kept there."""
        client = chunk.client(index)
        key = client, self.data.data_version(client)
        samples = self.samples.get(key)
        if samples is None:
            samples = self._valid_samples(chunk, index)
            samples = None if samples is None else self.samples.add(key, samples)
        return None if samples is None else self._with_labels(chunk, index, samples)

    def _valid_samples(self, chunk: _Chunk, index: int) -> Samples | None:
        """Training samples of a client as they are read; None, and the client is excluded, if they are not valid."""
        client = chunk.client(index)
        with naming_client(client, "reading its data"):
            x, y = self.data.train(client)
            reason = invalid_data_reason(x, y, self.federation.shape)
        if reason:
            chunk.exclude(index, f"its data have {reason}")
            return None
        return x, y

    def _with_labels(self, chunk: _Chunk, index: int, samples: Samples) -> Samples:
        """The samples with the labels that the client trains on."""
        x, y = samples
        return x, self.attack.labels(chunk.client(index), y, self.federation.shape.num_classes, chunk.work.address)

    def _average_deferred(self, work: AverageDeferred, chunk: _Chunk, sums: HostSums) -> Arrays:
        assert work.averaging is not None and isinstance(chunk.stored, Mapping)
        averages = ChunkSums(work.averaging)
        for index in sorted(chunk.stored):
            averages.add(index, chunk.stored[index], chunk.model(work.start, index))
        sums.add(averages)
        return {"valid": np.isin(np.arange(len(chunk)), list(chunk.stored))}

    # ---- losses and signatures

    @torch.no_grad()
    def _losses(self, work: Losses, chunk: _Chunk) -> Arrays:
        """A client's data are read once for all models, and a model is loaded once for all clients.

        Clients share no batch: the result of one does not depend on the others in the chunk.
        """
        arrays, parts = self._empty(work), {}
        for index in range(len(chunk)):
            if samples := self._device_samples(chunk, index):
                chosen = _drawn(work, chunk.client(index), len(samples[1]))
                parts[index] = samples if chosen is None else (samples[0][chosen], samples[1][chosen])
        frozen = self._frozen_logits(chunk, {index: x for index, (x, _) in parts.items()})
        for model in range(work.num_models if parts else 0):
            self.network.load(chunk.row(0, model))
            for index, (x, y) in parts.items():
                logits_BC = self.network.logits(x)
                if index in frozen:
                    logits_BC = logits_BC + frozen[index]
                loss_B = self.network.task.loss(logits_BC, y.to(logits_BC.device))
                arrays["losses"][index, model] = loss_B.cpu().mean().item()
        return arrays

    def _frozen_logits(self, chunk: _Chunk, x_of: dict[int, Tensor]) -> dict[int, Tensor]:
        """Logits of the frozen model of each client on its samples, by position in the chunk; empty without any."""
        frozen = chunk.work.frozen_model
        logits: dict[int, Tensor] = {}
        if frozen is not None:
            for row in np.unique(frozen.row_M[list(x_of)]).tolist():
                self.network.load(chunk.row(frozen.table, row))
                logits |= {i: self.network.logits(x) for i, x in x_of.items() if frozen.row_M[i] == row}
        return logits

    def _describe(self, work: Describe, chunk: _Chunk) -> Arrays:
        arrays = self._empty(work)
        features = [torch.zeros(0)] * len(chunk)
        for index in range(len(chunk)):
            samples, client = self._samples(chunk, index), chunk.client(index)
            if samples is None:
                continue
            with naming_client(client, "describing itself"):
                view = ClientView(client, *samples, self.network, work.address, work.local, self.train_one)
                anchor_P = None if work.anchor is None else chunk.model(work.anchor, index)
                vector = torch.as_tensor(work.function(view, anchor_P)).float().reshape(-1)
                vector = self.attack.upload(client, vector, torch.zeros_like(vector), work.address)
            arrays["floats"][index] = len(vector)
            features[index] = vector if work.sketch is None else sketch(vector, work.sketch, work.address.seed)
            if reason := invalid_value_reason(vector, ANY_POWER):
                chunk.exclude(index, f"its signature has {reason}")
            else:
                arrays["valid"][index] = True
        return arrays | {"features": pad_sequence(features, batch_first=True).numpy()}

    # ---- evaluation

    def _evaluate_clients(self, work: EvaluateClients, chunk: _Chunk) -> Arrays:
        arrays = self._empty(work)
        for index in range(len(chunk)):
            start_P = with_client_state(chunk.model(work.start, index), work.client_state, chunk.value_of(index))
            if work.tune is not None:
                task = self._tuning_task(work, chunk, index, start_P)
                if task is None:
                    continue
                start_P = self.train_one(task).row_P
            logits = self._predictor(work, chunk, index, start_P)
            arrays["scores"][index], reason = self._scores(chunk.client(index), logits, work.max_test_samples)
            if reason:
                chunk.exclude(index, f"its test data have {reason}")
        return arrays

    def _tuning_task(self, work: EvaluateClients, chunk: _Chunk, index: int, start_P: Tensor) -> TrainingTask | None:
        samples = self._device_samples(chunk, index)
        if samples is None:
            return None
        assert work.tune is not None and work.steps_M is not None
        steps, frozen_P = int(work.steps_M[index]), chunk.frozen(index)
        return TrainingTask(
            chunk.client(index),
            start_P,
            *samples,
            steps=steps,
            local=work.tune,
            address=work.address,
            frozen_P=frozen_P,
        )

    def _predictor(
        self, work: EvaluateClients | EvaluateShared, chunk: _Chunk, index: int, row_P: Tensor
    ) -> scoring.Logits:
        """Predictor of a client: one model, the sum of its logits and a frozen model's, or a soft vote of several."""
        if work.vote:
            return scoring.soft_vote(self.network, [chunk.row(0, model) for model in range(work.vote)])
        return scoring.additive_logits(self.network, row_P, chunk.frozen(index))

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

    def _evaluate_shared(self, work: EvaluateShared, chunk: _Chunk) -> Arrays:
        arrays, shape = self._empty(work), self.federation.shape
        for index, test_set in enumerate(work.ids_M.tolist()):
            x, y = self.data.test_set(test_set)
            if reason := invalid_data_reason(x, y, shape, least=0):
                chunk.exclude(index, f"its test set {test_set} has {reason}")
                continue
            logits = self._predictor(work, chunk, index, chunk.model(work.start, index))
            if not work.by_confusion:
                with naming_client(test_set, "testing", "test set"):
                    arrays["scores"][index] = scoring.values(self.network.task, logits, x, y) if len(y) else np.nan
                continue
            arrays["confusion"][index], arrays["loss"][index] = scoring.confusion(logits, x, y, shape.num_classes)
        return arrays


_SpanMembers = tuple[
    span.Stack, dict[int, int]
]  # a stack, and the positions of a chunk's clients by their number in it


class _Ahead:
    """Results of the clients of several chunks that are trained together, in the order of the chunks."""

    def __init__(self, results: Iterator[tuple[_Chunk, Any]]):
        self._results = results
        self._next: tuple[_Chunk, Any] | None = None

    def has(self, chunk: _Chunk) -> bool:
        """Whether the next result is of this chunk."""
        if self._next is None:
            self._next = next(self._results, None)
        return self._next is not None and self._next[0] is chunk

    def of(self, chunk: _Chunk) -> Iterator[Any]:
        """The results of this chunk."""
        while self.has(chunk):
            assert self._next is not None
            (_, result), self._next = self._next, None
            yield result


def _uses_rows(work: Train) -> bool:
    """Whether more is done with the clients' rows than adding them up and testing them."""
    return bool(work.features or work.client_state or work.upload_distances or work.defer_aggregation)


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


def _drawn(work: Losses, client: int, size: int) -> Tensor | None:
    """Which of a client's `size` samples are used, ascending: the same in all rounds; None: all."""
    if work.max_samples is None or work.max_samples >= size:
        return None
    order = stream(work.address.seed, 0, 0, client, "choice").permutation(size)
    return torch.from_numpy(np.sort(order[: work.max_samples]))
