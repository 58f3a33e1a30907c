"""The section `attack`: a class for the keys of each kind."""

from typing import Any, ClassVar

from pydantic import Field

from cfl_ray.config.part import BuiltinKind, Kinds, PluginConfig
from cfl_ray.config.schedule import ClientIds
from cfl_ray.config.section import ConfigSection


class AttackConfig(ConfigSection):
    """Attacking clients: they train on wrong labels, or upload a model other than the trained one."""

    needs_classes: ClassVar[bool] = False  # True: it changes labels that are classes
    kind: Any = Field("none", description="how they attack; w is the model that a client received, W the trained model")


class AttackersConfig(AttackConfig):
    """Clients that attack: which, and from which round on."""

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
    from_round: int = Field(1, ge=1, description="first round of the attack, counted from 1")


class LabelFlipConfig(AttackersConfig):
    """Clients that train on wrong labels."""

    needs_classes = True


class ScaledConfig(AttackersConfig):
    """Clients that upload a multiple of their update."""

    scale: float = Field(1.0, gt=0, le=1e6, description="factor of the update")


class GaussianConfig(AttackersConfig):
    """Clients that upload noise."""

    sigma: float = Field(1.0, gt=0, le=1e6, description="standard deviation of the noise")


class PluginAttackConfig(PluginConfig, AttackersConfig):
    """A function f(upload_P, start_P, draw), or a class with a method `upload` or `labels`."""


ATTACK_KINDS = Kinds[AttackConfig](
    "attack",
    {
        "none": BuiltinKind("all clients are honest", AttackConfig, "engine.attack:AttackKind"),
        "label_flip": BuiltinKind("y -> C - 1 - y", LabelFlipConfig, "engine.attack:LabelFlip"),
        "sign_flip": BuiltinKind("w - scale (W - w)", ScaledConfig, "engine.attack:SignFlip"),
        "scaled": BuiltinKind("w + scale (W - w)", ScaledConfig, "engine.attack:Scaled"),
        "gaussian": BuiltinKind("w + sigma N(0, I)", GaussianConfig, "engine.attack:Gaussian"),
        "colluders": BuiltinKind(
            "w + scale |W - w| u, with one direction u for all attackers of a round",
            ScaledConfig,
            "engine.attack:Colluders",
        ),
    },
    "cfl_ray.attacks",
    PluginAttackConfig,
    "engine.attack:OwnAttack",
)
