"""What a method is: hyper-parameters in a frozen dataclass, and rounds that are pure functions of (state, clients, rng)."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from cfl_ray.core import robust
from cfl_ray.core.clients import Clients
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.serving import Serving
from cfl_ray.core.state import UNKNOWN, State


def option(default: Any, doc: str, *, source: str = "", low: float | None = None, high: float | None = None, choices: tuple | None = None) -> Any:
    """A hyper-parameter of a method: its default, meaning (with the paper's symbol), where the default comes from, and its range, both ends included."""
    return field(default=default, metadata={"doc": doc, "source": source, "low": low, "high": high, "choices": choices})


def weighting(default: str = "samples") -> Any:
    """The option that nearly every method has."""
    source = "FedAvg" if default == "samples" else "paper"
    return option(default, "weight of a client in an average: its samples n_i, or the same for all", source=source, choices=("samples", "uniform"))


@dataclass(frozen=True)
class Start:
    """What a method starts from."""

    num_clients: int  # N
    spec: ParamSpec
    new_model: Callable[[int], Tensor]  # the k-th independently initialised model, a row (P,); 0 is the common start of all methods
    input_shape: tuple[int, ...] = ()  # of one sample

    def unassigned(self) -> np.ndarray:
        """assign_N with nobody placed."""
        return np.full(self.num_clients, UNKNOWN, np.int32)

    def one_cluster(self) -> np.ndarray:
        """assign_N with everybody in cluster 0."""
        return np.zeros(self.num_clients, np.int32)

    def one_model(self) -> State:
        """The state of a method with one global model."""
        return State(models_KP=self.new_model(0)[None], assign_N=self.one_cluster())


@dataclass(frozen=True)
class Method(ABC):
    """A federated method. Constructing one starts nothing; what changes between rounds is `State`.

    Subclass it as `class IFCA(Method, name="ifca")` to register it under that name.
    """

    name: ClassVar[str] = ""
    State: ClassVar[type[State]] = State
    registry = {}  # name -> class; not annotated, for a dataclass keeps what is in its fields, and they would travel with every pickle
    only_mean: ClassVar[str] = ""  # why no other aggregation would do what it says in this method; empty: all may be chosen

    aggregation: str | dict[str, Any] = field(
        default="mean",
        kw_only=True,
        metadata={
            "doc": "how the server averages clients' results: a name, or with parameters {trimmed_mean: {share: 0.2}}, {multi_krum: {attackers: 0.2, keep: null}}, {norm_clipping: {bound: null}}",
            "source": "every paper; the others against attackers",
            "choices": tuple(robust.RULES),
        },
    )

    def __init_subclass__(cls, name: str = "", **kwargs):
        super().__init_subclass__(**kwargs)
        if not name:  # a class that a host rebuilds from a pickle, which sets its name afterwards; others are refused when they are named
            return
        cls.name = name
        Method.registry[name] = cls

    def __post_init__(self):
        if not isinstance(self.rule, robust.Mean) and self.only_mean:
            raise ValueError(f"{self.name}.aggregation must be mean, got {self.aggregation!r}: {self.only_mean}")
        for item in fields(self):
            if item.name == "aggregation":
                continue
            value, meta = getattr(self, item.name), item.metadata
            if meta.get("choices") and value not in meta["choices"]:
                raise ValueError(f"{self.name}.{item.name} must be one of {', '.join(map(str, meta['choices']))}, got {value!r}")
            if isinstance(item.default, bool) and not isinstance(value, bool):
                raise ValueError(f"{self.name}.{item.name} must be true or false, got {value!r}")
            if meta.get("low") is None and meta.get("high") is None:
                continue
            low, high = meta["low"] if meta["low"] is not None else -np.inf, meta["high"] if meta["high"] is not None else np.inf
            if value is None and item.default is None:
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
                raise ValueError(f"{self.name}.{item.name} must be in {low} .. {high}, got {value!r}")
            if _type_name(item.type) in ("int", "int | None") and not isinstance(value, int):
                raise ValueError(f"{self.name}.{item.name} must be a whole number, got {value!r}")

    @property
    def rule(self) -> robust.Rule:
        """The aggregation with its parameters. Raises ValueError where there is no such."""
        try:
            return robust.parse(self.aggregation)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None

    @abstractmethod
    def init(self, start: Start) -> State:
        """The state before round 1."""

    @abstractmethod
    def round(self, state: State, clients: Clients, rng: Draws) -> State:
        """One communication round with the clients of its cohort."""

    @abstractmethod
    def serve(self, state: State, clients: Clients) -> Serving:
        """The model with which each of `clients` would predict now (protocol P-server); costs no traffic."""

    def join(self, state: State, clients: Clients) -> State:
        """The state after newcomers came; by default they are placed when they first take part."""
        return state

    def drift(self, state: State, clients: Clients) -> State:
        """The state after the data of `clients` changed, where clients notice that and say so; by default nobody does."""
        return state

    def leave(self, state: State, ids: np.ndarray) -> State:
        """The state after the clients `ids` left for good."""
        return state.forget(ids)

    @classmethod
    def options(cls) -> list[dict[str, Any]]:
        """Name, type, default and its source, range and meaning of every hyper-parameter, those of all methods last."""
        return [
            {
                "name": item.name,
                "type": _type_name(item.type),
                "default": None if item.default is MISSING else item.default,
                **{key: item.metadata.get(key) for key in ("doc", "source", "low", "high", "choices")},
            }
            for item in sorted(fields(cls), key=lambda item: item.kw_only)
            if not (item.name == "aggregation" and cls.only_mean)
        ]

    @classmethod
    def summary(cls) -> str:
        """First sentence of the class's docstring."""
        return (inspect.getdoc(cls) or "").split("\n")[0]


def _type_name(annotation: Any) -> str:
    """An annotation as it is written: `int | None`."""
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
