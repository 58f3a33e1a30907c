"""The federation and its population in a round, from the schedule and from requests to the live run."""

from dataclasses import dataclass

import numpy as np

from cfl_ray.data.federation import Federation
from cfl_ray.population.population import Population
from cfl_ray.runtime.requests import Requests
from cfl_ray.setup.schedule import population_of
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
