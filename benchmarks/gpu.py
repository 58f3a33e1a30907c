"""All figures of a GPU in one command: seconds, memory and accuracy of rounds, in every way to train the clients.

    python benchmarks/gpu.py                                  everything, on the GPU
    python benchmarks/gpu.py W2 femnist --precision float32 --rounds 5
    python benchmarks/gpu.py --quick --device cpu             a trial anywhere, with small workloads

Needs torch and NumPy alone. Workloads: W1, W2, W3, a round of the size of FEMNIST (3,597 clients, 180 a round), and
rounds of two published set-ups, whose sizes and models are here with random samples:

    flute   FEMNIST of FLUTE (arXiv:2203.13789): 10 of 3,400 clients a round; 1,500 rounds took 8:22, in FedML 5:49:52
    pfl     CIFAR-10 of pfl-research (arXiv:2404.06430): 50 of 1,000 clients of 50 samples a round, 1,500 rounds

Ways, all of them FedAvg on the same clients, data and model sizes:

    bare loop          torch.optim.SGD, one client after another in one process, everything on the device
    2 processes, ...   the same in several processes that share the device, each with its share of the clients: the
                       manner of pfl-research, without its framework
    sequential, ...    the engines of `cfl_ray`, with the worker and the sums of a client host. Chunks are those of a
                       run, vmap batches as large as the memory allows; and, for the engines that have them, some of
                       at most 16, 64, 256 clients and of all

What Ray adds is not measured. The samples stay on the device, as in a run from a client's second round on
(`--data host`: they are copied in every round). Prints a table, and all figures as JSON on the last line. `memory` is
the peak of the device's memory after the first round. `distance` is that of the model after the first round to the
one of `sequential` in float32, relative to the change in training.
"""

import argparse
import gc
import itertools
import json
import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of NumPy, which reads it when it is imported

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.peers.bare import load, module_of, train_client
from benchmarks.workloads import WORKLOADS, Workload
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.work import Address, Averaging, Rows, Train
from cfl_ray.data.federation import DataShape, Federation
from cfl_ray.engine.chunks import outcome_of
from cfl_ray.engine.engine import Engine
from cfl_ray.engine.engines import ENGINES, chunk_size
from cfl_ray.engine.reduce import HostSums
from cfl_ray.engine.task import TrainingTask
from cfl_ray.engine.worker import Worker
from cfl_ray.nn.device_memory import DeviceMemory
from cfl_ray.nn.network import Network
from cfl_ray.nn.precision import autocast, products_in


@dataclass(frozen=True)
class SetUp:
    """A workload as a federation, of which some clients take part in a round."""

    work: Workload
    cohort: int | None = None  # clients of a round; None: all
    sizes: tuple[int, int] | None = None  # fewest and most samples of a client; None: all have those of `work`


_SMALL = Workload("", "small_cnn", {"channels": 1, "side": 28, "dropout": True}, 62, 3_400, 197, 20, 1, 0.1)
SET_UPS = {name: SetUp(work) for name, work in WORKLOADS.items()} | {
    "femnist": SetUp(replace(WORKLOADS["W3"], clients=3_597), 180, (100, 300)),
    "flute": SetUp(_SMALL, 10, (100, 294)),
    "pfl": SetUp(
        Workload("", "small_cnn", {"channels": 3, "side": 32}, 10, 1_000, 50, 10, 1, 0.1, input=(3, 32, 32)), 50
    ),
}
VMAP_BATCHES = (16, 64, 256)  # clients of a vmap batch; and all
PROCESSES = (2, 4)  # that share the device
PRECISIONS = ("float32", "tf32", "bf16")


class OneDevice(Federation):
    """Random samples of a workload's clients.

    sizes_N: samples of each; None: those of the workload.
    share: (number, count): only the clients whose id modulo `count` is `number` have samples here.
    """

    view, group_N, recipe = "holdout", None, {}

    def __init__(
        self, work: Workload, device: str, sizes_N: np.ndarray | None = None, share: tuple[int, int] = (0, 1)
    ) -> None:
        draw = np.random.default_rng(0)
        self.shape = DataShape(work.input, work.classes)
        self.num_samples_N = np.full(work.clients, work.samples) if sizes_N is None else sizes_N
        self._samples: dict[int, tuple[Tensor, Tensor]] = {}
        for client, size in enumerate(self.num_samples_N.tolist()):
            x = torch.from_numpy(draw.integers(0, 256, (size, *work.input), dtype=np.uint8))
            y = torch.from_numpy(draw.integers(0, work.classes, size))
            if client % share[1] == share[0]:
                self._samples[client] = x.to(device).float().div_(255), y.to(device)

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
    precision: str
    way: str  # an engine, "bare loop" or "2 processes"
    most: int | None = None  # limit of a vmap batch; None: what fits, or one by one
    stack: int | None = None  # clients of the largest vmap batch; None: one by one
    seconds: float | None = None  # median round; None where there is none
    first: float | None = None  # the first round, with all compilation
    memory_mb: float | None = None  # peak of the device's memory; on a CPU of the process until now
    distance: float | None = None
    note: str = ""


