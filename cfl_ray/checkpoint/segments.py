"""Segment files: the changes between two checkpoints, as safetensors. A later file overrides earlier files.

    values/NAME/CHUNK (R, ...) and rows/NAME/CHUNK    rows of a state tensor, and their numbers; a single number
                                                      is the first of a block of consecutive rows
    states/NAME/CHUNK (R, ...), clients/NAME/CHUNK    client states of a name, their clients, and their checksums
    and sums/NAME/CHUNK
    metadata "gone"                                   JSON: [name, client] of each client state that was dropped
                                                      since the previous segment; never of states in this segment

Files are named SEGMENT-PART.safetensors: a checkpoint writes at most one segment, and no number is used twice. Client
states have separate files, which the processes that have the values write (`ClientStateFile`). A value is compared with
its checksum when it is read, not when a checkpoint is loaded, unless it is new in that checkpoint: a run with 100 GB of
values is resumed in seconds.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cfl_ray.core.backend import ClientStateKey, SavedEntry, SavedState
from cfl_ray.errors import RunError, first_line
from cfl_ray.system.files import open_private, sha256, sync

FILE_BYTES = 128 << 20  # a file of this size is closed and the next file begun; twice as much memory is used meanwhile
STATE_FILE_BYTES = 16 << 20  # as FILE_BYTES, of files of client states: hosts write them in addition to other work
ENTRY_BYTES = 128  # size of an entry without its values: its name and place in the header
FAN_OUT = 16  # number of segments of similar size that are merged into one; a power of 2
_COMPARE_BYTES = 4 << 20  # rows are compared in blocks of this size
_ALTERED = ".altered"  # suffix of the empty file that marks a file with an altered client state


class Damaged(RunError):
    """A file that a checkpoint needs is missing, or its content was altered."""


class AlteredState(Damaged):
    """A client state has another checksum than when it was saved."""


class EntryFile(BaseModel):
    """A file that a checkpoint needs, as its manifest lists it."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    name: str = Field(pattern=r"^\d{6,15}-\d{1,9}\.safetensors$")
    sha256: str
    has_states: bool  # whether it has client states, which have separate checksums: `sha256` leaves them out
    bytes: int = Field(ge=0)
    ended: int = Field(ge=0)  # bytes in earlier files of the tensors and client states that this file drops

    @property
    def segment(self) -> int:
        """The number of the file's segment."""
        return int(self.name.partition("-")[0])

    @property
    def weight(self) -> int:
        """Size, in bytes, that decides about merges. Dropped bytes count double, so that merging frees their space."""
        return self.bytes + 2 * self.ended

    def check(self, folder: Path, content: bool = True, states: bool = False) -> None:
        """Raises Damaged unless the file has the size and, if `content`, the checksum in the manifest.

        states: whether to check client states, too; they are always checked in a file marked as altered.
        """
        file = folder / self.name
        try:
            size = file.stat().st_size
            checksum = self.sha256
            if content and size == self.bytes:
                checksum = _sha256_without_states(file) if self.has_states else sha256(file)
        except OSError as error:
            raise Damaged(f"{file} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # the header was altered
            raise Damaged(f"{file} cannot be read: no header ({error})") from error
        if size != self.bytes:
            raise Damaged(f"{file} has {size} bytes, expected {self.bytes}")
        if checksum != self.sha256:
            raise Damaged(f"{file} has sha256 {checksum[:12]}, expected {self.sha256[:12]}")
        if self.has_states and (states or (content and Path(f"{file}{_ALTERED}").exists())):
            with opened(folder, self) as entries:
                for _, saved in client_states_in(entries, file):
                    saved.tensor()


def _sha256_without_states(file: Path) -> str:
    """SHA-256 of a file of client states without their values: of its header, clients and checksums.

    Raises ValueError, KeyError, TypeError or AttributeError for a file without a header.
    """
    with open(file, "rb") as stream:
        length = stream.read(8)
        header = stream.read(min(int.from_bytes(length, "little"), file.stat().st_size))
        digest = hashlib.sha256(length + header)
        begin = stream.tell()
        for name, entry in json.loads(header).items():
            if not name.startswith(("__metadata__", "states/")):
                first, last = entry["data_offsets"]
                stream.seek(begin + first)
                digest.update(stream.read(last - first))
        return digest.hexdigest()


# ---- reading


@contextmanager
def opened(folder: Path, file: EntryFile) -> Iterator[Any]:
    """Context with the open safetensors file. Raises Damaged if the file cannot be read, also inside the context."""
    try:
        with safe_open(folder / file.name, "pt") as entries:
            yield entries
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{folder / file.name} cannot be read: {system_reason(error)}") from error


@dataclass(frozen=True)
class EntryRows:
    """The client states (R, F) of an entry, mapped. A row is compared with its checksum whenever it is read."""

    entry: SavedEntry
    rows_RF: Tensor
    sums_R: Tensor  # int64: checksums

    @classmethod
    def of(cls, entries: Any, entry: SavedEntry) -> "EntryRows":
        """The rows of an entry of an open file."""
        sums = entry.name.replace("states", "sums", 1)
        return cls(entry, entries.get_tensor(entry.name), entries.get_tensor(sums))

    @property
    def shape(self) -> torch.Size:
        return self.rows_RF.shape

    @property
    def itemsize(self) -> int:
        return self.rows_RF.itemsize

    def __getitem__(self, row: int) -> Tensor:
        value = self.rows_RF[row]
        if _checksum(value) != self.sums_R[row]:
            with suppress(OSError):  # a folder that cannot be written
                open_private(Path(f"{self.entry.file}{_ALTERED}"), "wb").close()
            raise AlteredState(f"{self.entry.file} was altered: a client state in it; resume the run to go back")
        return value


def _checksum(value: Tensor) -> int:
    """The first 8 bytes of the SHA-256 of the value's bytes."""
    content = value.contiguous().reshape(-1).view(torch.uint8).numpy()
    return int.from_bytes(hashlib.sha256(content.data).digest()[:8], "little", signed=True)


@lru_cache(maxsize=16)
def entry_rows(entry: SavedEntry) -> EntryRows:
    """The client states of an entry. Raises OSError or SafetensorError if the file cannot be read."""
    with safe_open(entry.file, "pt") as entries:
        return EntryRows.of(entries, entry)


def client_states_in(entries: Any, file: Path) -> Iterator[tuple[ClientStateKey, SavedState]]:
    """Yields the (name, client) and the values of each client state in an open file."""
    for entry, chunk, name in _entries("states/", entries):
        clients = entries.get_tensor(f"clients/{chunk}").tolist()
        place = SavedEntry(str(file), entry)
        rows = EntryRows.of(entries, place)
        if not len(rows.rows_RF) == len(rows.sums_R) == len(clients):
            raise Damaged(f"{file}: {entry} has {len(rows.rows_RF)} values for {len(clients)} clients")
        for row, client in enumerate(clients):
            yield (name, client), SavedState(rows, row, place)


def dropped_in(entries: Any) -> set[ClientStateKey]:
    """The (name, client) of each client state in earlier files that this open file drops."""
    return {(name, client) for name, client in json.loads((entries.metadata() or {}).get("gone", "[]"))}


def rows_in(entries: Any) -> Iterator[tuple[str, Tensor, str]]:
    """Yields (tensor name, int64 row numbers, name of the entry with their values) for each chunk of a state tensor."""
    for entry, chunk, name in _entries("values/", entries):
        row_R, count = entries.get_tensor(f"rows/{chunk}"), entries.get_slice(entry).get_shape()[0]
        is_block = len(row_R) != count
        yield name, row_R[0] + torch.arange(count) if is_block else row_R, entry


def _entries(kind: str, entries: Any) -> Iterator[tuple[str, str, str]]:
    """Yields (entry, NAME/CHUNK, NAME) of the entries of a kind in an open file."""
    names: list[str] = entries.keys()
    for entry in names:
        if entry.startswith(kind):
            chunk = entry.removeprefix(kind)
            yield entry, chunk, chunk.rpartition("/")[0]


# ---- writing


@dataclass(frozen=True)
class ClientStateFile:
    """A file of client states not written yet. Any process that has the values and the folder can write it."""

    folder: Path
    segment: int
    part: int  # even; the odd number after it is for the server, if it writes the file again
    keys: tuple[ClientStateKey, ...]

    def write(self, values: Iterable[Tensor], again: bool = False) -> EntryFile:
        """Writes the file. Raises RunError with the file and the reason if that fails.

        States of equal name, shape and type become one entry: with an entry for each, writing thousands of them would
        take ten times as long.
        """
        states: dict[tuple[str, torch.Size, torch.dtype], tuple[list[int], list[Tensor]]] = {}
        for (name, client), value in zip(self.keys, values, strict=True):
            clients, rows = states.setdefault((name, value.shape, value.dtype), ([], []))
            clients.append(client)
            rows.append(value)
        batch: dict[str, Tensor] = {}
        for chunk, ((name, *_), (clients, rows)) in enumerate(states.items()):
            batch[f"clients/{name}/{chunk}"] = torch.tensor(clients)
            batch[f"states/{name}/{chunk}"] = torch.stack(rows)
            batch[f"sums/{name}/{chunk}"] = torch.tensor([_checksum(row) for row in rows])
        return _write(self.folder, self.segment, self.part + again, batch, has_states=True)


class EntryWriter:
    """Writes a segment. Raises RunError with the file and the reason if writing fails."""

    def __init__(self, folder: Path, segment: int):
        self.folder, self.segment = folder, segment
        self.files: list[EntryFile] = []  # of rows
        self._parts = itertools.count(2, 2)  # numbers of further files; the first file of rows is 0
        self._batch: dict[str, Tensor] = {}  # entries of the next file
        self._size = 0  # bytes of _batch

    def state_files(self, bytes_of: Mapping[ClientStateKey, int]) -> list[ClientStateFile]:
        """The files for these client states, not written yet."""
        groups: list[list[ClientStateKey]] = []
        room = 0
        for key, size in bytes_of.items():
            if room < size:
                groups.append([])
                room = STATE_FILE_BYTES
            groups[-1].append(key)
            room -= size + 16
        return [ClientStateFile(self.folder, self.segment, next(self._parts), tuple(keys)) for keys in groups]

    def add_rows(self, name: str, tensor: Tensor, row_R: Tensor | range) -> None:
        """Adds the rows `row_R` (ascending) of a state tensor."""
        most = max(1, FILE_BYTES // max(1, row_bytes(tensor)))
        for chunk, at in enumerate(range(0, len(row_R), most)):
            row_r = row_R[at : at + most]
            first, last = int(row_r[0]), int(row_r[-1])
            is_block = last - first + 1 == len(row_r)
            values = tensor[first : last + 1] if is_block else tensor[row_r]
            rows = torch.tensor([first]) if is_block else torch.as_tensor(row_r)
            self._batch |= {f"rows/{name}/{chunk}": rows, f"values/{name}/{chunk}": values}
            self._size += values.nbytes + 2 * ENTRY_BYTES
            if self._size >= FILE_BYTES:
                self._write([], 0)

    def close(self, dropped: Iterable[ClientStateKey], ended: int) -> list[EntryFile]:
        """Writes the last file. Returns the files of rows, oldest first; empty if there was nothing to write.

        dropped: client states of earlier segments to drop. ended: as in `EntryFile`.
        """
        dropped = sorted(dropped)
        if self._size or dropped or ended:
            self._write(dropped, ended)
        return self.files

    def abandon(self) -> None:
        """Removes the files written so far."""
        for file in self.folder.glob(f"{self.segment:06d}-*"):
            with suppress(OSError):  # the caller raises the first error, the reason why writing failed
                file.unlink()

    def _write(self, dropped: list[ClientStateKey], ended: int) -> None:
        part = next(self._parts) if self.files else 0
        self.files.append(_write(self.folder, self.segment, part, self._batch, dropped, ended))
        self._batch, self._size = {}, 0


def _write(
    folder: Path,
    segment: int,
    part: int,
    batch: dict[str, Tensor],
    dropped: Sequence[ClientStateKey] = (),
    ended: int = 0,
    has_states: bool = False,
) -> EntryFile:
    file = folder / f"{segment:06d}-{part}.safetensors"
    with writing(file):
        open_private(file, "wb").close()  # safetensors keeps the permissions of a file that exists
        save_file(_without_shared_memory(batch), file, {"gone": json.dumps(dropped)})
        sync(file)
        digest = _sha256_without_states(file) if has_states else sha256(file)
        size = file.stat().st_size
        return EntryFile(name=file.name, sha256=digest, has_states=has_states, bytes=size, ended=ended)


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Context that turns errors of writing into a RunError with the file and the system's reason."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunError(f"{file} could not be written: {system_reason(error)}") from error


def system_reason(error: Exception) -> str:
    """The operating system's text for the error, or the first line of the error's text."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return first_line(error)


def segments_to_merge(weights: list[int], new: int) -> int:
    """The number of newest segments to merge into a new segment of weight `new`.

    weights: of the existing segments, oldest first. If all after the oldest weigh at least as much as the oldest, all
    are merged: dropped bytes weigh double, so files hold at most twice the bytes in use. Otherwise the newest segments
    are merged whenever FAN_OUT of them, the new segment included, have a similar size or smaller; at most FAN_OUT - 1
    segments remain for each power of FAN_OUT.
    """
    if weights and sum(weights[1:]) + new >= weights[0]:
        return len(weights)
    taken = 0
    while (similar := _similar(weights[: len(weights) - taken], new)) >= FAN_OUT - 1:
        new += sum(weights[len(weights) - taken - similar : len(weights) - taken])
        taken += similar
    return taken


def _similar(weights: list[int], new: int) -> int:
    """Number of the newest segments whose weight has at most as many digits, to the base FAN_OUT, as `new`."""
    return sum(1 for _ in itertools.takewhile(lambda weight: _digits(weight) <= _digits(new), reversed(weights)))


def _digits(weight: int) -> int:
    return max(-(-weight.bit_length() // (FAN_OUT.bit_length() - 1)), 1)


# ---- rows of a tensor


def as_rows(tensor: Tensor) -> Tensor:
    """The tensor, or a scalar tensor reshaped to a row, (1,)."""
    return tensor if tensor.dim() else tensor.reshape(1)


def row_bytes(tensor: Tensor) -> int:
    """Bytes of a row; 0 for a tensor without rows."""
    return tensor[:1].nbytes if len(tensor) else 0


def cost(tensor: Tensor, row_R: Tensor | range) -> int:
    """A lower bound of the bytes that writing these rows takes."""
    return len(row_R) * row_bytes(tensor) + 2 * ENTRY_BYTES if len(row_R) else 0


def changed_rows(now: Tensor, before: Tensor | None) -> Tensor:
    """Bool (R,): rows whose bits differ from `before`; all if `before` is None or has another row shape or type."""
    changed_R = torch.ones(len(now), dtype=torch.bool)
    if before is None or before.dtype != now.dtype or before.shape[1:] != now.shape[1:]:
        return changed_R
    common = min(len(now), len(before))
    step = max(1, _COMPARE_BYTES // max(1, row_bytes(now)))
    for at in range(0, common, step):
        until = min(at + step, common)
        changed_R[at:until] = torch.from_numpy((_bits(now[at:until]) != _bits(before[at:until])).any(1))
    return changed_R


def _bits(rows: Tensor) -> np.ndarray:
    """The rows (R, ...) as unsigned integers (R, width), so that NaN equals NaN."""
    width = row_bytes(rows)
    unit = next(unit for unit in (8, 4, 2, 1) if width % unit == 0)
    return rows.contiguous().reshape(-1).view(torch.uint8).numpy().reshape(len(rows), width).view(f"u{unit}")


def rows_to_write(changed_R: Tensor, tensor: Tensor) -> Tensor | range:
    """Numbers of the rows to write: the changed rows, int64, or all rows if these take less space than changed rows."""
    count = np.count_nonzero(changed_R.numpy())  # the sum of a tensor makes an int64 of each bool first
    write_all = count * (row_bytes(tensor) + 8) >= tensor.nbytes and count > 0
    return range(len(tensor)) if write_all else changed_R.nonzero()[:, 0]


# ---- files


def _without_shared_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors made contiguous and without shared memory, as safetensors requires.

    Two fields of a state may be the same tensor.
    """
    separate: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.contiguous()
        storage = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if tensor.storage_offset() or storage in storages else tensor
        storages.add(storage)
    return separate
