"""The virtual time of a method's run: which clients a round waits for, and how long.

Times are known before clients train, because they depend on sizes, speeds and draws by key, so a client that does not
count is not trained.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from cfl_ray.clock.devices import Clock, Load
from cfl_ray.config.asynchronous import AsynchronousConfig
from cfl_ray.core.clients import Traffic
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.state import State, no_numbers
from cfl_ray.core.versions import Received, Versions
from cfl_ray.population.availability import Availability, Chances
from cfl_ray.population.population import Cohort, Population


@dataclass
class VirtualTime:
    """The time of a method's clients, and of its rounds so far.

    load: of a client in a round, as counted by a round without training (`dry_rounds`); the same in all rounds.
    """

    clock: Clock
    load: Load
    local: LocalSGD
    sizes_of: Callable[[np.ndarray], np.ndarray]  # n_i of clients in the present round
    now: float = 0.0  # virtual seconds since round 1 began
    slowest: float = 0.0  # seconds of the present round
    missed: int = 0  # clients of a phase that needs all clients, in the present round, that miss the deadline

    def seconds(self, round: int, ids_M: np.ndarray, draw: int = 0) -> np.ndarray:
        """Seconds (M,) of these clients in a round."""
        sizes_M = self.sizes_of(ids_M)
        trained_M = self.local.steps_of(sizes_M) * np.asarray(self.local.batch_of(sizes_M))
        if self.local.steps is None:
            trained_M = np.minimum(trained_M, self.local.epochs * sizes_M)  # the last batch of an epoch may be smaller
        return self.clock.seconds(round, ids_M, trained_M, sizes_M, self.load, draw)

    def available(self, availability: Availability) -> Availability:
        """The availability of clients by this time; its rounds begin with 1."""
        return availability if self.clock.availability_seconds is None else _ByTime(availability, self)

    def in_time(self, round: int, ids_M: np.ndarray, waits: bool = True) -> np.ndarray:
        """Whether each of these clients meets the deadline, bool (M,).

        waits: the round lasts until the slowest of them is done, or until the deadline, if some do not meet it.
        """
        seconds_M = self.seconds(round, ids_M)
        in_time_M = seconds_M <= (limit := self.clock.deadline or np.inf)
        if waits:
            self.slowest = max(self.slowest, float(np.minimum(seconds_M, limit).max(initial=0.0)))
            self.missed = int((~in_time_M).sum())
        return in_time_M

    def wait_for(self, round: int, cohort: Cohort, wanted: int) -> Cohort:
        """The clients of a cohort that count: the first `wanted` that finish before the deadline."""
        seconds_M = self.seconds(round, cohort.ids_M)
        order_M = np.lexsort((cohort.ids_M, seconds_M))
        met = int((seconds_M <= (self.clock.deadline or np.inf)).sum())
        counted, missed = order_M[: min(met, wanted)], len(order_M) - met
        self.slowest = float(seconds_M[counted].max(initial=0.0))
        if len(counted) < wanted and missed:
            self.slowest, surplus = self.clock.deadline or 0.0, 0
        else:  # enough clients finished in time
            surplus, missed = len(order_M) - len(counted), 0
        ids_M = np.sort(cohort.ids_M[counted])
        absent = np.concatenate([cohort.absent, np.setdiff1d(cohort.ids_M, ids_M)])
        return replace(cohort, ids_M=ids_M, past_deadline=missed, surplus=surplus, absent=absent)

    def wait_for_availability(self) -> None:
        """Advances the time to the next round of the availability, because no client can be reached in this one."""
        if (length := self.clock.availability_seconds) is not None:
            moment = self.now // length
            self.now = (moment + 1) * length
            if self.now // length == moment:  # rounded down
                self.now = float(np.nextafter(self.now, np.inf))

    def count_unused(self, clients: int, traffic: Traffic, *, uploaded: bool = False) -> None:
        """Counts the download of clients whose work does not count, and their upload if it arrived."""
        traffic.down_bits += int(self.load.down_bits) * clients
        if uploaded:
            traffic.up_bits += int(self.load.up_bits) * clients

    def end_round(self) -> None:
        """Adds the time of the round."""
        self.now += self.slowest
        self.slowest, self.missed = 0.0, 0

    def to_tensors(self) -> dict[str, Tensor]:
        """The virtual time, for a checkpoint."""
        return {"now": torch.tensor(self.now, dtype=torch.float64)}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restores the output of `to_tensors`."""
        self.now = float(tensors["now"])


