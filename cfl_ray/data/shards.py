"""Shards: a federation as Arrow files, which all processes of a machine map into memory without a copy.

`manifest.json` describes the folder, `clients.arrow` has the rows of each client, `train-*.arrow` and `test-*.arrow`
have the original pixels (or numbers, or token ids) with their labels. Each file is a single record batch, so a client's
data are a slice of the mapped file. Columns are read through DLPack: Arrow's `to_numpy` would import pandas, 0.4 s and
35 MB in each process that opens shards.
"""

import functools
import hashlib
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from cfl_ray.core.tasks import TARGETS
from cfl_ray.data.federation import DataShape, GroupTransform
from cfl_ray.data.folder import PREPARE_AGAIN, Folder
from cfl_ray.data.indexed import Index, IndexedFederation, Scaling, StoredSamples
from cfl_ray.errors import DataError
from cfl_ray.system.collection import paused_collection

MANIFEST = "manifest.json"
_MOST = 2**62  # limit of the counts in a manifest
_LARGEST_SAMPLE = 2**31 - 1  # most numbers in a sample; the limit of Arrow's format
_Size = Annotated[int, Field(ge=1, le=_LARGEST_SAMPLE)]


class ShardFile(BaseModel):
    """A file of the folder. The pattern of its name excludes paths, so a manifest names only files in its folder."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9.-]*$", max_length=200)
    rows: int = Field(ge=1, le=_MOST)
    bytes: int = Field(ge=1, le=_MOST)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class ShardManifest(BaseModel):
    """The content of manifest.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal["cfl_ray shards"] = "cfl_ray shards"
    version: Literal[1] = 1
    view: Literal["cluster", "label", "all", "holdout"]
    input: list[_Size] = Field(min_length=1)  # shape of a sample
    num_classes: _Size
    scale: float = Field(gt=0, allow_inf_nan=False)  # the pixel value that means 1.0
    dtype: Literal["uint8", "float32", "int32"] = "uint8"  # type of the stored inputs
    vocabulary: _Size | None = None  # number of token ids; None: the inputs are not tokens
    targets: Literal["class", "real", "binary", "tokens"] = "class"  # kind of the targets (`core.tasks`)
    target_shape: list[_Size] = []  # shape of a sample's target
    class_names: list[str] = []  # by label, if the source names its classes
    normalize: list[list[float]] | None
    notes: list[str] = []  # lines on the raw data, as in `DataSet`
    warnings: list[str] = []
    validation_view: Literal["cluster", "label", "all", "holdout"] | None = None  # None: no validation data
    validation: list[ShardFile] = []  # shared validation sets
    index: ShardFile
    train: list[ShardFile] = Field(min_length=1)
    test: list[ShardFile]
    recipe: dict[str, Any]

    @property
    def shape(self) -> DataShape:
        """The shapes of inputs and targets."""
        return DataShape(
            tuple(self.input),
            self.num_classes,
            self.vocabulary,
            self.targets,
            tuple(self.target_shape),
            tuple(self.class_names),
        )

    @field_validator("input", "target_shape")
    @classmethod
    def _fits(cls, shape: list[int]) -> list[int]:
        if math.prod(shape) > _LARGEST_SAMPLE:
            raise ValueError(f"a sample has at most {_LARGEST_SAMPLE} numbers, the shape {shape} has more")
        return shape


def _limit_of(recipe: dict[str, Any]) -> int | None:
    """`data.test.max_samples` in a recipe; None: there is no limit."""
    data = recipe.get("data")
    test = data.get("test") if isinstance(data, dict) else None
    limit = test.get("max_images") if isinstance(test, dict) else None
    return limit if isinstance(limit, int) else None


def sample_schema(shape: DataShape, dtype: str) -> pa.Schema:
    """The columns of train and test files. dtype: type of the stored inputs."""
    target = pa.from_numpy_dtype(TARGETS[shape.targets].stored)
    if shape.target_shape:
        target = pa.list_(target, math.prod(shape.target_shape))
    inputs = pa.list_(pa.from_numpy_dtype(dtype), math.prod(shape.input))
    return pa.schema([pa.field("x", inputs, nullable=False), pa.field("y", target, nullable=False)])


def index_schema(num_classes: int, label_view: bool, has_validation: bool = False) -> pa.Schema:
    """The columns of clients.arrow."""
    columns = {
        "file": pa.int32(),
        "offset": pa.int64(),
        "train": pa.int64(),
        "held_out": pa.int64(),
        "group": pa.int32(),
        "test_set": pa.int32(),
        "name": pa.string(),
    }
    if has_validation:
        columns |= {"validation": pa.int64(), "validation_set": pa.int32()}
    if label_view:
        columns["labels"] = pa.list_(pa.uint8(), num_classes)
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns.items()])


