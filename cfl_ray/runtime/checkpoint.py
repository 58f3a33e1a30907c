"""Checkpoints: written whole or not at all, verified on load, tensors in safetensors and the rest in JSON.

    checkpoints/000012/state.safetensors, meta.json     everything the server knows after round 12
    memory/000012-0.safetensors                         what clients own, those that changed since the last checkpoint

A checkpoint lists the memory files it needs, later ones overriding earlier ones; files that no kept checkpoint lists are removed.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cfl_ray.core.errors import RunError

FORMAT = 1
_MEMORY_FILE_BYTES = 256 << 20  # a memory file is closed when it has grown to this
Key = tuple[str, int]  # (name, client) of something that a client owns


@dataclass(frozen=True)
class Checkpoint:
    """What was saved after `round`."""

    round: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]  # JSON
    memory_files: list[Path] = field(repr=False, default_factory=list)
    owner: dict[Key, str] = field(repr=False, default_factory=dict)  # the file that holds the current value of a key

    def memory(self) -> Iterator[tuple[Key, Tensor]]:
        """Everything that clients own, one at a time."""
        for file in self.memory_files:
            with safe_open(file, "pt") as entries:
                for key in entries.keys():
                    if self.owner.get(_key(key)) == file.name:
                        yield _key(key), entries.get_tensor(key)


class CheckpointStore:
    """The checkpoints of one method of one run."""

    def __init__(self, directory: Path, config_hash: str, keep_last: int = 3):
        self.directory, self.config_hash, self.keep_last = Path(directory), config_hash, keep_last
        self.memory_files: list[str] = []
        self.owner: dict[Key, str] = {}  # the file that holds the current value of a key
        self.entries: dict[str, int] = {}  # keys written to each file
        self.digests: dict[str, str] = {}  # sha256 of each file

    def rounds(self) -> list[int]:
        """Rounds that have a checkpoint, oldest first."""
        folder = self.directory / "checkpoints"
        return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()) if folder.is_dir() else []

    def save(self, round: int, tensors: dict[str, Tensor], values: dict[str, Any], changed: Iterable[tuple[Key, Tensor]], owned: Iterable[Key]) -> None:
        """Saves the state after `round`, and what `changed` of all that clients own (`owned`) since the last save."""
        self._write_memory(round, changed)
        for key in self.owner.keys() - set(owned):
            del self.owner[key]
        target = self.directory / "checkpoints" / f"{round:06d}"
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        save_file(_apart(tensors), scratch / "state.safetensors")
        meta = {
            "format": FORMAT,
            "round": round,
            "config_hash": self.config_hash,
            "values": values,
            "state_sha256": _sha256(scratch / "state.safetensors"),
            "memory": {name: self.digests[name] for name in self.memory_files},
            "live": sorted([name, client] for name, client in self.owner),
        }
        meta["meta_sha256"] = _meta_hash(meta)
        (scratch / "meta.json").write_text(json.dumps(meta))
        _sync(scratch)
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)
        _sync_folder(target.parent)
        self._discard_old()

    def load(self) -> Checkpoint | None:
        """The newest good checkpoint, None where there is none at all. Raises RunError when there are some and none is good."""
        reasons = []
        for round in reversed(self.rounds()):
            try:
                return self._load(round)
            except (RunError, OSError, SafetensorError, KeyError, ValueError) as error:
                reasons.append(f"round {round}: {error}")
        if reasons:
            raise RunError(f"no checkpoint in {self.directory / 'checkpoints'} can be used: " + "; ".join(reasons))
        return None

    def _load(self, round: int) -> Checkpoint:
        folder = self.directory / "checkpoints" / f"{round:06d}"
        meta = json.loads((folder / "meta.json").read_text())
        if meta.pop("meta_sha256", None) != _meta_hash(meta):
            raise RunError(f"{folder / 'meta.json'} was altered")
        if meta["format"] != FORMAT:
            raise RunError(f"{folder} has format {meta['format']}, this version reads {FORMAT}")
        if meta["config_hash"] != self.config_hash:
            raise RunError(f"{folder} belongs to config {meta['config_hash']}, not {self.config_hash}")
        if (found := _sha256(folder / "state.safetensors")) != meta["state_sha256"]:
            raise RunError(f"{folder / 'state.safetensors'} has sha256 {found[:12]}, expected {meta['state_sha256'][:12]}")
        for name, digest in meta["memory"].items():
            if not (self.directory / "memory" / Path(name).name).is_file():
                raise RunError(f"memory file {name} is missing")
            if (found := _sha256(self.directory / "memory" / Path(name).name)) != digest:
                raise RunError(f"memory file {name} has sha256 {found[:12]}, expected {digest[:12]}")
        with safe_open(folder / "state.safetensors", "pt") as entries:
            tensors = {name: entries.get_tensor(name) for name in entries.keys()}
        self._adopt(meta)
        return Checkpoint(round, tensors, meta["values"], [self.directory / "memory" / name for name in self.memory_files], dict(self.owner))

    def _adopt(self, meta: dict[str, Any]) -> None:
        live = {(name, client) for name, client in meta["live"]}
        self.memory_files, self.owner, self.entries, self.digests = list(meta["memory"]), {}, {}, dict(meta["memory"])
        for file in self.memory_files:
            with safe_open(self.directory / "memory" / file, "pt") as entries:
                keys = [_key(text) for text in entries.keys()]
            self.entries[file] = len(keys)
            self.owner.update({key: file for key in keys if key in live})

    # ---- what clients own

    def _write_memory(self, round: int, changed: Iterable[tuple[Key, Tensor]]) -> None:
        batch: dict[Key, Tensor] = {}
        part = size = 0
        for key, value in changed:
            batch[key] = value
            size += value.nbytes
            if size >= _MEMORY_FILE_BYTES:
                self._write_file(f"{round:06d}-{part}.safetensors", batch)
                batch, part, size = {}, part + 1, 0
        if batch:
            self._write_file(f"{round:06d}-{part}.safetensors", batch)
        if sum(self.entries.values()) > 2 * len(self.owner) + 64:
            self._compact(round)

    def _write_file(self, name: str, batch: dict[Key, Tensor]) -> None:
        folder = self.directory / "memory"
        folder.mkdir(parents=True, exist_ok=True)
        scratch = folder / f".{name}.{os.getpid()}"
        save_file({f"{key[0]}/{key[1]}": value.contiguous().clone() for key, value in batch.items()}, scratch)
        _sync_file(scratch)
        scratch.rename(folder / name)
        self.memory_files = [file for file in self.memory_files if file != name] + [name]
        self.entries[name], self.digests[name] = len(batch), _sha256(folder / name)
        self.owner.update({key: name for key in batch})

    def _compact(self, round: int) -> None:
        """Rewrites the values in use into new files, so that the space follows what clients own and not how often it changed."""
        old = list(self.memory_files)
        self.memory_files, self.entries, batch, part, size = [], {}, {}, 0, 0
        for file in old:
            with safe_open(self.directory / "memory" / file, "pt") as entries:
                for key, owner in list(self.owner.items()):
                    if owner == file:
                        batch[key] = entries.get_tensor(f"{key[0]}/{key[1]}")
                        size += batch[key].nbytes
            if size >= _MEMORY_FILE_BYTES:
                self._write_file(f"{round:06d}-c{part}.safetensors", batch)
                batch, part, size = {}, part + 1, 0
        if batch:
            self._write_file(f"{round:06d}-c{part}.safetensors", batch)

    def _discard_old(self) -> None:
        """Keeps the last checkpoints and what they need."""
        for round in self.rounds()[: -self.keep_last]:
            shutil.rmtree(self.directory / "checkpoints" / f"{round:06d}", ignore_errors=True)
        needed = set(self.memory_files)
        for round in self.rounds():
            try:
                needed |= set(json.loads((self.directory / "checkpoints" / f"{round:06d}" / "meta.json").read_text())["memory"])
            except (OSError, ValueError, KeyError):  # a damaged one cannot be used, so nothing needs keeping for it
                continue
        for file in (self.directory / "memory").glob("*.safetensors"):
            if file.name not in needed:
                file.unlink(missing_ok=True)


def _key(text: str) -> Key:
    name, _, client = text.rpartition("/")
    return name, int(client)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors that share no memory, as safetensors wants them: two fields of a state may be one tensor."""
    apart, storages = {}, set()
    for name, tensor in tensors.items():
        tensor = tensor.contiguous()
        storage = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if tensor.storage_offset() or storage in storages else tensor
        storages.add(storage)
    return apart


def _meta_hash(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    for file in folder.iterdir():
        _sync_file(file)
    _sync_folder(folder)


def _sync_file(file: Path) -> None:
    with open(file, "rb") as stream:
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
