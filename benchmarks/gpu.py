"""Seconds per round of every engine, and of the bare PyTorch loop, on one device. Needs torch and NumPy alone.

    python benchmarks/gpu.py                                  W1, W2, W3 and a FEMNIST-sized round on the GPU
    python benchmarks/gpu.py W2 femnist --tf32 --rounds 5
    python benchmarks/gpu.py W1 --device cpu --clients 4      a trial anywhere

One process trains all clients of a round, in pieces of 16, 64, 256 and all clients, with the worker and the sums of a
client host; what Ray adds is not measured. The samples stay on the device (`--data host`: they are copied in every
round, as in a run). Prints a table, and all figures as JSON on the last line. `distance` is that of the model after the
first round to the sequential engine's, relative to the change in training.
"""

import argparse
import contextlib
import gc
import importlib
import itertools
import json
import pkgutil
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

import cfl_ray.engine
from benchmarks.peers.bare import load, module_of, train_client
from benchmarks.workloads import INPUT, WORKLOADS, Workload
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import Address, Averaging, Rows, Train
from cfl_ray.data.federation import DataShape, Federation
from cfl_ray.engine.network import Network
from cfl_ray.engine.pieces import outcome_of
from cfl_ray.engine.reduce import HostSums
from cfl_ray.engine.task import TrainingTask
from cfl_ray.engine.worker import Worker

FEMNIST = replace(
    WORKLOADS["W3"],
    description="CNN 32-64-512, 62 classes, 180 of 3,597 clients of 100 to 300, batch 20, 1 epoch",
    clients=3_597,
)
COHORT = 180  # clients of a round of femnist
PIECES = (16, 64, 256)  # clients of a piece; and all


def engines() -> dict[str, ModuleType]:
    """The engines by their name in `runtime.engine`: the modules of `cfl_ray.engine` with a function `train`.

    The sequential engine, with which the others are compared, comes first.
    """
    names = [found.name for found in pkgutil.iter_modules(cfl_ray.engine.__path__)]
    modules = {name: importlib.import_module(f"cfl_ray.engine.{name}") for name in names}
    found = [name for name, module in modules.items() if hasattr(module, "train")]
    return {name: modules[name] for name in sorted(found, key=lambda name: (name != "sequential", name))}


class OneDevice(Federation):
    """Random samples of a workload's clients. sizes_N: samples of each; None: those of the workload."""

    view, group_N, recipe = "holdout", None, {}

    def __init__(self, work: Workload, device: str, sizes_N: np.ndarray | None = None) -> None:
        draw = np.random.default_rng(0)
        self.shape = DataShape(INPUT, work.classes)
        self.num_samples_N = np.full(work.clients, work.samples) if sizes_N is None else sizes_N
        self._samples = []
        for size in self.num_samples_N.tolist():
            x = torch.from_numpy(draw.integers(0, 256, (size, *INPUT), dtype=np.uint8)).to(device).float().div_(255)
            self._samples.append((x, torch.from_numpy(draw.integers(0, work.classes, size)).to(device)))

    def train(self, client: int) -> tuple[Tensor, Tensor]:
        return self._samples[client]

    def num_test_sets(self) -> int:
        return 0

    def test_set(self, index: int) -> tuple[Tensor, Tensor]:
        raise IndexError(index)

    def test_set_of(self, clients: np.ndarray) -> np.ndarray:
        return np.full(len(clients), -1, np.int32)

    def labels_of(self, clients: np.ndarray) -> None:
        return None

    def holdout(self, client: int) -> tuple[Tensor, Tensor]:
        return self._samples[client]


@dataclass(frozen=True)
class Figure:
    """One row of the table."""

    workload: str
    engine: str  # or "bare loop"
    piece: int | None  # clients of a piece; None: the bare loop has none
    seconds: float | None = None  # median round; None where there is none
    first: float | None = None  # the first round, with all compilation
    memory_mb: float | None = None  # peak of the device's memory; on a CPU of the process until now
    # distance of the model after the first round to that of the sequential engine, relative to the change in training
    distance: float | None = None
    note: str = ""


