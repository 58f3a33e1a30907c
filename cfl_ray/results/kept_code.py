"""The copy of the user's code in a run directory, and its use in place of present files that were edited or are gone.

`user_code/` has the user's files in folders of their names, an index with the path that each was copied from, and the
cells of a notebook that define parts of the run, which are a record only. Runs of a study share the copies by hard
links, so each run directory is complete.
"""

import difflib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from cfl_ray.config import Experiment
from cfl_ray.config.study import Study
from cfl_ray.errors import ConfigError, DataError, command, counted, some_of
from cfl_ray.plugins.kept import INDEX, kept_root
from cfl_ray.results.user_code import files_of, typed_sources
from cfl_ray.run_directory import RunDirectory
from cfl_ray.system import files
from cfl_ray.system.files import private_folder, read_json, read_text, write_json, write_text

Code = Literal["run", "now"]  # which version of code that has changed: the copy of the run, or the present files
_TYPED = "notebook"  # folder of the cells of a notebook
_FORMER = "former~"  # begins the names of folders of former copies
_LINES, _WIDTH = 8, 100  # of the differences of a file that a message shows
_DIGITS = 12  # of a digest in a message

Warn = Callable[[str], None]


@dataclass(frozen=True)
class CodeChange:
    """A kept file whose present version differs."""

    name: str  # in the copy
    present: Path  # the present file, which may be gone
    before: str
    now: str | None  # text; None: the file is gone

    def __str__(self) -> str:
        if self.now is None:
            return f"{self.present} is not here"
        return f"{self.present} was edited:\n{shown_difference(self.before, self.now)}"


@dataclass(frozen=True)
class KeptCode:
    """The copy of the user's files in a run directory."""

    folder: Path
    present: Mapping[str, Path]  # the present path of each file, by its name in the copy
    digests: Mapping[str, str]

    def changes(self) -> list[CodeChange]:
        """The files whose present version differs from the copy."""
        found = []
        for name, path in self.present.items():
            now = path.read_bytes() if path.is_file() else None
            if now is None or sha256(now).hexdigest() != self.digests[name]:
                before = (self.folder / name).read_text(errors="replace")
                found.append(CodeChange(name, path, before, None if now is None else now.decode(errors="replace")))
        return found

    def references(self, of: Iterable[str]) -> dict[str, str]:
        """file.py:Name in the copy, by those of the present files."""
        copies = {path: self.folder / name for name, path in self.present.items()}
        named = {text: text.rpartition(":") for text in of}
        places = {text: copies.get(Path(os.path.abspath(file))) for text, (file, _, _) in named.items()}
        places |= {text: copies.get(Path(file).resolve()) for text, (file, _, _) in named.items() if not places[text]}
        return {text: f"{place}:{named[text][2]}" for text, place in places.items() if place is not None}

    def check(self) -> None:
        """Raises DataError for a copy that is damaged or was edited."""
        for name, digest in self.digests.items():
            file = self.folder / name
            if not file.is_file() or (found := files.sha256(file)) != digest:
                what = f"has sha256 {found[:_DIGITS]}, expected {digest[:_DIGITS]}" if file.is_file() else "is missing"
                raise DataError(
                    f"{file}, the run's copy of {self.present[name]}, {what}: restore it, or use --code now"
                )


def keep_code(experiment: Experiment, run_dir: Path, study: Path | None = None) -> bool:
    """Copies the user's files of an experiment into its run directory; False if they are there.

    If a resumed run goes on with edited files, the former copy is kept in `former~1` and so on: the copy is of the code
    that made the present models. study: the folder of its study, whose runs share the copies.
    """
    target = RunDirectory(run_dir).user_code
    kept = kept_code(run_dir)
    if kept is not None:
        if not kept.changes() or any(_is_kept(text) for text in experiment.references):
            return False
        _set_aside(target)
    entries = {}
    for name, file in _names_of(files_of(experiment)).items():
        origin, content = _origin_of(file), file.read_bytes()
        entries[name] = {"file": str(origin), "sha256": sha256(content).hexdigest()}
        _write_shared(target / name, content, study and RunDirectory(study).user_code)
    typed = typed_sources(experiment)
    for qualified, text in typed.items():
        private_folder(target / _TYPED)
        write_text(target / _TYPED / f"{re.sub('[^A-Za-z0-9_.]+', '-', qualified)}.py", text)
    if entries or typed:
        private_folder(target)
        write_json(target / INDEX, {"run_directory": str(run_dir), "files": entries})
    return bool(entries or typed)


def _set_aside(folder: Path) -> None:
    """Moves the content of a copy into a folder in it."""
    names = [path.name for path in folder.iterdir() if not path.name.startswith(_FORMER)]
    number = sum(path.name.startswith(_FORMER) for path in folder.iterdir()) + 1
    (former := folder / f"{_FORMER}{number}").mkdir(mode=0o700)
    for name in names:
        (folder / name).rename(former / name)


