"""The choice of the chunks that a host is given next, from the queue of those that are not done. Independent of Ray.

A call has several chunks if hosts are few or chunks are short, and ever fewer towards the end, so that calls are few
and all hosts end together (guided self-scheduling: C. Polychronopoulos and D. Kuck, IEEE Transactions on Computers
36(12), 1987). A group is the chunks of one output row whose data are on one node. Within a group the largest chunks
come first. A host stays with a group while the group has chunks left, so that it adds up few rows; then it prefers
groups whose data are on its node.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from cfl_ray.engine.chunks import Chunk

Group = tuple[int, str]  # output row, and the node that has the data; "": every node, or none
_CALLS = 3  # a call has at most 1 / _CALLS of the host's share of the remaining cost


class ChunkQueue:
    """The chunks that no host was given yet, or that have to be done again.

    together: whether a call may have several chunks. homes: the only host that may do a chunk, by chunk; None: any.
    least: the least cost of a call that is worth its overhead. nodes: the node that has the data of a chunk, by chunk;
    "": every node, or not known. most: the largest number of clients in a call of several chunks.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        together: bool = True,
        homes: Sequence[int | None] = (),
        least: float = 0.0,
        nodes: Sequence[str] = (),
        most: float = float("inf"),
    ):
        self.chunks, self.together = list(chunks), together
        self.least, self.most, self.total = least, most, sum(chunk.cost for chunk in chunks)
        self.homes, self.nodes = list(homes) or [None] * len(chunks), list(nodes) or [""] * len(chunks)
        self.cost_left = 0.0
        self._groups: dict[Group, list[int]] = {}  # chunks, the largest last
        self._group_cost: dict[Group, float] = {}
        # by node: (-cost left, group); an entry may be out of date
        self._heaps: dict[str, list[tuple[float, Group]]] = {}
        self._at_home: dict[int, deque[int]] = {}  # chunks by home
        self._group_of: dict[int, Group] = {}  # by host: the group that it was given last
        self._urgent: deque[int] = deque()  # before all others
        for number in sorted(range(len(self.chunks)), key=lambda number: (self.chunks[number].cost, -number)):
            self._insert(number)
        for group, cost in self._group_cost.items():
            self._heaps.setdefault(group[1], []).append((-cost, group))
        for heap in self._heaps.values():
            heapify(heap)

    def __bool__(self) -> bool:
        return bool(self._groups or self._at_home or self._urgent)

    def _insert(self, number: int) -> None:
        """Adds a chunk, which comes first in its group (or at its home)."""
        chunk, home = self.chunks[number], self.homes[number]
        if home is not None:
            self._at_home.setdefault(home, deque()).appendleft(number)
            return
        group = chunk.row, self.nodes[number]
        self._groups.setdefault(group, []).append(number)
        self._group_cost[group] = self._group_cost.get(group, 0.0) + chunk.cost
        self.cost_left += chunk.cost

    def put_back(self, numbers: Sequence[int]) -> None:
        """Puts back these chunks, which have to be done again."""
        for number in numbers:
            self._insert(number)
            group = self.chunks[number].row, self.nodes[number]
            if group in self._group_cost:
                heappush(self._heaps.setdefault(group[1], []), (-self._group_cost[group], group))

    def add_urgent(self, chunks: Sequence[Chunk], home: int | None) -> None:
        """Adds new chunks before all others, each in a separate call."""
        first = len(self.chunks)
        self.chunks.extend(chunks)
        self.homes.extend([home] * len(chunks))
        self.nodes.extend([""] * len(chunks))
        self._urgent.extend(range(first, len(self.chunks)))

    def next_for(
        self, host: int, ready: Sequence[int], hosts: Sequence[int] | None = None, node: str = ""
    ) -> list[int]:
        """Takes the chunks of the next call of a host; empty if there is no work for it.

        ready: numbers of the ready hosts, including `host`. hosts: the same and the starting hosts. node: of the host.
        """
        if urgent := self._next_urgent(host, ready, hosts or ready):
            return urgent
        if self._at_home:
            return self._next_at_home(host, ready, hosts or ready)
        share = max(self.cost_left / (_CALLS * len(ready)), self._even(len(ready))) if self.together else 0.0
        taken: list[int] = []
        cost, clients = 0.0, 0
        while self._groups and (not taken or cost < share):
            group = self._group_for(host, node)
            number = self._groups[group][-1]
            chunk = self.chunks[number]
            if taken and (cost + chunk.cost > share or clients + len(chunk.index_m) > self.most):
                break
            self._take(group)
            taken.append(number)
            cost, clients = cost + chunk.cost, clients + len(chunk.index_m)
        return taken

    def _even(self, hosts: int) -> float:
        """The cost of a call if all hosts get equally many calls, none of them below `least`; 0 without `least`."""
        if not self.least:
            return 0.0
        of_host = self.total / hosts
        return of_host / max(1, int(of_host / self.least))

    def _group_for(self, host: int, node: str) -> Group:
        """The group that the host was given last, otherwise the group with the largest remaining cost.

        Groups with data on the host's node, or on every node, come before groups with data elsewhere.
        """
        if (group := self._group_of.get(host)) in self._groups:
            assert group is not None
            return group
        near = [top for at in {node, ""} if (top := self._top(at)) is not None]
        tops = near or [top for at in self._heaps if (top := self._top(at)) is not None]
        self._group_of[host] = group = min(tops)[1]
        return group

    def _top(self, node: str) -> tuple[float, Group] | None:
        """The entry of the group with the largest remaining cost on a node; None if the node has no group left."""
        heap = self._heaps.get(node, [])
        while heap:
            cost, group = heap[0]
            if self._group_cost.get(group) == -cost:
                return heap[0]
            heappop(heap)
            if group in self._group_cost:
                heappush(heap, (-self._group_cost[group], group))
        return None

    def _take(self, group: Group) -> None:
        """Removes the largest chunk of a group."""
        number = self._groups[group].pop()
        cost = self.chunks[number].cost
        self.cost_left -= cost
        if self._groups[group]:
            self._group_cost[group] -= cost
        else:
            del self._groups[group], self._group_cost[group]

    # ---- chunks of one host

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
        """Whether a host may do a chunk. A ready host replaces a home that was given up or never started."""
        if home is None or home == host:
            return True
        return home not in hosts and ready[home % len(ready)] == host
