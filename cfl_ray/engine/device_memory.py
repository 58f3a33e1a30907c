"""Memory of a device: what is free, what the training of one client needs, and so how many clients a vmap batch has.

A vmap batch is the set of clients that an engine trains in one go on the device. It is not the unit of the sums: these
are formed chunk by chunk (`engine.chunks`), client after client, whatever the vmap batches were.
"""

import gc
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch

from cfl_ray.engine.failure import ClientFailure
from cfl_ray.engine.task import TrainingTask

_PROBE = 4  # clients of the vmap batch in which the need of one client is measured
_USED = 0.7  # share of the free memory that a vmap batch fills; the rest is for unequal clients and fragments

Result = TypeVar("Result")


class DeviceMemoryError(ClientFailure):
    """The device has too little memory for a single client."""

    may_be_machine = True  # another device may have more


@dataclass
class _Known:
    """Memory that vmap batches of one kind of client need."""

    need: int  # bytes of one client
    limit: int | None = None  # most clients, once a larger vmap batch did not fit


class DeviceMemory:
    """Memory of one device, as this process may use it.

    share: of the device's memory, at most 1; the other client hosts on the device have the rest.
    most: clients of a vmap batch; None: as many as fit.
    """

    def __init__(self, device: torch.device, share: float = 1.0, most: int | None = None):
        self.device, self.share, self.most = device, share, most
        self.known: dict[Hashable, _Known] = {}
        self._before = 0
        self.largest = 0  # clients of the largest vmap batch that was trained
        self.caches: list[Callable[[], None]] = []  # each call drops what is kept on the device to save time

    @property
    def measurable(self) -> bool:
        """Whether vmap batches are as large as the memory allows; otherwise an engine gets one chunk at a time."""
        return self.device.type == "cuda"

    def free(self) -> int:
        """Bytes that this process can still use, with those that PyTorch's allocator reuses; 0 if not measurable."""
        if not self.measurable:
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        used = torch.cuda.memory_allocated(self.device)
        reusable = torch.cuda.memory_reserved(self.device) - used
        return max(min(free + reusable, int(self.share * total) - used), 0)

    def begin_peak(self) -> None:
        """Begins a measurement of the peak."""
        if not self.measurable:
            return
        torch.cuda.reset_peak_memory_stats(self.device)
        self._before = torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        """Most bytes in use since the measurement began, beyond those in use then; 0 if not measurable."""
        if not self.measurable:
            return 0
        return torch.cuda.max_memory_allocated(self.device) - self._before

    def release(self) -> None:
        """Gives back what PyTorch's allocator holds for reuse, and what an error left behind."""
        if self.measurable:
            gc.collect()
            torch.cuda.empty_cache()

    def batch_size(self, kind: Hashable) -> int | None:
        """Most clients of the next vmap batch of this kind; None if there is no limit."""
        if not self.measurable:
            return None
        known = self.known.get(kind)
        size = _PROBE if known is None else max(int(_USED * self.free()) // known.need, 1)
        limits = (self.most, None if known is None else known.limit)
        return min([size, *(limit for limit in limits if limit is not None)])

    def did_not_fit(self, kind: Hashable, size: int) -> None:
        """Notes that a vmap batch of `size` clients ran out of memory: half of them is the most from now on."""
        self.known.setdefault(kind, _Known(max(self.free() // size, 1))).limit = max(size // 2, 1)
        self.release()

    def alone(self, task: TrainingTask, train: Callable[[TrainingTask], Result]) -> Result:
        """Trains one client; if the memory is too small, again without what is kept there for other clients.

        Raises DeviceMemoryError if the client does not fit even then.
        """
        with suppress(torch.OutOfMemoryError):
            return train(task)
        for drop in self.caches:
            drop()
        self.release()
        free = self.free()
        self.begin_peak()
        try:
            return train(task)
        except torch.OutOfMemoryError as error:
            raise self._too_small_for(task, free, error) from error

    def _too_small_for(self, task: TrainingTask, limit: int, error: BaseException) -> DeviceMemoryError:
        """The error of a client that does not fit alone. limit: bytes that were free before it."""
        return DeviceMemoryError(
            f"client {task.client} does not fit into the memory of {self.device}: training this one client, with "
            f"{len(task.y)} samples and a model of {task.start_P.nbytes / 2**20:.1f} MiB, needs more than the "
            f"{self.peak() / 2**20:.1f} MiB that it had reached, and {limit / 2**20:.1f} MiB were free for this "
            f"process ({str(error).splitlines()[0]}). Use smaller batches (local.batch_size), a smaller model, fewer "
            "hosts on the GPU (runtime.gpus_per_host), or runtime.device: cpu"
        )


def kind_of(tasks: Sequence[TrainingTask]) -> Hashable:
    """Key of the memory that one of these clients needs, with its samples rounded up to a power of two."""
    first = tasks[0]
    samples = max(len(task.y) for task in tasks)
    batch = max(int(first.local.batch_of(len(task.y), first.batches_per_step)) for task in tasks)
    local = first.local
    moments = (bool(local.momentum), local.optimizer is not None)
    extras = (first.batches_per_step, *moments, len(first.proximal), first.frozen_P is not None)
    return (1 << (samples - 1).bit_length(), 1 << (min(batch, samples) - 1).bit_length(), *extras)


def in_batches(
    memory: DeviceMemory,
    tasks: Iterable[TrainingTask],
    train: Callable[[list[TrainingTask]], Result],
    alone: Callable[[TrainingTask], Result],
    engine: str,
) -> Iterator[tuple[list[TrainingTask], Result]]:
    """Trains all tasks, as many in one go as the memory allows. Yields each vmap batch with its result, in order.

    A batch that runs out of memory is trained again in halves: every random draw has its key, so nothing changes.
    alone: trains a client that does not fit as a batch of one.
    engine: engines need different amounts of memory.
    """
    source, waiting = iter(tasks), list[TrainingTask]()
    while True:
        waiting += itertools.islice(source, max(_PROBE - len(waiting), 0))
        if not waiting:
            return
        kind = (engine, kind_of(waiting[:_PROBE]))
        size = memory.batch_size(kind)
        waiting += itertools.islice(source, None if size is None else max(size - len(waiting), 0))
        batch = waiting[:size]
        measured = memory.measurable and kind not in memory.known and len(batch) > 1
        if measured:
            memory.begin_peak()
        try:
            result = train(batch)
        except torch.OutOfMemoryError:
            fits = False
        else:
            fits = True
        if not fits:  # outside the handler: the error holds the tensors of the batch
            memory.did_not_fit(kind, len(batch))
            if len(batch) > 1:
                continue
            result = alone(batch[0])
        elif measured:
            memory.known[kind] = _Known(max(memory.peak() // len(batch), 1))
        memory.largest = max(memory.largest, len(batch))
        del waiting[: len(batch)]
        yield batch, result
        del batch, result  # before the next batch is trained
