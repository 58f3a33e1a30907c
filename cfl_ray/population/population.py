"""The clients of the federation, and the cohort of each round. Simulated absence is part of the experiment."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from math import ceil

import numpy as np

from cfl_ray.core.reassigned import ids_where
from cfl_ray.core.rng import stream, uniforms
from cfl_ray.errors import ConfigError
from cfl_ray.population.availability import ALWAYS, Availability, Chances


def count_of(fraction: float, count: int) -> int:
    """floor(fraction * count), at least 1; exact: 0.29 of 100 is 29, although the float64 product is less."""
    return max(1, int(fraction * count + 1e-9))


def selected_of(wanted: int, over_selection: float) -> int:
    """ceil(over_selection * wanted); exact: 1.1 times 10 is 11, although the float64 product is more."""
    return ceil(over_selection * wanted - 1e-9)


@dataclass(frozen=True)
class PopulationChange:
    """Clients that join or leave before a round."""

    round: int
    join: tuple[int, ...] = ()
    leave: tuple[int, ...] = ()


@dataclass(frozen=True)
class Cohort:
    """The cohort of a round."""

    ids_M: np.ndarray  # int64, ascending: the selected clients that report
    dropped: int  # number of selected clients that drop out
    # in virtual time: clients that finish after the deadline, and those after enough others of an over-selected cohort
    past_deadline: int = 0
    surplus: int = 0
    absent: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # ids of all that do not report

    @property
    def why_empty(self) -> str:
        """The reason for an empty cohort, as text."""
        return f"no client {'finished before the deadline' if self.past_deadline else 'could be reached'}"


class Population:
    """The clients that are online, round by round. The cost of a round depends on its cohort and changes, not on N."""

    def __init__(self, num_clients: int, changes: Sequence[PopulationChange], seed: int):
        self.num_clients, self.seed = num_clients, seed
        self.cohort_seed = seed  # of cohorts; secret in a private run with amplification by sampling
        self.changes = sorted(changes, key=lambda change: change.round)
        joins_first: dict[int, bool] = {}  # whether the first change of a client is that it joins
        for change in reversed(self.changes):
            joins_first |= dict.fromkeys(change.leave, False) | dict.fromkeys(change.join, True)
        newcomers = (client for client, joins in joins_first.items() if joins)
        self.newcomers = np.array(sorted(newcomers), np.int64)
        self.is_online_N = np.ones(num_clients, bool)
        self.is_online_N[self.newcomers] = False
        self.online = ids_where(self.is_online_N)  # int32: there are as many as clients
        self.round = 0

    def add(self, change: PopulationChange, num_clients: int) -> None:
        """Adds a change of a later round, after which the federation has `num_clients` clients."""
        more = np.arange(self.num_clients, num_clients)
        self.newcomers = np.union1d(self.newcomers, more)
        self.is_online_N = np.append(self.is_online_N, np.zeros(len(more), bool))
        self.num_clients = num_clients
        self.changes = sorted([*self.changes, change], key=lambda change: change.round)

    def advance(self, round: int) -> tuple[np.ndarray, np.ndarray]:
        """Applies the changes due up to `round`. Returns the ids (joined, left), int64 and ascending.

        Raises ConfigError if no client is left.
        """
        joins: dict[int, bool] = {}  # a client may leave and return; its last change counts
        for change in self.changes:
            if self.round < change.round <= round:
                joins |= dict.fromkeys(change.join, True) | dict.fromkeys(change.leave, False)
        self.round = round
        changed = [client for client in sorted(joins) if joins[client] != self.is_online_N[client]]
        joined = np.array([client for client in changed if joins[client]], np.int64)
        left = np.array([client for client in changed if not joins[client]], np.int64)
        if len(joined) or len(left):
            self.is_online_N = self.is_online_N.copy()  # a shallow copy of this population shares the array
            self.is_online_N[joined], self.is_online_N[left] = True, False
            self.online = ids_where(self.is_online_N)
        if not len(self.online):
            raise ConfigError(f"schedule: no client is left in round {round}; let fewer leave or others join")
        return joined, left

    def draw(
        self,
        round: int,
        fraction: float,
        clients: int | None = None,
        availability: Availability = ALWAYS,
        dropout: float = 0.0,
        poisson: bool = False,
    ) -> Cohort:
        """Draws the cohort uniformly without replacement among the reachable clients.

        Its size is `clients`, or max(1, floor(fraction * online)) for None, or less if fewer clients are reachable.
        At least one client reports, unless an availability trace has no reachable client in the round.

        dropout: chance that a selected client drops out before it reports. poisson: every online client is drawn
            independently, with the chance `fraction`, or `clients` over all clients; the cohort may be empty.
        """
        wanted = min(clients or count_of(fraction, len(self.online)), len(self.online))
        if poisson:
            chance = clients / self.num_clients if clients else fraction
            selected = self.online[uniforms(self.cohort_seed, round, 0, self.online, "cohort") < chance]
        else:
            selected = self._reachable(round, wanted, availability)
        selected = selected.astype(np.int64)
        reports = self._report(round, selected, dropout)
        if len(selected) and not reports.any():
            reports[0] = True
        return Cohort(np.sort(selected[reports]), int((~reports).sum()), absent=selected[~reports])

    def draw_more(
        self, round: int, number: int, wanted: int, busy: np.ndarray, availability: Availability, dropout: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draws up to `wanted` clients that are reachable and not busy: their ids, and whether each reports (bool).

        number: index of the draw in the round; draw 0 without busy clients selects the clients of `draw`.
        """
        idle = self
        if len(busy):
            idle = copy(self)
            idle.is_online_N = self.is_online_N.copy()
            idle.is_online_N[busy] = False
            idle.online = ids_where(idle.is_online_N)
        if not len(idle.online):
            return np.zeros(0, np.int64), np.zeros(0, bool)
        selected = idle._reachable(round, min(wanted, len(idle.online)), availability, number).astype(np.int64)
        return selected, self._report(round, selected, dropout, number)

    def _report(self, round: int, selected: np.ndarray, dropout: float, number: int = 0) -> np.ndarray:
        if not dropout:
            return np.ones(len(selected), bool)
        return uniforms(self.seed, round, number, selected, "dropout") >= dropout

    def _reachable(self, round: int, wanted: int, availability: Availability, number: int = 0) -> np.ndarray:
        """Ids of up to `wanted` reachable clients, in the order of the draw."""
        draw = stream(self.cohort_seed, round, number, -1, "cohort")
        if availability.always:
            return self.online[draw.choice(len(self.online), wanted, replace=False, shuffle=False)]
        given = availability.reachable(round, self.num_clients)
        if not isinstance(given, Chances):
            reachable = given[self.is_online_N[given]]
            return reachable[draw.choice(len(reachable), min(wanted, len(reachable)), replace=False, shuffle=False)]
        # Candidates: twice as many as are needed on average, and some more for small cohorts.
        enough = int((50 + 2 * wanted) / max(given.mean, 1e-6))
        if enough > len(self.online) // 4:
            order = draw.permutation(len(self.online))
        else:
            order = draw.choice(len(self.online), enough, replace=False)
        cohort, at = self.online[:0], 0
        while len(cohort) < wanted and at < len(order):
            size = int((wanted - len(cohort)) / max(given.mean, 1e-6)) + 50
            ids, at = self.online[order[at : at + size]], at + size
            draws = uniforms(self.seed, round, 0, ids, "availability")
            cohort = np.concatenate([cohort, ids[draws < given.of(ids)]])
        return cohort[:wanted] if len(cohort) else self.online[order[:1]]
