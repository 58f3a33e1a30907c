"""The choice of an engine for a run, by the rule of `engine.rule`, and the reasons why engines cannot train clients."""

import warnings
from dataclasses import dataclass, replace

import numpy as np
import torch

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import Address
from cfl_ray.data.federation import Federation
from cfl_ray.engine import rule
from cfl_ray.engine.compiled import operations_of, products_by_sample, why_not_here
from cfl_ray.engine.engines import COMPILED, ENGINES, Division
from cfl_ray.engine.rule import Facts
from cfl_ray.engine.task import TrainingTask
from cfl_ray.errors import first_line
from cfl_ray.nn.counts import counts_of
from cfl_ray.nn.network import Network
from cfl_ray.nn.operations import Differentiated, PatchConvolution
from cfl_ray.nn.passes import passes_of, why_no_passes

_TRIED = 1 << 25  # most numbers of a row with which an engine is tried


@dataclass(frozen=True)
class Compiling:
    """When PyTorch's compiler may be used, and how often the experiment would use its program."""

    when: str = "auto"  # `runtime.compile`
    clients: int = 1  # that are trained, all rounds and methods
    tried: bool = True  # whether the program is made before `compiled` is chosen, to see whether it can be


@dataclass(frozen=True)
class EngineChoice:
    """The chosen engine, with the reason."""

    engine: str  # a name of `ENGINES`
    reason: str  # a line that begins with the name
    # samples of the batches of a second program of `compiled`, for the last batches of epochs; 0: none. Another program
    # computes other last bits, so that the choice holds for the whole run
    last_batch: int = 0


def choose(facts: Facts) -> EngineChoice:
    """The engine with the least cost of those that can train the clients; of equal ones the first in `ENGINES`."""
    costs = {
        name: engine.cost(facts, facts.together[name]) for name, engine in ENGINES.items() if name not in facts.cannot
    }
    engine, *others = sorted(costs, key=costs.__getitem__)
    listed = ", ".join(f"{name} {_estimate(name, costs[name], facts)}" for name in others)
    estimate = _estimate(engine, costs[engine], facts)
    parts = [f"{engine}: estimated {estimate} for a local step of a client" + f" ({listed})" * bool(listed)]
    for reason in dict.fromkeys(facts.cannot.values()):
        parts.append(f"not {', '.join(name for name, why in facts.cannot.items() if why == reason)}: {reason}")
    return EngineChoice(engine, "; ".join(parts))


def _estimate(name: str, cost: float, facts: Facts) -> str:
    together = facts.together[name]
    shared = f" with {together} clients at once" if together > 1 and ENGINES[name].together else ""
    return f"{cost / 1e3:.2g} ms{shared}"


def choice_of(
    network: Network, federation: Federation, local: LocalSGD, division: Division, compiling: Compiling = Compiling()
) -> EngineChoice:
    """The engine for these clients by the rule; an engine that may fail on the network's operations is tried first."""
    facts = facts_of(network, federation, local, division, compiling)
    while True:
        choice = choose(facts)
        task, tried = median_task(network, federation, local), compiling.tried or choice.engine != COMPILED
        if choice.engine == COMPILED:
            choice = replace(choice, reason=f"{choice.reason}; {_break_even(network, task, facts, compiling)[1]}")
            choice = with_last_batch(choice, network, federation, local, compiling)
            task = replace(task, last_batch=choice.last_batch)
        if (reason := _trial_error(choice.engine, network, task) if tried else None) is None:
            return choice
        facts = replace(facts, cannot={**facts.cannot, choice.engine: reason})


def with_last_batch(
    choice: EngineChoice, network: Network, federation: Federation, local: LocalSGD, compiling: Compiling
) -> EngineChoice:
    """The choice of `compiled`, with a second program if the experiment saves more time by it than compiling takes."""
    task = median_task(network, federation, local)
    size, share = _last_batch(network.random_forward, _sizes(federation), local)
    saved = share * products_by_sample(network, task) * rule.PRODUCT / 1e6 * compiling.clients if size else 0.0
    if not saved:
        return choice
    seconds = rule.compile_seconds(operations_of(network, task)[:1])
    worth_while = saved >= seconds or compiling.when == "always"
    text = f"a second program for last batches of {'' if network.random_forward else 'at most '}{size} "
    text += f"{'takes' if worth_while else 'would take'} {seconds:.0f} s and save{'s' * worth_while} {_seconds(saved)}"
    return replace(choice, reason=f"{choice.reason}; {text}", last_batch=size if worth_while else 0)


