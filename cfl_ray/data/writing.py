"""Writes a planned federation as shards: complete under its name, or not there at all."""

import os
import shutil
import uuid
from pathlib import Path

import numpy as np
import pyarrow as pa

from cfl_ray.core.disk import sha256, sync
from cfl_ray.core.errors import DataError
from cfl_ray.data.images import Progress
from cfl_ray.data.plan import Client, Plan
from cfl_ray.data.shards import MANIFEST, File, Manifest, index_schema, sample_schema
from cfl_ray.data.store import Folder, cache

FILE_BYTES = 64 << 20  # pixels of one file, about; a client never spans two


def write_shards(path: str | Path, plan: Plan, recipe: dict, normalize: list[list[float]] | None = None, progress: Progress | None = None) -> None:
    """Writes the federation into the folder `path`, a local path or a URI.

    Locally the folder appears complete or not at all; if another process was faster, its folder stays. Elsewhere the manifest,
    which makes a folder a federation, is written last.
    """
    folder = Folder(str(path))
    target = folder.local
    staging = (target.parent if target is not None else cache()) / f".writing-{uuid.uuid4().hex}"
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        raise DataError(f"shards cannot be written below {staging.parent}: {error}; set data.shards") from error
    try:
        names = _write(staging, plan, recipe, normalize, progress)
        if target is None:
            folder.put(staging, names)
        else:
            _publish(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def shard_bytes(plan: Plan) -> int:
    """Bytes of pixels and labels that the shards of this plan will hold."""
    rows = sum(len(client.train) + len(client.held_out) for client in plan.clients) + sum(len(one.rows) for one in plan.test_sets)
    return rows * (int(np.prod(plan.images.shape)) + 2)


def _publish(staging: Path, target: Path) -> None:
    try:
        os.rename(staging, target)
    except OSError as error:
        if not (target / MANIFEST).is_file():
            raise DataError(f"shards cannot be written to {target}: {error}; delete that folder if it is there, or set data.shards") from error
    else:
        sync(target.parent)


def _write(staging: Path, plan: Plan, recipe: dict, normalize: list[list[float]] | None, progress: Progress | None) -> list[str]:
    """Writes every file, the manifest last, and returns their names in this order."""
    schema, train, places = sample_schema(plan.images.shape), [], []
    done = 0
    for number, clients in enumerate(_files(plan)):
        parts = [part for client in clients for part in (client.variant.train(client.train), client.variant.train(client.held_out))]
        train.append(_save(staging, f"train-{number:05d}.arrow", schema, _columns(parts)))
        ends = np.cumsum([len(client.train) + len(client.held_out) for client in clients])
        places += [(number, start) for start in (0, *ends[:-1])]
        done += len(clients)
        if progress:
            progress("writing clients", done, len(plan.clients))
    test = [_save(staging, f"test-{number:05d}.arrow", schema, _columns([one.variant.test(one.rows)]))
            for number, one in enumerate(plan.test_sets)]
    index = _save(staging, "clients.arrow", index_schema(plan.images.num_classes, plan.view == "label"), _index_columns(plan, places))
    manifest = Manifest(view=plan.view, input=list(plan.images.shape), num_classes=plan.images.num_classes, scale=plan.images.scale,
                        normalize=normalize, index=index, train=train, test=test, recipe=recipe)
    (staging / MANIFEST).write_text(manifest.model_dump_json(indent=1))
    sync(staging / MANIFEST)
    sync(staging)
    return [*(file.name for file in (index, *train, *test)), MANIFEST]


def _files(plan: Plan):
    """Yields the clients of each file, in order."""
    limit = max(FILE_BYTES // int(np.prod(plan.images.shape)), 1)
    held: list[Client] = []
    rows = 0
    for client in plan.clients:
        n = len(client.train) + len(client.held_out)
        if held and rows + n > limit:
            yield held
            held, rows = [], 0
        held.append(client)
        rows += n
    yield held


def _columns(parts: list[tuple[np.ndarray, np.ndarray]]) -> list[pa.Array]:
    x = np.concatenate([x for x, _ in parts])
    y = np.concatenate([y for _, y in parts])
    return [_fixed(x), pa.array(y, pa.int16())]


def _index_columns(plan: Plan, places: list[tuple[int, int]]) -> list[pa.Array]:
    clients, (file, offset) = plan.clients, zip(*places)
    columns = [pa.array(file, pa.int32()), pa.array(offset, pa.int64()),
               pa.array([len(client.train) for client in clients], pa.int64()),
               pa.array([len(client.held_out) for client in clients], pa.int64()),
               pa.array([client.group for client in clients], pa.int32()),
               pa.array([client.test_set for client in clients], pa.int32()),
               pa.array([client.name for client in clients], pa.string())]
    return columns if plan.labels_NC is None else [*columns, _fixed(plan.labels_NC.view(np.uint8))]


def _fixed(x: np.ndarray) -> pa.Array:
    """uint8 (n, ...) as n lists of one length, without a copy."""
    return pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), int(np.prod(x.shape[1:])))


def _save(folder: Path, name: str, schema: pa.Schema, columns: list[pa.Array]) -> File:
    path, batch = folder / name, pa.record_batch(columns, schema=schema)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(batch)
    sync(path)
    return File(name=name, rows=batch.num_rows, bytes=path.stat().st_size, sha256=sha256(path))
