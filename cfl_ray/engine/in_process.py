"""The backend that carries out every exchange in the calling process."""

from torch import Tensor

from cfl_ray.core.work import CombineColumns, Outcome, Work
from cfl_ray.data.federation import Federation
from cfl_ray.engine.chunks import chunks_of, outcome_of
from cfl_ray.engine.client_state import ClientStateStore, KeepsClientStates
from cfl_ray.engine.engines import chunk_size
from cfl_ray.engine.reduce import HostSums
from cfl_ray.engine.worker import Worker


class InProcessBackend(KeepsClientStates):
    """Backend of `simulate`: the same chunks and the same worker as on Ray, one chunk after another."""

    def __init__(self, worker: Worker, one_by_one: bool = False):
        self.worker, self.one_by_one = worker, one_by_one
        self.client_states = ClientStateStore()

    def run(self, work: Work) -> Outcome:
        self.client_states.begin(work)
        sums, results = HostSums(), []
        chunks = chunks_of(work, chunk_size(work.num_clients, self.worker.engine, self.one_by_one))
        inputs = ((part := work.take(chunk.index_m), chunk.index_m, self._stored(part)) for chunk in chunks)
        for result, kept in self.worker.run_all(inputs, lambda table, row: work.tables[table][row], sums):
            keys = work.keys_of(work.ids_M[result.index_m], result.index_m).tolist()
            states = {keys[i]: value for i, value in kept.states.items()}
            deferred = {keys[i]: value for i, value in kept.deferred.items()}
            self.client_states.keep(work, states, deferred)
            results.append(result)
        return outcome_of(work, results, sums.values())

    def _stored(self, work: Work) -> dict[int, Tensor]:
        values = {i: self.client_states.tensor(value) for i, value in self.client_states.of(work).items()}
        if isinstance(work, CombineColumns):
            (start,), (stop,) = work.ids_M, work.stop_M
            return {i: value[start:stop] for i, value in values.items()}
        return values

    def use(self, federation: Federation) -> None:
        self.worker.federation = federation
