"""The environment of a run, in environment.json: values outside the config that its results depend on.

It is not in the config hash, because it is known only after hosts have started, and may differ between runs of an
experiment. A resumed run keeps its engine, and warns of other changes.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from cfl_ray.config import Experiment, RuntimeConfig
from cfl_ray.data.federation import Federation
from cfl_ray.engine.choice import EngineChoice
from cfl_ray.errors import DataError
from cfl_ray.results.user_code import code_of, edited_files
from cfl_ray.run_directory import RunDirectory
from cfl_ray.system import cpu
from cfl_ray.system.files import read_json, read_record, write_json

_TITLES = {
    "engine": "engine (runtime.engine)",
    "device": "device",
    "instructions": "CPU instruction set",
    "torch": "PyTorch",
    "one_by_one": "chunks of one client (runtime.clients_per_host)",
    "has_deadline": "time limit (runtime.round_deadline)",
}


@dataclass(frozen=True)
class Environment:
    """Engine, device, and other values that results depend on. Different values of hosts are joined by " and "."""

    engine: str  # a name, not auto
    device: str  # of the hosts
    instructions: str  # of the hosts' CPUs, as PyTorch uses them
    torch: str  # version
    one_by_one: bool  # whether a chunk of work is one client, which changes the order of sums
    has_deadline: bool  # whether slow clients are excluded
    engine_reason: str = ""  # why this engine was chosen, a line; empty: not known
    data: str = ""  # digest of the federation (`Federation.content`); empty: not known
    code: dict[str, str] = field(default_factory=dict)  # digests of the user's files (`code_of`)
    # by label, with `evaluation.confusion`, so that its readers need no data; empty: the data have no names
    class_names: list[str] = field(default_factory=list)
    last_batch: int = 0  # of `EngineChoice`

    @property
    def choice(self) -> EngineChoice:
        """The choice of the engine."""
        return EngineChoice(self.engine, self.engine_reason, self.last_batch)

    def with_inputs(self, experiment: Experiment, federation: Federation) -> "Environment":
        """This environment with the data and the code of an experiment whose parts are loaded."""
        names = list(federation.shape.class_names) if experiment.evaluation.confusion else []
        return replace(self, data=federation.content, code=code_of(experiment), class_names=names)

    def check_data(self, federation: Federation, run_dir: Path) -> None:
        """Raises DataError if a run began with other data than this federation. run_dir: of the run."""
        if self.data and self.data != (now := federation.content):
            raise DataError(
                f"the data of {run_dir} have changed since the run began (digest {self.data[:12]} then, {now[:12]} "
                "now): restore the data, or begin a new run; the recorded metrics can be read without them"
            )

    def edited_code(self, experiment: Experiment) -> list[str]:
        """The user's files that were edited since a run of the experiment began in this environment."""
        return edited_files(self.code, code_of(experiment))

    def changes(self, now: "Environment") -> list[str]:
        """A line for each change from this environment to `now`."""
        before, after = asdict(self), asdict(now)
        edited = [
            f"{file} was edited since this run began: its results may be of both versions of the code"
            for file in edited_files(self.code, now.code)
        ]
        return edited + [
            f"this run began with {title} {_in_words(before[name])} and continues with {_in_words(after[name])}: "
            "its results can differ from those of an undisturbed run"
            for name, title in _TITLES.items()
            if before[name] != after[name]
        ]


@dataclass(frozen=True)
class HostEnvironment:
    """The environment of a process."""

    cpu: str  # model
    instructions: str
    torch: str

    @classmethod
    def here(cls) -> "HostEnvironment":
        return cls(cpu.model(), cpu.instruction_set(), torch.__version__)

    def __str__(self) -> str:
        return f"{self.cpu}, {self.instructions}"


def described(
    runtime: RuntimeConfig, choice: EngineChoice, device: str, hosts: Iterable[HostEnvironment], place: str
) -> tuple[dict[str, str], Environment]:
    """(description of a session for the user, its environment). place: number of hosts and nodes, as text."""
    hosts = list(hosts)
    cpus, instructions, versions = (
        " and ".join(sorted(values))
        for values in (set(map(str, hosts)), {host.instructions for host in hosts}, {host.torch for host in hosts})
    )
    one_by_one, has_deadline = bool(runtime.clients_per_host), runtime.round_deadline is not None
    environment = Environment(choice.engine, device, instructions, versions, one_by_one, has_deadline, choice.reason)
    environment = replace(environment, last_batch=choice.last_batch)
    return {"hosts": place, "device": device, "engine": choice.reason, "cpu": cpus, "torch": versions}, environment


def read_environment(run_dir: Path | None) -> Environment | None:
    """The environment at the start of a run; None if it is not known."""
    if run_dir is None:
        return None
    try:
        return read_record(RunDirectory(run_dir).environment, Environment)
    except (DataError, OSError):
        return None


def write_environment(run_dir: Path, environment: Environment) -> None:
    """Writes the environment at the start of a run."""
    values = asdict(environment)
    for name in ("class_names", "last_batch"):
        if not values[name]:
            values.pop(name)
    write_json(RunDirectory(run_dir).environment, values)


def add_fallbacks(run_dir: Path, label: str, reasons: Iterable[str]) -> None:
    """Records, once each, the reasons why the chosen engine did not train all clients of a method."""
    file = RunDirectory(run_dir).environment
    values = read_json(file) or {}
    of_method = values.get("fallbacks", {})
    known = of_method.get(label, [])
    if new := [reason for reason in reasons if reason not in known]:
        write_json(file, values | {"fallbacks": of_method | {label: [*known, *new]}})


def _in_words(value: object) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
