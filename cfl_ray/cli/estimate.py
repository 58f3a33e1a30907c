"""Estimate of what an experiment or a study needs, before it runs, and its output: sizes, memory and traffic."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from cfl_ray import data
from cfl_ray.cli.console import say
from cfl_ray.cli.printed_tables import notes_on, number_table, print_table
from cfl_ray.clock.virtual_time import Flights, VirtualTime
from cfl_ray.config import Experiment
from cfl_ray.config.study import Study
from cfl_ray.core.state import State
from cfl_ray.data import FederationSummary
from cfl_ray.data.federation import Federation
from cfl_ray.data.synthetic import SyntheticFederation
from cfl_ray.engine.timing import time_engines
from cfl_ray.errors import ConfigError, counted
from cfl_ray.nn.network import Network
from cfl_ray.nn.precision import products_in
from cfl_ray.population.population import Population
from cfl_ray.privacy.examples import describe as describe_examples
from cfl_ray.privacy.privacy_plan import describe
from cfl_ray.report.drawing import listed
from cfl_ray.run_directory.session_file import cluster_address
from cfl_ray.runtime.participation import awaited_clients, drawn_cohort, wanted_clients
from cfl_ray.setup.checks import bytes_of_participants, compared_clients, most_participants
from cfl_ray.setup.dry_rounds import TrafficEstimate, traffic
from cfl_ray.setup.engine_choice import compute_device, device_name, engine_by_rule, engine_choice
from cfl_ray.setup.prepare import setup_on
from cfl_ray.setup.scheduled_changes import population_of
from cfl_ray.setup.setup import Setup
from cfl_ray.study.study_plan import StudyRun, metric_warnings
from cfl_ray.study.worker_pool import resources_for
from cfl_ray.system.machine import available_memory, usable_cpus
from cfl_ray.system.threads import one_thread

_CLIENT_BYTES = 50  # peak server memory per client, measured with a million clients
_PROCESS_BYTES = 450e6  # memory of a process that has imported torch and Ray, measured with torch 2.15 and Ray 2.60


@dataclass(frozen=True)
class Estimate:
    """The sizes of a valid experiment, and the traffic of its methods."""

    setup: Setup  # on a stand-in for the federation
    federation: FederationSummary
    online: int  # clients before round 1
    cohort: int  # clients of a round, or of a server step in asynchronous rounds
    network: Network
    compared: dict[str, tuple[int, int]]  # (clients, bytes of their pairs), by method that compares pairs of clients
    traffic: dict[str, TrafficEstimate]  # by method
    seconds: dict[str, float]  # virtual seconds of a round, by method; empty without a clock
    # share of the selected clients that miss `clock.deadline`, by method; empty without a deadline
    late: dict[str, float]

    @property
    def model_bytes(self) -> int:
        return self.network.spec.size * 4

    def server_bytes(self, label: str, traffic: TrafficEstimate) -> float:
        _, pairs = self.compared.get(label, (0, 0))
        models = (traffic.models + 1) * 4 * self.model_bytes
        weights = 8 * traffic.mixed  # float32, before and after a round
        own = bytes_of_participants(self.setup, label, self.network.spec)
        return _PROCESS_BYTES + models + own + pairs + (_CLIENT_BYTES + weights) * self.federation.clients

    def host_bytes(self, label: str, traffic: TrafficEstimate) -> float:
        local, most = self.setup.local_of(label), self.federation.samples[2]
        trained = int(local.steps_of(np.array([most]))[0] * local.batch_of(most)) if local.augment else 0
        samples = trained * 4 * math.prod(self.federation.shape.input)  # augmented, of one client
        return _PROCESS_BYTES + (traffic.models * 3 + 6) * self.model_bytes + samples

    @property
    def warnings(self) -> list[str]:
        """A line for each key that is valid but has no effect, or probably another effect than intended."""
        clients = self.federation.clients
        wanted = {label: getattr(method, "num_clusters", None) or 0 for label, method in self.setup.methods.items()}
        empty = [
            f"{label}.num_clusters ({number}) is more than the {clients} clients: some clusters stay empty"
            for label, number in wanted.items()
            if number > clients
        ]
        of_data = list(self.federation.warnings)
        return self.setup.warnings + of_data + empty + _unwritable(Path(self.setup.experiment.output).absolute())

    @property
    def engine(self) -> str:
        """The engine that trains the clients, with the reason, a line."""
        runtime, here = self.setup.experiment.runtime, torch.cuda.is_available()
        on_gpu = runtime.device == "cuda" or (runtime.device == "auto" and runtime.gpus_per_host > 0)
        if on_gpu and not here and runtime.engine == "auto":
            return "auto: chosen on the hosts, whose GPUs this machine lacks"
        network = self.setup.network("cuda") if on_gpu and here else self.network
        return engine_choice(self.setup, lambda: engine_by_rule(self.setup, network, tried=False)).reason


def _unwritable(output: Path) -> list[str]:
    """A warning if the output folder is not there and cannot be made; otherwise empty."""
    there = next(path for path in (output, *output.parents) if path.exists())
    if there.is_dir() and os.access(there, os.W_OK):
        return []
    return [f"output: {output} cannot be written: {there} is not a folder in which you can make files"]


def _summary_of(experiment: Experiment) -> FederationSummary:
    return data.describe(experiment.data, experiment.seed, experiment.targets, experiment.protocol)


def estimate(experiment: Experiment, summary: FederationSummary | None = None) -> Estimate:
    """Returns the estimate of an experiment. Raises ConfigError or DataError for an experiment that a run refuses.

    summary: the sizes of its federation, if they are known.
    """
    summary = summary or _summary_of(experiment)
    setup = setup_on(experiment, _stand_in(summary, experiment.seed))
    check_machine(setup)
    population, network = population_of(experiment, summary.clients), setup.network()
    cohort = experiment.asynchronous.buffer or wanted_clients(experiment.cohort, population)
    compared = {
        label: (count, count**2 * method.pair_bytes)
        for label, method in setup.methods.items()
        if (count := compared_clients(setup, label))
    }
    sent = {label: traffic(replace(setup.dry_rounds(label, network.spec), cohort=cohort)) for label in setup.methods}
    played = {label: played_rounds(setup, label) for label in setup.methods if _may_miss_clients(setup)}
    if setup.asynchrony is None:
        sent |= {label: sent[label].of_clients(rounds.uploads, rounds.unused) for label, rounds in played.items()}
    seconds = {label: rounds.seconds for label, rounds in played.items()} if setup.clock else {}
    late = {label: rounds.late for label, rounds in played.items()} if setup.clock and setup.clock.deadline else {}
    return Estimate(setup, summary, len(population.online), cohort, network, compared, sent, seconds, late)


def _may_miss_clients(setup: Setup) -> bool:
    """Whether a round may have other clients than it wants, or takes virtual time."""
    return setup.clock is not None or setup.experiment.cohort.dropout > 0 or not setup.availability.always


@dataclass(frozen=True)
class PlayedRounds:
    """Means over a method's first rounds, at most 20, without training and without clients that join or leave."""

    seconds: float  # virtual time; 0 without a clock
    late: float  # share of the selected clients that miss the deadline
    uploads: float  # clients that upload
    unused: float  # clients that receive models, and whose work does not count


