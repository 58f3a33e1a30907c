"""Entry files: what changed between two checkpoints, as safetensors. A later file overrides an earlier one.

    values/NAME/PIECE (R, ...) and rows/NAME/PIECE    rows of a tensor of the state, and which; a single number: that row and those behind it
    owned/NAME/PIECE (R, ...) and clients/NAME/PIECE  what clients own under a name, and which clients
    metadata "gone"                                   JSON: [name, client] of what clients no longer own; never in the segment itself

Files are named SEGMENT-PART.safetensors: a checkpoint writes at most one segment, and no number is ever used again.
"""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cfl_ray.core.disk import sha256, sync
from cfl_ray.core.errors import RunError
from cfl_ray.core.work import OwnedKey

FILE_BYTES = 128 << 20  # a file is closed when it has grown to this; twice that is in memory meanwhile
ENTRY_BYTES = 128  # of an entry beside its values: its name and place in the header
FAN_OUT = 16  # segments of a similar size that are merged into one
_COMPARE_BYTES = 4 << 20  # of rows that are compared at a time


class Damaged(RunError):
    """A file that a checkpoint needs is gone, or is not what was written."""


class EntryFile(BaseModel):
    """What a checkpoint knows of a file that it needs."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    name: str = Field(pattern=r"^\d{6,15}-\d{1,9}\.safetensors$")
    sha256: str
    bytes: int = Field(ge=0)
    ended: int = Field(ge=0)  # bytes in earlier files of what is gone since

    @property
    def segment(self) -> int:
        return int(self.name.partition("-")[0])

    @property
    def weight(self) -> int:
        return self.bytes + 2 * self.ended

    def check(self, folder: Path, content: bool = True) -> None:
        """Raises Damaged unless the file is there with its size and, where asked for, its content."""
        file = folder / self.name
        try:
            size = file.stat().st_size
            found = sha256(file) if content and size == self.bytes else self.sha256
        except OSError as error:
            raise Damaged(f"{file} cannot be read: {error.strerror}") from error
        if size != self.bytes:
            raise Damaged(f"{file} has {size} bytes, expected {self.bytes}")
        if found != self.sha256:
            raise Damaged(f"{file} has sha256 {found[:12]}, expected {self.sha256[:12]}")


# ---- reading


@contextmanager
def opened(folder: Path, file: EntryFile) -> Iterator[Any]:
    """The file's entries, for reading by name. Raises Damaged where they cannot be read."""
    try:
        with safe_open(folder / file.name, "pt") as entries:
            yield entries
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{folder / file.name} cannot be read: {said(error)}") from error


def owned_in(entries: Any) -> Iterator[tuple[OwnedKey, Tensor]]:
    """What clients own; values may be views of the file."""
    for entry in entries.keys():
        if entry.startswith("owned/"):
            piece = entry.removeprefix("owned/")
            for client, value in zip(entries.get_tensor(f"clients/{piece}").tolist(), entries.get_tensor(entry), strict=True):
                yield (piece.rpartition("/")[0], client), value


def gone_in(entries: Any) -> set[OwnedKey]:
    """What clients no longer own of earlier files."""
    return {(name, client) for name, client in json.loads((entries.metadata() or {}).get("gone", "[]"))}


def rows_in(entries: Any) -> Iterator[tuple[str, Tensor, str]]:
    """Rows of the state: tensor, int64 row numbers, and the name of the entry with their values."""
    for entry in entries.keys():
        if entry.startswith("values/"):
            piece = entry.removeprefix("values/")
            row_R, shape = entries.get_tensor(f"rows/{piece}"), entries.get_slice(entry).get_shape()
            yield piece.rpartition("/")[0], row_R if len(row_R) == shape[0] else row_R[0] + torch.arange(shape[0]), entry


# ---- writing