@dataclass(frozen=True)
class Asynchrony:
    """Asynchronous rounds, ready for use."""

    buffer: int
    staleness: Callable[[np.ndarray], np.ndarray]  # (M,) server steps -> weights s(tau) > 0
    config: AsynchronousConfig = AsynchronousConfig()  # the other settings


_OF_FLIGHTS = ("client_F", "version_F", "finish_F", "reports_F", "arrived_F")  # of each client in flight


@dataclass
class Flights:
    """Clients in flight: each trains from the models of the version that it received, until its update arrives.

    A round is a server step. `concurrency` clients train at any time: when a client finishes, another begins with the
    present version. An update that has arrived waits in the buffer, of its cluster or of all, until `buffer` updates
    have arrived; the server then takes these. Updates that arrive at the same time are ordered by version and id, and
    arrive before the server step and before other clients begin. The training itself is computed when the update is
    used. Clients that train, or whose update is in a buffer, are not drawn. Before the first round there are none.
    """

    settings: Asynchrony
    time: VirtualTime
    versions: Versions = field(default_factory=Versions)
    client_F: np.ndarray = field(default_factory=no_numbers)
    version_F: np.ndarray = field(default_factory=no_numbers)  # server steps before the client received its models
    finish_F: np.ndarray = field(default_factory=lambda: np.zeros(0))  # in virtual seconds
    # False: the client drops out; its place is free when it would have finished
    reports_F: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    arrived_F: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))  # its update waits in a buffer
    dropped: int = 0  # in this round
    stale: int = 0  # updates older than max_staleness, in this round

    def leave(self, ids: np.ndarray) -> None:
        """Discards the work of clients that left."""
        gone_F = np.isin(self.client_F, ids)
        self.dropped += int(gone_F.sum())
        self._keep(~gone_F)

    def next_cohort(
        self,
        round: int,
        state: State,
        concurrency: int,
        population: Population,
        availability: Availability,
        dropout: float,
    ) -> tuple[np.ndarray, Received]:
        """(clients of the next server step, ascending, models they received). Advances the time to this step.

        availability: by this time (`VirtualTime.available`).
        """
        self._discard_stale(round, self.arrived_F)
        number = 0
        while True:
            if wanted := concurrency - int((~self.arrived_F).sum()):
                ids, reports = population.draw_more(round, number, wanted, self.client_F, availability, dropout)
                self._begin(round, ids, reports, number)
                number += 1
            if (taken := self._full_buffer(state, population)) is None and not self.arrived_F.all():
                self._wait(round)
                taken = self._full_buffer(state, population)
            elif taken is None:  # no further client can be reached: the step takes the arrived updates
                taken = np.arange(len(self.client_F))
            if taken is not None:
                return self._take(round, taken)

    def _begin(self, round: int, ids: np.ndarray, reports: np.ndarray, number: int) -> None:
        finish = self.time.now + self.time.seconds(round, ids, number)
        version = np.full(len(ids), round - 1)
        self.client_F, self.version_F = np.append(self.client_F, ids), np.append(self.version_F, version)
        self.finish_F, self.reports_F = np.append(self.finish_F, finish), np.append(self.reports_F, reports)
        self.arrived_F = np.append(self.arrived_F, np.zeros(len(ids), bool))

    def _wait(self, round: int) -> None:
        """Advances the time until the next client finishes."""
        until = float(self.finish_F[~self.arrived_F].min())
        self.time.now = max(self.time.now, until)
        due_F = ~self.arrived_F & (self.finish_F <= until)
        self.arrived_F = self.arrived_F | due_F
        lost_F = due_F & ~self.reports_F
        self.dropped += int(lost_F.sum())
        self._keep(~lost_F)
        self._discard_stale(round, self.arrived_F)

    def _discard_stale(self, round: int, arrived_F: np.ndarray) -> None:
        """Discards the arrived updates that are older than `max_staleness`."""
        if (most := self.settings.config.max_staleness) is not None:
            stale_F = arrived_F & (round - 1 - self.version_F > most)
            self.stale += int(stale_F.sum())
            self._keep(~stale_F)

    def _full_buffer(self, state: State, population: Population) -> np.ndarray | None:
        """The updates that the server takes, as positions; None if no buffer is full."""
        order = np.lexsort((self.client_F, self.version_F, self.finish_F))
        order = order[self.arrived_F[order]]
        if not self.settings.config.per_cluster:
            return order[: self.settings.buffer] if len(order) >= self.settings.buffer else None
        cluster = state.assign_N[self.client_F[order]]
        assigned = state.assign_N[population.online]
        full = []
        for k in np.unique(cluster).tolist():  # a cluster with fewer members than a buffer waits for all of them
            size = min(self.settings.buffer, int((assigned == k).sum()))
            if len(members := order[cluster == k]) >= max(size, 1):
                full.append(members[: max(size, 1)])
        return min(full, key=lambda members: self.finish_F[members[-1]], default=None)

    def _take(self, round: int, taken: np.ndarray) -> tuple[np.ndarray, Received]:
        taken = taken[np.argsort(self.client_F[taken])]
        ids_M, version_M = self.client_F[taken], self.version_F[taken]
        weight_M = self.settings.staleness(round - 1 - version_M)
        received = Received(
            self.versions,
            version_of=dict(zip(ids_M.tolist(), version_M.tolist(), strict=True)),
            present=round - 1,
            weight_of=dict(zip(ids_M.tolist(), weight_M.tolist(), strict=True)),
            mixing=self.settings.config.mixing,
            mix_models=self.settings.config.mix == "models",
        )
        self._keep(~np.isin(np.arange(len(self.client_F)), taken))
        return ids_M, received

    def advance(self, round: int, before: State, after: State) -> None:
        """Ends the server step `round`. before: the state when clients received the version of this round."""
        flying, most = set(self.version_F.tolist()), self.settings.config.max_staleness
        kept = {version for version in flying if most is None or round - version <= most}
        self.versions.advance(round - 1, before, after, kept)
        self.dropped = self.stale = 0

    def _keep(self, mask_F: np.ndarray) -> None:
        for name in _OF_FLIGHTS:
            setattr(self, name, getattr(self, name)[mask_F])

    def to_tensors(self) -> dict[str, Tensor]:
        """The clients in flight and their versions, for a checkpoint."""
        return {name: torch.from_numpy(getattr(self, name)) for name in _OF_FLIGHTS} | self.versions.to_tensors()

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restores the output of `to_tensors`."""
        for name in _OF_FLIGHTS:
            setattr(self, name, tensors[name].numpy())
        self.versions = Versions.restored(tensors)


@dataclass(frozen=True)
class _ByTime(Availability):
    """The availability in which a round is that of the present virtual time, whatever the round of the run."""

    inner: Availability
    time: VirtualTime

    @property
    def always(self) -> bool:
        return self.inner.always

    def reachable(self, round: int, num_clients: int) -> np.ndarray | Chances:
        assert self.time.clock.availability_seconds is not None
        return self.inner.reachable(1 + int(self.time.now // self.time.clock.availability_seconds), num_clients)
