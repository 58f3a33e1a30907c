"""The kinds of parts that an experiment is made of, as `cfl-ray list` shows them."""

import dataclasses
import importlib.metadata
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cfl_ray.cli.printed_tables import default_text
from cfl_ray.clock.from_config import ARGUMENTS as CLOCK_ARGUMENTS
from cfl_ray.config import BuiltinKind, ConfigSection
from cfl_ray.config.asynchronous import STALENESS_KINDS
from cfl_ray.config.attack import ATTACK_KINDS
from cfl_ray.config.clock import CLOCK_KINDS
from cfl_ray.config.cohort import AVAILABILITY_KINDS
from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.config.partition import PARTITION_KINDS
from cfl_ray.config.runtime import BACKENDS
from cfl_ray.config.section import as_yaml
from cfl_ray.config.shift import SHIFT_KINDS
from cfl_ray.config.tracking import TRACKERS
from cfl_ray.core.aggregation.rules import AGGREGATION
from cfl_ray.core.augmentation import AUGMENTATIONS
from cfl_ray.core.method import RUN_OPTIONS, Method
from cfl_ray.core.metrics import METRICS, Metric
from cfl_ray.core.optimizers import OPTIMIZERS
from cfl_ray.core.schedules import SCHEDULES
from cfl_ray.core.server_optimizers import SERVER_OPTIMIZERS
from cfl_ray.core.tasks import LOSSES, TASKS, Task
from cfl_ray.errors import ConfigError
from cfl_ray.methods import METHODS
from cfl_ray.models import MODELS
from cfl_ray.models.factory import CLASS_NAMES, INPUT_NAMES
from cfl_ray.plugins.registry import Registry
from cfl_ray.tracking import Mlflow


@dataclass(frozen=True)
class ListedPart:
    """A part as text."""

    name: str
    origin: str  # "cfl_ray", or the package that it is installed with
    description: str  # a single line
    parameters: str  # with their defaults; empty: none


@dataclass(frozen=True)
class PartKind:
    """A kind of part.

    given: parameters that the caller passes to a part and a config cannot set.
    """

    registry: Registry[Any]
    own: str  # how to write a plugin, as text
    example: str  # in a config
    topic: str  # the page, without docs/ and .md
    given: tuple[str, ...] = ()

    @property
    def page(self) -> str:
        """The page of the documentation."""
        return f"docs/{self.topic}.md"

    def parts(self) -> Iterator[ListedPart]:
        """All parts, those of this package first."""
        packages = {
            point.name: point.dist.name if point.dist is not None else "?"
            for point in importlib.metadata.entry_points(group=self.registry.group)
        }
        for name in self.registry.names():
            origin = "cfl_ray" if name in self.registry.builtin else packages[name]
            try:
                part = self.registry.find(name)
                yield ListedPart(name, origin, _first_line(part), self._parameters(part))
            except ConfigError as error:
                yield ListedPart(name, origin, str(error), "")

    def _parameters(self, part: Any) -> str:
        if isinstance(part, BuiltinKind):
            if part.section is None:
                return self._parameters(part.load()) if part.code else ", ".join(part.keys)
            of_all = set.intersection(*(set(kind.section.model_fields) for kind in self.registry.builtin.values()))
            return ", ".join(
                name if info.is_required() else f"{name}: {as_yaml(info.get_default(call_default_factory=True))}"
                for name, info in part.section.model_fields.items()
                if name not in of_all and not isinstance(info.default, ConfigSection)
            )
        if isinstance(part, type) and issubclass(part, Method):
            own = [option for option in part.options() if option["name"] not in RUN_OPTIONS]
            return ", ".join(f"{option['name']}: {default_text(option['default'])}" for option in own)
        if isinstance(part, Task | Metric):  # an object, ready for use
            return ""
        if dataclasses.is_dataclass(part):
            return ", ".join(f"{item.name}: {default_text(item.default)}" for item in dataclasses.fields(part))
        try:
            parameters = inspect.signature(part).parameters.values()
        except (TypeError, ValueError):
            return ""
        return ", ".join(
            item.name if item.default is item.empty else f"{item.name}: {default_text(item.default)}"
            for item in parameters
            if item.name not in self.given and item.kind not in (item.VAR_POSITIONAL, item.VAR_KEYWORD)
        )


def _first_line(part: Any) -> str:
    if isinstance(part, Metric):
        return part.meaning
    if isinstance(part, BuiltinKind):
        return part.meaning or _first_line(part.load())
    if isinstance(part, Task):
        measured = ", ".join(metric.name for metric in part.metrics)
        return f"loss {part.loss.__name__}, targets {part.targets}, metrics {measured}"
    return (inspect.getdoc(part) or "").split("\n")[0]


