"""Choice of the engine by a short measurement, once per network and device."""

import hashlib
import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from types import CodeType, FunctionType

import numpy as np
import torch
from torch import Tensor, nn

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import Address, Averaging
from cfl_ray.data.federation import Federation
from cfl_ray.engine.engines import ENGINES, SEQUENTIAL, Engine, chunk_size, mixes_chunks
from cfl_ray.engine.failure import naming_client
from cfl_ray.engine.reduce import ChunkSums, HostSums
from cfl_ray.engine.task import TrainingResult, TrainingTask
from cfl_ray.engine.validation import invalid_data_reason
from cfl_ray.engine.vmap_batches import DeviceMemoryError, train_alone
from cfl_ray.errors import DataError
from cfl_ray.nn.network import Network

_CLIENTS, _STEPS = 4, 5  # size of the measurement, at least one chunk of clients
_TOGETHER = 256  # most clients of the measurement if the clients of several chunks are trained together
_MARGIN = 1.05  # speed-up over the sequential engine from which another engine is chosen
_BUDGET = 1.0  # seconds
_FAR, _CLOSE = 1.5, 1.15  # multiples of the least time up to which a run is timed again; _CLOSE after the budget
_TRIED = 1 << 25  # most numbers of a row with which `why_not` tries vectorised
_SAMPLES_SHARE = 0.3  # of the free memory of a GPU, for the samples of the measurement


@dataclass(frozen=True)
class EngineChoice:
    """The chosen engine, with the measured times."""

    engine: str  # a name of `ENGINES`
    reason: str


@dataclass(frozen=True)
class Division:
    """How the clients of a round are divided into chunks; see `chunk_size`."""

    cohort: int  # clients of a round
    one_by_one: bool = False

    def size(self, engine: str) -> int:
        return chunk_size(self.cohort, engine, self.one_by_one)

    def together(self, engine: str, network: Network) -> int:
        """Number of clients passed to the engine at once: of several chunks on a GPU, otherwise of one chunk."""
        if self.one_by_one or not mixes_chunks(engine, network):
            return self.size(engine)
        return max(self.size(engine), min(self.cohort, _TOGETHER))


def device_name(device: str) -> str:
    """The device as text: "cpu", or "cuda" with the name of this process's GPU."""
    return f"cuda, {torch.cuda.get_device_name()}" if device == "cuda" else device


def cache_key(network: Network, local: LocalSGD, division: Division, device: str = "cpu") -> str:
    """Key of a measurement: equal keys share a choice.

    device: name of the hosts' device. The network may be on another device, because the server has no GPU.
    """
    device += "" if network.precision == "float32" else f", {network.precision}"
    learning = [network.task.name] if not network.task.is_classification else []
    if not local.is_sgd:
        factory = local.optimizer and local.optimizer.factory
        learning += [f"optimizer {getattr(factory, '__qualname__', 'sgd')}", f"clip {local.clip_norm}"]
    learning += ["single samples"] * (local.examples is not None)
    engines = " ".join(f"{engine} {division.size(engine)}" for engine in ENGINES)
    return (
        f"{device}, torch {torch.__version__}, input {network.input_shape}, batch {local.batch_size}, "
        f"clients per chunk: {engines}, network {structure(network.module)}" + "".join(f", {part}" for part in learning)
    )


