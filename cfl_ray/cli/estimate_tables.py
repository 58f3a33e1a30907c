"""Output of `cfl-ray check`: the sizes of an experiment or a study, its warnings, traffic and memory."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from cfl_ray.cli.console import counted, say
from cfl_ray.cli.estimate import Estimate
from cfl_ray.cli.tables import notes_on, number_table, print_table
from cfl_ray.config.study import Study
from cfl_ray.data.federation import tested_on
from cfl_ray.privacy.examples import describe as describe_examples
from cfl_ray.privacy.plan import describe
from cfl_ray.run_directory.session_file import cluster_address
from cfl_ray.setup.checks import bytes_of_participants, most_participants
from cfl_ray.study.metrics import metric_warnings
from cfl_ray.study.plan import StudyRun
from cfl_ray.study.resources import resources_for
from cfl_ray.system.machine import available_memory, usable_cpus


def show(estimate: Estimate, console: Console) -> None:
    """Prints the sizes of the federation and, per method, traffic and memory."""
    experiment, methods = estimate.setup.experiment, estimate.setup.methods
    notes = notes_on(estimate.setup, estimate.network, estimate.federation.samples[2])
    _show_needs([estimate], {label: (estimate, label) for label in estimate.traffic}, notes, console)
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
    _show_seconds(estimate, console)


def show_study(
    estimates: Sequence[tuple[StudyRun, Estimate]], study: Study, seeds: int, root: Path, console: Console
) -> None:
    """Prints the sizes of a study: its runs, and for each setting the federation, memory and traffic.

    estimates: those of the runs with the first seed. seeds: number of seeds.
    """
    for setting, group in groupby(estimates, lambda estimate: estimate[0].setting):
        of_setting = list(group)
        say(f"setting {setting}:", console)
        by_method = {run.method: (estimate, next(iter(estimate.traffic))) for run, estimate in of_setting}
        _show_needs([estimate for _, estimate in of_setting], by_method, [], console)
        for _, estimate in of_setting:
            _show_seconds(estimate, console)
    for warning in metric_warnings(study, [run for run, _ in estimates]):
        say(f"warning: {warning}", console)
    runs = len(estimates) * seeds
    if study.sweep is not None and study.learns:
        ends, trials = 2, study.sweep.trials or 0
        say(f"shown: the ends of the ranges; {trials} trials, {runs // ends * trials} runs", console)
    else:
        say(f"{counted(runs, 'run')}: {len(estimates)} with each of {counted(seeds, 'seed')}", console)
    runtime = estimates[0][0].experiment.runtime
    if runtime.backend != "ray" or cluster_address(runtime.address) is None:
        say(f"on this machine: {resources_for(runtime, runs)}", console)
    say(f"folder: {root}", console)


def _show_needs(
    estimates: Sequence[Estimate], rows: dict[str, tuple[Estimate, str]], notes: list[str], console: Console
) -> None:
    """Prints sizes, warnings, notes and the table (`_estimate_table`) of estimates of the same federation."""
    _show_sizes(estimates[0], console)
    for warning in dict.fromkeys(text for estimate in estimates for text in estimate.warnings):
        say(f"warning: {warning}", console)
    for note in dict.fromkeys([*notes, *(text for estimate in estimates for text in estimate.missing_engines)]):
        say(f"note: {note}", console)
    print_table(_estimate_table(rows), console)


def _show_sizes(estimate: Estimate, console: Console) -> None:
    federation, network = estimate.federation, estimate.network
    fewest, median, most = federation.samples
    steps = estimate.setup.local.steps_of(np.array([median]))[0]
    say(
        f"federation: {federation.clients} clients ({estimate.online} at the start), "
        f"{fewest} / {median:g} / {most} training samples (fewest / median / most), "
        f"{federation.groups or 'unknown'} true groups, {federation.shape.targets_in_words}, "
        f"samples of {'x'.join(map(str, federation.shape.input))}",
        console,
    )
    say(tested_on(federation.view, federation.groups), console)
    frozen = network.frozen.values()
    number, size = sum(p.numel() for p in frozen), sum(p.nbytes for p in frozen)
    say(
        f"shards: {federation.bytes / 1e6:.1f} MB; "
        f"model: {network.spec.size:,} parameters, {estimate.model_bytes / 1e6:.2f} MB"
        + (f", and {number:,} frozen, {size / 1e6:.2f} MB once per machine" if frozen else ""),
        console,
    )
    rounds = f"{estimate.setup.experiment.rounds} {_step_name(estimate)}s"
    say(f"a {_step_name(estimate)}: {estimate.cohort} clients, about {steps} steps each; {rounds}", console)


def _step_name(estimate: Estimate) -> str:
    return "server step" if estimate.setup.asynchrony else "round"


def _estimate_table(rows: dict[str, tuple[Estimate, str]]) -> Table:
    """A row for each method: its estimate, and its label there."""
    headings = (
        "Mbit down, up\nof a client\nin round 1",
        "\nin a later\nround",
        "\nMbit\nin all",
        "server\nMB",
        "each\nhost MB",
        "a client\nkeeps",
    )
    table = number_table("expected", headings)
    for name, (estimate, label) in rows.items():
        sent = estimate.traffic[label]
        first_down, first_up = sent.first_round
        later_down, later_up = sent.later_round
        total = sum(sent.first_round) + (estimate.setup.experiment.rounds - 1) * sum(sent.later_round)
        table.add_row(
            escape(name),
            f"{first_down:.3f}, {first_up:.3f}",
            f"{later_down:.3f}, {later_up:.3f}",
            f"{total:.1f}",
            f"{estimate.server_bytes(label, sent) / 1e6:.0f}",
            f"{estimate.host_bytes(sent) / 1e6:.0f}",
            decimal(4 * sum(sent.kept.values())) if sent.kept else "-",
        )
    return table


def _show_seconds(estimate: Estimate, console: Console) -> None:
    """Prints the expected virtual time of a round and of all rounds, and the share of late clients, with a clock."""
    rounds = estimate.setup.experiment.rounds
    each = ", ".join(f"{label} {s:.4g} s ({s * rounds:.4g} s in all)" for label, s in estimate.seconds.items())
    if each:
        say(f"virtual time of a {_step_name(estimate)}, mean of the first {min(rounds, 20)}: {each}", console)
    late = ", ".join(f"{label} {share:.0%}" for label, share in estimate.late.items())
    if late:
        say(f"clients of a round that miss clock.deadline, and are not trained: {late}", console)
