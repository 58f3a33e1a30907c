"""Writes a federation, planned or already made, as shards. The folder appears complete or not at all."""

import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cfl_ray.core.tasks import TARGETS
from cfl_ray.data.arrays import ArrayFederation
from cfl_ray.data.data_set import DataSet, Progress
from cfl_ray.data.federation import DataShape, Federation
from cfl_ray.data.folder import Folder
from cfl_ray.data.indexed import Index, StoredSamples
from cfl_ray.data.plan import FederationPlan, PlannedClient, TestSet
from cfl_ray.data.shards import MANIFEST, ShardFile, ShardManifest, index_schema, sample_schema
from cfl_ray.data.shifts import Variant
from cfl_ray.errors import DataError
from cfl_ray.system.files import cache_folder, sha256, sync

FILE_BYTES = 64 << 20  # approximate bytes of pixels per file; a client is never split between two files


def write_shards(
    path: str | Path,
    plan: FederationPlan,
    recipe: dict[str, Any],
    normalize: list[list[float]] | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes the federation into the folder `path`, a local path or a URI.

    A local folder appears complete or not at all; if another process has written it meanwhile, that folder stays. In a
    remote folder the manifest is written last, and a folder without a manifest is not a federation.
    """
    folder = Folder(str(path))
    target = folder.local
    staging = (target.parent if target is not None else cache_folder()) / f".writing-{uuid.uuid4().hex}"
    try:
        try:
            staging.mkdir(parents=True)
            names = _write(staging, plan, recipe, normalize, progress)
        except OSError as error:  # read-only, or full
            raise DataError(
                f"shards cannot be written below {staging.parent}: {error.strerror or error}; set data.shards, or "
                "output, below which they are by default"
            ) from error
        if target is None:
            folder.put(staging, names)
        else:
            _publish(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def shard_bytes(plan: FederationPlan) -> int:
    """The bytes of pixels and labels in the shards of this plan."""
    client_rows = sum(client.num_rows for client in plan.clients)
    test_rows = sum(len(test_set.rows) for test_set in (*plan.test_sets, *plan.validation_sets))
    y = plan.data_set.train_y
    return (client_rows + test_rows) * (_sample_bytes(plan) + y.itemsize * int(np.prod(y.shape[1:])))


def _sample_bytes(plan: FederationPlan) -> int:
    return int(np.prod(plan.data_set.shape)) * plan.data_set.train_x.itemsize


def _publish(staging: Path, target: Path) -> None:
    try:
        os.rename(staging, target)
    except OSError as error:
        if not (target / MANIFEST).is_file():
            raise DataError(
                f"shards cannot be written to {target}: {error}; delete that folder if it is there, or set data.shards"
            ) from error
    else:
        sync(target.parent)


def _write(
    staging: Path,
    plan: FederationPlan,
    recipe: dict[str, Any],
    normalize: list[list[float]] | None,
    progress: Progress | None,
) -> list[str]:
    """Writes all files, the manifest last. Returns their names in the order of writing."""
    shape, dtype = plan.data_set.data_shape, plan.data_set.train_x.dtype.name
    schema = sample_schema(shape, dtype)
    train, places = _write_clients(staging, plan, schema, progress)
    test, validation = (
        [
            _save(staging, f"{part}-{number:05d}.arrow", schema, _columns([test_set.variant.test(test_set.rows)]))
            for number, test_set in enumerate(sets)
        ]
        for part, sets in (("test", plan.test_sets), ("validation", plan.validation_sets))
    )
    schema = index_schema(shape.num_classes, plan.view == "label", plan.validation_view is not None)
    index = _save(staging, "clients.arrow", schema, _index_columns(plan, places))
    manifest = ShardManifest(
        view=plan.view,
        input=list(shape.input),
        num_classes=shape.num_classes,
        scale=plan.data_set.scale,
        dtype=dtype,
        vocabulary=shape.vocabulary,
        targets=shape.targets,
        target_shape=list(shape.target_shape),
        class_names=list(shape.class_names),
        normalize=normalize,
        notes=list(plan.data_set.notes),
        warnings=[*plan.data_set.warnings, *plan.warnings],
        validation_view=plan.validation_view,
        validation=validation,
        index=index,
        train=train,
        test=test,
        recipe=recipe,
    )
    unused = {"dtype", "vocabulary"} if dtype == "uint8" else set()  # left out, as in earlier manifests of images
    unused |= {"targets", "target_shape"} if shape.targets == "class" else set()
    unused |= {key for key in ("class_names", "notes", "warnings") if not getattr(manifest, key)}
    unused |= {"validation_view", "validation"} if plan.validation_view is None else set()
    (staging / MANIFEST).write_text(manifest.model_dump_json(indent=1, exclude=unused))
    sync(staging / MANIFEST)
    sync(staging)
    return [*(file.name for file in (index, *train, *test, *validation)), MANIFEST]


def _write_clients(
    staging: Path, plan: FederationPlan, schema: pa.Schema, progress: Progress | None
) -> tuple[list[ShardFile], list[tuple[int, int]]]:
    """Writes the files of clients. Returns the files, and (number of the file, first row) of each client."""
    files: list[ShardFile] = []
    places: list[tuple[int, int]] = []
    for number, clients in enumerate(_clients_by_file(plan)):
        parts = [samples for client in clients for samples in client.samples()]
        files.append(_save(staging, f"train-{number:05d}.arrow", schema, _columns(parts)))
        ends = np.cumsum([client.num_rows for client in clients])
        places += [(number, start) for start in (0, *ends[:-1])]
        if progress:
            progress("writing clients", len(places), len(plan.clients))
    return files, places


def _clients_by_file(plan: FederationPlan) -> Iterator[list[PlannedClient]]:
    """Yields the clients of each file, in order."""
    limit = max(FILE_BYTES // _sample_bytes(plan), 1)
    clients: list[PlannedClient] = []
    rows = 0
    for client in plan.clients:
        if clients and rows + client.num_rows > limit:
            yield clients
            clients, rows = [], 0
        clients.append(client)
        rows += client.num_rows
    yield clients


def _columns(parts: list[tuple[np.ndarray, np.ndarray]]) -> list[Any]:
    """The columns of `sample_schema`."""
    x = np.concatenate([x for x, _ in parts])
    y = np.concatenate([y for _, y in parts])
    return [_fixed_size_lists(x), y if y.ndim == 1 else _fixed_size_lists(y)]


def _index_columns(plan: FederationPlan, places: list[tuple[int, int]]) -> list[Any]:
    """The columns of `index_schema`. places: as `_write_clients` returns them."""
    rows = []
    for client, place in zip(plan.clients, places, strict=True):
        row = (*place, len(client.train), len(client.held_out), client.group, client.test_set, client.name)
        of_validation = (len(client.validation), client.validation_set) if plan.validation_view else ()
        rows.append((*row, *of_validation))
    columns: list[Any] = list(map(list, zip(*rows, strict=True)))
    return columns if plan.labels_NC is None else [*columns, _fixed_size_lists(plan.labels_NC.view(np.uint8))]


def _fixed_size_lists(x: np.ndarray) -> pa.Array:
    """The array x (n, ...) as n Arrow lists of equal length, without a copy."""
    return pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), int(np.prod(x.shape[1:])))


def _save(folder: Path, name: str, schema: pa.Schema, columns: list[Any]) -> ShardFile:
    """Writes a file. columns: arrays or lists of values, converted to the types of `schema`."""
    path, batch = folder / name, pa.record_batch(columns, schema=schema)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(batch)
    sync(path)
    return ShardFile(name=name, rows=batch.num_rows, bytes=path.stat().st_size, sha256=sha256(path))


def shard_plan_of(federation: Federation) -> FederationPlan:
    """The plan for shards with the samples of this federation. Raises DataError if its samples are normalised."""
    if isinstance(federation, ArrayFederation):
        samples, index, scale = [federation.samples], federation.index, int(federation.scaling.scale)
        tests = [] if federation.test_samples is None else [federation.test_samples]
        shared = federation.validation_samples_of_all
        validation_sets = [] if shared is None else [shared]
    else:
        samples, index, tests, validation_sets = _read(federation)
        scale = 1
    shape, of_validation = federation.shape, federation.validation
    whole = DataSet(
        *_stored(samples, shape),
        *_stored([*tests, *validation_sets], shape),
        shape.num_classes,
        scale,
        vocabulary=shape.vocabulary,
        targets=shape.targets,
        class_names=shape.class_names,
    )
    variant, clients = Variant(whole), []
    for client in range(federation.num_clients):
        train, held_out, validation = (np.arange(rows.start, rows.stop) for rows in index.rows(client))
        name, group, test_set = federation.client_name(client), index.group_N[client], index.test_set_N[client]
        planned = PlannedClient(name, int(group), variant, train, held_out, int(test_set))
        if index.validation_N is not None:
            planned = replace(planned, validation=validation)
        if index.validation_set_N is not None:
            planned = replace(planned, validation_set=int(index.validation_set_N[client]))
        clients.append(planned)
    ends = np.cumsum([0, *(len(labels) for _, labels in (*tests, *validation_sets))])
    sets = [TestSet(variant, np.arange(first, last)) for first, last in pairwise(ends)]
    return FederationPlan(
        federation.view,
        clients,
        sets[: len(tests)],
        index.labels_NC,
        validation_view=None if of_validation is None else of_validation.view,
        validation_sets=sets[len(tests) :],
    )


def _read(
    federation: Federation,
) -> tuple[list[StoredSamples], Index, list[StoredSamples], list[StoredSamples]]:
    """The samples of any federation, read by its methods, the rows of each client, shared test and validation sets.

    Raises DataError if the federation normalises samples.
    """
    if federation.normalize is not None:
        raise DataError(
            f"a {type(federation).__name__} normalises its samples itself, so its shards cannot be written; "
            "federation_from_arrays(normalize=...) makes a federation whose shards can"
        )
    count = federation.num_clients
    clients, validation = range(count), federation.validation
    readers = [federation.train]
    readers += [part.holdout for part in (federation, validation) if part is not None and part.view == "holdout"]
    parts = [[read(client) for client in clients] for read in readers]
    sizes, no_rows_N = [np.array([len(y) for _, y in part]) for part in parts], np.zeros(count, np.int64)
    held_out_N = sizes[1] if federation.view == "holdout" else no_rows_N
    validation_N = None
    if validation is not None:
        validation_N = sizes[-1] if validation.view == "holdout" else no_rows_N
    samples = [(x.numpy(), y.numpy()) for of_client in zip(*parts, strict=True) for x, y in of_client]
    tests, validation_sets = (
        [] if part is None else [(x.numpy(), y.numpy()) for x, y in map(part.test_set, range(part.num_test_sets()))]
        for part in (federation, validation)
    )
    none_N, total_N = np.full(count, -1, np.int32), np.sum(sizes, axis=0)
    index = Index(
        file_N=np.zeros(count, np.int32),
        offset_N=np.cumsum(total_N) - total_N,
        train_N=federation.num_samples_N,
        held_out_N=held_out_N,
        group_N=none_N if federation.group_N is None else federation.group_N,
        test_set_N=federation.test_set_of(np.arange(count)) if tests else none_N,
        labels_NC=federation.labels_of(np.arange(count)),
        validation_N=validation_N,
        validation_set_N=None if validation is None else validation.test_set_of(np.arange(count)),
    )
    return samples, index, tests, validation_sets


def _stored(parts: list[StoredSamples], shape: DataShape) -> tuple[Any, Any]:
    """The samples of all parts, in the types that shards have; (None, None) without a part."""
    if not parts:
        return None, None
    x, y = parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))
    dtype = np.int32 if shape.vocabulary is not None else np.uint8 if x.dtype == np.uint8 else np.float32
    return x.astype(dtype, copy=False), y.astype(TARGETS[shape.targets].stored, copy=False)