def structure(module: nn.Module) -> str:
    """Digest of a network's computation: its modules, their settings, and the code of modules outside PyTorch."""
    tensors = chain(module.named_parameters(), module.named_buffers())
    parts = [re.sub(r" at 0x[0-9a-f]+", "", repr(module)), *(f"{n} {tuple(p.shape)}" for n, p in tensors)]
    for name, part in module.named_modules():
        kind = type(part)
        settings = {key: value for key, value in vars(part).items() if isinstance(value, int | float | str | tuple)}
        settings.pop("training", None)
        parts.append(f"{name} {kind.__module__}.{kind.__qualname__} {sorted(settings.items())}")
        own = [
            base for base in kind.__mro__ if issubclass(base, nn.Module) and not base.__module__.startswith("torch.")
        ]
        functions = [value for base in own for value in vars(base).values() if isinstance(value, FunctionType)]
        parts += [_code(function.__code__) for function in functions]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _code(code: CodeType) -> str:
    """The instructions, names and constants of a function and of the functions defined in it."""
    constants = [_code(value) if isinstance(value, CodeType) else repr(value) for value in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def measure(network: Network, federation: Federation, local: LocalSGD, seed: int, division: Division) -> EngineChoice:
    """Times a few local steps of a few clients, and the sum of their results, with every engine that applies to them.

    Each engine receives chunks of the size used in a run; on a GPU, vmap batches of several chunks, with the samples on
    the device and times that include the completion of its work. An engine with a `no_gain` (vectorised) is timed last,
    against the fastest other engine. On a CPU it is timed only if it may win, because importing `torch.func` costs each
    host 1.2 s of CPU: if the fastest other engine takes at least 2 ms per step for a chunk, and at most 0.5 ms for a
    client. CPU ms per client of the fastest other engine and of vectorised, with clients per chunk:

        MLP 64-64-10, batches of 32, 5 clients (quickstart)     manual 0.41     vectorised 1.29    not timed
        MLP 64-64-10, batches of 5, 12 clients                  manual 0.40     vectorised 0.64    not timed
        MLP 64-8-10, batches of 4, 62 clients                   manual 0.23     vectorised 0.12
        the same with GELU, 62 clients                      sequential 0.81     vectorised 0.13
        MLP 784-2048-10, full batch, 30 clients                   span 4.8      vectorised 77      not timed
        LeNet-5, batches of 10, 3 clients                       manual 4.5      vectorised 12      not timed
        CNN 32-64-512, batches of 20, 11 clients                manual 34       vectorised 55      not timed

    Raises DataError if no client has valid data.
    """
    start_P = network.new_model(seed, 0).to(network.device)

    def tasks_of(most: int) -> list[TrainingTask]:
        tasks, room = [], int(_SAMPLES_SHARE * network.memory.free())
        for client, (x, y) in _valid_clients(federation, most):
            room -= x.nbytes + y.nbytes
            if room > 0:  # the others are copied batch by batch
                x, y = x.to(network.device), y.to(network.device)
            steps = min(int(local.steps_of(np.array([len(y)]))[0]), _STEPS)
            tasks.append(TrainingTask(client, start_P, x, y, steps, local, Address(seed, 0, 0), only_summed=True))
        return tasks

    def run_of(name: str) -> _Run:
        return _Run(division.together(name, network), lambda part: _sum_of(ENGINES[name], network, part))

    first = [name for name, engine in ENGINES.items() if engine.no_gain is None]
    tasks, notes = tasks_of(max(_CLIENTS, division.size(SEQUENTIAL))), []
    runs: dict[str, _Run] = {}
    for name in first:
        if reason := ENGINES[name].why_not(network, tasks):
            notes.append(f"not {name}: {reason}")
        else:
            runs[name] = run_of(name)
    most = max(run.size for run in runs.values())
    tasks = tasks if most <= len(tasks) else tasks_of(most)
    seconds = _seconds(runs, tasks, network)
    notes += [f"not {name}: the memory of the device is too small" for name in runs.keys() - seconds.keys()]
    for name in [name for name in ENGINES if name not in first]:
        fastest, run = min(seconds, key=seconds.__getitem__), run_of(name)
        batch = tasks_of(run.size)
        if reason := _why_not_timed(name, network, seconds[fastest], batch):
            notes.append(f"not {name}: {reason}")
        else:
            seconds |= _seconds({fastest: runs[fastest], name: run}, batch, network)
    fastest = min(seconds, key=seconds.__getitem__)
    engine = fastest if seconds[SEQUENTIAL] > _MARGIN * seconds[fastest] else SEQUENTIAL
    measured = ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in seconds.items())
    summary = f"{engine}: {measured} per client of {max(task.steps for task in tasks)} steps"
    return EngineChoice(engine, "; ".join([summary, *notes]))


def why_not(engine: str, network: Network, federation: Federation, local: LocalSGD) -> str | None:
    """Reason why an engine can train no client; None if it can train the client with the fewest samples.

    vectorised is tried for a step of two clients, because vmap may not support an operation of the network.
    """
    sizes = federation.num_samples_N[federation.num_samples_N > 0]
    size = int(sizes.min()) if len(sizes) else 1
    x = torch.zeros(1, *network.input_shape, dtype=network.dtype).expand(size, *network.input_shape)
    steps = int(local.steps_of(np.array([size]))[0])
    task = TrainingTask(0, network.flat, x, torch.zeros(size, dtype=torch.long), steps, local, Address(0, 0, 0))
    reason = ENGINES[engine].why_not(network, [task])
    if reason or ENGINES[engine].no_gain is None or network.spec.size > _TRIED:
        return reason
    with suppress(DataError):  # no client has valid data, which other checks find
        samples = [(client, x[:size], y[:size]) for client, (x, y) in _valid_clients(federation, 2)]
        return _trial_error(
            ENGINES[engine], network, [replace(task, client=client, x=x, y=y) for client, x, y in samples]
        )
    return None


