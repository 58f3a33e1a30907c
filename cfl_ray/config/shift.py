"""The section `data.shift`: a class for the keys of each kind."""

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from cfl_ray.config.part import BuiltinKind, Kinds, PluginConfig
from cfl_ray.config.section import ConfigSection


def _whole(angles: list[float]) -> list[float]:
    """Whole angles as int, so that 90 and 90.0 have the same config hash."""
    return [int(angle) if angle == int(angle) else angle for angle in angles]


class ShiftConfig(ConfigSection):
    """How the true groups of clients differ (StoCFL, section 5)."""

    by_class: ClassVar[bool] = False  # True: it changes or divides samples by their classes
    kind: Any = Field("none", description="how groups differ")


class PixelsConfig(ShiftConfig):
    """Kinds that change all pixel values, in each group by another amount; a client's data can drift by them, too."""

    amounts: ClassVar[str]  # the key of the amounts


class RotatedConfig(ShiftConfig):
    """Kind rotated: the images of each group are rotated by another angle."""

    angles: Annotated[list[float], AfterValidator(_whole)] = Field(
        [0, 90, 180, 270],
        description="rotation of each group in degrees, counter-clockwise; multiples of 90 are exact, others bilinear "
        "about the centre, with 0 outside the image",
    )


class ShiftedConfig(ShiftConfig):
    """Kind shifted: the labels of each group are moved by another offset."""

    by_class = True
    offsets: list[int] = Field([0, 3, 6, 9], description="offset s of each group: label y becomes (y + s) mod C")


class PathologicalConfig(ShiftConfig):
    """Kind pathological: each group has the samples of some labels."""

    by_class = True
    label_sets: list[list[int]] = Field([[0, 1, 2], [3, 4], [5, 6], [7, 8, 9]], description="labels of each group")


class RotatedLabelsConfig(RotatedConfig, PathologicalConfig):
    """Kind rotated_labels: a group for each angle and label set."""


class HybridConfig(ShiftConfig):
    """Kind hybrid: two groups with different data sets."""

    other: str = Field("fashion_mnist", description="data set of the second group")


class NoiseConfig(PixelsConfig):
    """Kind noise: Gaussian noise of another strength in each group."""

    amounts = "sigmas"
    sigmas: list[Annotated[float, Field(ge=0)]] = Field(
        [0.0, 0.1, 0.2, 0.4],
        description="standard deviation of the noise of each group, in units of the pixel range 0..1",
    )


class BlurConfig(PixelsConfig):
    """Kind blur: the images of each group are blurred by another width."""

    amounts = "radii"
    radii: list[Annotated[float, Field(ge=0, le=1000)]] = Field(
        [0.0, 0.5, 1.0, 2.0], description="standard deviation of the blur of each group in pixels"
    )


class BrightnessConfig(PixelsConfig):
    """Kind brightness: the inputs of each group are multiplied by another factor."""

    amounts = "factors"
    factors: list[Annotated[float, Field(ge=0)]] = Field(
        [1.0, 0.75, 0.5, 0.25], description="factor of each group; values stay in the pixel range"
    )


class PluginShiftConfig(PluginConfig, ShiftConfig):
    """A function f(x, y, group, draw) of the samples of a group."""

    groups: int = Field(2, ge=1, description="number of true groups")


SHIFT_KINDS = Kinds[ShiftConfig](
    "shift",
    {
        "none": BuiltinKind(
            "all clients draw from one distribution, or keep the groups of the data", ShiftConfig, "data.shifts:natural"
        ),
        "rotated": BuiltinKind("rotated images", RotatedConfig, "data.shifts:rotations"),
        "shifted": BuiltinKind("labels moved by an offset", ShiftedConfig, "data.shifts:offsets"),
        "pathological": BuiltinKind("label sets", PathologicalConfig, "data.shifts:by_labels"),
        "hybrid": BuiltinKind("two data sets", HybridConfig, "data.shifts:two_data_sets"),
        "rotated_labels": BuiltinKind("every angle with every label set", RotatedLabelsConfig, "data.shifts:rotations"),
        "noise": BuiltinKind("Gaussian noise on the inputs", NoiseConfig, "data.shifts:with_noise"),
        "blur": BuiltinKind("Gaussian blur of images", BlurConfig, "data.shifts:blurred"),
        "brightness": BuiltinKind("inputs times a factor", BrightnessConfig, "data.shifts:brightened"),
    },
    "cfl_ray.shifts",
    PluginShiftConfig,
    "data.shifts:own",
)
