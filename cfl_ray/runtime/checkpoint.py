"""Checkpoints: written whole or not at all, verified on load, tensors in safetensors and the rest in JSON. Loading executes nothing.

    checkpoints/000012.json               after round 12: the JSON values, shapes of the tensors, and the entry files needed, oldest first
    checkpoints/000031-0.safetensors      entries (`entries.py`): what changed since the checkpoint before

A save costs what changed since the one before, in time and in space, and never what there is: rows of state tensors are compared (not
where a tensor is the one saved last), the backend knows what clients own anew. Now and then a segment takes in earlier ones, so that a
checkpoint needs files for at most twice what is alive, and O(log) of them; an entry is written again O(log) times in all.

Measured per save, writing everything in brackets: 480 of 4,800 signatures of 8,192 floats change: 16 MB, with merges 30 (157); 1,000 of
100,000 clients with 1,000 floats each: 4.0 MB and 0.03 s, with merges 6.8 MB and 0.08 s (402 MB and 4.4 s); at most 26 files in 500 rounds.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cfl_ray.core.disk import sync
from cfl_ray.core.errors import RunError
from cfl_ray.core.work import Memory, OwnedKey
from cfl_ray.runtime.entries import Damaged, EntryFile, EntryWriter, as_rows, changed_rows, cost, filled, gone_in, joining, opened, owned_in, rows_in, said, writing
from cfl_ray.runtime.manifest import FORMAT, Manifest, Shape


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after `round`."""

    round: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]  # JSON
    folder: Path = field(repr=False)
    files: tuple[EntryFile, ...] = field(repr=False)
    refused: tuple[str, ...] = ()  # newer ones that could not be used, and why

    def memory(self) -> Iterator[tuple[OwnedKey, Tensor]]:
        """Everything that clients own, one at a time."""
        over: set[OwnedKey] = set()  # what later files say
        for file in reversed(self.files):
            with opened(self.folder, file) as entries:
                for key, value in owned_in(entries):
                    if key not in over:
                        over.add(key)
                        yield key, value.clone()  # else it would map the file, which may be removed
                over |= gone_in(entries)


