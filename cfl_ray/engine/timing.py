"""The times of local steps by engine, for those who want to know. No run uses them: the choice is a rule."""

import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import Averaging
from cfl_ray.data.federation import Federation
from cfl_ray.engine.choice import median_task
from cfl_ray.engine.engine import Engine
from cfl_ray.engine.engines import ENGINES, Division
from cfl_ray.engine.reduce import ChunkSums
from cfl_ray.engine.task import TrainingResult, TrainingTask
from cfl_ray.engine.vmap_batches import train_alone
from cfl_ray.errors import text_of
from cfl_ray.nn.network import Network

_CLIENTS, _STEPS, _REPETITIONS = 4, 20, 3  # clients at least, steps at most


def time_engines(
    network: Network, federation: Federation, local: LocalSGD, division: Division
) -> dict[str, float | str]:
    """Seconds of a local step for one client with each engine, or the reason why it cannot train the clients.

    The least of three measurements in turn, after a warm-up: CPU time of this thread, on a GPU wall time. All clients
    have as many samples as the median client, of random numbers. Their results are added up.
    """
    first = median_task(network, federation, local)
    first = replace(first, x=_random(first.x).to(network.device), y=first.y.to(network.device), only_summed=True)
    first = replace(first, start_P=network.flat.clone(), steps=min(first.steps, _STEPS))
    found: dict[str, float | str] = {}
    for repetition in range(1 + _REPETITIONS):
        for name, engine in ENGINES.items():
            size = division.together(name, network)
            tasks = [replace(first, client=client) for client in range(size * -(-_CLIENTS // size))]
            if repetition == 0 and (reason := engine.why_not(network, tasks[:size])):
                found[name] = reason
            if isinstance(found.get(name), str):
                continue
            try:
                seconds = _seconds(engine, network, [tasks[at : at + size] for at in range(0, len(tasks), size)])
            except Exception as error:  # vmap, or too little memory
                found[name] = (text_of(error) or type(error).__name__)[:120]
                continue
            found[name] = min(found[name] if repetition > 1 else np.inf, seconds / len(tasks) / first.steps)
    return found


def _seconds(engine: Engine, network: Network, chunks: Sequence[Sequence[TrainingTask]]) -> float:
    on_gpu = network.device.type == "cuda"
    clock = time.perf_counter if on_gpu else time.thread_time  # other processes do not count
    began = clock()
    for tasks in chunks:
        _add_up(engine, network, tasks)
    if on_gpu:
        torch.cuda.synchronize(network.device)
    return clock() - began


def _add_up(engine: Engine, network: Network, tasks: Sequence[TrainingTask]) -> None:
    """Trains the clients and adds up their changes, without the rows of clients if the engine supports it."""
    sums = ChunkSums(Averaging.of(np.ones((1, len(tasks))), len(tasks)))
    if engine.train_sums is not None:
        for _, batch in engine.train_sums(network, tasks):
            sums.add_change(0, batch.change(dict.fromkeys(range(len(batch.tasks)), 1 / len(tasks))))
        return
    results: Iterable[TrainingResult]
    if engine.together:
        results = engine.train(network, tasks)
    else:
        results = (train_alone(network.memory, task, lambda t: next(engine.train(network, [t]))) for task in tasks)
    with warnings.catch_warnings(action="ignore"):  # of functorch, about speed
        for index, result in enumerate(results):
            sums.add(index, result.upload_P, tasks[index].start_P)


def _random(x: torch.Tensor) -> torch.Tensor:
    """Random inputs of a shape: numbers from 0 to 1, or the tokens 0 and 1."""
    if x.is_floating_point():
        return torch.rand(x.shape, generator=torch.Generator().manual_seed(0))
    return torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(0)).to(x.dtype)
