"""Requests to the running method: checked at once, journaled, and taken up when the next round begins.

The thread of the round loop calls `take_up`, `set_population` and `set_status`; the other methods are thread-safe.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from pathlib import Path

import numpy as np

from cfl_ray.config.client_ids import clients_in_words
from cfl_ray.data.chained import grown
from cfl_ray.data.federation import Federation
from cfl_ray.errors import ConfigError, NotReady
from cfl_ray.population.population import Population
from cfl_ray.runtime.journal import JoinedShards, Journal, JournalEvent
from cfl_ray.setup.protection import check_joining
from cfl_ray.setup.setup import Setup
from cfl_ray.tracking import last_record
from cfl_ray.tracking.record import Status


class Requests:
    """Requests to one method of one run. Raises ConfigError for a refused request, which is not journaled.

    check_joining: raises ConfigError if clients that join would end the run; called with the federation then. recorded:
    the last round whose metrics are recorded; its population is fixed even if the round is computed again.
    """

    def __init__(
        self,
        label: str,
        journal: Journal,
        federation: Federation,
        check_joining: Callable[[Federation], None],
        rounds: int,
        session: str,
        recorded: int = 0,
    ):
        self.label, self.journal, self.rounds, self.session = label, journal, rounds, session
        self.check_joining = check_joining
        self.lock = threading.RLock()
        self.status: Status = "starting"
        self.round = 0  # the round in progress
        self.settled = recorded  # the last round whose population is fixed
        self.why_fixed = ""  # why clients cannot join or leave on request; empty: they can
        self.stop_after: int | None = None  # the round after which a request ends the run
        self.federations = [(0, federation)]  # (first round, federation); the last has all granted newcomers
        for event in journal.events:
            if event.shards:
                self.federations.append((event.round, grown(self.federations[-1][1], event.shards.open())))

    @classmethod
    def to(cls, setup: Setup, label: str, directory: Path | None, session: str) -> "Requests":
        """Requests to a method of the experiment. directory: of the method; None: no files are kept."""
        last = last_record(directory) if directory else None
        check, rounds = partial(check_joining, setup, label), setup.experiment.rounds
        return cls(label, Journal(directory), setup.federation, check, rounds, session, last.round if last else 0)

    # ---- for the thread of the round loop

    def stopped(self, round: int) -> None:
        """Journals that the run was stopped within a round; `round` is the last saved round."""
        with self.lock:
            self.journal.add(JournalEvent(round, stop=self.session))

    def federation(self, round: int) -> Federation:
        """The federation in `round`."""
        return next(federation for first, federation in reversed(self.federations) if first <= round)

    def take_up(self, round: int) -> list[JournalEvent]:
        """The joins and leaves before `round`, whose population is fixed from now on."""
        with self.lock:
            self.settled = max(self.settled, round)
            while len(self.federations) > 1 and self.federations[1][0] <= round:
                del self.federations[0]  # of earlier rounds
            return [event for event in self.journal.until(round) if event.round == round]

    def set_population(self, population: Population) -> None:
        """Sets the population against which requests are checked."""
        self.population = copy(population)

    def set_status(self, status: Status, round: int) -> None:
        """Sets the status and round of the run."""
        self.status, self.round = status, round

    # ---- for any thread

    def join(self, ids: Sequence[int]) -> str:
        """Grants that known offline clients join. Returns a line for the user that names the round."""
        with self.lock:
            round = self._next()
            self._check("join", ids, round)
            self.check_joining(self.federations[-1][1])
            return self._grant(JournalEvent(round, join=tuple(sorted(ids))))

    def join_shards(self, shards: JoinedShards, added: Federation) -> str:
        """Grants that all clients of `added` join as newcomers with the next free ids. Returns a line for the user."""
        with self.lock:
            round, known = self._next(), self.federations[-1][1]
            self.check_joining(whole := grown(known, added))
            ids = tuple(range(known.num_clients, whole.num_clients))
            answer = self._grant(JournalEvent(round, join=ids, shards=shards))
            self.federations.append((round, whole))
            return answer

    def leave(self, ids: Sequence[int]) -> str:
        """Grants that online clients leave. Returns a line for the user."""
        with self.lock:
            round = self._next()
            self._check("leave", ids, round)
            event = JournalEvent(round, leave=tuple(sorted(ids)))
            self._check_never_empty(event)
            return self._grant(event)

    def stop(self) -> str:
        """Ends the run after the present round. Returns a line for the user. Raises NotReady if no round is running."""
        with self.lock:
            if self.status not in ("running", "evaluating", "saving"):
                raise NotReady(f"{self.label} is not running just now; ask again in a moment")
            if self.stop_after is None:
                self.journal.add(JournalEvent(self.round, stop=self.session))
                self.stop_after = self.round
            return f"{self.label}: the run ends after round {self.stop_after}, which is saved"

    def pending(self) -> list[str]:
        """Granted requests that have not taken effect, one line each."""
        with self.lock:
            to_come = [event for event in self.journal.events if event.round > self.settled and not event.stop]
            lines = list(map(_announcement, to_come))
            return [*lines, *([f"the run ends after round {self.stop_after}"] if self.stop_after else [])]

    # ---- checks

    def _next(self) -> int:
        """The first round whose population can still change.

        It is not before the round of the last journaled event, which stays as it was granted.
        """
        if self.why_fixed:
            raise ConfigError(f"{self.label}: clients cannot join or leave: {self.why_fixed}")
        last = max((event.round for event in self.journal.events if not event.stop), default=0)
        round = max(self.settled + 1, last)
        if round > self.rounds:
            raise ConfigError(
                f"{self.label} has begun its last round ({self.rounds}); clients can no longer join or leave"
            )
        return round

    def _check(self, verb: str, ids: Sequence[int], round: int) -> None:
        """Raises ConfigError if a client is unknown, named twice, requested already, or online (offline) already."""
        count = self.federations[-1][1].num_clients
        if unknown := [client for client in ids if not 0 <= client < count]:
            raise ConfigError(
                f"{verb}: client {unknown[0]} does not exist; the federation has clients 0 .. {count - 1}"
            )
        if not ids:
            raise ConfigError(f"{verb}: no client is named")
        if twice := [client for client, times in Counter(ids).items() if times > 1]:
            raise ConfigError(f"{verb}: client {twice[0]} is named twice; name it once")
        events = [event for event in self.journal.events if event.round == round]
        granted = {client: event for event in events for client in (*event.join, *event.leave)}
        if both := [client for client in ids if client in granted]:
            change = "joins" if both[0] in granted[both[0]].join else "leaves"
            raise ConfigError(
                f"{verb}: client {both[0]} {change} before round {round} already, as requested earlier; "
                "try again after that round"
            )
        trial = self._trial()
        trial.advance(round)
        ids_n = np.asarray(ids)
        wrong = ids_n[trial.is_online_N[ids_n] == (verb == "join")]
        if len(wrong):
            status = "online already" if verb == "join" else "offline"
            raise ConfigError(f"{verb}: client {wrong[0]} is {status} in round {round}")

    def _check_never_empty(self, event: JournalEvent) -> None:
        """Raises ConfigError if no client would be online after `event`, in its round or after a planned change."""
        trial = self._trial(event)
        for round in sorted({change.round for change in trial.changes if trial.round < change.round <= self.rounds}):
            try:
                trial.advance(round)
            except ConfigError:
                raise ConfigError(
                    f"leave: no client would be left in round {round}; let fewer leave or others join first"
                ) from None

    def _trial(self, *more: JournalEvent) -> Population:
        """A copy of the population with all granted events and `more`, which a check can advance."""
        trial = copy(self.population)
        for event in (*self.journal.events, *more):
            if event.round > self.population.round and not event.stop:
                trial.add(event, self.federation(event.round).num_clients)
        return trial

    def _grant(self, event: JournalEvent) -> str:
        self.journal.add(event)
        return f"{self.label}: {_announcement(event)}"


def _announcement(event: JournalEvent) -> str:
    ids, verb = event.join or event.leave, "join" if event.join else "leave"
    return f"{clients_in_words(ids)} {verb}{'s' * (len(ids) == 1)} before round {event.round}"
