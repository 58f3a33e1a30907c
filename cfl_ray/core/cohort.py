"""Who is in the federation, and who takes part in a round. Simulated absence is part of the experiment."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cfl_ray.core.availability import ALWAYS, Availability
from cfl_ray.core.errors import ConfigError
from cfl_ray.core.rng import stream


def share(fraction: float, count: int) -> int:
    """floor(fraction * count), at least 1; 0.29 of 100 is 29 although the product in float64 is a little less."""
    return max(1, int(fraction * count + 1e-9))


@dataclass(frozen=True)
class Change:
    """Clients that join or leave before a round."""

    round: int
    join: tuple[int, ...] = ()
    leave: tuple[int, ...] = ()


@dataclass(frozen=True)
class Drawn:
    """The cohort of a round: those that report, and how many of those selected failed before they could."""

    ids_M: np.ndarray
    dropped: int


class Population:
    """The clients online, round by round. Work per round follows the cohort and the changes, not N."""

    def __init__(self, num_clients: int, changes: Sequence[Change], seed: int):
        self.num_clients, self.seed = num_clients, seed
        self.changes = sorted(changes, key=lambda change: change.round)
        mentions = [(client, comes) for change in self.changes for ids, comes in ((change.join, True), (change.leave, False)) for client in ids]
        later = {client for client, comes in dict(reversed(mentions)).items() if comes}  # whose first mention is a join
        self.newcomers = np.array(sorted(later), np.int64)
        self.is_online_N = np.ones(num_clients, bool)
        self.is_online_N[self.newcomers] = False
        self.online = np.flatnonzero(self.is_online_N)
        self.round = 0

    def add(self, change: Change, num_clients: int) -> None:
        """A change to come that was not planned; clients beyond those known so far are newcomers."""
        more = np.arange(self.num_clients, num_clients)
        self.newcomers = np.union1d(self.newcomers, more)
        self.is_online_N = np.append(self.is_online_N, np.zeros(len(more), bool))
        self.num_clients = num_clients
        self.changes = sorted([*self.changes, change], key=lambda change: change.round)

    def advance(self, round: int) -> tuple[np.ndarray, np.ndarray]:
        """Applies the changes due up to `round`: (clients that came, clients that went)."""
        came, gone = set(), set()
        for change in self.changes:  # the last word on a client counts: it may leave and come again
            if self.round < change.round <= round:
                came, gone = came | {*change.join}, gone - {*change.join}
                came, gone = came - {*change.leave}, gone | {*change.leave}
        self.round = round
        came_ids, gone_ids = (np.array(sorted(ids), np.int64) for ids in (came, gone))
        came_ids, gone_ids = came_ids[~self.is_online_N[came_ids]], gone_ids[self.is_online_N[gone_ids]]
        if len(came_ids) or len(gone_ids):
            self.is_online_N = self.is_online_N.copy()  # what was copied before keeps its own
            self.is_online_N[came_ids], self.is_online_N[gone_ids] = True, False
            self.online = np.flatnonzero(self.is_online_N)
        if not len(self.online):
            raise ConfigError(f"schedule: no client is left in round {round}; let fewer leave or others join")
        return came_ids, gone_ids

    def draw(self, round: int, fraction: float, clients: int | None = None, availability: Availability = ALWAYS, dropout: float = 0.0) -> Drawn:
        """m = max(1, floor(fraction * online)) clients, or `clients`, uniformly without replacement among those reachable.

        Fewer where not enough are reachable. At least one client reports, unless a trace says that nobody is there.
        """
        wanted = min(clients or share(fraction, len(self.online)), len(self.online))
        selected = self._reachable(round, wanted, availability)
        stays = np.array([self._chance(round, client, "dropout") >= dropout for client in selected]) if dropout else np.ones(len(selected), bool)
        if len(selected) and not stays.any():
            stays[0] = True
        return Drawn(np.sort(selected[stays]), int((~stays).sum()))

    def _reachable(self, round: int, wanted: int, availability: Availability) -> np.ndarray:
        draw = stream(self.seed, round, 0, -1, "cohort")
        if availability.always:
            return self.online[draw.choice(len(self.online), wanted, replace=False, shuffle=False)]
        if (named := availability.named(round)) is not None:
            there = named[self.is_online_N[named]]
            return there[draw.choice(len(there), min(wanted, len(there)), replace=False, shuffle=False)]
        found: list[int] = []
        enough = int((50 + 2 * wanted) / max(availability.expected(round), 1e-6))  # twice as many as are needed on average, and some more for small cohorts
        order = draw.permutation(len(self.online)) if enough > len(self.online) // 4 else draw.choice(len(self.online), enough, replace=False)
        for position in order:
            client = int(self.online[position])
            if self._chance(round, client, "availability") < availability.chance(round, client):
                found.append(client)
            if len(found) == wanted:
                break
        return np.array(found or [int(self.online[order[0]])], np.int64)

    def _chance(self, round: int, client: int, purpose: str) -> float:
        return stream(self.seed, round, 0, int(client), purpose).random()
