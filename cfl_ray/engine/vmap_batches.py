"""Training in vmap batches: as many clients at once as fit into the memory of the device.

Vmap batches do not affect sums, which are formed chunk by chunk (`engine.chunks`) and client by client.
"""

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

import torch

from cfl_ray.core.global_generators import is_users, states
from cfl_ray.engine.augmented import augmented
from cfl_ray.engine.failure import ClientFailure, naming_client
from cfl_ray.engine.task import TrainingTask
from cfl_ray.errors import RunError, counted, first_line
from cfl_ray.nn.device_memory import PROBE, DeviceMemory
from cfl_ray.plugins.calling import place_of

Result = TypeVar("Result")


class DeviceMemoryError(ClientFailure):
    """The device has too little memory for a single client."""

    may_be_machine = True  # another device may have more


def train_alone(memory: DeviceMemory, task: TrainingTask, train: Callable[[TrainingTask], Result]) -> Result:
    """Trains one client; if the memory is too small, retries after dropping the caches on the device.

    Raises DeviceMemoryError if the client still does not fit.
    """
    with suppress(torch.OutOfMemoryError):
        return train(augmented(task))
    memory.drop_caches()
    free = memory.free()
    memory.begin_peak()
    try:
        return train(augmented(task))
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            f"client {task.client} does not fit into the memory of {memory.device}: training this one client, with "
            f"{counted(task.size, 'sample')} and a model of {task.start_P.nbytes / 2**20:.1f} MiB, needs more than "
            f"the {memory.peak() / 2**20:.1f} MiB that it had reached, and {free / 2**20:.1f} MiB were free for this "
            f"process ({first_line(error)}). Use smaller batches (local.batch_size), a smaller model, fewer "
            "hosts on the GPU (runtime.gpus_per_host), or runtime.device: cpu"
        ) from error


def kind_of(tasks: Sequence[TrainingTask]) -> Hashable:
    """Key of the memory that a client of `tasks` needs, with its samples rounded up to a power of two."""
    first = tasks[0]
    samples = max(task.size * (task.epochs if task.local.augment else task.copies) for task in tasks)
    batch = max(int(first.local.batch_of(task.size, first.batches_per_step)) for task in tasks)
    local = first.local
    moments = (bool(local.momentum), local.optimizer is not None)
    held = first.held
    extras = (
        first.batches_per_step,
        *moments,
        len(held.proximal),
        held.frozen_P is not None,
        len(held.models),
        type(first.program),
    )
    return (1 << (samples - 1).bit_length(), 1 << (min(batch, samples) - 1).bit_length(), *extras)


def in_batches(
    memory: DeviceMemory,
    tasks: Iterable[TrainingTask],
    train: Callable[[list[TrainingTask]], Result],
    engine: str,
) -> Iterator[tuple[list[TrainingTask], Result]]:
    """Trains all tasks, as many at once as the memory allows. Yields each vmap batch with its result, in order.

    Samples are augmented batch by batch. A batch that runs out of memory is trained again in halves. Random draws have
    keys, so the results do not change.
    engine: name of the engine, because engines need different amounts of memory.
    """
    source, waiting = iter(tasks), list[TrainingTask]()
    while True:
        waiting += itertools.islice(source, max(PROBE - len(waiting), 0))
        if not waiting:
            return
        kind = (engine, kind_of(waiting[:PROBE]))
        size = memory.batch_size(kind)
        waiting += itertools.islice(source, None if size is None else max(size - len(waiting), 0))
        batch = waiting[:size]
        result: Result | None = None
        memory.measuring = len(batch) > 1 and memory.measurable and kind not in memory.needs
        before = states() if is_users(batch[0].program) else None
        if len(batch) == 1:
            with naming_client(batch[0].client, "training"):
                result = train_alone(memory, batch[0], lambda task: train([task]))
        else:
            if memory.measuring:
                memory.begin_peak()
            with suppress(torch.OutOfMemoryError):
                result = train([augmented(task) for task in batch])
            if result is None:  # outside the context: the error holds the tensors of the batch
                memory.did_not_fit(kind, len(batch))
                continue
            if memory.measuring:
                memory.fitted(kind, len(batch))
        if before is not None and before != states():
            raise RunError(
                f"{place_of(batch[0].program)} draws from a global generator in loss or step, which {engine} calls for "
                f"{counted(len(batch), 'client')} at once, so that a client's draws would depend on the others; set "
                "one_by_one = True, or pass numbers in `given`"
            )
        memory.largest = max(memory.largest, len(batch))
        del waiting[: len(batch)]
        yield batch, result
        del batch, result  # before the next batch is trained