class Case:
    """A workload on a device: its clients' data, and rounds of FedAvg."""

    def __init__(self, name: str, arguments: argparse.Namespace, share: tuple[int, int] = (0, 1)) -> None:
        self.name, self.device, self.arguments = name, arguments.device, arguments
        set_up = SET_UPS[name]
        work, sizes = set_up.work.with_clients(arguments.clients), set_up.sizes
        if arguments.quick:
            work = replace(work, samples=min(work.samples, 4 * (work.batch or 10)), epochs=min(work.epochs, 2))
            sizes = sizes and (10, 30)
        self.work = work
        sizes_N = sizes and np.random.default_rng(2).integers(sizes[0], sizes[1] + 1, work.clients)
        where = "cpu" if arguments.data == "host" else self.device
        self.federation = OneDevice(work, where, sizes_N, share)
        self.cohort = min(set_up.cohort or work.clients, work.clients)
        self.local = LocalSGD(epochs=work.epochs, batch_size=work.batch, lr=work.lr)
        self.networks = {p: Network(lambda: module_of(work), work.input, self.device, precision=p) for p in PRECISIONS}
        self.expected_P: Tensor | None = None  # the model of the sequential engine in float32 after the first round

    def clients_of(self, number: int) -> np.ndarray:
        """Ids of the clients of a round."""
        draw = np.random.default_rng((3, number))
        return np.sort(draw.choice(self.work.clients, self.cohort, replace=False))

    def start(self) -> Tensor:
        """The model (P,) before the first round."""
        return self.networks["float32"].new_model(0, 0)

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

    def refusal(self, engine: Engine, precision: str) -> str | None:
        """Reason why an engine does not train these clients; None if it does."""
        network, order = self.networks[precision], self.order(0, self.start())
        tasks = []
        for client, steps in zip(order.ids_M.tolist()[:8], order.steps_M.tolist()):
            x, y = self.federation.train(client)
            tasks.append(TrainingTask(client, self.start(), x, y, steps, self.local, order.address))
        return engine.why_not(network, tasks)

    def distance(self, way: str, precision: str, model_P: Tensor) -> float | None:
        """Distance of the model of the first round to the expected one; None for that one itself."""
        if (way, precision) == ("sequential", "float32"):
            self.expected_P = model_P
            return None
        if self.expected_P is None:
            return None
        return ((model_P - self.expected_P).norm() / (self.expected_P - self.start()).norm()).item()

    def rounds(self, engine: str, precision: str, most: int | None) -> Iterator[Tensor]:
        """The global models after each round of an engine. most: clients of a vmap batch, and of a chunk."""
        network, model_P = self.networks[precision], self.start()
        network.memory = DeviceMemory(network.device, most=most)
        worker = Worker(network, self.federation, engine)
        if self.arguments.data == "host":
            worker.samples.limit = 0
        size = most or chunk_size(self.cohort, engine)
        for number in itertools.count():
            order, sums = self.order(number, model_P), HostSums()
            models = (model_P,)  # the one table has one row
            parts = np.split(np.arange(len(order.ids_M)), np.arange(size, len(order.ids_M), size))
            cuts = [(order.take(index_m), index_m, {}) for index_m in parts]
            found = worker.run_all(cuts, lambda _, row, models=models: models[row], sums)
            outcome = outcome_of(order, [result for result, _ in found], sums.values())
            if outcome.excluded:
                raise RuntimeError(f"clients were excluded: {next(iter(outcome.excluded.values()))}")
            model_P = outcome.means[0]
            yield model_P

    def bare_rounds(self, precision: str) -> Iterator[Tensor]:
        """The same by the bare loop: one client after another."""
        bare, start = Bare(self, precision), bare_start(self.work)
        for number in itertools.count():
            ids_M = self.clients_of(number)
            total = bare.sum_of(ids_M.tolist(), start)
            start = [tensor / int(self.federation.num_samples_N[ids_M].sum()) for tensor in total]
            yield torch.cat([tensor.reshape(-1) for tensor in start])


def bare_start(work: Workload) -> list[Tensor]:
    """The parameters before the first round of the bare loop."""
    return [p.detach() for p in module_of(work).parameters()]


