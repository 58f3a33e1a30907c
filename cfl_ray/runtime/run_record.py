"""The config.yaml of a run directory, which makes the folder a run. Its first line is the config hash."""

from pathlib import Path

from cfl_ray import config
from cfl_ray.config import Experiment
from cfl_ray.config.paths import recorded_in
from cfl_ray.errors import ConfigError
from cfl_ray.results.trust import sign_record
from cfl_ray.run_directory import RunDirectory
from cfl_ray.run_directory.directory import FORMAT
from cfl_ray.security.credentials import remember_credentials
from cfl_ray.system.files import read_text, write_text

_HASH = "# config hash "


def write_config(directory: Path, experiment: Experiment, run_dir: Path | None = None) -> None:
    """Writes config.yaml, without credentials. run_dir: where the directory will be moved; None: nowhere."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # the mode of `output`, a parent, follows the umask
    remember_credentials(experiment.to_dict())
    header = f"{_HASH}{experiment.config_hash}\n# format {FORMAT}\n{recorded_in(run_dir or directory)}"
    text = header + experiment.to_record()
    sign_record(directory, experiment, text)
    write_text(RunDirectory(directory).config, text)


def recorded_hash(directory: RunDirectory) -> str:
    """The config hash of a run directory, which also covers objects made in Python that config.yaml cannot hold."""
    first = (read_text(directory.config) or "").partition("\n")[0]
    return first.removeprefix(_HASH) if first.startswith(_HASH) else config.load(directory.config).config_hash


def check_hash_of_cell(directory: RunDirectory, experiment: Experiment) -> None:
    """Raises ConfigError where the config.yaml of a cell is that of another experiment."""
    if (hash := recorded_hash(directory)) == experiment.config_hash:
        return
    rounds = config.load(directory.config).rounds
    shorter = rounds < experiment.rounds and experiment.model_copy(update={"rounds": rounds}).config_hash == hash
    extend = f", where its runs can begin with the {rounds} rounds that are here (--extend)" if shorter else ""
    raise ConfigError(
        f"{directory.path} belongs to another config (hash {hash}, the study has {experiment.config_hash}); "
        f"move it away, or choose another folder for the study{extend}"
    )
