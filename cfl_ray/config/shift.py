"""The section `data.shift`."""

from typing import Annotated, Any

from pydantic import Field, field_validator

from cfl_ray.config.part import BuiltinKind, PartConfig, meanings_of


class ShiftConfig(PartConfig):
    """How the true groups of clients differ (StoCFL, section 5)."""

    part = "shift"
    where = "data.shift"
    group = "cfl_ray.shifts"
    keys_of_own = ("groups",)
    builtin = {
        "none": BuiltinKind("all clients draw from one distribution, or keep the groups that the data came with"),
        "rotated": BuiltinKind("rotated images", ("angles",)),
        "shifted": BuiltinKind("labels moved by an offset", ("offsets",)),
        "pathological": BuiltinKind("label sets", ("label_sets",)),
        "hybrid": BuiltinKind("two data sets", ("other",)),
        "rotated_labels": BuiltinKind("every angle with every label set", ("angles", "label_sets")),
        "noise": BuiltinKind("Gaussian noise on the inputs", ("sigmas",)),
        "blur": BuiltinKind("Gaussian blur of images", ("radii",)),
        "brightness": BuiltinKind("inputs times a factor", ("factors",)),
    }

    kind: Any = Field("none", description=f"how groups differ: {meanings_of(builtin)}")
    groups: int = Field(2, ge=1, description="number of true groups of a shift of your own (file.py:function)")
    angles: list[int | float] = Field(
        [0, 90, 180, 270],
        description="rotation of each group in degrees, counter-clockwise (rotated, rotated_labels); multiples of 90 "
        "are exact, others bilinear about the centre, with 0 where the image does not reach",
    )
    sigmas: list[Annotated[float, Field(ge=0)]] = Field(
        [0.0, 0.1, 0.2, 0.4],
        description="standard deviation of the noise of each group, in units of the pixel range 0..1 (noise)",
    )
    radii: list[Annotated[float, Field(ge=0)]] = Field(
        [0.0, 0.5, 1.0, 2.0], description="standard deviation of the blur of each group in pixels (blur)"
    )
    factors: list[Annotated[float, Field(ge=0)]] = Field(
        [1.0, 0.75, 0.5, 0.25], description="factor of each group; values stay in the pixel range (brightness)"
    )
    offsets: list[int] = Field(
        [0, 3, 6, 9], description="offset s of each group: label y becomes (y + s) mod C (shifted)"
    )
    label_sets: list[list[int]] = Field(
        [[0, 1, 2], [3, 4], [5, 6], [7, 8, 9]], description="labels of each group (pathological, rotated_labels)"
    )
    other: str = Field("fashion_mnist", description="second data set, that of the second group (hybrid)")

    @field_validator("angles")
    @classmethod
    def _as_whole(cls, angles: list[int | float]) -> list[int | float]:
        """Whole numbers as such: the hash of a config does not depend on how they are written."""
        return [int(angle) if angle == int(angle) else angle for angle in angles]
