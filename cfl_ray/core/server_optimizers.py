"""Server optimisers: the mean change of the clients is a gradient for an optimiser on the server.

With Delta the mean of W_i - w over the clients of one model w, and moments that begin with m = 0:

    fedavgm     m <- momentum m + Delta;                                       w <- w + lr m
    fedadagrad  m <- beta1 m + (1 - beta1) Delta;  v <- v + Delta^2;                    w <- w + lr m / (sqrt(v) + tau)
    fedadam     m as above;  v <- beta2 v + (1 - beta2) Delta^2;                        w as above
    fedyogi     m as above;  v <- v - (1 - beta2) Delta^2 sign(v - Delta^2);            w as above

fedavgm: T.-M. H. Hsu, H. Qi, M. Brown, 2019, arXiv:1909.06335. The others: S. J. Reddi et al., Adaptive Federated
Optimization, ICLR 2021, arXiv:2003.00295, Algorithm 2, with v = tau^2 at first and without bias correction.

They act on trained parameters; buffers (BatchNorm statistics) become their mean. A model without participants keeps its
values and its moments.

The moments of a model are keyed by a checksum of its values: a model that is bit for bit a model of the previous round
keeps its moments. All other models start without moments: new, split and merged clusters. A method in which a merged
cluster keeps the model of one part calls `Clients.restart_moments`.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from cfl_ray.errors import ConfigError, RunError, UserError
from cfl_ray.plugins.calling import check_options, described, failure_of, parse_choice, place_of
from cfl_ray.plugins.registry import Registry

Moments = tuple[Tensor, ...]  # each of the shape of the change


class ServerOptimizer(Protocol):
    """A step of the server, as a pure function of a model's mean change and its moments."""

    def __call__(self, delta_P: Tensor, moments: Moments | None) -> tuple[Tensor, Moments]:
        """The change of the model (trained columns,) and its new moments: the same number in every step, or ().

        moments: those of the previous step; None in the first step of a model.
        """


@dataclass(frozen=True)
class FedAvgM:
    """Momentum; with momentum 0 and lr 1, FedAvg."""

    name: ClassVar[str] = "fedavgm"
    lr: float = 1.0  # eta
    momentum: float = 0.9  # beta

    def __post_init__(self) -> None:
        _check("fedavgm", lr=(self.lr, 0, None), momentum=(self.momentum, -1e-300, 1))

    def __call__(self, delta_P: Tensor, moments: Moments | None) -> tuple[Tensor, Moments]:
        m_P = delta_P if moments is None else self.momentum * moments[0] + delta_P
        return self.lr * m_P, (m_P,)


@dataclass(frozen=True)
class AdaptiveServer(ABC):
    """The common part of the three adaptive optimisers: everything except the second moment."""

    name: ClassVar[str] = "server optimizer"
    lr: float = 0.01  # eta
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        limits = {"lr": (self.lr, 0, None), "tau": (self.tau, 0, None)}
        _check(self.name, beta1=(self.beta1, -1e-300, 1), beta2=(self.beta2, -1e-300, 1), **limits)

    @abstractmethod
    def second_moment(self, v_P: Tensor, square_P: Tensor) -> Tensor:
        """The second moment v after a change with square `square_P`."""

    def __call__(self, delta_P: Tensor, moments: Moments | None) -> tuple[Tensor, Moments]:
        m_P, v_P = moments or (torch.zeros_like(delta_P), torch.full_like(delta_P, self.tau**2))
        m_P = self.beta1 * m_P + (1 - self.beta1) * delta_P
        v_P = self.second_moment(v_P, delta_P.square())
        return self.lr * m_P / (v_P.sqrt() + self.tau), (m_P, v_P)


@dataclass(frozen=True)
class FedAdagrad(AdaptiveServer):
    """The second moment adds up; `beta2` has no effect."""

    name: ClassVar[str] = "fedadagrad"

    def second_moment(self, v_P: Tensor, square_P: Tensor) -> Tensor:
        return v_P + square_P


@dataclass(frozen=True)
class FedAdam(AdaptiveServer):
    """The second moment is a moving mean."""

    name: ClassVar[str] = "fedadam"

    def second_moment(self, v_P: Tensor, square_P: Tensor) -> Tensor:
        return self.beta2 * v_P + (1 - self.beta2) * square_P


@dataclass(frozen=True)
class FedYogi(AdaptiveServer):
    """The second moment moves towards the squared change by a step whose size does not depend on their distance."""

    name: ClassVar[str] = "fedyogi"

    def second_moment(self, v_P: Tensor, square_P: Tensor) -> Tensor:
        return v_P - (1 - self.beta2) * square_P * torch.sign(v_P - square_P)


def _check(name: str, **limits: tuple[Any, float, float | None]) -> None:
    for key, (value, low, high) in limits.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not low < value < (float("inf") if high is None else high):
            allowed = "above 0" if high is None else "in 0 .. 1, without 1"
            raise ValueError(f"{name}.{key} must be {allowed}, got {value!r}")


SERVER_OPTIMIZERS: Registry[Callable[..., ServerOptimizer]] = Registry(
    "server optimizer",
    {"fedavgm": FedAvgM, "fedadagrad": FedAdagrad, "fedadam": FedAdam, "fedyogi": FedYogi},
    "cfl_ray.server_optimizers",
)


