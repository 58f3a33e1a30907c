"""A chunk during its execution by a worker: its clients' models, stored values and valid samples."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np
from torch import Tensor

from cfl_ray.core.work import TEST, Exclusion, Rows, Work
from cfl_ray.data.federation import Federation
from cfl_ray.engine.attack import Attack
from cfl_ray.engine.engine import Engine, NotTrained
from cfl_ray.engine.engines import ENGINES, SEQUENTIAL
from cfl_ray.engine.failure import naming_client
from cfl_ray.engine.rows import DeviceRows, RowLookup
from cfl_ray.engine.samples import SampleCache, Samples
from cfl_ray.engine.task import TrainingResult, TrainingTask, WeighedSamples
from cfl_ray.engine.validation import invalid_data_reason
from cfl_ray.engine.vmap_batches import train_alone
from cfl_ray.nn.network import Network
from cfl_ray.nn.outputs import outputs_of

Arrays = dict[str, np.ndarray]
Row = tuple[int, int]  # of a model: table and row in it
Stored = Mapping[int, Tensor] | Sequence[Tensor]  # by position: client states, or deferred results

W = TypeVar("W", bound=Work)


@dataclass(eq=False)
class KeptByClients:
    """Client states and deferred results of a chunk, by position in the chunk; they are added client by client."""

    states: dict[int, Tensor] = field(default_factory=dict)
    deferred: dict[int, Tensor] = field(default_factory=dict)  # results that a later exchange averages


@dataclass(eq=False)
class Trainer:
    """Trains single clients with an engine, or sequentially if the engine cannot train them, and notes why."""

    network: Network
    engine: str
    configured: bool = False  # the user named the engine
    last_batch: int = 0  # of `EngineChoice`
    black: Tensor | None = None  # `TrainingTask.black` of all clients
    fallbacks: set[str] = field(default_factory=set)  # reasons why clients were trained sequentially, each a line

    def __call__(self, task: TrainingTask) -> TrainingResult:
        """Trains one client. Raises DeviceMemoryError if the memory of the device is too small for it."""
        return train_alone(self.network.memory, self.with_black(task), self._train)

    def with_black(self, task: TrainingTask) -> TrainingTask:
        """The task with the value of black that its augmentations need."""
        return replace(task, black=self.black) if task.local.augment else task

    def fall_back(self, reason: str) -> None:
        """Records why clients are trained sequentially."""
        self.fallbacks.add(f"{self.engine} gives way to {SEQUENTIAL} for some or all clients: {reason}")

    def trained_alone(self) -> None:
        """Records that a client was trained without others, if the engine that the user named trains none so."""
        if self.configured and (reason := ENGINES[self.engine].not_alone):
            self.fall_back(reason)

    def _train(self, task: TrainingTask) -> TrainingResult:
        engine = ENGINES[self.engine]
        reason = engine.why_not(self.network, [task])
        if reason is None:
            try:
                return next(engine.train(self.network, [task]))
            except NotTrained as error:
                reason = str(error)
        self.fall_back(reason)
        return next(ENGINES[SEQUENTIAL].train(self.network, [task]))


@dataclass(eq=False)
class OpenChunk(Generic[W]):
    """A chunk during its execution, to which the results of its clients are added one after another.

    `index` is the position of a client in the chunk.
    """

    work: W
    network: Network
    data: Federation  # as of the round
    attack: Attack
    cache: SampleCache
    train_one: Trainer
    row: RowLookup
    device_row: DeviceRows
    stored: Stored
    # ---- results so far
    kept: KeptByClients = field(default_factory=KeptByClients)
    excluded: dict[int, Exclusion] = field(default_factory=dict)
    # weights of the samples of clients whose program gives them, by the position of the client's first entry
    weighed: Mapping[int, WeighedSamples] = field(default_factory=dict)
    # values of the result that are known before the first step, of the entries with a task, by position
    known: dict[int, Arrays] = field(default_factory=dict)
    # tasks of the clients whose program is not finished after the last step, by position
    unfinished: dict[int, TrainingTask] = field(default_factory=dict)
    _on_device: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # rows used so far, by table and row

    def __len__(self) -> int:
        return len(self.work.ids_M)

    @property
    def engine(self) -> Engine:
        """The engine of the process, which may not train all clients."""
        return ENGINES[self.train_one.engine]

    def client(self, index: int) -> int:
        return int(self.work.ids_M[index])

    def exclude(self, index: int, reason: str) -> None:
        self.excluded[index] = Exclusion(reason)

    def empty(self) -> Arrays:
        """The arrays of the result, as if all clients were excluded."""
        return self.work.empty_result(self.data.shape.num_classes)

    def tested_on(self, part: str) -> Federation:
        """The federation whose test data are this part of the clients' data."""
        if part == TEST:
            return self.data
        assert self.data.validation is not None  # the server measures the parts that there are
        return self.data.validation

    # ---- models

    def model(self, rows: Rows, index: int) -> Tensor:
        """The model (P,) that `rows` assigns to a client."""
        return self.row(rows.table, int(rows.row_M[index]))

    def on_device(self, rows: Rows, index: int) -> Tensor:
        """The model (P,), on the network's device."""
        key = rows.table, int(rows.row_M[index])
        if key not in self._on_device:
            self._on_device[key] = self.device_row(*key)
        return self._on_device[key]

    def on_device_of(self, other_P: Tensor, rows: Rows, index: int) -> Tensor:
        """The model (P,), on the device of another row."""
        return self.model(rows, index) if other_P.device.type == "cpu" else self.on_device(rows, index)

    def frozen(self, index: int) -> Tensor | None:
        return None if self.work.frozen_model is None else self.on_device(self.work.frozen_model, index)

    def stored_value(self, index: int) -> Tensor | None:
        """The stored value of a client; None without a value."""
        return self.stored.get(index) if isinstance(self.stored, Mapping) else self.stored[index]

    def outputs(
        self, samples: Mapping[int, Samples], rows_of: Mapping[int, Sequence[Row]]
    ) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Yields (number, index, outputs, targets) of the clients' models; shared models are loaded once."""
        users: dict[tuple[int, Row], list[int]] = {}
        for index in samples:
            for used in enumerate(rows_of[index]):
                users.setdefault(used, []).append(index)
        for (number, row), indices in users.items():
            self.network.load(self.row(*row))
            for index in indices:
                x, y = samples[index]
                found = outputs_of(self.network, x)
                yield number, index, found, y.to(found.device)

    # ---- samples

    def samples(self, index: int, on_device: bool = True) -> Samples | None:
        """Training samples of a client, with the labels it trains on: an attacker may have changed them.

        If they are not valid, excludes the client and returns None. on_device: see `read`; False: as they are read.
        """
        client = self.client(index)
        with naming_client(client, "reading its data"):
            key = (client, self.data.data_version(client)) if on_device else None
            samples = self.read(key, lambda: self.data.train(client), least=1)
        if isinstance(samples, str):
            self.exclude(index, f"its data have {samples}")
            return None
        x, y = samples
        return x, self.attack.labels(client, y, self.data.shape.num_classes, self.work.address)

    def read(self, key: Hashable | None, read: Callable[[], Samples], least: int = 0) -> Samples | str:
        """Samples from `read`, on the network's device if the cache has room for them, or why they are not valid.

        key: of the samples in the cache; None: they are not kept. least: smallest number of samples.
        """
        samples = None if key is None else self.cache.get(key)
        if samples is None:
            samples = read()
            if reason := invalid_data_reason(*samples, self.data.shape, least):
                return reason
            samples = samples if key is None else self.cache.add(key, samples)
        return samples
