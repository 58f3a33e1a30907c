"""Shards: a federation as Arrow files that every process of a machine maps and none copies.

`manifest.json` describes the folder, `clients.arrow` says where each client's rows are, `train-*.arrow` and `test-*.arrow` hold
pixels as they were (uint8) with their labels. Each of those is one record batch, so a client is a slice of the mapped file.
"""

import functools
import hashlib
import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cfl_ray.core.errors import DataError
from cfl_ray.data.federation import Shape
from cfl_ray.data.indexed import Index, IndexedFederation, Samples, Scaling
from cfl_ray.data.store import AGAIN, Folder

MANIFEST = "manifest.json"


class File(BaseModel):
    """One file of the folder. A manifest is not trusted: no name may lead out of the folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")
    rows: int = Field(ge=1)
    bytes: int = Field(ge=1)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Manifest(BaseModel):
    """What stands in manifest.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal["cfl_ray shards"] = "cfl_ray shards"
    version: Literal[1] = 1
    view: Literal["cluster", "label", "holdout"]
    input: list[int] = Field(min_length=1)  # shape of one sample
    num_classes: int = Field(ge=1)
    scale: float = Field(gt=0)  # the pixel value that means 1.0
    normalize: list[list[float]] | None
    index: File
    train: list[File] = Field(min_length=1)
    test: list[File]
    recipe: dict[str, Any]


def sample_schema(input_shape: list[int] | tuple[int, ...]) -> pa.Schema:
    """Columns of train and test files."""
    return pa.schema([pa.field("x", pa.list_(pa.uint8(), math.prod(input_shape)), nullable=False),
                      pa.field("y", pa.int16(), nullable=False)])


def index_schema(num_classes: int, label_view: bool) -> pa.Schema:
    """Columns of clients.arrow."""
    numbers = {"file": pa.int32(), "offset": pa.int64(), "train": pa.int64(), "held_out": pa.int64(), "group": pa.int32(), "test_set": pa.int32()}
    fields = [pa.field(name, kind, nullable=False) for name, kind in numbers.items()] + [pa.field("name", pa.string(), nullable=False)]
    if label_view:
        fields.append(pa.field("labels", pa.list_(pa.uint8(), num_classes), nullable=False))
    return pa.schema(fields)


def open_shards(path: str | Path, verify: bool = False) -> "ShardFederation":
    """The federation in a folder, local or any URI that pyarrow knows; `verify` reads every file once and checks its sha256.

    Sizes are always checked. Files of another filesystem are fetched on first use and kept by content in CFL_RAY_CACHE.
    """
    return ShardFederation(str(path), verify)


def read_manifest(folder: Folder) -> Manifest | None:
    """None where the folder has no manifest. Raises DataError where it has a bad one."""
    content = folder.read(MANIFEST)
    if content is None:
        return None
    try:
        return Manifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "content"
        raise DataError(f"{folder.uri}/{MANIFEST} is damaged or of another version: {where}: {first['msg']}; {AGAIN}") from error


