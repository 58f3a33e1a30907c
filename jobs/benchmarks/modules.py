"""CPU seconds of FedAvg rounds with own modules, by engine and beside other systems.

    python -m jobs.benchmarks modules --rounds 5
    python -m jobs.benchmarks modules --rounds 5 --venvs DIR --output docs/performance.md

All have one thread and take turns, each in a process of its own: cfl_ray's keeps freed memory, as hosts do, the plain
loop's has PyTorch's and the C library's settings. The others have no server, no validation and no records.

With `--venvs`, `PEERS` train the networks of `WITH_PEERS`: first a few clients in a fixed order, whose model is
compared with that of the plain loop. JAX and pfl-research have virtual environments in DIR, as those of
benchmarks/compare.py.
"""

import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
import torch

from benchmarks import compare
from benchmarks.compare import CannotRun
from benchmarks.peers.bare import module_of
from benchmarks.workloads import OWN_MODULES, Workload, samples_by_client
from cfl_ray.errors import ConfigError
from cfl_ray.system.allocator import keep_freed_memory
from jobs.benchmarks.in_process import chosen_engine, cpu_seconds, our_round

ENGINES = ("manual", "sequential", "compiled")
WITH_PEERS = (
    "MLP 784-200-10",
    "Transformer",
    "Transformer with dropout",
    "ViT, 3x32x32",
    "GPT-like, 64 tokens of 80",
)
BEGIN = "<!-- begin: written by python -m jobs.benchmarks modules -->"
BEGIN_EXPECTED = "<!-- begin: what to expect, written by python -m jobs.benchmarks modules -->"
TIMEOUT = 1200  # seconds for a round of another system, its compiler included


@dataclass(frozen=True)
class Peer:
    """A script of `benchmarks.peers` that takes turns, and its virtual environment; None: that of cfl_ray."""

    title: str
    script: str
    system: str
    environment: str | None = None


PLAIN = Peer("plain loop", "torch_loops", "plain")
PEERS = (
    Peer("`torch.compile` of the module", "torch_loops", "compiled_module"),
    Peer("of the whole step", "torch_loops", "compiled_step"),
    Peer("pfl-research", "pfl_modules", "pfl_research", "pfl_research"),
    Peer("JAX by hand", "jax_modules", "plain_jax", "plain_jax"),
)


@dataclass
class Case:
    """The figures of one network, by system."""

    work: Workload
    chosen: str = ""  # the engine of `runtime.engine: auto`
    seconds: dict[str, list[float]] = field(default_factory=dict)  # of each round, by engine and title
    reasons: dict[str, str] = field(default_factory=dict)  # why there are none
    far: dict[str, float] = field(default_factory=dict)  # distance to the plain loop, by title
    versions: dict[str, dict[str, str]] = field(default_factory=dict)  # by title

    def ratios(self, title: str) -> tuple[float, float]:
        """Of the least seconds to the plain loop's, and the median of the ratios of rounds in turn."""
        plain, other = self.seconds[PLAIN.title], self.seconds[title]
        pairs = [b / a for a, b in zip(plain, other, strict=True)]
        return min(other) / min(plain), statistics.median(pairs)


def modules(rounds: int, venvs: Path | None = None, output: Path | None = None) -> None:
    """Prints CPU seconds of rounds and their ratio to the plain loop's; with a page, writes its tables after each."""
    keep_freed_memory()
    interpreters: dict[str, Path | CannotRun] = {}
    for peer in PEERS if venvs else ():
        try:
            name = peer.environment
            interpreters[peer.title] = compare.environment_of(compare.PEERS[name], venvs) if name else _present()
        except CannotRun as reason:
            interpreters[peer.title] = reason
    cases = list[Case]()
    for work in OWN_MODULES.values():
        cases.append(measured(work, rounds, interpreters if work.description in WITH_PEERS else {}))
        print("\n".join(_lines(cases[-1])), flush=True)
        if output:
            page = compare.with_section(output.read_text(), section(cases, rounds), BEGIN)
            output.write_text(compare.with_section(page, expected(cases), BEGIN_EXPECTED))


