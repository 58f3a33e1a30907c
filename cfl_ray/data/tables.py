"""Tables: CSV and Parquet files with a column for each feature, and saved Hugging Face data sets.

Messages of checks name the file, the column and the row.
"""

import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from cfl_ray.config import ColumnsConfig
from cfl_ray.config.data import CsvConfig, HfDiskConfig
from cfl_ray.data import hf_disk
from cfl_ray.data.array_checks import (
    copied_tokens,
    label_warnings,
    num_outputs,
    numbers,
    tokens,
)
from cfl_ray.data.columns import (
    Named,
    alike_warnings,
    column_of,
    concatenated,
    float32_column,
    groups_of,
    ids_of,
    is_list,
    label_names,
    labels_of,
    names_of_codes,
    ranks_in_time,
    stacked,
    targets_of_columns,
    unread_warnings,
)
from cfl_ray.data.data_set import DataSet
from cfl_ray.data.decoding import Decoder, drawing_of
from cfl_ray.data.index_columns import FEWEST, counting_columns, index_columns
from cfl_ray.data.table_files import FILENAME, CsvFormat, other_kind, read_rows, with_filenames
from cfl_ray.errors import DataError, did_you_mean


def read_npz(file: Path, required: Sequence[str], optional: Sequence[str] | None, needs: str) -> dict[str, np.ndarray]:
    """Returns the arrays of an .npz file by name. Raises DataError if a required array is missing.

    optional: all other arrays that the file may have; None: it may have any others, which are not read. needs: the
    arrays that the file needs, for the message.
    """
    known = (*required, *(optional or ()))
    try:
        loaded = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            raise DataError(
                f"{file} holds a single array without a name, as numpy.save writes it; {needs} (numpy.savez)"
            )
        with loaded:
            unknown = [name for name in loaded.files if name not in known]
            arrays = {name: loaded[name] for name in known if name in loaded}
    except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        kind = None if file.suffix == ".npz" else other_kind(file)
        what = f"is {kind}" if kind else f"cannot be read as an .npz file of plain arrays: {error}"
        raise DataError(f"{file} {what}") from error
    if missing := [name for name in required if name not in arrays]:
        if any("/" in name for name in unknown) and (kind := other_kind(file)):  # a zip archive of other files
            raise DataError(f"{file} is {kind}")
        has = f"; it has {', '.join(unknown[:5])}{' ...' * (len(unknown) > 5)}" if unknown else ""
        raise DataError(f"{file} has no array {missing[0]!r}; {needs}{has}")
    if unknown and optional is not None:
        raise DataError(f"{file} has an unknown array {unknown[0]!r}{did_you_mean(unknown[0], known)}")
    return arrays


def read_csv(train: list[Path], test: list[Path], validation: list[Path], data: CsvConfig, targets: str) -> DataSet:
    """The samples of CSV or Parquet files. Inputs are float32 (n, F), a number for each feature column."""
    columns, csv = data.columns, CsvFormat(data.delimiter, data.encoding, data.decimal)
    labels, ids = label_names(columns.label), [name for name in (columns.client, columns.group) if name is not None]
    as_text = labels if targets == "class" else []
    tables = _read_tables((train, test, validation), csv, ids, as_text)
    given = {*labels, *ids, *(columns.features or ()), columns.time}
    left_out = {name for table in tables.values() for name in index_columns(table)} - given
    parts = [
        concatenated(files, [_without(tables[file], left_out) for file in files], text=[*ids, *as_text])
        for files in (train, [*test, *validation])
        if files
    ]
    for part in parts:
        for name in labels:
            column_of(part, name)
    for column in ids:
        column_of(parts[0], column)
    features, warnings = _features(parts[0], [tables[file] for file in train], columns, sorted(left_out))
    inputs = (np.stack([float32_column(part, name, csv.decimal, warnings) for name in features], 1) for part in parts)
    num_validation = sum(tables[file].num_rows for file in validation)
    dense = data.labels == "dense"
    data_set = data_set_of(parts, inputs, columns, targets=targets, dense=dense, num_validation=num_validation)
    if not columns.features:
        warnings += _label_copies(parts[0][0], features, data_set)
    warnings += shared_rows(parts, data_set)
    notes = []
    if len(train) > 1 and columns.client is None:
        notes = [f"{parts[0][0]}: read as one table; data.columns.client: {FILENAME} makes each file a client"]
    return replace(data_set, notes=tuple(notes), warnings=(*data_set.warnings, *dict.fromkeys(warnings)))


