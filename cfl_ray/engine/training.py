"""Local training of the clients of a chunk: selection of clients to train together, and use of the results."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from cfl_ray.core.client_program import Held, first_numbers
from cfl_ray.core.global_generators import seeded_for
from cfl_ray.core.sketch import sketch
from cfl_ray.core.work import AverageDeferred, Train, UpdateFeatures, scores_name
from cfl_ray.engine import programs, sample_weights, scoring
from cfl_ray.engine.client_state import client_state_value, predicting_row
from cfl_ray.engine.engine import TrainedBatch
from cfl_ray.engine.evaluating import client_scores
from cfl_ray.engine.failure import naming_client
from cfl_ray.engine.open_chunk import Arrays, OpenChunk
from cfl_ray.engine.reduce import ChunkSums, HostSums, upload_distance
from cfl_ray.engine.secure_sums import chunk_sums
from cfl_ray.engine.task import TrainingResult, TrainingTask
from cfl_ray.engine.validation import invalid_largest_reason, invalid_update_reason
from cfl_ray.nn.network import Network

Members = dict[int, int]  # positions of a chunk's clients, by their number in a batch


class TrainedTogether:
    """Results of clients that an engine trains together, of one chunk or several, read chunk by chunk with `of`.

    Each result is a `TrainingResult`; from an engine with `train_sums`, a batch with the chunk's members in it.
    """

    def __init__(self, results: Iterator[tuple[OpenChunk[Train], Any]]):
        self._results = results
        self._next: tuple[OpenChunk[Train], Any] | None = None

    @classmethod
    def of_chunks(cls, chunks: Sequence[OpenChunk[Train]]) -> "TrainedTogether":
        if chunks and chunks[0].engine.train_sums is not None:
            return cls(_summed_together(chunks))
        return cls(_trained_together([(chunk, range(len(chunk))) for chunk in chunks]))

    def of(self, chunk: OpenChunk[Train]) -> Iterator[Any]:
        """The results of this chunk."""
        while True:
            if self._next is None:
                self._next = next(self._results, None)
            if self._next is None or self._next[0] is not chunk:
                return
            (_, result), self._next = self._next, None
            yield result


def train(chunk: OpenChunk[Train], sums: HostSums, together: TrainedTogether | None) -> Arrays:
    """Trains the clients of a chunk. together: results of clients of this and other chunks; None: not trained yet."""
    work, arrays = chunk.work, chunk.empty()
    together = TrainedTogether.of_chunks([chunk]) if together is None else together
    averages = None if work.averaging is None else chunk_sums(work, chunk.network.spec.size)
    summed = set() if averages is None else _add_sums(chunk, averages, arrays, together)
    for result in _results(chunk, summed, together):
        index = result.index
        if reason := _invalid_reason(chunk.network, result):
            chunk.exclude(index, reason)
            continue
        held = Held()
        if task := chunk.unfinished.pop(index, None):  # its hooks may load other rows into the network
            result = replace(result, row_P=result.row_P.clone())
            held = programs.finished(chunk, index, task, result)
            if reason := programs.invalid_reason(work.program, held, chunk):
                chunk.exclude(index, reason)
                continue
            for name, numbers in programs.report(work.program, held, chunk).items():
                arrays[name][index] = numbers
        arrays["valid"][index], arrays["train_loss"][index] = True, result.train_loss
        if averages is not None:
            further = [] if work.averaging is None else [held[name] for name in work.averaging.uploads]
            averages.add(index, result.upload_P, chunk.on_device_of(result.upload_P, work.start, index), further)
        _report(chunk, result, arrays)
        _keep(chunk, result, held)
        _test_locally(chunk, result, arrays)  # last, because it may load another row into the network
    for index in np.flatnonzero(arrays["valid"]).tolist():
        for name, value in chunk.known.get(index, {}).items():
            arrays[name][index] = value
    if averages is not None:
        _close(averages, arrays)
        sums.add(averages)
    return arrays


def _report(chunk: OpenChunk[Train], result: TrainingResult, arrays: Arrays) -> None:
    """Writes what the server asked for of a client's result, besides its average."""
    work, index = chunk.work, result.index
    if work.program.trace:
        arrays["step_losses"][index, : len(result.step_losses)] = result.step_losses
    if work.features is not None:
        start_P = chunk.model(work.start, index) if work.features.change else None
        found = _features(work.features, result.upload_P, start_P, work.address.seed)
        arrays["features"][index], arrays["norm"][index] = found
    if work.upload_distances:
        sent_P = chunk.model(work.start, index)
        arrays["upload_distance"][index] = upload_distance(work.client_state, result.upload_P, sent_P)


