"""The phases of a method, and the events of its clusters with the numbers that decided them.

A method declares its phases and the successors of each: `phases = {"cluster": ("federate",), "federate": ()}`. It may
begin in any phase, and stay in a phase for any number of rounds.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import numpy as np
from pydantic import TypeAdapter

EventKind = Literal["split", "merge", "birth", "death", "phase"]

PHASES = {  # of the methods of this package; a user's method may have others
    "warmup": "training before clients have clusters of their own",
    "adjust": "training of one model, in which each client's epochs follow its progress, until clients are clustered",
    "cluster": "the clients are compared, and the first clusters are made",
    "federate": "training, in clusters if the method has several",
}


@dataclass(frozen=True)
class ClusterEvent:
    """An event of a round. `cluster` is a number before the event, `into` are numbers after it.

    split   `cluster` became the clusters `into`
    merge   `cluster` was merged into the cluster `into`; higher numbers move down by one
    birth   the clusters `into` are new, or have members again
    death   `cluster` lost its last member; its number and its model stay
    phase   the next round is in `phase`, after those in `before`; recorded by the round loop
    """

    round: int
    event: EventKind
    cluster: int | None = None
    into: tuple[int, ...] = ()
    because: Mapping[str, float | int] = field(default_factory=dict)  # values and thresholds that decided it
    before: str = ""
    phase: str = ""

    def to_fields(self) -> dict[str, Any]:
        """The event as JSON, without the fields that it does not have."""
        values = asdict(self) | {"into": list(self.into), "because": dict(self.because)}
        return {name: value for name, value in values.items() if value not in (None, "", [], {})}

    @classmethod
    def from_fields(cls, fields: Any) -> "ClusterEvent":
        """The event that `to_fields` returned. Raises ValueError for anything else."""
        return _EVENT.validate_python(fields)

    @property
    def text(self) -> str:
        """The event in a line, such as "cluster 0 split into 0, 1 (mean 0.31, eps1 0.4)"."""
        if self.event == "phase":
            return f"phase {self.before} -> {self.phase}"
        into = ", ".join(map(str, self.into[:_LISTED])) + (
            f" .. ({len(self.into)} in all)" * (len(self.into) > _LISTED)
        )
        what = {
            "split": f"cluster {self.cluster} split into {into}",
            "merge": f"cluster {self.cluster} merged into {into}",
            "birth": f"new cluster{'s' * (len(self.into) > 1)} {into}",
            "death": f"cluster {self.cluster} lost its last member",
        }[self.event]
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in self.because.items())
        return f"{what} ({numbers})" if numbers else what


_EVENT = TypeAdapter(ClusterEvent)
_LISTED = 6  # clusters that the text of an event names


def cluster_event(
    round: int, kind: Any, cluster: int | None, into: Iterable[int], because: Mapping[str, Any]
) -> ClusterEvent:
    """An event reported with `Clients.event`. Raises ValueError for an invalid kind, cluster or number."""
    own = [kind for kind in get_args(EventKind) if kind != "phase"]
    into = tuple(map(int, into))
    if kind not in own:
        raise ValueError(f"the event {kind!r} is none of {', '.join(own)}; the round loop records changes of the phase")
    if (cluster is None) != (kind == "birth") or (not into) != (kind == "death"):
        raise ValueError(
            f"the event {kind!r} has cluster {cluster} and into {into}; see `ClusterEvent` for which it has"
        )
    numbers = {}
    for name, value in because.items():
        number = np.asarray(value)
        if number.ndim or number.dtype.kind not in "fiu":
            raise ValueError(f"the event {kind!r} has the value {name} {value!r}, expected a number")
        numbers[name] = number.item()
    return ClusterEvent(round, kind, None if cluster is None else int(cluster), into, numbers)


def phase_change(round: int, before: str, after: str) -> tuple[ClusterEvent, ...]:
    """The event of a round that began in the phase `before` and ended in `after`; none if they are the same."""
    return () if before == after else (ClusterEvent(round, "phase", before=before, phase=after),)


def births_and_deaths(
    round: int, before_K: np.ndarray, after_K: np.ndarray, because: Mapping[str, Any]
) -> tuple[ClusterEvent, ...]:
    """One birth of all clusters that became non-empty, and a death of each cluster that became empty.

    before_K, after_K: members of each cluster, whose numbers stay; further ones are new. No events if there are fewer
        clusters: then numbers may have changed.
    """
    if len(after_K) < len(before_K):
        return ()
    before_K = np.pad(before_K, (0, len(after_K) - len(before_K)))
    born, dead = np.flatnonzero((before_K == 0) & (after_K > 0)), np.flatnonzero((before_K > 0) & (after_K == 0))
    births = [cluster_event(round, "birth", None, born.tolist(), because)] if len(born) else []
    deaths = [cluster_event(round, "death", k, (), {"members_before": before_K[k], **because}) for k in dead.tolist()]
    return (*births, *deaths)


def drawn(phases: Mapping[str, tuple[str, ...]]) -> str:
    """The phases with arrows: "cluster -> federate"; several chains if a phase has several that follow it."""
    names = list(phases)
    if [*phases.values()] == [*((name,) for name in names[1:]), ()]:
        return " -> ".join(names)
    arrows = [f"{name} -> {' | '.join(following)}" for name, following in phases.items() if following]
    alone = [name for name in names if not any(name in (other, *after) for other, after in phases.items() if after)]
    return ", ".join([*arrows, *alone])


def phase_meanings(phases: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """The meaning of each phase; of a user's phase, its successors."""
    follow = {name: " or ".join(following) for name, following in phases.items()}
    return {name: PHASES.get(name, f"then {follow[name]}" if follow[name] else "to the end") for name in phases}


def check_phases(name: str, phases: Any) -> None:
    """Raises ValueError if `phases` of the method `name` is not a valid declaration."""
    if not isinstance(phases, Mapping):
        raise ValueError(f"{name}.phases must be a dict of tuples, got {phases!r}")
    for phase, following in phases.items():
        if not isinstance(following, tuple) or not set(following) <= set(phases):
            raise ValueError(
                f'{name}.phases["{phase}"] must be a tuple of declared phases ({", ".join(phases)}), got {following!r}'
            )