def _read_tables(
    parts: Sequence[list[Path]], csv: CsvFormat, ids: list[str], labels: list[str]
) -> dict[Path, pa.Table]:
    """The tables of all files of these parts. ids, labels: as in `read_rows`; an id may be the name of the file.

    Raises DataError if equal codes of a label are different classes.
    """
    tables = {file: read_rows(file, csv, ids, labels) for files in parts for file in files}
    if FILENAME in ids:
        for files in filter(None, parts):
            tables |= with_filenames({file: tables[file] for file in files})
    for name in labels:
        hf_disk.check_class_names({file: table.schema for file, table in tables.items()}, name)
    return tables


def shared_rows(parts: list[Named], data_set: DataSet) -> list[str]:
    """A warning if test rows occur among the training rows, more often than these among themselves; otherwise empty."""
    if data_set.test_x is None or data_set.test_y is None or not len(data_set.test_x):
        return []
    train_n, test_m = _marks(data_set.train_x, data_set.train_y), _marks(data_set.test_x, data_set.test_y)
    found, repeated = int(np.isin(test_m, train_n).sum()), len(train_n) - len(np.unique(train_n))
    if found * len(train_n) <= 2 * repeated * len(test_m):
        return []
    return [
        f"{parts[1][0]}: {found} of its {len(test_m)} rows equal a training row of {parts[0][0]} in all inputs and the "
        "target, so scores are of data that were trained on; leave them out of one of the two"
    ]


