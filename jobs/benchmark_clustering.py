"""Seconds and peak memory of the server's clustering of thousands of clients (about a minute).

    python jobs/benchmark_clustering.py

A method gets the signatures of all its clients at once, from a backend that trains nothing; timed is the round in which it clusters
them: one process per method, one thread. The memory is all that the process ever held, libraries included.
"""

import multiprocessing
import resource
import time
from dataclasses import dataclass

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch.nn.functional import normalize

from cfl_ray.core.clients import Clients
from cfl_ray.core.local import LocalSGD
from cfl_ray.core.method import Method, Start
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.core.work import Describe, Outcome, Work
from cfl_ray.methods.fedclust import FedClust
from cfl_ray.methods.pacfl import PACFL
from cfl_ray.methods.stocfl import StoCFL
from cfl_ray.models import recipe

INPUT = (1, 28, 28)


@dataclass(frozen=True)
class Gathering:
    """A method that clusters all its clients in one round, and what each of them sends."""

    about: str
    method: Method
    clients: int
    vectors: int  # unit vectors per client, of `length` floats each
    length: int
    model: str
    options: dict
    input: tuple[int, ...]


GATHERINGS = {
    "fedclust": Gathering("heads of LeNet-5", FedClust(), 3_600, 1, 850, "lenet5", {}, (3, 32, 32)),
    "pacfl": Gathering("bases of 6 vectors", PACFL(), 3_600, 6, 784, "lenet5", {}, INPUT),
    "stocfl": Gathering("sketches of gradients of MLP 784-2048-10", StoCFL(), 4_800, 1, 8_192, "mlp", {"hidden": 2048}, INPUT),
}
GROUPS = 12


@dataclass
class Answers:
    """Backend of clients that train nothing: their signatures lie around those of their group."""

    signature_NF: np.ndarray

    def run(self, work: Work) -> Outcome:
        size = len(work.ids_M)
        arrays = {"ok": np.ones(size, bool), "train_loss": np.zeros(size)}
        if isinstance(work, Describe):
            arrays |= {"features": self.signature_NF[work.ids_M], "floats": np.full(size, self.signature_NF.shape[1])}
        elif work.keep is not None:
            arrays |= {"kept": self.signature_NF[work.ids_M], "norm": np.ones(size)}
        return Outcome(arrays, {}, None if getattr(work, "mix", None) is None else np.zeros(work.mix.num_rows))


def signatures(what: Gathering, clients: int) -> np.ndarray:
    draw = torch.Generator().manual_seed(0)
    centre_GVL = normalize(torch.randn(GROUPS, what.vectors, what.length, generator=draw), dim=2)
    near_NVL = torch.randn(clients, what.vectors, what.length, generator=draw).mul_(0.5 / what.length**0.5)
    for client in range(clients):
        near_NVL[client] += centre_GVL[client % GROUPS]
    return normalize(near_NVL, dim=2).flatten(1).numpy()


def gather(name: str, clients: int) -> tuple[float, float, int]:
    """Seconds of the round in which so many clients are clustered, peak memory of this process in GB, and clusters found."""
    what = GATHERINGS[name]
    spec = ParamSpec.of(recipe(what.model, what.options, what.input, 10)())
    ids, size_N = np.arange(clients), np.full(clients, 50)
    everybody = Clients(ids, size_N, spec, LocalSGD(), Answers(signatures(what, clients)), 0, 1)
    state = what.method.init(Start(clients, spec, lambda index: torch.zeros(spec.size), what.input))
    torch.set_num_threads(1)
    with threadpool_limits(limits=1):
        began = time.perf_counter()
        state = what.method.round(state, everybody, Draws(0, 1))
        seconds = time.perf_counter() - began
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, state.num_clusters


def _gather_apart(pipe, name: str, clients: int) -> None:
    pipe.send(gather(name, clients))


def main() -> None:
    print(f"one thread, torch {torch.__version__}; the round in which the server clusters all clients")
    context = multiprocessing.get_context("spawn")
    for name, what in GATHERINGS.items():
        mine, theirs = context.Pipe()
        process = context.Process(target=_gather_apart, args=(theirs, name, what.clients))
        process.start()
        theirs.close()
        seconds, peak, found = mine.recv()
        process.join()
        floats = f"{what.vectors} x {what.length}" if what.vectors > 1 else f"{what.length:,}"
        print(f"{name}: {what.clients:,} clients, {what.about} ({floats} floats): {seconds:.1f} s, peak {peak:.2f} GB, {found} clusters", flush=True)


if __name__ == "__main__":
    main()
