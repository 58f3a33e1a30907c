"""Segment files: what changed between two checkpoints, as safetensors. A later file overrides an earlier one.

    values/NAME/CHUNK (R, ...) and rows/NAME/CHUNK    rows of a state tensor, and their numbers; one number
                                                      stands for a block of rows that starts there
    states/NAME/CHUNK (R, ...) and clients/NAME/CHUNK  client states of a name, and their clients
    metadata "gone"                                   JSON: [name, client] of client states dropped since;
                                                      never of states in the segment itself

Files are named SEGMENT-PART.safetensors: a checkpoint writes at most one segment, and no number is used twice.
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

from cfl_ray.core.work import ClientStateKey, SavedState
from cfl_ray.errors import RunError
from cfl_ray.system.files import open_private, sha256, sync

FILE_BYTES = 128 << 20  # a file is closed when it has grown to this; twice that is in memory meanwhile
ENTRY_BYTES = 128  # size of an entry beside its values: its name and place in the header
FAN_OUT = 16  # segments of a similar size that are merged into one
_COMPARE_BYTES = 4 << 20  # rows are compared in blocks of this size


class Damaged(RunError):
    """A file that a checkpoint needs is missing, or its content is not what was written."""


class EntryFile(BaseModel):
    """A file that a checkpoint needs, as its manifest lists it."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")
    name: str = Field(pattern=r"^\d{6,15}-\d{1,9}\.safetensors$")
    sha256: str
    bytes: int = Field(ge=0)
    ended: int = Field(ge=0)  # bytes in earlier files of tensors and client states dropped with this one

    @property
    def segment(self) -> int:
        """The number of its segment."""
        return int(self.name.partition("-")[0])

    @property
    def weight(self) -> int:
        """Size for the purpose of merging; what ended counts double, so that merging gives its room back."""
        return self.bytes + 2 * self.ended

    def check(self, folder: Path, content: bool = True) -> None:
        """Raises Damaged unless the file has its size and, with `content`, its checksum."""
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
    """The entries of the file, for reading by name. Raises Damaged where they cannot be read."""
    try:
        with safe_open(folder / file.name, "pt") as entries:
            yield entries
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{folder / file.name} cannot be read: {system_reason(error)}") from error


def client_states_in(entries: Any) -> Iterator[tuple[ClientStateKey, SavedState]]:
    """The client states of the file."""
    names: list[str] = entries.keys()
    for entry in names:
        if entry.startswith("states/"):
            chunk = entry.removeprefix("states/")
            name = chunk.rpartition("/")[0]
            clients = entries.get_tensor(f"clients/{chunk}").tolist()
            rows_RF = entries.get_tensor(entry)
            if len(rows_RF) != len(clients):
                raise Damaged(f"{entry} has {len(rows_RF)} values for {len(clients)} clients")
            for row, client in enumerate(clients):
                yield (name, client), SavedState(rows_RF, row)


def dropped_in(entries: Any) -> set[ClientStateKey]:
    """Client states of earlier files that were dropped since."""
    return {(name, client) for name, client in json.loads((entries.metadata() or {}).get("gone", "[]"))}


def rows_in(entries: Any) -> Iterator[tuple[str, Tensor, str]]:
    """Rows of state tensors: name of the tensor, int64 row numbers, and the name of the entry with their values."""
    names: list[str] = entries.keys()
    for entry in names:
        if entry.startswith("values/"):
            chunk = entry.removeprefix("values/")
            row_R, count = entries.get_tensor(f"rows/{chunk}"), entries.get_slice(entry).get_shape()[0]
            is_block = len(row_R) != count
            yield chunk.rpartition("/")[0], row_R[0] + torch.arange(count) if is_block else row_R, entry


# ---- writing


