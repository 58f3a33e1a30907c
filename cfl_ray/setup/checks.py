"""Checks of a setup before its run. All raise ConfigError. `network`, in some, is a network of the setup, only read."""

import copy
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl_ray.config import check_buffer
from cfl_ray.config.client_ids import clients_in_words
from cfl_ray.core.aggregation.apply import try_rule
from cfl_ray.core.aggregation.rules import RULES, AggregationRule, Mean
from cfl_ray.core.augmentation import try_augmentations
from cfl_ray.core.checked_method import CheckedMethod
from cfl_ray.core.diagnostics import MOST_VALUES
from cfl_ray.core.method import Method
from cfl_ray.core.metrics import METRICS
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.tasks import TARGETS, Task, bce, cross_entropy, token_cross_entropy
from cfl_ray.core.work import Address
from cfl_ray.data.federation import DataShape, Federation
from cfl_ray.engine import choice
from cfl_ray.engine.attack import Attack, AttackKind, OwnAttack
from cfl_ray.engine.engines import SEQUENTIAL
from cfl_ray.errors import ConfigError, RunError, counted, did_you_mean
from cfl_ray.models import ModelRecipe
from cfl_ray.nn.network import Network, new_module
from cfl_ray.population.availability import Availability, OwnAvailability
from cfl_ray.run_directory import RunDirectory
from cfl_ray.setup.dry_rounds import FEW, DryBackend, DryRounds, of_few, why_synchronous
from cfl_ray.setup.first_models import start_of
from cfl_ray.setup.scheduled_changes import population_of
from cfl_ray.setup.setup import Setup
from cfl_ray.system.machine import available_memory


def check_batches(setup: Setup, network: Network) -> None:
    """Raises ConfigError if clients train on a batch of one sample but the model cannot: BatchNorm needs two."""
    if not network.batch_statistics:
        return
    sizes_N = setup.federation.num_samples_N
    for label in setup.methods:
        local = setup.local_of(label)
        batches = _work_of(setup, network, label).batches
        for size, per_step in sorted(batches | {(local.batch_size or 0, 1)}):
            batch_N = np.asarray(replace(local, batch_size=size or None).batch_of(sizes_N, per_step))
            single_N = (sizes_N == 1) | (batch_N == 1) | ((sizes_N % batch_N == 1) & (not local.drop_last))
            if not single_N.any() or (reason := network.why_not_batch_of(1)) is None:
                continue
            client, ids = int(single_N.argmax()), np.flatnonzero(single_N).tolist()
            whole = sizes_N[client] == 1 or batch_N[client] == 1
            cure = (
                "leave such clients out (data.partition.min_samples) and set local.batch_size to 2 or more"
                if whole
                else "set local.drop_last: true or single, which leave that batch out, or another local.batch_size"
            )
            raise ConfigError(
                f"{clients_in_words(ids)} would train on a batch of one sample ({label}: "
                f"{counted(sizes_N[client], 'sample')} in batches of {batch_N[client]}), which the model's "
                f"BatchNorm refuses ({reason}); {cure}, or use "
                "GroupNorm"
            )


def check_reported(setup: Setup) -> None:
    """Raises ConfigError if `evaluation.reported` names no method, or a protocol that is not measured."""
    settings = setup.experiment.evaluation
    known = {*setup.methods, *(method.name for method in setup.methods.values()), *Method.registry}
    if settings.reported is None:
        return
    for name in settings.reported:
        if name not in known:
            raise ConfigError(f"evaluation.reported: there is no method {name!r}{did_you_mean(name, sorted(known))}")
    for label, method in setup.methods.items():
        protocol = settings.protocol_of(label, method.name)
        is_measured = {"local": settings.local, "tuned": settings.tuned_epochs > 0}
        if not is_measured.get(protocol, True):
            change = "evaluation.local: true" if protocol == "local" else "evaluation.tuned_epochs to at least 1"
            raise ConfigError(
                f"evaluation.reported: {label} is scored by protocol {protocol}, which is not measured; set {change}"
            )


def check_engine(setup: Setup, network: Network) -> None:
    """Raises ConfigError for a configured engine that can train the clients of none of the methods."""
    engine = setup.experiment.runtime.engine
    if engine in ("auto", SEQUENTIAL):
        return
    reasons = [choice.why_not(engine, network, setup.federation, setup.local_of(label)) for label in setup.methods]
    if reason := all(reasons) and reasons[0]:
        raise ConfigError(f"runtime.engine: {engine} cannot train these clients: {reason}; use auto or {SEQUENTIAL}")


def try_plugins(setup: Setup) -> None:
    """Raises ConfigError for a plugin that fails when it is called."""
    shape, num_clients = setup.federation.shape, setup.federation.num_clients
    try_metrics(setup.task, shape)
    for local in (setup.local, *setup.own_local.values()):
        try_augmentations(local.augment, shape.input, shape.dtype)
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