def _present() -> Path:
    return Path(sys.executable)


def measured(work: Workload, rounds: int, interpreters: dict[str, Path | CannotRun]) -> Case:
    """The figures of one network. interpreters: those of the peers beside it, or the reason why there is none."""
    case, steps = Case(work, chosen_engine(work)), dict[str, Callable[[], float]]()
    with ExitStack() as stack:
        steps[PLAIN.title] = stack.enter_context(peer_round(PLAIN, _present(), case))
        for engine in ENGINES:
            try:
                steps[engine] = partial(cpu_seconds, stack.enter_context(our_round(work, "fedavg", engine)))
            except ConfigError as error:
                case.reasons[engine] = str(error)
        for peer in PEERS:
            found = interpreters.get(peer.title)
            try:
                if isinstance(found, CannotRun):
                    raise found
                if found:
                    steps[peer.title] = stack.enter_context(peer_round(peer, found, case))
            except CannotRun as reason:
                case.reasons[peer.title] = str(reason)
        for _ in range(rounds + 1):
            for title, step in list(steps.items()):
                try:
                    case.seconds.setdefault(title, []).append(step())
                except CannotRun as reason:
                    case.reasons[title] = str(reason)
                    del steps[title], case.seconds[title]
    case.seconds = {title: seconds[1:] for title, seconds in case.seconds.items()}
    return case


@contextmanager
def peer_round(peer: Peer, interpreter: Path, case: Case) -> Iterator[Callable[[], float]]:
    """A function that runs a round of a system in another process and returns its CPU seconds. Raises `CannotRun`.

    A peer's model is compared first, unless the network draws masks, which are others in each system.
    """
    work, checked = case.work, peer is not PLAIN and not draws_masks(case.work)
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "errors.txt", "w+") as errors:
        start, model = Path(folder) / "start.npz", Path(folder) / "model.npz"
        first = first_of(work)
        np.savez(start, **first)
        command = [interpreter, "-m", f"benchmarks.peers.{peer.script}", peer.system, work.description]
        command += ["--start", start, *(["--checked", model] if checked else [])]
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            bufsize=1,
            cwd=compare.ROOT,
            env=compare.environment_variables() | {"OMP_NUM_THREADS": "1"},
        )
        try:
            case.versions[peer.title] = json.loads(_answer(process, errors))
            if checked:
                with np.load(model) as saved:
                    case.far[peer.title] = far = _distance(work, first, [saved[name] for name in first])
                if far > compare.TOLERANCE:
                    raise CannotRun(f"its model is {far:.1e} away from that of the plain loop")
            yield lambda: float(_answer(process, errors, "\n"))
        finally:
            process.kill()
            process.communicate()


def draws_masks(work: Workload) -> bool:
    """Whether two passes of the module over the same samples in training differ."""
    module, (x, _) = module_of(work).train(), samples_by_client(work.with_clients(1))
    batch = torch.as_tensor(x[0][:2])
    with torch.no_grad():
        return not torch.equal(module(batch), module(batch))


def first_of(work: Workload) -> dict[str, np.ndarray]:
    """The model from which all systems start, by the names of the module's parameters."""
    torch.manual_seed(0)
    return {name: p.detach().numpy().copy() for name, p in module_of(work).named_parameters()}


def _distance(work: Workload, first: dict[str, np.ndarray], model: Sequence[np.ndarray]) -> float:
    start = list(first.values())
    return compare.distance(model, compare.plain_round(work.for_check(), start), start)


def _answer(process: subprocess.Popen[str], errors: IO[str], order: str = "") -> str:
    """The next line of a process, after an order. Raises `CannotRun` if it has ended, or after `TIMEOUT`."""
    assert process.stdin and process.stdout
    watch = threading.Timer(TIMEOUT, process.kill)
    watch.start()
    try:
        process.stdin.write(order)
        line = process.stdout.readline()
    except BrokenPipeError:
        line = ""
    finally:
        watch.cancel()
    if not line:
        errors.seek(0)
        raise CannotRun(compare.reason_of(errors.read()))
    return line


