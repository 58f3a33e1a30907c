"""The plan of a federation that was not made from a plan, e.g. of arrays, so that its shards can be written."""

from itertools import pairwise

import numpy as np

from cfl_ray.core.tasks import TARGETS
from cfl_ray.data.arrays import ArrayFederation
from cfl_ray.data.federation import Federation
from cfl_ray.data.images import Images
from cfl_ray.data.indexed import Index, StoredSamples
from cfl_ray.data.plan import FederationPlan, PlannedClient, TestSet
from cfl_ray.data.shifts import Variant
from cfl_ray.errors import DataError

# samples, the rows of each client in them, shared test sets, and the stored value that means 1.0
_Stored = tuple[StoredSamples, Index, list[StoredSamples], int]


def shard_plan_of(federation: Federation) -> FederationPlan:
    """The plan for shards with the samples of this federation. Raises DataError if its samples are normalised."""
    stored = _in_memory(federation) if isinstance(federation, ArrayFederation) else _read(federation)
    (x, y), index, tests, scale = stored
    test_x, test_y = _joined(tests) if tests else (None, None)
    target_type = TARGETS[federation.shape.targets].stored
    variant = Variant(
        Images(
            _storable(x, federation),
            y.astype(target_type),
            None if test_x is None else _storable(test_x, federation),
            None if test_y is None else test_y.astype(target_type),
            federation.shape.num_classes,
            scale,
            vocabulary=federation.shape.vocabulary,
            targets=federation.shape.targets,
            class_names=federation.shape.class_names,
        )
    )
    clients = []
    for client in range(federation.num_clients):
        first = index.offset_N[client]
        middle = first + index.train_N[client]
        last = middle + index.held_out_N[client]
        name, group, test_set = federation.client_name(client), index.group_N[client], index.test_set_N[client]
        rows = np.arange(first, middle), np.arange(middle, last)
        clients.append(PlannedClient(name, int(group), variant, *rows, int(test_set)))
    ends = np.cumsum([0, *(len(labels) for _, labels in tests)])
    test_sets = [TestSet(variant, np.arange(first, last)) for first, last in pairwise(ends)]
    return FederationPlan(federation.view, clients, test_sets, index.labels_NC)


def _in_memory(federation: ArrayFederation) -> _Stored:
    tests = [] if federation.test_samples is None else [federation.test_samples]
    return federation.samples, federation.index, tests, int(federation.scaling.scale)


def _read(federation: Federation) -> _Stored:
    """The samples of any federation, read by its methods. Raises DataError if the federation normalises samples."""
    if federation.normalize is not None:
        raise DataError(
            f"a {type(federation).__name__} normalises its samples itself, so its shards cannot be written; "
            "federation_from_arrays(normalize=...) makes a federation whose shards can"
        )
    count, clients = federation.num_clients, np.arange(federation.num_clients)
    parts = [federation.train(client) for client in range(count)]
    held_out_N = np.zeros(count, np.int64)
    if federation.view == "holdout":
        held_out = [federation.holdout(client) for client in range(count)]
        held_out_N = np.array([len(y) for _, y in held_out])
        parts = [part for pair in zip(parts, held_out, strict=True) for part in pair]
    samples = [(x.numpy(), y.numpy()) for x, y in parts]
    tests = [(x.numpy(), y.numpy()) for x, y in map(federation.test_set, range(federation.num_test_sets()))]
    total_N, none_N = federation.num_samples_N + held_out_N, np.full(count, -1, np.int32)
    index = Index(
        file_N=np.zeros(count, np.int32),
        offset_N=np.cumsum(total_N) - total_N,
        train_N=federation.num_samples_N,
        held_out_N=held_out_N,
        group_N=none_N if federation.group_N is None else federation.group_N,
        test_set_N=federation.test_set_of(clients) if tests else none_N,
        labels_NC=federation.labels_of(clients),
    )
    return _joined(samples), index, tests, 1


def _joined(parts: list[StoredSamples]) -> StoredSamples:
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def _storable(x: np.ndarray, federation: Federation) -> np.ndarray:
    """The samples in a type that shards have: uint8, float32, or int32 for token ids."""
    if federation.shape.vocabulary is not None:
        return x.astype(np.int32)
    return x if x.dtype == np.uint8 else x.astype(np.float32)