# A line per kind: everything else about a kind is in its registry.
KINDS: Mapping[str, PartKind] = {
    "methods": PartKind(METHODS, "a subclass of cfl_ray.Method", "methods: [my.py:MyMethod]", "extend/method"),
    "models": PartKind(
        MODELS,
        "a function or class that returns a torch.nn.Module",
        "model: {name: my.py:Net}",
        "extend/model",
        given=(*INPUT_NAMES, *CLASS_NAMES),
    ),
    "datasets": PartKind(
        SOURCE_KINDS, "a function that returns arrays or a Federation", "data: {source: my.py:load}", "extend/data"
    ),
    "tasks": PartKind(TASKS, "a cfl_ray.Task, or a function that returns one", "task: my.py:Ranking", "extend/task"),
    "losses": PartKind(
        LOSSES,
        "a function f(outputs, targets) of the loss of each sample",
        "task: {loss: my.py:f, targets: real, metrics: [mae]}",
        "extend/task",
        given=("outputs", "targets"),
    ),
    "metrics": PartKind(
        METRICS, "a function f(outputs, targets) of a client", "evaluation: {metrics: [my.py:f]}", "extend/metric"
    ),
    "optimizers": PartKind(
        OPTIMIZERS,
        "a subclass of torch.optim.Optimizer, or a function that returns one",
        "local: {optimizer: my.py:Sign}",
        "extend/optimizer",
        given=("params", "lr"),
    ),
    "schedules": PartKind(
        SCHEDULES,
        "a function f(t, total), the factor of the learning rate",
        "local: {schedule: my.py:f}",
        "extend/optimizer",
        given=("t", "total"),
    ),
    "augmentations": PartKind(
        AUGMENTATIONS,
        "a function f(x, draw, black) of the training inputs of a client",
        "local: {augment: [crop, my.py:f]}",
        "extend/augmentation",
        given=("x", "draw", "black"),
    ),
    "server_optimizers": PartKind(
        SERVER_OPTIMIZERS,
        "a class whose objects are called with (delta_P, moments)",
        "methods: [{fedavg: {server_optimizer: my.py:Class}}]",
        "extend/optimizer",
    ),
    "aggregation": PartKind(
        AGGREGATION,
        "a class with combine, weigh or scale",
        "methods: [{fedavg: {aggregation: my.py:Rule}}]",
        "extend/aggregation",
    ),
    "shifts": PartKind(
        SHIFT_KINDS,
        "a function f(x, y, group, draw)",
        "data: {shift: {kind: my.py:f, groups: 2}}",
        "extend/shift",
        ("x", "y", "group", "draw"),
    ),
    "partitions": PartKind(
        PARTITION_KINDS,
        "a function f(labels, clients, draw)",
        "data: {partition: {kind: my.py:f}}",
        "extend/partition",
        ("labels", "clients", "draw"),
    ),
    "attacks": PartKind(
        ATTACK_KINDS,
        "a function f(upload_P, start_P, draw), or a class",
        "attack: {kind: my.py:f}",
        "extend/attack",
        ("upload_P", "start_P", "draw"),
    ),
    "availability": PartKind(
        AVAILABILITY_KINDS,
        "a function f(clients, round, draw)",
        "cohort: {availability: {kind: my.py:f}}",
        "extend/availability",
        ("clients", "round", "draw"),
    ),
    "clocks": PartKind(CLOCK_KINDS, "a function f(clients, draw)", "clock: {kind: my.py:f}", "time", CLOCK_ARGUMENTS),
    "staleness": PartKind(
        STALENESS_KINDS,
        "a function f(staleness), the weights of updates",
        "asynchronous: {buffer: 10, staleness: {kind: my.py:f}}",
        "time",
        ("staleness",),
    ),
    "trackers": PartKind(
        TRACKERS,
        "a class with open, log and close",
        "tracking: {trackers: [csv, my.py:Tracker]}",
        "extend/tracker",
        given=tuple(inspect.signature(Mlflow).parameters),
    ),
    "backends": PartKind(
        BACKENDS,
        "a subclass of InProcessBackend",
        "runtime: {backend: my.py:Backend}",
        "extend/backend",
        given=("worker",),
    ),
}

OTHER_NAMES: Mapping[str, str] = {  # another name of a kind -> its name above
    "data": "datasets",
    "sources": "datasets",
    "source": "datasets",
    "rules": "aggregation",
    "networks": "models",
    "algorithms": "methods",
    "scores": "metrics",
}
