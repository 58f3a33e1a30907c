"""A device memory of known size: it measures, and stacks that exceed it raise what PyTorch raises on a GPU."""

import pytest
import torch

from cfl_ray.engine import span, vectorised
from cfl_ray.engine.samples import SampleCache
from cfl_ray.engine.worker import Worker
from cfl_ray.nn.device_memory import DeviceMemory
from cfl_ray.nn.network import Network


class FakeMemory(DeviceMemory):
    """Memory of `size` bytes, of which every client of a stack needs `need`, and `hidden` times that."""

    measurable = True

    def __init__(self, size: int, need: int = 100, hidden: float = 1.0):
        super().__init__(torch.device("cpu"))
        self.size, self.need, self.hidden = size, need, hidden
        self.batches: list[int] = []  # clients of each attempt
        self.released = 0

    def free(self) -> int:
        return self.size

    def begin_peak(self) -> None:
        pass

    def peak(self) -> int:
        return self.need * self.batches[-1] if self.batches else self.need

    def release(self) -> None:
        self.released += 1

    def allocate(self, clients: int) -> None:
        """Raises where a vmap batch of these clients does not fit."""
        self.batches.append(clients)
        if clients * self.need * self.hidden > self.size:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {clients * self.need} bytes.")


def install(
    monkeypatch: pytest.MonkeyPatch, memory: FakeMemory, network: Network, worker: Worker | None = None
) -> None:
    """Makes vmap batches of this network use this memory."""
    train_batch, init = vectorised.train_batch, span.SpanBatch.__init__
    network.memory, memory.device = memory, network.device
    if worker is not None:
        worker.samples = SampleCache(memory, limit=0)

    def batch_of(network, tasks):
        memory.allocate(len(tasks))
        return train_batch(network, tasks)

    def make(batch, network, tasks):
        memory.allocate(len(tasks))
        init(batch, network, tasks)

    monkeypatch.setattr(vectorised, "train_batch", batch_of)
    monkeypatch.setattr(span.SpanBatch, "__init__", make)