def _last_batch(exactly: bool, sizes: np.ndarray, local: LocalSGD) -> tuple[int, float]:
    """The size of smaller batches that saves most, and the samples by which it is less than a full batch.

    These samples are those of a round, the mean over the clients. exactly: no batches of fewer samples are filled.
    sizes: samples of the clients.
    """
    batch = local.batch_size or 0
    per_epoch, steps = local.batches_of(sizes), local.steps_of(sizes)
    last = np.minimum(sizes - (per_epoch - 1) * batch, batch)
    short = (last < batch) & (2 * sizes >= batch)  # others are trained sequentially
    if not short.any():
        return 0, 0.0
    batches = np.bincount(last[short], (steps // per_epoch)[short], minlength=batch)  # by their samples
    saved = (batches if exactly else batches.cumsum()) * (batch - np.arange(batch)) / len(sizes)
    return int(saved.argmax()), float(saved.max())


def why_not_compile(facts: Facts, compiling: Compiling) -> str | None:
    """Reason why `compiled` is no candidate of the rule; None if it is. facts: `cannot` of the other engines."""
    if compiling.when == "never":
        return "runtime.compile is never"
    if compiling.when == "always":
        return None
    if "manual" not in facts.cannot:
        return "with runtime.compile: auto, it trains only networks that manual cannot"
    least, saved = rule.compile_seconds([0]), _saved(facts, compiling)
    if saved < least:  # whatever the operations are, which are not recorded yet
        return f"compiling takes {least:.0f} s of CPU or more, and saves {_seconds(saved)} in this experiment"
    return None


def _break_even(network: Network, task: TrainingTask, facts: Facts, compiling: Compiling) -> tuple[bool, str]:
    """Whether the experiment is expected to save the time of the compiler, and both times as text."""
    seconds, saved = rule.compile_seconds(operations_of(network, task)), _saved(facts, compiling)
    text = f"compiling takes about {seconds:.0f} s of CPU, once for each machine, and saves {_seconds(saved)} in this "
    return saved >= seconds, f"{text}experiment"


def _saved(facts: Facts, compiling: Compiling) -> float:
    """CPU seconds that the experiment saves with a compiled gradient, once it is compiled."""
    others = [
        engine.cost(facts, facts.together[name])
        for name, engine in ENGINES.items()
        if name != COMPILED and name not in facts.cannot
    ]
    saved = min(others) - ENGINES[COMPILED].cost(facts, 1)
    return saved / 1e6 * facts.steps * compiling.clients


def _seconds(saved: float) -> str:
    return "none" if saved <= 0 else f"{saved:.1g} s" if saved < 1 else f"{saved:.0f} s"


def facts_of(
    network: Network, federation: Federation, local: LocalSGD, division: Division, compiling: Compiling = Compiling()
) -> Facts:
    """The facts of the rule, for the device of the network. No samples are read.

    Clients that an engine cannot train although it can train the median client are trained by `sequential`. Batch
    statistics need equal batches: for them the smallest and the largest client count as well.
    """
    sizes, median = _sizes(federation), median_task(network, federation, local)
    extremes = sizes[[0, -1]].tolist() if network.batch_statistics else []
    tasks = [median, *(_task_of(network, federation, local, size) for size in extremes)]
    reasons = {name: engine.why_not(network, tasks) for name, engine in ENGINES.items() if name != COMPILED}
    cannot = {name: reason for name, reason in reasons.items() if reason}
    counts, shape = counts_of(network), network.spec.shapes[0]
    written_out = network.device.type == "cpu" and why_no_passes(network) is None
    operations = [step.operation for step in passes_of(network).steps] if written_out else []
    facts = Facts(
        network.device.type,
        counts.calls,
        network.spec.size,
        counts.activations,
        samples=len(median.y),
        batch=int(local.batch_of(len(median.y))),
        steps=median.steps,
        together={name: division.together(name, network) for name in ENGINES},
        cannot=cannot,
        first=shape if len(shape) == 2 else (0, 0),
        recurrent=network.recurrent,
        operations=max(len(operations), 1),
        differentiated=sum(isinstance(operation, Differentiated) for operation in operations),
        convolved=counts.convolved,
        narrow=not network.wide,
        by_lines=any(isinstance(operation, PatchConvolution) for operation in operations),
    )
    # last, because it records a step
    reason = why_not_compile(facts, compiling) or ENGINES[COMPILED].why_not(network, tasks)
    if not (reason := reason or why_not_here(network, median)) and compiling.when == "auto":
        worth_while, times = _break_even(network, median, facts, compiling)
        reason = None if worth_while else times
    if reason:
        return replace(facts, cannot={**cannot, COMPILED: reason})
    return facts


def why_not(name: str, network: Network, federation: Federation, local: LocalSGD) -> str | None:
    """Reason why an engine can train no client; None if it can train the one with the fewest samples or the most.

    Both are asked, since the needs of some engines grow with the samples, and `compiled` needs enough of them.
    """
    sizes = _sizes(federation)
    tasks = [_task_of(network, federation, local, size) for size in dict.fromkeys(sizes[[0, -1]].tolist())]
    reasons = [ENGINES[name].why_not(network, [task]) for task in tasks]
    if all(reasons) or name == COMPILED:  # hosts may compile, and not this machine
        return reasons[-1] if all(reasons) else None
    return _trial_error(name, network, tasks[reasons.index(None)])


def median_task(network: Network, federation: Federation, local: LocalSGD) -> TrainingTask:
    """Local training of a client with the median number of samples, all zero."""
    sizes = _sizes(federation)
    return _task_of(network, federation, local, int(sizes[len(sizes) // 2]))


def _sizes(federation: Federation) -> np.ndarray:
    """The numbers of samples of the clients that have any, ascending; not empty."""
    sizes_N = federation.num_samples_N
    return np.sort(sizes_N[sizes_N > 0]) if (sizes_N > 0).any() else np.ones(1, np.int64)


def _task_of(network: Network, federation: Federation, local: LocalSGD, size: int) -> TrainingTask:
    shape = federation.shape
    x = torch.zeros(1, *network.input_shape, dtype=network.dtype).expand(size, *network.input_shape)
    y = torch.zeros(size, *shape.target_shape, dtype=shape.target_dtype)
    steps = int(local.steps_of(np.array([size]))[0])
    return TrainingTask(0, network.flat, x, y, steps, local, Address(0, 0, 0))


def _trial_error(name: str, network: Network, task: TrainingTask) -> str | None:
    """The error of an engine that is tried, in steps of two clients; None if it trains them."""
    if not ENGINES[name].tried_steps or network.spec.size > _TRIED:
        return None
    steps = min(task.steps, ENGINES[name].tried_steps)
    tasks = [replace(task, client=client, steps=steps) for client in range(2)]
    try:
        with warnings.catch_warnings(action="ignore"):  # of functorch, about speed
            list(ENGINES[name].train(network, tasks))
    except Exception as error:  # under vmap, the user's code may raise any
        return first_line(error)[:120]
    return None