class CheckpointStore:
    """The checkpoints of one method of one run."""

    def __init__(self, directory: Path, config_hash: str, keep_last: int = 3):
        self.directory, self.config_hash, self.keep_last = Path(directory), config_hash, keep_last
        self.folder = self.directory / "checkpoints"
        self.files: list[EntryFile] = []  # of the newest checkpoint
        self.largest_owned = 0
        self._saved: dict[str, tuple[Tensor, int]] = {}  # the state as it was saved last, and how often each had been written to
        self._kept: dict[int, list[EntryFile]] = {}  # by round
        self._used = False  # something was loaded or saved

    def rounds(self) -> list[int]:
        """Rounds that have a checkpoint, oldest first."""
        names = [entry.name for entry in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted({int(name.removesuffix(".json")) for name in names if re.fullmatch(r"[0-9]{1,15}(\.json)?", name)})

    # ---- saving

    def save(self, round: int, tensors: dict[str, Tensor], values: dict[str, Any], memory: Memory) -> str | None:
        """Saves the state after `round`, and what clients own anew. Tensors that were saved before must not have been changed in place.

        Where files that the checkpoint would build on are gone or altered, it saves everything anew and returns why. Raises RunError,
        and leaves nothing behind, where something cannot be written; the checkpoints before stay good.
        """
        if self._used and not self.directory.is_dir():
            raise RunError(f"{self.directory} is gone, so nothing more can be saved")
        try:
            for file in self.files:
                file.check(self.folder, content=False)
            self._save(round, tensors, values, memory, everything=False)
        except Damaged as error:
            self.files, self._saved = [], {}
            self._save(round, tensors, values, memory, everything=True)
            return f"everything was saved anew, for earlier checkpoints are damaged: {error}"

    def _save(self, round: int, tensors: dict[str, Tensor], values: dict[str, Any], memory: Memory, everything: bool) -> None:
        target = self.folder / f"{round:06d}.json"
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            writer = EntryWriter(self.folder, self._next_segment())
        try:
            files = self._write(writer, {name: as_rows(tensor) for name, tensor in tensors.items()}, memory, everything)
            shapes = {name: Shape.of(tensor) for name, tensor in tensors.items()}
            about = {"format": FORMAT, "round": round, "config_hash": self.config_hash, "method": self.directory.name}
            Manifest(**about, files=files, tensors=shapes, largest_owned=self.largest_owned, values=values).write(target)
            with writing(target):
                sync(self.folder)
        except BaseException:
            writer.abandon()
            raise
        self._adopt(round, tensors, files)
        self._discard(round)

    def _write(self, writer: EntryWriter, tensors: dict[str, Tensor], memory: Memory, everything: bool) -> list[EntryFile]:
        """Writes what changed, and what is alive of the segments that are joined with it. Returns the files that are needed now."""
        gone, new = set(memory.forgotten()), set()
        for key, value in memory.changed(everything):
            writer.own(key, value)
            new.add(key)
            self.largest_owned = max(self.largest_owned, value.nbytes)
        changed = {name: self._changed(name, tensor) for name, tensor in tensors.items()}
        ended = len(gone) * self.largest_owned + sum(max(0, old.nbytes - _bytes(tensors.get(name))) for name, (old, _) in self._saved.items())
        rows = sum(cost(tensors[name], filled(changed_R, tensors[name])) for name, changed_R in changed.items())
        stay, joined = self._divided(writer.bytes + rows + 2 * ended)
        for file in reversed(joined):
            file.check(self.folder)
            with opened(self.folder, file) as entries:
                for name, row_R, _ in rows_in(entries):
                    if name in tensors:
                        changed[name][row_R[row_R < len(tensors[name])]] = True
                for key, value in owned_in(entries):
                    if key not in new and key not in gone:
                        new.add(key)
                        writer.own(key, value)
                gone |= gone_in(entries)
        for name, changed_R in changed.items():
            writer.rows(name, tensors[name], filled(changed_R, tensors[name]))
        ended += sum(file.ended for file in joined)
        return stay + writer.close(gone - new if stay else (), ended if stay else 0)

    def _changed(self, name: str, tensor: Tensor) -> Tensor:
        old, version = self._saved.get(name, (None, 0))
        if old is not None and _same_memory(old, tensor) and old._version == version:
            return torch.zeros(len(tensor), dtype=torch.bool)
        written = old is not None and old._version != version  # in place, against the rule: what it was is lost
        return changed_rows(tensor, None if written else old)

    def _divided(self, new: int) -> tuple[list[EntryFile], list[EntryFile]]:
        """The files that stay, and those that a segment of weight `new` takes in."""
        weights: dict[int, int] = {}
        for file in self.files:
            weights[file.segment] = weights.get(file.segment, 0) + file.weight
        joined = set(list(weights)[len(weights) - joining(list(weights.values()), new) :])
        return [file for file in self.files if file.segment not in joined], [file for file in self.files if file.segment in joined]

    def _next_segment(self) -> int:
        return 1 + max((int(found[1]) for path in self.folder.iterdir() if (found := re.match(r"(\d{1,15})-", path.name))), default=0)

    def _adopt(self, round: int, tensors: dict[str, Tensor], files: list[EntryFile]) -> None:
        self.files, self._used = files, True
        self._saved = {name: (as_rows(tensor), tensor._version) for name, tensor in tensors.items()}
        self._kept[round] = files

    def _discard(self, round: int) -> None:
        """Removes all up to `round` but the last good checkpoints and what they need, and what killed processes left."""
        self._kept = {kept: self._kept[kept] for kept in sorted(self._kept)[-self.keep_last :]}
        needed = {file.name for files in self._kept.values() for file in files}
        for path in self.folder.iterdir():
            entries = re.fullmatch(r"\d+-\d+\.safetensors", path.name) and path.name not in needed
            old = re.fullmatch(r"\d+\.json", path.name) and int(path.stem) <= round and int(path.stem) not in self._kept
            if entries or old or path.name.startswith("."):
                try:
                    path.unlink()
                except OSError:  # it takes room and does no harm
                    continue

    # ---- loading

    def load(self) -> Checkpoint | None:
        """The newest good checkpoint, None where there is none at all. Raises RunError when there are some and none is good."""
        refused = []
        for round in reversed(self.rounds()):
            try:
                return self._load(round, tuple(refused))
            except (RunError, OSError, ValueError, TypeError, IndexError, RuntimeError, MemoryError, OverflowError) as error:
                refused.append(f"checkpoint of round {round}: {said(error)}")
        if refused:
            raise RunError(f"no checkpoint in {self.folder} can be used: " + "; ".join(refused))
        return None

    def _load(self, round: int, refused: tuple[str, ...]) -> Checkpoint:
        meta = self._manifest(round)
        for file in meta.files:
            file.check(self.folder)
        tensors = meta.state(self.folder)
        self.largest_owned = meta.largest_owned
        self._kept = {}
        for other in self.rounds():
            if other < round:
                try:
                    self._kept[other] = self._manifest(other).files
                except (RunError, OSError):  # a damaged one cannot be used, so nothing needs keeping for it
                    continue
        self._adopt(round, tensors, meta.files)
        return Checkpoint(round, tensors, meta.values, self.folder, tuple(meta.files), refused)

    def _manifest(self, round: int) -> Manifest:
        return Manifest.read(self.folder / f"{round:06d}.json", config_hash=self.config_hash, method=self.directory.name, round=round)


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return (one.data_ptr(), one.shape, one.stride(), one.dtype) == (other.data_ptr(), other.shape, other.stride(), other.dtype)


def _bytes(tensor: Tensor | None) -> int:
    return tensor.nbytes if tensor is not None else 0
