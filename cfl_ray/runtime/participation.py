"""The clients of a round: which are in the federation and online, and which are drawn.

Clients join and leave, and their data change, by the schedule and by requests to the live run.
"""

from dataclasses import dataclass

import numpy as np

from cfl_ray.config.cohort import CohortConfig
from cfl_ray.data.federation import Federation
from cfl_ray.population.availability import Availability
from cfl_ray.population.population import Cohort, Population, count_of, selected_of
from cfl_ray.runtime.requests import Requests
from cfl_ray.setup.scheduled_changes import population_of
from cfl_ray.setup.setup import Setup


@dataclass(frozen=True)
class MembershipChange:
    """Changes of the clients before a round; ids are ascending."""

    left: np.ndarray
    joined: np.ndarray
    data_changed: np.ndarray  # online clients whose data change in this round


class Membership:
    """The clients of the federation, the online clients, and the cohorts drawn among them.

    federation: with the shards of all newcomers so far. present: the same with the data of the present round.
    """

    def __init__(self, setup: Setup, requests: Requests):
        self.requests, self.settings, self.availability = requests, setup.experiment.cohort, setup.availability
        self.federation = self.present = setup.federation
        self.population: Population = population_of(setup.experiment, setup.federation.num_clients)

    def restore(self, round: int) -> None:
        """Restores federation and population after the last saved round (0: before round 1), from the journal."""
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

    @property
    def wanted(self) -> int:
        """M, the number of clients of a round without over-selection."""
        return wanted_clients(self.settings, self.population)

    def cohort(self, round: int) -> Cohort:
        """The cohort of a round, with over-selection."""
        return drawn_cohort(self.settings, self.population, self.availability, round)

    def awaited(self, cohort: Cohort) -> int:
        """The number of clients of a cohort that its round waits for."""
        return awaited_clients(self.settings, self.population, cohort)

    def reachable(self, round: int) -> np.ndarray:
        """Ids of all clients that are online, reachable and do not drop out in the round."""
        return self.population.draw(round, 1.0, None, self.availability, self.settings.dropout).ids_M


def wanted_clients(settings: CohortConfig, population: Population) -> int:
    """M, the number of clients of a round without over-selection."""
    online = len(population.online)
    return min(settings.clients or count_of(settings.fraction, online), online)


def drawn_cohort(settings: CohortConfig, population: Population, availability: Availability, round: int) -> Cohort:
    """The cohort of a round, with over-selection."""
    factor, is_poisson = settings.over_selection, settings.sampling == "poisson"
    clients = settings.clients if factor == 1 else selected_of(wanted_clients(settings, population), factor)
    return population.draw(round, settings.fraction, clients, availability, settings.dropout, is_poisson)


def awaited_clients(settings: CohortConfig, population: Population, cohort: Cohort) -> int:
    """The number of clients of a cohort that its round waits for: all, or with over-selection M."""
    return len(cohort.ids_M) if settings.over_selection == 1 else wanted_clients(settings, population)
