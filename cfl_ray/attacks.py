"""The section of an experiment that says which clients attack, and how."""

from typing import Literal

from pydantic import Field

from cfl_ray.sections import ClientIds, Section


class Attack(Section):
    """Clients that attack: they train on wrong labels, or upload something else than what they trained (`engine/attack.py`)."""

    kind: Literal["none", "label_flip", "sign_flip", "scaled", "gaussian", "colluders"] = Field(
        "none", description="none | label_flip (y -> C - 1 - y) | sign_flip (w - scale (W - w)) | scaled (w + scale (W - w)) | gaussian (w + sigma N(0, I)) | "
                            "colluders (w + scale |W - w| u, u the same direction for all of a round); w was sent, W is what training made of it"
    )  # fmt: skip
    fraction: float = Field(0.1, gt=0, lt=1, description="share of the clients that attack, floor(fraction * N) and at least one, drawn at random")
    clients: ClientIds | None = Field(None, min_length=1, description="who attacks, instead of a fraction: ids and ranges, e.g. [3, 5-9]")
    scale: float = Field(1.0, gt=0, le=1e6, description="of a sign flip, a scaled update or that of colluders")
    sigma: float = Field(1.0, gt=0, le=1e6, description="standard deviation of Gaussian noise")
    from_round: int = Field(1, ge=1, description="first round of the attack")
