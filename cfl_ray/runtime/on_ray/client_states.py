"""Client states on Ray: in the object store until a checkpoint, then in its files, which the hosts write and read.

The server keeps the place of each value. If hosts have the run directory, no value passes through the server. Otherwise
the server writes the files, values stay in the object store, and the server puts the values of a checkpoint there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from torch import Tensor

from cfl_ray.checkpoint.lease import SharedDirectory
from cfl_ray.core.backend import ClientStateKey, SavedState, StateFile
from cfl_ray.core.work import CombineColumns, Work
from cfl_ray.engine.client_state import ClientStateStore
from cfl_ray.errors import UserError
from cfl_ray.runtime.on_ray.pool import Host, Pool
from cfl_ray.runtime.on_ray.stored import Place, StoredValue, fetched, place_of, put_all, tensor_of

_ANSWER_SECONDS = 10.0  # limit for a host that is asked whether it has the run directory
_POLL_SECONDS = 1.0  # between polls of the files that hosts write


class RayClientStates(ClientStateStore):
    """The client states of a method, by their places."""

    def __init__(self, pool: Pool, shared: SharedDirectory | None):
        super().__init__()
        self.pool, self.shared = pool, shared
        self._has_directory: dict[str, bool] = {}  # by node

    def places(self, work: Work, host: Host) -> dict[int, tuple[Place, ...]]:
        """Places, readable by this host, of the parts of each value that `work` uses, by position.

        For `CombineColumns`: the place of a part of every member for each range, range after range.
        """
        values = self.of(work)
        if isinstance(work, CombineColumns):
            ranges = enumerate(work.part_M.tolist())
            return {
                unit * len(values) + i: (place_of(parts[part]),) for unit, part in ranges for i, parts in values.items()
            }
        if work.deferred_from is not None:
            return {i: tuple(map(place_of, parts)) for i, parts in values.items()}
        unreadable = [
            i
            for i, value in values.items()
            if isinstance(value, SavedState) and not (_has_file(value) and self._shares(host))
        ]
        if unreadable:
            keys = work.stored_keys.tolist()
            key_of = {i: work.state_key(keys[i]) for i in unreadable}
            placed = dict(put_all((key_of[i], values[i].tensor()) for i in unreadable))
            super().move(placed)
            values |= {i: placed[key_of[i]] for i in unreadable}
        return {i: (place_of(value),) for i, value in values.items()}

    def tensor(self, value: Any) -> Tensor:
        if isinstance(value, StoredValue):
            return tensor_of(fetched(value.ref), value.position)
        return super().tensor(value)

    def changed(self, everything: bool = False) -> dict[ClientStateKey, int]:
        changed = super().changed(everything)
        return dict(sorted(changed.items(), key=lambda item: _order(self[item[0]])))

    def move(self, entries: Mapping[ClientStateKey, Any]) -> None:
        """Takes the values from these files, but only if all hosts can read them.

        For a host that cannot, the server would put each value into the object store again.
        """
        if all(self._shares(host) for host in self.pool.ready_now):
            super().move(entries)

    def write(self, files: Sequence[StateFile]) -> list[Any]:
        """Writes these files on hosts, each preferably on the node of its first value. Returns their entries.

        The server writes a file whose host is lost, or whose values no host can read. Raises the error of a host that
        cannot write.
        """
        queues = self._queues(files)
        idle = [host for host in self.pool.ready_now if self._shares(host)]
        calls: dict[ray.ObjectRef[Any], tuple[int, Host]] = {}
        written: dict[int, Any] = {}
        failure: UserError | None = None
        while calls or (idle and any(queues.values()) and failure is None):
            while idle and any(queues.values()) and failure is None:
                host = idle.pop()
                queue = queues.get(host.node) or next(filter(None, queues.values()))
                file = files[number := queue.popleft()]
                places = [place_of(self[key]) for key in file.keys]
                calls[host.actor.write.remote(file, places)] = number, host
            ended, _ = ray.wait(list(calls), timeout=_POLL_SECONDS)
            self.pool.polls += len(ended)
            for ref in ended:
                number, host = calls.pop(ref)
                try:
                    written[number] = ray.get(ref)
                    idle.append(host)
                except RayTaskError as error:
                    idle.append(host)
                    if isinstance(error.cause, UserError):
                        failure = failure or error.cause
                except RayError:  # the host is lost: the next exchange restarts it
                    pass
        if failure is not None:
            raise failure
        for number, file in enumerate(files):
            if number not in written:
                written[number] = file.write(self.tensors(file.keys), again=True)
        return [written[number] for number in range(len(files))]

    def _queues(self, files: Sequence[StateFile]) -> dict[str, deque[int]]:
        """Numbers of the files whose values hosts can read, by the node of their first value; "": in a file."""
        queues: dict[str, deque[int]] = {}
        for number, file in enumerate(files):
            values = [self[key] for key in file.keys]
            if all(isinstance(value, StoredValue) or _has_file(value) for value in values):
                queues.setdefault(getattr(values[0], "node", ""), deque()).append(number)
        return queues

    def _shares(self, host: Host) -> bool:
        """Whether a host also has the run directory."""
        if self.shared is None:
            return False
        if host.node not in self._has_directory:
            try:
                answer = host.actor.has_directory.remote(self.shared)
                self._has_directory[host.node] = ray.get(answer, timeout=_ANSWER_SECONDS)
            except RayError:
                return False
        return self._has_directory[host.node]


def _has_file(value: SavedState) -> bool:
    return Path(value.entry.file).exists()


def _order(value: StoredValue | SavedState) -> tuple[Any, ...]:
    """A sort key by which values of the same node and object are adjacent."""
    if isinstance(value, SavedState):
        return "", b"", value.entry, value.row
    return value.node, value.ref.binary(), (), value.position or 0
