"""The section `schedule`: clients that join, leave or change."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from cfl_ray.config.client_ids import compress_ids, parse_ids
from cfl_ray.config.section import ConfigSection
from cfl_ray.config.shift import SHIFT_KINDS, PixelsConfig
from cfl_ray.errors import ConfigError, counted


def _parse_clients(value: Any) -> Any:
    """Clients as YAML names them, 7, "80-99" or a list of both, as a list of ids."""
    items = [value] if isinstance(value, (str, int)) else value
    if not isinstance(items, (list, tuple)):
        return value
    try:
        return [client for item in items for client in (parse_ids([item]) if isinstance(item, str) else [item])]
    except ConfigError as error:
        raise ValueError(str(error)) from None


ClientIds = Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(_parse_clients), PlainSerializer(compress_ids)]


Label = Annotated[int, Field(ge=0)]


class RecurrentDriftConfig(ConfigSection):
    """A concept that goes and comes back."""

    kind: Literal["recurrent"]
    rounds: list[int] = Field(
        min_length=1, description="rounds before which the change is undone, made again, undone .., ascending"
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if sorted(set(self.rounds)) != self.rounds:
            raise ValueError(f"rounds must ascend, got {self.rounds}")
        return self


class IncrementalDriftConfig(ConfigSection):
    """A concept that reaches one part of the clients after the other."""

    kind: Literal["incremental"]
    groups: int = Field(ge=2, description="number of parts into which the clients are cut, in the order given")
    every: int = Field(ge=1, description="rounds from the change of one part to that of the next")


class GradualDriftConfig(ConfigSection):
    """A concept that clients have more and more often: in round t of `over`, each with probability t / over."""

    kind: Literal["gradual"]
    over: int = Field(ge=2, le=10_000, description="rounds until all clients have it for good")


Drift = Annotated[RecurrentDriftConfig | IncrementalDriftConfig | GradualDriftConfig, Field(discriminator="kind")]


class DataChangeConfig(ConfigSection):
    """Clients whose data change, from one round on."""

    clients: ClientIds = Field(min_length=1, description="ids and ranges of the clients whose data change")
    rotate: int = Field(0, description="rotate their images by this many degrees more, a multiple of 90; 0: not at all")
    relabel: int = Field(0, description="s: label y becomes (y + s) mod C, after earlier changes; 0: not at all")
    data_of: ClientIds | None = Field(
        None,
        description="take over the present data of these clients, one for each of `clients`; the same clients in "
        "another order swap their data. null: keep their own",
    )
    swap: tuple[Label, Label] | None = Field(
        None, description="two labels that are exchanged, after relabel, e.g. [1, 2]; null: none"
    )
    noise: float | None = Field(
        None,
        gt=0,
        description="add Gaussian noise of this standard deviation, in units of the pixel range 0..1, to their inputs; "
        "null: none",
    )
    blur: float | None = Field(
        None,
        gt=0,
        le=1000,
        description="blur their images by a Gaussian of this standard deviation in pixels; null: not at all",
    )
    brightness: float | None = Field(None, ge=0, description="multiply their inputs by this factor; null: not at all")
    back_to: int | None = Field(
        None,
        ge=0,
        description="take the data again that they had in this round, before all else; 0: their first data; null: keep "
        "the present data",
    )
    drift: Drift | None = Field(
        None,
        description="null: sudden, all of `clients` at once | {kind: recurrent, rounds: [80, 100]}: undone before "
        "round 80, made again before round 100 | {kind: incremental, groups: 3, every: 10}: a third of the clients "
        "every ten rounds | {kind: gradual, over: 20}: for 20 rounds every client has the new data or the old ones, "
        "the new ones with a probability that grows to 1",
    )

    @model_validator(mode="after")
    def _check_change(self) -> Self:
        if self.rotate % 90:
            raise ValueError(f"rotate must be a multiple of 90 degrees, got {self.rotate}")
        if self.swap is not None and self.swap[0] == self.swap[1]:
            raise ValueError(f"swap names label {self.swap[0]} twice; name two labels")
        sources = [name for name in ("data_of", "back_to") if getattr(self, name) is not None]
        domains = [name for name in DOMAINS if getattr(self, name) is not None]
        if not sources and not domains and self.swap is None and not self.rotate % 360 and not self.relabel:
            raise ValueError(
                f"nothing would change; say rotate, relabel, swap, {', '.join(DOMAINS)}, data_of or back_to"
            )
        if len(domains) > 1:
            raise ValueError(f"{' and '.join(domains)} are two domains, and clients are in one; give one of them")
        if len(sources) > 1:
            raise ValueError("data_of and back_to both say which data the clients have; give one of them")
        if self.data_of is not None and len(self.data_of) != len(self.clients):
            raise ValueError(
                f"data_of names {counted(len(self.data_of), 'client')} for {len(self.clients)}; give one for each"
            )
        if self.drift and (both := sorted({*self.clients} & {*(self.data_of or ())})):
            raise ValueError(
                f"data_of: client {both[0]} gives its data and takes others, and {self.drift.kind} drift would repeat "
                "that; take the data of clients that do not change"
            )
        if isinstance(self.drift, IncrementalDriftConfig) and self.drift.groups > len(self.clients):
            raise ValueError(f"drift.groups is {self.drift.groups} for {counted(len(self.clients), 'client')}")
        return self

    @property
    def domain(self) -> tuple[str, float] | None:
        """Name and amount of the new domain; None: the present one is kept."""
        amounts = [(name, getattr(self, name)) for name in DOMAINS]
        return next(((name, amount) for name, amount in amounts if amount is not None), None)

    def of(self, positions: Sequence[int]) -> Self:
        """The same change without drift, for the clients at these positions."""
        clients = [self.clients[i] for i in positions]
        data_of = None if self.data_of is None else [self.data_of[i] for i in positions]
        return self.model_copy(update={"clients": clients, "data_of": data_of, "drift": None})

    def undone(self, round: int, positions: Sequence[int]) -> "DataChangeConfig":
        """The change back to the data of `round`, for the clients at these positions."""
        return DataChangeConfig(clients=[self.clients[i] for i in positions], back_to=round)

    def sudden_changes(self, round: int, seed: int) -> Iterator[tuple[int, "DataChangeConfig"]]:
        """Yields (round before which it happens, single change) of the process that begins in `round`."""
        count, drift = len(self.clients), self.drift
        everyone = range(count)
        match drift:
            case None:
                yield round, self
            case RecurrentDriftConfig():
                yield round, self.of(everyone)
                for number, at in enumerate(drift.rounds):
                    yield at, self.of(everyone) if number % 2 else self.undone(round - 1, everyone)
            case IncrementalDriftConfig():
                for group in range(drift.groups):
                    first, past = (count * (group + more) // drift.groups for more in (0, 1))
                    yield round + group * drift.every, self.of(range(first, past))
            case GradualDriftConfig():
                yield from self._gradual_changes(drift.over, round, seed)

    def _gradual_changes(self, over: int, round: int, seed: int) -> Iterator[tuple[int, "DataChangeConfig"]]:
        import numpy as np

        from cfl_ray.core.rng import uniforms  # imports torch, which `cfl-ray status` does not need

        is_new_M = np.zeros(len(self.clients), bool)
        for past in range(over):
            draw_M = uniforms(seed, round + past, -1, np.array(self.clients), "gradual drift")
            before_M, is_new_M = is_new_M, draw_M < (past + 1) / over
            for positions, change in (
                (np.flatnonzero(~before_M & is_new_M).tolist(), self.of),
                (np.flatnonzero(before_M & ~is_new_M).tolist(), lambda positions: self.undone(round - 1, positions)),
            ):
                if positions:
                    yield round + past, change(positions)


# shifts of all pixel values that a client's data can drift by; each takes the place of an earlier one
DOMAINS = [
    name
    for name, kind in SHIFT_KINDS.builtin.items()
    if issubclass(kind.section, PixelsConfig) and name in DataChangeConfig.model_fields
]


class EventConfig(ConfigSection):
    """Clients that join, leave or change before the clients of a round are selected."""

    round: int = Field(ge=1, description="round before which the event takes place, counted from 1")
    join: ClientIds = Field(
        [],
        description="clients that join, ids and ranges, e.g. [3, 80-99]; they are absent before, unless they left "
        "earlier",
    )
    leave: ClientIds = Field([], description="clients that leave, ids and ranges")
    change: list[DataChangeConfig] = Field(
        [],
        description="changes of clients' data, in the order given, e.g. [{clients: 0-9, rotate: 90}]; each at once or, "
        "with `drift`, as a process that begins here",
    )

    @model_validator(mode="after")
    def _check_changes(self) -> Self:
        if not (self.join or self.leave or self.change):
            raise ValueError(f"nothing happens before round {self.round}; give it join, leave or change")
        for change in self.change:
            if change.back_to is not None and change.back_to >= self.round:
                raise ValueError(f"back_to must be a round before round {self.round}, got {change.back_to}")
            if isinstance(change.drift, RecurrentDriftConfig) and change.drift.rounds[0] <= self.round:
                raise ValueError(f"drift.rounds must be after round {self.round}, got {change.drift.rounds[0]}")
        return self

    def single_events(self, seed: int) -> list["EventConfig"]:
        """The events, by round, that this event consists of; several only if a change is a process."""
        changes: dict[int, list[DataChangeConfig]] = {self.round: []}
        for change in self.change:
            for round, single in change.sudden_changes(self.round, seed):
                changes.setdefault(round, []).append(single)
        first = self.model_copy(update={"change": changes.pop(self.round)})
        # not validated: they may be in rounds beyond the limit of whole numbers
        return [first, *(EventConfig.model_construct(round=round, change=changes[round]) for round in sorted(changes))]


def check_schedule(events: Sequence[EventConfig], num_clients: int) -> None:
    """Raises ConfigError for clients that do not exist, join while they are online, or leave while they are offline."""
    online: dict[int, int] = {}  # round of the last event, by client that joined
    offline: dict[int, int] = {}  # round of the last event, by client that left
    newcomers: set[int] = set()  # absent until they join
    for event in sorted(events, key=lambda event: event.round):
        place = f"schedule, round {event.round}: client"
        if absent := [client for client in (*event.join, *event.leave) if not 0 <= client < num_clients]:
            raise ConfigError(f"{place} {absent[0]} does not exist; the federation has clients 0 .. {num_clients - 1}")
        if both := sorted({*event.join} & {*event.leave}):
            raise ConfigError(f"{place} {both[0]} joins and leaves; name it once")
        newcomers |= {client for client in event.join if client not in offline}
        for verb, past, clients, now, other in (
            ("joins", "joined", event.join, online, offline),
            ("leaves", "left", event.leave, offline, online),
        ):
            for client in clients:
                if client in now:
                    raise ConfigError(
                        f"{place} {client} {verb}, but it {past} in round {now[client]} already; leave one of the two "
                        "out"
                    )
                other.pop(client, None)
                now[client] = event.round
    if len(newcomers) >= num_clients:
        raise ConfigError(
            f"schedule: all {num_clients} clients join later, so round 1 has none; leave at least one out of `join`"
        )
