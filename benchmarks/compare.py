"""Time and memory of a FedAvg round of cfl_ray and of other systems, side by side; writes docs/performance.md.

    python benchmarks/compare.py --venvs ~/.cache/cfl-ray-peers
    python benchmarks/compare.py --venvs DIR W2 --peers bare flower --rounds 1 --repetitions 1 --clients 4 --output x.md

Every system has a virtual environment below `--venvs`, made from benchmarks/peers/requirements on first use (some 6 GB
for each that needs PyTorch); cfl_ray runs in the present one. First each system trains a few clients in a fixed order,
and its model is compared with that of the plain loop. Then all run in turn, `--repetitions` times. Run it on an idle
machine.
"""

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.peers.bare import load, module_of, train_client
from benchmarks.workloads import WORKLOADS, Workload, first_model, samples_by_client

BEGIN, END = "<!-- begin: written by benchmarks/compare.py -->", "<!-- end -->"
TOLERANCE = 1e-4  # of a model to that of the plain loop, relative to the change in training
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")


@dataclass(frozen=True)
class Peer:
    """A system: a module of `benchmarks.peers`, and a requirements file of the same name; cfl_ray has none."""

    module: str
    title: str
    pythons: tuple[str, ...] = ()  # interpreters it needs, the preferred one first; none: the present one

    @property
    def requirements(self) -> Path:
        return ROOT / "benchmarks" / "peers" / "requirements" / f"{self.module}.txt"


PEERS = {
    peer.module: peer
    for peer in (
        Peer("ours", "**cfl_ray**"),
        Peer("bare", "bare PyTorch loop"),
        Peer("pfl_research", "pfl-research"),
        Peer("flower", "Flower"),
        Peer("google_fedjax", "FedJAX"),
        Peer("plain_jax", "JAX by hand"),
        Peer("blaze_fl", "BlazeFL", ("python3.14t", "python3.14")),
    )
}


class CannotRun(Exception):
    """The reason why a system has no figures."""


@dataclass
class Results:
    """Figures of all systems."""

    # by workload and module, by number of the repetition
    lines: dict[tuple[str, str], dict[int, dict]] = field(default_factory=lambda: defaultdict(dict))
    reasons: dict[tuple[str, str], str] = field(default_factory=dict)  # why one is missing, by workload and module
    checks: dict[tuple[str, str], float] = field(default_factory=dict)  # distance to the plain loop

    def seconds(self, workload: str, module: str) -> dict[int, float]:
        """Seconds per round, the median of each repetition."""
        lines = self.lines[workload, module]
        return {repetition: statistics.median(line["seconds"]) for repetition, line in lines.items()}

    def ratio(self, workload: str, module: str) -> float:
        """Seconds over those of the bare loop in the same repetition, median; NaN without the bare loop."""
        seconds, bare = self.seconds(workload, module), self.seconds(workload, "bare")
        ratios = [seconds[repetition] / bare[repetition] for repetition in seconds if repetition in bare]
        return statistics.median(ratios) if ratios else float("nan")


# ---- running a system


def environment_of(peer: Peer, venvs: Path) -> Path:
    """The interpreter of a system's virtual environment, which is made where it is missing. Raises `CannotRun`."""
    if not peer.requirements.exists():
        return Path(sys.executable)
    folder, wanted = venvs / peer.module, peer.requirements.read_text()
    interpreter, marker = folder / "bin" / "python", folder / "installed.txt"
    if marker.exists() and marker.read_text() == wanted:
        return interpreter
    print(f"{peer.title}: installing into {folder}", flush=True)
    base = next((found for name in peer.pythons if (found := shutil.which(name))), sys.executable)
    _output([base, "-m", "venv", "--clear", folder], timeout=300)
    _output([interpreter, "-m", "pip", "install", "--quiet", "-r", peer.requirements], timeout=3600)
    marker.write_text(wanted)
    return interpreter


def _output(command: Sequence[object], timeout: float) -> str:
    """Standard output of a command in the repository. Raises `CannotRun` with the reason of a failure."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=ROOT,
            env=environment_variables(),
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        raise CannotRun(f"no result after {timeout:.0f} s") from error
    if done.returncode:
        raise CannotRun(reason_of(done.stderr))
    return done.stdout


def environment_variables() -> dict[str, str]:
    """Those of a system's process."""
    variables = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return variables | {"PYTHONPATH": str(ROOT)}


