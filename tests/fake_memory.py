"""A device memory of known size: it measures, and stacks that exceed it raise what PyTorch raises on a GPU."""

import pytest
import torch

from cfl_ray.engine import span, vectorised
from cfl_ray.engine.device_memory import DeviceMemory
from cfl_ray.engine.network import Network
from cfl_ray.engine.samples import SampleCache
from cfl_ray.engine.worker import Worker


class FakeMemory(DeviceMemory):
    """Memory of `size` bytes on the CPU, of which every client of a stack needs `need`, and `hidden` times that."""

    measurable = True

    def __init__(self, size: int, need: int = 100, hidden: float = 1.0):
        super().__init__(torch.device("cpu"))
        self.size, self.need, self.hidden = size, need, hidden
        self.stacks: list[int] = []  # clients of each attempt
        self.released = 0

    def free(self) -> int:
        return self.size

    def begin_peak(self) -> None:
        pass

    def peak(self) -> int:
        return self.need * self.stacks[-1] if self.stacks else self.need

    def release(self) -> None:
        self.released += 1

    def allocate(self, clients: int) -> None:
        """Raises where a stack of these clients does not fit."""
        self.stacks.append(clients)
        if clients * self.need * self.hidden > self.size:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {clients * self.need} bytes.")


def install(
    monkeypatch: pytest.MonkeyPatch, memory: FakeMemory, network: Network, worker: Worker | None = None
) -> None:
    """Makes stacks of this network use this memory."""
    train_stack, init = vectorised.train_stack, span.Stack.__init__
    network.memory = memory
    if worker is not None:
        worker.samples = SampleCache(memory, limit=0)

    def stack_of(network, tasks, on_device=False):
        memory.allocate(len(tasks))
        return train_stack(network, tasks, on_device)

    def make(stack, network, tasks):
        memory.allocate(len(tasks))
        init(stack, network, tasks)

    monkeypatch.setattr(vectorised, "train_stack", stack_of)
    monkeypatch.setattr(span.Stack, "__init__", make)