def played_rounds(setup: Setup, label: str) -> PlayedRounds:
    """Draws the cohorts of the first rounds, and finds whom they wait for."""
    federation, experiment, rounds = setup.federation, setup.experiment, min(setup.experiment.rounds, 20)
    time = setup.time_of(label, setup.network().spec, lambda ids: federation.num_samples_N[ids])
    population = population_of(experiment, federation.num_clients)
    if setup.asynchrony is not None:
        assert time is not None
        _play_server_steps(setup, time, population, rounds)
        return PlayedRounds(time.now / rounds, 0.0, setup.asynchrony.buffer, 0.0)
    availability = setup.availability if time is None else time.available(setup.availability)
    selected = missed = uploads = 0
    for round in range(1, rounds + 1):
        cohort = drawn_cohort(experiment.cohort, population, availability, round)
        selected += len(cohort.ids_M)
        if time is not None:
            cohort = time.wait_for(round, cohort, awaited_clients(experiment.cohort, population, cohort))
            time.end_round()
        uploads, missed = uploads + len(cohort.ids_M), missed + cohort.past_deadline
    seconds = 0.0 if time is None else time.now / rounds
    return PlayedRounds(seconds, missed / max(selected, 1), uploads / rounds, (selected - uploads) / rounds)


def _play_server_steps(setup: Setup, time: VirtualTime, population: Population, steps: int) -> None:
    """Advances the virtual time by so many steps of an asynchronous server, without training."""
    assert setup.asynchrony is not None
    experiment, flights = setup.experiment, Flights(setup.asynchrony, time)
    state = State(torch.zeros(1, 1), np.zeros(population.num_clients, np.int32))
    concurrency = experiment.asynchronous.concurrency or wanted_clients(experiment.cohort, population)
    availability = time.available(setup.availability)
    for step in range(1, steps + 1):
        flights.next_cohort(step, state, concurrency, population, availability, experiment.cohort.dropout)
        flights.advance(step, state, state)


