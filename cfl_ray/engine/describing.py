"""Losses of models on clients' data, and vectors that describe clients by functions given to `Clients.describe`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from cfl_ray.core.global_generators import seeded_for
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.rng import stream
from cfl_ray.core.sketch import sketch
from cfl_ray.core.work import Address, Describe, Losses
from cfl_ray.engine.client_state import with_client_state
from cfl_ray.engine.engines import ENGINES, SEQUENTIAL
from cfl_ray.engine.failure import naming_client
from cfl_ray.engine.open_chunk import Arrays, OpenChunk
from cfl_ray.engine.task import TrainingResult, TrainingTask
from cfl_ray.engine.validation import ANY_POWER, invalid_value_reason
from cfl_ray.nn.network import Network
from cfl_ray.nn.outputs import outputs_of, outputs_of_row
from cfl_ray.nn.pooling import FastPooling


@torch.no_grad()
def losses(chunk: OpenChunk[Losses]) -> Arrays:
    """Mean training loss of each model on each client's data. Data are read once, and models are loaded once.

    Clients share no batch, so the result of a client does not depend on the other clients in the chunk.
    """
    work, network, arrays, parts = chunk.work, chunk.network, chunk.empty(), {}
    for index in range(len(chunk)):
        if samples := chunk.samples(index):
            chosen = _drawn(work, chunk.client(index), len(samples[1]))
            parts[index] = samples if chosen is None else (samples[0][chosen], samples[1][chosen])
    frozen = frozen_logits(chunk, {index: x for index, (x, _) in parts.items()})
    if work.client_state is None:
        outputs = chunk.outputs(parts, dict.fromkeys(parts, [(0, k) for k in range(work.num_models)]))
    else:
        outputs = _own_outputs(chunk, parts)
    for model, index, logits_BC, y in outputs:
        if index in frozen:
            logits_BC = logits_BC + frozen[index]
        loss_B = (logits_BC.argmax(1) != y).float() if work.errors else network.task.loss(logits_BC, y)
        arrays["losses"][index, model] = loss_B.cpu().mean().item()
    return arrays


def _own_outputs(
    chunk: OpenChunk[Losses], parts: Mapping[int, tuple[Tensor, Tensor]]
) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """As `OpenChunk.outputs`, of models with the columns of each client's state in place of their own."""
    for model in range(chunk.work.num_models):
        for index, (x, y) in parts.items():
            row_P = with_client_state(chunk.row(0, model), chunk.work.client_state, chunk.stored_value(index))
            logits = outputs_of_row(chunk.network, row_P, x)
            yield model, index, logits, y.to(logits.device)


def describe(chunk: OpenChunk[Describe]) -> Arrays:
    """The vector of each client, or its sketch if `work.sketch` is set, padded to the longest."""
    work, arrays = chunk.work, chunk.empty()
    features = [torch.zeros(0)] * len(chunk)
    for index in range(len(chunk)):
        samples, client = chunk.samples(index, on_device=False), chunk.client(index)
        if samples is None:
            continue
        with naming_client(client, "describing itself"):
            trainer = chunk.train_one
            view = ClientView(client, *samples, chunk.network, work.address, work.local, trainer, engine=trainer.engine)
            anchor_P = None if work.anchor is None else chunk.model(work.anchor, index)
            if anchor_P is not None:
                anchor_P = with_client_state(anchor_P, work.client_state, chunk.stored_value(index))
            with seeded_for(getattr(work.function, "function", work.function), work.address, client, "describe"):
                vector = torch.as_tensor(work.function(view, anchor_P)).float().cpu().reshape(-1)
            vector = chunk.attack.upload(client, vector, torch.zeros_like(vector), work.address)
        arrays["floats"][index] = len(vector)
        features[index] = vector if work.sketch is None else sketch(vector, work.sketch, work.address.seed)
        if reason := invalid_value_reason(vector, ANY_POWER):
            chunk.exclude(index, f"its signature has {reason}")
        else:
            arrays["valid"][index] = True
    return arrays | {"features": pad_sequence(features, batch_first=True).numpy()}


def frozen_logits(chunk: OpenChunk[Any], x_of: dict[int, Tensor]) -> dict[int, Tensor]:
    """Logits of each client's frozen model on its samples, by position in the chunk; empty without frozen models."""
    frozen = chunk.work.frozen_model
    logits: dict[int, Tensor] = {}
    if frozen is not None:
        for row in np.unique(frozen.row_M[list(x_of)]).tolist():
            chunk.network.load(chunk.row(frozen.table, row))
            logits |= {i: outputs_of(chunk.network, x) for i, x in x_of.items() if frozen.row_M[i] == row}
    return logits


