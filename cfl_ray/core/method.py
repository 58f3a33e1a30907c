"""The base class of all methods.

A method is a frozen dataclass of hyper-parameters; its rounds are pure functions of (state, clients, rng).
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, cached_property
from math import inf
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from cfl_ray.core.aggregation.rules import RULES, AggregationRule, Mean, parse_rule
from cfl_ray.core.clients import Clients, ClientState
from cfl_ray.core.events import check_phases
from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.rounds import place_by_loss, serve_per_cluster
from cfl_ray.core.server_optimizers import SERVER_OPTIMIZERS, ServerOptimizer, resolve_server_optimizer
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import UNASSIGNED, State
from cfl_ray.errors import ConfigError, what_is_wrong

S = TypeVar("S", bound=State)  # the state of a method

AVERAGING_OPTIONS = ("aggregation", "server_optimizer")  # of every method that averages
RUN_OPTIONS = ("norm", "local", "label")  # of every method in a run
VOTE = "all models vote"  # `Method.placement` of a soft vote
SHARED_OPTIONS = (*AVERAGING_OPTIONS, *RUN_OPTIONS)
_REGISTRY: dict[str, type["Method[Any]"]] = {}  # by name
_LARGEST: dict[type, float] = {int: 2**63 - 1, float: torch.finfo(torch.float32).max}  # that arrays hold


def option(
    default: Any,
    doc: str,
    *,
    source: str = "",
    low: float | None = None,
    high: float | None = None,
    choices: tuple[Any, ...] | None = None,
    kw_only: bool = False,
) -> Any:
    """A hyper-parameter as a dataclass field of a method, checked by pydantic.

    doc: meaning, with the paper's symbol.
    source: origin of the default.
    low, high: limits, both included; None: no limit.
    choices: allowed values; None: any.
    """
    metadata = {"doc": doc, "source": source, "low": low, "high": high, "choices": choices}
    return field(default=default, kw_only=kw_only, metadata=metadata)


def weights_option(default: str = "samples") -> Any:
    """The option `weights` of an average over clients: "samples" or "uniform"."""
    source = "FedAvg" if default == "samples" else "paper"
    doc = "weight of a client in an average: its samples n_i, or the same for all"
    return option(default, doc, source=source, choices=("samples", "uniform"))


def average_option() -> Any:
    """The option `average` of a method that averages models or gradients: "models" or "gradients"."""
    doc = "what is averaged: models after local SGD, or one full-batch gradient each (gamma is local.lr)"
    return option("models", doc, source="paper: both", choices=("models", "gradients"))


@dataclass(frozen=True)
class Start:
    """The arguments of a method's first state."""

    num_clients: int  # N
    spec: ParamSpec
    # (k) -> the k-th independently initialised model, a row (P,); 0 is the common start of all methods
    new_model: Callable[[int], Tensor]
    input_shape: tuple[int, ...] = ()  # of one sample
    output_shape: tuple[int, ...] = ()  # of the network's output for one sample
    seed: int = 0  # of the experiment

    def unassigned(self) -> np.ndarray:
        """`State.assign_N` with no client in a cluster, int32 (N,)."""
        return np.full(self.num_clients, UNASSIGNED, np.int32)

    def one_cluster(self) -> np.ndarray:
        """`State.assign_N` with every client in cluster 0, int32 (N,)."""
        return np.zeros(self.num_clients, np.int32)

    def one_model(self) -> State:
        """The first state of a method with one global model."""
        return State(models_KP=self.new_model(0)[None], assign_N=self.one_cluster())


