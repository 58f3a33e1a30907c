"""What an experiment is: strict YAML in, the same YAML out.

Every key has one place, one default and one description; an unknown key is an error that names the nearest valid one.
"""

import dataclasses
import hashlib
import json
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from cfl_ray.core.errors import ConfigError, nearest

NOT_HASHED = {"runtime", "tracking", "output", "name"}  # cannot change a result: two configs that differ in these alone are the same experiment
QUICKSTART = Path(__file__).with_name("quickstart.yaml")
SOURCES = ("digits", "mnist", "fashion_mnist", "cifar10", "images", "femnist", "femnist_leaf", "mnist_by_writer", "synthetic", "arrays")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)


class Shift(Section):
    """How the groups differ: the true clusters of the federation (StoCFL, section 5)."""

    kind: Literal["none", "rotated", "shifted", "pathological", "hybrid", "rotated_labels"] = Field(
        "none", description="none | rotated (images) | shifted (labels) | pathological (label sets) | hybrid (two data sets) | rotated_labels")
    angles: list[int] = Field([0, 90, 180, 270], description="rotation of each group in degrees; multiples of 90 (rotated, rotated_labels)")
    offsets: list[int] = Field([0, 3, 6, 9], description="s in y -> (y + s) mod C of each group (shifted)")
    label_sets: list[list[int]] = Field([[0, 1, 2], [3, 4], [5, 6], [7, 8, 9]], description="labels of each group (pathological, rotated_labels)")
    other: str = Field("fashion_mnist", description="the second data set of a hybrid")

    @model_validator(mode="after")
    def _angles(self):
        bad = [angle for angle in self.angles if angle % 90]
        if bad:
            raise ValueError(f"angles must be multiples of 90 degrees, got {bad}")
        return self


class Partition(Section):
    """How the samples of a group are divided among its clients."""

    kind: Literal["iid", "dirichlet", "classes", "writer"] = Field("iid", description="iid | dirichlet | classes (n per client) | writer (natural)")
    clients: int | None = Field(40, ge=1, description="clients of the whole federation; null with writer: every writer that qualifies")
    samples: int | None = Field(None, ge=1, description="training samples per client at most; null: divide all of them")
    alpha: float = Field(0.1, gt=0, description="concentration of the Dirichlet distribution over clients, per class")
    classes_per_client: int = Field(2, ge=1, description="classes of one client (classes)")
    min_samples: int = Field(1, ge=1, description="fewest samples of a client; dirichlet redraws, writer leaves smaller ones out")


class Test(Section):
    """Which test data measures a client: cluster-view, label-view or hold-out."""

    view: Literal["cluster", "label", "holdout"] = Field(
        "cluster", description="cluster: the official test set shifted as the client's group; label: its images of the client's labels; holdout: a split of the client's own")
    fraction: float = Field(0.2, gt=0, lt=1, description="share of a client's samples held out (holdout)")
    max_images: int | None = Field(None, ge=1, description="keep at most this many images of each shared test set")


class Columns(Section):
    """Names of the columns of image parquet files."""

    image: str = Field("image", description="image column: struct of `bytes` (PNG, JPEG) and `path`, or bytes")
    label: str = Field("label", description="integer label column")
    client: str | None = Field(None, description="column whose value says whose sample it is (partition.kind: writer)")
    group: str | None = Field(None, description="column with the true group of a client, if one is known")


class Data(Section):
    """The federation: which samples exist and who holds them."""

    source: str = Field("digits", description=" | ".join(SOURCES))
    root: str | None = Field(None, description="folder of the data (arrays: the .npz file); null: the environment variable CFL_RAY_DATA, then ./data")
    download: bool = Field(False, description="let torchvision fetch the data set when it is absent")
    train_files: str | None = Field(None, description="glob below root of the training parquet files (images, femnist) or LEAF folder")
    test_files: str | None = Field(None, description="glob below root of the test files; null: then test.view must be holdout")
    columns: Columns = Columns()
    normalize: list[list[float]] | None = Field(None, description="[mean per channel, std per channel] after scaling to [0, 1]; null: scaling only")
    shift: Shift = Shift()
    partition: Partition = Partition()
    test: Test = Test()
    shards: str | None = Field(None, description="where shards are written and reused, or one federation's own folder: a path or any URI pyarrow knows; null: below `output`")
    federation: Any = Field(None, exclude=True, description="a Federation made in Python, instead of a source")
    synthetic_shape: list[int] = Field([1, 28, 28], description="input shape (synthetic)")
    synthetic_samples: int = Field(50, ge=1, description="samples per client (synthetic)")
    synthetic_groups: int = Field(4, ge=1, description="true groups (synthetic)")
    synthetic_classes: int = Field(10, ge=2, description="classes (synthetic)")

    @model_validator(mode="after")
    def _known(self):
        for name in (self.source, self.shift.other):
            if name not in SOURCES:
                raise ValueError(f"unknown data set {name!r}{nearest(name, SOURCES)}")
        return self