def reason_of(errors: str) -> str:
    """One line that says why a command failed, from what it wrote to standard error."""
    pinned = re.search(r"requirement [\w-]+(?:\[[\w,-]+\])?==(\S+)", errors)
    if pinned and (needed := re.search(rf"\b{re.escape(pinned[1])} Requires-Python ([^;\s]+)", errors)):
        return f"needs Python {needed[1]}, here is {platform.python_version()}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    told = [line for line in lines if re.match(r"(\[rank\d+\]: )?(ERROR:|\w*(Error|Exception)\b)", line)]
    return (told or lines or ["failed without a message"])[-1].replace("|", "/")[:200]


def run_peer(peer: Peer, interpreter: Path, workload: str, arguments: argparse.Namespace) -> dict:
    """The JSON line of one run."""
    command = [interpreter, "-m", f"benchmarks.peers.{peer.module}", workload, "--rounds", arguments.rounds]
    if arguments.clients:
        command += ["--clients", arguments.clients]
    printed = _output(command, arguments.timeout)
    return json.loads([line for line in printed.splitlines() if line.startswith("{")][-1])


def check(peer: Peer, interpreter: Path, workload: str, timeout: float) -> float:
    """Distance of the system's model to that of the plain loop, after one round of a few clients in a fixed order.

    It is relative to the change in training: 1 for a system that does not train.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.npz"
        _output([interpreter, "-m", f"benchmarks.peers.{peer.module}", workload, "--check", file], timeout)
        with np.load(file) as saved:
            model = [saved[name] for name in saved.files]
    work = WORKLOADS[workload].for_check()
    first = first_model(work)
    return distance(model, plain_round(work, first), first)


def plain_round(work: Workload, start: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The global model after one round of the plain loop: one client after another in this process."""
    x, y = (torch.from_numpy(array) for array in samples_by_client(work))
    first, module = [torch.from_numpy(array) for array in start], module_of(work)
    params, total = list(module.parameters()), [torch.zeros_like(tensor) for tensor in first]
    for x_i, y_i in zip(x, y):
        load(params, first)
        train_client(module, params, x_i, y_i, work)
        for accumulated, p in zip(total, params):
            accumulated += p.detach()
    return [(tensor / work.clients).numpy() for tensor in total]


