"""Which pieces of an exchange a host is given next. Knows nothing of Ray.

A call has several pieces where there are few hosts or pieces are short, and fewer and fewer towards the end, so that
calls are few and all hosts end together (guided self-scheduling: C. Polychronopoulos and D. Kuck, IEEE Transactions on
Computers 36(12), 1987). Within an output row the largest pieces come first. A host stays with an output row while that
has pieces left, so that it adds up few rows.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from cfl_ray.engine.pieces import Piece

_CALLS = 3  # a host is given at most this part of its share of the cost that is left, in one call


class Schedule:
    """The pieces that no host has, or that have to be done again.

    together: whether a call may have several pieces. homes: the only host that may do a piece, by piece; None: any.
    least: the cost from which on a call is worth its own overhead.
    """

    def __init__(
        self, pieces: Sequence[Piece], together: bool = True, homes: Sequence[int | None] = (), least: float = 0.0
    ):
        self.pieces, self.together = list(pieces), together
        self.least, self.total = least, sum(piece.cost for piece in pieces)
        self.homes = list(homes) or [None] * len(pieces)
        self.cost_left = 0.0
        self._rows: dict[int, list[int]] = {}  # pieces by output row, the largest last
        self._row_cost: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []  # (-cost left, row); an entry may be out of date
        self._at_home: dict[int, deque[int]] = {}  # pieces by home
        self._row_of: dict[int, int] = {}  # output row that a host was given last
        self._urgent: deque[int] = deque()  # before all others
        for number in sorted(range(len(self.pieces)), key=lambda number: (self.pieces[number].cost, -number)):
            self._insert(number)
        self._heap = [(-cost, row) for row, cost in self._row_cost.items()]
        heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._rows or self._at_home or self._urgent)

    def _insert(self, number: int) -> None:
        """Adds a piece, which comes first in its row (or at its home)."""
        piece, home = self.pieces[number], self.homes[number]
        if home is not None:
            self._at_home.setdefault(home, deque()).appendleft(number)
            return
        self._rows.setdefault(piece.row, []).append(number)
        self._row_cost[piece.row] = self._row_cost.get(piece.row, 0.0) + piece.cost
        self.cost_left += piece.cost

    def put_back(self, numbers: Sequence[int]) -> None:
        """These pieces have to be done again."""
        for number in numbers:
            self._insert(number)
            row = self.pieces[number].row
            if row in self._row_cost:
                heappush(self._heap, (-self._row_cost[row], row))

    def add_urgent(self, pieces: Sequence[Piece], home: int | None) -> None:
        """New pieces, each of which comes next, in a call of its own."""
        first = len(self.pieces)
        self.pieces.extend(pieces)
        self.homes.extend([home] * len(pieces))
        self._urgent.extend(range(first, len(self.pieces)))

    def next_for(self, host: int, ready: Sequence[int], hosts: Sequence[int] | None = None) -> list[int]:
        """Takes the pieces of the next call of a host; none where there is nothing for it to do.

        ready: numbers of the hosts that are ready, `host` among them. hosts: with those that are starting.
        """
        if urgent := self._next_urgent(host, ready, hosts or ready):
            return urgent
        if self._at_home:
            return self._next_at_home(host, ready, hosts or ready)
        share = max(self.cost_left / (_CALLS * len(ready)), self._even(len(ready))) if self.together else 0.0
        taken: list[int] = []
        cost = 0.0
        while self._rows and (not taken or cost < share):
            row = self._row_for(host)
            number = self._rows[row][-1]
            if taken and cost + self.pieces[number].cost > share:
                break
            self._take(row)
            taken.append(number)
            cost += self.pieces[number].cost
        return taken

    def _even(self, hosts: int) -> float:
        """The least cost of a call, such that all hosts have the same number of calls of at least `least`."""
        if not self.least:
            return 0.0
        of_host = self.total / hosts
        return of_host / max(1, int(of_host / self.least))

    def _row_for(self, host: int) -> int:
        """The row that the host was given last, or else the one with the largest cost left."""
        if (row := self._row_of.get(host, -1)) in self._rows:
            return row
        while True:
            cost, row = self._heap[0]
            if self._row_cost.get(row) == -cost:
                self._row_of[host] = row
                return row
            heappop(self._heap)
            if row in self._row_cost:
                heappush(self._heap, (-self._row_cost[row], row))

    def _take(self, row: int) -> None:
        """Removes the largest piece of a row."""
        number = self._rows[row].pop()
        cost = self.pieces[number].cost
        self.cost_left -= cost
        if self._rows[row]:
            self._row_cost[row] -= cost
        else:
            del self._rows[row], self._row_cost[row]

    # ---- pieces of one host

    def _next_urgent(self, host: int, ready: Sequence[int], hosts: Sequence[int]) -> list[int]:
        number = next((number for number in self._urgent if self._may(host, self.homes[number], ready, hosts)), None)
        if number is None:
            return []
        self._urgent.remove(number)
        return [number]

    def _next_at_home(self, host: int, ready: Sequence[int], hosts: Sequence[int]) -> list[int]:
        for home, queue in self._at_home.items():
            if self._may(host, home, ready, hosts):
                number = queue.popleft()
                if not queue:
                    del self._at_home[home]
                return [number]
        return []

    @staticmethod
    def _may(host: int, home: int | None, ready: Sequence[int], hosts: Sequence[int]) -> bool:
        """Whether a host may do a piece; one stands in for a home that was given up or has not been there."""
        if home is None or home == host:
            return True
        return home not in hosts and ready[home % len(ready)] == host
