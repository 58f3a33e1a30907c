"""The section `start`."""

from pydantic import Field

from cfl_ray.config.section import ConfigSection


class StartConfig(ConfigSection):
    """The first models of methods that begin with several."""

    noise: float | None = Field(
        None,
        gt=0,
        le=10,
        description="for networks that begin with the same weights every time, such as pretrained ones: standard "
        "deviation of normal random numbers that are added to the parameters of all first models but one. null: a "
        "method whose first models must differ refuses such a network (docs/extend/pretrained.md names them)",
    )
