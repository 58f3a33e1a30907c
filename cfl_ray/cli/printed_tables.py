"""Tables of the command line: results by method, methods and their options, progress of a run."""

import importlib
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from cfl_ray.cli.console import say
from cfl_ray.config.section import as_yaml
from cfl_ray.core.events import drawn, phase_meanings
from cfl_ray.errors import counted, duration
from cfl_ray.errors.redaction import redact
from cfl_ray.system.nested import leaves_of
from cfl_ray.tracking.record import BEST_ROUND, primary_of, rejected_updates, validation_metric

if TYPE_CHECKING:  # `cfl-ray status` does not wait for torch
    from cfl_ray.cli.live_client import RunStatus
    from cfl_ray.config import Experiment
    from cfl_ray.core.method import Method
    from cfl_ray.nn.network import Network
    from cfl_ray.results.results import Results
    from cfl_ray.setup.setup import Setup
    from cfl_ray.study.status import StudyStatus
    from cfl_ray.tracking import RoundRecord

_CLUSTERS = {"ari": "ARI", "num_clusters": "clusters"}
_WRAPPED_NAME = 16  # least width of the column of method names in a table of numbers; a longer name wraps
SECONDS = (
    "seconds: training of a round (the median without the first round, which warms up) and of all rounds to the "
    "one shown; evaluation and start are not included"
)


def metrics_line(metrics: Mapping[str, float]) -> str:
    """Returns accuracy, number of clusters and ARI, if present, in a line."""
    score = primary_of(metrics)
    names = [name for name in (score, validation_metric(score), "num_clusters", "ari") if name in metrics]
    return "  ".join(f"{_CLUSTERS.get(name, name)} {_format(name, metrics[name])}" for name in names)


def end_line(last: "RoundRecord | None", kept: "RoundRecord | None") -> str:
    """Returns the metrics with which a run ended, in a line: those of the kept round, which is named if it is not last.

    last, kept: the records of these rounds; None: no round is recorded.
    """
    if last is None or kept is None:
        return "no evaluation"
    return metrics_line(kept.metrics) + (
        f"  best round {kept.round} of {last.round}" if BEST_ROUND in last.metrics else ""
    )


def score_of(results: "Results") -> str:
    """Returns the name of the first metric of the task."""
    return next((primary_of(result.final) for result in results.methods.values() if result.final), "accuracy")


