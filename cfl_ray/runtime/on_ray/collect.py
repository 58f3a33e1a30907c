"""The sum of the totals of all hosts: added up by the server or, if they are large, by the hosts in a tree.

Totals are exact (`engine.exact`), so any tree gives the same bits. Hosts of a node combine their totals in its object
store, then nodes combine in groups; the server receives one float32 row per output row for any number of hosts.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import ray

from cfl_ray.runtime.on_ray.pool import Host

_GROUP = 4  # totals that one call combines
# limit of a wait for totals, in case a host hangs: a constant, and a time for their bytes; training takes no part in it
_WAIT_SECONDS, _WAIT_BYTES_PER_SECOND = 120.0, 5e6
_SMALL_BYTES = 32_000_000  # size up to which the server adds up all totals: calls would take longer


@dataclass(frozen=True)
class _Total:
    """A total of one output row in the object store, float64 (2, P)."""

    ref: ray.ObjectRef[Any]
    host: Host  # the host that made it


class Collected:
    """Totals of some hosts by output row. All hosts are asked at once."""

    def __init__(self, exchange: int, rows_of: list[tuple[Host, list[int]]], columns: int):
        self.rows_of = rows_of
        self.bytes = 16 * columns * sum(len(rows) for _, rows in rows_of)
        self.refs: list[list[ray.ObjectRef[Any]]] = []  # by host, by its row
        for host, rows in rows_of:
            made = host.actor.collect.options(num_returns=len(rows)).remote(exchange, rows)
            self.refs.append(made if isinstance(made, list) else [made])

    @property
    def seconds(self) -> float:
        """The limit of a wait for these totals."""
        return _WAIT_SECONDS + self.bytes / _WAIT_BYTES_PER_SECOND

    @property
    def use_tree(self) -> bool:
        """Whether hosts combine the totals: if these are large, from more than two hosts or from another node."""
        here = ray.get_runtime_context().get_node_id()
        elsewhere = any(host.node != here for host, _ in self.rows_of)
        return self.bytes > _SMALL_BYTES and (len(self.rows_of) > 2 or elsewhere)

    def of_host(self, position: int) -> dict[int, Any]:
        """Totals float64 (2, P) by output row of a host. Raises the error of `ray.get` if the host is lost."""
        _, rows = self.rows_of[position]
        totals = ray.get(self.refs[position], timeout=self.seconds)
        return {out: total_2P for out, total_2P in zip(rows, totals, strict=True) if total_2P is not None}

    def by_tree(self) -> dict[int, Any]:
        """Sums, float32 (P,), by output row. Raises the error of `ray.get` if any host is lost."""
        totals: dict[int, list[_Total]] = defaultdict(list)
        for (host, rows), refs in zip(self.rows_of, self.refs, strict=True):
            for out, ref in zip(rows, refs, strict=True):
                totals[out].append(_Total(ref, host))
        combined = {out: _combined(parts) for out, parts in sorted(totals.items())}
        sums = ray.get(list(combined.values()), timeout=self.seconds)
        return {out: sum_P for out, sum_P in zip(combined, sums, strict=True) if sum_P is not None}


def _combined(totals: list[_Total]) -> ray.ObjectRef[Any]:
    """The sum, float32 (P,), of all totals of an output row: first within each node, then between nodes."""
    by_node: dict[str, list[_Total]] = defaultdict(list)
    for total in totals:
        by_node[total.host.node].append(total)
    level = [_reduced(totals)[0] if len(totals) > 1 else totals[0] for totals in by_node.values()]
    level = _reduced(level, until=_GROUP)
    combined: ray.ObjectRef[Any] = level[0].host.actor.combine.remote(True, *[total.ref for total in level])
    return combined


def _reduced(totals: list[_Total], until: int = 1) -> list[_Total]:
    """At most `until` totals with the same sum; the hosts take turns."""
    turns = cycle([total.host for total in totals])
    while len(totals) > until:
        groups = [totals[at : at + _GROUP] for at in range(0, len(totals), _GROUP)]
        totals = []
        for group in groups:
            if len(group) == 1:
                totals += group
                continue
            host = next(turns)
            totals.append(_Total(host.actor.combine.remote(False, *[total.ref for total in group]), host))
    return totals