def _trial_error(engine: Engine, network: Network, tasks: Sequence[TrainingTask]) -> str | None:
    """The error of an engine in a step of two clients; None if it trains them."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of functorch, about speed, which is measured
            list(engine.train(network, [replace(task, steps=1) for task in tasks[:2]]))
    except Exception as error:  # under vmap, the user's code may raise any
        return (str(error).splitlines() or [type(error).__name__])[0][:120]
    return None


def _why_not_timed(name: str, network: Network, seconds: float, tasks: Sequence[TrainingTask]) -> str | None:
    """Reason why an engine cannot train a chunk, or cannot beat an engine with `seconds` per client; None if it may.

    The engine is tried on two clients: the network may have an operation that vmap does not support.
    """
    engine, step = ENGINES[name], seconds / max(task.steps for task in tasks)
    reason = engine.why_not(network, tasks) or (engine.no_gain and engine.no_gain(network, step, len(tasks)))
    return reason or _trial_error(engine, network, tasks)


@dataclass(frozen=True)
class _Run:
    """The measured work of one engine: clients per chunk, and the function applied to each chunk."""

    size: int
    do: Callable[[Sequence[TrainingTask]], object]

    def __call__(self, tasks: Sequence[TrainingTask]) -> None:
        for first in range(0, len(tasks), self.size):
            self.do(tasks[first : first + self.size])


def _sum_of(engine: Engine, network: Network, tasks: Sequence[TrainingTask]) -> HostSums:
    """The mean of all changes, summed as in a chunk; without the rows of clients if the engine supports it."""
    sums, total = ChunkSums(Averaging.of(np.ones((1, len(tasks))), len(tasks))), HostSums()
    if engine.train_sums is not None:
        for _, batch in engine.train_sums(network, tasks):
            sums.add_change(0, batch.change(dict.fromkeys(range(len(batch.tasks)), 1 / len(tasks))))
    else:
        results: Iterable[TrainingResult]
        if engine.together:
            results = engine.train(network, tasks)
        else:
            results = (train_alone(network.memory, task, lambda t: next(engine.train(network, [t]))) for task in tasks)
        for index, result in enumerate(results):
            sums.add(index, result.upload_P, tasks[index].start_P)
    total.add(sums)
    return total


def _valid_clients(federation: Federation, most: int) -> list[tuple[int, tuple[Tensor, Tensor]]]:
    """The first `most` clients with valid training data, and their samples. Raises DataError if there are none."""
    valid: list[tuple[int, tuple[Tensor, Tensor]]] = []
    reasons: list[str] = []
    for client in range(federation.num_clients):
        with naming_client(client, "reading its data"):
            samples = federation.train(client)
            reason = invalid_data_reason(*samples, federation.shape)
        if reason:
            reasons.append(reason)
        else:
            valid.append((client, samples))
        if len(valid) == most:
            break
    if not valid:
        raise DataError(f"no client has valid data; those of client 0 have {reasons[0]}")
    return valid


def _seconds(runs: Mapping[str, _Run], tasks: Sequence[TrainingTask], network: Network) -> dict[str, float]:
    """Least seconds per client of each run, after a warm-up chunk. Runs are interleaved, so that all have equal load.

    Runs that do not fit into the memory of the device are left out; if the sequential engine does not fit, the error is
    raised. Runs are repeated twice while another one is about as fast: after `_BUDGET` seconds only those that noise
    could exchange, after three times as many none.
    """
    began = time.perf_counter()
    clock = time.perf_counter if network.device.type == "cuda" else time.thread_time  # other processes do not count
    seconds = dict.fromkeys(runs, np.inf)
    for name, run in runs.items():
        try:
            run(tasks[: run.size])
        except (torch.OutOfMemoryError, DeviceMemoryError):
            if name == SEQUENTIAL:
                raise
            del seconds[name]
    _synchronise(network)
    for repetition in range(3):
        spent, least = time.perf_counter() - began, min(seconds.values())
        limit = _FAR if spent <= _BUDGET else _CLOSE if spent <= 3 * _BUDGET else 0
        timed = [name for name in seconds if not repetition or seconds[name] <= limit * least]
        if repetition and len(timed) == 1:
            break
        for name in timed:
            start = clock()
            runs[name](tasks)
            _synchronise(network)
            seconds[name] = min(seconds[name], (clock() - start) / len(tasks))
    return seconds


def _synchronise(network: Network) -> None:
    """Waits until a GPU has completed its queued work; no effect on a CPU."""
    if network.device.type == "cuda":
        torch.cuda.synchronize(network.device)
