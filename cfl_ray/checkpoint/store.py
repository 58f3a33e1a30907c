"""Checkpoints: complete or absent, verified when read; tensors in safetensors, the rest in JSON. Loading runs no code.

    checkpoints/000012.json               after round 12: the JSON values, shapes of the tensors, and the segment
                                          files needed, oldest first
    checkpoints/000031-0.safetensors      a segment (`segments.py`): the changes since the previous checkpoint
    checkpoints/000031-2.safetensors      client states of the segment, from the process that had the values

The time and space of a save depend on the changes since the previous checkpoint, not on the size of the state. Rows of
state tensors are compared, unless the tensor is the same object as before; the backend knows which client states
changed. From time to time a segment merges earlier segments, so that the files of a checkpoint hold at most twice the
bytes in use, and their number is O(log) of these bytes. An entry is rewritten O(log) times in all.

Measured per save, with the cost of writing everything in brackets. If 480 of 4,800 signatures of 8,192 floats change:
16 MB, with merges 30 MB (157 MB). If 1,000 of 100,000 clients with 1,000 floats each change: 4.0 MB and 0.03 s, with
merges 6.8 MB and 0.08 s (402 MB and 4.4 s). At most 26 files in 500 rounds.
"""

import math
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from cfl_ray.checkpoint.lease import Lease
from cfl_ray.checkpoint.manifest import FORMAT, CheckpointManifest, TensorShape
from cfl_ray.checkpoint.segments import (
    AlteredState,
    Damaged,
    EntryFile,
    EntryWriter,
    as_rows,
    changed_rows,
    client_states_in,
    cost,
    dropped_in,
    opened,
    rows_in,
    rows_to_write,
    segments_to_merge,
    system_reason,
    writing,
)
from cfl_ray.core.backend import ClientStateKey, ClientStateSource, SavedState
from cfl_ray.errors import RunError
from cfl_ray.run_directory import RunDirectory
from cfl_ray.system.files import drafted, private_folder, sync

# exceptions that reading a damaged checkpoint can raise
_DAMAGE = (RunError, OSError, ValueError, TypeError, IndexError, RuntimeError, MemoryError, OverflowError)

_READERS = 8  # threads that check files
_FAULT_SECONDS = 3600.0  # M, assumed mean time between faults
_Read = TypeVar("_Read")


@dataclass(frozen=True)
class Checkpoint:
    """The state and the client states after `round`."""

    round: int
    tensors: dict[str, Tensor]
    values: dict[str, Any]  # JSON
    folder: Path = field(repr=False)
    files: tuple[EntryFile, ...] = field(repr=False)
    refused: tuple[str, ...] = ()  # why newer checkpoints could not be used, a line each

    def client_states(self) -> Iterator[tuple[ClientStateKey, SavedState]]:
        """Yields the (name, client) and the values of every client state. Values are read from the file on access."""
        overridden: set[ClientStateKey] = set()  # client states that a later file stores or drops
        for file in reversed(self.files):
            with opened(self.folder, file) as entries:
                for key, value in client_states_in(entries, self.folder / file.name):
                    if key not in overridden:
                        overridden.add(key)
                        yield key, value
                overridden |= dropped_in(entries)


