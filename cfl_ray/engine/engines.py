"""The engines: implementations of local training on a host.

An engine is a module of this package with an `ENGINE`, and has its name in `core.engine_names`. All results equal
those of the sequential engine up to rounding. Clients that an engine cannot train are trained sequentially.
"""

from dataclasses import dataclass
from importlib import import_module

from cfl_ray.core import engine_names as names
from cfl_ray.engine.engine import Engine
from cfl_ray.nn.network import Network

_TOGETHER = 256  # most clients that are counted as trained together if several chunks are

ENGINES: dict[str, Engine] = {name: import_module(f"cfl_ray.engine.{name}").ENGINE for name in names.ENGINES}
SEQUENTIAL, COMPILED = names.SEQUENTIAL, names.COMPILED


def chunk_size(num_clients: int, engine: str, one_by_one: bool = False) -> int:
    """Number of clients of a chunk.

    one_by_one: one client per chunk, for runs whose hosts serve few clients each (`runtime.clients_per_host`).
    """
    return 1 if one_by_one else ENGINES[engine].chunk_size(num_clients)


def mixes_chunks(engine: str, network: Network) -> bool:
    """Whether clients of several chunks are trained together.

    Not with batch statistics: they need equal batches and steps, which are checked chunk by chunk.
    """
    return ENGINES[engine].together and network.memory.measurable and not network.batch_statistics


@dataclass(frozen=True)
class Division:
    """How the clients of a round are divided into chunks; see `chunk_size`."""

    cohort: int  # clients of a round
    one_by_one: bool = False

    def size(self, engine: str) -> int:
        return chunk_size(self.cohort, engine, self.one_by_one)

    def together(self, engine: str, network: Network) -> int:
        """Number of clients passed to the engine at once: of several chunks on a GPU, otherwise of one chunk."""
        if self.one_by_one or not mixes_chunks(engine, network):
            return self.size(engine)
        return max(self.size(engine), min(self.cohort, _TOGETHER))