class Case:
    """A workload on a device: its clients' data, and rounds of FedAvg."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name, self.device = name, arguments.device
        self.work = (FEMNIST if name == "femnist" else WORKLOADS[name]).with_clients(arguments.clients)
        sizes_N = np.random.default_rng(2).integers(100, 301, self.work.clients) if name == "femnist" else None
        self.federation = OneDevice(self.work, "cpu" if arguments.data == "host" else self.device, sizes_N)
        self.cohort = min(COHORT, self.work.clients) if name == "femnist" else self.work.clients
        self.local = LocalSGD(epochs=self.work.epochs, batch_size=self.work.batch, lr=self.work.lr)
        self.network = Network(lambda: module_of(self.work), INPUT, self.device)
        self.expected_P: Tensor | None = None  # the model of the sequential engine after the first round

    def clients_of(self, number: int) -> np.ndarray:
        """Ids of the clients of a round."""
        draw = np.random.default_rng((3, number))
        return np.sort(draw.choice(self.work.clients, self.cohort, replace=False))

    def order(self, number: int, model_P: Tensor) -> Train:
        """The work of one round."""
        ids_M = self.clients_of(number)
        num_samples_M = self.federation.num_samples_N[ids_M]
        return Train(
            Address(0, number, 0),
            ids_M,
            (model_P[None],),
            averaging=Averaging.of(num_samples_M[None] / num_samples_M.sum(), len(ids_M)),
            start=Rows(0, np.zeros(len(ids_M), np.int64)),
            steps_M=self.local.steps_of(num_samples_M),
            local=self.local,
        )

    def refusal(self, module: ModuleType) -> str | None:
        """Reason why an engine does not train these clients; None where it does."""
        order, model_P = self.order(0, self.network.new_model(0, 0)), self.network.new_model(0, 0)
        tasks = []
        for client, steps in zip(order.ids_M.tolist()[:8], order.steps_M.tolist()):
            x, y = self.federation.train(client)
            tasks.append(TrainingTask(client, model_P, x, y, steps, self.local, order.address))
        if hasattr(module, "applies") and not all(module.applies(self.network, task) for task in tasks):
            return "does not apply"
        return module.refusal(self.network, tasks) if hasattr(module, "refusal") else None

    def distance(self, engine: str, model_P: Tensor) -> float | None:
        """Distance of the model of the first round to that of the sequential engine; None for that one itself."""
        if engine == "sequential":
            self.expected_P = model_P
        if self.expected_P is None or engine == "sequential":
            return None
        start_P = self.network.new_model(0, 0)
        return ((model_P - self.expected_P).norm() / (self.expected_P - start_P).norm()).item()

    def rounds(self, engine: str, piece: int) -> Iterator[Tensor]:
        """The global models after each round of an engine, trained in pieces."""
        worker, model_P = Worker(self.network, self.federation, engine), self.network.new_model(0, 0)
        for number in itertools.count():
            order, sums, results = self.order(number, model_P), HostSums(), []
            models = (model_P,)  # the one table has one row
            for at in range(0, len(order.ids_M), piece):
                index_m = np.arange(at, min(at + piece, len(order.ids_M)))
                result, _ = worker.run(
                    order.take(index_m), index_m, lambda _, row, models=models: models[row], {}, sums
                )
                results.append(result)
            outcome = outcome_of(order, results, sums.values())
            if outcome.excluded:
                raise RuntimeError(f"clients were excluded: {next(iter(outcome.excluded.values()))}")
            model_P = outcome.means[0]
            yield model_P

    def bare_rounds(self) -> Iterator[Tensor]:
        """The same by the bare loop: one client after another, with everything on the device."""
        module = module_of(self.work).to(self.device)
        params = list(module.parameters())
        start = [p.detach().clone() for p in params]
        for number in itertools.count():
            ids_M = self.clients_of(number)
            total = [torch.zeros_like(p) for p in params]
            for client in ids_M.tolist():
                x, y = (samples.to(self.device) for samples in self.federation.train(client))
                load(params, start)
                train_client(module, params, x, y, self.work)
                with torch.no_grad():
                    torch._foreach_add_(total, params, alpha=len(y))
            start = [tensor / self.federation.num_samples_N[ids_M].sum() for tensor in total]
            yield torch.cat([tensor.reshape(-1) for tensor in start])


def measure(case: Case, engine: str, piece: int | None, rounds: Callable[[], Iterator[Tensor]], count: int) -> Figure:
    """The figures of some rounds after a first one; of a failure, a note."""
    cuda, distance = case.device == "cuda", None
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    try:
        going, seconds = rounds(), []
        for number in range(1 + count):
            began = time.perf_counter()
            model_P = next(going)
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
            if number == 0 and piece is not None:
                distance = case.distance(engine, model_P)
    except Exception as error:  # also what the device or the precision does not support; the other rows go on
        note = _note(error)
    else:
        peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Figure(case.name, engine, piece, statistics.median(seconds[1:]), seconds[0], peak / 1e6, distance)
    finally:
        del going
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    return Figure(case.name, engine, piece, note=note)


def _note(error: BaseException) -> str:
    """One line about a failure, which the worker may have wrapped to name the client."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(error):
        return "out of memory"
    if error.__cause__:
        return _note(error.__cause__)
    return f"{type(error).__name__}: {error}".splitlines()[0][:120]


