"""Choice of the engine by a short measurement, once per model and device."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import Address, Averaging
from cfl_ray.data.federation import Federation
from cfl_ray.engine import manual, sequential, span, vectorised
from cfl_ray.engine.chunks import chunk_size
from cfl_ray.engine.failure import naming_client
from cfl_ray.engine.network import Network
from cfl_ray.engine.reduce import ChunkSums, HostSums
from cfl_ray.engine.task import TrainingResult, TrainingTask
from cfl_ray.engine.validation import invalid_data_reason
from cfl_ray.errors import DataError

ENGINES = ("sequential", "manual", "vectorised", "span")
_CLIENTS, _STEPS = 4, 5  # size of the measurement, at least one chunk of clients
_STACK = 256  # most clients of the measurement where the clients of several chunks are trained together
_MARGIN = 1.05  # speed-up over the sequential engine from which another one is chosen
_BUDGET = 1.0  # seconds
# On a CPU: a step of a stack costs about a millisecond before any arithmetic, however few its clients, and loses where
# the arithmetic takes longer than the calls.
_STACK_SECONDS, _LONG_STEP_SECONDS = 2e-3, 5e-4


@dataclass(frozen=True)
class EngineChoice:
    """The chosen engine, with the measured times."""

    engine: str  # sequential, manual, vectorised or span
    reason: str


@dataclass(frozen=True)
class Division:
    """How the clients of a round are divided into chunks; see `chunk_size`."""

    cohort: int  # clients of a round
    one_by_one: bool = False

    def size(self, engine: str) -> int:
        return chunk_size(self.cohort, engine, self.one_by_one)

    def together(self, engine: str, network: Network) -> int:
        """Number of clients that the engine is given at once: of several chunks on a GPU, else of one."""
        if engine not in ("vectorised", "span") or self.one_by_one or not network.memory.measurable:
            return self.size(engine)
        return max(self.size(engine), min(self.cohort, _STACK))


def device_name(device: str) -> str:
    """The device in words: "cpu", or the name of the GPU of this process."""
    return f"cuda, {torch.cuda.get_device_name()}" if device == "cuda" else device


def cache_key(network: Network, local: LocalSGD, division: Division, device: str = "cpu") -> str:
    """Key of a measurement: equal keys share a choice.

    device: name of the device of the hosts. The network may be on another one: the server has no GPU.
    """
    device += "" if network.precision == "float32" else f", {network.precision}"
    shapes = "/".join("x".join(map(str, shape)) for shape in network.spec.shapes)
    learning = [network.task.name] if not network.task.is_classification else []
    if not local.is_sgd:
        factory = local.optimizer and local.optimizer.factory
        learning += [f"optimizer {getattr(factory, '__qualname__', 'sgd')}", f"clip {local.clip_norm}"]
    engines = " ".join(f"{engine} {division.size(engine)}" for engine in ENGINES)
    return (
        f"{device}, torch {torch.__version__}, input {network.input_shape}, batch {local.batch_size}, "
        f"clients per chunk: {engines}, tensors {shapes}" + "".join(f", {one}" for one in learning)
    )


def measure(network: Network, federation: Federation, local: LocalSGD, seed: int, division: Division) -> EngineChoice:
    """Times a few local steps of a few clients, and the sum of their results, with every engine that applies to them.

    Each engine is given chunks of the size that it has in a run, or on a GPU stacks of several chunks; there the
    samples are on the device, and times end when it is done. The vectorised engine comes last, against the fastest of
    the others. On a CPU it is timed only where it may win, because importing `torch.func` costs each host 1.2 s of CPU:
    where a chunk takes the fastest of the others at least 2 ms per step, and a client at most 0.5 ms. CPU ms per
    client, of the fastest other engine and vectorised, with clients per chunk:

        MLP 64-64-10, batches of 32, 5 clients (quickstart)     manual 0.41     vectorised 1.29    not timed
        MLP 64-64-10, batches of 5, 12 clients                  manual 0.40     vectorised 0.64    not timed
        MLP 64-8-10, batches of 4, 62 clients                   manual 0.23     vectorised 0.12
        the same with GELU, 62 clients                      sequential 0.81     vectorised 0.13
        MLP 784-2048-10, full batch, 30 clients                   span 4.8      vectorised 77      not timed
        LeNet-5, batches of 10, 3 clients                       manual 4.5      vectorised 12      not timed
        CNN 32-64-512, batches of 20, 11 clients                manual 34       vectorised 55      not timed

    Raises DataError where no client has valid data.
    """
    start_P = network.new_model(seed, 0).to(network.device)

    def tasks_of(most: int) -> list[TrainingTask]:
        tasks = []
        for client, (x, y) in _valid_clients(federation, most):
            steps = min(int(local.steps_of(np.array([len(y)]))[0]), _STEPS)
            x, y = x.to(network.device), y.to(network.device)
            tasks.append(TrainingTask(client, start_P, x, y, steps, local, Address(seed, 0, 0)))
        return tasks

    tasks = tasks_of(max(_CLIENTS, division.size("sequential")))
    runs = {"sequential": _in_chunks(division.size("sequential"), lambda part: sequential.train(network, part))}
    if span.why_not(network, tasks) is None:
        size = division.together("span", network)
        tasks = tasks_of(max(len(tasks), size))
        runs["span"] = _Run(size, lambda part: _span_sum(network, part))
    if manual.why_not(network, tasks) is None:
        runs["manual"] = _in_chunks(division.size("manual"), lambda part: manual.train(network, part))
    seconds = _seconds(runs, tasks, network)
    fastest, notes = min(seconds, key=seconds.__getitem__), []
    size = division.together("vectorised", network)
    stack = tasks_of(size)
    if refused := vectorised.refusal(network, stack) or _too_slow_in_a_stack(network, seconds[fastest], stack):
        notes.append(f"not vectorised: {refused}")
    else:
        try:
            list(vectorised.train(network, [replace(task, steps=1) for task in stack[:2]]))
        except RuntimeError as error:  # the network uses an operation that vmap does not support
            notes.append(f"not vectorised: {str(error).splitlines()[0][:120]}")
        else:
            stacked = _in_chunks(size, lambda part: vectorised.train(network, part, on_device=True))
            seconds |= _seconds({fastest: runs[fastest], "vectorised": stacked}, stack, network)
            fastest = min(seconds, key=seconds.__getitem__)
    engine = fastest if seconds["sequential"] > _MARGIN * seconds[fastest] else "sequential"
    measured = ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in seconds.items())
    summary = f"{engine}: {measured} per client of {max(task.steps for task in tasks)} steps"
    return EngineChoice(engine, "; ".join([summary, *notes]))


def _too_slow_in_a_stack(network: Network, seconds: float, tasks: Sequence[TrainingTask]) -> str | None:
    """Why the vectorised engine cannot win over another one that takes `seconds` per client; None where it may."""
    step = seconds / max(task.steps for task in tasks)
    if network.device.type != "cpu" or (step <= _LONG_STEP_SECONDS and step * len(tasks) >= _STACK_SECONDS):
        return None
    return f"no gain on a CPU for {len(tasks)} clients in a chunk and {1e3 * step:.2f} ms per step"


@dataclass(frozen=True)
class _Run:
    """The work of one engine: clients per chunk, and what is done with a chunk."""

    size: int
    do: Callable[[Sequence[TrainingTask]], object]

    def __call__(self, tasks: Sequence[TrainingTask]) -> None:
        for first in range(0, len(tasks), self.size):
            self.do(tasks[first : first + self.size])


def _in_chunks(size: int, train: Callable[[Sequence[TrainingTask]], Iterable[TrainingResult]]) -> _Run:
    return _Run(size, lambda part: _sum_of(train(part), part))


def _sum_of(results: Iterable[TrainingResult], tasks: Sequence[TrainingTask]) -> HostSums:
    """The mean of all changes, summed as in a chunk."""
    sums, total = ChunkSums(_mean_of(tasks)), HostSums()
    for result in results:
        sums.add(result.index, result.upload_P, tasks[result.index].start_P)
    total.add(sums)
    return total


def _span_sum(network: Network, tasks: Sequence[TrainingTask]) -> HostSums:
    """The same of the span engine, which sums without the rows where it can."""
    if not span.stackable(network):
        return _sum_of(span.train(network, tasks), tasks)
    sums, total, weight = ChunkSums(_mean_of(tasks)), HostSums(), 1 / len(tasks)
    for _, stack in span.stacks(network, tasks):
        sums.add_change(0, stack.change(dict.fromkeys(range(len(stack.tasks)), weight)))
    total.add(sums)
    return total


def _mean_of(tasks: Sequence[TrainingTask]) -> Averaging:
    return Averaging.of(np.ones((1, len(tasks))), len(tasks))


def _valid_clients(federation: Federation, most: int) -> list[tuple[int, tuple[Tensor, Tensor]]]:
    """The first clients with valid training data, and these data. Raises DataError where there are none."""
    found: list[tuple[int, tuple[Tensor, Tensor]]] = []
    reasons: list[str] = []
    for client in range(federation.num_clients):
        with naming_client(client, "reading its data"):
            samples = federation.train(client)
            reason = invalid_data_reason(*samples, federation.shape)
        if reason:
            reasons.append(reason)
        else:
            found.append((client, samples))
        if len(found) == most:
            break
    if not found:
        raise DataError(f"no client has valid data; those of client 0 have {reasons[0]}")
    return found


def _seconds(runs: Mapping[str, _Run], tasks: Sequence[TrainingTask], network: Network) -> dict[str, float]:
    """Least seconds per client of each run, after a first chunk. They are interleaved, so that all meet the same load.

    Runs that are clearly slower than the fastest are made once, and no further ones begin after `_BUDGET` seconds.
    """
    began = time.perf_counter()
    clock = time.perf_counter if network.device.type == "cuda" else time.thread_time  # other processes do not count
    seconds = dict.fromkeys(runs, np.inf)
    for run in runs.values():
        run(tasks[: run.size])
    _synchronise(network)
    for repetition in range(3):
        least = min(seconds.values())
        for name, run in runs.items():
            if repetition and (seconds[name] > 1.5 * least or time.perf_counter() - began > _BUDGET):
                continue
            start = clock()
            run(tasks)
            _synchronise(network)
            seconds[name] = min(seconds[name], (clock() - start) / len(tasks))
    return seconds


def _synchronise(network: Network) -> None:
    """Waits until a GPU has done what it was given."""
    if network.device.type == "cuda":
        torch.cuda.synchronize(network.device)