class Model(Section):
    """The network every client trains."""

    name: Any = Field("mlp", description="a registered model, or path/to/file.py:Factory that returns a torch.nn.Module")
    options: dict[str, Any] = Field({}, description="arguments of the model, e.g. {hidden: 200}")


class Local(Section):
    """What one client does in one round: SGD with a fresh momentum buffer."""

    epochs: int = Field(5, ge=1, le=100_000, description="E, local epochs")
    steps: int | None = Field(None, ge=1, description="local steps instead of epochs")
    batch_size: int | None = Field(None, ge=1, description="B; null: the client's whole data in one batch")
    lr: float = Field(0.1, gt=0, le=100, description="eta, learning rate")
    momentum: float = Field(0.0, ge=0, lt=1, description="rho")
    weight_decay: float = Field(0.0, ge=0, lt=1, description="L2 penalty added to the gradient")


class Cohort(Section):
    """Who takes part in a round."""

    fraction: float = Field(0.5, gt=0, le=1, description="R: m = max(1, floor(R * clients online))")
    clients: int | None = Field(None, ge=1, description="m itself, instead of a fraction")
    availability: float = Field(1.0, gt=0, le=1, description="chance that a client is reachable in a round, independently per round")
    dropout: float = Field(0.0, ge=0, lt=1, description="chance that a selected client fails before it reports")


class Event(Section):
    """Clients that come or go before a round is drawn."""

    round: int = Field(ge=1, description="the round before which it happens, counted from 1")
    join: list[int] = Field([], description="clients that come: absent before, unless they left earlier")
    leave: list[int] = Field([], description="clients that go")


class Evaluation(Section):
    """What is measured, and how often."""

    every: int = Field(1, ge=1, description="rounds between evaluations; the last round is always evaluated")
    clients: int | None = Field(None, ge=1, description="evaluate a fixed random sample of this many clients; null: all")
    local: bool = Field(True, description="also P-local: test what a client holds right after its own training")
    local_images: int = Field(500, ge=1, description="images of a shared test set used for models that belong to one client (P-local, personal models)")
    tuned_epochs: int = Field(0, ge=0, description="F of P-tune(F): local epochs before testing; 0: off")
    target: float | None = Field(None, gt=0, le=1, description="accuracy for rounds_to_target and mbit_to_target")


class Runtime(Section):
    """Where it runs."""

    address: str | None = Field(None, description="Ray cluster; null: RAY_ADDRESS, else one on this machine for this run; auto: the running one")
    hosts: int | None = Field(None, ge=1, description="client host processes; null: one per CPU (or per GPU share)")
    clients_per_host: int | None = Field(None, ge=1, description="clients one host may hold; 1: one process per client. null: no limit")
    gpus_per_host: float = Field(0.0, ge=0, le=16, description="share of a GPU that each host reserves, e.g. 0.25")
    cpus_per_host: float = Field(1.0, gt=0, description="CPUs each host reserves; it computes with one thread")
    engine: Literal["auto", "sequential", "vectorised", "span"] = Field(
        "auto", description="how a host trains its clients: one by one, together, or by the full-batch shortcut; auto: by a short measurement, kept beside the runs")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where the host was given a share of a GPU")
    retries: int = Field(3, ge=0, description="restarts of one host before the run goes on without it")
    checkpoint_every: int = Field(1, ge=1, description="rounds between checkpoints")
    keep_last: int = Field(3, ge=1, description="checkpoints kept")


class Tracking(Section):
    """Where results go."""

    uri: str | None = Field(None, description="MLflow; null: MLFLOW_TRACKING_URI, else an SQLite store below `output`")
    experiment: str = Field("cfl_ray", description="name of the MLflow experiment")
    enabled: bool = Field(True, description="false: only the files of the run directory")


