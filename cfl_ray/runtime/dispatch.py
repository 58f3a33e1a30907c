"""The calls of one exchange: made on hosts as they become free, again when a host dies, in smaller parts when one takes too long."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayTaskError

from cfl_ray.runtime.connect import told
from cfl_ray.runtime.pool import LOST, Host, Pool

_IN_FLIGHT = 2  # calls a host has at a time: one to do, one waiting, so that it never waits for the server


@dataclass(frozen=True)
class Call:
    """One call that a host may have to repeat elsewhere: `start(actor)` makes it, the first return is what is waited for."""

    start: Callable[[Any], list[ray.ObjectRef]]
    home: int | None = None  # the only host that may do it, or one that stands in for it; None: any
    seconds: float | None = None  # a host that is at work on it for longer is ended; None: no limit
    instead: Callable[[], list["Call"]] = list  # what to do then: its parts, or nothing


@dataclass
class Dispatch:
    """Makes every call once and hands its returns to `take(call number, returns)`."""

    pool: Pool
    calls: list[Call]
    take: Callable[[int, list[ray.ObjectRef]], None]
    todo: deque[int] = field(default_factory=deque)
    waiting: dict[ray.ObjectRef, tuple[int, int, list]] = field(default_factory=dict)  # (host, call, returns), in the order of each host
    done: dict[int, list[int]] = field(default_factory=dict)  # by host that is still alive
    since: dict[int, float] = field(default_factory=dict)  # when a host could begin what it is at

    def run(self, collect: Callable[[Any], ray.ObjectRef] | None, merge: Callable[[Any], None]) -> None:
        """With `collect`, each host that worked is asked for what it gathered, and `merge` gets that once per host.

        A host that dies before it was collected takes its gathered calls with it: they are made again. Raises ObjectLostError when
        something that the calls need (what clients own) went down with its node.
        """
        self.todo.extend(range(len(self.calls)))
        while self.todo:
            self._work_off()
            if collect is None:
                return
            done, self.done = self.done, {}
            for number, positions in done.items():
                host = self.pool.host(number)
                try:
                    merge(ray.get(collect(host.actor), timeout=self.pool.setup.experiment.runtime.round_deadline))
                except (GetTimeoutError, *LOST) as error:
                    self.todo.extend(positions)
                    self.pool.lost(host, error)

    def _work_off(self) -> None:
        """Empties `todo`; `done` says what each host that is still alive has done."""
        while self.todo or self.waiting:
            self._hand_out()
            ended = self.pool.wait(list(self.waiting), self._patience())
            if ended is None:
                self._end_late()
                continue
            number, position, returns = self.waiting.pop(ended)
            self.since[number] = time.monotonic()
            try:
                self.take(position, [ray.get(returns[0]), *returns[1:]])
                self.done.setdefault(number, []).append(position)
            except RayTaskError as error:  # before LOST: an argument that is lost makes an error that is both
                raise error.cause if isinstance(error.cause, ObjectLostError) else told(error) from error
            except LOST as error:
                self.todo.append(position)
                self._take_back(number)
                self.pool.lost(self.pool.host(number), error)

    def _hand_out(self) -> None:
        for host in self.pool.hosts if self.waiting else self.pool.ready():
            while not host.starting and self.todo and (under_way := sum(number == host.number for number, _, _ in self.waiting.values())) < _IN_FLIGHT:
                position = self._next_for(host)
                if position is None:
                    break
                returns = self.calls[position].start(host.actor)
                self.waiting[returns[0]] = (host.number, position, returns)
                if not under_way:
                    self.since[host.number] = time.monotonic()

    def _next_for(self, host: Host) -> int | None:
        homes, ready = {other.number for other in self.pool.hosts}, [other.number for other in self.pool.hosts if other.starting is None]
        for position in self.todo:
            home = self.calls[position].home
            if home is not None and home not in homes:  # it was given up, or the client came later than the hosts
                home = ready[home % len(ready)]
            if home in (None, host.number):
                self.todo.remove(position)
                return position
        return None

    def _take_back(self, number: int) -> None:
        """What was under way or gathered on a host that is gone is to be done again."""
        lost = [ref for ref, entry in self.waiting.items() if entry[0] == number]
        self.todo.extend([*(self.waiting.pop(ref)[1] for ref in lost), *self.done.pop(number, [])])

    # ---- work that takes too long

    def _due(self) -> Iterator[tuple[float, int, ray.ObjectRef]]:
        """(when, host, what it is at) of every host whose present call has a limit."""
        present = {number: (ref, position) for ref, (number, position, _) in reversed(self.waiting.items())}  # the first of each
        for number, (ref, position) in present.items():
            if (seconds := self.calls[position].seconds) is not None:
                yield self.since[number] + seconds, number, ref

    def _patience(self) -> float | None:
        """Seconds until the first call will have taken too long; None: no call has a limit."""
        due = min((when for when, _, _ in self._due()), default=None)
        return None if due is None else max(0.0, due - time.monotonic())

    def _end_late(self) -> None:
        """Ends the hosts whose time is up; the parts of what they were at come first, so that little else is done in vain."""
        for when, number, ref in list(self._due()):
            if time.monotonic() < when or ray.wait([ref], timeout=0)[0]:
                continue
            call = self.calls[self.waiting.pop(ref)[1]]
            self._take_back(number)
            first = len(self.calls)
            self.calls.extend(call.instead())
            self.todo.extendleft(reversed(range(first, len(self.calls))))
            self.pool.end(self.pool.host(number), f"was at work for more than {call.seconds:g} s")