def copy_kept(source: Path, target: Path) -> None:
    """Copies the kept code of a run into the directory of a run that goes on from it."""
    if RunDirectory(source).user_code.is_dir():
        shutil.copytree(RunDirectory(source).user_code, RunDirectory(target).user_code)


def kept_code(run_dir: Path) -> KeptCode | None:
    """The copy of the user's files in a run directory; None if it has none, as in runs of earlier versions."""
    folder = RunDirectory(run_dir).user_code
    values = read_json(folder / INDEX)
    entries = values.get("files") if values is not None else None
    if not entries:
        return None
    try:
        digests = {str(name): str(entry["sha256"]) for name, entry in entries.items()}
        origins = {str(name): Path(entry["file"]) for name, entry in entries.items()}
        recorded = Path(str(values["run_directory"]))  # type: ignore[index]
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(f"{folder / INDEX} is not valid: restore it, or remove {folder}") from error
    for name in digests:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise DataError(f"{folder / INDEX} names {name!r}, which is not in {folder}")
    present = {name: _present(origin, recorded, run_dir) for name, origin in origins.items()}
    return KeptCode(folder.absolute(), present, digests)


def kept_names(run_dir: Path) -> list[str]:
    """The files of a run's copy with their digests, for the signature of the run."""
    folder = RunDirectory(run_dir).user_code
    kept = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".so") and path.is_file())
    return [f"the code in {file.relative_to(run_dir)} ({files.sha256(file)[:_DIGITS]})" for file in kept]


def check_choice(code: str | None) -> None:
    """Raises ConfigError for another choice than run and now."""
    if code not in (None, "run", "now"):
        raise ConfigError(f"code must be 'run' (the copy in the run directory) or 'now' (present files), got {code!r}")


def with_code_of(run_dir: Path, experiment: Experiment, code: str | None, warn: Warn) -> Experiment:
    """The experiment of a run, with the run's copy in place of files that were edited or are gone.

    code: "run" takes the copy, "now" the present files; None: the copy, if the run has one. A difference is a warning.
    """
    check_choice(code)
    kept = kept_code(run_dir)
    if kept is None or any(_is_kept(text) for text in experiment.references):  # a study has chosen the code
        if code == "run" and kept is None and experiment.references:
            raise ConfigError(f"--code run: {run_dir} has no copy of its code; a run of an earlier version keeps none")
        return experiment
    if not (changes := kept.changes()):
        return experiment
    said = "\n".join(map(str, changes))
    if code == "now":
        warn(f"the code of {run_dir} has changed since it began, and the present files are used (--code now): {said}")
        return experiment
    kept.check()
    references = kept.references(experiment.references)
    if references:
        warn(f"the code of {run_dir} has changed since it began, and its copy in {kept.folder} is used: {said}")
    return experiment.with_code(references)


def with_code_of_record(file: Path, experiment: Experiment, code: str | None, warn: Warn) -> Experiment:
    """An experiment read from `file`; if that is the record of a run, with the run's copy of files that are gone.

    code: "run" takes the copy of all files; None: the copy of all if one is gone, else the present files, which a new
    run of the record may well have edited.
    """
    check_choice(code)
    run = RunDirectory(file.absolute().parent)
    if file.name != run.config.name or not run.is_run or (kept := kept_code(run.path)) is None:
        return experiment
    changes = kept.changes()
    if code == "run" or (code is None and any(change.now is None for change in changes)):
        return with_code_of(run.path, experiment, code, warn)
    if changes and code is None:
        warn(
            f"{file} is the record of a run whose code has changed since; this run uses the present files, and with "
            f"--code run the copy of that run: " + "\n".join(map(str, changes))
        )
    return experiment


def with_code_of_study(root: Path, runs: Sequence[Path], study: Study, code: str | None, warn: Warn) -> Study:
    """A study with the code that its runs so far have run, in place of files that were edited or are gone.

    runs: directories of its runs that have saved rounds. code: as in `with_code_of`. Raises ConfigError if runs to
    come would mix two versions in a table and no choice was made.
    """
    check_choice(code)
    versions = {run: kept for run in runs if (kept := kept_code(run)) is not None}
    found: dict[Path, dict[str, tuple[Path, KeptCode, str]]] = {}  # present file -> digest -> where
    for run, kept in versions.items():
        for name, path in kept.present.items():
            found.setdefault(path, {}).setdefault(kept.digests[name], (run, kept, name))
    changes = {change.present: change for kept in versions.values() for change in kept.changes()}
    two = next((path for path, of_digest in found.items() if len(of_digest) > 1), None)
    said = "\n".join(map(str, changes.values()))
    edited = [text for run in runs if run not in versions for text in _edited_since(run, study)]
    if edited and code != "now":
        raise ConfigError(
            f"{edited[0]} was edited since {root} began, and the runs so far, of an earlier version of cfl_ray, have "
            "kept no copy: restore the file, or run what is left with the present one (--code now)"
        )
    if code == "now":
        if changes or two is not None or edited:
            warn(f"{_mixed(root, two)}; the runs to come run the present files (--code now): {said}")
        return study
    if two is not None:
        raise ConfigError(
            f"{_mixed(root, two)}, in {' and in '.join(str(run) for run, _, _ in found[two].values())}: move the runs "
            "of one version away, or run what is left with the present files (--code now)"
        )
    if not changes:
        return study
    references: dict[str, str] = {}
    for kept in versions.values():
        kept.check()
        references = kept.references(study.references) | references
    warn(f"the code of {root} has changed since its first runs, whose copy the others run, too: {said}")
    return study.with_code(references)