@dataclass(frozen=True)
class Method(ABC, Generic[S]):
    """A federated method: constant hyper-parameters, and a state of type S that changes from round to round.

    A subclass `class IFCA(Method[State], name="ifca")` is registered under that name. A method whose state has more
    fields names a subclass of `State`: `class StoCFL(Method[StoCFLState], name="stocfl")`.
    """

    name: ClassVar[str] = ""
    state_type: ClassVar[type[State]] = State  # S, set from the base class `Method[S]`
    # Not annotated here: an annotated class variable is part of every subclass's dataclass fields, and cloudpickle
    # would send all registered methods along with a plugin.
    registry = _REGISTRY
    phases: ClassVar[Mapping[str, tuple[str, ...]]] = {"federate": ()}  # phase -> its successors: `core.events`
    # descriptions for results: the model of a newcomer after `join`, the model of a client without a cluster, and
    # why a newcomer has no model before it has trained (empty: it has one; with a `placement` too: if it has labels)
    placement: ClassVar[str] = "the only model, or of several the one with the least loss on its training samples"
    without_cluster: ClassVar[str] = "the mean of the cluster models"
    untrained: ClassVar[str] = ""
    # the S clients that the server compares in dense (S, S) arrays: none, the cohort, those reachable in the round of
    # the clustering, or all participants of the run; and the peak bytes of these arrays, divided by S^2
    compares: ClassVar[Literal["none", "cohort", "reachable", "participants"]] = "none"
    pair_bytes: ClassVar[int] = 16  # products and distances in float64
    only_mean: ClassVar[str] = ""  # why `aggregation` must be mean; empty: any rule

    only_synchronous: ClassVar[str] = ""  # why its rounds cannot be asynchronous; empty: see `setup.dry_rounds`

    aggregation: Any = option(
        "mean",
        "how the server averages clients' results: a name, or with parameters {trimmed_mean: {share: 0.2}}, "
        "{multi_krum: {attackers: 0.2, keep: null}}, {norm_clipping: {bound: null}}, or file.py:Class",
        source="every paper; the others against attackers",
        choices=tuple(RULES),
        kw_only=True,
    )
    server_optimizer: Any = option(
        "none",
        "step of the server with the mean change of the clients: none (their mean is the model), or a name, "
        "or with parameters {fedavgm: {lr: 1.0, momentum: 0.9}}, {fedadam: {lr: 0.01, beta1: 0.9, beta2: 0.99, "
        "tau: 0.001}}, {fedyogi: ...}, {fedadagrad: ...}, {file.py:Class: ...}",
        source="Hsu et al. 2019; Reddi et al. 2021",
        choices=("none", *SERVER_OPTIMIZERS.builtin, "file.py:Class"),
        kw_only=True,
    )
    norm: str = option(
        "shared",
        "normalisation layers: shared, as all others; local: each client trains and predicts with its own (BatchNorm, "
        "InstanceNorm, with statistics), and clients without any have the mean; local_all: also GroupNorm, LayerNorm "
        "and RMSNorm; local_statistics: running means and variances alone, if the model has any",
        source="FedBN; local_statistics: SiloBN",
        choices=("shared", "local", "local_all", "local_statistics"),
        kw_only=True,
    )
    local: dict[str, Any] | None = option(
        None,
        "local training of this method if it differs from the section `local`, e.g. {momentum: 0.9}; "
        "null: no difference",
        source="papers that tune each method",
        kw_only=True,
    )
    label: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.=-]*$")] = option(
        None,
        "name of the method in results and of its folder; null: its name, with its options if it occurs twice",
        source="ours",
        kw_only=True,
    )

    def __init_subclass__(cls, name: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_phases(cls.__qualname__, cls.phases)
        for base in vars(cls).get("__orig_bases__", ()):
            argument = get_args(base)[0] if issubclass(get_origin(base) or object, Method) else None
            if isinstance(argument, type) and issubclass(argument, State):
                cls.state_type = argument
        if not name:  # set later when a host unpickles the class; any other class without a name is rejected on its use
            return
        cls.name = name
        Method.registry[name] = cls

    def __post_init__(self) -> None:
        for name, kind in _types_of(type(self)).items():
            try:  # defaults are not checked: the method's author chose them
                if (value := getattr(self, name)) is not getattr(type(self), name):
                    kind.validate_python(value, strict=True)
            except ValidationError as error:
                raise ValueError(f"{self.name}.{name}: {what_is_wrong(error.errors()[0])}") from None
            if type(value) in _LARGEST and (largest := _LARGEST[type(value)]) < abs(value) < inf:
                raise ValueError(f"{self.name}.{name}: a number is at most {largest:.4g}, got {value:.4g}")
        if not isinstance(self.aggregation_rule, Mean) and self.only_mean:
            raise ValueError(f"{self.name}.aggregation must be mean, got {self.aggregation!r}: {self.only_mean}")
        if self.server_step is not None and (reason := self.only_mean or self.needs_mean):
            raise ValueError(f"{self.name}.server_optimizer must be none, got {self.server_optimizer!r}: {reason}")

    @cached_property  # pickled with the method, so that hosts need no file of a user's rule
    def aggregation_rule(self) -> AggregationRule:
        """The rule that `aggregation` configures. Raises ValueError for an invalid one."""
        try:
            return parse_rule(self.aggregation)
        except (ValueError, ConfigError) as error:
            raise ValueError(f"{self.name}: {error}") from None

    @property
    def server_step(self) -> ServerOptimizer | None:
        """The optimiser that `server_optimizer` configures; None without one. Raises ValueError for an invalid one."""
        try:
            return resolve_server_optimizer(self.server_optimizer)
        except (ValueError, ConfigError) as error:
            raise ValueError(f"{self.name}: {error}") from None

    # the following depend on options in some methods; in others they are class attributes: needs_sgd = "..."

    @property
    def needs_mean(self) -> str:
        """The reason why the method cannot have a server optimiser; empty: it can."""
        return ""

    @property
    def needs_classes(self) -> str:
        """The reason why the method is only for classification; empty: any task."""
        return ""

    @property
    def needs_sgd(self) -> str:
        """The reason why it needs SGD with one learning rate per round; empty: any local optimiser."""
        return ""

    @property
    def needs_fresh_momentum(self) -> str:
        """The reason why `local.persist` with momentum is not possible; empty: it is."""
        return ""

    @property
    def compares_models(self) -> bool:
        """Whether clients choose the model that they predict with by their training loss (`Clients.choose`)."""
        return False

    def check_model(self, spec: ParamSpec) -> None:
        """Raises ConfigError for an option that does not fit the model; called before a run. By default all fit."""

    def shared_columns(self, spec: ParamSpec) -> Columns:
        """The columns that clients upload, of a method whose clients keep the others; all if they keep none."""
        return spec.all

    def kept_norms(self, spec: ParamSpec) -> Columns | None:
        """The normalisation layers, or statistics, that each client keeps by `norm`; None: it keeps none."""
        if self.norm == "shared":
            return None
        if self.norm == "local_statistics":
            statistics = spec.norms().within(spec.trained, spec.size)
            return statistics if statistics.count else None
        return spec.norms(every=self.norm == "local_all")

    def model_warning(self, spec: ParamSpec) -> str:
        """A line on a limitation with this model, which `cfl-ray check` and a run show; empty: none."""
        return ""

    def warning(self, clients: int, cohort: int) -> str:
        """A line on a limitation with this many clients in the federation and in a round; empty: none.

        `cfl-ray check` and a run show it before round 1.
        """
        return ""

    @abstractmethod
    def init(self, start: Start) -> S:
        """The state before round 1."""

    @abstractmethod
    def round(self, state: S, clients: Clients, rng: Draws) -> S:
        """The state after one communication round with `clients`, the cohort of the round."""

    def serve(self, state: S, clients: Clients) -> Serving:
        """The model with which each of `clients` predicts now (protocol P-server); no traffic.

        By default that of its cluster, and the mean of all models without a cluster (`core.rounds.serve_per_cluster`).
        """
        return serve_per_cluster(state, clients)

    def join(self, state: S, clients: Clients) -> S:
        """The state after the newcomers `clients` joined.

        By default each newcomer without a cluster receives all cluster models and joins the cluster whose model has the
        least loss on its training samples (`core.rounds.place_by_loss`). With one model for all clients, the state does
        not change.
        """
        return place_by_loss(state, clients)

    def drift(self, state: S, clients: Clients) -> S:
        """The state after the data of `clients` changed, called only if clients report changes; by default the same."""
        return state

    def leave(self, state: S, ids: np.ndarray) -> S:
        """The state after the clients `ids` left for good."""
        return state.forget(ids)

    def diagnose(self, state: S, clients: Clients) -> None:
        """Reports diagnostics of an evaluated round with `clients.record`; by default none.

        Called after the evaluation with its clients, for diagnostics that need tests (`clients.test`) or are too slow
        for every round. `round` reports all others.
        """

    @classmethod
    def options(cls) -> list[dict[str, Any]]:
        """Every hyper-parameter as a dict of name, type, default, doc, source, low, high and choices.

        Those that all methods share come last.
        """
        return [
            {
                "name": item.name,
                "type": _type_name(item.type),
                "default": None if item.default is MISSING else item.default,
                **{key: item.metadata.get(key) for key in ("doc", "source", "low", "high", "choices")},
            }
            for item in sorted(fields(cls), key=lambda item: item.kw_only is True)
            if not (item.name in AVERAGING_OPTIONS and cls.only_mean)
        ]

    @classmethod
    def summary(cls) -> str:
        """First line of the class's docstring."""
        return (inspect.getdoc(cls) or "").split("\n")[0]


@dataclass(frozen=True)
class OneModel(Method[State]):
    """A method with one global model, which clients predict with, or with their `kept` columns in it."""

    def init(self, start: Start) -> State:
        return start.one_model()

    def serve(self, state: State, clients: Clients) -> Serving:
        return Serving(state.models_KP, clients.first_row(), client_state=self.kept(clients.spec))

    def kept(self, spec: ParamSpec) -> ClientState | None:
        """The columns that each client keeps; by default none."""
        return None


class Voting(Method[State]):
    """A method with K models from independent starts, all of which vote in every prediction; newcomers choose none."""

    placement = VOTE
    needs_classes = "its models vote with their class probabilities"
    num_models: int  # K

    def init(self, start: Start) -> State:
        models_KP = torch.stack([start.new_model(k) for k in range(self.num_models)])
        return State(models_KP=models_KP, assign_N=start.one_cluster())

    def join(self, state: State, clients: Clients) -> State:
        return state

    def serve(self, state: State, clients: Clients) -> Serving:
        return Serving.vote(state.models_KP, len(clients))


def _type_name(annotation: Any) -> str:
    """An annotation as source code, such as "int | None"."""
    annotation = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


@cache
def _types_of(cls: type[Method[Any]]) -> dict[str, TypeAdapter[Any]]:
    """The types and limits of the options declared with `option`."""
    hints, types = get_type_hints(cls, include_extras=True), dict[str, TypeAdapter[Any]]()
    for item in fields(cls):
        if "doc" in item.metadata and item.name not in AVERAGING_OPTIONS:
            choices, low, high = (item.metadata[key] for key in ("choices", "low", "high"))
            kind: Any = Literal[tuple(choices)] if choices else hints[item.name]
            types[item.name] = TypeAdapter(Annotated[kind, Field(ge=low, le=high)])
    return types
