"""Files of images: parquet files as on Hugging Face, and a folder per class."""

import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import PIL
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from cfl_ray.config import ColumnsConfig
from cfl_ray.data import hf_disk
from cfl_ray.data.columns import MAX_LABEL, Named, alike_warnings, column_of, concatenated, label_names, unread_warnings
from cfl_ray.data.data_set import DataSet, Progress
from cfl_ray.data.decoding import AS_STORED, Decoder, Drawing, Encoded, suffixes
from cfl_ray.data.raw_files import FileState, RawFiles
from cfl_ray.data.reading import reading
from cfl_ray.data.tables import data_set_of
from cfl_ray.errors import DataError, counted, did_you_mean
from cfl_ray.system.collection import paused_collection

BATCH_ROWS = 2048  # encoded images in memory at a time
CLIENTS_FILE = "clients.csv"
_PARQUET, _GET_AGAIN = "a parquet file", "write or download it again"


# ---- parquet files: each row has the bytes of an image, and its label


def read_parquet(
    train: list[Path],
    test: list[Path],
    columns: ColumnsConfig,
    num_classes: int | None,
    pixels: bool,
    progress: Progress | None,
    *,
    drawing: Drawing = AS_STORED,
    dense: bool = False,
    validation: Sequence[Path] = (),
    names_unread: bool = False,
) -> DataSet:
    """The images of these files in file order. Raises DataError naming the file and row of unusable data.

    num_classes: None for the largest label + 1. dense: whether labels that occur are
    numbered anew, without gaps. pixels: False decodes only the first image, for its shape. names_unread: whether a
    warning names the columns that are not read.
    """
    test, labels = [*test, *validation], label_names(columns.label)
    others = [name for name in (columns.client, columns.group, columns.time) if name]
    schemas = {file: _open(file, labels).schema_arrow for file in (*train, *test)}
    for name in labels:
        hf_disk.check_class_names(schemas, name)
    parts = [_columns_of(train, [*labels, *others])]
    if test:
        known = [schemas[file].names for file in test]
        ids = [name for name in (columns.group, columns.client if validation else None) if name]
        parts.append(_columns_of(test, [*labels, *(name for name in ids if all(name in has for has in known))]))
    decoder = Decoder(drawing).first(*next(_encoded(train, columns.image))[:2])  # a training part has a row
    inputs = (
        decoder.all(_encoded(files, columns.image), table.num_rows, pixels, progress)
        for files, (_, table) in zip((train, test), parts, strict=False)
    )
    num_validation = sum(_open(file, labels).metadata.num_rows for file in validation)
    data_set = data_set_of(parts, inputs, columns, num_classes=num_classes, dense=dense, num_validation=num_validation)
    unread = unread_warnings(str(train[0]), schemas[train[0]].names, columns) if names_unread else []
    return decoder.with_report(replace(data_set, warnings=(*data_set.warnings, *unread)), parts[0][0])


def _columns_of(files: list[Path], names: list[str]) -> Named:
    """These columns of all files."""
    tables = []
    for file in files:
        with _open(file, names) as opened, reading(str(file), _PARQUET, _GET_AGAIN):
            tables.append(opened.read(columns=list(dict.fromkeys(names))))
        for name in names:
            column_of((str(file), tables[-1]), name)  # an error names the file, and the row in it
    return concatenated(files, tables)


def _open(file: Path, names: list[str]) -> pq.ParquetFile:
    with reading(str(file), _PARQUET, _GET_AGAIN):
        opened = pq.ParquetFile(file)
    known = opened.schema_arrow.names
    if missing := [name for name in names if name not in known]:
        raise DataError(f"{file} has no column {missing[0]!r}{did_you_mean(missing[0], known)}; set data.columns")
    return opened


