"""Trust in code: one rule for all commands (SECURITY.md).

The record of a run, config.yaml, names Python files, folders and URIs of data, the output folder and trackers, and may
name a Ray cluster and an MLflow server. Resuming the run imports the files, reads and writes the folders, unpickles
messages of the cluster, and sends the user's credentials to the servers. So a run signs all names in its record
(`signature.json`). Other names in a record, and every symbolic link in the directory, need the user's consent
(`--trust`).

Consent is asked for once: `trusted.json` in the user's folder keeps the names, and the digests of files, that the user
has trusted in each folder.

Code that a config names is the user's if its file is below the working directory, named on the command line, or of the
user's account.
"""

import os
import pwd
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cfl_ray import config
from cfl_ray.config import Experiment
from cfl_ray.config.paths import file_keys
from cfl_ray.config.reading import split_override
from cfl_ray.config.study import Study, load_study
from cfl_ray.config.tracking import TRACKERS
from cfl_ray.config.yaml_text import parse_yaml
from cfl_ray.errors import DataError
from cfl_ray.errors.redaction import redact
from cfl_ray.results.kept_code import kept_names
from cfl_ray.run_directory import RunDirectory, UntrustedError
from cfl_ray.system.files import private_folder, read_json, read_text, sha256_once, user_folder, write_json
from cfl_ray.system.nested import texts_of

_ROOT = 0
_PLACES = ("output", "data.shards", "data.train_files", "data.test_files", *map(".".join, file_keys(Experiment)))
_TRUSTED = "trusted.json"  # in the user's folder
_of_this_process: dict[str, dict[str, str]] = {}  # as in that file, if the folder cannot be written
_NAMED_ELSEWHERE = ("runtime.address", "tracking.uri")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def record_text(run_dir: Path) -> str:
    """The text of the record of a run. Raises DataError if it is empty."""
    text = read_text(RunDirectory(run_dir).config) or ""
    if not text.strip():
        raise DataError(f"{RunDirectory(run_dir).config} is empty, so it is not known what this run is; restore it")
    return text


def load_record(run_dir: Path, trust: bool = False, connects: bool = True) -> Experiment:
    """The experiment in the record of a run. Imports nothing.

    connects: whether the run's cluster and MLflow server will be used, in addition to its files.
    Raises UntrustedError, unless `trust`, for names in the record that this user did not sign on this machine, and
    DataError for an empty record, which would mean the experiment with all defaults.
    """
    record_text(run_dir)
    experiment = config.load(RunDirectory(run_dir).config)
    names = _code_in(experiment) + kept_names(run_dir)
    if connects:
        names += _servers_in(experiment, replaced=bool(os.environ.get("RAY_ADDRESS")))
        names += _places_in({"output": experiment.output} | _record(run_dir))
    _require(run_dir, names, RunDirectory.config.name, trust)
    return experiment


def load_study_record(folder: Path, trust: bool = False) -> Study:
    """The study in the record of its folder. Imports nothing. Raises UntrustedError as `load_record` does."""
    study = load_study(RunDirectory(folder).study)
    file = RunDirectory(folder).study
    values = parse_yaml(read_text(file) or "", str(file))
    _require(folder, _names_in(study) + _places_in(values), RunDirectory.study.name, trust)
    return study


def sign_record(run_dir: Path, experiment: Experiment, text: str | None = None) -> None:
    """Signs the names in the record of this user's run. text: the record; None: read from the directory."""
    places = _places_in({"output": experiment.output} | _record(run_dir, text))
    RunDirectory(run_dir).sign(_code_in(experiment) + kept_names(run_dir) + _servers_in(experiment) + places)


def sign_study(folder: Path, study: Study) -> None:
    """Signs the names in the record of this user's study."""
    RunDirectory(folder).sign(_names_in(study) + _places_in(parse_yaml(study.to_yaml(credentials=False), study.name)))


def check_config(
    file: str | None, config: Experiment | Study, overrides: Sequence[str] = (), trust: bool = False
) -> None:
    """Raises UntrustedError, unless `trust`, for code that a config names and that is not the user's.

    file: of the config, which may be the record of a run or a study; None: the built-in example.
    overrides: of the command line, whose files the user has named.
    """
    folder = Path(file or "").absolute().parent
    if file is not None and _is_record_of(folder, Path(file)):
        load_study_record(folder, trust) if isinstance(config, Study) else load_record(folder, trust)
        return
    values = config.to_dict() if isinstance(config, Experiment) else config.model_dump(mode="json", by_alias=True)
    own = {path for override in overrides for path in _files_in(split_override(override)[1])}
    named = [path for path in filter(Path.is_file, _files_in(values)) if path not in own and not _is_below_here(path)]
    known = _trusted(folder)
    for path in named:
        owner, name = path.stat().st_uid, f"the code in {path}"
        if owner not in (os.geteuid(), _ROOT) and name not in known and not trust:
            raise UntrustedError(
                f"{path} belongs to another user ({_user_name(owner)}), and this command imports it: look at it, and "
                "say --trust if you trust it"
            )
    if trust:
        _remember(folder, [f"the code in {path}" for path in named])


def _is_record_of(folder: Path, file: Path) -> bool:
    """Whether a file is the record of a run or of a study in its folder, not a copy of one elsewhere."""
    run = RunDirectory(folder)
    is_run = file.name == run.config.name and (run.info.is_file() or run.environment.is_file())
    return is_run or (file.name == run.study.name and run.study_lock.is_file())


def _is_below_here(file: Path) -> bool:
    try:
        return file.is_relative_to(Path.cwd().resolve())
    except FileNotFoundError:  # the working directory was removed
        return False


