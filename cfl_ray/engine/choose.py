"""Which engine trains the clients of a piece: a short measurement per model and device."""

import time
from dataclasses import dataclass

import numpy as np
import torch

from cfl_ray.core.local import LocalSGD
from cfl_ray.core.work import Address
from cfl_ray.data.federation import Federation
from cfl_ray.engine import sequential, vectorised
from cfl_ray.engine.network import Network
from cfl_ray.engine.task import Task

_CLIENTS, _STEPS = 8, 3
_MARGIN = 1.15  # vectorised must be this much faster, so that noise does not turn the choice


@dataclass(frozen=True)
class Choice:
    """The engine, and why."""

    vectorise: bool
    reason: str


def key(network: Network, local: LocalSGD) -> str:
    """What a measurement depends on: equal keys share one."""
    device = torch.cuda.get_device_name(network.device) if network.device.type == "cuda" else "cpu"
    shapes = "/".join("x".join(map(str, shape)) for shape in network.spec.shapes)
    return f"{device}, torch {torch.__version__}, input {network.input_shape}, batch {local.batch_size}, tensors {shapes}"


def measure(network: Network, federation: Federation, local: LocalSGD, seed: int) -> Choice:
    """Times a few steps of a few clients both ways."""
    start_P = network.new_model(seed, 0)
    tasks = []
    for client in range(min(_CLIENTS, federation.num_clients)):
        x, y = federation.train(client)
        tasks.append(Task(client, start_P, x, y, _STEPS, local, Address(seed, 0, 0)))
    if len(tasks) < 2:
        return Choice(False, "sequential: one client only")
    if why := vectorised.refusal(network, tasks):
        return Choice(False, f"sequential: {why}")
    try:
        alone, together = _seconds(lambda: list(sequential.train(network, tasks)), network), _seconds(lambda: list(vectorised.train(network, tasks)), network)
    except RuntimeError as error:  # the network does something that vmap cannot
        return Choice(False, f"sequential: this network cannot be vectorised ({str(error).splitlines()[0][:120]})")
    vectorise = alone > _MARGIN * together
    return Choice(vectorise, f"{'vectorised' if vectorise else 'sequential'}: {1e3 * alone:.1f} ms one by one, {1e3 * together:.1f} ms together ({len(tasks)} clients, {_STEPS} steps)")


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
