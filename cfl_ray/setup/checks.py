"""Checks of a setup before its run. All raise ConfigError."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from cfl_ray.config import check_buffer
from cfl_ray.config.client_ids import clients_in_words
from cfl_ray.core.checked_method import CheckedMethod
from cfl_ray.core.method import Method
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.tasks import Task
from cfl_ray.data.federation import Federation
from cfl_ray.engine import autotune
from cfl_ray.engine.attack import Attack
from cfl_ray.engine.engines import SEQUENTIAL
from cfl_ray.errors import ConfigError
from cfl_ray.nn.network import Network
from cfl_ray.run_directory import RunDirectory
from cfl_ray.setup.dry_rounds import why_synchronous
from cfl_ray.setup.first_models import start_of
from cfl_ray.setup.plugin_trials import try_aggregation, try_attack, try_availability, try_metrics
from cfl_ray.setup.schedule import population_of
from cfl_ray.setup.setup import Setup
from cfl_ray.system.machine import available_memory


def check_batches(setup: Setup) -> None:
    """Raises ConfigError if clients train on a batch of one sample but the model cannot: BatchNorm needs two."""
    network, sizes_N = setup.network(), setup.federation.num_samples_N
    if not network.batch_statistics:
        return
    for label in setup.methods:
        local = setup.local_of(label)
        batch_N = np.asarray(local.batch_of(sizes_N))
        single_N = (sizes_N == 1) | (batch_N == 1) | ((sizes_N % batch_N == 1) & (not local.drop_last))
        if not single_N.any() or (reason := network.why_not_batch_of(1)) is None:
            continue
        client, ids = int(single_N.argmax()), np.flatnonzero(single_N).tolist()
        whole = sizes_N[client] == 1 or batch_N[client] == 1
        cure = (
            "leave such clients out (data.partition.min_samples: 2) and set local.batch_size to 2 or more"
            if whole
            else "set local.drop_last: true, which leaves that batch out, or another local.batch_size"
        )
        raise ConfigError(
            f"{clients_in_words(ids)} would train on a batch of one sample "
            f"({sizes_N[client]} samples in batches of {batch_N[client]}), which the model's BatchNorm refuses "
            f"({reason}); {cure}, or use GroupNorm"
        )


def check_engine(setup: Setup) -> None:
    """Raises ConfigError for a configured engine that can train the clients of none of the methods."""
    engine = setup.experiment.runtime.engine
    if engine in ("auto", SEQUENTIAL):
        return
    if reason := why_not_engine(setup, setup.network(), engine):
        raise ConfigError(f"runtime.engine: {engine} cannot train these clients: {reason}; use auto or {SEQUENTIAL}")


def why_not_engine(setup: Setup, network: Network, engine: str) -> str | None:
    """Reason, of the first method, why an engine can train the clients of none of the methods; None if it can."""
    reasons = [autotune.why_not(engine, network, setup.federation, setup.local_of(label)) for label in setup.methods]
    return reasons[0] if all(reasons) else None


def try_plugins(setup: Setup) -> None:
    """Raises ConfigError for a plugin that fails when it is called."""
    shape, num_clients = setup.federation.shape, setup.federation.num_clients
    try_metrics(setup.task, shape)
    for method in setup.methods.values():
        try_aggregation(method.aggregation_rule, setup.division.cohort)
    try_attack(setup.attack_kind, setup.recipe, shape)
    try_availability(setup.availability, num_clients)


def check_labels(labels: Iterable[str]) -> None:
    """Raises ConfigError for the label of a method whose folder would be a file or folder of the run."""
    taken = RunDirectory.names_in("run")
    for label in labels:
        if label in taken:
            raise ConfigError(
                f"methods: {label!r} cannot be a label, for it is the name of a file or folder of the run directory "
                f"({', '.join(taken)})"
            )


def _check_memory(label: str, method: Method[Any], parameters: int) -> None:
    """Raises ConfigError, before models are made, if the cluster models do not fit into this machine's memory."""
    wanted, available = getattr(method, "num_clusters", None) or 0, available_memory()
    most = available // (parameters * 4)  # bytes of a float
    if wanted > most:
        raise ConfigError(
            f"{label}.num_clusters is {wanted}: its models need {wanted * parameters * 4 / 1e9:.1f} GB, and this "
            f"machine has {available / 1e9:.1f} GB of memory available; use at most {most} clusters"
        )