def _encoded(files: list[Path], name: str) -> Iterator[tuple[Encoded, str, str]]:
    """Yields the images in a column, encoded, with their names for messages, as `Decoder.all` takes them."""
    for file in files:
        with _open(file, [name]) as opened:
            kind, row = opened.schema_arrow.field(name).type, 0
            is_struct = pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0
            if not (is_struct or pa.types.is_binary(kind) or pa.types.is_large_binary(kind)):
                raise DataError(
                    f"{file}: image column {name!r} must be bytes or a struct of bytes and path, it is {kind}; "
                    "set data.columns.image"
                )
            with reading(str(file), _PARQUET, _GET_AGAIN):
                batches = opened.iter_batches(BATCH_ROWS, columns=[name])
            while (batch := _next(batches, file)) is not None:
                for value in batch.column(0).field("bytes") if is_struct else batch.column(0):
                    yield value.as_py(), f"{file}: the image in row {row}", ""
                    row += 1


def _next(batches: Iterator[pa.RecordBatch], file: Path) -> pa.RecordBatch | None:
    with reading(str(file), _PARQUET, _GET_AGAIN):
        return next(batches, None)


# ---- a folder per class, as torchvision's ImageFolder reads it, with the client of each image if known


@dataclass
class Listing:
    """The images below the class folders of a folder, in the order of their paths, and what else is there."""

    folder: Path
    names: list[str] = field(default_factory=list)  # paths below the folder, with /
    states: list[FileState] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)  # folders with an image, sorted
    nested: list[str] = field(default_factory=list)  # classes with images only in folders of their own
    left_out: dict[str, list[str]] = field(default_factory=dict)  # names of what is not read, by the reason

    @property
    def paths(self) -> list[str]:
        """The paths of the images."""
        return [f"{self.folder}/{name}" for name in self.names]

    @property
    def labels(self) -> list[str]:
        """The class of each image."""
        return [name.partition("/")[0] for name in self.names]

    def leave_out(self, reason: str, name: str) -> None:
        """Notes what is not read."""
        self.left_out.setdefault(reason, []).append(name)

    @property
    def warnings(self) -> list[str]:
        """A line for each reason for which something is not read, and on folders that may be no classes."""
        lines = []
        if self.nested:
            named = f"{', '.join(self.nested[:3])}{', ...' * (len(self.nested) > 3)}"
            lines.append(
                f"{self.folder}: all images of {named} lie in folders of their own and are read as one class each; if "
                "these inner folders are the classes, name the folder that has them in data.root or data.train_files"
            )
        if len(self.classes) == 1:
            lines.append(
                f"{self.folder} has one class, {self.classes[0]}: every model predicts it, so scores say nothing"
            )
        for reason, names in self.left_out.items():
            kinds = Counter(map(_suffix, names))
            by_suffix = ", ".join(f"{count} {suffix}" for suffix, count in sorted(kinds.items()) if suffix)
            examples = f"{', '.join(names[:3])}{', ...' * (len(names) > 3)}"
            counted = f" ({by_suffix})" if by_suffix else ""
            lines.append(f"{self.folder}: left out, since {reason}: {len(names)}{counted}, {examples}")
        return lines


_NOT_OF_THE_USER = {"__MACOSX", "Thumbs.db", "desktop.ini"}  # what macOS and Windows add; and names that begin with .


def _suffix(name: str) -> str:
    """The suffix of a file in lower case, as `os.path.splitext` finds it, in less time; empty without any."""
    stem, dot, suffix = name[name.rfind("/") + 1 :].rpartition(".")
    return f".{suffix.lower()}" if stem.strip(".") and dot else ""


def raw_files(root: Path, listings: list[Listing]) -> RawFiles:
    """The files of these listings, the first of which is the training part's, with the clients.csv of that."""
    paths = [path for listing in listings for path in listing.paths]
    states = [state for listing in listings for state in listing.states]
    clients_file = f"{listings[0].folder}/{CLIENTS_FILE}"
    if os.path.isfile(clients_file):
        paths.append(clients_file)
        states.append(FileState.of(os.stat(clients_file)))
    below = f"{root}/"
    return RawFiles(os.path.abspath(root), paths, [path.removeprefix(below) for path in paths], states)


