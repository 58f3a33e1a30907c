"""Augmented samples of a client: a copy of them for every local epoch, so that all engines train on the same ones."""

from dataclasses import replace

import torch
from torch import Tensor

from cfl_ray.core.global_generators import seeded_for
from cfl_ray.core.rng import stream
from cfl_ray.data.federation import Federation
from cfl_ray.engine.failure import naming_client
from cfl_ray.engine.task import TrainingTask

_BLOCK = 256  # samples that are changed at once, so that they stay in the cache between changes


def augmented(task: TrainingTask) -> TrainingTask:
    """The task on the augmented samples of its client, without augmentations that are left; else the same task."""
    local, at = task.local, task.address
    if not local.augment:
        return task
    copies, black = task.epochs, torch.zeros(()) if task.black is None else task.black
    draw = stream(at.seed, at.round, at.exchange, task.client, "augment")
    inputs = task.x.new_empty(copies, *task.x.shape)
    with naming_client(task.client, "augmenting its samples"):
        for copy, first in ((copy, first) for copy in range(copies) for first in range(0, task.size, _BLOCK)):
            x = task.x[first : first + _BLOCK]
            for number, change in enumerate(local.augment):
                with seeded_for(change.function, at, task.client, f"augment/{copy}/{first}/{number}"):
                    x = change(x, draw, black)
            inputs[copy, first : first + _BLOCK] = x
    held, weight_n = task.held, task.held.weight_n
    if weight_n is not None:
        held = replace(held, weight_n=weight_n.repeat(copies))
    x, y, local = inputs.flatten(0, 1), torch.cat([task.y] * copies), replace(local, augment=())
    return replace(task, x=x, y=y, local=local, held=held, copies=copies)


def black_of(data: Federation) -> Tensor | None:
    """The value of black in each channel (C, 1, 1); None if the inputs are not images."""
    if len(data.shape.input) != 3:
        return None
    if data.normalize is None:
        return torch.zeros(data.shape.input[0], 1, 1)
    mean, deviation = (torch.tensor(part, dtype=torch.float32) for part in data.normalize)
    return (-mean / deviation).expand(data.shape.input[0])[:, None, None]
