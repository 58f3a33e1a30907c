"""The sections `data.shift` and `data.partition`: a class for the keys of each kind."""

from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, Field, model_validator

from cfl_ray.config.section import BuiltinKind, ConfigSection, Kinds, PluginConfig


def _whole(angles: list[float]) -> list[float]:
    """Whole angles as int, so that 90 and 90.0 have the same config hash."""
    return [int(angle) if angle == int(angle) else angle for angle in angles]


class ShiftConfig(ConfigSection):
    """How the true groups of clients differ (StoCFL, section 5)."""

    kind: Any = Field("none", description="how groups differ")


class RotatedConfig(ShiftConfig):
    """Kind rotated: the images of each group are rotated by another angle."""

    angles: Annotated[list[float], AfterValidator(_whole)] = Field(
        [0, 90, 180, 270],
        description="rotation of each group in degrees, counter-clockwise; multiples of 90 are exact, others bilinear "
        "about the centre, with 0 where the image does not reach",
    )


class ShiftedConfig(ShiftConfig):
    """Kind shifted: the labels of each group are moved by another offset."""

    offsets: list[int] = Field([0, 3, 6, 9], description="offset s of each group: label y becomes (y + s) mod C")


class PathologicalConfig(ShiftConfig):
    """Kind pathological: each group has the samples of some labels."""

    label_sets: list[list[int]] = Field([[0, 1, 2], [3, 4], [5, 6], [7, 8, 9]], description="labels of each group")


class RotatedLabelsConfig(RotatedConfig, PathologicalConfig):
    """Kind rotated_labels: a group for each angle and label set."""


class HybridConfig(ShiftConfig):
    """Kind hybrid: two groups with different data sets."""

    other: str = Field("fashion_mnist", description="data set of the second group")


class NoiseConfig(ShiftConfig):
    """Kind noise: Gaussian noise of another strength in each group."""

    sigmas: list[Annotated[float, Field(ge=0)]] = Field(
        [0.0, 0.1, 0.2, 0.4],
        description="standard deviation of the noise of each group, in units of the pixel range 0..1",
    )


class BlurConfig(ShiftConfig):
    """Kind blur: the images of each group are blurred by another width."""

    radii: list[Annotated[float, Field(ge=0, le=1000)]] = Field(
        [0.0, 0.5, 1.0, 2.0], description="standard deviation of the blur of each group in pixels"
    )


class BrightnessConfig(ShiftConfig):
    """Kind brightness: the inputs of each group are multiplied by another factor."""

    factors: list[Annotated[float, Field(ge=0)]] = Field(
        [1.0, 0.75, 0.5, 0.25], description="factor of each group; values stay in the pixel range"
    )


class PluginShiftConfig(PluginConfig, ShiftConfig):
    """A function f(x, y, group, draw) of the samples of a group."""

    groups: int = Field(2, ge=1, description="number of true groups")


SHIFT_KINDS = Kinds[ShiftConfig](
    "shift",
    {
        "none": BuiltinKind("all clients draw from one distribution, or keep the groups of the data", ShiftConfig),
        "rotated": BuiltinKind("rotated images", RotatedConfig),
        "shifted": BuiltinKind("labels moved by an offset", ShiftedConfig),
        "pathological": BuiltinKind("label sets", PathologicalConfig),
        "hybrid": BuiltinKind("two data sets", HybridConfig),
        "rotated_labels": BuiltinKind("every angle with every label set", RotatedLabelsConfig),
        "noise": BuiltinKind("Gaussian noise on the inputs", NoiseConfig),
        "blur": BuiltinKind("Gaussian blur of images", BlurConfig),
        "brightness": BuiltinKind("inputs times a factor", BrightnessConfig),
    },
    "cfl_ray.shifts",
    PluginShiftConfig,
)


class CutConfig(ConfigSection):
    """Randomly drawn clients with less training data than the others."""

    keep: float = Field(gt=0, lt=1, description="share of its training samples that each of these clients keeps")
    clients: int = Field(ge=1, description="number of clients to cut, drawn at random; no client is cut twice")


class PartitionConfig(ConfigSection):
    """How the samples of a group are divided among its clients, and how many of them each client keeps."""

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
        description="fewest samples that the division gives to a client, held-out ones included; dirichlet draws again "
        "until all have them, writer excludes smaller clients",
    )

    @property
    def true_groups(self) -> int | None:
        """Number of true groups that the partition itself makes; None if it makes none."""
        return None


class IidConfig(PartitionConfig):
    """Kind iid: random samples, in equal or given sizes."""

    sizes: list[Annotated[int, Field(ge=1)]] | None = Field(
        None,
        description="number of samples of each client in order, held-out ones included; the rest goes unused. "
        "null: equal sizes",
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
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
    key_of_groups: ClassVar[str]  # key of the division among groups

    @property
    def true_groups(self) -> int | None:
        return self.groups


class DirichletConfig(LabelSkewConfig):
    """Kind dirichlet: the shares of each class follow a Dirichlet distribution."""

    key_of_groups = "group_alpha"
    alpha: float = Field(
        0.1, gt=0, description="concentration of the Dirichlet distribution over the clients of a group, per class"
    )
    capped: bool = Field(
        True,
        description="true: a client that has an even share of the samples gets none of the remaining classes "
        "(NIID-Bench); false: no cap",
    )
    group_alpha: float = Field(
        0.1, gt=0, description="concentration of the Dirichlet distribution over `groups`, per class"
    )


class ClassesConfig(LabelSkewConfig):
    """Kind classes: each client has samples of a given number of classes."""

    key_of_groups = "classes_per_group"
    classes_per_client: int = Field(2, ge=1, description="number of classes of a client")
    classes_per_group: int = Field(
        3, ge=1, description="number of classes of a group; all classes are used equally often"
    )
    share_alpha: float | None = Field(
        None,
        gt=0,
        description="concentration of the Dirichlet distribution of a class's samples over the clients that have it, "
        "so that clients have random sizes (1: all divisions are equally likely); each of them has at least one sample "
        "of the class. null: even shares",
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
        "iid": BuiltinKind("at random, in equal or given sizes", IidConfig),
        "dirichlet": BuiltinKind("label skew", DirichletConfig),
        "classes": BuiltinKind("n classes per client", ClassesConfig),
        "writer": BuiltinKind("one client per writer", PartitionConfig),
    },
    "cfl_ray.partitions",
    PluginPartitionConfig,
)
