"""The weighted mean, in which results are added up where they are made."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Mean:
    """Weighted mean, computed on the hosts that train the clients."""

    name: ClassVar[str] = "mean"