def open_shards(path: str | Path, verify: bool = False) -> "ShardFederation":
    """The federation in a folder: a path, or any URI that pyarrow supports.

    verify: read every file and check its sha256; sizes are always checked. Remote files are fetched on first use and
    kept in CFL_RAY_CACHE, named by their content.
    """
    return ShardFederation(str(path), verify)


@paused_collection()
def read_manifest(folder: Folder) -> ShardManifest | None:
    """The manifest of a folder; None if the file does not exist. Raises DataError for an invalid manifest."""
    content = folder.read(MANIFEST)
    if content is None:
        return None
    try:
        return ShardManifest.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "content"
        raise DataError(
            f"{folder.uri}/{MANIFEST} is damaged or of another version: {field}: {first['msg']}; {PREPARE_AGAIN}"
        ) from error


class ShardFederation(IndexedFederation):
    """A federation of shards. Its pickle is its path; a file is mapped when a client in it is first read."""

    def __init__(self, uri: str, verify: bool = False, manifest: ShardManifest | None = None) -> None:
        """manifest: of the folder, if it has been read: one with 100,000 raw files takes a quarter of a second."""
        local = Folder(uri).local
        self._folder = Folder(uri if local is None else str(local))
        if manifest is None:
            manifest = read_manifest(self._folder)
        if manifest is None:
            inside = [] if local is None else sorted(local.glob(f"*/{MANIFEST}"))
            advice = f"name the folder {inside[0].parent}" if inside else "run `cfl-ray prepare`"
            raise DataError(f"{self._folder.uri} holds no shards (no {MANIFEST}); {advice}")
        self.manifest = manifest
        if verify or local is not None:  # a missing file is an error before the run; remote files are read only if used
            for file in (manifest.index, *manifest.train, *manifest.test, *manifest.validation):
                self._folder.get(file.name, file.bytes, file.sha256, verify)
        self._samples = functools.cache(functools.partial(_map_samples, self._folder, manifest))
        self._names, index = _map_index(self._folder, manifest)
        scaling = Scaling(manifest.scale, manifest.normalize, manifest.vocabulary is not None)
        super().__init__(manifest.shape, manifest.view, manifest.recipe, index, scaling.check(manifest.shape.input))
        self.max_test_samples = _limit_of(manifest.recipe)
        self.validation_view = manifest.validation_view
        self.validation_sizes = [file.rows for file in manifest.validation]

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardFederation, (self._folder.uri,)

    @property
    def uri(self) -> str:
        """The folder of the shards: an absolute path, or the URI."""
        return self._folder.uri

    @functools.cached_property
    def digest(self) -> str:
        """The manifest's sha256. It is equal for equal federations, since the manifest has the sha256 of all files."""
        return hashlib.sha256(self._folder.read(MANIFEST) or b"").hexdigest()

    @property
    def content(self) -> str:
        """As in the base class, from the digests of the files: the recipe has the form of its version of cfl_ray."""
        files = (self.manifest.index, *self.manifest.train, *self.manifest.test, *self.manifest.validation)
        return hashlib.sha256("".join(file.sha256 for file in files).encode()).hexdigest()

    @property
    def notes(self) -> list[str]:
        """Lines on what was read when the shards were written."""
        return self.manifest.notes

    @property
    def warnings(self) -> list[str]:
        """As in the base class, but not for remote files, which are read only if used; and lines on the raw data."""
        of_inputs = super().warnings if self._folder.local is not None else []
        return [*self.preparation_warnings, *self.manifest.warnings, *of_inputs]

    def client_name(self, client: int) -> str:
        return self._names[client].as_py()

    def group_transform(self, group: int) -> GroupTransform:
        try:
            return self._shift_of(group)
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            raise DataError(
                f"{self.uri}/{MANIFEST}: the shift in its recipe has no group {group}; {PREPARE_AGAIN}"
            ) from error

    def _shift_of(self, group: int) -> GroupTransform:
        """The transform of a group from the recipe, which is not validated: a damaged recipe raises any error."""
        shift = self.recipe.get("data", {}).get("shift", {})
        if shift.get("kind") == "rotated":
            return _rotation(0, 1, shift["angles"], group)
        if shift.get("kind") == "shifted":
            return GroupTransform(0, offset=shift["offsets"][group] % self.shape.num_classes)
        if shift.get("kind") == "rotated_labels":
            angle, labels = divmod(group, len(shift["label_sets"]))
            return _rotation(labels, len(shift["label_sets"]), shift["angles"], angle)
        return super().group_transform(group)

    def files_of(self, clients: np.ndarray) -> np.ndarray | None:
        return None if self._folder.local is not None else self.index.file_N[clients]

    def fetch(self, clients: np.ndarray) -> None:
        for number in dict.fromkeys(self.index.file_N[clients].tolist()):
            file = self.manifest.train[number]
            self._folder.get(file.name, file.bytes, file.sha256, verify=False)

    def num_test_sets(self) -> int:
        return len(self.manifest.test)

    def _file(self, number: int) -> StoredSamples:
        return self._samples(self.manifest.train[number])

    def _test_file(self, number: int) -> StoredSamples:
        return self._samples(self.manifest.test[number])

    def _validation_file(self, number: int) -> StoredSamples:
        return self._samples(self.manifest.validation[number])


