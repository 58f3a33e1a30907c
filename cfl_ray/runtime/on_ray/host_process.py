"""The process of a client host: it holds a network and does chunks of exchanges for any client."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RaySystemError
from torch import Tensor

from cfl_ray.checkpoint.segments import ClientStateFile, EntryFile
from cfl_ray.core.work import CombineColumns, Train, Work
from cfl_ray.engine.choice import EngineChoice
from cfl_ray.engine.chunks import merged
from cfl_ray.engine.reduce import HostSums
from cfl_ray.nn.precision import products_in
from cfl_ray.nn.shared import shared_tensor
from cfl_ray.results.environment import HostEnvironment
from cfl_ray.runtime.on_ray.stored import LazyTensors, Pack, Place, fetched, tensor_of, tensors_at
from cfl_ray.setup.engine_choice import compute_device, device_name, engine_by_rule
from cfl_ray.setup.setup import Setup
from cfl_ray.system import cpu
from cfl_ray.system.allocator import keep_freed_memory, return_freed_memory

_KEPT_BYTES = 32 << 20  # freed memory that a host keeps from one exchange to the next


class HostProcess:
    """Work of a host, with one compute thread. The sums of an exchange stay here until they are collected."""

    exchange: int | None = None
    failure: Exception | None = None  # why the present federation cannot be opened here
    chunks_done = 0  # chunks of the present call that are done; read by another thread

    def __init__(self, packed: list[ray.ObjectRef[Any]], engine: str, last_batch: int = 0):
        torch.set_num_threads(1)
        keep_freed_memory()
        self.setup: Setup = fetch(packed[0])
        if len(packed) > 1:
            self.setup = replace(self.setup, federation=fetch(packed[1]))
        cpu.check_instructions(self.setup.experiment.runtime.cpu_capability, "on a host")
        self.device = compute_device(self.setup.experiment, has_gpu=bool(ray.get_gpu_ids()))
        self.settings = ExitStack()  # until the process ends
        self.settings.enter_context(products_in(self.setup.experiment.runtime.precision))
        self.worker = self.setup.worker(self.device, engine, last_batch)
        self.sums = HostSums()
        self.fetching = ThreadPoolExecutor(1, "fetch")
        self.rows: dict[tuple[int, int], Tensor] = {}

    def about(self) -> dict[str, Any]:
        """Node, process id, device and environment of this host."""
        node, device = ray.get_runtime_context().get_node_id(), device_name(self.device)
        return {"node": node, "pid": os.getpid(), "device": device, "environment": HostEnvironment.here()}

    def engine_by_rule(self) -> EngineChoice:
        """The engine for this experiment on the device of this host."""
        return engine_by_rule(self.setup, self.worker.network)

    def use(self, packed: list[ray.ObjectRef[Any]]) -> None:
        """Uses this federation from now on.

        If it cannot be opened, the later calls of `work` raise the error, because no process waits for this call.
        """
        try:
            federation = fetch(packed[0])
        except Exception as error:
            self.failure = error
            return
        self.setup = replace(self.setup, federation=federation)
        self.failure, self.worker.federation = None, federation

    def work(
        self,
        exchange: int,
        work: Work,
        index_m: np.ndarray,
        cuts: np.ndarray,
        models: dict[tuple[int, int], ray.ObjectRef[Any] | np.ndarray],
        packed: list[bool],
        return_sums: bool,
        places: dict[int, list[tuple[int, int | None]]],
        *stored: Any,
    ) -> Any:
        """Does the chunks of a call. Returns their result and totals, and the values that their clients keep.

        work: of all clients of the call; `cuts` divides it into chunks.
        exchange: its number in this run (`Pool.next_exchange`), which a round that is repeated does not use again.
        models: the rows that the call uses; a reference is fetched at most once per exchange.
        packed: for each kind of value that clients keep, whether the values of all clients are one object.
        return_sums: whether to return the totals (2, P) by output row now; otherwise they stay here until `collect`.
        places: where the states or deferred results of the clients are, by position of the client in the call: for
            each part of the value, the argument in `stored` and the position in that argument. For `CombineColumns`
            they are by range and member, and `stored` is a list of references, because all values together may not
            fit into memory.
        """
        if self.failure:
            raise self.failure
        began = time.perf_counter()
        if exchange != self.exchange:
            self.exchange, self.sums, self.rows = exchange, HostSums(), {}
            return_freed_memory(_KEPT_BYTES)
        if work.is_per_client:
            self._fetch_files(work.ids_M)
        sums = HostSums() if return_sums else self.sums
        self.chunks_done = 0
        results, states, deferred = [], {}, {}
        parts = np.split(np.arange(len(index_m)), cuts)
        inputs = ((work.take(part), part, _stored_of(work, part, places, stored)) for part in parts)
        for result, kept in self.worker.run_all(inputs, lambda table, row: self._row(models, table, row), sums):
            results.append(result)
            self.chunks_done = len(results)
            states.update({int(result.index_m[i]): value for i, value in kept.states.items()})
            deferred.update({int(result.index_m[i]): value for i, value in kept.deferred.items()})
        totals = {out: total_2P.numpy() for out, total_2P in sums.totals.items()} if return_sums else {}
        whole = replace(merged(results, index_m), seconds=time.perf_counter() - began), totals
        kinds = [states] * (isinstance(work, Train) and work.client_state is not None)
        if isinstance(work, Train) and work.defer_aggregation:
            size = next(map(len, deferred.values()), 0)
            kinds += [{i: value[part] for i, value in deferred.items()} for part in work.parts(size)]
        kept_objects = _objects_of(kinds, packed, len(index_m))
        return (whole, *kept_objects) if kept_objects else whole

    def _fetch_files(self, clients: np.ndarray) -> None:
        """Fetches the files of the call's clients while the first clients train.

        A failure is ignored here; the chunk that needs the file raises it.
        """
        federation = self.worker.federation
        if federation.files_of(clients) is not None:
            self.fetching.submit(federation.fetch, clients)

    def _row(self, models: dict[tuple[int, int], ray.ObjectRef[Any] | np.ndarray], table: int, row: int) -> Tensor:
        if (table, row) not in self.rows:
            model = models[table, row]
            self.rows[table, row] = shared_tensor(model if isinstance(model, np.ndarray) else fetched(model))
        return self.rows[table, row]

    def write(self, file: ClientStateFile, places: list[Place]) -> EntryFile:
        """Writes client states to a file of a checkpoint."""
        return file.write(tensors_at(places))

    def collect(self, exchange: int, rows: list[int]) -> Any:
        """The totals (2, P) of these output rows over all work of this host in this exchange, which ends here.

        None for a row whose clients were all excluded.
        """
        totals = self.sums.totals if exchange == self.exchange else {}
        self.exchange, self.sums, self.rows = None, HostSums(), {}
        sums = [totals[out].numpy() if out in totals else None for out in rows]
        return sums[0] if len(rows) == 1 else sums

    def combine(self, last: bool, *totals: np.ndarray | None) -> np.ndarray | None:
        """The sum of totals (2, P) of an output row; if `last`, as float32 (P,). None if all totals are None."""
        sums = HostSums()
        for total_2P in totals:
            if total_2P is not None:
                sums.merge({0: shared_tensor(total_2P)})
        if not sums.totals:
            return None
        return (sums.values() if last else sums.totals)[0].numpy()


def _stored_of(
    work: Work, part: np.ndarray, places: dict[int, list[tuple[int, int | None]]], stored: Sequence[Any]
) -> LazyTensors | dict[int, Tensor]:
    """The stored values of the clients of a chunk, by position in it. part: their positions in the call."""
    if isinstance(work, CombineColumns):
        first = int(part[0]) * len(work.members)
        return LazyTensors(stored[0], [places[first + i][0] for i in range(len(work.members))])
    count = work.states_per_client
    positions = np.add.outer(part * count, np.arange(count)).ravel().tolist()
    found = {i: places[at] for i, at in enumerate(positions) if at in places}
    tensors = {i: [tensor_of(stored[at], position) for at, position in of] for i, of in found.items()}
    return {i: parts[0] if len(parts) == 1 else torch.cat(parts) for i, parts in tensors.items()}


def _objects_of(kinds: Sequence[Mapping[int, Tensor]], packed: Sequence[bool], count: int) -> list[Any]:
    """The values of `count` clients in the form of a result: for each kind one pack, or an entry for each client."""
    objects: list[Any] = []
    for values, is_packed in zip(kinds, packed, strict=True):
        if is_packed:
            objects.append(tuple(Pack.of(values, count)))
        else:
            objects += [values[i].numpy() if i in values else None for i in range(count)]
    return objects


def fetch(ref: ray.ObjectRef[Any]) -> Any:
    """The object behind `ref`. Raises the original error of unpickling, such as DataError for missing shards."""
    try:
        return ray.get(ref)
    except RaySystemError as error:
        raise error.client_exc if isinstance(error.client_exc, Exception) else error from None
