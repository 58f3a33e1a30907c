"""Requests granted to a live run: an append-only journal next to the checkpoints of the running method.

    events.jsonl   {"round": 8, "join": [40, 41], "leave": [], "shards": {"uri": ..., "digest": ...}, "stop": null}

An event is on disk before it is acknowledged. A join or leave takes effect before the named round, a stop after it. A
restarted server reads the events before and after its checkpoint from the journal; so does a replay.
"""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from cfl_ray.config.paths import moves_of
from cfl_ray.data import open_shards
from cfl_ray.data.chained import grown
from cfl_ray.data.federation import Federation
from cfl_ray.errors import DataError
from cfl_ray.population.population import PopulationChange
from cfl_ray.run_directory import RunDirectory
from cfl_ray.security.credentials import redact_values, remember_credentials, with_known_credentials
from cfl_ray.system.files import append_line, open_private, private_folder, read_file, read_text, sync

_Count = Annotated[int, Field(ge=0, lt=2**31)]


@dataclass(frozen=True)
class JoinedShards:
    """The shards of newcomers: their URI, and the digest of their content."""

    uri: str
    digest: str

    def open(self) -> Federation:
        """The federation in the shards. Raises DataError if their content has changed."""
        federation = open_shards(self.uri)
        if federation.digest != self.digest:
            raise DataError(
                f"{self.uri} holds other shards than those that joined (digest {federation.digest[:12]}, "
                f"then {self.digest[:12]}); restore them"
            )
        return federation


@dataclass(frozen=True)
class JournalEvent(PopulationChange):
    """Clients that join or leave before `round`, or the end of a session after it."""

    round: _Count
    join: tuple[_Count, ...] = ()
    leave: tuple[_Count, ...] = ()
    shards: JoinedShards | None = None  # data of newcomers that are new to the federation
    stop: str | None = None  # the session that ends after `round`; a resumed or replayed run continues

    def to_line(self) -> str:
        """The event as a line of the journal, without credentials."""
        return json.dumps(redact_values(asdict(self))) + "\n"

    @classmethod
    def from_line(cls, line: bytes) -> "JournalEvent":
        """The event in a line. Raises ValueError if the line is not an event."""
        event: JournalEvent = _EVENT.validate_json(line, strict=True)
        return event.with_uri(with_known_credentials)

    def with_uri(self, change: Callable[[str], str]) -> "JournalEvent":
        """The event with the changed URI of its shards, if any."""
        return self if self.shards is None else replace(self, shards=replace(self.shards, uri=change(self.shards.uri)))


_EVENT = TypeAdapter(JournalEvent)


class Journal:
    """The events of one method of one run, oldest first. directory: None keeps them in memory only.

    If the run directory has moved, missing shards are looked for at the same path relative to the new directory.
    """

    def __init__(self, directory: Path | None):
        self.file = RunDirectory(directory).events if directory else None
        content = (read_file(self.file) if self.file else None) or b""
        self.size = content.rfind(b"\n") + 1  # the rest is an incomplete event from a crash, never acknowledged
        try:
            self.events = [JournalEvent.from_line(line) for line in content[: self.size].split(b"\n")[:-1]]
        except ValidationError as error:
            raise DataError(
                f"{self.file} is damaged ({error.errors()[0]['msg']}); restore it: the run cannot go on without "
                "knowing which clients joined and left"
            ) from error
        if self.file is not None:
            self.events = _with_moved_shards(self.events, self.file.parent.parent)

    def add(self, *events: JournalEvent) -> None:
        """Appends events; they are on disk when this returns."""
        if self.file is not None:
            private_folder(self.file.parent)
            remember_credentials([event.shards.uri for event in events if event.shards])
            with open_private(self.file, "ab") as out:
                out.truncate(self.size)
                append_line(out, "".join(event.to_line() for event in events).encode())
                os.fsync(out.fileno())
                size = out.tell()
            sync(self.file.parent)  # the file may be new
            self.size = size
        self.events.extend(events)

    def until(self, round: int) -> list[JournalEvent]:
        """The joins and leaves of all rounds up to `round`."""
        return [event for event in self.events if event.round <= round and not event.stop]

    def stop_after(self, session: str, saved: int = 0) -> int | None:
        """The round after which this session ends on request; None: no request.

        saved: the last saved round. A stop that an earlier session was asked for, but did not reach because it died,
        applies to this session.
        """
        last = next((event for event in reversed(self.events) if event.stop), None)
        return last.round if last is not None and (last.stop == session or last.round > saved) else None


def _with_moved_shards(events: list[JournalEvent], run_dir: Path) -> list[JournalEvent]:
    """The events; shards of newcomers that moved with the run directory have their new paths."""
    uris = [event.shards.uri for event in events if event.shards]
    moved = moves_of(uris, read_text(RunDirectory(run_dir).config) or "", run_dir) if uris else {}
    return [event.with_uri(lambda uri: moved.get(uri, uri)) for event in events]


def grown_by(federation: Federation, events: Iterable[JournalEvent]) -> Federation:
    """The federation with the shards of all `events`."""
    for event in events:
        if event.shards:
            federation = grown(federation, event.shards.open())
    return federation


def copy_events(source: Path, target: Path) -> None:
    """Copies the joins and leaves of a run to a run that has not begun; they replace those of an earlier attempt."""
    RunDirectory(target).events.unlink(missing_ok=True)
    if events := [event for event in Journal(source).events if not event.stop]:
        Journal(target).add(*events)
