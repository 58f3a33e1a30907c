"""Engines equal the sequential one on small and on large inputs, up to the rounding of what changes."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from training_tasks import FLAT, LONG, long_mlp, mlp, rows, tasks_of

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.engine import manual, span, vectorised
from cfl_ray.engine import sequential as reference
from cfl_ray.nn.network import Network


class Recurrent(nn.Module):
    """An LSTM on (4, 3)."""

    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.lstm(x)[0][:, -1])


class Embedded(nn.Module):
    """Embeddings of the signs of six values, times the sizes of the values."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(2, 4), nn.Linear(24, 3)

    def forward(self, x):
        return self.out((self.words((x > 0).long()) * x.abs()[..., None]).flatten(1))


CASES = {
    "lstm, vectorised": (Recurrent, (4, 3), vectorised),
    "embedding, vectorised": (Embedded, FLAT, vectorised),
    "mlp, manual": (mlp, FLAT, manual),
    **{
        f"long mlp, {engine.__name__.rpartition('.')[2]}": (long_mlp, LONG, engine)
        for engine in (manual, vectorised, span)
    },
}


@pytest.mark.parametrize("scale", [1e-4, 1e4])
@pytest.mark.parametrize("case", CASES)
def test_inputs_of_any_size_are_trained_alike(case, scale):
    """The steps fit the size: gradients of the first layer are proportional to it, so are outputs to its weights."""
    factory, shape, engine = CASES[case]
    network = Network(factory, shape)
    local = LocalSGD(epochs=3, lr=0.1 if factory is Recurrent else 0.1 / max(scale, 1) ** 2)
    tasks = [replace(task, x=task.x * scale) for task in tasks_of(network, [10, 7], local)]
    if (reason := engine.why_not(network, tasks)) is not None:
        pytest.fail(reason)
    start_CP = torch.stack([task.start_P for task in tasks])
    expected_CP, found_CP = rows(reference, network, tasks), rows(engine, network, tasks)
    change, size = (expected_CP - start_CP).abs().max(), expected_CP.abs().max()
    assert change > 0
    # a weight is rounded in each of the three steps
    assert (found_CP - expected_CP).abs().max() <= 1e-5 * change + 3 * torch.finfo(torch.float32).eps * size
