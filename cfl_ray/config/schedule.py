"""The section `schedule`: clients that join, leave or change."""

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator

from cfl_ray.config.client_ids import compress_ids, parse_ids
from cfl_ray.config.section import ConfigSection
from cfl_ray.errors import ConfigError


def _parse_clients(value: Any) -> Any:
    """Returns clients as YAML names them, 7, "80-99" or a list of both, as a list of ids."""
    items = [value] if isinstance(value, (str, int)) else value
    if not isinstance(items, (list, tuple)):
        return value
    try:
        return [client for item in items for client in (parse_ids([item]) if isinstance(item, str) else [item])]
    except ConfigError as error:
        raise ValueError(str(error)) from None


ClientIds = Annotated[list[Annotated[int, Field(ge=0)]], BeforeValidator(_parse_clients), PlainSerializer(compress_ids)]


Label = Annotated[int, Field(ge=0)]


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
        None, description="two labels that take each other's place, after relabel, e.g. [1, 2]; null: none"
    )

    @model_validator(mode="after")
    def _check_change(self) -> Self:
        if self.rotate % 90:
            raise ValueError(f"rotate must be a multiple of 90 degrees, got {self.rotate}")
        if self.swap is not None and self.swap[0] == self.swap[1]:
            raise ValueError(f"swap names label {self.swap[0]} twice; name two labels")
        if self.data_of is None and self.swap is None and not self.rotate % 360 and not self.relabel:
            raise ValueError("nothing would change; say rotate, relabel, swap or data_of")
        if self.data_of is not None and len(self.data_of) != len(self.clients):
            raise ValueError(f"data_of names {len(self.data_of)} clients for {len(self.clients)}; give one for each")
        return self


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
        [], description="changes of clients' data, in the order given, e.g. [{clients: 0-9, rotate: 90}]"
    )


def check_schedule(events: Sequence[EventConfig], num_clients: int) -> None:
    """Raises ConfigError for clients that do not exist, and for one that joins while online or leaves while offline."""
    online: dict[int, int] = {}  # round of the last event of clients that joined
    offline: dict[int, int] = {}  # the same, of those that left
    for event in sorted(events, key=lambda event: event.round):
        place = f"schedule, round {event.round}: client"
        if absent := [client for client in (*event.join, *event.leave) if not 0 <= client < num_clients]:
            raise ConfigError(f"{place} {absent[0]} does not exist; the federation has clients 0 .. {num_clients - 1}")
        if both := sorted({*event.join} & {*event.leave}):
            raise ConfigError(f"{place} {both[0]} joins and leaves; name it once")
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
    if len({client for event in events for client in event.join}) >= num_clients:
        raise ConfigError(
            f"schedule: all {num_clients} clients join later, so round 1 has none; leave at least one out of `join`"
        )
