"""What people asked of a live run: an append-only journal beside the checkpoints of the method that was at work.

    events.jsonl   {"round": 8, "join": [40, 41], "leave": [], "shards": {"uri": ..., "digest": ...}, "stop": null}

An event is on disk before it is acknowledged, and happens before the round it names begins; a stop, after it. A server that starts
anew reads here what happened before its checkpoint and what is to happen after it; so does the replay of a run.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from cfl_ray.core.cohort import Change
from cfl_ray.core.disk import sync
from cfl_ray.core.errors import DataError
from cfl_ray.data import open_shards
from cfl_ray.data.chained import grown
from cfl_ray.data.federation import Federation

EVENTS = "events.jsonl"


@dataclass(frozen=True)
class Shards:
    """Where newcomers' data lie, and which data they are."""

    uri: str
    digest: str

    def open(self) -> Federation:
        """Raises DataError where other data lie there now."""
        federation = open_shards(self.uri)
        if federation.digest != self.digest:
            raise DataError(f"{self.uri} holds other shards than those that joined (digest {federation.digest[:12]}, then {self.digest[:12]}); restore them")
        return federation


@dataclass(frozen=True)
class Event:
    """Clients that join or leave before `round`; `shards` hold those that the federation did not know. Or the end after `round`."""

    round: int
    join: tuple[int, ...] = ()
    leave: tuple[int, ...] = ()
    shards: Shards | None = None
    stop: str | None = None  # the session that ends after `round`; a resumed or replayed run goes on

    @property
    def change(self) -> Change:
        return Change(self.round, self.join, self.leave)

    def to_line(self) -> str:
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_line(cls, line: bytes) -> "Event":
        values = json.loads(line)
        shards = values["shards"]
        return cls(values["round"], tuple(values["join"]), tuple(values["leave"]), Shards(**shards) if shards else None, values["stop"])


class Journal:
    """The events of one method of one run, oldest first; in memory alone where nothing is kept (None)."""

    def __init__(self, directory: Path | None):
        self.file = Path(directory) / EVENTS if directory else None
        content = self.file.read_bytes() if self.file and self.file.exists() else b""
        self.size = content.rfind(b"\n") + 1  # what follows was torn by a crash: nobody was told that it would happen
        try:
            self.events = [Event.from_line(line) for line in content[: self.size].splitlines()]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self.file} is damaged ({error!r}); restore it: the run cannot go on without knowing who joined and left") from error

    def add(self, *events: Event) -> None:
        """Keeps events; they are on disk when this returns."""
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("ab") as out:
                out.truncate(self.size)
                out.write("".join(event.to_line() for event in events).encode())
                out.flush()
                os.fsync(out.fileno())
                size = out.tell()
            sync(self.file.parent)  # the name of a new file
            self.size = size
        self.events.extend(events)

    def until(self, round: int) -> list[Event]:
        """What happened before `round` began, and as it did."""
        return [event for event in self.events if event.round <= round and not event.stop]

    def stop_after(self, session: str) -> int | None:
        """The round after which this session ends."""
        return next((event.round for event in self.events if event.stop and event.stop == session), None)


def grown_by(federation: Federation, events: Iterable[Event]) -> Federation:
    """The federation after `events`."""
    for event in events:
        if event.shards:
            federation = grown(federation, event.shards.open())
    return federation


def copy_events(source: Path, target: Path) -> int:
    """Gives a run that has not begun what was asked of another one. Returns the number of events."""
    events = [event for event in Journal(source).events if not event.stop]
    if events:
        Journal(target).add(*events)
    return len(events)
