"""Which engine trains the clients of a piece: a short measurement per model and device."""

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.errors import DataError
from cfl_ray.core.local import LocalSGD
from cfl_ray.core.work import Address
from cfl_ray.data.federation import Federation
from cfl_ray.engine import sequential, span, vectorised
from cfl_ray.engine.failure import named
from cfl_ray.engine.network import Network
from cfl_ray.engine.sound import data_flaw
from cfl_ray.engine.task import Task

_CLIENTS, _STEPS = 8, 5
_MARGIN = 1.25  # another engine must be this much faster than the sequential one, so that noise does not turn the choice


@dataclass(frozen=True)
class Choice:
    """The engine, and why."""

    engine: str  # sequential, vectorised or span
    reason: str


def key(network: Network, local: LocalSGD) -> str:
    """What a measurement depends on: equal keys share one."""
    device = torch.cuda.get_device_name(network.device) if network.device.type == "cuda" else "cpu"
    shapes = "/".join("x".join(map(str, shape)) for shape in network.spec.shapes)
    return f"{device}, torch {torch.__version__}, input {network.input_shape}, batch {local.batch_size}, tensors {shapes}"


def measure(network: Network, federation: Federation, local: LocalSGD, seed: int) -> Choice:
    """Times a few steps of a few clients with every engine that can do them."""
    start_P = network.new_model(seed, 0)
    tasks = []
    for client, (x, y) in _sound(federation):
        steps = min(int(local.steps_of(np.array([len(y)]))[0]), _STEPS)
        tasks.append(Task(client, start_P, x, y, steps, local, Address(seed, 0, 0)))
    seconds = {"sequential": _seconds(lambda: list(sequential.train(network, tasks)), network)}
    why = []
    if all(span.applies(network, task) for task in tasks):
        seconds["span"] = _seconds(lambda: list(span.train(network, tasks)), network)
    if refused := vectorised.refusal(network, tasks):
        why.append(f"not vectorised: {refused}")
    else:
        try:
            seconds["vectorised"] = _seconds(lambda: list(vectorised.train(network, tasks)), network)
        except RuntimeError as error:  # the network does something that vmap cannot
            why.append(f"not vectorised: {str(error).splitlines()[0][:120]}")
    fastest = min(seconds, key=seconds.get)
    engine = fastest if seconds["sequential"] > _MARGIN * seconds[fastest] else "sequential"
    measured = ", ".join(f"{name} {1e3 * value:.1f} ms" for name, value in seconds.items())
    return Choice(engine, "; ".join([f"{engine}: {measured} for {len(tasks)} clients, {max(task.steps for task in tasks)} steps", *why]))


def _sound(federation: Federation) -> list[tuple[int, tuple[Tensor, Tensor]]]:
    """The first clients whose data are sound, with their data. Raises DataError where nobody's are."""
    found, flaws = [], []
    for client in range(federation.num_clients):
        with named(client, "reading its data"):
            samples = federation.train(client)
            flaw = data_flaw(*samples, federation.shape)
        flaws.append(flaw) if flaw else found.append((client, samples))
        if len(found) == _CLIENTS:
            break
    if not found:
        raise DataError(f"no client has sound data; those of client 0 have {flaws[0]}")
    return found


def _seconds(work, network: Network) -> float:
    """Median of three runs after one to warm up."""
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        work()
        if network.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds[1:]))