def resolve_server_optimizer(value: Any) -> ServerOptimizer | None:
    """The server optimiser of a name, {name: {parameter: value}}, `file.py:Class` or an object; None for "none".

    Raises ConfigError for anything else.
    """
    name, options = parse_choice("server_optimizer", value)
    if name in ("none", None):
        return None
    factory: Any = SERVER_OPTIMIZERS.resolve(name)
    if not isinstance(name, str) and not isinstance(name, type):
        made = name  # an object made in Python
    else:
        if not callable(factory):
            raise ConfigError(f"server_optimizer {name!r} is {type(factory).__name__}, expected a class")
        check_options("server_optimizer", factory, options)
        made = factory(**options)
    moments, delta_P = None, torch.linspace(-1, 1, 7)
    for _ in range(2):  # so that invalid results are errors before a run
        _, moments = _step(made, delta_P, moments, ConfigError)
    return made


def _step(
    optimizer: Any, delta_P: Tensor, moments: Moments | None, kind: type[UserError] = RunError
) -> tuple[Tensor, Moments]:
    """The step of an optimiser and its moments. Raises `kind` if the optimiser returns anything else."""
    try:
        result = optimizer(delta_P, moments)
    except Exception as error:
        raise kind(f"server_optimizer {failure_of(optimizer, error)}") from error
    if not _is_step(result, delta_P):
        raise kind(
            f"server_optimizer {place_of(optimizer)} must return a pair: the step, and a tuple of moments (or ()), "
            f"all tensors of the shape of the change {tuple(delta_P.shape)}; got {_in_words(result)}"
        )
    if not result[0].isfinite().all():
        raise kind(f"server_optimizer {place_of(optimizer)} returned a step with values that are not finite")
    return result[0], result[1]


def _is_step(result: Any, delta_P: Tensor) -> bool:
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], tuple):
        return False
    return all(isinstance(tensor, Tensor) and tensor.shape == delta_P.shape for tensor in (result[0], *result[1]))


def _in_words(result: Any) -> str:
    if not isinstance(result, tuple):
        return described(result)
    inner = (
        f"({', '.join(map(described, entry))})" if isinstance(entry, tuple) else described(entry) for entry in result
    )
    return f"({', '.join(inner)})"


@dataclass
class ServerMoments:
    """The moments of all models that a method averages, between rounds.

    The key of a model is the number of its average in the round, and the checksum of its values. A second average with
    the same number in a round replaces the first.
    """

    optimizer: ServerOptimizer
    moments: dict[tuple[int, bytes], Moments] = field(default_factory=dict)
    averages: int = 0  # number of averages so far in this round
    before: dict[tuple[int, bytes], Moments] = field(default_factory=dict)  # moments at the start of the round

    def begin(self) -> None:
        """Begins a round."""
        self.averages, self.before = 0, dict(self.moments)

    def next_average(self) -> int:
        """The number of an average in this round."""
        self.averages += 1
        return self.averages - 1

    def forget(self, models_KP: Tensor) -> None:
        """Drops the moments of these models."""
        gone = {checksum(row_P) for row_P in models_KP}
        self.moments = {key: value for key, value in self.moments.items() if key[1] not in gone}
        self.before = {key: value for key, value in self.before.items() if key[1] not in gone}

    def moved(self, average: int, before_RP: Tensor, mean_RP: Tensor, changed: set[int], trained: int) -> Tensor:
        """The models (R, P) after a step from `before_RP`, whose plain average is `mean_RP`.

        changed: rows that have participants. trained: number of trained columns, the first ones.
        """
        after_RP, keys = mean_RP.clone(), [checksum(row_P) for row_P in before_RP]
        count = Counter(keys)
        of_round = self.before | self.moments  # including models made by an earlier average of this round
        moments_of: dict[tuple[int, bytes], Moments] = {}
        for row, key in enumerate(keys):
            # equal models: parts of a split cluster, or new clusters with a common start
            known = self.before if row in changed else of_round
            moments = known.get((average, key)) if count[key] == 1 else None
            if row in changed:
                delta_P = mean_RP[row, :trained] - before_RP[row, :trained]
                step_P, moments = _step(self.optimizer, delta_P, moments)
                after_RP[row, :trained] += step_P - delta_P  # the mean itself, to the last bit, if the two are equal
            if moments is not None:
                moments_of[average, checksum(after_RP[row])] = moments
        self.moments = {key: value for key, value in self.moments.items() if key[0] != average} | moments_of
        return after_RP

    def to_tensors(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint."""
        keys, values = list(self.moments), list(self.moments.values())
        if not keys:
            return {}
        return {
            "average_E": torch.tensor([average for average, _ in keys]),
            "checksum_E32": torch.tensor([list(digest) for _, digest in keys], dtype=torch.uint8),
            "moment_EJP": torch.stack([torch.stack(moments) if moments else torch.zeros(0, 0) for moments in values]),
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Replaces the moments by those in the output of `to_tensors`."""
        self.moments = {}
        if tensors:
            rows = zip(
                tensors["average_E"].tolist(), tensors["checksum_E32"].tolist(), tensors["moment_EJP"], strict=True
            )
            self.moments = {(average, bytes(digest)): tuple(moments_JP) for average, digest, moments_JP in rows}


def checksum(row_P: Tensor) -> bytes:
    """SHA-256 of the values of a model."""
    return sha256(row_P.contiguous().numpy().data).digest()
