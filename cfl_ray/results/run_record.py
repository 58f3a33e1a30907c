"""The config.yaml of a run directory, which makes the folder a run. Its first line is the config hash."""

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from cfl_ray import config
from cfl_ray.config import Experiment
from cfl_ray.config.data import NOT_IN_RECIPE
from cfl_ray.config.experiment import NOT_HASHED
from cfl_ray.config.part import keys_of, present_names
from cfl_ray.config.paths import recorded_in
from cfl_ray.config.unused import not_default, unused_keys
from cfl_ray.errors import ConfigError, DataError, command, counted, some_of
from cfl_ray.errors.redaction import redact
from cfl_ray.results.trust import record_text, sign_record
from cfl_ray.run_directory import RunDirectory
from cfl_ray.run_directory.directory import FORMAT
from cfl_ray.security.credentials import remember_credentials
from cfl_ray.system.files import read_text, write_text
from cfl_ray.tracking import flatten, read_info
from cfl_ray.tracking.record import NEUTRAL, OFF

_HASH = "# config hash "
_OBJECTS = "# has objects made in Python\n"
_LISTED, _SHOWN = 3, 60  # keys that a message names, letters of a value
_DIGITS = 12  # of a checksum


def write_config(directory: Path, experiment: Experiment, run_dir: Path | None = None) -> None:
    """Writes config.yaml, without credentials. run_dir: the path after a later move; None: it stays."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # the mode of `output`, a parent, follows the umask
    remember_credentials(experiment.to_dict())
    header = f"{_HASH}{experiment.config_hash}\n# format {FORMAT}\n{recorded_in(run_dir or directory)}"
    text = header + (_OBJECTS if experiment.has_objects else "") + experiment.to_record()
    sign_record(directory, experiment, text)
    write_text(RunDirectory(directory).config, text)


def recorded_hash(directory: RunDirectory) -> str:
    """The config hash of a run directory, which also covers objects made in Python that config.yaml cannot express."""
    first = record_text(directory.path).partition("\n")[0]
    return first.removeprefix(_HASH) if first.startswith(_HASH) else config.load(directory.config).config_hash


def how_to_resume(directory: RunDirectory, in_process: bool = False, in_python: bool = False) -> str:
    """The command that continues a run; the call if it was started in Python, or has objects made in Python."""
    has_objects = _OBJECTS in (read_text(directory.config) or "")
    if not (has_objects or in_python):
        return command("resume", directory.path, *(["--in-process"] if in_process else []))
    arguments = [repr(str(directory.path)), *["experiment=..."] * has_objects, *["on_ray=False"] * in_process]
    return f"cfl_ray.resume({', '.join(arguments)})"


def stored_hash(directory: RunDirectory, experiment: Experiment) -> str:
    """The config hash with which checkpoints are stored: the recorded hash, which an earlier version may have made."""
    return recorded_hash(directory) if directory.is_run else experiment.config_hash


def rounds_at_start(directory: RunDirectory, now: Experiment) -> int:
    """The number of rounds that a run began with. now: its config.yaml, which may have been edited."""
    try:
        return int(read_info(directory.path).params["rounds"])
    except (DataError, KeyError, ValueError):  # killed before run.json was written
        return now.rounds


def differences(directory: RunDirectory, now: Experiment) -> str:
    """The keys in which an experiment differs from the experiment that the run began with, in words."""
    different = _changed(directory, now) or ["parts made in Python or the content of a file"]
    return some_of(different, _LISTED)


def content_params(experiment: Experiment) -> dict[str, str]:
    """The parameters `content.KEY` of a run: checksums of the files whose content the config hash covers."""
    return {f"content.{key}": digest[:_DIGITS] for key, digest in experiment.contents.items()}


def params_of(experiment: Experiment) -> dict[str, str]:
    """The keys that have an effect on a run, for comparisons of runs; all keys are in its config.yaml.

    Left out are keys without effect (`unused_keys`), values that turn something off (`OFF`, and defaults in `NEUTRAL`),
    the section tracking, places of data and results, and of evaluation and runtime the keys that have their defaults.
    `content.KEY` is a checksum of the file that KEY names.
    """
    values, defaults = flatten(experiment.to_dict()), default_params()
    of_data = {f"data.{key}" for key in (*NOT_IN_RECIPE, *experiment.data.later_defaults)}
    without = {"name", "output", *of_data, *unused_keys(experiment)}
    return {
        key: value
        for key, value in values.items()
        if value not in OFF
        and (value not in NEUTRAL or value != defaults.get(key, value))
        and key not in without
        and not key.startswith("tracking.")
        and not (key.startswith(("evaluation.", "runtime.")) and value == defaults.get(key))
    } | content_params(experiment)


@cache
def default_params() -> Mapping[str, str]:
    """The default of every key."""
    return flatten(Experiment().to_dict())


def _changed(directory: RunDirectory, now: Experiment) -> list[str]:
    """The keys that differ, with both values, and `content.KEY` for a file whose content differs.

    run.json has the values at the start, also if config.yaml was edited.
    """
    there: Mapping[str, str]
    try:
        present = present_names(Experiment)  # of keys with another name in an earlier version
        there = {present.get(key, key): value for key, value in read_info(directory.path).params.items()}
    except DataError:  # the run was killed before run.json was written
        there = flatten(config.load(directory.config).to_dict_as_written())
    defaults = default_params()
    contents = content_params(now)
    here, written = flatten(now.to_dict()) | contents, flatten(now.to_dict_as_written()) | contents
    known = {".".join(path) for path, _ in keys_of(Experiment)}  # those that are not in `here` belong to other kinds
    unused, off, places = unused_keys(now), OFF | NEUTRAL, [f"data.{key}" for key in NOT_IN_RECIPE]
    given = not_default(now, unused)
    later = {f"data.{key}" for key in now.data.later_defaults}  # which run.json lacks

    def is_compared(key: str) -> bool:
        if key.partition(".")[0] in {*NOT_HASHED, "session"} or key in places or (key not in here and key in known):
            return False
        if key.startswith("content."):
            return key in here and key in there  # a file that is missing has an error of its own
        if key in there or key in later:
            return key in there
        return key in given if key in unused else here[key] not in off  # run.json lacks keys without effect

    keys = [key for key in sorted({*there, *here}) if is_compared(key)]
    before = {key: there.get(key, defaults.get(key, "null")) for key in keys}
    after = {key: redact(here.get(key, "null")) for key in keys}
    return [
        f"{key} ({_short(before[key], after[key])} there, {_short(after[key], before[key])} here)"
        for key in keys
        if before[key] not in (after[key], redact(written.get(key, "null")))
    ]


def _short(value: str, other: str) -> str:
    """A value; of a long one, the part around the place from which the other value differs."""
    if len(value) <= _SHOWN:
        return value
    start = max(len(os.path.commonprefix([value, other])) - _SHOWN // 2, 0)
    part = value[start : start + _SHOWN]
    return f"{'...' * (start > 0)}{part}{'...' * (start + _SHOWN < len(value))}"


def check_is_of_run(directory: RunDirectory, experiment: Experiment, key: str = "", advice: str = "") -> None:
    """Raises ConfigError if the run began with another experiment than this one.

    key, advice: how the message begins, with the argument that named the run, and how it ends.
    """
    if recorded_hash(directory) != experiment.config_hash:
        differing = differences(directory, experiment)
        raise ConfigError(f"{key}{directory.path} belongs to another config: {differing}{advice}")


def check_not_edited(directory: RunDirectory, experiment: Experiment) -> None:
    """Raises ConfigError if config.yaml, which is this experiment, or a file of it was edited after the run began."""
    if recorded_hash(directory) == experiment.config_hash or not (changed := _changed(directory, experiment)):
        return
    grown = changed[0].startswith("rounds (") and len(changed) == 1
    advice = (
        "undo the edit to go on; for more rounds: "
        + command("run", directory.config, f"rounds={experiment.rounds}", "--extend", directory.path)
        if grown
        else f"undo the edit to go on, or begin a new run with: {command('run', directory.config)}"
    )
    files = " or a file that it names" if any(key.startswith("content.") for key in changed) else ""
    raise ConfigError(
        f"{directory.config}{files} was edited after the run began: {differences(directory, experiment)}; a run keeps "
        f"the settings that it began with: {advice}"
    )


def check_hash_of_run(directory: RunDirectory, experiment: Experiment) -> None:
    """Raises ConfigError if the config.yaml of a run is that of another experiment."""
    if (hash := recorded_hash(directory)) == experiment.config_hash:
        return
    rounds = config.load(directory.config).rounds
    shorter = rounds < experiment.rounds and experiment.model_copy(update={"rounds": rounds}).config_hash == hash
    extend = f", whose runs can begin with the {counted(rounds, 'round')} in this folder (--extend)" if shorter else ""
    differing = differences(directory, experiment)
    label = ", or give the changed method a label of its own" * differing.startswith("methods (")
    raise ConfigError(
        f"{directory.path} belongs to another config: {differing}; "
        f"move it away, or choose another folder for the study{extend}{label}"
    )
