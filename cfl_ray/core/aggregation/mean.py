"""The weighted mean, summed on the hosts that train."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Mean:
    """Weighted mean, computed on the hosts that train the clients."""

    name: ClassVar[str] = "mean"