class Bare:
    """The bare loop on one device: one client after another, with everything there."""

    def __init__(self, case: Case, precision: str) -> None:
        self.case, self.precision = case, precision
        self.module = module_of(case.work).to(case.device)
        self.params = list(self.module.parameters())

    def sum_of(self, clients: Sequence[int], start: Sequence[Tensor]) -> list[Tensor]:
        """Sums of n_i W_i over some clients that train from `start`."""
        total = [torch.zeros_like(p) for p in self.params]
        for client in clients:
            x, y = (samples.to(self.case.device) for samples in self.case.federation.train(client))
            load(self.params, start)
            with autocast(self.precision, torch.device(self.case.device)):
                train_client(self.module, self.params, x, y, self.case.work)
            with torch.no_grad():
                torch._foreach_add_(total, self.params, alpha=len(y))
        return [tensor.detach() for tensor in total]


# ---- several processes on the device


def _share_of(
    pipe: Connection, name: str, arguments: argparse.Namespace, precision: str, share: tuple[int, int]
) -> None:
    """A process with its share of the clients: receives a round's number and model, sends sums and peak memory."""
    torch.set_num_threads(arguments.threads)
    try:
        with products_in(precision):
            case = Case(name, arguments, share)
            bare = Bare(case, precision)
            while (order := pipe.recv()) is not None:
                number, start = order
                ids = [client for client in case.clients_of(number).tolist() if client % share[1] == share[0]]
                total = bare.sum_of(ids, [torch.from_numpy(array).to(case.device) for array in start])
                pipe.send(([tensor.cpu().numpy() for tensor in total], _peak(case.device)))
    except Exception as error:  # the parent shows it in the row
        pipe.send(_note(error))


