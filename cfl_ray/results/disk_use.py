"""The disk space of runs and shards below a folder, and what of it can be dropped."""

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cfl_ray.checkpoint.store import CheckpointStore
from cfl_ray.data.shards import MANIFEST, ShardFederation
from cfl_ray.errors import ConfigError, UserError
from cfl_ray.results.environment import read_environment
from cfl_ray.results.run_record import recorded_hash
from cfl_ray.results.study_folder import is_finished
from cfl_ray.run_directory import RunDirectory
from cfl_ray.run_directory.lock import is_held

_CHECKPOINTS = RunDirectory.checkpoints.name.rstrip("/")
KINDS = ("records", "figures", _CHECKPOINTS, "models", "code", "shards")
_FIGURES = (".png", ".svg", ".pdf", ".html")  # of the artifacts; the others are records


@dataclass(frozen=True)
class DiskUse:
    """The bytes of a run, or of a folder of shards, by `KINDS`."""

    path: Path
    state: str  # of the run: finished, live or unfinished; of shards: needed or not needed
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Droppable:
    """Files and folders of one kind, of one run or federation, that can be dropped."""

    owner: Path
    what: str
    paths: tuple[Path, ...]

    @property
    def bytes(self) -> int:
        return sum(map(size_of, self.paths))

    def drop(self) -> None:
        """Removes them. Raises RunError if the run is live by now."""
        directory = RunDirectory(self.owner)
        if not directory.is_run:
            self._remove()
            return
        with directory.hold():
            self._remove()

    def _remove(self) -> None:
        for path in self.paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def disk_use(folder: Path) -> list[DiskUse]:
    """The disk space of the runs and the shards in and below a folder. Raises ConfigError if it has none."""
    runs, shards = _found(folder)
    needed = _needed(runs, shards, keep_models=True)
    found = [DiskUse(run, _state(run), _bytes_of(run)) for run in runs]
    found += [DiskUse(each, "needed" if each in needed else "not needed", {"shards": size_of(each)}) for each in shards]
    return found


def other_files(folder: Path, found: Sequence[DiskUse]) -> list[tuple[Path, int]]:
    """Files, and folders as a whole, below a folder that are of no run and no shards, with bytes, the largest first."""
    known = {use.path for use in found}
    within = {parent for path in known for parent in path.parents}

    def beside(place: Path) -> Iterator[Path]:
        for path in place.iterdir():
            if path in within and not path.is_symlink():
                yield from beside(path)
            elif path not in known:
                yield path

    place = folder.absolute()
    sizes = [] if place in known else [(path, size_of(path)) for path in beside(place)]
    return sorted(((path, size) for path, size in sizes if size), key=lambda each: -each[1])


def droppable(folder: Path, models: bool = False, figures: bool = False) -> list[Droppable]:
    """The files below a folder that no run needs: earlier checkpoints of finished runs, and shards of no run.

    models: also the last checkpoint and the logged models of finished runs, so that only their records are left. Runs
    that are live or not finished, and their shards, are left as they are. figures: also figures and reports of finished
    runs, of which `cfl-ray report` draws most again. Raises ConfigError without any run or shards.
    """
    runs, shards = _found(folder)
    found = []
    for run in filter(lambda run: _state(run) == "finished", runs):
        for directory in (RunDirectory(file.parent) for file in RunDirectory(run).of_methods(RunDirectory.info)):
            if models:
                kept = [path for path in (directory.checkpoints, directory.models) if path.is_dir()]
                found += [Droppable(run, f"models of {directory.path.name}", tuple(kept))] if kept else []
            elif earlier := CheckpointStore(directory.path, recorded_hash(RunDirectory(run))).not_needed():
                found.append(Droppable(run, f"earlier checkpoints of {directory.path.name}", tuple(earlier)))
        if figures and (drawn := _figures_of(run)):
            found.append(Droppable(run, "figures and reports", tuple(drawn)))
    needed = _needed(runs, shards, keep_models=not models)
    return found + [Droppable(each, "shards of no run here", (each,)) for each in shards if each not in needed]


def size_of(path: Path) -> int:
    """The bytes of a file, or of all files in a folder; a link counts as itself."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum(size_of(inner) for inner in path.iterdir())


def _found(folder: Path) -> tuple[list[Path], list[Path]]:
    """The runs, and the folders of shards, in and below a folder; links are not followed."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; name the folder of a run, of a study, or one above them")
    runs, shards = [], []
    for place, inner, names in os.walk(folder.absolute()):
        path = Path(place)
        if RunDirectory(path).is_run and (
            RunDirectory(path).info.is_file() or RunDirectory(path).environment.is_file()
        ):
            runs.append(path)
            inner.clear()
        elif MANIFEST in names:
            shards.append(path)
            inner.clear()
        inner.sort()
    if not runs and not shards:
        raise ConfigError(f"{folder} has no runs and no shards")
    return runs, shards


def _state(run: Path) -> str:
    if RunDirectory(run).is_live:
        return "live"
    methods = [file.parent for file in RunDirectory(run).of_methods(RunDirectory.info)]
    return "finished" if methods and all(map(is_finished, [run, *methods])) else "unfinished"


def _needed(runs: Sequence[Path], shards: Sequence[Path], keep_models: bool) -> set[Path]:
    """The shards that runs need: to go on, or to load models that are kept.

    All of them if the data of a run are not known, or if a run is starting.
    """
    digests, joined = set[str](), ""
    for run in runs:
        environment = read_environment(run)
        if environment is None or not environment.data:
            return {*shards}
        if keep_models or _state(run) != "finished":
            digests.add(environment.data)
            joined += "".join(file.read_text() for file in RunDirectory(run).of_methods(RunDirectory.events))
    if any(_starting(folder) for folder in {shard.parent.parent for shard in shards}):
        return {*shards}
    return {each for each in shards if _content_of(each) in (None, *digests) or str(each) in joined}


def _starting(folder: Path) -> bool:
    locks = folder.rglob(RunDirectory.start_lock.name)
    return any(is_held(lock) and not RunDirectory(lock.parent).is_run for lock in locks)


def _content_of(shards: Path) -> str | None:
    try:
        return ShardFederation(str(shards)).content
    except UserError:  # of another version, or damaged: not ours to judge
        return None


def _figures_of(run: Path) -> list[Path]:
    directory = RunDirectory(run)
    folders = [directory.artifacts, *directory.of_methods(RunDirectory.artifacts)]
    return sorted(path for folder in folders for path in folder.glob("*") if path.suffix in _FIGURES)


def _bytes_of(run: Path) -> dict[str, int]:
    directory = RunDirectory(run)
    by_kind = {
        "figures": sum(map(size_of, _figures_of(run))),
        _CHECKPOINTS: sum(map(size_of, directory.of_methods(RunDirectory.checkpoints))),
        "models": sum(map(size_of, directory.of_methods(RunDirectory.models))),
        "code": size_of(directory.user_code) if directory.user_code.is_dir() else 0,
    }
    return by_kind | {"records": size_of(run) - sum(by_kind.values())}
