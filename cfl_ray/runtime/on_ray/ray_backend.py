"""The Ray backend: chunks go to hosts as they become free; models and sums are transferred once per host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError
from torch import Tensor

from cfl_ray.checkpoint.lease import SharedDirectory
from cfl_ray.core.work import AverageDeferred, ChunkResult, CombineColumns, Describe, Exclusion, Outcome, Train, Work
from cfl_ray.data.federation import Federation
from cfl_ray.engine.chunks import Chunk, chunks_of, outcome_of
from cfl_ray.engine.client_state import KeepsClientStates
from cfl_ray.engine.engines import chunk_size
from cfl_ray.engine.reduce import HostSums
from cfl_ray.nn.shared import shared_tensor
from cfl_ray.runtime.on_ray.chunk_queue import ChunkQueue
from cfl_ray.runtime.on_ray.client_states import RayClientStates
from cfl_ray.runtime.on_ray.collect import Collected
from cfl_ray.runtime.on_ray.connect import as_user_error, may_be_host
from cfl_ray.runtime.on_ray.dispatch import Dispatch
from cfl_ray.runtime.on_ray.pool import Host, Pool
from cfl_ray.runtime.on_ray.stored import PACKED_BYTES, StoredValue

# most bytes that the clients of a call keep, or return as features or descriptions, in the heap of the host until the
# call ends; more on a GPU, whose host trains the clients of a call together
_KEPT_BYTES, _KEPT_BYTES_GPU = 1 << 24, 1 << 29
# least seconds of work in a call, and per host: a call costs the host about a millisecond and the server one to three,
# and the server makes a call for each of the other hosts in the meantime
_CALL_SECONDS, _SERVER_SECONDS = 0.01, 0.003
_IN_CALL_BYTES = 1 << 16  # size of the models of a call up to which they are its arguments; a fetch costs 0.5 ms
_WITH_RESULT_BYTES = 1 << 23  # size of the sums of all chunks up to which each call returns its sums


@dataclass
class RayBackend(KeepsClientStates):
    """Backend over a pool of hosts.

    shared: the directory of the method's files; None: no files are kept.
    """

    pool: Pool
    shared: SharedDirectory | None = None
    # clients that took too long: not tried again in this stage (`Address.stage`)
    late: dict[int, Exclusion] = field(default_factory=dict)
    node_of_file: dict[int, str] = field(default_factory=dict)  # first node that fetched a file of clients
    # by id of a table: the table, and references to the rows in the object store
    _rows: dict[int, tuple[Tensor, dict[int, ray.ObjectRef[Any]]]] = field(default_factory=dict)
    _stage: tuple[int, bool] | None = None  # of the last exchange
    _seconds_of_cost: dict[type[Work], float] = field(default_factory=dict)  # of one host, in the last such exchange

    client_states: RayClientStates = field(init=False)

    def __post_init__(self) -> None:
        self.client_states = RayClientStates(self.pool, self.shared)

    def run(self, work: Work) -> Outcome:
        number = self.pool.next_exchange()
        if work.address.stage != self._stage:
            self._stage, self._rows, self.late = work.address.stage, {}, {}
        self.client_states.begin(work)
        exchange = Exchange(self, work, number)
        outcome = exchange.run()
        self.pool.finished += 1
        seconds = sum(result.seconds for result in exchange.results)
        self._seconds_of_cost[type(work)] = seconds / max(exchange.cost, 1e-9)
        return outcome

    def seconds_of_cost(self, work: Work) -> float | None:
        """Seconds of a host for a chunk of cost 1, in the last exchange of this kind; None if there was none."""
        return self._seconds_of_cost.get(type(work))

    def least_cost(self, work: Work) -> float:
        """The least cost of a call that is worth its overhead; 0: not known."""
        seconds = self.seconds_of_cost(work)
        return max(_CALL_SECONDS, _SERVER_SECONDS * len(self.pool.hosts)) / seconds if seconds else 0.0

    def row(self, table: Tensor, row: int) -> ray.ObjectRef[Any]:
        """The reference of a model, which is put into the object store once per stage for all exchanges and hosts."""
        _, refs = self._rows.setdefault(id(table), (table, {}))
        if row not in refs:
            refs[row] = ray.put(table[row].numpy())
        return refs[row]

    def use(self, federation: Federation) -> None:
        self.node_of_file = {}
        self.pool.use(federation)


@dataclass
class _KeptValues:
    """Values of one kind that clients keep after the work, by key: client states, or a part of deferred results."""

    nbytes: int  # size of each value
    values: dict[int, StoredValue] = field(default_factory=dict)

    @property
    def is_packed(self) -> bool:
        """Whether the values of a call are one object."""
        return self.nbytes <= PACKED_BYTES


def _kept_values(work: Work) -> tuple[_KeptValues | None, list[_KeptValues]]:
    """(client states, parts of deferred results) that clients keep after the work; (None, []): they keep none."""
    states: _KeptValues | None = None
    parts: list[_KeptValues] = []
    if isinstance(work, Train):
        size = work.columns_of(work.start)
        if (state := work.client_state) is not None:
            columns = size if state.columns is None else state.columns.count
            floats = columns + work.kept_numbers + size * work.local.persist
            states = _KeptValues(4 * floats)
        if work.defer_aggregation:
            parts = [_KeptValues(4 * (part.stop - part.start)) for part in work.parts(size)]
    return states, parts


class Exchange:
    """One exchange over the hosts: its calls, and their results so far.

    The steps of `run`: `_chunks` cuts the work into chunks, `Dispatch` makes calls from chunks (`start`) and passes on
    their returns (`receive`), `_collect` adds up the sums of the hosts. `exclude` records clients without a result.
    """

    def __init__(self, backend: RayBackend, work: Work, number: int):
        self.backend, self.work, self.number = backend, work, number
        self.setup = backend.pool.setup
        self.results: list[ChunkResult] = []  # returned by calls
        self.skipped: list[ChunkResult] = []  # empty results of excluded clients
        self.states, self.deferred = _kept_values(work)
        self.kept = [kind for kind in (self.states, *self.deferred) if kind is not None]
        self.node_of: dict[ray.ObjectRef[Any], str] = {}  # node of each value that a call in progress makes
        # size of the values that a client keeps, and of the features or the description that the call returns of it
        self.bytes_per_client = sum(kind.nbytes for kind in self.kept) + 4 * self._returned_floats()
        self.cost = 0.0  # cost of all chunks
        self.received_cost = 0.0  # cost of the chunks whose results were received
        self.return_sums = False  # whether calls return their sums; otherwise these are collected from the hosts
        self.sums = HostSums()
        self.changes: dict[int, Tensor] = {}  # float32 (P,) by output row: sums over all hosts

    def run(self) -> Outcome:
        runtime, chunks = self.setup.experiment.runtime, self._chunks()
        self.return_sums = self._returns_sums(len(chunks))
        homes = [self._home(chunk) for chunk in chunks] if runtime.clients_per_host else []
        # with a deadline for each chunk, a call has one chunk
        together = runtime.round_deadline is None
        least = self.backend.least_cost(self.work)
        budget = _KEPT_BYTES if self.backend.pool.device == "cpu" else _KEPT_BYTES_GPU
        most = budget // self.bytes_per_client if self.bytes_per_client else float("inf")
        queue = ChunkQueue(chunks, together, homes, least, self._nodes(chunks), most)
        self.cost = queue.total
        dispatch = Dispatch(self.backend.pool, queue, self)
        while queue:
            dispatch.run()
            if self.collects:
                self._collect(dispatch)
        states = {} if self.states is None else self.states.values
        keys = self.deferred[0].values if self.deferred else ()
        deferred = {key: tuple(part.values[key] for part in self.deferred) for key in keys}
        self.backend.client_states.keep(self.work, states, deferred)
        results = [*self.results, *self.skipped]  # `skipped` last: exclusions override results
        return outcome_of(self.work, results, self.changes or self.sums.values())

    @property
    def collects(self) -> bool:
        """Whether hosts keep their sums until these are collected."""
        return self.work.averaging is not None and not self.return_sums

    @property
    def stays_on_hosts(self) -> bool:
        """Whether sums or values of clients stay on hosts, so that the work of a host that dies is lost."""
        return self.collects or bool(self.kept)

    def _returned_floats(self) -> int:
        """Most floats that a call returns of each client: those of its features and reports, or of its description."""
        if isinstance(self.work, Describe):
            shape = self.setup.federation.shape
            return self.work.most_features(math.prod(shape.input), shape.num_classes)
        if not isinstance(self.work, Train):
            return 0
        return sum(self.work.reports.values()) + (0 if self.work.features is None else self.work.features.count)

    def _returns_sums(self, chunks: int) -> bool:
        """Whether calls return their sums: if these are small and no values of clients stay on the hosts."""
        work = self.work
        if self.kept or not isinstance(work, Train | AverageDeferred) or work.averaging is None:
            return False
        columns = work.columns_of(work.start)
        return 16 * work.averaging.num_rows * columns * chunks <= _WITH_RESULT_BYTES

    def _chunks(self) -> list[Chunk]:
        """The chunks, without the clients that took too long earlier in this stage."""
        work, late, choice = self.work, list[int](), self.backend.pool.choice
        assert choice is not None
        size = chunk_size(work.num_clients, choice.engine, bool(self.setup.experiment.runtime.clients_per_host))
        num_samples_M = self.setup.federation.num_samples_N[work.ids_M] if work.is_per_client else None
        chunks = chunks_of(work, size, num_samples_M)
        if self.backend.late and work.is_per_client:
            late = [i for i, client in enumerate(work.ids_M.tolist()) if client in self.backend.late]
        if not late:
            return chunks
        self.exclude(np.array(late), [self.backend.late[client] for client in work.ids_M[late].tolist()])
        kept = [replace(chunk, index_m=np.setdiff1d(chunk.index_m, late, True)) for chunk in chunks]
        return [chunk for chunk in kept if len(chunk.index_m)]

    def _home(self, chunk: Chunk) -> int | None:
        """The only host that serves the chunk's clients; None: any host."""
        per_host = self.setup.experiment.runtime.clients_per_host
        return int(self.work.ids_M[chunk.index_m[0]]) // per_host if per_host and self.work.is_per_client else None

    def _files(self, chunks: Sequence[Chunk]) -> list[int]:
        """The file that holds the first client of each chunk; empty if hosts fetch no files."""
        if not self.work.is_per_client or not len(self.work.ids_M):
            return []
        firsts = np.array([chunk.index_m[0] for chunk in chunks], np.int64)
        files = self.setup.federation.files_of(self.work.ids_M[firsts])
        return [] if files is None else files.tolist()

    def _nodes(self, chunks: Sequence[Chunk]) -> list[str]:
        """The node that has fetched the data of each chunk; "" if no node with a host has."""
        nodes = {host.node for host in self.backend.pool.hosts}
        of_file = {file: node for file, node in self.backend.node_of_file.items() if node in nodes}
        self.backend.node_of_file = of_file
        return [of_file.get(file, "") for file in self._files(chunks)]

    # ---- calls

    def start(self, host: Host, chunks: Sequence[Chunk]) -> list[ray.ObjectRef[Any]]:
        """The references of a new call with these chunks on a host; the first is ready when the call has ended."""
        for file in self._files(chunks):
            self.backend.node_of_file.setdefault(file, host.node)
        work, index_m = self.work, np.concatenate([chunk.index_m for chunk in chunks])
        order = work.take(index_m)
        stored = self.backend.client_states.places(order, host)
        sources = list(dict.fromkeys(source for parts in stored.values() for source, _ in parts))
        argument_of = {source: at for at, source in enumerate(sources)}
        places = {i: [(argument_of[source], position) for source, position in parts] for i, parts in stored.items()}
        # Ray passes references in a list unresolved; the host fetches them in turn
        arguments: list[Any] = [sources] if isinstance(work, CombineColumns) else sources
        uses = {(rows.table, row) for rows in order.rows() for row in set(rows.row_M.tolist())}
        models = self._models(sorted(uses))
        packed = [kind.is_packed for kind in self.kept]
        returns = 1 + sum(1 if is_packed else len(index_m) for is_packed in packed)
        cuts = np.cumsum([len(chunk.index_m) for chunk in chunks])[:-1]
        call = host.actor.work.options(num_returns=returns)
        made = call.remote(self.number, order, index_m, cuts, models, packed, self.return_sums, places, *arguments)
        made = made if isinstance(made, list) else [made]
        self.node_of.update(dict.fromkeys(made[1:], host.node))
        return made

    def _models(self, uses: list[tuple[int, int]]) -> dict[tuple[int, int], ray.ObjectRef[Any] | np.ndarray]:
        """Models by (table, row): the values if they are small in total, otherwise references."""
        tables = self.work.tables
        if sum(tables[table][row].nbytes for table, row in uses) <= _IN_CALL_BYTES:
            return {(table, row): tables[table][row].numpy() for table, row in uses}
        return {(table, row): self.backend.row(tables[table], row) for table, row in uses}

    def seconds(self, chunks: Sequence[Chunk]) -> float | None:
        """Seconds after which the host of these chunks is ended; None: no limit. Clients of a chain add up."""
        deadline = None if isinstance(self.work, CombineColumns) else self.setup.experiment.runtime.round_deadline
        return deadline and deadline * (len(chunks[0].index_m) if self.work.chained else len(chunks))

    def usual_seconds(self, chunks: Sequence[Chunk]) -> float | None:
        """Seconds that such chunks took so far; None: not known."""
        seconds = self.backend.seconds_of_cost(self.work)
        if seconds is None and self.results:  # the first exchange of its kind: by its calls so far
            seconds = sum(result.seconds for result in self.results) / max(self.received_cost, 1e-9)
        return None if seconds is None else seconds * sum(chunk.cost for chunk in chunks)

    def clients(self, chunks: Sequence[Chunk]) -> list[int]:
        """Ids of the clients (or test sets) of these chunks."""
        return self.work.ids_M[np.concatenate([chunk.index_m for chunk in chunks])].tolist()

    def replacements(self, chunk: Chunk) -> list[Chunk]:
        """The chunks that replace a chunk that took too long: one per client, or the whole chain.

        Empty if the chunk is such a replacement; then its clients are excluded.
        """
        work = self.work
        if not chunk.alone:
            parts = [chunk.index_m] if work.chained else chunk.index_m[:, None]
            return [replace(chunk, index_m=part, alone=True) for part in parts]
        order, seconds = work.take(chunk.index_m), self.seconds([chunk])
        ids = order.ids_M.tolist()
        exclusions = [Exclusion(_late_reason(order, client, seconds), late=True) for client in ids]
        self.exclude(chunk.index_m, exclusions)
        if work.is_per_client:
            self.backend.late.update(zip(ids, exclusions, strict=True))
        return []

    # ---- returns

    def receive(self, chunks: Sequence[Chunk], returns: list[Any]) -> None:
        """Stores the result of a call, and the references to the values that its clients keep."""
        (result, totals), *refs = returns
        self.results.append(result)
        self.received_cost += sum(chunk.cost for chunk in chunks)
        self.sums.merge({out: shared_tensor(total_2P) for out, total_2P in totals.items()})
        keys = self.work.keys_of(self.work.ids_M[result.index_m], result.index_m).tolist()
        rest = iter(refs)
        for kind in self.kept:
            if kind.is_packed:
                pack = next(rest)
                node = self.node_of.pop(pack)
                values = [StoredValue(pack, position, kind.nbytes, node) for position in range(len(keys))]
            else:
                values = [StoredValue(ref, None, kind.nbytes, self.node_of.pop(ref)) for ref in islice(rest, len(keys))]
            entries = zip(keys, values, result.arrays["valid"], strict=True)
            kind.values.update({key: value for key, value, valid in entries if valid})

    def _collect(self, dispatch: Dispatch) -> None:
        """Adds up the sums of all hosts. The chunks of a host that dies before this are put back."""
        rows_of = [
            (self.backend.pool.host(number), self._output_rows(dispatch.queue, chunks))
            for number, chunks in dispatch.done.items()
        ]
        assert isinstance(self.work, Train | AverageDeferred)
        columns = self.work.columns_of(self.work.start)
        collected = Collected(self.number, [(host, rows) for host, rows in rows_of if rows], columns)
        if collected.use_tree and not self.sums.totals:
            try:
                sums = collected.by_tree()
                self.changes = {out: shared_tensor(sum_P) for out, sum_P in sums.items()}
                dispatch.done.clear()
                return
            except RayError:
                pass  # the loop below determines which host was lost
        for position, (host, _) in enumerate(collected.rows_of):
            try:
                totals = collected.of_host(position)
                self.sums.merge({out: shared_tensor(total_2P) for out, total_2P in totals.items()})
            except RayError as error:
                if isinstance(error, RayTaskError) and not may_be_host(error):
                    raise as_user_error(error) from error
                dispatch.lost(host, error)
        dispatch.done.clear()  # those of lost hosts are put back

    def _output_rows(self, queue: ChunkQueue, numbers: list[int]) -> list[int]:
        """The output rows of these chunks."""
        assert self.work.averaging is not None
        if self.work.secure is not None:
            return list(range(self.work.averaging.num_rows))
        index_m = np.concatenate([queue.chunks[number].index_m for number in numbers])
        return np.unique(self.work.averaging.take(index_m).out_E).tolist()

    def exclude(self, index_m: np.ndarray, exclusions: list[Exclusion]) -> None:
        """Records empty results for these clients, with the reasons."""
        arrays = self.work.take(index_m).empty_result(self.setup.federation.shape.num_classes)
        self.skipped.append(ChunkResult(index_m, arrays, dict(enumerate(exclusions))))


def _late_reason(chunk: Work, client: int, seconds: float | None) -> str:
    """The reason to exclude a client that took too long, or all of a chain, in which the slow client is not known."""
    who = ""
    if not chunk.is_per_client:
        who = f"the test on its test set {client} "
    elif chunk.chained:
        who = f"its chain of {len(chunk.ids_M)} clients "
    return f"{who}did not finish within {seconds:g} s"
