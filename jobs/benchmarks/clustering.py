"""Seconds and peak memory of clustering thousands of clients on the server: `python -m jobs.benchmarks clustering`.

Each method receives the signatures of all its clients at once, from a backend without training; the time is that of the
round in which it clusters them, in one process of one thread per method. The memory is the peak of the process,
including all libraries.
"""

import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import normalize

from cfl_ray.core.clients import Clients
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.method import Method, Start
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.work import Describe, Outcome, Work
from cfl_ray.methods.fedclust import FedClust
from cfl_ray.methods.pacfl import PACFL
from cfl_ray.methods.stocfl import StoCFL
from cfl_ray.models import recipe
from cfl_ray.system.threads import one_thread

INPUT = (1, 28, 28)


@dataclass(frozen=True)
class Clustering:
    """A method that clusters all its clients in one round, and the signatures that they send."""

    signatures: str
    method: Method
    clients: int
    vectors: int  # unit vectors per client
    length: int  # floats of a vector
    model: str
    options: dict
    input: tuple[int, ...]


CLUSTERINGS = {
    "fedclust": Clustering("heads of LeNet-5", FedClust(), 3_600, 1, 850, "lenet5", {}, (3, 32, 32)),
    "pacfl": Clustering("bases of 6 vectors", PACFL(), 3_600, 6, 784, "lenet5", {}, INPUT),
    "stocfl": Clustering(
        "sketches of gradients of MLP 784-2048-10", StoCFL(), 4_800, 1, 8_192, "mlp", {"hidden": 2048}, INPUT
    ),
}
GROUPS = 12  # groups of clients that the signatures form


@dataclass
class SignatureBackend:
    """Backend without training: every client returns its row of `signature_NF`."""

    signature_NF: np.ndarray

    def run(self, work: Work) -> Outcome:
        size = len(work.ids_M)
        arrays = {"valid": np.ones(size, bool), "train_loss": np.zeros(size)}
        if isinstance(work, Describe):
            arrays |= {"features": self.signature_NF[work.ids_M], "floats": np.full(size, self.signature_NF.shape[1])}
        elif work.features is not None:
            arrays |= {"features": self.signature_NF[work.ids_M], "norm": np.ones(size)}
        return Outcome(arrays, {}, None if work.averaging is None else np.zeros(work.averaging.num_rows))


def signatures(case: Clustering, clients: int) -> np.ndarray:
    """Random signatures (clients, vectors * length) around the centre of each client's group."""
    draw = torch.Generator().manual_seed(0)
    centre_GVL = normalize(torch.randn(GROUPS, case.vectors, case.length, generator=draw), dim=2)
    near_NVL = torch.randn(clients, case.vectors, case.length, generator=draw).mul_(0.5 / case.length**0.5)
    for client in range(clients):
        near_NVL[client] += centre_GVL[client % GROUPS]
    return normalize(near_NVL, dim=2).flatten(1).numpy()


def cluster(name: str, clients: int) -> tuple[float, float, int]:
    """Seconds of the round that clusters so many clients, peak memory of this process in GB, and number of clusters."""
    case = CLUSTERINGS[name]
    spec = ParamSpec.of(recipe(case.model, case.options, case.input, 10)())
    ids, num_samples_N = np.arange(clients), np.full(clients, 50)
    cohort = Clients(ids, num_samples_N, spec, LocalSGD(), SignatureBackend(signatures(case, clients)), 0, 1)
    state = case.method.init(Start(clients, spec, lambda index: torch.zeros(spec.size), case.input))
    with one_thread():
        began = time.perf_counter()
        state = case.method.round(state, cohort, Draws(0, 1))
        seconds = time.perf_counter() - began
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, state.num_clusters


def clustering() -> None:
    """Prints seconds, peak memory and clusters by method."""
    print(f"one thread, torch {torch.__version__}; the round in which the server clusters all clients")
    for name, case in CLUSTERINGS.items():
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            seconds, peak, clusters = process.submit(cluster, name, case.clients).result()
        floats = f"{case.vectors} x {case.length}" if case.vectors > 1 else f"{case.length:,}"
        print(
            f"{name}: {case.clients:,} clients, {case.signatures} ({floats} floats): "
            f"{seconds:.1f} s, peak {peak:.2f} GB, {clusters} clusters",
            flush=True,
        )