@paused_collection()
def listed(folder: Path, without: Iterable[Path] = ()) -> Listing:
    """The images below the class folders of `folder`, and what is left out. Links are followed.

    without: folders that are no classes. Raises DataError without an image, and for a folder that cannot be read.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder.absolute()}; set data.root to a folder with a folder per class")
    listing, skipped = Listing(folder), {os.path.abspath(other) for other in without}
    _walk(listing, os.fspath(folder), "", (), skipped)
    if not listing.names:
        others = "".join(f"; {line}" for line in listing.warnings)
        raise DataError(f"{folder.absolute()} has no image in a folder per class, e.g. {folder.name}/cat/1.png{others}")
    listing.classes = sorted(set(listing.labels))
    _check_classes(listing)
    return listing


# folders of the parts of a data set, in lower case
_PARTS = {"train", "training", "test", "testing", "val", "valid", "validation", "eval", "dev"}


def _check_classes(listing: Listing) -> None:
    """Raises DataError if the folders are parts of a data set, each with a folder per class, and no classes.

    Warns of a folder whose images all lie in folders of its own, which may be the classes that are meant.
    """
    directly = {name.partition("/")[0] for name in listing.names if name.count("/") == 1}
    nested = [name for name in listing.classes if name not in directly]
    if not nested:
        return
    if nested == listing.classes and all(name.lower() in _PARTS for name in nested):
        raise DataError(
            f"{listing.folder.absolute()} has the folders {', '.join(nested)}, each with folders of images: these are "
            f"parts of a data set, not classes; set data.train_files: {max(nested, key=_is_training)} (and "
            "data.test_files), or rename the folders"
        )
    listing.nested = nested


def _is_training(name: str) -> bool:
    return name.lower().startswith("train")


def _walk(listing: Listing, path: str, name: str, above: tuple[tuple[int, int], ...], skipped: set[str]) -> None:
    """Lists a folder in the order of names. above: (device, inode) of the folders around it. name: below the root."""
    try:
        with os.scandir(path) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        status = os.stat(path)
    except OSError as error:
        raise DataError(f"{os.path.abspath(path)} cannot be read: {error.strerror}") from error
    above = (*above, (status.st_dev, status.st_ino))
    for entry in found:
        inner = f"{name}/{entry.name}" if name else entry.name
        if entry.name in _NOT_OF_THE_USER or entry.name.startswith("."):
            listing.leave_out("it is hidden or made by the system", inner)
        elif entry.is_dir():
            if skipped and os.path.abspath(entry.path) in skipped:
                continue
            if (entry.stat().st_dev, entry.stat().st_ino) in above:
                listing.leave_out("it is a link to a folder that contains it", inner)
                continue
            count = len(listing.names)
            _walk(listing, entry.path, inner, above, skipped)
            if not name and len(listing.names) == count:
                listing.leave_out("a folder without an image is no class", inner)
        else:
            _list_file(listing, entry, inner, in_class=bool(name))


def _list_file(listing: Listing, entry: os.DirEntry[str], name: str, in_class: bool) -> None:
    """Lists an image, or notes why a file is none."""
    if not in_class and name == CLIENTS_FILE:
        return
    if _suffix(name) not in suffixes():
        listing.leave_out(f"it is no image by its suffix (of those that Pillow {PIL.__version__} decodes)", name)
    elif not in_class:
        listing.leave_out("it is in no class folder", name)
    else:
        try:
            name.encode()
            status = entry.stat()
        except UnicodeError:
            raise DataError(f"{listing.folder}: the file name {name!r} is no text in UTF-8; rename it") from None
        except OSError as error:  # a link to a missing file, or one that has just been removed
            raise DataError(f"{entry.path} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            listing.leave_out("it is a device or a pipe", name)
            return
        listing.names.append(name)
        listing.states.append(FileState.of(status))


def read_folders(
    train: Listing,
    test: Listing | None,
    validation: Listing | None,
    raw: RawFiles,
    drawing: Drawing,
    pixels: bool,
    progress: Progress | None,
) -> DataSet:
    """The images in a folder that has a folder for each class, numbered in sorted order of the folders' names.

    `clients.csv` in the training folder, with columns file (path below the folder) and client, names the client of each
    image. raw: reads the files.
    """
    others = [listing for listing in (test, validation) if listing is not None]
    _check_labels(train, others)
    paths = train.paths
    decoder = Decoder(drawing).first(raw.read(paths[0]), paths[0])
    if not pixels:  # an image of each class and suffix stands for all, so that a summary is quick
        for path in {(label, _suffix(path)): path for label, path in zip(train.labels, paths, strict=True)}.values():
            decoder.look(raw.read(path), path)
    label_of = {name: label for label, name in enumerate(train.classes)}

    def part(*listings: Listing) -> tuple[np.ndarray, np.ndarray]:
        contents = ((raw.read(path), path, _suffix(path)) for listing in listings for path in listing.paths)
        y = np.array([label_of[name] for listing in listings for name in listing.labels], np.int16)
        return decoder.all(contents, len(y), pixels, progress), y

    x, y = part(train)
    test_x, test_y = part(*others) if others else (None, None)
    client, of_clients = _clients(train, raw)
    notes, of_images = decoder.report(str(train.folder)) if pixels else ([], [])
    of_folders = [line for listing in (train, *others) for line in listing.warnings]
    return DataSet(
        x,
        y,
        test_x,
        test_y,
        len(train.classes),
        scale=255 if x.dtype == np.uint8 else 1,
        client=client,
        class_names=tuple(train.classes),
        notes=tuple(notes),
        warnings=(*of_folders, *_order(train), *of_images, *of_clients),
        decoding=decoder.version,
        num_validation=0 if validation is None else len(validation.names),
    )


def _check_labels(train: Listing, others: list[Listing]) -> None:
    """Raises DataError for too many classes, and for a class of another part without training images."""
    if len(train.classes) > MAX_LABEL + 1:
        raise DataError(
            f"{train.folder} has {len(train.classes)} class folders, at most {MAX_LABEL + 1} can be classes"
        )
    for listing in others:
        if unknown := sorted(set(listing.classes) - set(train.classes)):
            known = ", ".join(train.classes)
            raise DataError(f"{listing.folder}: class {unknown[0]!r} has no training image; the classes are {known}")


def _order(listing: Listing) -> list[str]:
    """A warning if the names of classes are numbers, but not in the order of the labels."""
    names = listing.classes
    if not all(name.isdecimal() for name in names) or names == sorted(names, key=int):
        return []
    label, name = next((label, name) for label, name in enumerate(names) if int(name) != label)
    return [
        f"{listing.folder}: classes are numbered in the order of their names as text, as torchvision does: label "
        f"{label} is the class {name} (result.class_names)"
    ]


def _clients(listing: Listing, raw: RawFiles) -> tuple[np.ndarray | None, list[str]]:
    """(the client of each image as strings, warnings); None without a `clients.csv`."""
    clients_file = f"{listing.folder}/{CLIENTS_FILE}"
    if not os.path.isfile(clients_file):
        return None, []
    columns = pyarrow.csv.ConvertOptions(
        include_columns=["file", "client"],
        column_types={"file": pa.string(), "client": pa.string()},  # ids as they are written: 007 is not 7
        strings_can_be_null=False,
    )
    content = raw.read(clients_file)
    with reading(clients_file, "a CSV file with columns file and client"):
        table = pyarrow.csv.read_csv(pa.BufferReader(content), convert_options=columns)
    client_of: dict[str, str] = {}
    for row, (name, client) in enumerate(
        zip(*(table[column].to_pylist() for column in table.column_names), strict=True)
    ):
        if not client.strip():
            raise DataError(f"{clients_file}: the client in row {row} (the first is row 0) is empty; fill it")
        if client_of.setdefault(name, client) != client:
            raise DataError(
                f"{clients_file} names two clients for {name}: {client_of[name]} and {client}; an image has one client"
            )
    if missing := [name for name in listing.names if name not in client_of]:
        raise DataError(
            f"{clients_file} names no client for {missing[0]} ({len(missing)} of {len(listing.names)} images)"
        )
    others = sorted(client_of.keys() - set(listing.names))
    are = "is" if len(others) == 1 else "are"
    lines = [
        f"{clients_file} names {counted(len(others), 'file')} that {are} not read, e.g. {name}" for name in others[:1]
    ]
    ids = np.array([client_of[name] for name in listing.names], np.str_)
    return ids, lines + alike_warnings(f"{clients_file}: column 'client'", ids, "client")