def _drawn(work: Losses, client: int, size: int) -> Tensor | None:
    """Indices of the samples used, ascending, the same in all rounds; None: all `size` samples."""
    if work.max_samples is None or work.max_samples >= size:
        return None
    order = stream(work.address.seed, 0, 0, client, "choice").permutation(size)
    return torch.from_numpy(np.sort(order[: work.max_samples]))


@contextmanager
def _constant(params: Sequence[Tensor]) -> Iterator[None]:
    """Context in which these parameters have no gradient, and outputs have the same bits as with one."""
    if not params:
        yield
        return
    is_fast = torch.backends.mha.get_fastpath_enabled()  # other kernels for encoder layers without gradients
    torch.backends.mha.set_fastpath_enabled(False)
    for p in params:
        p.requires_grad_(False)
    try:
        with FastPooling():
            yield
    finally:
        for p in params:
            p.requires_grad_()
        torch.backends.mha.set_fastpath_enabled(is_fast)


@dataclass(frozen=True)
class ClientView:
    """A client and its data, on the host that reads the data: a `core.describing.ClientData`."""

    client: int
    x: Tensor  # float32 (n, *shape): normalised training samples
    y: Tensor  # (n, *target_shape)
    network: Network
    address: Address
    local: LocalSGD  # of the method in this round
    train_one: Callable[[TrainingTask], TrainingResult]
    steps: int = 0  # local steps, of a client program
    engine: str = SEQUENTIAL  # which computes `batch_gradients`

    @property
    def spec(self) -> ParamSpec:
        return self.network.spec

    def gradient(
        self, row_P: Tensor, batch: int = 2048, samples: slice = slice(None), columns: Columns | None = None
    ) -> Tensor:
        """As `ClientData.gradient`, in passes of `batch` samples; of fewer if the memory of the device is too small."""
        self.network.load(row_P)
        self.network.module.eval()
        x, y = self.x[samples], self.y[samples]
        columns = columns or self.spec.trainable
        return self.network.memory.in_batches_of("gradient", batch, lambda batch: self._gradient(x, y, batch, columns))

    def batch_gradients(self, row_P: Tensor, size: int | None) -> Iterator[Tensor]:
        size, by_engine = size or len(self.y), ENGINES[self.engine].gradient
        for first in range(0, len(self.y), size):
            part = slice(first, first + size)
            found = None if by_engine is None else by_engine(self.network, row_P, self.x[part], self.y[part])
            yield self.gradient(row_P, samples=part) if found is None else found

    @torch.no_grad()
    def loss(self, row_P: Tensor, samples: slice = slice(None)) -> float:
        y, outputs = self.y[samples], outputs_of_row(self.network, row_P, self.x[samples])
        return self.network.task.total_loss(outputs, y.to(outputs.device)).item() / len(y)

    def features(self, row_P: Tensor) -> Tensor:
        self.network.load(row_P)
        return self.network.memory.in_batches_of("features", 2048, self._features)

    @torch.no_grad()
    def _features(self, batch: int) -> Tensor:
        self.network.module.eval()
        with self.network.kept_features() as features, FastPooling():
            for x_B in self.x.split(batch):
                self.network.module(self.network.input(x_B))
        return torch.cat(features).float().cpu()

    def _gradient(self, x: Tensor, y: Tensor, batch: int, columns: Columns) -> Tensor:
        params, ends = self.network.params, self.spec.ends
        is_needed = [columns.within(end - p.numel(), end).count > 0 for p, end in zip(params, ends, strict=False)]
        needed, total = list(compress(params, is_needed)), torch.zeros(())
        with _constant([p for p, is_one in zip(params, is_needed, strict=True) if not is_one]):
            for at, (x_B, y_B) in enumerate(zip(x.split(batch), y.split(batch), strict=True)):
                with self.network.without_cudnn(), self.network.dense_gradients():
                    logits_BC = self.network.module(self.network.input(x_B))
                loss = self.network.task.total_loss(logits_BC, y_B.to(self.network.device)) / len(y)
                found = iter(torch.autograd.grad(loss, needed, materialize_grads=True))
                pairs = zip(params, is_needed, strict=True)
                grads = [next(found) if is_one else torch.zeros_like(p) for p, is_one in pairs]
                part = columns.of(torch.cat([g.reshape(-1) for g in grads]))
                total = part if at == 0 else total.add_(part)
        return total.cpu()

    def outputs(self, row_P: Tensor) -> Tensor:
        return outputs_of_row(self.network, row_P, self.x).cpu()

    def train(self, row_P: Tensor, local: LocalSGD | None = None, **changes: Any) -> Tensor:
        local = replace(local or self.local, **changes)
        steps = int(local.steps_of(np.array([len(self.y)]))[0])
        task = TrainingTask(self.client, row_P, self.x, self.y, steps, local, self.address)
        return self.train_one(task).row_P.cpu().clone()