class EntryWriter:
    """Writes one segment. Raises RunError, with the file and the reason, where it cannot."""

    def __init__(self, folder: Path, segment: int):
        self.folder, self.segment = folder, segment
        self.files: list[EntryFile] = []
        self.bytes = 0  # of all entries so far
        self._begun: list[Path] = []
        self._batch: dict[str, Tensor] = {}  # entries of the next file
        # clients and values of the next file, by (name, shape, type): one entry holds all that have these in common
        self._states: dict[tuple[str, torch.Size, torch.dtype], tuple[list[int], list[Tensor]]] = {}
        self._size = 0  # bytes of both

    def add_client_state(self, key: ClientStateKey, value: Tensor) -> None:
        """Thousands of client states share an entry: one entry each would take ten times as long as their bytes."""
        name, client = key
        clients, values = self._states.setdefault((name, value.shape, value.dtype), ([], []))
        clients.append(client)
        values.append(value)
        self._grow(value.nbytes + 8)

    def add_rows(self, name: str, tensor: Tensor, row_R: Tensor) -> None:
        """The rows `row_R` (ascending) of a state tensor."""
        most = max(1, FILE_BYTES // max(1, row_bytes(tensor)))
        for chunk, at in enumerate(range(0, len(row_R), most)):
            row_r = row_R[at : at + most]
            first, last = int(row_r[0]), int(row_r[-1])
            is_block = last - first + 1 == len(row_r)
            values = tensor[first : last + 1] if is_block else tensor[row_r]
            self._batch |= {f"rows/{name}/{chunk}": row_r[:1] if is_block else row_r, f"values/{name}/{chunk}": values}
            self._grow(values.nbytes + 2 * ENTRY_BYTES)

    def close(self, dropped: Iterable[ClientStateKey], ended: int) -> list[EntryFile]:
        """The files of this segment, oldest first; none where there is nothing to write. ended: as in `EntryFile`."""
        dropped = sorted(dropped)
        if self._size or dropped or ended:
            self._write({"gone": json.dumps(dropped)}, ended)
        return self.files

    def abandon(self) -> None:
        """Removes the files written so far."""
        for file in self._begun:
            with suppress(OSError):  # the caller reports why writing failed, which says more
                file.unlink()

    def _grow(self, size: int) -> None:
        self._size, self.bytes = self._size + size, self.bytes + size
        if self._size >= FILE_BYTES:
            self._write({"gone": "[]"}, 0)

    def _write(self, metadata: dict[str, str], ended: int) -> None:
        file = self.folder / f"{self.segment:06d}-{len(self.files)}.safetensors"
        self._begun.append(file)
        for chunk, ((name, *_), (clients, values)) in enumerate(self._states.items()):
            self._batch[f"clients/{name}/{chunk}"] = torch.tensor(clients)
            self._batch[f"states/{name}/{chunk}"] = torch.stack(values)
        with writing(file):
            open_private(file, "wb").close()  # safetensors keeps the permissions of a file that exists
            save_file(_without_shared_memory(self._batch), file, metadata)
            sync(file)
            self.files.append(EntryFile(name=file.name, sha256=sha256(file), bytes=file.stat().st_size, ended=ended))
        self._batch, self._states, self._size = {}, {}, 0


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Raises RunError with the file and the system's reason where it cannot be written."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise RunError(f"{file} could not be written: {system_reason(error)}") from error


def system_reason(error: Exception) -> str:
    """The operating system's text for the error, or the first line of its own."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]


def segments_to_merge(weights: list[int], new: int) -> int:
    """How many of the newest segments (weights oldest to newest) are merged into a new one of weight `new`.

    All of them, when those after the oldest weigh as much as it: files then hold at most twice what is alive, since
    what ended weighs double. Otherwise FAN_OUT of a similar size or smaller, repeatedly: at most FAN_OUT - 1 remain for
    each power of FAN_OUT.
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
    """Bytes of one row, 0 for a tensor without rows."""
    return tensor[:1].nbytes if len(tensor) else 0


def cost(tensor: Tensor, row_R: Tensor) -> int:
    """Bytes that writing these rows takes, at least."""
    return len(row_R) * row_bytes(tensor) + 2 * ENTRY_BYTES if len(row_R) else 0


def changed_rows(now: Tensor, before: Tensor | None) -> Tensor:
    """Bool (R,): rows whose bits differ from `before`; all of them where that is None or of another shape or type."""
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


def rows_to_write(changed_R: Tensor, tensor: Tensor) -> Tensor:
    """int64: the rows to write when these changed; all of them where naming the changed ones costs more."""
    write_all = int(changed_R.sum()) * (row_bytes(tensor) + 8) >= tensor.nbytes and bool(changed_R.any())
    return torch.arange(len(tensor)) if write_all else changed_R.nonzero()[:, 0]


# ---- files


def _without_shared_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors that share no memory, as safetensors requires: two fields of a state may be one tensor."""
    apart: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.contiguous()
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if tensor.storage_offset() or storage in storages else tensor
        storages.add(storage)
    return apart
