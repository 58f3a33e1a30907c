"""Availability of clients. It depends only on the round and the seed, so that a resumed run has the same clients."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from cfl_ray.core.rng import stream, uniforms
from cfl_ray.errors import RunError
from cfl_ray.plugins.calling import call_plugin, described, place_of

ARGUMENTS = ("clients", "round", "draw")  # of a user's function


@dataclass(frozen=True)
class Chances:
    """The chance that a client is reachable, 0..1; `Population` draws whether it is."""

    of: Callable[[np.ndarray], np.ndarray]  # of each of the clients with these ids, float64
    mean: float  # over all clients


class Availability(ABC):
    """Which clients are reachable in a round."""

    @property
    def always(self) -> bool:
        """Whether all clients are reachable in every round."""
        return False

    @abstractmethod
    def reachable(self, round: int, num_clients: int) -> np.ndarray | Chances:
        """Ids of the reachable clients, int64 and ascending, or their chances. num_clients: of this round."""


@dataclass(frozen=True)
class Bernoulli(Availability):
    """Each client is reachable with the same chance in every round, independently; 1.0: always."""

    mean: float = 1.0

    @property
    def always(self) -> bool:
        return self.mean >= 1

    def reachable(self, round: int, num_clients: int) -> Chances:
        return Chances(lambda clients: np.full(len(clients), self.mean), self.mean)


ALWAYS = Bernoulli()


@dataclass(frozen=True)
class Diurnal(Availability):
    """Day and night: p_i(t) = clip(mean + amplitude * sin(2 pi (t / period + phase_i)), 0, 1), t the round.

    phase_i is uniform in [0, 1), or one of `zones` equally spaced phases.
    """

    mean: float
    amplitude: float
    period: float  # length of a day, in rounds
    seed: int
    zones: int | None = None  # None: every client has a different phase

    def reachable(self, round: int, num_clients: int) -> Chances:
        phases = np.arange(self.zones or 256) / (self.zones or 256)
        return Chances(partial(self._of_clients, round), float(self._at_phases(round, phases).mean()))

    def _of_clients(self, round: int, clients: np.ndarray) -> np.ndarray:
        phases = uniforms(self.seed, -1, -1, clients, "diurnal phase")
        if self.zones is not None:
            phases = np.floor(phases * self.zones) / self.zones
        return self._at_phases(round, phases)

    def _at_phases(self, round: int, phases: np.ndarray) -> np.ndarray:
        wave = np.sin(2 * np.pi * (round / self.period + phases))
        return np.clip(self.mean + self.amplitude * wave, 0.0, 1.0)


@dataclass(frozen=True)
class Trace(Availability):
    """Recorded intervals: a client is reachable in a round that lies in one of its intervals, both ends included."""

    client_I: np.ndarray = field(repr=False)  # int64 (I,)
    from_I: np.ndarray = field(repr=False)  # float64 (I,): in the trace's unit of time
    to_I: np.ndarray = field(repr=False)  # float64 (I,)
    unit: float = 1.0  # length of a round in that unit

    def reachable(self, round: int, num_clients: int) -> np.ndarray:
        now = round * self.unit
        return np.unique(self.client_I[(self.from_I <= now) & (now <= self.to_I)])


@dataclass(frozen=True)
class OwnAvailability(Availability):
    """A user's function f(clients, round, draw) that returns whether each client is reachable in a round."""

    function: Callable[..., Any]
    seed: int

    def reachable(self, round: int, num_clients: int) -> np.ndarray:
        """Raises RunError, with the author's line, if the function does not return a bool for each client."""
        clients = np.arange(num_clients)
        draw = stream(self.seed, round, 0, -1, "own availability")
        result = call_plugin("availability", self.function, clients, round, draw)
        reachable = np.asarray(result)
        if reachable.shape != clients.shape or reachable.dtype != bool:
            raise RunError(
                f"availability {place_of(self.function)} returned {described(result)}, "
                f"expected a bool for each client: shape ({len(clients)},)"
            )
        return np.flatnonzero(reachable)