# ---- the page


def _lines(case: Case) -> Iterator[str]:
    name = case.work.description
    for title, seconds in case.seconds.items():
        times, (least, ratio) = f"{min(seconds):.3f} s, median {statistics.median(seconds):.3f}", case.ratios(title)
        far = f", {case.far[title]:.0e} of the change from the plain loop" if title in case.far else ""
        yield f"{name}: {title} {times}; {least:.2f}, {ratio:.2f}{far}"
    for title, reason in case.reasons.items():
        yield f"{name}: {title}: {reason}"


def section(cases: Sequence[Case], rounds: int) -> str:
    """The tables of seconds, reasons and distances."""
    lines = [
        f"{compare.machine()}; PyTorch {torch.__version__}; {datetime.date.today()}; load average "
        f"{os.getloadavg()[0]:.1f}. CPU seconds of one thread per round, least and median of {rounds} in turn after a "
        "warm-up. Then ratios to the plain loop: of the least times, and the median of those of rounds in turn.",
        "",
        *_table(cases, ENGINES),
        "",
    ]
    with_peers = [case for case in cases if any(peer.title in case.seconds for peer in PEERS)]
    if with_peers:
        columns = ("cfl_ray, best engine", *(peer.title for peer in PEERS))
        lines += [*_table(with_peers, columns), "", *_distances(with_peers), ""]
    reasons = dict[str, list[str]]()
    for case in cases:
        for title, reason in case.reasons.items():
            reasons.setdefault(f"{title}: {reason}", []).append(case.work.description)
    lines += [f"- {'; '.join(names)}: {reason}" for reason, names in reasons.items()]
    return "\n".join(lines).rstrip()


def _table(cases: Sequence[Case], titles: Sequence[str]) -> Iterator[str]:
    yield f"| network | plain loop | {' | '.join(titles)} |"
    yield "|---" * (len(titles) + 2) + "|"
    for case in cases:
        plain = case.seconds[PLAIN.title]
        cells = [f"{min(plain):.3f}, {statistics.median(plain):.3f}"]
        for title in titles:
            best = title.startswith("cfl_ray")
            name = best_engine(case) if best else title
            ratios = "{:.2f}, {:.2f}".format(*case.ratios(name)) if name in case.seconds else "cannot"
            cells.append(f"**{ratios}** (`{name}`)" if best else ratios)
        yield f"| {case.work.description} | {' | '.join(cells)} |"


def best_engine(case: Case) -> str:
    """The engine of cfl_ray with the least seconds."""
    return min((engine for engine in ENGINES if engine in case.seconds), key=lambda engine: min(case.seconds[engine]))


def _distances(cases: Sequence[Case]) -> Iterator[str]:
    """The largest distance of each system, and versions."""
    for peer in PEERS:
        far = [case.far[peer.title] for case in cases if peer.title in case.far]
        found = next((case.versions[peer.title] for case in cases if peer.title in case.versions), None)
        if found:
            listed = ", ".join(f"{name} {version}" for name, version in found.items())
            apart = f"at most {max(far):.0e} of the change away from the plain loop" if far else "not compared"
            yield f"- {peer.title}: {apart} after a round of a few clients in a fixed order, without dropout ({listed})"


def expected(cases: Sequence[Case]) -> str:
    """The table of what to expect: the engine of the rule and its ratio."""
    lines = ["| network like this | engine of `auto` | of plain PyTorch | least of all engines |", "|---|---|---|---|"]
    for case in cases:
        engine, best = case.chosen, best_engine(case)
        ratio = f"{case.ratios(engine)[0]:.2f}" if engine in case.seconds else "not measured"
        least = f"{case.ratios(best)[0]:.2f} (`{best}`)"
        lines.append(f"| {case.work.description} | `{engine}` | {ratio} | {least} |")
    return "\n".join(lines)