def figures_of(case: Case, arguments: argparse.Namespace) -> Iterator[Figure]:
    """The rows of one workload: the bare loop, then every engine in pieces of every size."""
    yield measure(case, "bare loop", None, case.bare_rounds, arguments.rounds)
    for engine, module in engines().items():
        if reason := case.refusal(module):
            yield Figure(case.name, engine, None, note=reason)
            continue
        sizes = sorted({size for size in arguments.pieces if size < case.cohort} | {case.cohort})
        for size in sizes[-1:] if engine == "sequential" else sizes:  # it trains one by one whatever the piece
            yield measure(case, engine, size, lambda: case.rounds(engine, size), arguments.rounds)  # noqa: B023


def facts(arguments: argparse.Namespace) -> dict:
    """The device, versions and options, for the JSON line."""
    found = {"device": arguments.device, "torch": torch.__version__, "numpy": np.__version__}
    if arguments.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        memory_mb = round(properties.total_memory / 1e6)
        found |= {"device": properties.name, "memory_mb": memory_mb, "cuda": torch.version.cuda}
    options = {"tf32": arguments.tf32, "bf16": arguments.bf16, "data": arguments.data, "threads": arguments.threads}
    return found | options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*WORKLOADS, "femnist"]
    parser.add_argument("workloads", nargs="*", default=names, help=f"some of {', '.join(names)}")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--clients", type=int, help="at most this number of clients, for a trial")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds after a first one (default: 3)")
    parser.add_argument("--pieces", type=int, nargs="+", default=PIECES, help="clients of a piece, beside all of them")
    parser.add_argument("--data", choices=["device", "host"], default="device", help="where the samples are kept")
    parser.add_argument("--tf32", action="store_true", help="matrix products and convolutions in TF32")
    parser.add_argument("--bf16", action="store_true", help="forward passes in bfloat16 (autocast)")
    parser.add_argument("--threads", type=int, default=1, help="threads of the CPU (default: 1, as on a client host)")
    arguments = parser.parse_args()
    if unknown := set(arguments.workloads) - set(names):
        parser.error(f"unknown workload {', '.join(sorted(unknown))}; valid: {', '.join(names)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device; use --device cpu")
    torch.set_num_threads(arguments.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = arguments.tf32
    precision = torch.autocast(arguments.device, torch.bfloat16) if arguments.bf16 else contextlib.nullcontext()
    described, figures = facts(arguments), []
    print(", ".join(f"{name} {value}" for name, value in described.items()))
    print("workload  engine        piece  s / round  of bare    first   peak MB  distance")
    for name in arguments.workloads:
        case, bare = Case(name, arguments), None
        with precision:
            for figure in figures_of(case, arguments):
                bare = figure.seconds if figure.engine == "bare loop" else bare
                figures.append(figure)
                print(_row(figure, bare), flush=True)
        del case
    print(json.dumps(described | {"figures": [asdict(figure) for figure in figures]}))


def _row(figure: Figure, bare: float | None) -> str:
    start = f"{figure.workload:8}  {figure.engine:12}  {figure.piece or '':>5}"
    if figure.seconds is None:
        return f"{start}  {figure.note}"
    ratio = f"{figure.seconds / bare:7.2f}" if bare else " " * 7
    distance = "" if figure.distance is None else f"{figure.distance:.0e}"
    return f"{start}  {figure.seconds:9.4f}  {ratio}  {figure.first:7.2f}  {figure.memory_mb:8.0f}  {distance}".rstrip()


if __name__ == "__main__":
    main()