def number_table(title: str, headings: Sequence[str], first: str = "method") -> Table:
    """Returns a table of numbers whose first column has names, which wrap in a narrow terminal, below `first`."""
    table = Table(title=title)
    table.add_column(first, overflow="fold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def print_table(table: Table, console: Console) -> None:
    """Prints a table of numbers by method: in a narrow terminal without space between columns, or as a list."""
    names, *numbers = table.columns
    room = console.width - sum(map(_width, numbers)) - len(numbers) - 2  # for the names; 2: the outer borders
    if room - 2 * len(table.columns) < min(_width(names), _WRAPPED_NAME):
        table.padding = (0, 0, 0, 0)
    if room >= min(_width(names), _WRAPPED_NAME):
        console.print(table)
        return
    say(f"{table.title}:", console)
    headings = [" ".join(str(column.header).split()) for column in numbers]
    for name, *cells in zip(*(column.cells for column in table.columns), strict=True):
        say(Text.from_markup(str(name)).plain, console)
        pairs = zip(headings, cells, strict=True)
        indented(console, Text(", ".join(f"{heading} {cell}" for heading, cell in pairs)), 2)


def _width(column: Column) -> int:
    """Returns the length of the longest line in a column."""
    texts = (Text.from_markup(str(cell)).plain for cell in (column.header, *column.cells))
    return max(len(line) for text in texts for line in text.splitlines())


def comparison(results: "Results", further: Sequence[str] = ()) -> Table:
    """Returns a table with a row of metrics per evaluated method. further: other metrics of the task."""
    score = score_of(results)
    evaluated = {label: result for label, result in results.methods.items() if result.final}
    asked = {name: name.replace("_", "\n") for name in further}
    shown = {score: score, f"{score}_local": "P-local"} | asked | _CLUSTERS
    others = {
        "reported": "reported",
        validation_metric(score): "validation",
        f"{score}_honest": "of honest\nclients",
        "epsilon": "epsilon",
        "virtual_seconds": "virtual\nseconds",
    }
    shown |= {name: words for name, words in others.items() if any(name in of.final for of in evaluated.values())}
    has_best = any(result.best_round is not None for result in evaluated.values())
    seconds = "seconds\nuntil then" if has_best else "seconds\nin all"
    headings = (*["round"] * has_best, *shown.values(), "Mbit per\nclient", "seconds\na round", seconds)
    title = "results after the best round, whose models are kept" if has_best else "results after the last round"
    table = number_table(title, headings)
    for label, result in evaluated.items():
        final = result.final
        cells = [_format(name, final[name]) if name in final else "-" for name in shown]
        if has_best:
            cells.insert(0, str(result.best_round or result.records[-1].round))
        traffic, each = final["mbit_down"] + final["mbit_up"], seconds_a_round(result.records)
        table.add_row(escape(label), *cells, f"{traffic:.2f}", f"{each:.3g}", f"{result.seconds_until():.1f}")
    return table


def seconds_a_round(records: "Sequence[RoundRecord]") -> float:
    """Returns the median seconds of a round, without round 1 unless it is the only round."""
    seconds = [(record.round, record.metrics.get("round_seconds", math.nan)) for record in records]
    return median(
        [duration for round, duration in seconds if round > 1] or [duration for _, duration in seconds] or [math.nan]
    )


def alone_warning(final: Mapping[str, float]) -> str | None:
    """A warning if every client is a separate cluster; otherwise None."""
    clusters, clients = final.get("num_clusters", 0.0), final.get("clients_online", 0.0)
    if clusters < 2 or clusters < clients:
        return None
    return (
        f"{clusters:.0f} clusters of {clients:.0f} clients: every client trains alone; "
        "change the option that decides where clusters are cut (cfl-ray methods NAME)"
    )


def rejection_warning(label: str, records: "Sequence[RoundRecord]") -> str | None:
    """A warning about rejected updates of a method; None if none was rejected."""
    rejected = rejected_updates(records)
    if not rejected.count:
        return None
    rounds = rejected.rounds
    when = f"round {rounds[0]}" if len(rounds) == 1 else f"{len(rounds)} rounds from {rounds[0]} to {rounds[-1]}"
    updates = "update of clients was" if rejected.count == 1 else "updates of clients were"
    return (
        f"{rejected} {updates} rejected as not finite or not valid ({label}, {when}); "
        "if its training diverges, lower local.lr or set local.clip_norm"
    )


def _format(name: str, value: float) -> str:
    return f"{value:.0f}" if name == "num_clusters" else f"{value:.3f}"


def notes_on(setup: "Setup", network: "Network", most: int) -> list[str]:
    """Notes on a valid run: ignored events, the data read, averaged statistics of BatchNorm, and how models are chosen.

    most: number of training samples of the largest client.
    """
    from cfl_ray.config.protocol import exceptions_in_words
    from cfl_ray.setup.scheduled_changes import ignored_events

    exceptions = exceptions_in_words(setup.experiment.to_dict())
    notes = [*filter(None, [exceptions]), *ignored_events(setup.experiment), *setup.federation.notes]
    averaged = any(method.kept_norms(network.spec) is None for method in setup.methods.values())
    if network.batch_statistics and averaged and network.spec.sent() > network.spec.trained:
        notes.append(
            "BatchNorm: the running means and variances of clients are averaged like weights, without the variance "
            "between clients (docs/extend/model.md); GroupNorm has no such statistics"
        )
    choosing = [label for label, method in setup.methods.items() if method.compares_models]
    limit = setup.experiment.evaluation.choice_samples
    if choosing and limit is not None and most > limit:
        notes.append(
            f"{', '.join(choosing)}: models for the evaluation are chosen on {limit} training samples of each client, "
            "the same random ones in all rounds (evaluation.choice_samples)"
        )
    return notes


def describe_method(cls: "type[Method[Any]]", console: Console, reference: str) -> None:
    """Prints the header of the method's module (paper, equations, deviations) and a table of its options.

    reference: the name by which a config refers to the method.
    """
    module = importlib.import_module(cls.__module__)
    say((module.__doc__ or cls.__doc__ or "").strip(), console)
    say(f"\nPhases: {drawn(cls.phases)}", console)
    for phase, meaning in phase_meanings(cls.phases).items():
        say(f"    {phase:10} {meaning}", console)
    say(f"A client keeps: {_kept_in_words(cls)}", console)
    if kept := _kept_on_server(cls):
        say(f"The server keeps for clients: {kept}", console)
    options = cls.options()
    table = folding("option", "default", "range", "meaning, and source of the default")
    for option in options:
        meaning = f"{option['doc']} (default: {option['source']})" if option["source"] else option["doc"] or ""
        table.add_row(option["name"], escape(default_text(option["default"])), range_text(option), escape(meaning))
    console.print(table if options else "It has no options.")
    example = reference
    if options:
        example = f"{{{reference}: {{{options[0]['name']}: {default_text(options[0]['default'])}}}}}"
    say(f"In a config: methods: [{example}]", console)


def _kept_in_words(cls: "type[Method[Any]]") -> str:
    """Names and bytes of the parts that a client keeps between rounds, for a model of a known size, as text."""
    from cfl_ray.core.local_sgd import LocalSGD
    from cfl_ray.data.federation import DataShape
    from cfl_ray.models import recipe
    from cfl_ray.nn.network import Network
    from cfl_ray.setup.dry_rounds import DryRounds, traffic

    shape = DataShape((1, 28, 28), 10)
    spec = Network(recipe("mlp", {}, shape.input, shape.num_classes), shape.input).spec
    kept = traffic(DryRounds(cls(), 8, 8, LocalSGD(), spec, shape)).kept
    parts = [f"{name} {4 * floats:,} bytes" for name, floats in kept.items()]
    of = f" (mlp on 28x28, 10 classes: {4 * spec.size:,} bytes, with the default options)"
    return ", ".join(parts) + of if parts else "nothing"


def _kept_on_server(cls: "type[Method[Any]]") -> str:
    """Models and pairs that the server keeps for single clients, as text; empty: none."""
    kept = cls.state_type.of_each_client
    parts = [f"{kept} of each that has taken part"] if kept else []
    if cls.compares != "none":
        of = {"cohort": "of a cohort", "reachable": "reachable when it clusters", "participants": "that took part"}
        parts.append(f"{cls.pair_bytes} bytes for each pair of clients {of[cls.compares]}, while it compares them")
    return ", ".join(parts)


def default_text(value: object) -> str:
    """Returns a default as it is written in YAML; the `repr` of an object that YAML cannot express."""
    value = list(value) if isinstance(value, tuple) else value
    return as_yaml(value) if value is None or isinstance(value, str | int | float | list | dict) else repr(value)


def range_text(option: Mapping[str, Any]) -> str:
    """Returns the valid values of an option: its choices or its limits; empty without either."""
    if option["choices"]:
        return " | ".join(map(str, option["choices"]))
    low, high = option["low"], option["high"]
    if low is not None and high is not None:
        return f"{low:g} .. {high:g}"
    if low is not None:
        return f">= {low:g}"
    return "" if high is None else f"<= {high:g}"


def show_differences(experiment: "Experiment", console: Console) -> None:
    """Prints a table of the keys whose values are not the defaults."""
    from cfl_ray.config import Experiment
    from cfl_ray.config.protocol import compared_with_protocol

    ours, defaults = leaves_of(experiment.to_dict()), leaves_of(Experiment().to_dict())
    protocol = {key: theirs for key, _, theirs in compared_with_protocol(experiment.to_dict()) if key in ours}
    heading = "settings that differ from the defaults" + (", and those of the protocol" if protocol else "")
    table = folding("key", "value", "default", *([experiment.protocol] if experiment.protocol else []), title=heading)
    for key, value in ours.items():
        if key not in defaults or value != defaults[key] or key in protocol:
            row = [redact(as_yaml(value)), as_yaml(defaults[key]) if key in defaults else ""]
            row += [as_yaml(protocol[key]) if key in protocol else ""] if experiment.protocol else []
            table.add_row(*map(escape, [key, *row]))
    console.print(table if table.rows else "All settings have their defaults.")
    say("all settings: cfl-ray check --yaml; their meaning: cfl-ray config", console)


def folding(*headings: str, title: str | None = None) -> Table:
    """Returns a table of texts that wrap and are not cut off."""
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def indented(console: Console, text: Text, columns: int) -> None:
    """Prints a text so many columns to the right."""
    console.print(Padding(text, (0, 0, 0, columns), expand=False))


def show_status(status: "RunStatus", console: Console) -> None:
    """Prints a row for each known value of a run's status."""
    methods = [f"{label} {progress}" for label, progress in status.methods.items()]
    if status.waiting:
        methods.append(f"{status.waiting} waiting")
    step = f"({status.step})" if status.step else None
    metrics = {name: _format(name, value) for name, value in status.metrics.items()}
    nodes = None if status.nodes is None else counted(status.nodes, "node")
    left = "" if status.seconds_left is None else f", about {duration(status.seconds_left)} left for this method"
    age = "" if status.fault_age is None else f"{duration(status.fault_age)} ago: "
    rows = {
        "methods": ", ".join(methods),
        "current method" if status.state == "live" else "last method": " ".join(filter(None, [status.method, step])),
        "round": f"{status.round} of {status.rounds}" if status.method else None,
        status.score: f"{metrics[status.score]} after round {status.evaluated}" if metrics else None,
        "best round": None if status.best_round is None else f"{status.best_round}, whose models are kept",
        "P-local": metrics.get(f"{status.score}_local"),
        "clusters": metrics.get("num_clusters"),
        "epsilon": metrics.get("epsilon"),
        "phase": status.phase,
        "last event": status.last_event,
        "hosts": None if status.hosts is None else f"{status.hosts} on {nodes}, {status.hosts_starting} starting",
        "clients online": None if status.clients_online is None else f"{status.clients_online} of {status.clients}",
        "seconds per round": None if status.seconds_per_round is None else f"{status.seconds_per_round:.1f}{left}",
        "last fault": None if status.last_fault is None else age + status.last_fault,
        "rejected updates": ", ".join(
            f"{label} {count}" + (f" of {status.updates[label]}" if label in status.updates else "")
            for label, count in status.rejected.items()
        ),
        "ended early": "; ".join(f"{label} {why}" for label, why in status.early.items()),
        "diverged": "; ".join(f"{label}: {why}" for label, why in status.diverged.items()),
        "pending requests": "\n".join(status.pending),
        "driver": status.driver,
        "resume with": status.next,
    }
    _show_rows(f"{status.experiment}: {status.state}", rows, console)


def _show_rows(title: str, rows: Mapping[str, str | None], console: Console) -> None:
    table = Table(title=title, show_header=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        if value:
            table.add_row(name, escape(redact(value)))
    console.print(table)


def show_study_status(status: "StudyStatus", console: Console) -> None:
    """Prints a row for each known value of a study's status."""
    rows = {
        "runs": f"{status.finished} of {status.runs} finished"
        + (f", {status.pruned} ended early by sweep.halving" if status.pruned else "")
        + f", {status.left} left",
        "at work": "\n".join(status.live),
        "stopped": "\n".join(status.stopped),
        "failed": "\n".join(f"{name}: {reason}" for name, reason in status.failed.items()),
        "go on with": status.next,
    }
    _show_rows(f"study {status.study}: {status.state}", rows, console)