def estimate_study(runs: Sequence[StudyRun]) -> list[tuple[StudyRun, Estimate]]:
    """Returns the estimates of a study's runs with its first seed. Raises ConfigError for a run that is not valid."""
    known: dict[str, FederationSummary] = {}
    estimates = []
    for run in runs:
        experiment = run.experiment
        if run.seed != runs[0].seed:
            continue
        try:
            key = json.dumps([experiment.data.model_dump(mode="json"), experiment.targets, experiment.protocol])
            if key not in known:
                known[key] = _summary_of(experiment)
            estimates.append((run, estimate(experiment, known[key])))
        except ConfigError as error:
            raise type(error)(f"{run.name}: {error}") from error
    return estimates


def _stand_in(summary: FederationSummary, seed: int) -> Federation:
    """Returns a federation of these sizes whose samples are not generated."""
    shape = summary.shape
    classes = max(shape.num_classes, 2)
    federation = SyntheticFederation(
        summary.clients, input=shape.input, classes=classes, groups=1, samples=1, seed=seed
    )
    federation.shape, federation.num_samples_N = shape, summary.num_samples_N
    federation.num_validation_N = summary.num_samples_N * 0 if summary.own_validation else None
    return federation


def check_machine(setup: Setup) -> None:
    """Raises ConfigError if this machine has no room for the hosts, or no GPU to compute on.

    No check if the run joins a cluster: its resources are not known in advance.
    """
    runtime = setup.experiment.runtime
    if cluster_address(runtime.address) is not None or runtime.backend != "ray":
        return
    from cfl_ray.runtime.on_ray.placement import host_count  # imports ray

    cpus = max(runtime.hosts or 0, usable_cpus())
    try:
        host_count(setup, [{"CPU": cpus, "GPU": torch.cuda.device_count()}])
    except ConfigError as error:
        raise ConfigError(f"{error}; to check for a cluster, name it: RAY_ADDRESS=HEAD:6379") from None
    compute_device(setup.experiment, has_gpu=bool(runtime.gpus_per_host))


# ---- output


def show(estimate: Estimate, console: Console) -> None:
    """Prints the sizes of the federation and, per method, traffic and memory."""
    experiment, methods = estimate.setup.experiment, estimate.setup.methods
    notes = notes_on(estimate.setup, estimate.network, estimate.federation.samples[2])
    for line in _needs_in_words([estimate], notes):
        say(line, console)
    print_table(_estimate_table({label: _cells(estimate, label) for label in estimate.traffic}), console)
    for label, plan in estimate.setup.privacy.items():
        for line in describe(plan, label, experiment.rounds):
            say(line, console)
    for label, account in estimate.setup.examples.items():
        assert experiment.privacy is not None and experiment.privacy.examples is not None
        for line in describe_examples(experiment.privacy.examples, label, account, experiment.rounds):
            say(line, console)
    hosts = experiment.runtime.hosts or usable_cpus()
    say(
        f"memory is for one server and each of {hosts} hosts; "
        "methods that find the number of clusters may hold more models at first",
        console,
    )
    held = {
        f"{label} compares {count:,} clients with each other ({methods[label].compares})": size
        for label, (count, size) in estimate.compared.items()
    }
    clients = f"each of up to {most_participants(estimate.setup):,} clients"
    for label, method in methods.items():
        if own := bytes_of_participants(estimate.setup, label, estimate.network.spec):
            held[f"{label} keeps {method.state_type.of_each_client} on the server for {clients}"] = own
    here = f"{available_memory() / 1e6:,.0f} MB are available here"
    for what, size in held.items():
        say(f"{what}: {size / 1e6:,.1f} MB of the server's memory; {here}", console)
    megabytes = {label: sent.deferred * estimate.model_bytes / 1e6 for label, sent in estimate.traffic.items()}
    if deferring := ", ".join(f"{label} {size:.1f} MB" for label, size in megabytes.items() if size):
        say(f"results of a round that stay in the object store until their weights are known: {deferring}", console)
    for line in _seconds_in_words(estimate):
        say(line, console)


