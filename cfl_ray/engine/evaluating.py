"""Tests of models: on each client's own test data, and on shared test sets."""

from collections.abc import Sequence
from functools import partial

import numpy as np
from torch import Tensor

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import TEST, EvaluateClients, EvaluateShared, Train, scores_name
from cfl_ray.engine import scoring
from cfl_ray.engine.client_state import predicting_row
from cfl_ray.engine.describing import ClientView
from cfl_ray.engine.failure import naming_client
from cfl_ray.engine.open_chunk import Arrays, OpenChunk
from cfl_ray.engine.samples import Same
from cfl_ray.engine.task import HeldByClient, TrainingTask


def evaluate_clients(chunk: OpenChunk[EvaluateClients]) -> Arrays:
    """Scores of each client's model, which may be trained before the test (`tune`)."""
    work, arrays, predictors = chunk.work, chunk.empty(), _Predictors(chunk)
    for index in range(len(chunk)):
        row_P = _served_row(chunk, index)
        if row_P is None:
            continue
        if work.tune is not None:
            task = _tuning_task(chunk, index, row_P)
            if task is None:
                continue
            row_P = chunk.train_one(task).row_P
        logits = predictors.of(index, row_P)
        for part in work.parts:
            counts_CC = arrays["confusion"][index] if work.counts and part == TEST else None
            scores, reason = client_scores(chunk, index, logits, work.max_test_samples, part, counts_CC)
            arrays[scores_name(part)][index] = scores
            if reason:
                chunk.exclude(index, f"its {part} data have {reason}")
    return arrays


def evaluate_shared(chunk: OpenChunk[EvaluateShared]) -> Arrays:
    """Counts by true and predicted class, or scores, of a model on each test set."""
    work, arrays, predictors = chunk.work, chunk.empty(), _Predictors(chunk)
    data = chunk.tested_on(work.part)
    for index, test_set in enumerate(work.ids_M.tolist()):
        key = "test set", test_set, Same(data)  # the federation of a round numbers its test sets
        samples = chunk.read(key, partial(data.test_set, test_set))
        if isinstance(samples, str):
            chunk.exclude(index, f"its {work.part} set {test_set} has {samples}")
            continue
        x, y = samples[0], samples[1].cpu()  # the outputs are compared on the CPU
        if not len(y):
            continue
        logits = predictors.of(index, chunk.on_device(work.start, index), test_set)
        with naming_client(test_set, "testing", f"{work.part} set"):
            outputs = logits(x).cpu()
            if work.by_confusion or work.counts:
                counts_CC, loss_C = scoring.confusion(outputs, y, chunk.data.shape.num_classes)
                arrays["confusion"][index] = counts_CC
            if work.by_confusion:
                arrays["loss"][index] = loss_C
            else:
                arrays["scores"][index] = scoring.values(chunk.network.task, outputs, y)
    return arrays


def client_scores(
    chunk: OpenChunk[EvaluateClients] | OpenChunk[Train],
    index: int,
    logits: scoring.Logits,
    max_samples: int | None,
    part: str,
    counts_CC: np.ndarray | None = None,
) -> tuple[np.ndarray | Sequence[float], str | None]:
    """Metrics and mean loss on this part of one client's data; NaN, with the reason, for invalid data.

    counts_CC: filled with the numbers of samples by true and predicted class; None: they are not wanted.
    """
    task, client, data = chunk.network.task, chunk.client(index), chunk.tested_on(part)
    max_samples = None if data.view == "holdout" else max_samples  # which limits shared test sets
    undefined = np.full(len(task.score_names), np.nan)
    with naming_client(client, "testing"):
        key = "test", client, data.data_version(client), max_samples
        samples = chunk.read(key, lambda: data.test(client, max_samples))
        if isinstance(samples, str):
            return undefined, samples
        x, y = samples[0], samples[1].cpu()  # the outputs are compared on the CPU
        if not len(y):
            return undefined, None
        outputs = logits(x).cpu()
        if task.by_confusion or counts_CC is not None:
            confusion_CC, loss_C = scoring.confusion(outputs, y, chunk.data.shape.num_classes)
            if counts_CC is not None:
                counts_CC[:] = confusion_CC
        if not task.by_confusion:
            return scoring.values(task, outputs, y), None
    return scoring.scores(confusion_CC, loss_C), None


def _served_row(chunk: OpenChunk[EvaluateClients], index: int) -> Tensor | None:
    """The row that a client predicts with. If it depends on data that are not valid, excludes it and returns None."""
    work, received_P = chunk.work, chunk.on_device(chunk.work.start, index)
    if work.weight_MK is not None:  # `_Predictors` makes the rows of a mixture
        return received_P
    value = chunk.stored_value(index)
    if value is None or work.client_state is None or not work.client_state.reads_data:
        return predicting_row(received_P, work.client_state, value)
    samples = chunk.samples(index)
    if samples is None:
        return None
    client, local = chunk.client(index), work.tune or LocalSGD()
    view = ClientView(client, *samples, chunk.network, work.address, local, chunk.train_one)
    with naming_client(client, "preparing its model"):
        return predicting_row(received_P, work.client_state, value, lambda: view)


def _tuning_task(chunk: OpenChunk[EvaluateClients], index: int, start_P: Tensor) -> TrainingTask | None:
    """The task of training before the test. If the client's data are not valid, excludes it and returns None."""
    work, samples = chunk.work, chunk.samples(index)
    if samples is None:
        return None
    assert work.tune is not None and work.steps_M is not None
    return TrainingTask(
        chunk.client(index),
        start_P,
        *samples,
        steps=int(work.steps_M[index]),
        local=work.tune,
        address=work.address,
        held=HeldByClient(frozen_P=chunk.frozen(index)),
    )


class _Predictors:
    """Predictors by a single model, or by a mixture of all models of table 0.

    With mixtures, consecutive tests on the same test set share the probabilities of its samples.
    """

    def __init__(self, chunk: OpenChunk[EvaluateClients] | OpenChunk[EvaluateShared]):
        self.chunk = chunk
        self._latest: tuple[int, Tensor] | None = None  # test set, and the log-probabilities (K, n, C)

    def of(self, index: int, row_P: Tensor, test_set: int | None = None) -> scoring.Logits:
        """The predictor of the client, or test set, at this position of the chunk. row_P: of a single model."""
        weight_MK = self.chunk.work.weight_MK
        if weight_MK is None:
            return scoring.additive_logits(self.chunk.network, row_P, self.chunk.frozen(index))

        def logits(x: Tensor) -> Tensor:
            if self._latest is not None and self._latest[0] == test_set:
                return scoring.mixed(self._latest[1], weight_MK[index])
            rows = [self._row(index, model) for model in range(weight_MK.shape[1])]
            log_p = scoring.log_probabilities(self.chunk.network, rows, x)
            self._latest = None if test_set is None else (test_set, log_p)
            return scoring.mixed(log_p, weight_MK[index])

        return logits

    def _row(self, index: int, model: int) -> Tensor:
        """A model of the mixture, with the client's columns in it."""
        chunk, work = self.chunk, self.chunk.work
        row_P = chunk.row(0, model)
        if not isinstance(work, EvaluateClients):
            return row_P
        first, of_all = index * work.states_per_client, work.states_per_client - 1
        values = (chunk.stored_value(first + at) for at in (model, of_all))
        return predicting_row(row_P, work.client_state, next((value for value in values if value is not None), None))