def _marks(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A number for each row, uint64 (n,), equal for equal rows: the sum of its bytes times odd numbers, modulo 2^64."""
    marks = np.zeros(len(x), np.uint64)
    for values in (x, y):
        byte_nB = np.ascontiguousarray(values).reshape(len(values), -1).view(np.uint8)
        factor_B = np.random.default_rng(byte_nB.shape[1]).integers(0, 2**63, byte_nB.shape[1], np.uint64) * 2 + 1
        for first in range(0, len(byte_nB), _BLOCK):
            rows = slice(first, first + _BLOCK)
            marks[rows] = marks[rows] * np.uint64(0x9E3779B97F4A7C15) + byte_nB[rows].astype(np.uint64) @ factor_B
    return marks


_BLOCK = 4096  # rows whose marks are computed together


def _without(table: pa.Table, names: set[str]) -> pa.Table:
    return table.select([index for index, name in enumerate(table.column_names) if name not in names])


def _features(
    train: Named, tables: list[pa.Table], columns: ColumnsConfig, left_out: list[str]
) -> tuple[list[str], list[str]]:
    """The names of the feature columns, and warnings on columns that were chosen or left out without being named.

    tables: of each training file. left_out: columns that are not in `train`.
    """
    name, table = train
    special = {*label_names(columns.label), columns.client, columns.group, columns.time}
    if columns.features:
        if wrong := [column for column in columns.features if column in special]:
            raise DataError(
                f"data.columns.features names {wrong[0]!r}, which is the label, the client, the group or the time: a "
                "model would read its target from its input; leave it out"
            )
        return columns.features, []
    others = [column for column in table.column_names if column not in special]
    usual, counting = counting_columns(tables, others)
    features = [column for column in others if column not in usual]
    if not features:
        raise DataError(f"{name} has no column except {columns.label!r}; set data.columns.features")
    shown = ", ".join(features[:_SHOWN]) + (f", ... ({len(features)} in all)" if len(features) > _SHOWN else "")
    warnings = [
        f"{name}: the inputs are the columns {shown}: all others; if one of them would not be known of a new sample, "
        "name the inputs in data.columns.features"
    ]
    if index := [*left_out, *usual]:
        listed = ", ".join(map(repr, index))
        warnings.append(f"{name}: left out as an index of the rows: {listed}; data.columns.features can name it")
    if counting:
        warnings.append(
            f"{name}: the input {counting[0]!r} numbers the rows, as an index or an id does; if it is one, name the "
            "other inputs in data.columns.features"
        )
    return features, warnings


_SHOWN = 20  # columns that a warning lists


def _label_copies(name: str, features: list[str], data_set: DataSet) -> list[str]:
    """A warning if an input column equals the labels, or the numbers of their names; otherwise empty."""
    y = data_set.train_y
    if y.ndim != 1 or len(y) < FEWEST or len(np.unique(y)) == 1:
        return []
    copies = [column for column, x in zip(features, data_set.train_x.T, strict=True) if (x == y).all()]
    if not copies:
        return []
    return [
        f"{name}: the input {copies[0]!r} equals the label in every row (classes are numbers in the order of their "
        "names), as a copy does; if it is one, name the other inputs in data.columns.features"
    ]


def read_hf(train: Path, test: Path | None, validation: Path | None, data: HfDiskConfig, targets: str) -> DataSet:
    """The samples of data sets that `Dataset.save_to_disk` wrote into these folders.

    The input column contains images, or lists of equal length: of numbers, or of token ids if the section has a
    vocabulary.
    """
    columns = data.columns
    saved = [hf_disk.saved_dataset(folder) for folder in (train, test, validation) if folder is not None]
    hf_disk.check_kind(saved, columns.image)
    ids = [name for name in (columns.client, columns.group) if name is not None]
    tables = [part.tables() for part in saved]
    parts = [concatenated(saved[0].files, tables[0], text=ids)]
    if len(saved) > 1:
        files = [file for part in saved[1:] for file in part.files]
        parts.append(concatenated(files, [table for of_part in tables[1:] for table in of_part], text=ids))
    class_names: tuple[str, ...] = ()
    if targets == "class" and isinstance(columns.label, str):
        class_names = hf_disk.common_class_names(saved, columns.label)
    decoder = Decoder(drawing_of(data), hf_disk.common_mode(saved, columns.image))
    data_set = data_set_of(
        parts,
        (_lists_or_images(part, columns.image, data.vocabulary, decoder) for part in parts),
        columns,
        data.vocabulary,
        targets,
        dense=data.labels == "dense",
        class_names=class_names,
        num_validation=0 if validation is None else sum(table.num_rows for table in tables[-1]),
    )
    unread = unread_warnings(str(saved[0].files[0]), parts[0][1].column_names, columns)
    return decoder.with_report(replace(data_set, warnings=(*data_set.warnings, *unread)), parts[0][0])


def data_set_of(
    parts: list[Named],
    inputs: Iterable[np.ndarray],
    columns: ColumnsConfig,
    vocabulary: int | None = None,
    targets: str = "class",
    num_classes: int | None = None,
    dense: bool = False,
    class_names: tuple[str, ...] = (),
    num_validation: int = 0,
) -> DataSet:
    """The samples of a training part and, if given, a test part, with labels, clients and groups.

    num_validation: rows at the end of the test part that are the validation part.

    inputs: of each part; they are computed after the labels are checked. num_classes: None for the largest label + 1.
    dense: whether integer labels are numbered anew, as in `dense_labels`. class_names: of integer labels, if the files
    have them; their number is that of the classes.
    """
    warnings: list[str] = []
    if targets == "class":
        labels, words, class_names = _classes_of(parts, columns.label, dense, class_names)
        num_classes = len(class_names) or num_classes
        class_names = class_names or words
        warnings += alike_warnings(f"{parts[0][0]}: column {columns.label!r}", np.array(words), "class")
    else:
        labels = [targets_of_columns(part, columns.label, targets) for part in parts]
    named = [(f"{file}: column {columns.label!r}", y) for (file, _), y in zip(parts, labels, strict=True)]
    num_classes = num_outputs(num_classes, named, targets, vocabulary)
    warnings += label_warnings(named[0][0], labels[0], num_classes) if targets == "class" else []
    client, validated = _clients(parts, columns.client, num_validation, warnings)
    group, test_group = _groups(parts, columns.group, warnings)
    time = None if columns.time is None else ranks_in_time(parts[0], columns.time)
    x, *test_x = inputs
    for what, (train, *test) in {"inputs": [x, *test_x], "targets": labels}.items():
        if test and (shape := test[0].shape[1:]) != train.shape[1:]:
            raise DataError(
                f"{parts[1][0]} holds {what} of shape {shape}, {parts[0][0]} of {train.shape[1:]}; they must agree"
            )
    warnings += copied_tokens(named[0][0], x, labels[0], targets)
    return DataSet(
        x,
        labels[0],
        test_x[0] if test_x else None,
        labels[1] if test_x else None,
        num_classes,
        scale=255 if x.dtype == np.uint8 else 1,
        client=client,
        group=group,
        test_group=test_group,
        time=time,
        vocabulary=vocabulary,
        targets=targets,
        class_names=class_names,
        warnings=tuple(warnings),
        num_validation=num_validation,
        validation_client=validated,
    )


def _classes_of(
    parts: list[Named], column: str | list[str], dense: bool, class_names: tuple[str, ...]
) -> tuple[list[np.ndarray], tuple[str, ...], tuple[str, ...]]:
    """The labels and words of `labels_of`, and the names of the classes that occur; empty if only words name them."""
    if not isinstance(column, str):
        raise DataError(
            f"data.columns.label names {len(column)} columns, a class has 1; name a single column, or set "
            "task: multi_label (csv, hf_disk)"
        )
    labels, words = labels_of(parts, column, dense)
    if dense and words:
        class_names = names_of_codes(words, class_names) if class_names else words
    return labels, words, class_names


def _clients(
    parts: list[Named], column: str | None, num_validation: int, warnings: list[str]
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The client of each training sample, and of each validation sample; None: they are not known."""
    if column is None:
        return None, None
    client = ids_of(parts[0], column, "client")
    warnings += alike_warnings(f"{parts[0][0]}: column {column!r}", client, "client")
    name, table = parts[-1]
    if not num_validation or column not in table.column_names:
        return client, None
    validated = ids_of((name, table.slice(table.num_rows - num_validation)), column, "client")
    if count := int((~np.isin(validated, client)).sum()):
        warnings.append(
            f"{name}: {count} of {num_validation} validation samples are left out, since their clients have no "
            "training sample"
        )
    return client, validated


def _groups(parts: list[Named], column: str | None, warnings: list[str]) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The true group of each training sample, and of each test sample; None: they are not known."""
    if column is None:
        return None, None
    values = [ids_of(part, column, "group") for part in parts if part is parts[0] or column in part[1].column_names]
    warnings += alike_warnings(f"{parts[0][0]}: column {column!r}", values[0], "group")
    return groups_of(values[0], values[1] if len(values) == 2 else None, f"{parts[-1][0]}: {column!r}")


def _lists_or_images(part: Named, column: str, vocabulary: int | None, decoder: Decoder) -> np.ndarray:
    values = column_of(part, column)
    kind = values.type
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        images = [
            (value["bytes"], f"{part[0]}: the image in row {row}", "") for row, value in enumerate(values.to_pylist())
        ]
        return decoder.first(*images[0][:2]).all(images, len(images))
    if not is_list(kind):
        raise DataError(
            f"{part[0]}: input column {column!r} must hold images or lists of numbers, it holds {kind}; "
            "set data.columns.image"
        )
    if (size := decoder.drawing.size) is not None:
        raise DataError(f"{part[0]}: data.image_size {[*size]}, but input column {column!r} holds numbers, not images")
    name = f"{part[0]}: column {column!r}"
    x = stacked(name, values)
    return numbers(name, x) if vocabulary is None else tokens(name, x, vocabulary)