class ShardFederation(IndexedFederation):
    """Opens again from its path wherever it is unpickled; maps a file when a client in it is first read."""

    def __init__(self, uri: str, verify: bool = False):
        local = Folder(uri).local
        self._folder = Folder(uri if local is None else str(local))
        manifest = read_manifest(self._folder)
        if manifest is None:
            raise DataError(f"{self._folder.uri} holds no shards (no {MANIFEST}); run `cfl-ray prepare`")
        self.manifest = manifest
        self._check_files(verify)
        self._samples = functools.cache(functools.partial(_map_samples, self._folder, manifest))
        self._names, index = _map_index(self._folder, manifest)
        scaling = Scaling(manifest.scale, manifest.normalize).check(tuple(manifest.input))
        super().__init__(Shape(tuple(manifest.input), manifest.num_classes), manifest.view, manifest.recipe, index, scaling)

    def __reduce__(self):
        return ShardFederation, (self._folder.uri,)

    @property
    def uri(self) -> str:
        """The folder: an absolute path, or the URI."""
        return self._folder.uri

    @functools.cached_property
    def digest(self) -> str:
        """sha256 of the manifest, which holds those of all files: equal in equal federations, wherever they lie."""
        return hashlib.sha256(self._folder.read(MANIFEST) or b"").hexdigest()

    def client_name(self, client: int) -> str:
        return self._names[client].as_py()

    def place_of(self, group: int) -> tuple[int, int, int]:
        shift = self.recipe.get("data", {}).get("shift", {})
        if shift.get("kind") == "rotated":
            return 0, shift["angles"][group] // 90 % 4, 0
        if shift.get("kind") == "shifted":
            return 0, 0, shift["offsets"][group] % self.shape.num_classes
        if shift.get("kind") == "rotated_labels":
            angle, labels = divmod(group, len(shift["label_sets"]))
            return labels, shift["angles"][angle] // 90 % 4, 0
        return super().place_of(group)

    def num_test_sets(self) -> int:
        return len(self.manifest.test)

    def _file(self, number: int) -> Samples:
        return self._samples(self.manifest.train[number])

    def _test_file(self, number: int) -> Samples:
        return self._samples(self.manifest.test[number])

    def _check_files(self, verify: bool) -> None:
        """Local files are looked at now, so that a missing one ends the run before it starts; others when they are fetched."""
        if verify or self._folder.local is not None:
            for file in (self.manifest.index, *self.manifest.train, *self.manifest.test):
                self._folder.get(file.name, file.bytes, file.sha256, verify)


def _map(folder: Folder, file: File, schema: pa.Schema) -> pa.RecordBatch:
    """The one record batch of a file, mapped: its buffers are the file's pages, which stay mapped after the file is closed."""
    path = folder.get(file.name, file.bytes, file.sha256, verify=False)
    try:
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source)
            if not reader.schema.equals(schema) or reader.num_record_batches != 1:
                raise DataError(f"{path} has columns {reader.schema.names} in {reader.num_record_batches} batches, "
                                f"expected {schema.names} in 1; {AGAIN}")
            batch = reader.get_batch(0)
            batch.validate()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged: {error}; {AGAIN}") from error
    if batch.num_rows != file.rows:
        raise DataError(f"{path} is damaged: expected {file.rows} rows, found {batch.num_rows}; {AGAIN}")
    return batch


def _map_samples(folder: Folder, manifest: Manifest, file: File) -> Samples:
    batch = _map(folder, file, sample_schema(manifest.input))
    return batch["x"].flatten().to_numpy().reshape(-1, *manifest.input), batch["y"].to_numpy()


def _map_index(folder: Folder, manifest: Manifest) -> tuple[pa.Array, Index]:
    """The clients' names and where their rows are."""
    label_view = manifest.view == "label"
    batch = _map(folder, manifest.index, index_schema(manifest.num_classes, label_view))
    columns = {name: batch[name].to_numpy() for name in batch.schema.names if name not in ("name", "labels")}
    labels_NC = batch["labels"].flatten().to_numpy().reshape(-1, manifest.num_classes).view(bool) if label_view else None
    index = Index(*(columns[name] for name in ("file", "offset", "train", "held_out", "group", "test_set")), labels_NC)
    if not _fits(index, manifest):
        raise DataError(f"{folder.uri}/{manifest.index.name} is damaged: it names rows or files that do not exist; {AGAIN}")
    return batch["name"], index


def _fits(index: Index, manifest: Manifest) -> bool:
    rows = np.array([file.rows for file in manifest.train])
    least = 0 if manifest.test else -1
    return bool(((index.file_N >= 0) & (index.file_N < len(rows))).all()
                and (index.offset_N >= 0).all() and (index.train_N >= 1).all() and (index.held_out_N >= 0).all()
                and (index.offset_N + index.train_N + index.held_out_N <= rows[index.file_N]).all()
                and ((index.test_set_N >= least) & (index.test_set_N < len(manifest.test))).all())
