"""What people ask of the method at work, beside its rounds: checked at once, written down, taken up when the next round begins.

The round's thread calls `taken_up`, `sees` and `enters`; the others may be called from any thread at any time.
"""

import threading
from collections.abc import Sequence
from copy import copy

import numpy as np

from cfl_ray.core.cohort import Population
from cfl_ray.core.errors import ConfigError, RunError
from cfl_ray.core.ids import spans
from cfl_ray.data.chained import grown
from cfl_ray.data.federation import Federation
from cfl_ray.runtime.journal import Event, Journal, Shards
from cfl_ray.runtime.lifecycle import Evaluating, Lifecycle, Running, Saving, Starting


class Requests:
    """Requests to one method of one run. Raises ConfigError for one that cannot be granted, which then leaves no trace.

    recorded: the last round whose figures are on record; what happens before it is settled, though it may have to be computed again.
    """

    def __init__(self, label: str, journal: Journal, federation: Federation, rounds: int, session: str, recorded: int = 0):
        self.label, self.journal, self.rounds, self.session = label, journal, rounds, session
        self.lock = threading.RLock()
        self.now: Lifecycle = Starting()
        self.settled = recorded  # the last round whose population is fixed
        self.stop_after = journal.stop_after(session)
        self.federations = [(0, federation)]  # from which round on; the last one has everybody who was promised a place
        for event in journal.events:
            if event.shards:
                self.federations.append((event.round, grown(self.federations[-1][1], event.shards.open())))

    # ---- for the round's thread

    def federation(self, round: int) -> Federation:
        """The federation as it is in a round."""
        return next(federation for first, federation in reversed(self.federations) if first <= round)

    def taken_up(self, round: int) -> list[Event]:
        """What happens before `round`; nothing can be added to it from now on."""
        with self.lock:
            self.settled = max(self.settled, round)
            return [event for event in self.journal.until(round) if event.round == round]

    def sees(self, population: Population) -> None:
        """Who is online now: what requests are checked against."""
        self.population = copy(population)

    def enters(self, now: Lifecycle) -> None:
        self.now = now

    # ---- for everybody

    def join(self, ids: Sequence[int]) -> str:
        """Lets known clients come that are offline. Returns what will happen."""
        with self.lock:
            round = self._next()
            self._check("join", ids, round)
            return self._grant(Event(round, join=tuple(sorted(ids))), "join")

    def join_shards(self, shards: Shards, added: Federation) -> str:
        """Lets all clients of `added` come as newcomers, with the next free ids."""
        with self.lock:
            round, there = self._next(), self.federations[-1][1]
            whole = grown(there, added)
            ids = tuple(range(there.num_clients, whole.num_clients))
            said = self._grant(Event(round, join=ids, shards=shards), "join")
            self.federations.append((round, whole))
            return said

    def leave(self, ids: Sequence[int]) -> str:
        """Lets clients go that are online."""
        with self.lock:
            round = self._next()
            self._check("leave", ids, round)
            event = Event(round, leave=tuple(sorted(ids)))
            self._never_empty(event)
            return self._grant(event, "leave")

    def stop(self) -> str:
        """Ends the run after the present round."""
        with self.lock:
            if not isinstance(self.now, Running | Evaluating | Saving):
                raise RunError(f"{self.label} is not at work just now; ask again in a moment")
            if self.stop_after is None:
                self.journal.add(Event(self.now.round, stop=self.session))
                self.stop_after = self.now.round
            return f"{self.label}: the run ends after round {self.stop_after}, which is saved"

    def pending(self) -> list[str]:
        """What was granted and has not happened yet, one line each."""
        with self.lock:
            to_come = [event for event in self.journal.events if event.round > self.settled and not event.stop]
            lines = [_said(event, "join" if event.join else "leave") for event in to_come]
            return [*lines, *([f"the run ends after round {self.stop_after}"] if self.stop_after else [])]

    # ---- checks

    def _next(self) -> int:
        """The first round whose population is open. Later than an event on record: what was promised stays as it is."""
        last = max((event.round for event in self.journal.events if not event.stop), default=0)
        round = max(self.settled + 1, last)
        if round > self.rounds:
            raise ConfigError(f"{self.label} has begun its last round ({self.rounds}); nobody can join or leave any more")
        return round

    def _check(self, verb: str, ids: Sequence[int], round: int) -> None:
        """Raises ConfigError where a client is unknown, named twice, asked for already, or where it is to be."""
        count = self.federations[-1][1].num_clients
        if unknown := [client for client in ids if not 0 <= client < count]:
            raise ConfigError(f"{verb}: client {unknown[0]} does not exist; the federation has clients 0 .. {count - 1}")
        if not ids:
            raise ConfigError(f"{verb}: no client is named")
        if twice := [client for client in ids if list(ids).count(client) > 1] if len(set(ids)) < len(ids) else []:
            raise ConfigError(f"{verb}: client {twice[0]} is named twice; name it once")
        asked = {client: event for event in self.journal.events if event.round == round for client in (*event.join, *event.leave)}
        if both := [client for client in ids if client in asked]:
            done = "joins" if both[0] in asked[both[0]].join else "leaves"
            raise ConfigError(f"{verb}: client {both[0]} {done} before round {round} already, as was asked; ask again when that has happened")
        trial = self._trial()
        trial.advance(round)
        ids_n = np.asarray(ids)
        wrong = ids_n[trial.is_online_N[ids_n] == (verb == "join")]
        if len(wrong):
            raise ConfigError(f"{verb}: client {wrong[0]} is {'online already' if verb == 'join' else 'offline'} in round {round}")

    def _never_empty(self, event: Event) -> None:
        """Raises ConfigError where nobody would be online after `event`, in its round or after a change that is planned."""
        trial = self._trial(event)
        for round in sorted({change.round for change in trial.changes if trial.round < change.round <= self.rounds}):
            try:
                trial.advance(round)
            except ConfigError:
                raise ConfigError(f"leave: no client would be left in round {round}; let fewer leave or others join first") from None

    def _trial(self, *more: Event) -> Population:
        """The population to come, for trying out what would be."""
        trial = copy(self.population)
        for event in (*self.journal.events, *more):
            if event.round > self.population.round and not event.stop:
                trial.add(event.change, self.federation(event.round).num_clients)
        return trial

    def _grant(self, event: Event, verb: str) -> str:
        self.journal.add(event)
        return f"{self.label}: {_said(event, verb)}"


def _said(event: Event, verb: str) -> str:
    ids = event.join or event.leave
    return f"client{'s' * (len(ids) > 1)} {spans(ids)} {verb}{'s' * (len(ids) == 1)} before round {event.round}"