class Processes:
    """The bare loop in several processes that share the device and the clients."""

    def __init__(self, case: Case, precision: str, count: int) -> None:
        self.case, context, self.pipes, self.processes = case, multiprocessing.get_context("spawn"), [], []
        self.memory = 0.0
        for number in range(count):
            pipe, theirs = context.Pipe()
            arguments = (theirs, case.name, case.arguments, precision, (number, count))
            process = context.Process(target=_share_of, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(pipe)
            self.processes.append(process)

    def rounds(self) -> Iterator[Tensor]:
        start = [tensor.numpy() for tensor in bare_start(self.case.work)]
        try:
            for number in itertools.count():
                for pipe in self.pipes:
                    pipe.send((number, start))
                answers = [pipe.recv() for pipe in self.pipes]
                if failed := [answer for answer in answers if isinstance(answer, str)]:
                    raise RuntimeError(failed[0])
                self.memory = sum(peak for _, peak in answers)
                samples = self.case.federation.num_samples_N[self.case.clients_of(number)].sum()
                start = [sum(parts) / samples for parts in zip(*(total for total, _ in answers))]
                start = [array.astype(np.float32) for array in start]
                yield torch.cat([torch.from_numpy(array).reshape(-1) for array in start])
        finally:
            for process in self.processes:
                process.kill()
                process.join()


def _peak(device: str) -> float:
    """Peak memory in bytes: of the device in this process, or of the process."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else _process_peak()


def _process_peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(case: Case, figure: Figure, rounds: Callable[[], Iterator[Tensor]], count: int) -> Figure:
    """The row with the figures of some rounds after a first one; with a note where they fail."""
    going: Iterator[Tensor] | None = None
    try:
        going, seconds = rounds(), []
        for number in range(1 + count):
            began = time.perf_counter()
            model_P = next(going)
            if case.device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
            if number == 0:
                if figure.way in ENGINES:
                    figure = replace(figure, distance=case.distance(figure.way, figure.precision, model_P))
                if case.device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
        median = statistics.median(seconds[1:])
        return replace(figure, seconds=median, first=seconds[0], memory_mb=_peak(case.device) / 1e6)
    except Exception as error:  # also what the device or the precision does not support; the other rows go on
        return replace(figure, note=_note(error))
    finally:
        del going
        gc.collect()
        if case.device == "cuda":
            torch.cuda.empty_cache()


def _note(error: BaseException) -> str:
    """One line about a failure, which the worker may have wrapped to name the client."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "out of memory" in str(error):
        return "out of memory"
    if error.__cause__:
        return _note(error.__cause__)
    return f"{type(error).__name__}: {error}".splitlines()[0][:120]


def figures_of(case: Case, precision: str) -> Iterator[Figure]:
    """The rows of one workload in one precision."""
    arguments, row = case.arguments, Figure(case.name, precision, "bare loop")
    if arguments.engines is None:
        yield measure(case, row, lambda: case.bare_rounds(precision), arguments.rounds)
        for count in arguments.processes:
            yield _of_processes(case, replace(row, way=f"{count} processes"), count)
    for name, engine in ENGINES.items():
        if name not in (arguments.engines or ENGINES):
            continue
        row = Figure(case.name, precision, name)
        if reason := case.refusal(engine, precision):
            yield replace(row, note=reason)
            continue
        sizes: list[int | None] = [None]
        if engine.together:
            sizes += sorted({size for size in arguments.vmap_batches if size < case.cohort} | {case.cohort})
        for most in sizes:
            figure = measure(
                case,
                replace(row, most=most),
                lambda: case.rounds(name, precision, most),  # noqa: B023
                arguments.rounds,
            )
            yield replace(figure, stack=case.networks[precision].memory.largest or None)


def _of_processes(case: Case, row: Figure, count: int) -> Figure:
    """The row of several processes; its memory is that of all of them."""
    processes = Processes(case, row.precision, count)
    figure = measure(case, row, processes.rounds, case.arguments.rounds)
    return replace(figure, memory_mb=processes.memory / 1e6) if figure.seconds else figure


def facts(arguments: argparse.Namespace) -> dict:
    """The device, versions and options, for the JSON line."""
    found = {"device": arguments.device, "torch": torch.__version__, "numpy": np.__version__}
    if arguments.device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        memory_mb = round(properties.total_memory / 1e6)
        found |= {"device": properties.name, "memory_mb": memory_mb, "cuda": torch.version.cuda}
    return found | {"data": arguments.data, "threads": arguments.threads, "quick": arguments.quick}


class _OldName(argparse.Action):
    """An option under its name before, which is taken with a warning."""

    def __call__(self, parser, namespace, values, option=None):
        print(f"warning: {option} is now --{self.dest.replace('_', '-')}", file=sys.stderr)
        setattr(namespace, self.dest, values)


def arguments_of(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(SET_UPS)
    parser.add_argument("workloads", nargs="*", default=names, help=f"some of {', '.join(names)}")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="at most 4 clients of few samples, one measured round")
    parser.add_argument("--clients", type=int, help="at most this number of clients, for a trial")
    parser.add_argument("--rounds", type=int, help="measured rounds after a first one (default: 3, quick: 1)")
    batches = "most clients of a vmap batch, beside what fits and all"
    parser.add_argument("--vmap-batches", type=int, nargs="*", help=batches)
    parser.add_argument("--stacks", type=int, nargs="*", dest="vmap_batches", action=_OldName, help=argparse.SUPPRESS)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, help="only these, without bare loops (default: all)")
    parser.add_argument("--processes", type=int, nargs="*", help="numbers of processes that share the device")
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=PRECISIONS,
        help="precisions of local training (default: all on a GPU, float32 on a CPU)",
    )
    parser.add_argument("--data", choices=["device", "host"], default="device", help="where the samples are kept")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch (default: 1, as on a client host)")
    arguments = parser.parse_args(given)
    if unknown := set(arguments.workloads) - set(names):
        parser.error(f"unknown workload {', '.join(sorted(unknown))}; valid: {', '.join(names)}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("PyTorch finds no CUDA device; use --device cpu")
    quick = arguments.quick
    defaults = {
        "clients": 4 if quick else None,
        "rounds": 1 if quick else 3,
        "vmap_batches": (2,) if quick else VMAP_BATCHES,
        "processes": (2,) if quick else PROCESSES,
        "precision": PRECISIONS if arguments.device == "cuda" else PRECISIONS[:1],
    }
    for key, value in defaults.items():
        setattr(arguments, key, value if getattr(arguments, key) is None else getattr(arguments, key))
    return arguments


def main() -> None:
    arguments = arguments_of()
    torch.set_num_threads(arguments.threads)
    described, figures = facts(arguments), []
    print(", ".join(f"{name} {value}" for name, value in described.items()))
    print("workload  precision  way           most  stack  s / round  of bare    first   peak MB  distance")
    for name in arguments.workloads:
        case = Case(name, arguments)
        for precision in arguments.precision:
            bare = None
            with products_in(precision):
                for figure in figures_of(case, precision):
                    bare = figure.seconds if figure.way == "bare loop" else bare
                    figures.append(figure)
                    print(_row(figure, bare), flush=True)
        del case
    print(json.dumps(described | {"figures": [asdict(figure) for figure in figures]}))


def _row(figure: Figure, bare: float | None) -> str:
    start = (
        f"{figure.workload:8}  {figure.precision:9}  {figure.way:12}  {figure.most or '':>4}  {figure.stack or '':>5}"
    )
    if figure.seconds is None:
        return f"{start}  {figure.note}"
    ratio = f"{figure.seconds / bare:7.2f}" if bare else " " * 7
    distance = "" if figure.distance is None else f"{figure.distance:.0e}"
    return f"{start}  {figure.seconds:9.4f}  {ratio}  {figure.first:7.2f}  {figure.memory_mb:8.0f}  {distance}".rstrip()


if __name__ == "__main__":
    main()