def compared_clients(setup: Setup, label: str) -> int:
    """S, the number of clients that a method compares pair by pair, or its maximum; see `Method.compares`."""
    match setup.methods[label].compares:
        case "cohort":
            return setup.division.cohort
        case "participants":
            return most_participants(setup)
        case "reachable":
            population = population_of(setup.experiment, setup.federation.num_clients)
            drawn = population.draw(1, 1.0, None, setup.availability, setup.experiment.cohort.dropout)
            return len(drawn.ids_M)
    return 0


def _check_pairs(setup: Setup, label: str) -> None:
    """Raises ConfigError if the arrays of all pairs of compared clients do not fit into this machine's memory."""
    method, count, available = setup.methods[label], compared_clients(setup, label), available_memory()
    needed = count**2 * method.pair_bytes
    if needed > available:
        raise ConfigError(
            f"{label} compares {count:,} clients with each other ({method.compares}): their pairs need "
            f"{needed / 1e9:.1f} GB, and this machine has {available / 1e9:.1f} GB of memory available, enough for "
            f"{math.isqrt(available // method.pair_bytes):,} clients; use fewer clients, a larger machine, or a method "
            "that compares clients with models (ifca)"
        )


def most_participants(setup: Setup) -> int:
    """The largest number of clients that can take part in the run, among those of its start."""
    return min(setup.division.cohort * setup.experiment.rounds, setup.federation.num_clients)


def bytes_of_participants(setup: Setup, label: str, spec: ParamSpec) -> int:
    """Peak bytes on the server of the values that a method keeps there for each participant; 0: it keeps none."""
    state, total = setup.methods[label].state_type, setup.federation.num_clients
    evaluated = min(setup.experiment.evaluation.clients or total, total)
    return 4 * state.peak_floats(spec, most_participants(setup), setup.division.cohort, evaluated)


def _check_participants(setup: Setup, label: str, spec: ParamSpec) -> None:
    """Raises ConfigError if the values that the server keeps for participants do not fit into this machine's memory."""
    needed, available = bytes_of_participants(setup, label, spec), available_memory()
    if needed > available:
        clients = most_participants(setup)
        raise ConfigError(
            f"{label} keeps {setup.methods[label].state_type.of_each_client} on the server for each of up to "
            f"{clients:,} clients: they need {needed / 1e9:.1f} GB, and this machine has {available / 1e9:.1f} GB of "
            f"memory available, enough for {available * clients // needed:,} clients; use fewer clients, a smaller "
            "model, a larger machine, or a method whose clients keep their own models (ditto)"
        )


def try_methods(setup: Setup) -> None:
    """Raises ConfigError for an option that does not fit the model. Creates and discards every method's first state."""
    network = setup.network()
    for label, method in setup.methods.items():
        method.check_model(network.spec)
        _check_memory(label, method, network.spec.size)
        _check_pairs(setup, label)
        _check_participants(setup, label, network.spec)
        start = start_of(setup.experiment, label, network, setup.federation.num_clients)
        CheckedMethod(method, network.spec.size).init(start)


def check_asynchronous(setup: Setup) -> None:
    """Raises ConfigError for methods whose rounds cannot be asynchronous, and numbers of clients that cannot be."""
    if setup.asynchrony is None:
        return
    wanted, clients = setup.experiment.asynchronous.concurrency or 0, setup.federation.num_clients
    if wanted > clients:
        raise ConfigError(
            f"asynchronous.concurrency: {wanted} clients at work, but the federation has {clients}; at most {clients}"
        )
    check_buffer(setup.asynchrony.buffer, setup.experiment.asynchronous.concurrency or setup.division.cohort)
    spec = setup.network().spec
    for label, method in setup.methods.items():
        if reason := why_synchronous(
            method, spec, setup.local_of(label), setup.federation.shape, setup.experiment.rounds
        ):
            raise ConfigError(
                f"asynchronous.buffer: {label} cannot run asynchronously: {reason}; leave out the method or the buffer"
            )


def check_targets(task: Task, federation: Federation) -> None:
    """Raises ConfigError if the federation has other targets than the task."""
    if federation.shape.targets != task.targets:
        raise ConfigError(
            f"task {task.name} needs targets {task.targets!r}, the federation has {federation.shape.targets!r}; say "
            f"targets={task.targets!r} where it is made (federation_from_arrays), or choose another task"
        )


def check_attackers(attack: Attack, count: int) -> None:
    """Raises ConfigError for attackers that do not exist, and if no client is honest. count: number of clients."""
    if attack.clients and max(attack.clients) >= count:
        raise ConfigError(
            f"attack.clients: client {max(attack.clients)} does not exist; the federation has clients 0 .. {count - 1}"
        )
    if len(attack.clients) >= count:
        raise ConfigError(f"attack: all {count} clients attack, so none is honest; leave at least one out")
