"""Virtual time in the round loop, and asynchronous rounds: the clients that a round waits for, and how long."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from cfl_ray.clock.virtual_time import Asynchrony, Flights, VirtualTime
from cfl_ray.core.clients import Clients, RoundStats
from cfl_ray.core.state import State
from cfl_ray.core.versions import Received
from cfl_ray.population.population import Cohort
from cfl_ray.runtime.participation import Membership
from cfl_ray.runtime.parts.loop_part import LoopPart, named, taken

_TENSORS = "server.time."


class TimedRounds(LoopPart):
    """A round waits for the clients of its cohort that finish in time, and takes as long as the slowest of them."""

    def __init__(self, time: VirtualTime, membership: Membership):
        self.time, self.membership = time, membership
        membership.availability = time.available(membership.availability)

    def cohort(self, stats: RoundStats, state: State, draw: Callable[[], Cohort]) -> Cohort:
        cohort = draw()
        return self.time.wait_for(stats.round, cohort, self.membership.awaited(cohort))

    def reachable(self, round: int, ids: np.ndarray, waits: bool) -> np.ndarray:
        return ids[self.time.in_time(round, ids, waits)]

    def end_round(self, stats: RoundStats, cohort: Cohort, before: State, after: State) -> None:
        past_deadline = max(cohort.past_deadline, self.time.missed)
        self.time.count_unused(past_deadline + cohort.surplus, stats.traffic)
        self.time.end_round()
        if not len(cohort.ids_M) and not cohort.past_deadline:
            self.time.wait_for_availability()
        stats.metrics["virtual_seconds"] = self.time.now
        counts = {"clients_past_deadline": past_deadline, "clients_surplus": cohort.surplus}
        stats.metrics |= {name: float(count) for name, count in counts.items() if count}

    def to_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return named(_TENSORS, self.time.to_tensors()), {}

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any], state: State) -> None:
        self.time.restore({"now": tensors.pop(f"{_TENSORS}now")})


class AsynchronousRounds(LoopPart):
    """A round takes the updates that have arrived, which are changes of the models that their clients received."""

    def __init__(self, settings: Asynchrony, time: VirtualTime, membership: Membership):
        self.flights, self.membership = Flights(settings, time), membership
        self.received: Received | None = None  # by the clients of the present round

    def leave(self, ids: np.ndarray) -> None:
        self.flights.leave(ids)

    def cohort(self, stats: RoundStats, state: State, draw: Callable[[], Cohort]) -> Cohort:
        membership, flights = self.membership, self.flights
        ids, self.received = flights.next_cohort(
            stats.round,
            state,
            flights.settings.config.concurrency or membership.wanted,
            membership.population,
            membership.availability,
            membership.settings.dropout,
        )
        if flights.stale:
            stats.metrics["updates_stale"] = float(flights.stale)
        if len(ids):
            tau_M = [stats.round - 1 - self.received.version_of[client] for client in ids.tolist()]
            stats.metrics["staleness"] = float(np.mean(tau_M))
        return Cohort(ids, flights.dropped)

    def clients(self, clients: Clients, cohort: Cohort | None) -> Clients:
        return clients if cohort is None else replace(clients, received=self.received)

    def end_round(self, stats: RoundStats, cohort: Cohort, before: State, after: State) -> None:
        self.flights.time.count_unused(self.flights.stale, stats.traffic, uploaded=True)
        self.flights.advance(stats.round, before, after)

    def to_checkpoint(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return named(_TENSORS, self.flights.to_tensors()), {}

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any], state: State) -> None:
        self.flights.restore(taken(_TENSORS, tensors))
