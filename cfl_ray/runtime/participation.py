"""The clients of a round: which are in the federation and online, and which take part.

Clients join and leave, and their data change, by the schedule and by requests to the live run. A round has a cohort;
with virtual time, those of the cohort that finish in time; an asynchronous round, the clients whose updates arrive.
"""

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cfl_ray.clock.virtual_time import Flights
from cfl_ray.config.cohort import CohortConfig
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.state import State
from cfl_ray.core.versions import Received
from cfl_ray.data.federation import Federation
from cfl_ray.population.availability import Availability
from cfl_ray.population.population import Cohort, Population, count_of
from cfl_ray.runtime.requests import Requests
from cfl_ray.runtime.round_report import RoundDraft
from cfl_ray.setup.scheduled_changes import population_of
from cfl_ray.setup.setup import Setup


@dataclass(frozen=True)
class MembershipChange:
    """Changes of the clients before a round; ids are ascending."""

    left: np.ndarray
    joined: np.ndarray
    data_changed: np.ndarray  # online clients whose data change in this round


class Membership:
    """The clients of the federation, and the online clients.

    federation: with the shards of all newcomers so far. present: the same with the data of the present round.
    """

    def __init__(self, setup: Setup, requests: Requests):
        self.requests = requests
        self.federation = self.present = setup.federation
        self.population: Population = population_of(setup.experiment, setup.federation.num_clients)

    def restore(self, round: int) -> None:
        """The federation and population after `round`, the last one saved (0: before round 1): as in the journal."""
        self.requests.stop_after = self.requests.journal.stop_after(self.requests.session, round)
        self.federation = self.requests.federation(round)
        self.present = self.federation.at(round)
        if round:
            for event in self.requests.journal.until(round):
                self.population.add(event, self.requests.federation(event.round).num_clients)
            self.population.advance(round)
            self.requests.take_up(round)
        self.requests.set_population(self.population)

    def grow(self, round: int) -> Federation | None:
        """Takes up the requests for this round. Returns the federation if newcomers brought shards, otherwise None."""
        for event in self.requests.take_up(round):
            self.population.add(event, self.requests.federation(round).num_clients)
        if (federation := self.requests.federation(round)) is self.federation:
            return None
        self.federation = federation
        return federation

    def advance(self, round: int) -> MembershipChange:
        """Applies the changes before this round, and returns them."""
        self.present = self.federation.at(round)
        joined, left = self.population.advance(round)
        self.requests.set_population(self.population)
        changed = self.federation.changed_in.get(round, np.zeros(0, np.int64))
        return MembershipChange(left, joined, changed[self.population.is_online_N[changed]])


class Participation:
    """The clients of each round of a method, with its virtual time if the experiment has a clock."""

    def __init__(self, setup: Setup, label: str, spec: ParamSpec, membership: Membership):
        self.settings, self.concurrency = setup.experiment.cohort, setup.experiment.asynchronous.concurrency
        self.availability, self.membership = setup.availability, membership
        self.time = setup.time_of(label, spec, lambda ids: membership.present.num_samples_N[ids])
        self.flights = None  # None: rounds are synchronous
        if self.time is not None and setup.asynchrony is not None:
            self.flights = Flights(setup.asynchrony, self.time)

    @property
    def available(self) -> Availability:
        """The availability of clients now."""
        return self.availability if self.time is None else self.time.available(self.availability)

    def cohort(self, draft: RoundDraft, state: State) -> tuple[Cohort, Received | None]:
        """The clients whose updates the server waits for; in an asynchronous round also the models they received."""
        round, population = draft.round, self.membership.population
        if self.flights is None:
            cohort, wanted = drawn_cohort(self.settings, population, self.available, round)
            return (cohort if self.time is None else self.time.wait_for(round, cohort, wanted)), None
        concurrency = self.concurrency or wanted_clients(self.settings, population)
        ids, received = self.flights.next_cohort(
            round, state, concurrency, population, self.availability, self.settings.dropout
        )
        if stale := self.flights.stale:
            draft.metrics["updates_stale"] = float(stale)
        if len(ids):
            tau_M = [round - 1 - received.version_of[client] for client in ids.tolist()]
            draft.metrics["staleness"] = float(np.mean(tau_M))
        return Cohort(ids, self.flights.dropped), received

    def reachable(self, round: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and sample counts of all clients that can take part in the round; the round waits for them."""
        ids = self.membership.population.draw(round, 1.0, None, self.available, self.settings.dropout).ids_M
        num_samples = self.membership.present.num_samples_N[ids]
        if self.time is None:
            return ids, num_samples
        in_time = self.time.in_time(round, ids)
        return ids[in_time], num_samples[in_time]

    def leave(self, ids: np.ndarray) -> None:
        """Discards the work of clients that left."""
        if self.flights is not None:
            self.flights.leave(ids)

    def end_round(self, cohort: Cohort, before: State, after: State, draft: RoundDraft) -> None:
        """Adds the round to the virtual time. before: the state that its clients received."""
        if cohort.dropped:
            draft.metrics["clients_dropped"] = float(cohort.dropped)
        if self.time is None:
            return
        unused = cohort.past_deadline + cohort.surplus + int(draft.metrics.get("updates_stale", 0))
        self.time.count_unused(unused, draft.stats.traffic)
        self.time.end_round()
        if not len(cohort.ids_M) and not cohort.past_deadline:
            self.time.wait_for_availability()
        draft.metrics["virtual_seconds"] = self.time.now
        counts = {"clients_past_deadline": cohort.past_deadline, "clients_surplus": cohort.surplus}
        draft.metrics |= {name: float(count) for name, count in counts.items() if count}
        if self.flights is not None:
            self.flights.advance(draft.round, before, after)

    def to_tensors(self) -> dict[str, Tensor]:
        """The virtual time and the clients in flight, for a checkpoint; empty without a clock."""
        parts = (self.time, self.flights)
        return {name: value for part in parts if part is not None for name, value in part.to_tensors().items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restores the output of `to_tensors`."""
        for part in (self.time, self.flights):
            if part is not None:
                part.restore(tensors)


def wanted_clients(settings: CohortConfig, population: Population) -> int:
    """M, the number of clients of a round without over-selection."""
    online = len(population.online)
    return min(settings.clients or count_of(settings.fraction, online), online)


def drawn_cohort(
    settings: CohortConfig, population: Population, availability: Availability, round: int
) -> tuple[Cohort, int]:
    """(cohort of a round with over-selection, number of its clients that the round waits for)."""
    wanted, factor, poisson = wanted_clients(settings, population), settings.over_selection, settings.sampling
    clients = settings.clients if factor == 1 else math.ceil(wanted * factor - 1e-9)
    cohort = population.draw(round, settings.fraction, clients, availability, settings.dropout, poisson == "poisson")
    return cohort, len(cohort.ids_M) if factor == 1 else wanted
