"""The plan of a federation that was not made from a plan, e.g. of arrays, so that its shards can be written."""

from itertools import pairwise

import numpy as np

from cfl_ray.core.tasks import TARGETS
from cfl_ray.data.arrays import ArrayFederation
from cfl_ray.data.federation import Federation
from cfl_ray.data.images import Images
from cfl_ray.data.indexed import StoredSamples
from cfl_ray.data.plan import FederationPlan, PlannedClient, TestSet
from cfl_ray.data.shifts import Variant
from cfl_ray.errors import DataError


def plan_of(federation: Federation) -> FederationPlan:
    """The plan for shards with the samples of this federation. Raises DataError if its samples are normalised."""
    count = federation.num_clients
    rows = _stored(federation) if isinstance(federation, ArrayFederation) else _read(federation)
    (x, y), start_N, train_N, held_out_N, tests, scale = rows
    test = _joined(tests) if tests else None
    variant = Variant(
        Images(
            _storable(x, federation),
            y.astype(TARGETS[federation.shape.targets].stored),
            None if test is None else _storable(test[0], federation),
            None if test is None else test[1].astype(TARGETS[federation.shape.targets].stored),
            federation.shape.num_classes,
            scale,
            vocabulary=federation.shape.vocabulary,
            targets=federation.shape.targets,
        )
    )
    group_N = np.full(count, -1) if federation.group_N is None else federation.group_N
    test_set_N = federation.test_set_of(np.arange(count)) if tests else np.full(count, -1)
    clients = [
        PlannedClient(
            federation.client_name(client),
            int(group_N[client]),
            variant,
            np.arange(start_N[client], start_N[client] + train_N[client]),
            np.arange(start_N[client] + train_N[client], start_N[client] + train_N[client] + held_out_N[client]),
            int(test_set_N[client]),
        )
        for client in range(count)
    ]
    ends = np.cumsum([0, *(len(labels) for _, labels in tests)])
    test_sets = [TestSet(variant, np.arange(first, last)) for first, last in pairwise(ends)]
    return FederationPlan(federation.view, clients, test_sets, federation.labels_of(np.arange(count)))


# samples; each client's first row, number of training rows and of held-out rows; test sets; the value that means 1.0
_Rows = tuple[StoredSamples, np.ndarray, np.ndarray, np.ndarray, list[StoredSamples], int]


def _stored(federation: ArrayFederation) -> _Rows:
    index, scale = federation.index, int(federation.scaling.scale)
    tests = [] if federation.test_samples is None else [federation.test_samples]
    return federation.samples, index.offset_N, index.train_N, index.held_out_N, tests, scale


def _read(federation: Federation) -> _Rows:
    """The rows of any federation, read by its methods. Raises DataError if the federation normalises samples."""
    if federation.normalize is not None:
        raise DataError(
            f"a {type(federation).__name__} normalises its samples itself, so its shards cannot be written; "
            "federation_from_arrays(normalize=...) makes a federation whose shards can"
        )
    parts = [federation.train(client) for client in range(federation.num_clients)]
    held_out_N = np.zeros(len(parts), np.int64)
    if federation.view == "holdout":
        held_out = [federation.holdout(client) for client in range(federation.num_clients)]
        held_out_N = np.array([len(y) for _, y in held_out])
        parts = [part for pair in zip(parts, held_out, strict=True) for part in pair]
    samples = [(x.numpy(), y.numpy()) for x, y in parts]
    tests = [(x.numpy(), y.numpy()) for x, y in map(federation.test_set, range(federation.num_test_sets()))]
    total_N = federation.num_samples_N + held_out_N
    return _joined(samples), np.cumsum(total_N) - total_N, federation.num_samples_N, held_out_N, tests, 1


def _joined(parts: list[StoredSamples]) -> StoredSamples:
    return np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])


def _storable(x: np.ndarray, federation: Federation) -> np.ndarray:
    """The samples in a type that shards have: uint8, float32, or int32 for token ids."""
    if federation.shape.vocabulary is not None:
        return x.astype(np.int32)
    return x if x.dtype == np.uint8 else x.astype(np.float32)
