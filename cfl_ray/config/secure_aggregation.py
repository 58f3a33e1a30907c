"""The section `secure_aggregation`."""

from pydantic import Field

from cfl_ray.config.section import ConfigSection


class SecureAggregationConfig(ConfigSection):
    """Sums of masked uploads; the server sees no single upload (docs/secure_aggregation.md)."""

    clip: float = Field(
        8.0, gt=0, le=1e9, description="c, bound of the absolute value of each number of a change W - w"
    )
    levels: int = Field(2**22, ge=2, le=2**40, multiple_of=2, description="even: steps of the grid in -clip .. clip")
    bits: int = Field(
        32, ge=8, le=62, description="b, of each number: sums are modulo 2^b, which bounds clients times levels"
    )
    neighbours: int = Field(
        8, ge=2, multiple_of=2, description="k, even: clients with which a client has masks; in a smaller cohort, all"
    )
    threshold: float = Field(
        0.5,
        gt=0,
        le=1,
        description="share of the clients, and of the neighbours of each, that has to report, so that the sum can be "
        "read; in private runs also the clients whose noise is enough",
    )
