"""Carries out chunks of exchanges; the same code runs in `simulate` and on a client host.

`core.work` defines the kinds of work and the form of their results; `_arrays` selects the module for each kind.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cfl_ray.core.engine_names import SEQUENTIAL
from cfl_ray.core.work import (
    AverageDeferred,
    ChunkResult,
    CombineColumns,
    Describe,
    EvaluateClients,
    EvaluateShared,
    Losses,
    Train,
    Weigh,
    Work,
)
from cfl_ray.data.federation import Federation
from cfl_ray.data.replay import ReplayedFederation
from cfl_ray.engine import describing, evaluating, sample_weights, training
from cfl_ray.engine.attack import Attack
from cfl_ray.engine.augmented import black_of
from cfl_ray.engine.engines import mixes_chunks
from cfl_ray.engine.open_chunk import Arrays, KeptByClients, OpenChunk, Stored, Trainer
from cfl_ray.engine.reduce import HostSums, combine_columns
from cfl_ray.engine.rows import DeviceRows, RowLookup
from cfl_ray.engine.samples import SampleCache
from cfl_ray.engine.step_graphs import graphs_of
from cfl_ray.engine.task import TrainingResult, TrainingTask
from cfl_ray.nn.network import Network

# the work of a chunk, its positions in the exchange, and client states, or deferred results, by position
ChunkInput = tuple[Work, np.ndarray, Stored]


@dataclass
class Worker:
    """Carries out chunks of exchanges with a network and the federation.

    engine: a name of `engines.ENGINES`. Clients that it cannot train are trained sequentially.
    """

    network: Network
    federation: Federation
    engine: str = SEQUENTIAL
    attack: Attack = Attack()
    configured: bool = False  # the user named the engine, so that all that it leaves to the sequential one is reported
    last_batch: int = 0  # of `EngineChoice`

    def __post_init__(self) -> None:
        self.samples, self._sampled = SampleCache(self.network.memory), self.federation
        self._black = black_of(self.federation)

    def run_all(
        self, inputs: Iterable[ChunkInput], row: RowLookup, sums: HostSums
    ) -> Iterator[tuple[ChunkResult, KeptByClients]]:
        """Carries out the chunks of an exchange in order, and adds weighted sums to `sums`.

        Yields the result of each chunk and the values that its clients keep. On a GPU, clients of several chunks
        are trained together if the engine supports it.
        """
        if self._sampled is not self.federation:
            self.samples.clear()
            self._sampled = self.federation
        device_row = DeviceRows(self.network.device, row)
        chunks = ((self._open(work, row, device_row, stored), index_m) for work, index_m, stored in inputs)
        together = None
        if mixes_chunks(self.engine, self.network):
            listed = list(chunks)
            to_train = [chunk for chunk, _ in listed if isinstance(chunk.work, Train)]
            together = training.TrainedTogether.of_chunks(to_train)
            chunks = (item for item in listed)
        for chunk, index_m in chunks:
            arrays = _arrays(chunk, sums, together)
            fallbacks = frozenset(chunk.train_one.fallbacks | graphs_of(self.network).remarks)
            yield ChunkResult(index_m, arrays, chunk.excluded, fallbacks=fallbacks), chunk.kept

    def _open(self, work: Work, row: RowLookup, device_row: DeviceRows, stored: Stored) -> OpenChunk[Any]:
        data = self.federation.at(work.address.round)
        train_one = Trainer(self.network, self.engine, self.configured, self.last_batch, self._black)
        if work.replay is not None:
            rounds_of = dict(zip(work.ids_M.tolist(), work.replay.rounds_M, strict=True))
            data = ReplayedFederation(self.federation, work.address.round, rounds_of)
        return OpenChunk(
            work,
            self.network,
            data,
            self.attack,
            cache=self.samples,
            train_one=train_one,
            row=row,
            device_row=device_row,
            stored=stored,
        )

    def train_one(self, task: TrainingTask) -> TrainingResult:
        """Trains one client. Raises DeviceMemoryError if the memory of the device is too small for it."""
        return Trainer(self.network, self.engine, black=self._black)(task)


def _arrays(chunk: OpenChunk[Any], sums: HostSums, together: training.TrainedTogether | None) -> Arrays:
    """Carries out a chunk. Returns its arrays. together: as in `training.train`."""
    match chunk.work:
        case Train():
            return training.train(chunk, sums, together)
        case AverageDeferred():
            return training.average_deferred(chunk, sums)
        case CombineColumns():
            return {"combined": combine_columns(chunk.work, chunk.stored)}
        case Losses():
            return describing.losses(chunk)
        case Weigh():
            return sample_weights.fit(chunk)
        case Describe():
            return describing.describe(chunk)
        case EvaluateClients():
            return evaluating.evaluate_clients(chunk)
        case EvaluateShared():
            return evaluating.evaluate_shared(chunk)
        case _:
            raise TypeError(f"no worker function for {type(chunk.work).__name__}")