class Experiment(Section):
    """One federation, one or more methods, one seed: everything a run depends on.

    In Python, `methods` also takes `Method` objects, `model` a callable that returns a module, and `data` a `Federation`.
    Raises ConfigError for anything that is not valid.
    """

    name: str = Field("rotated-digits", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="names the run directory and the MLflow run")
    seed: int = Field(0, ge=0, lt=2**31, description="every draw depends on it")
    rounds: int = Field(30, ge=1, description="T, communication rounds")
    methods: list[Any] = Field(["fedavg", "ifca", "stocfl"], min_length=1, description="names, {name: {option: value}}, path/to/file.py:Class")
    data: Data = Data()
    model: Model = Model()
    local: Local = Local()
    cohort: Cohort = Cohort()
    schedule: list[Event] = Field([], description="joins and leaves; what lies beyond the last round does not happen")
    evaluation: Evaluation = Evaluation()
    runtime: Runtime = Runtime()
    tracking: Tracking = Tracking()
    output: str = Field("runs", description="folder of run directories, shards and the embedded MLflow store")

    def __init__(self, **values):
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None
        if self.cohort.clients and self.data.partition.clients and self.data.federation is None:
            check_cohort(self.cohort.clients, self.data.partition.clients)

    @field_validator("model", mode="before")
    @classmethod
    def _factory(cls, value):
        return {"name": value} if callable(value) or isinstance(value, str) else value

    @field_validator("data", mode="before")
    @classmethod
    def _federation(cls, value):
        return {"source": "arrays", "federation": value} if hasattr(value, "recipe") else value

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value, as YAML can hold it; objects made in Python by their names."""
        return json.loads(json.dumps(self.model_dump() | {"methods": self.methods}, default=_name_of))

    def to_yaml(self) -> str:
        """The resolved config: loading it gives an equal experiment."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, width=120)

    @property
    def config_hash(self) -> str:
        """12 hex digits of everything that can change a result."""
        values = {key: value for key, value in self.to_dict().items() if key not in NOT_HASHED}
        if self.data.federation is not None:
            values["federation"] = self.data.federation.recipe
        for key in ("root", "shards", "download"):
            values["data"].pop(key)
        return hashlib.sha256(json.dumps(values, sort_keys=True, default=_name_of).encode()).hexdigest()[:12]


def load(file: str | Path | None = None, overrides: Iterable[str] = ()) -> Experiment:
    """The experiment of a YAML file (None: the built-in example) with `section.key=value` overrides. Raises ConfigError."""
    values = _read(QUICKSTART if file is None else Path(file))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"override {override!r} must look like section.key=value, e.g. local.lr=0.05")
        _set(values, key.split("."), _parse(text, override), override)
    return Experiment(**values)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ConfigError(f"there is no config file {file}; `cfl-ray run` without a file runs the built-in example")
    values = _parse(file.read_text(), str(file)) or {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{file} must hold keys and values, e.g. `rounds: 30`, got {type(values).__name__}")
    return values


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from None


def _set(values: dict[str, Any], path: list[str], value: Any, override: str) -> None:
    for key in path[:-1]:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise ConfigError(f"override {override!r}: {key} is a value, not a section")
    values[path[-1]] = value


def check_cohort(wanted: int, available: int) -> None:
    """Raises ConfigError where more clients are wanted in a round than there are."""
    if wanted > available:
        raise ConfigError(f"cohort.clients: {wanted} clients per round, but the federation has {available}; at most {available}")


def _name_of(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    if dataclasses.is_dataclass(value):  # a method or its class: as `methods` takes them
        name = getattr(value, "name", type(value).__name__)
        return name if isinstance(value, type) else {name: dataclasses.asdict(value)}
    return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _explain(error: ValidationError) -> str:
    """One line per problem: where, what is wrong, the range or the nearest valid key."""
    lines = []
    for problem in error.errors():
        where = ".".join(map(str, problem["loc"])) or "config"
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown key {where!r}{nearest(str(problem['loc'][-1]), _keys_at(problem['loc'][:-1]))}")
        else:
            lines.append(f"{where}: {problem['msg'].removeprefix('Value error, ')}, got {problem['input']!r}"[:500])
    return "\n".join(lines)


def _keys_at(path: tuple) -> list[str]:
    section: Any = Experiment
    for key in path:
        if isinstance(key, int):
            continue
        section = section.model_fields[key].annotation
        section = next((a for a in typing.get_args(section) if isinstance(a, type) and issubclass(a, Section)), section)
    return list(section.model_fields)