class CheckpointStore:
    """The checkpoints of a method of a run."""

    def __init__(self, directory: Path, config_hash: str, keep_last: int = 3):
        self.directory, self.config_hash, self.keep_last = Path(directory), config_hash, keep_last
        self.folder = RunDirectory(directory).checkpoints
        self.files: list[EntryFile] = []  # files of the newest checkpoint
        self.largest_client_state = 0  # bytes
        self._saved: dict[str, tuple[Tensor, int]] = {}  # last saved state tensors, with their version counters
        self._kept: dict[int, list[EntryFile]] = {}  # files of the checkpoints that are kept, by round
        self._used = False  # whether a checkpoint was loaded or saved
        self.lease = Lease(self.directory)
        self._least_segment = 0  # no other process uses segment numbers from this on

    def rounds(self) -> list[int]:
        """Rounds that have a checkpoint, ascending."""
        names = [entry.name for entry in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(int(name.removesuffix(".json")) for name in names if re.fullmatch(r"[0-9]{1,15}\.json", name))

    # ---- saving

    def take_lease(self) -> None:
        """Makes this store the only store that can save here; stores of other processes raise from now on.

        The first `save` calls it.
        """
        self.lease.take()
        # another process may still write the segment with the next number, but no later segment
        self._least_segment = self._next_segment() + 1 if self.folder.is_dir() and self.lease.epoch > 1 else 0

    def save(
        self,
        round: int,
        tensors: dict[str, Tensor],
        values: dict[str, Any],
        states: ClientStateSource,
        pinned: Collection[int] = (),
    ) -> str | None:
        """Saves the state after `round`, and the client states that changed. Saved tensors must not change in place.

        pinned: rounds whose checkpoints are kept, with the files that they need, in addition to the last `keep_last`.
        Returns None, or, if files of the previous checkpoint are missing or altered, a message: then the whole state
        was saved again. Raises RunError if a file cannot be written, or another process has taken the lease;
        then earlier checkpoints stay valid, and nothing of this one remains, or all if only the folder was not flushed.
        """
        if self._used and not self.directory.is_dir():
            raise RunError(f"{self.directory} is gone, so nothing more can be saved")
        if not self.lease.epoch:
            self.take_lease()
        self.lease.check()
        try:
            for file in self.files:
                file.check(self.folder, content=False)
            self._save(round, tensors, values, states, pinned, everything=False)
        except AlteredState:  # the run can neither use nor save this state
            raise
        except Damaged as error:
            # client states are memory-mapped: those of a removed file can still be read, not those of a shortened file
            for file in self.files:
                if file.has_states and (self.folder / file.name).exists():
                    file.check(self.folder, content=False)
            self.files, self._saved = [], {}
            self._save(round, tensors, values, states, pinned, everything=True)
            return f"everything was saved again, because earlier checkpoints are damaged: {error}"
        return None

    def _save(
        self,
        round: int,
        tensors: dict[str, Tensor],
        values: dict[str, Any],
        states: ClientStateSource,
        pinned: Collection[int],
        everything: bool,
    ) -> None:
        target = self.folder / f"{round:06d}.json"
        with writing(self.folder):
            private_folder(self.folder)
            writer = EntryWriter(self.folder, self._next_segment())
        self.lease.check()  # after the number was taken: a server that takes the lease from here on uses later numbers
        with ExitStack() as lock:
            try:
                rows = {name: as_rows(tensor) for name, tensor in tensors.items()}
                files = self._write_segment(writer, rows, states, everything)
                manifest = CheckpointManifest(
                    format=FORMAT,
                    round=round,
                    config_hash=self.config_hash,
                    method=self.directory.name,
                    files=files,
                    tensors={name: TensorShape.of(tensor) for name, tensor in tensors.items()},
                    largest_client_state=self.largest_client_state,
                    values=values,
                    pinned=sorted({*pinned} - {round}),
                )
                lock.enter_context(self.lease.held())
                manifest.write(target)
            except BaseException:
                writer.abandon()
                raise
            with writing(target):  # the checkpoint is complete: an interruption from here on must not remove its files
                sync(self.folder)
            self._adopt(round, tensors, files)
            for file in files:
                if file.segment == writer.segment:
                    with opened(self.folder, file) as entries:
                        states.move(dict(client_states_in(entries, self.folder / file.name)))
            self._discard(round, pinned)

    def _write_segment(
        self, writer: EntryWriter, tensors: dict[str, Tensor], states: ClientStateSource, everything: bool
    ) -> list[EntryFile]:
        """Writes the changes, and the entries in use of the segments that are merged. Returns all files needed now."""
        dropped, bytes_of = set(states.forgotten()), states.changed(everything)
        written = set(bytes_of)
        self.largest_client_state = max([self.largest_client_state, *bytes_of.values()])
        state_files: list[EntryFile] = states.write(writer.state_files(bytes_of))
        changed = {name: self._changed(name, tensor) for name, tensor in tensors.items()}
        sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
        shrunk = sum(max(0, old.nbytes - sizes.get(name, 0)) for name, (old, _) in self._saved.items())
        ended = len(dropped) * self.largest_client_state + shrunk
        rows = sum(cost(tensors[name], rows_to_write(changed_R, tensors[name])) for name, changed_R in changed.items())
        stay, merged = self._stay_and_merge(sum(file.bytes for file in state_files) + rows + 2 * ended)
        kept: dict[ClientStateKey, int] = {}  # bytes of the states of merged files that are in use
        for file in reversed(merged):  # newest first, so `written` and `dropped` have the entries of later files
            with opened(self.folder, file) as entries:
                if not file.has_states:  # client states are checked when they are read
                    file.check(self.folder)
                for name, row_R, _ in rows_in(entries):
                    if name in tensors:
                        changed[name][row_R[row_R < len(tensors[name])]] = True
                for key, saved in client_states_in(entries, self.folder / file.name):
                    if key not in written and key not in dropped:
                        written.add(key)
                        kept[key] = saved.nbytes
                dropped |= dropped_in(entries)
        state_files += states.write(writer.state_files(kept))
        for name, changed_R in changed.items():
            writer.add_rows(name, tensors[name], rows_to_write(changed_R, tensors[name]))
        ended += sum(file.ended for file in merged)
        return stay + state_files + writer.close(dropped - written if stay else (), ended if stay else 0)

    def _changed(self, name: str, tensor: Tensor) -> Tensor:
        """Bool (R,): rows of a state tensor that differ from the last saved tensor of this name."""
        old, version = self._saved.get(name, (None, 0))
        if old is None or old._version != version:  # a tensor that changed in place no longer has the saved values
            return changed_rows(tensor, None)
        if _layout(old) == _layout(tensor):
            return torch.zeros(len(tensor), dtype=torch.bool)
        return changed_rows(tensor, old)

    def _stay_and_merge(self, new: int) -> tuple[list[EntryFile], list[EntryFile]]:
        """The files that stay, and the files that are merged into a new segment of weight `new`."""
        weights: dict[int, int] = {}
        for file in self.files:
            weights[file.segment] = weights.get(file.segment, 0) + file.weight
        segments = list(weights)
        merged = set(segments[len(segments) - segments_to_merge(list(weights.values()), new) :])
        stay = [file for file in self.files if file.segment not in merged]
        return stay, [file for file in self.files if file.segment in merged]

    def _next_segment(self) -> int:
        matches = (re.match(r"(\d{1,15})-", path.name) for path in self.folder.iterdir())
        return max(self._least_segment, 1 + max((int(match[1]) for match in matches if match), default=0))

    def _adopt(self, round: int, tensors: dict[str, Tensor], files: list[EntryFile]) -> None:
        self.files, self._used = files, True
        self._saved = {name: (as_rows(tensor), tensor._version) for name, tensor in tensors.items()}
        self._kept[round] = files

    def _discard(self, round: int, pinned: Collection[int]) -> None:
        """Removes checkpoints up to `round` except the last `keep_last` and those that are pinned, files that these do
        not need, and drafts that killed processes left.
        """
        last = sorted(self._kept)[-self.keep_last :]
        self._kept = {kept: files for kept, files in self._kept.items() if kept in last or kept in pinned}
        needed = {file.name for files in self._kept.values() for file in files}
        for path in self.folder.iterdir():
            segment = re.match(r"\d+-\d+\.safetensors", path.name)
            unneeded = segment and segment[0] not in needed  # the file, or the mark that a state in it was altered
            old = re.fullmatch(r"\d+\.json", path.name) and int(path.stem) <= round and int(path.stem) not in self._kept
            if unneeded or old or path.name.startswith("."):
                with suppress(OSError):  # a file that stays takes space but does no harm
                    path.unlink()

    def not_needed(self) -> list[Path]:
        """The files that neither the newest checkpoint nor those that it pins need.

        None if one of these is damaged, so that another may be needed.
        """
        if not (rounds := self.rounds()):
            return []
        needed = set()
        try:
            for round in [rounds[-1], *self._manifest(rounds[-1]).pinned]:
                needed.add(f"{round:06d}.json")
                for file in self._manifest(round).files:
                    if file.name not in needed:
                        file.check(self.folder, states=True)
                        needed.add(file.name)
        except _DAMAGE:
            return []
        parts = {path: re.match(r"\d+(-\d+\.safetensors|\.json$)", path.name) for path in self.folder.iterdir()}
        return sorted(path for path, part in parts.items() if part and part[0] not in needed)

    # ---- loading

    def load(self) -> Checkpoint | None:
        """The newest usable checkpoint; None if there are no checkpoints. Raises RunError if none can be used."""
        return self.load_as(lambda checkpoint: checkpoint)

    def load_as(self, read: Callable[[Checkpoint], _Read], round: int | None = None) -> _Read | None:
        """The newest usable checkpoint, or that of a round, as `read` returns it; None if there are no checkpoints.

        read: raises RunError for a checkpoint whose content cannot be used; then the checkpoint before it is tried.
        Raises RunError if none can be used.
        """
        refused: list[str] = []
        for tried in reversed(self.rounds()) if round is None else [round]:
            try:
                return read(self._load(tried, tuple(refused)))
            except _DAMAGE as error:
                refused.append(f"checkpoint of round {tried}: {system_reason(error)}")
        if refused:
            raise RunError(f"no checkpoint in {self.folder} can be used: " + "; ".join(refused))
        return None

    def _load(self, round: int, refused: tuple[str, ...]) -> Checkpoint:
        manifest = self._manifest(round)
        self._kept = {}
        for other in self.rounds():
            if other < round:
                with suppress(RunError, OSError):  # a damaged checkpoint cannot be used, so its files are not kept
                    self._kept[other] = self._manifest(other).files
        before = {file for files in self._kept.values() for file in files}

        def check(file: EntryFile) -> None:
            # client states that only this checkpoint has are checked now: an earlier checkpoint can still be used
            file.check(self.folder, states=bool(before) and file not in before)

        with ThreadPoolExecutor(_READERS) as pool:
            list(pool.map(check, manifest.files))
        tensors = manifest.state(self.folder)
        self.largest_client_state = manifest.largest_client_state
        self._adopt(round, tensors, manifest.files)
        return Checkpoint(round, tensors, manifest.values, self.folder, tuple(manifest.files), refused)

    def copy_to(self, other: "CheckpointStore") -> int | None:
        """Copies the newest usable checkpoint, and those that it pins, to another run, which may have another config.

        Returns its round; None if there are no checkpoints. Raises RunError if none can be used or a file cannot be
        written.
        """
        if (checkpoint := self.load_as(_with_client_states)) is None:
            return None
        newest = self._manifest(checkpoint.round)
        manifests = [*map(self._manifest, newest.pinned), newest]
        with writing(other.folder):
            private_folder(other.folder)
            for file in {file.name: file for manifest in manifests for file in manifest.files}.values():
                if file not in newest.files:  # those have been read
                    file.check(self.folder, states=True)
                with drafted(other.folder / file.name) as draft:
                    shutil.copyfile(self.folder / file.name, draft)
                sync(other.folder / file.name)
            for manifest in manifests:  # the newest last: a copy that was interrupted has no checkpoint that lacks one
                moved = manifest.model_copy(update={"config_hash": other.config_hash, "method": other.directory.name})
                moved.write(other.folder / f"{manifest.round:06d}.json")
            sync(other.folder)
        return checkpoint.round

    def _manifest(self, round: int) -> CheckpointManifest:
        return CheckpointManifest.read(
            self.folder / f"{round:06d}.json", config_hash=self.config_hash, method=self.directory.name, round=round
        )


def _with_client_states(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, every client state of which has been read. Raises RunError if one was altered."""
    for _, saved in checkpoint.client_states():
        saved.tensor()
    return checkpoint


def _layout(tensor: Tensor) -> tuple[object, ...]:
    """Memory address, shape, strides and type."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


@dataclass
class CheckpointInterval:
    """The next checkpoint: after `every` rounds, or sqrt(2 C M) seconds after the last (J. Young, Communications of the
    ACM 17(9), 1974), which minimises the time for checkpoints plus the time lost by faults.

    C: the seconds that the last checkpoint took. M: one hour. If a checkpoint takes 3 ms, the next is due after 4.6 s;
    if it takes a minute, after 11 minutes. The first round is always saved, because C is not known before.
    """

    every: int | None = None  # runtime.checkpoint_every; None: by the time
    clock: Callable[[], float] = time.monotonic
    _due: float = -math.inf

    def is_due(self, round: int) -> bool:
        """Whether a checkpoint is due now, after this round."""
        return self.clock() >= self._due if self.every is None else round % self.every == 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Context that measures the time for saving a checkpoint and sets when the next is due."""
        began = self.clock()
        yield
        ended = self.clock()
        self._due = ended + math.sqrt(2 * (ended - began) * _FAULT_SECONDS)
