"""Data sets that `Dataset.save_to_disk` of Hugging Face's package datasets wrote, read without that package.

As `load_from_disk` does, only the files that `state.json` names are read: older shards and caches of `map` and `filter`
may lie beside them. Formats (`set_format`) are views, which leave the columns as they are.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from PIL import Image

from cfl_ray.data.table_files import plain_table
from cfl_ray.errors import DataError, did_you_mean

STATE, INFO, PARTS = "state.json", "dataset_info.json", "dataset_dict.json"
_OTHER_MEDIA = ("Audio", "Video", "Pdf", "Nifti", "Mesh", "Translation", "TranslationVariableLanguages")
_AGAIN = "load it with the package datasets and save it again (datasets.load_from_disk(...).save_to_disk(...))"


@dataclass(frozen=True)
class SavedDataset:
    """A saved data set."""

    folder: Path
    files: list[Path]  # in the order of their rows
    features: dict[str, Any]  # of each column, as datasets describes it

    @property
    def descriptions(self) -> list[Path]:
        """The files that describe it."""
        return [file for file in (self.folder / STATE, self.folder / INFO) if file.is_file()]

    def tables(self) -> list[pa.Table]:
        """The rows of each file, with plain columns."""
        return [plain_table(_stream(file)) for file in self.files]

    def class_names(self, column: str) -> tuple[str, ...]:
        """The names of a column of classes, by code; empty for another column."""
        feature = self.features.get(column)
        if not isinstance(feature, dict) or feature.get("_type") != "ClassLabel":
            return ()
        return tuple(str(name) for name in feature.get("names") or ())

    def kind_of(self, column: str) -> str:
        """The kind of a column, e.g. Image, Video or Value; empty if it is not known."""
        feature = self.features.get(column)
        return str(feature.get("_type", "")) if isinstance(feature, dict) else ""

    def mode_of(self, column: str) -> str | None:
        """The mode of Pillow to which datasets converts the images of a column; None: their own."""
        feature = self.features.get(column)
        mode = feature.get("mode") if isinstance(feature, dict) else None
        return mode if isinstance(mode, str) else None


def saved_dataset(folder: Path) -> SavedDataset:
    """The data set in a folder. Raises DataError if `save_to_disk` did not write it, and if a file is missing."""
    if (folder / PARTS).is_file() and not (folder / STATE).is_file():
        parts = _json(folder / PARTS).get("splits", [])
        raise DataError(
            f"{folder} holds a DatasetDict with the parts {', '.join(map(str, parts))}; name a part, e.g. "
            f"data.train_files: {parts[0] if parts else 'train'}"
        )
    if not (folder / STATE).is_file():
        return _of_files(folder, _only_files(folder))
    state = _json(folder / STATE)
    if state.get("_indices_data_files") or state.get("_indices_files"):  # versions before 1.2
        raise DataError(f"{folder} was saved with a file of indices by an early version of datasets; {_AGAIN}")
    try:
        files = [folder / entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise DataError(f"{folder / STATE} has no list _data_files of file names; {_AGAIN}") from error
    if missing := [file for file in files if not file.is_file()]:
        raise DataError(f"{folder / STATE} names {missing[0].name}, which is missing; copy the whole folder")
    if not files:
        raise DataError(f"{folder} holds no row")
    return _of_files(folder, files)


def _of_files(folder: Path, files: list[Path]) -> SavedDataset:
    features = _json(folder / INFO).get("features") if (folder / INFO).is_file() else None
    return SavedDataset(folder, files, features if isinstance(features, dict) else _features_in(files[0]))


def _only_files(folder: Path) -> list[Path]:
    """The Arrow files of a folder without `state.json`, if they can only be one data set."""
    files = sorted(folder.glob("*.arrow"))
    shards = [f"data-{number:05d}-of-{len(files):05d}.arrow" for number in range(len(files))]
    if len(files) == 1 or (files and [file.name for file in files] == shards):
        return files
    if not files:
        inner = sorted({path.parent.name for path in folder.glob("*/*.arrow")})
        part = inner[0] if inner else "train"
        if len(inner) > 3 or any(folder.glob("*/*/*.arrow")):  # more than a DatasetDict has parts
            raise DataError(
                f"{folder} holds no data set of Dataset.save_to_disk but folders of several; if each is a client's, "
                "save them as one with a column of clients (add_column, concatenate_datasets), and name it in "
                "data.columns.client"
            )
        raise DataError(
            f"{folder} holds no {STATE} and no *.arrow file of Dataset.save_to_disk; for a DatasetDict name its part, "
            f"e.g. data.train_files: {part}"
        )
    raise DataError(
        f"{folder} holds {len(files)} .arrow files, but no {STATE} of Dataset.save_to_disk, which says which are the "
        f"data set: {files[0].name}, {files[1].name}, ...; {_AGAIN}"
    )


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} is not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"{file} holds {type(content).__name__}, expected a mapping; {_AGAIN}")
    return content


def _features_in(file: Path) -> dict[str, Any]:
    """The features that datasets recorded in the schema of an Arrow file; empty without a record."""
    try:
        with pa.memory_map(str(file)) as source:
            return _features_of(pa.ipc.open_stream(source).schema)
    except (pa.ArrowException, OSError):
        return {}


def _features_of(schema: pa.Schema) -> dict[str, Any]:
    """The features that datasets recorded in a schema, of an Arrow or Parquet file; empty without a record."""
    try:
        features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features")
    except (ValueError, AttributeError):
        return {}
    return features if isinstance(features, dict) else {}


def _stream(file: Path) -> pa.Table:
    try:
        with pa.memory_map(str(file)) as source:
            return pa.ipc.open_stream(source).read_all()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} is not a readable Arrow stream file: {error}") from error


def check_class_names(schemas: Mapping[Path, pa.Schema], column: str) -> None:
    """Raises DataError if equal codes of a label column are different classes in two of these files.

    Datasets records the names of classes in Parquet files too. A file without names may have the codes of the others;
    but names that are integers in another order, as `class_encode_column` gives them ("0", "1", "10", "2"), say that
    the codes are not the labels that such a file has.
    """
    parts = [SavedDataset(file, [file], _features_of(schema)) for file, schema in schemas.items()]
    if not (named := [part for part in parts if part.class_names(column)]):
        return
    names = common_class_names(named, column)
    others = [part for part in parts if not part.class_names(column)]
    if others and set(names) == set(map(str, range(len(names)))) and names != tuple(map(str, range(len(names)))):
        code = next(code for code, name in enumerate(names) if name != str(code))
        raise DataError(
            f"{named[0].folder}: code {code} of column {column!r} is the class named {names[code]!r}, for labels were "
            f"numbered in the order of their text (class_encode_column), and {others[0].folder} names no classes, so "
            f"its {code} may be another class; encode both, or neither"
        )


def common_class_names(parts: list[SavedDataset], column: str) -> tuple[str, ...]:
    """The names of the classes by code, which the parts must share; empty if the column has no names."""
    names = [part.class_names(column) for part in parts]
    for part, other in zip(parts, names, strict=True):
        if other != names[0]:
            unknown = next((name for name in other if name not in names[0]), None)
            about = "they differ in order" if other and set(other) == set(names[0]) else "they differ"
            if unknown and names[0]:
                about = f"{unknown!r} is new{did_you_mean(unknown, names[0])}"
            raise DataError(
                f"{part.folder}: column {column!r} has {len(other)} names of classes, {parts[0].folder} has "
                f"{len(names[0])}: {about}, so equal codes are different classes; cast one part, "
                f"test.cast_column({column!r}, train.features[{column!r}])"
            )
    return names[0]


def check_kind(parts: list[SavedDataset], column: str) -> None:
    """Raises DataError if the inputs are sounds, videos or other media that are not read."""
    for part in parts:
        if (kind := part.kind_of(column)) in _OTHER_MEDIA:
            raise DataError(
                f"{part.folder}: input column {column!r} is {kind}, which is not read; set data.columns.image to "
                "images or lists of numbers"
            )


def common_mode(parts: list[SavedDataset], column: str) -> str | None:
    """The mode of Pillow to which all parts convert their images; None: their own."""
    first, *others = [part.mode_of(column) for part in parts]
    for part, mode in zip(parts[1:], others, strict=True):
        if mode != first:
            raise DataError(
                f"{part.folder}: input column {column!r} has images of mode {mode}, {parts[0].folder} of {first}; cast "
                f"one part, test.cast_column({column!r}, train.features[{column!r}])"
            )
    if first is not None and first not in Image.MODES:
        raise DataError(f"{parts[0].folder}: input column {column!r} has the unknown mode {first!r} of images")
    return first