def show_engine_times(estimate: Estimate, console: Console) -> None:
    """Measures each engine in this process and prints its time of a local step, as a multiple of the least."""
    setup, runtime = estimate.setup, estimate.setup.experiment.runtime
    device = compute_device(setup.experiment, has_gpu=bool(runtime.gpus_per_host))
    with one_thread(), products_in(runtime.precision):
        found = time_engines(setup.network(device), setup.federation, setup.local, setup.division)
    times = {name: seconds for name, seconds in found.items() if not isinstance(seconds, str)}
    say(f"measured in this process ({device_name(device)}), a local step of a client; a run does not use it:", console)
    for name in sorted(times, key=times.__getitem__):
        say(f"  {name} {1e3 * times[name]:.3g} ms, {times[name] / min(times.values()):.2f} of the least", console)
    for name, reason in found.items():
        if isinstance(reason, str):
            say(f"  {name} cannot: {reason}", console)


def show_study(
    estimates: Sequence[tuple[StudyRun, Estimate]], study: Study, seeds: int, root: Path, console: Console
) -> None:
    """Prints the sizes of a study: its runs, and of its settings the federation, memory and traffic.

    Of a setting after the first, only what no setting before has. estimates: those of the runs with the first seed.
    seeds: number of seeds.
    """
    rows: dict[str, list[str]] = {}  # of the table that is not printed yet
    shown: set[tuple[str, ...]] = set()
    like_others = []
    for setting, group in groupby(estimates, lambda estimate: estimate[0].setting):
        of_setting = list(group)
        lines = _needs_in_words([estimate for _, estimate in of_setting], [])
        lines += [line for _, estimate in of_setting for line in _seconds_in_words(estimate)]
        cells = {run.method: _cells(estimate, next(iter(estimate.traffic))) for run, estimate in of_setting}
        is_first, new = not shown, [line for line in lines if (line,) not in shown]
        added = {method: row for method, row in cells.items() if (method, *row) not in shown}
        shown |= {(line,) for line in lines} | {(method, *row) for method, row in cells.items()}
        if not new and not added:
            like_others.append(setting)
        if new:
            _print_rows(rows, console)
            say(f"setting {setting}:" if is_first else f"setting {setting}, which differs in:", console)
            for line in new:
                say(line, console)
        rows |= {method if is_first else f"{method}, {setting}": row for method, row in added.items()}
    _print_rows(rows, console)
    if like_others:
        say(f"like these: {counted(len(like_others), 'further setting')} ({listed(like_others)})", console)
    for warning in metric_warnings(study, [run for run, _ in estimates]):
        say(f"warning: {warning}", console)
    say(_runs_in_words(study, len(estimates), seeds), console)
    runtime = estimates[0][0].experiment.runtime
    if runtime.backend != "ray" or cluster_address(runtime.address) is None:
        say(f"on this machine: {resources_for(runtime, len(estimates) * seeds)}", console)
    say(f"folder: {root}", console)


def _runs_in_words(study: Study, of_seed: int, seeds: int) -> str:
    """How many runs the study has. of_seed: runs with one seed; of a sweep that learns, at both ends of its ranges."""
    if study.sweep is not None and study.learns:
        trials = study.sweep.trials or 0
        runs = of_seed * seeds // 2 * trials
        return f"shown: the ends of the ranges; {counted(trials, 'trial')}, {counted(runs, 'run')}"
    return f"{counted(of_seed * seeds, 'run')}: {of_seed} with each of {counted(seeds, 'seed')}"


