"""What a client host does: it holds a network and does pieces of exchanges for any client."""

import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RaySystemError
from torch import Tensor

from cfl_ray.core.errors import UserError
from cfl_ray.core.work import Combine, Work
from cfl_ray.engine import choose
from cfl_ray.engine.reduce import HostSums
from cfl_ray.runtime.setup import Setup, device_of


class HostSide:
    """One compute thread. Sums of an exchange stay here until they are collected."""

    exchange: int | None = None
    failure: UserError | None = None  # why the present federation cannot be worked on

    def __init__(self, packed: list[ray.ObjectRef], engine: str):
        torch.set_num_threads(1)
        self.setup: Setup = fetched(packed[0])
        self.device = device_of(self.setup.experiment, has_gpu=bool(ray.get_gpu_ids()))
        self.worker = self.setup.worker(self.device, engine)
        self.sums = HostSums()
        self.rows: dict[tuple[int, int], Tensor] = {}

    def about(self) -> dict[str, Any]:
        """Where it runs and on what."""
        return {"node": ray.get_runtime_context().get_node_id(), "pid": os.getpid(), "device": self.device}

    def measure_engine(self) -> choose.Choice:
        return choose.measure(self.worker.network, self.setup.federation, self.setup.local, self.setup.experiment.seed)

    def use(self, packed: list[ray.ObjectRef]) -> None:
        """Works on the federation of this setup from now on; where it cannot be opened here, every piece says so."""
        try:
            self.setup = fetched(packed[0])
        except UserError as error:
            self.failure = error
            return
        self.failure, self.worker.federation = None, self.setup.federation

    def work(self, exchange: int, piece: Work, index_m: np.ndarray, refs: dict[tuple[int, int], ray.ObjectRef], owners: list[int], *owned: np.ndarray) -> Any:
        """Does a piece. Returns what it found, followed by what each of its clients owns now and by its pending result, where the work leaves any.

        refs:   the model rows this piece uses, fetched at most once per exchange.
        owners: positions in the piece of the clients whose memory, or pending result, follows in `owned`; as one list of references
                where there may be too many to be here together.
        """
        if self.failure:
            raise self.failure
        if exchange != self.exchange:
            self.exchange, self.sums, self.rows = exchange, HostSums(), {}
        memory = Fetched(*owned) if isinstance(piece, Combine) else {position: shared_tensor(value) for position, value in zip(owners, owned)}
        result, left = self.worker.run(piece, index_m, lambda table, row: self._row(refs, table, row), memory, self.sums)
        stays = [values for values, wanted in zip((left.owned, left.pending), piece.stays) if wanted]
        if not stays:
            return result
        return result, *(values[i].numpy() if i in values else None for values in stays for i in range(len(index_m)))

    def _row(self, refs: dict[tuple[int, int], ray.ObjectRef], table: int, row: int) -> Tensor:
        if (table, row) not in self.rows:
            self.rows[table, row] = shared_tensor(ray.get(refs[table, row]))
        return self.rows[table, row]

    def collect(self, exchange: int) -> tuple[dict[int, np.ndarray], dict[int, float]]:
        """Sums of everything done here for this exchange, which ends with that."""
        if exchange != self.exchange:
            return {}, {}
        sums, self.exchange, self.sums, self.rows = self.sums, None, HostSums(), {}
        return {out: row.numpy() for out, row in sums.rows.items()}, {out: float(mass) for out, mass in sums.mass.items()}


class Fetched(Sequence):
    """Tensors that are fetched one at a time, when they are looked at."""

    def __init__(self, refs: list[ray.ObjectRef]):
        self.refs = refs

    def __len__(self) -> int:
        return len(self.refs)

    def __getitem__(self, position: int) -> Tensor:
        return shared_tensor(ray.get(self.refs[position]))


def fetched(ref: ray.ObjectRef) -> Any:
    """What `ref` holds. Raises what went wrong while it was unpickled here, such as DataError where this node lacks the shards."""
    try:
        return ray.get(ref)
    except RaySystemError as error:
        raise error.client_exc if isinstance(error.client_exc, Exception) else error from None


def shared_tensor(array: np.ndarray) -> Tensor:
    """A tensor over memory that the node shares, without a copy. Read only by agreement: engines copy before they write."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)