def _rotation(family: int, families: int, angles: list[float], group: int) -> GroupTransform:
    """The transform of a rotated group. Groups of the same family differ by whole quarter turns."""
    rests = sorted({angle % 90 for angle in angles} | {0})
    turns = int(angles[group] // 90 % 4)
    return GroupTransform(family + families * rests.index(angles[group] % 90), turns=turns)


def _map(folder: Folder, file: ShardFile, schema: pa.Schema) -> pa.RecordBatch:
    """The record batch of a file mapped into memory. The file stays mapped as long as the batch exists."""
    path = folder.get(file.name, file.bytes, file.sha256, verify=False)
    try:
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source)
            if not reader.schema.equals(schema) or reader.num_record_batches != 1:
                raise DataError(
                    f"{path} has columns {reader.schema.names} in {reader.num_record_batches} batches, "
                    f"expected {schema.names} in 1; {PREPARE_AGAIN}"
                )
            batch = reader.get_batch(0)
            batch.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged: {error}; {PREPARE_AGAIN}") from error
    if batch.num_rows != file.rows:
        raise DataError(f"{path} is damaged: expected {file.rows} rows, got {batch.num_rows}; {PREPARE_AGAIN}")
    return batch


def _map_samples(folder: Folder, manifest: ShardManifest, file: ShardFile) -> StoredSamples:
    batch = _map(folder, file, sample_schema(manifest.shape, manifest.dtype))
    y = batch["y"].flatten() if manifest.target_shape else batch["y"]
    return (
        np.from_dlpack(batch["x"].flatten()).reshape(-1, *manifest.input),
        np.from_dlpack(y).reshape(-1, *manifest.target_shape),
    )


def _map_index(folder: Folder, manifest: ShardManifest) -> tuple[pa.Array, Index]:
    """The names of the clients, and the index of their rows."""
    label_view, has_validation = manifest.view == "label", manifest.validation_view is not None
    batch = _map(folder, manifest.index, index_schema(manifest.num_classes, label_view, has_validation))
    labels_NC = None
    if label_view:
        labels_NC = np.from_dlpack(batch["labels"].flatten()).reshape(-1, manifest.num_classes).view(bool)
    names = ["file", "offset", "train", "held_out", "group", "test_set"]
    names += ["validation", "validation_set"] if has_validation else []
    index = Index(**{f"{name}_N": np.from_dlpack(batch[name]) for name in names}, labels_NC=labels_NC)
    if not _is_valid(index, manifest):
        raise DataError(
            f"{folder.uri}/{manifest.index.name} is damaged: it names rows or files that do not exist; {PREPARE_AGAIN}"
        )
    return batch["name"], index


def _is_valid(index: Index, manifest: ShardManifest) -> bool:
    """Whether all rows, files and test sets of the index exist."""
    rows = np.array([file.rows for file in manifest.train])  # number of rows of each file
    least = 0 if manifest.test else -1
    own_N = index.train_N * 0 if index.validation_N is None else index.validation_N
    set_N = index.test_set_N * 0 - 1 if index.validation_set_N is None else index.validation_set_N
    return bool(
        ((index.file_N >= 0) & (index.file_N < len(rows))).all()
        and (index.offset_N >= 0).all()
        and (np.maximum.reduce([index.offset_N, index.train_N, index.held_out_N]) <= rows[index.file_N]).all()
        and (index.train_N >= 1).all()
        and (index.held_out_N >= 0).all()
        and ((own_N >= 0) & (own_N <= rows[index.file_N])).all()
        and (index.offset_N + index.train_N + index.held_out_N + own_N <= rows[index.file_N]).all()
        and ((set_N >= (0 if manifest.validation else -1)) & (set_N < len(manifest.validation))).all()
        and ((index.test_set_N >= least) & (index.test_set_N < len(manifest.test))).all()
    )
