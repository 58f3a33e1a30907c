"""The section of an experiment for clients that attack."""

from typing import Any

from pydantic import Field

from cfl_ray.config.part import BuiltinKind, PartConfig
from cfl_ray.config.schedule import ClientIds


class AttackConfig(PartConfig):
    """Attacking clients: they train on wrong labels, or upload a model other than the trained one."""

    part = "attack"
    where = "attack"
    group = "cfl_ray.attacks"
    keys_of_all = ("fraction", "clients", "from_round")
    builtin = {
        "none": BuiltinKind("all clients are honest"),
        "label_flip": BuiltinKind("y -> C - 1 - y"),
        "sign_flip": BuiltinKind("w - scale (W - w)", ("scale",)),
        "scaled": BuiltinKind("w + scale (W - w)", ("scale",)),
        "gaussian": BuiltinKind("w + sigma N(0, I)", ("sigma",)),
        "colluders": BuiltinKind("w + scale |W - w| u, with one direction u for all attackers of a round", ("scale",)),
    }

    kind: Any = Field(
        "none",
        description=" | ".join(f"{name} ({kind.meaning})" for name, kind in builtin.items())
        + " | path/to/file.py:Name; w is the model that the client received, W the trained one",
    )
    fraction: float = Field(
        0.1,
        gt=0,
        lt=1,
        description="share of the clients that attack, drawn at random: floor(fraction * N), at least one",
    )
    clients: ClientIds | None = Field(
        None,
        min_length=1,
        description="the attacking clients, instead of a fraction: ids and ranges, e.g. [3, 5-9]; null: the fraction "
        "decides",
    )
    scale: float = Field(1.0, gt=0, le=1e6, description="factor of the update (sign_flip, scaled, colluders)")
    sigma: float = Field(1.0, gt=0, le=1e6, description="standard deviation of the noise (gaussian)")
    from_round: int = Field(1, ge=1, description="first round of the attack, counted from 1")