def _keep(chunk: OpenChunk[Train], result: TrainingResult, held: Held) -> None:
    """Keeps what stays on the host: the client's state, and its upload if it is averaged later."""
    work, index = chunk.work, result.index
    if work.client_state is not None:
        kept_P = result.moved.get(work.program.kept_model, result.row_P)
        kept = [held[name] for name in first_numbers(work.program, chunk.network.spec)]
        chunk.kept.states[index] = client_state_value(work.client_state, kept_P, kept, result.velocity)
    if work.defer_aggregation:
        chunk.kept.deferred[index] = result.upload_P.cpu().clone()


def _test_locally(chunk: OpenChunk[Train], result: TrainingResult, arrays: Arrays) -> None:
    """Writes the scores of P-local, if it is measured."""
    work, index, row_P = chunk.work, result.index, result.row_P
    if not work.local_test_samples:
        return
    state = work.client_state
    own = state is not None and state.predicts is not None and not state.reads_data
    if own or work.program.kept_model in result.moved:
        row_P = predicting_row(row_P, state, chunk.kept.states.get(index))
    logits = scoring.additive_logits(chunk.network, row_P, chunk.frozen(index))
    for part in work.local_parts:
        scores, _ = client_scores(chunk, index, logits, work.local_test_samples, part)
        arrays[f"local_{scores_name(part)}"][index] = scores[:2]  # the evaluation reports invalid test data


def _close(averages: ChunkSums, arrays: Arrays) -> None:
    averages.close()
    if "reported" in arrays:
        arrays["reported"][:] = True
    for index, within in averages.unclipped.items():
        arrays["unclipped"][index] = within


def average_deferred(chunk: OpenChunk[AverageDeferred], sums: HostSums) -> Arrays:
    """Sums the deferred results of an earlier exchange, which are kept on the hosts."""
    assert isinstance(chunk.stored, Mapping)
    averages, arrays = chunk_sums(chunk.work, chunk.network.spec.size), chunk.empty()
    for index in sorted(chunk.stored):
        averages.add(index, chunk.stored[index], chunk.model(chunk.work.start, index))
    _close(averages, arrays)
    sums.add(averages)
    return arrays | {"valid": np.isin(np.arange(len(chunk)), list(chunk.stored))}


# ---- clients whose results are only summed


def _add_sums(chunk: OpenChunk[Train], averages: ChunkSums, arrays: Arrays, together: TrainedTogether) -> set[int]:
    """Trains the clients whose changes the engine sums without computing their rows. Returns their positions."""
    summed: set[int] = set()
    if chunk.engine.train_sums is None:
        return summed
    for batch, members in together.of(chunk):
        summed |= set(members.values())
        weights: dict[tuple[int, int], dict[int, float]] = {}  # of the clients, by output row and start
        for number, index in members.items():
            reason = batch.invalid_reason(number) or _invalid_loss_reason(batch.losses[number])
            if reason:
                chunk.exclude(index, f"its update has {reason}")
                continue
            arrays["valid"][index], arrays["train_loss"][index] = True, batch.losses[number]
            for out, weight in averages.terms_of.get(index, ()):
                start_P = batch.tasks[number].start_P
                weights.setdefault((out, start_P.data_ptr()), {})[number] = weight
        for (out, _), weight_of in weights.items():
            averages.add_change(out, batch.change(weight_of))
    return summed


def _summed_together(
    chunks: Sequence[OpenChunk[Train]],
) -> Iterator[tuple[OpenChunk[Train], tuple[TrainedBatch, Members]]]:
    """Trains the honest clients whose results are only summed. Yields the batches of each chunk."""
    parts: list[tuple[OpenChunk[Train], Iterable[int]]] = []
    for chunk in chunks:
        work = chunk.work
        if not (_uses_rows(work) or work.local_test_samples or work.averaging is None):
            honest = [i for i in range(len(chunk)) if not chunk.attack.attacks(chunk.client(i), work.address)]
            parts.append((chunk, honest))
    places: list[tuple[OpenChunk[Train], int]] = []
    train_sums = chunks[0].engine.train_sums
    assert train_sums is not None
    for first, batch in train_sums(chunks[0].network, _tasks_of(parts, places)):
        members = enumerate(places[first : first + len(batch.tasks)])
        for _, of_chunk in itertools.groupby(members, key=lambda member: id(member[1][0])):
            listed = list(of_chunk)
            yield listed[0][1][0], (batch, {number: index for number, (_, index) in listed})


def _uses_rows(work: Train) -> bool:
    """Whether the clients' rows are used for more than sums and tests."""
    used = (work.features, work.client_state, work.upload_distances, work.defer_aggregation, work.clip)
    return any(used) or work.program.trace > 0 or work.finishes or work.secure is not None


# ---- clients whose results are used individually