class EntryWriter:
    """Writes one segment. Raises RunError, with the file and the reason, where it cannot."""

    def __init__(self, folder: Path, segment: int):
        self.folder, self.segment = folder, segment
        self.files: list[EntryFile] = []
        self.bytes = 0  # of all entries so far
        self._begun: list[Path] = []
        self._batch: dict[str, Tensor] = {}
        self._own: dict[tuple, tuple[list[int], list[Tensor]]] = {}  # clients and values, by all that these have in common
        self._size = 0  # of both

    def own(self, key: OwnedKey, value: Tensor) -> None:
        """A thing that a client owns. Thousands lie in one entry: an entry apiece would cost ten times the time of their bytes."""
        clients, values = self._own.setdefault((key[0], value.shape, value.dtype), ([], []))
        clients.append(key[1])
        values.append(value)
        self._grow(value.nbytes + 8)

    def rows(self, name: str, tensor: Tensor, row_R: Tensor) -> None:
        """These rows (ascending) of a tensor of the state."""
        most = max(1, FILE_BYTES // max(1, row_bytes(tensor)))
        for piece, at in enumerate(range(0, len(row_R), most)):
            row_r = row_R[at : at + most]
            first, last = int(row_r[0]), int(row_r[-1])
            block = last - first + 1 == len(row_r)
            values = tensor[first : last + 1] if block else tensor[row_r]
            self._batch |= {f"rows/{name}/{piece}": row_r[:1] if block else row_r, f"values/{name}/{piece}": values}
            self._grow(values.nbytes + 2 * ENTRY_BYTES)

    def close(self, gone: Iterable[OwnedKey], ended: int) -> list[EntryFile]:
        """The files of this segment in the order of a checkpoint, none where nothing is said. ended: as in EntryFile."""
        gone = sorted(gone)
        if self._size or gone or ended:
            self._write({"gone": json.dumps(gone)}, ended)
        return self.files

    def abandon(self) -> None:
        """Removes what was written."""
        for file in self._begun:
            with suppress(OSError):  # the reason why it cannot be written is the one to tell
                file.unlink()

    def _grow(self, size: int) -> None:
        self._size, self.bytes = self._size + size, self.bytes + size
        if self._size >= FILE_BYTES:
            self._write({"gone": "[]"}, 0)

    def _write(self, metadata: dict[str, str], ended: int) -> None:
        file = self.folder / f"{self.segment:06d}-{len(self.files)}.safetensors"
        self._begun.append(file)
        for piece, ((name, *_), (clients, values)) in enumerate(self._own.items()):
            self._batch |= {f"clients/{name}/{piece}": torch.tensor(clients), f"owned/{name}/{piece}": torch.stack(values)}
        with writing(file):
            save_file(_apart(self._batch), file, metadata)
            sync(file)
            self.files.append(EntryFile(name=file.name, sha256=sha256(file), bytes=file.stat().st_size, ended=ended))
        self._batch, self._own, self._size = {}, {}, 0


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Raises RunError with the file and the system's reason where it cannot be written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunError(f"{file} could not be written: {said(error)}") from error


def said(error: Exception) -> str:
    """The system's reason."""
    return (isinstance(error, OSError) and error.strerror) or (str(error).splitlines() or [type(error).__name__])[0]


def joining(weights: list[int], new: int) -> int:
    """How many of the newest segments (weights oldest to newest) a new one takes in.

    All of them, when those after the oldest weigh as much as it: so files hold at most twice what is alive, for what ended weighs double.
    Otherwise FAN_OUT of a similar size or smaller, and again: so there are at most FAN_OUT - 1 for each power of FAN_OUT.
    """
    if weights and sum(weights[1:]) + new >= weights[0]:
        return len(weights)
    taken = 0
    while (similar := _similar(weights[: len(weights) - taken], new)) >= FAN_OUT - 1:
        new += sum(weights[len(weights) - taken - similar : len(weights) - taken])
        taken += similar
    return taken


def _similar(weights: list[int], new: int) -> int:
    count = 0
    while count < len(weights) and _level(weights[-1 - count]) <= _level(new):
        count += 1
    return count


def _level(weight: int) -> int:
    level = 0
    while weight >= FAN_OUT:
        weight, level = weight // FAN_OUT, level + 1
    return level


# ---- rows of a tensor


def as_rows(tensor: Tensor) -> Tensor:
    """The tensor itself, or a single number as one row."""
    return tensor if tensor.dim() else tensor.reshape(1)


def row_bytes(tensor: Tensor) -> int:
    return tensor[:1].nbytes if len(tensor) else 0


def cost(tensor: Tensor, row_R: Tensor) -> int:
    """Bytes of an entry with these rows, at least."""
    return len(row_R) * row_bytes(tensor) + 2 * ENTRY_BYTES if len(row_R) else 0


def changed_rows(now: Tensor, before: Tensor | None) -> Tensor:
    """Bool (R,): rows whose bits are not those they had; all, where there were none of this shape and type."""
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
    """(R, ...) as unsigned integers, so that NaN equals itself."""
    width = row_bytes(rows)
    unit = next(unit for unit in (8, 4, 2, 1) if width % unit == 0)
    return rows.contiguous().reshape(-1).view(torch.uint8).numpy().reshape(len(rows), width).view(f"u{unit}")


def filled(changed_R: Tensor, tensor: Tensor) -> Tensor:
    """The rows to write, int64, when these changed: all, where naming them costs more than writing the others too."""
    whole = int(changed_R.sum()) * (row_bytes(tensor) + 8) >= tensor.nbytes and bool(changed_R.any())
    return torch.arange(len(tensor)) if whole else changed_R.nonzero()[:, 0]


# ---- files


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors that share no memory, as safetensors wants them: two fields of a state may be one tensor."""
    apart, storages = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.contiguous()
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if tensor.storage_offset() or storage in storages else tensor
        storages.add(storage)
    return apart