def _edited_since(run: Path, study: Study) -> list[str]:
    """The files named by a study whose digests are not those that a run without a copy has recorded."""
    recorded = _recorded_digests(run)
    named = {Path(text.rpartition(":")[0]) for text in study.references}
    found = {"/".join(file.parts[-2:]): file for file in named if file.is_file()}
    return [str(file) for name, file in found.items() if recorded.get(name) not in (None, files.sha256(file))]


def _recorded_digests(run: Path) -> dict[str, Any]:
    """The digests of the user's files on record, by folder and name of the file; empty without a record."""
    code = (read_json(RunDirectory(run).environment) or {}).get("code")
    return code if isinstance(code, dict) else {}


def _mixed(root: Path, file: Path | None) -> str:
    name = "the user's code" if file is None else str(file)
    return f"the runs of {root} are of two versions of {name}, and its tables mix both"


def versions_in_words(runs: Iterable[Path]) -> list[str]:
    """A line for each of the user's files of which runs have run several versions; empty without any."""
    found: dict[str, dict[str, list[Path]]] = {}
    for run in runs:
        for name, digest in _recorded_digests(run).items():
            found.setdefault(name, {}).setdefault(str(digest), []).append(run)
    return [
        f"these runs have run {len(versions)} versions of {name}: "
        + "; ".join(f"{digest[:_DIGITS]} in {some_of(runs)}" for digest, runs in versions.items())
        + f"; see {command('diff', *(runs[0] for runs in list(versions.values())[:2]))}"
        for name, versions in found.items()
        if len(versions) > 1
    ]


def shown_difference(before: str, now: str, lines: int = _LINES) -> str:
    """The lines that differ between two texts, the first of them if there are many."""
    every = difflib.unified_diff(before.splitlines(), now.splitlines(), n=0, lineterm="")
    changed = [line for line in every if not line.startswith(("---", "+++"))]
    text = [line if len(line) <= _WIDTH else f"{line[:_WIDTH]}..." for line in changed[:lines]]
    more = [f"... {counted(len(changed) - lines, 'more line')}"] if len(changed) > lines else []
    return "\n".join(f"  {line}" for line in (text or ["(white space at the ends of lines)"]) + more)


def _names_of(found: Sequence[Path]) -> dict[str, Path]:
    """A name in the copy for each file: its path from the highest folder that has such files, with that folder's."""
    folders = {file.parent for file in found}
    tops = [folder for folder in sorted(folders) if not folders & {*folder.parents}]
    names: dict[Path, str] = {}
    for top in tops:
        plain = top.name or "root"
        count = sum(name.partition("~")[0] == plain for name in names.values())
        names[top] = f"{plain}~{count + 1}" if count else plain
    return {
        (PurePosixPath(names[top]) / file.relative_to(top)).as_posix(): file
        for file in found
        for top in tops
        if file.is_relative_to(top)
    }


def _origin_of(file: Path) -> Path:
    """The user's file of which a file is the copy in another run; a present file itself."""
    root = kept_root(file)
    if root is None:
        return file
    entry: Any = json.loads(read_text(root / INDEX) or "{}").get("files", {}).get(file.relative_to(root).as_posix(), {})
    return Path(str(entry.get("file", file)))


def _is_kept(reference: str) -> bool:
    return kept_root(Path(reference.rpartition(":")[0]).absolute()) is not None


def _present(origin: Path, recorded: Path, run_dir: Path) -> Path:
    """The present path of a file; if the run directory has moved with it, that beside its new place."""
    moved = Path(os.path.normpath(run_dir.absolute() / os.path.relpath(origin, recorded)))
    return moved if not origin.is_file() and moved.is_file() else origin


def _write_shared(target: Path, content: bytes, store: Path | None) -> None:
    """Writes a file, as a hard link to the copy that runs of a study share, where the file system has links."""
    private_folder(target.parent)
    if store is not None:
        shared = store / f"{sha256(content).hexdigest()}.py"
        with suppress(OSError):
            private_folder(store)
            if not shared.is_file():
                files.write_bytes(shared, content)
            os.link(shared, target)
            return
    files.write_bytes(target, content)
