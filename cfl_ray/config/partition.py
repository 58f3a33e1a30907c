"""The section `data.partition`: a class for the keys of each kind."""

from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, model_validator

from cfl_ray.config.part import BuiltinKind, Kinds, PluginConfig
from cfl_ray.config.section import ConfigSection

# Long before these limits all clients have equal shares, or one has all. Beyond them, NumPy's draws are wrong without
# an error (findings/dirichlet_extremes.sh): sums of gamma variates overflow, subnormal concentrations are not alike.
_SMALLEST, _LARGEST = 1e-300, 1e300


def _check_concentration(value: float) -> float:
    if not _SMALLEST <= value <= _LARGEST:
        raise ValueError(f"a concentration must lie between {_SMALLEST:g} and {_LARGEST:g}, got {value:g}")
    return value


_SHARES = (
    "concentration of the Dirichlet distribution over the clients of all samples (iid: quantity skew), or of a class's "
    "samples over the clients that have it (classes; 1: all divisions are equally likely, up to rounding), so that "
    "clients have random sizes; each has at least one of these samples. null: even shares, or sizes"
)
Alpha = Annotated[float, Field(gt=0), AfterValidator(_check_concentration)]


class CutConfig(ConfigSection):
    """Randomly drawn clients with less training data than the others."""

    keep: float = Field(gt=0, lt=1, description="share of its training samples that each of these clients keeps")
    clients: int = Field(ge=1, description="number of clients to cut, drawn at random; no client is cut twice")


class PartitionConfig(ConfigSection):
    """How the samples of a group are divided among its clients, and how many of them each client keeps."""

    by_class: ClassVar[bool] = False  # True: it divides samples by their classes
    kind: Any = Field("iid", description="how samples are divided")
    clients: int | None = Field(
        40,
        ge=1,
        le=10**8,
        description="N, number of clients; null: every writer with at least min_samples samples (writer)",
    )
    samples: int | None = Field(None, ge=1, description="most training samples of a client; null: no limit")
    cut: list[CutConfig] = Field(
        [],
        description="reduce random clients to a share of their training samples, after `samples` is applied, "
        "e.g. [{keep: 0.1, clients: 3}]",
    )
    min_samples: int = Field(
        1,
        ge=1,
        description="fewest samples that the division gives to a client, held-out ones included; random shares are "
        "drawn again until all have them, writer excludes smaller clients",
    )

    @property
    def true_groups(self) -> int | None:
        """Number of true groups that the partition itself makes; None if it makes none."""
        return None


class IidConfig(PartitionConfig):
    """Kind iid: random samples, in equal, given or random sizes."""

    sizes: list[Annotated[int, Field(ge=1)]] | None = Field(
        None,
        description="number of samples of each client in order, held-out ones included; the rest goes unused. "
        "null: equal sizes",
    )
    share_alpha: Alpha | None = Field(
        None,
        description=_SHARES,
    )

    @property
    def has_unequal_sizes(self) -> bool:
        """Whether the division itself makes clients of unequal sizes."""
        return self.sizes is not None or self.share_alpha is not None

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.sizes is not None and self.share_alpha is not None:
            raise ValueError(
                f"sizes and share_alpha ({self.share_alpha:g}) both say how large clients are; leave out one"
            )
        if self.sizes is not None and len(self.sizes) != self.clients:
            raise ValueError(
                f"sizes has {len(self.sizes)} entries, clients is {self.clients}; give every client its size"
            )
        return self


class LabelSkewConfig(PartitionConfig):
    """Kinds with label skew between clients, or between true groups and then between the clients of each."""

    groups: int | None = Field(
        None,
        ge=2,
        description="number of true groups made by label skew: samples are divided among the groups, then inside each; "
        "null: directly among the clients",
    )
    by_class = True
    key_of_groups: ClassVar[str]  # key of the division among groups

    @property
    def true_groups(self) -> int | None:
        return self.groups


class DirichletConfig(LabelSkewConfig):
    """Kind dirichlet: the shares of each class follow a Dirichlet distribution."""

    key_of_groups = "group_alpha"
    alpha: Alpha = Field(
        0.1, description="concentration of the Dirichlet distribution over the clients of a group, per class"
    )
    capped: bool = Field(
        True,
        description="true: a client that has an even share of the samples gets none of the remaining classes "
        "(NIID-Bench); false: no cap",
    )
    group_alpha: Alpha = Field(0.1, description="concentration of the Dirichlet distribution over `groups`, per class")


class ClassesConfig(LabelSkewConfig):
    """Kind classes: each client has samples of a given number of classes."""

    key_of_groups = "classes_per_group"
    classes_per_client: int = Field(2, ge=1, description="number of classes of a client")
    classes_per_group: int = Field(
        3,
        ge=1,
        description="number of classes of a group; all classes are used equally often, or some once more",
    )
    share_alpha: Alpha | None = Field(
        None,
        description=_SHARES,
    )

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if self.groups is not None and self.classes_per_client > self.classes_per_group:
            raise ValueError(
                f"classes_per_client is {self.classes_per_client}, but a group has {self.classes_per_group} classes; "
                "lower it or raise classes_per_group"
            )
        return self


class PluginPartitionConfig(PluginConfig, PartitionConfig):
    """A function f(labels, clients, draw) of the labels of a group."""


PARTITION_KINDS = Kinds[PartitionConfig](
    "partition",
    {
        "iid": BuiltinKind("at random, in equal, given or random sizes", IidConfig, "data.partition:iid"),
        "dirichlet": BuiltinKind("label skew", DirichletConfig, "data.partition:dirichlet"),
        "classes": BuiltinKind("n classes per client", ClassesConfig, "data.partition:classes"),
        "writer": BuiltinKind("one client per writer", PartitionConfig, "data.partition:writers"),
    },
    "cfl_ray.partitions",
    PluginPartitionConfig,
    "data.partition:own",
)