def _print_rows(rows: dict[str, list[str]], console: Console) -> None:
    """Prints the table of these rows, which are removed."""
    if rows:
        print_table(_estimate_table(rows), console)
    rows.clear()


def _needs_in_words(estimates: Sequence[Estimate], notes: list[str]) -> list[str]:
    """Sizes, warnings, notes and engines of estimates of the same federation, each a line."""
    warnings = dict.fromkeys(f"warning: {text}" for estimate in estimates for text in estimate.warnings)
    engines = dict.fromkeys(f"engine {estimate.engine}" for estimate in estimates)
    return [*_sizes_in_words(estimates[0]), *warnings, *dict.fromkeys(f"note: {note}" for note in notes), *engines]


def _sizes_in_words(estimate: Estimate) -> list[str]:
    federation, network = estimate.federation, estimate.network
    fewest, median, most = federation.samples
    steps = estimate.setup.local.steps_of(np.array([median]))[0]
    frozen, constant = network.frozen.values(), network.spec.size - network.spec.sent()
    number, size = sum(p.numel() for p in frozen), sum(p.nbytes for p in frozen)
    groups = counted(federation.groups, "true group") if federation.groups else "unknown true groups"
    rounds = counted(estimate.setup.experiment.rounds, _step_name(estimate))
    batches = f"about {counted(int(steps), 'step')} each"
    if estimate.setup.local.batch_size is None:
        batches += ", with all samples of a client in one batch (local.batch_size: null)"
    return [
        f"federation: {counted(federation.clients, 'client')} ({estimate.online} at the start), "
        f"{fewest} / {median:g} / {most} training samples (fewest / median / most), "
        f"{groups}, {federation.shape.targets_in_words}, "
        f"samples of {'x'.join(map(str, federation.shape.input))}",
        *filter(None, (federation.tested_on, federation.validated_on)),
        f"shards: {federation.bytes / 1e6:.1f} MB; "
        f"model: {network.spec.size:,} parameters, {estimate.model_bytes / 1e6:.2f} MB"
        + (f", {constant:,} of them statistics that training does not change and that are not sent" if constant else "")
        + (f", and {number:,} frozen, {size / 1e6:.2f} MB once per machine" if frozen else ""),
        f"a {_step_name(estimate)}: {counted(estimate.cohort, 'client')}, {batches}; {rounds}",
    ]


def _step_name(estimate: Estimate) -> str:
    return "server step" if estimate.setup.asynchrony else "round"


def _estimate_table(rows: dict[str, list[str]]) -> Table:
    """A row for each method, of `_cells`."""
    headings = (
        "Mbit down, up\nof a client\nin round 1",
        "\nin a later\nround",
        "\nMbit\nin all",
        "server\nMB",
        "each\nhost MB",
        "a client\nkeeps",
    )
    table = number_table("expected", headings)
    for name, cells in rows.items():
        table.add_row(escape(name), *cells)
    return table


def _cells(estimate: Estimate, label: str) -> list[str]:
    """Traffic and memory of a method. label: in its estimate."""
    sent = estimate.traffic[label]
    (first_down, first_up), *_, (later_down, later_up) = sent.rounds
    return [
        f"{first_down:.3f}, {first_up:.3f}",
        f"{later_down:.3f}, {later_up:.3f}",
        f"{sent.total(estimate.setup.experiment.rounds):.1f}",
        f"{estimate.server_bytes(label, sent) / 1e6:.0f}",
        f"{estimate.host_bytes(label, sent) / 1e6:.0f}",
        decimal(4 * sum(sent.kept.values())) if sent.kept else "-",
    ]


def _seconds_in_words(estimate: Estimate) -> list[str]:
    """The expected virtual time of a round and of all rounds, and the share of late clients, with a clock."""
    rounds = estimate.setup.experiment.rounds
    each = ", ".join(f"{label} {s:.4g} s ({s * rounds:.4g} s in all)" for label, s in estimate.seconds.items())
    late = ", ".join(f"{label} {share:.0%}" for label, share in estimate.late.items())
    lines = {
        f"virtual time of a {_step_name(estimate)}, mean of the first {min(rounds, 20)}: {each}": each,
        f"clients of a round that miss clock.deadline, and are not trained: {late}": late,
    }
    return [line for line, has_values in lines.items() if has_values]