def try_methods(setup: Setup, network: Network) -> None:
    """Raises ConfigError for an option that does not fit the model. Creates and discards every method's first state."""
    for label, method in setup.methods.items():
        method.check_model(network.spec)
        if (norms := method.kept_norms(network.spec)) is not None and not norms.count:
            others = " or local_all" if network.spec.other_norms else ""
            raise ConfigError(
                f"{label}.norm: {method.norm} keeps normalisation layers with the clients, and of these the model has "
                f"none; its layers are {', '.join(network.spec.layers)}; set norm: shared{others}"
            )
        _check_memory(label, method, network.spec.size)
        _check_pairs(setup, label)
        _check_participants(setup, label, network.spec)
        start = start_of(setup.experiment, label, network, setup.federation.num_clients)
        CheckedMethod(method, network.spec.size).init(start)


def check_features(setup: Setup, network: Network) -> None:
    """Raises ConfigError for a method that reads the inputs of the model's last layer if no forward pass shows them."""
    try:
        network.check_features()
    except ConfigError as error:
        for label in setup.methods:
            if _work_of(setup, network, label).readers:
                raise ConfigError(f"{label}: {error}") from None


def _work_of(setup: Setup, network: Network, label: str) -> DryBackend:
    """The work of a method in rounds without training up to its last phase, for two clients if they are enough."""

    def play(dry: DryRounds) -> DryBackend:
        backend = DryBackend(dry.spec, dry.shape)
        dry = replace(dry, cohort=min(dry.num_clients, max(dry.cohort, 2)), secure=None)
        for _ in dry.play(backend, to_last_phase=True):
            pass
        return backend

    return of_few(play, setup.dry_rounds(label, network.spec), 2)


def warnings_of_model(setup: Setup, network: Network) -> tuple[str, ...]:
    """A line for each method that shares nothing or keeps nothing of this model, and on its head and its outputs."""
    spec, found = network.spec, []
    for label, method in setup.methods.items():
        if text := method.model_warning(spec):
            found.append(f"{label}: {text}")
        shared = method.shared_columns(spec)
        trained = shared.within(0, spec.trained).count
        private = ", ".join(spec.layers)
        if not trained:
            found.append(
                f"{label} shares no trained parameter of this model, whose trained layers ({private}) are all private: "
                "each client trains alone, as with the method local"
            )
        elif shared.count < spec.size and trained == spec.trained:
            found.append(f"{label} keeps no trained parameter private: it is FedAvg on this model ({private})")
    if setup.task.loss in (cross_entropy, token_cross_entropy, bce) and (squashing := network.squashing()):
        found.append(
            f"the outputs of the model come from {squashing}, but the loss of task {setup.task.name} computes that "
            "itself, of logits, so training is slow; leave it out, and compute probabilities from predictions"
        )
    if network.last_layer != spec.layers[-1]:
        found.append(
            f"the head of the model is its last trained layer as registered, {spec.layers[-1]!r}, but the last "
            f"one that its forward pass calls is {network.last_layer!r}; methods that treat the head apart (fedper, "
            f"lg_fedavg, fedrep, ...) use {spec.layers[-1]!r}: {_remedy_of_head(network)} (docs/extend/model.md)"
        )
    return tuple(found)


def _remedy_of_head(network: Network) -> str:
    last, names = network.last_layer, {id(p): name for name, p in network.module.named_parameters()}
    own = network.module.get_submodule(last).named_parameters(recurse=False)
    tied = [f"{last}.{name} is {names[id(p)]}" for name, p in own if names[id(p)] != f"{last}.{name}"]
    if tied:
        return (
            f"{tied[0]}, so it is averaged as a part of that layer; methods with a head need an output layer of its own"
        )
    return "assign the output layer last in __init__"


def check_asynchronous(setup: Setup, spec: ParamSpec) -> None:
    """Raises ConfigError for methods whose rounds cannot be asynchronous, and numbers of clients that cannot be."""
    if setup.asynchrony is None:
        return
    wanted, clients = setup.experiment.asynchronous.concurrency or 0, setup.federation.num_clients
    if wanted > clients:
        raise ConfigError(
            f"asynchronous.concurrency: {wanted} clients at work, but the federation has {clients}; at most {clients}"
        )
    check_buffer(setup.asynchrony.buffer, setup.experiment.asynchronous.concurrency or setup.division.cohort)
    for label in setup.methods:
        dry = replace(setup.dry_rounds(label, spec), num_clients=max(clients, FEW))
        if reason := of_few(why_synchronous, dry, FEW):
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