def _results(chunk: OpenChunk[Train], summed: set[int], together: TrainedTogether) -> Iterator[TrainingResult]:
    """Trains the clients of a chunk that are not in `summed`. The next result may reuse the memory of a result."""
    rest = [index for index in range(len(chunk)) if index not in summed]
    if chunk.engine.train_sums is not None:
        together = TrainedTogether(_trained_together([(chunk, rest)]))
    trained = set()
    for result in together.of(chunk):
        trained.add(result.index)
        yield _attacked(chunk, result)
    before_P: Tensor | None = None
    for index in rest:
        if index in trained or index in chunk.excluded:
            continue
        task = training_task(chunk, index, before_P)
        if task is None:
            continue
        with naming_client(task.client, "training"), seeded_for(task.program, task.address, task.client, "steps"):
            result = chunk.train_one(task)
        result = _attacked(chunk, replace(result, index=index))
        if chunk.work.chained and _invalid_reason(chunk.network, result) is None:
            before_P = result.upload_P.clone()
        yield result


def _trained_together(
    parts: Sequence[tuple[OpenChunk[Train], Iterable[int]]],
) -> Iterator[tuple[OpenChunk[Train], TrainingResult]]:
    """Trains the given clients of each chunk, except those that the engine does not train together."""
    places: list[tuple[OpenChunk[Train], int]] = []
    if parts and (first := parts[0][0]).engine.together:
        for result in first.engine.train(first.network, _tasks_of(parts, places)):
            chunk, index = places[result.index]
            yield chunk, replace(result, index=index)
        if len(places) == 1:
            places[0][0].train_one.trained_alone()


def _tasks_of(
    parts: Iterable[tuple[OpenChunk[Train], Iterable[int]]], places: list[tuple[OpenChunk[Train], int]]
) -> Iterator[TrainingTask]:
    """The tasks of the given clients of each chunk; `places` receives the chunk and position of each task."""
    for chunk, indices in parts:
        together = _tasks_together(chunk, indices)
        places.extend((chunk, index) for index in together)
        yield from map(chunk.train_one.with_black, together.values())


def _tasks_together(chunk: OpenChunk[Train], indices: Iterable[int]) -> dict[int, TrainingTask]:
    """Tasks, by position, of the valid clients that the engine can train together; empty if it cannot."""
    engine = chunk.engine
    if chunk.work.chained or not engine.together:
        return {}
    tasks = {i: task for i in indices if (task := training_task(chunk, i))}
    if not engine.why_not(chunk.network, list(tasks.values())):
        return tasks
    tasks = {i: task for i, task in tasks.items() if not engine.why_not(chunk.network, [task])}
    reason = engine.why_not(chunk.network, list(tasks.values()))
    if reason and tasks:
        chunk.train_one.fall_back(reason)
    return {} if reason else tasks


# ---- one client


def training_task(chunk: OpenChunk[Train], index: int, before_P: Tensor | None = None) -> TrainingTask | None:
    """The task of a client. If its data are not valid, excludes the client and returns None.

    before_P: result of the previous client, from which this one starts; None: it starts from its own row.
    """
    samples = chunk.samples(index)
    weighed = None if samples is None else sample_weights.weighed(chunk, index)
    if samples is None or index in chunk.excluded:
        return None
    work, (start_P, held) = chunk.work, programs.held_by(chunk, index)
    known = Arrays()
    if weighed is not None:
        held = weighed.held(held, 0 if work.num_models is None else int(work.start.row_M[index]))
        known |= {} if work.num_models is None else {"weights": weighed.mean_K}
    task = TrainingTask(
        chunk.client(index),
        start_P if before_P is None else before_P,
        *samples,
        steps=int(work.steps_M[index]),
        local=work.local,
        address=work.address,
        program=work.program,
        held=held,
        only_summed=not _uses_rows(work),
        last_batch=chunk.train_one.last_batch,
    )
    task = programs.begun(chunk, index, task)
    if work.finishes:
        chunk.unfinished[index] = task
    elif work.reports:
        known |= programs.report(work.program, programs.reported(task, chunk.network.spec), chunk)
    if known:
        chunk.known[index] = known
    return task


def _attacked(chunk: OpenChunk[Train], result: TrainingResult) -> TrainingResult:
    """The result, with a forged upload if the client attacks."""
    work, client = chunk.work, chunk.client(result.index)
    if not chunk.attack.attacks(client, work.address):
        return result
    sent_P = chunk.on_device_of(result.upload_P, work.start, result.index)
    return replace(result, replacement_P=chunk.attack.upload(client, result.upload_P, sent_P, work.address))


def _invalid_reason(network: Network, result: TrainingResult) -> str | None:
    """Reason why a result is not valid; None if it is valid."""
    trained, forged_P = network.spec.trained, result.replacement_P
    if result.largest is None:
        reason = invalid_update_reason(result.row_P, trained)
    else:
        reason = invalid_largest_reason(result.largest)
    for other_P in (forged_P, *result.moved.values()):
        if reason is None and other_P is not None:
            reason = invalid_update_reason(other_P, trained)
    reason = reason or _invalid_loss_reason(result.train_loss)
    return reason and f"its update has {reason}"


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