def distance(model: Sequence[np.ndarray], expected: Sequence[np.ndarray], first: Sequence[np.ndarray]) -> float:
    """||model - expected|| / ||expected - first||, over all tensors."""

    def norm(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> float:
        return float(np.sqrt(sum(np.square(a.astype(np.float64) - b).sum() for a, b in pairs)))

    return norm(zip(model, expected, strict=True)) / norm(zip(expected, first, strict=True))


def measure(arguments: argparse.Namespace) -> Iterator[Results]:
    """Installs, checks and measures all systems, and yields the results so far after every repetition.

    A system that fails in all repetitions has a reason in the place of figures.
    """
    results, interpreters = Results(), {}
    for module in arguments.peers:
        try:
            interpreters[module] = environment_of(PEERS[module], arguments.venvs)
        except CannotRun as reason:
            results.reasons |= {(workload, module): str(reason) for workload in arguments.workloads}
            print(f"{module}: {reason}", flush=True)
    todo = [(workload, module) for workload in arguments.workloads for module in interpreters]
    for workload, module in todo:
        if module == "ours":
            continue
        try:
            far = check(PEERS[module], interpreters[module], workload, arguments.timeout)
            results.checks[workload, module] = far
            if far > TOLERANCE:
                raise CannotRun(f"its model is {far:.1e} away from that of the plain loop, more than {TOLERANCE:.0e}")
        except CannotRun as reason:
            results.reasons[workload, module] = str(reason)
        print(f"{workload} {module}: {results.reasons.get((workload, module), 'trains as the plain loop')}", flush=True)
    for repetition in range(arguments.repetitions):
        order = todo if repetition % 2 == 0 else todo[::-1]
        for workload, module in order:
            if (workload, module) in results.reasons and not results.lines.get((workload, module)):
                continue
            try:
                line = run_peer(PEERS[module], interpreters[module], workload, arguments)
                results.lines[workload, module][repetition] = line
                print(json.dumps(line), flush=True)
            except CannotRun as reason:
                results.reasons[workload, module] = str(reason)
                print(f"{workload} {module}: {reason}", flush=True)
        yield results


# ---- the page


def machine() -> str:
    """CPU model, cores, instruction sets and memory of this machine."""
    info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*: (.*)", info)
    flags = set((re.search(r"flags\s*: (.*)", info) or ["", ""])[1].split())
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    sets = ", ".join(flag for flag in CPU_FLAGS if flag in flags) or "no AVX2"
    amx = "" if any(flag.startswith("amx") for flag in flags) else ", no AMX"
    return (
        f"{model[1] if model else platform.machine()}, {len(os.sched_getaffinity(0))} cores ({sets}{amx}), "
        f"{gigabytes:.0f} GiB, Linux {platform.release()}"
    )


def page_section(results: Results, arguments: argparse.Namespace, command: str, load_average: float) -> str:
    """The measured part of docs/performance.md."""
    clients = f", at most {arguments.clients} clients" if arguments.clients else ""
    lines = [
        f"Machine: {machine()}; load average at the start {load_average:.1f}.",
        "",
        f"`{command}`: repetitions in turn ({arguments.repetitions}), each of a warm-up and measured rounds "
        f"({arguments.rounds}){clients}.",
        "",
    ]
    if arguments.clients or arguments.rounds * arguments.repetitions < 6 or load_average > 1:
        lines += [
            "**A short run, or one on a machine that was not idle: it shows that the systems run, not how fast.**",
            "",
        ]
    for workload in arguments.workloads:
        lines += [
            f"### {workload}: {WORKLOADS[workload].description}",
            "",
            *_table(results, workload, arguments.peers),
            "",
        ]
    lines += ["### Versions", "", "| system | versions |", "|---|---|"]
    for module in arguments.peers:
        found = next((line for (_, name), of in results.lines.items() if name == module for line in of.values()), None)
        versions = _versions(found["versions"]) if found else _pinned(PEERS[module])
        lines.append(f"| {PEERS[module].title} | {versions} |")
    return "\n".join(lines)


def _table(results: Results, workload: str, modules: Sequence[str]) -> list[str]:
    rows = [
        "| system | seconds per round (least .. most) | of the bare loop | peak memory | distance to the plain loop |",
        "|---|---|---|---|---|",
    ]
    for module in modules:
        title, key = PEERS[module].title, (workload, module)
        lines, reason = results.lines[key].values(), results.reasons.get(key)
        if not lines:
            rows.append(f"| {title} | not measured: {reason} | | | |")
            continue
        rounds = [value for line in lines for value in line["seconds"]]
        seconds, peak = statistics.median(results.seconds(*key).values()), max(line["peak_mb"] for line in lines)
        far = f"{results.checks[key]:.0e} of the change" if key in results.checks else "`tests/engine`"
        spread = f"{min(rounds):.2f} .. {max(rounds):.2f}"
        failed = f", {len(lines)} times; once {reason}" if reason else ""
        rows.append(f"| {title} | {seconds:.2f} ({spread}){failed} | {results.ratio(*key):.2f} | {peak:,} MB | {far} |")
    return rows


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _pinned(peer: Peer) -> str:
    """The pinned versions of a system that has no figures."""
    if not peer.requirements.exists():
        return ""
    return ", ".join(line for line in peer.requirements.read_text().split("\n") if line and not line.startswith("#"))


def with_section(page: str, section: str, begin: str = BEGIN) -> str:
    """The page with its measured part replaced, which follows `begin`. Raises ValueError where it has no such part."""
    before, found, rest = page.partition(begin)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise ValueError(f"the page has no part between {begin} and {END}")
    return f"{before}{begin}\n\n{section}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=list(WORKLOADS), help=f"some of {', '.join(WORKLOADS)}")
    parser.add_argument("--venvs", type=Path, required=True, help="folder of the virtual environments")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=PEERS, help="some of the systems")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of a run (default: 3)")
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each system, in turn (default: 3)")
    parser.add_argument("--clients", type=int, help="at most this number of clients, for a trial")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that a run may take (default: 1800)")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "performance.md", help="the page to write")
    arguments = parser.parse_args()
    if unknown := set(arguments.workloads) - set(WORKLOADS):
        parser.error(f"unknown workload {', '.join(sorted(unknown))}; valid: {', '.join(WORKLOADS)}")
    arguments.venvs = arguments.venvs.expanduser().absolute()
    page = arguments.output.read_text() if arguments.output.exists() else f"{BEGIN}\n{END}\n"
    with_section(page, "")  # a page without its part is an error before the hours of measuring, not after
    load_average = os.getloadavg()[0]
    shown = re.sub(r"--venvs[ =]\S+", "--venvs DIR", " ".join(["python benchmarks/compare.py", *sys.argv[1:]]))
    for results in measure(arguments):
        arguments.output.write_text(with_section(page, page_section(results, arguments, shown, load_average)))


if __name__ == "__main__":
    main()