def check_classes(task: Task, shape: DataShape, confusion: bool = False) -> None:
    """Raises ConfigError if the counts of a test, one of each pair of label and prediction, do not fit into memory.

    confusion: whether they are recorded, which needs classes, and so few of them that they fit into a diagnostic.
    """
    if confusion and task.targets != "class":
        raise ConfigError(f"evaluation.confusion needs classes, the targets of the task are {task.targets!r}")
    if confusion and shape.num_classes > (most := math.isqrt(MOST_VALUES)):
        raise ConfigError(
            f"evaluation.confusion: the counts of {shape.num_classes:,} classes are not recorded, at most {most:,} "
            "classes; leave it out, and ask result.class_accuracy() after the run"
        )
    needed, free = 8 * shape.num_classes**2, available_memory()
    if task.by_confusion and needed > free:
        raise ConfigError(
            f"there are {shape.num_classes:,} classes, since the largest label is {shape.num_classes - 1}: the counts "
            f"of a test (label by prediction) take {needed / 1e9:,.1f} GB, {free / 1e9:,.1f} GB are free; number the "
            "labels that occur (data.labels: dense, in Python labels='dense')"
        )


def check_attackers(attack: Attack, count: int) -> None:
    """Raises ConfigError for attackers that do not exist, and if no client is honest. count: number of clients."""
    if attack.clients and max(attack.clients) >= count:
        raise ConfigError(
            f"attack.clients: client {max(attack.clients)} does not exist; the federation has clients 0 .. {count - 1}"
        )
    if len(attack.clients) >= count:
        raise ConfigError(f"attack: all {count} clients attack, so none is honest; leave at least one out")


# ---- trials of plugins, so that their mistakes do not end the run after its first rounds
#
# Each is called once, as the run calls it, with random numbers of the run's shapes; a result of the wrong type or
# shape and an exception are errors of the config. A copy is called, so that a plugin that counts its calls begins at 0.


_MOST_RESULTS = 1000  # the distances between them are then 8 MB
_ADDRESS = Address(seed=0, round=1, exchange=0)


def try_aggregation(rule: AggregationRule, results: int) -> None:
    """Calls a plugin rule with the results of a round. results: number of clients in a round."""
    if not isinstance(rule, Mean) and type(rule) not in RULES.values():
        with _as_config_error():
            try_rule(_copy(rule), min(results, _MOST_RESULTS))


def try_attack(kind: AttackKind, recipe: ModelRecipe, shape: DataShape) -> None:
    """Calls a plugin attack with an upload as long as the model, and two labels of every class."""
    if not isinstance(kind, OwnAttack):
        return
    attack = Attack(_copy(kind), frozenset({0}))
    columns = ParamSpec.of(new_module(recipe, 0, 0)).size
    draw = torch.Generator().manual_seed(0)
    sent_P = torch.randn(columns, generator=draw)
    with _as_config_error():
        attack.upload(0, sent_P + 0.01 * torch.randn(columns, generator=draw), sent_P, _ADDRESS)
        if shape.targets == "class":
            attack.labels(0, torch.arange(2 * shape.num_classes) % shape.num_classes, shape.num_classes, _ADDRESS)


def try_availability(availability: Availability, num_clients: int) -> None:
    """Calls a plugin as in the first round."""
    if isinstance(availability, OwnAvailability):
        with _as_config_error():
            _copy(availability).reachable(1, num_clients)


def try_metrics(task: Task, shape: DataShape) -> None:
    """Calls plugin metrics with the outputs and targets of a few samples, among them every class."""
    own = [metric for metric in task.metrics if metric not in METRICS.builtin.values()]
    if own:
        outputs, targets = _samples(shape)
        given = f"; it gets outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)} of {targets.dtype}"
        for metric in own:
            with _as_config_error(given), torch.no_grad():
                _copy(metric)(outputs.clone(), targets.clone())


def _samples(shape: DataShape) -> tuple[Tensor, Tensor]:
    """Outputs and targets of at least 4 samples."""
    draw = torch.Generator().manual_seed(0)
    count = max(4, 2 * shape.num_classes) if shape.targets == "class" else 4
    outputs = torch.randn(count, *shape.outputs, generator=draw)
    sizes = (count, *shape.target_shape)
    if shape.targets == "real":
        return outputs, torch.randn(sizes, generator=draw)
    dtype = TARGETS[shape.targets].dtype
    if shape.targets == "binary":  # every label occurs, and not with every sample
        return outputs, (torch.arange(count) % 2).to(dtype)[:, None].expand(sizes).contiguous()
    numbers = torch.arange(torch.Size(sizes).numel()).reshape(sizes)
    return outputs, (numbers % shape.num_classes).to(dtype)


def _copy(part: Any) -> Any:
    """A copy of the plugin; the plugin itself if it cannot be copied."""
    try:
        return copy.deepcopy(part)
    except Exception:
        return part


@contextmanager
def _as_config_error(given: str = "") -> Iterator[None]:
    """Context that turns a RunError into a ConfigError. given: the arguments of the plugin, for the message."""
    try:
        yield
    except RunError as error:
        raise ConfigError(f"{error}{given} (tried on random numbers, before the run)") from error