# ---- consent


def _require(folder: Path, names: Sequence[str], record: str, trust: bool) -> None:
    """Raises UntrustedError for names that are neither signed nor trusted; `trust` trusts them from now on."""
    directory = RunDirectory(folder)
    if trust:
        _remember(folder, [*names, *directory.links()])
    else:
        directory.require_signed(names, record, [*_of_environment(), *_trusted(folder)])


def _remember(folder: Path, names: Sequence[str]) -> None:
    """Keeps the names that the user trusts in a folder."""
    new = {name: _content_of(name) for name in names}
    trusted = _read_trusted()
    before = trusted.get(str(folder.resolve()), {})
    if new.items() <= before.items():
        return
    of_folder = {str(folder.resolve()): before | new}
    try:
        private_folder(user_folder())
        write_json(user_folder() / _TRUSTED, trusted | of_folder)
    except OSError:
        _of_this_process.update(of_folder)


def _trusted(folder: Path) -> list[str]:
    """The names that the user has trusted in a folder, without files whose content has changed since."""
    of_folder = _read_trusted().get(str(folder.resolve()), {})
    return [name for name, content in of_folder.items() if content == _content_of(name)]


def _read_trusted() -> dict[str, dict[str, str]]:
    try:
        values = read_json(user_folder() / _TRUSTED) or {}
    except DataError:
        values = {}
    return {folder: names for folder, names in values.items() if isinstance(names, dict)} | _of_this_process


def _content_of(name: str) -> str:
    """The digest of the file of `the code in FILE`; empty for other names and missing files."""
    file = Path(name.removeprefix("the code in "))
    return sha256_once(file) if file.is_absolute() and file.is_file() else ""


# ---- names in a record


def _code_in(experiment: Experiment) -> list[str]:
    values = experiment.to_dict()
    modules = dict.fromkeys(text for text in texts_of(values) if _MODULE.fullmatch(text) and _file_of(text) is None)
    return [f"the code in {part}" for part in (*_files_in(values), *modules)]


def _servers_in(experiment: Experiment, replaced: bool = False) -> list[str]:
    """The cluster and the MLflow server that the record names, without credentials.

    replaced: whether RAY_ADDRESS replaces the recorded cluster, which a resumed run then does not connect to.
    """
    uri = experiment.tracking.uri if experiment.tracking.uses_mlflow else None
    return _servers(None if replaced else experiment.runtime.address, uri)


def _record(run_dir: Path, text: str | None = None) -> dict[str, Any]:
    """The config of a run as written: if the directory has moved, with the paths before the move."""
    file = RunDirectory(run_dir).config
    values = parse_yaml((read_text(file) or "") if text is None else text, str(file))
    return values if isinstance(values, dict) else {}


def _places_in(values: Any, key: str = "") -> list[str]:
    """Folders, files and URIs in a config, and trackers that write elsewhere, each with its key."""
    if isinstance(values, dict):
        inner = [(f"{key}.{name}".lstrip("."), value) for name, value in values.items()]
        return [*_places_in(list(values), key), *(place for name, value in inner for place in _places_in(value, name))]
    if isinstance(values, list):
        return [place for value in values for place in _places_in(value, key)]
    if not isinstance(values, str) or _is(key, _NAMED_ELSEWHERE) or _file_of(values) is not None:
        return []
    if "/" in values or "\\" in values or values.startswith(("~", "..")) or _is(key, _PLACES):
        return [f"{key} {redact(values)}"]
    if not _is(key, ("tracking.trackers",)):
        return []
    return [] if values in TRACKERS.builtin and not TRACKERS.builtin[values].elsewhere else [f"{key} {values}"]


def _is(key: str, names: Sequence[str]) -> bool:
    """Whether a key, of an experiment or inside a study, is in `names`."""
    return any(f".{key}".endswith(f".{name}") for name in names)


def _of_environment() -> list[str]:
    """The cluster and the MLflow server in the user's environment variables."""
    return _servers(os.environ.get("RAY_ADDRESS"), os.environ.get("MLFLOW_TRACKING_URI"))


def _names_in(study: Study) -> list[str]:
    """Code and servers that any run of a study may name."""
    names = [f"the code in {file}" for file in _files_in(study.model_dump(mode="json", by_alias=True))]
    for values in (study.experiment, *study.settings.values()):
        sections = [values.get(name) for name in ("runtime", "tracking")]
        runtime, tracking = (section if isinstance(section, dict) else {} for section in sections)
        names += _servers(runtime.get("address"), tracking.get("uri"))
    for key, choices in (study.sweep.parameters if study.sweep is not None else {}).items():
        if key.partition(".")[0] in ("runtime", "tracking") and isinstance(choices, list):  # may hold servers
            names += [f"{key} {redact(str(choice))}" for choice in choices]
    return list(dict.fromkeys(names))


def _servers(address: Any, uri: Any) -> list[str]:
    cluster = [f"the Ray cluster {redact(str(address))}"] if address else []
    return cluster + ([f"MLflow at {redact(str(uri))}"] if uri else [])


def _files_in(values: Any) -> list[Path]:
    """The file of every value `FILE:Name` of the config, at any depth."""
    files = (_file_of(text) for text in texts_of(values))
    return list(dict.fromkeys(file for file in files if file is not None))


def _file_of(reference: str) -> Path | None:
    """The file of a value `FILE:Name`, which may be deleted: then the error says so, and trust is no question."""
    if ":" not in reference:
        return None
    path = Path(reference.rpartition(":")[0])
    try:
        return path.resolve() if path.suffix == ".py" or path.is_file() else None
    except (OSError, ValueError):  # not a valid file name
        return None


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
