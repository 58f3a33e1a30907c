"""What a person reads in one look: results side by side, methods and their options, where a run stands."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:  # the status of a run does not wait for torch
    from cfl_ray.core.method import Method
    from cfl_ray.runtime.live import Status
    from cfl_ray.runtime.results import Results

_COLUMNS = {"accuracy": "accuracy", "accuracy_local": "P-local", "ari": "ARI", "num_clusters": "clusters"}


def figures(metrics: Mapping[str, float]) -> str:
    """The few figures that a line has room for."""
    shown = {name: metrics[name] for name in ("accuracy", "num_clusters", "ari") if name in metrics}
    return "  ".join(f"{_COLUMNS[name]} {_number(name, value)}" for name, value in shown.items())


def comparison(results: "Results") -> Table:
    """One row per method."""
    table = Table(title="results after the last round")
    table.add_column("method")
    for heading in (*_COLUMNS.values(), "Mbit per client", "seconds"):
        table.add_column(heading, justify="right")
    for label, result in results.methods.items():
        final = result.final
        cells = [_number(name, final[name]) if name in final else "-" for name in _COLUMNS]
        table.add_row(label, *cells, f"{final['mbit_down'] + final['mbit_up']:.2f}", f"{result.seconds:.1f}")
    return table


def _number(name: str, value: float) -> str:
    return f"{value:.0f}" if name == "num_clusters" else f"{value:.3f}"


def list_methods(registry: "Mapping[str, type[Method]]", console: Console) -> None:
    """A table of names and one line each."""
    table = Table("name", "what it does")
    for name, cls in sorted(registry.items()):
        table.add_row(name, cls.summary())
    console.print(table)
    console.print("Options of one: cfl-ray methods NAME. Use: methods: [stocfl, {ifca: {num_clusters: 4}}, my_method.py:MyMethod]", markup=False, soft_wrap=True)


def describe_method(cls: "type[Method]", console: Console) -> None:
    """The paper, the equations, and every option."""
    module = __import__(cls.__module__, fromlist=["__doc__"])
    console.print((module.__doc__ or cls.__doc__ or "").strip(), markup=False, soft_wrap=True)
    table = Table("option", "default", "range", "meaning, and where the default comes from")
    for item in cls.options():
        default = "null" if item["default"] is None else str(item["default"]).lower() if isinstance(item["default"], bool) else str(item["default"])
        meaning = escape(f"{item['doc']} (default: {item['source']})" if item["source"] else item["doc"] or "")
        table.add_row(item["name"], default, _range(item), meaning)
    console.print(table if cls.options() else "It has no options.")
    chosen = next((f"{{{cls.name}: {{{item['name']}: {item['default']}}}}}" for item in cls.options()), cls.name)
    console.print(f"Use: methods: [{chosen}]", markup=False, soft_wrap=True)


def _range(item: dict) -> str:
    if item["choices"]:
        return " | ".join(map(str, item["choices"]))
    low, high = item["low"], item["high"]
    if low is None and high is None:
        return ""
    return f">= {low:g}" if high is None else f"<= {high:g}" if low is None else f"{low:g} .. {high:g}"


def show_status(status: "Status", console: Console) -> None:
    """One row per fact that is known."""
    table = Table(show_header=False, title=f"{status.experiment}: {status.state}")
    metrics, hosts = status.metrics, status.hosts
    left = "" if status.seconds_left is None else f", about {_duration(status.seconds_left)} left for this method"
    rows = {
        "methods": ", ".join([*(f"{label} {how}" for label, how in status.methods.items()), *([f"{status.waiting} waiting"] if status.waiting else [])]),
        "at work" if status.state == "live" else "last at work": " ".join(filter(None, [status.method, status.phase and f"({status.phase})"])),
        "round": f"{status.round} of {status.rounds}" if status.method else None,
        "accuracy": f"{metrics['accuracy']:.3f} after round {status.evaluated}" if metrics else None,
        "P-local": _number("accuracy_local", metrics["accuracy_local"]) if "accuracy_local" in metrics else None,
        "clusters": _number("num_clusters", metrics["num_clusters"]) if "num_clusters" in metrics else None,
        "hosts": None if hosts is None else f"{hosts} on {status.nodes} node{'s' * (status.nodes != 1)}, {status.hosts_starting} starting",
        "clients online": None if status.clients_online is None else f"{status.clients_online} of {status.clients}",
        "seconds per round": None if status.seconds_per_round is None else f"{status.seconds_per_round:.1f}{left}",
        "last fault": None if status.last_fault is None else f"{_duration(status.fault_age)} ago: {status.last_fault}",
        "to come": "\n".join(status.pending),
        "driver": status.driver,
        "go on with": status.next,
    }
    for name, value in rows.items():
        if value:
            table.add_row(name, escape(value))
    console.print(table)


def _duration(seconds: float) -> str:
    """Seconds, minutes or hours, whichever is readable."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
