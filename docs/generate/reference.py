"""Reference pages made from the code: configuration keys, commands, methods, public names, citation."""

import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import typer
import yaml
from typer.cli import get_docs_for_click

import cfl_ray
from cfl_ray.cli.commands import app
from cfl_ray.cli.printed_tables import default_text, range_text
from cfl_ray.config import Experiment, keys
from cfl_ray.config.study import Study
from cfl_ray.config.sweep import RangeConfig
from cfl_ray.core.events import drawn, phase_meanings
from cfl_ray.core.method import Method
from cfl_ray.methods import REGISTRY

API = {  # heading -> names; a name without a dot is a public one of cfl_ray
    "Running an experiment": ["Experiment", "load", "run", "simulate", "resume", "load_run", "compare_runs"],
    "Studies": ["Study", "load_study", "run_study", "cfl_ray.study.run.StudyResults"],
    "Results": [
        "cfl_ray.results.results.Results",
        "cfl_ray.results.results.MethodResult",
        "cfl_ray.core.reported.Diagnostic",
        "cfl_ray.results.trained.TrainedMethod",
    ],
    "Data": ["Federation", "federation_from_arrays", "federation_from_dataset"],
    "Writing a method": ["Method", "option", "State", "Serving", "cfl_ray.core.method.Start"],
    "What clients learn": ["Task", "Metric"],
    "Asking clients": [
        "cfl_ray.core.clients.Clients",
        "cfl_ray.core.updates.Updates",
        "cfl_ray.core.updates.MixtureUpdates",
        "LocalTraining",
        "ClientProgram",
        "Mixture",
        "Proximal",
        "ClientState",
        "UpdateFeatures",
        "cluster_weights",
        "cfl_ray.core.params.ParamSpec",
        "cfl_ray.core.rng.Draws",
    ],
    "Errors": ["UserError", "ConfigError"],
}
_OPTIONS = {  # of mkdocstrings
    "Experiment": "members: [to_dict, to_yaml]",  # the other members are keys on other pages
    "Study": "members: [to_yaml]",
    "cfl_ray.core.clients.Clients": "inherited_members: true",  # its fields
}


def config_page() -> str:
    """Returns a page with every key of an experiment."""
    lines = [
        "# Configuration keys",
        "",
        "Every key of an experiment, with its default and the values that it takes. Units are part of the meaning.",
        "Unknown keys and values out of range are errors. `cfl-ray config KEY` shows the same in the terminal;",
        "`cfl-ray check` shows what an experiment sets. Options of methods are on the pages of the",
        "[methods](methods/index.md).",
        "",
    ]
    return "\n".join([*lines, *_sections(keys.sections(Experiment))])


def study_page() -> str:
    """Returns a page with every key of a study."""
    lines = [
        "# Keys of a study",
        "",
        "Every key of the file that `cfl-ray compare` and `cfl-ray sweep` run ([studies](../studies.md)). Unknown keys",
        "and values out of range are errors. Those of `experiment` and `settings` are on [another page](config.md).",
        "",
    ]
    of_range = keys.sections(RangeConfig, "range", "A range of `sweep.parameters`, from which a number is drawn.")
    return "\n".join([*lines, *_sections(keys.sections(Study)), *_sections(of_range)])


def _sections(sections: Iterable[keys.KeySection]) -> list[str]:
    """Returns the lines of a page about keys."""
    lines: list[str] = []
    for section in sections:
        if not section.keys:
            continue
        heading = f"{section.name} {{ #{_anchor(section.name)} }}" if section.name else "Top level"
        lines += [f"## {heading}", "", _escaped(section.meaning), ""]
        for key in section.keys:
            default = "required" if key.default is None else f"default `{key.default}`"
            lines += [f"### `{key.name}` {{ #{_anchor(key.name)} }}", "", _escaped(key.meaning), ""]
            lines += [f"{default}; {_escaped(key.values)}", "{ .values }", ""]
    return lines


def key_anchors() -> set[str]:
    """Returns the anchors of that page: names of sections and keys."""
    return {
        _anchor(one)
        for section in keys.sections(Experiment)
        for one in (section.name, *(key.name for key in section.keys))
    }


def _anchor(name: str) -> str:
    return name.replace("[]", "")


def commands_page() -> str:
    """Returns a page with every command and its arguments."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=click.Context(command), name="cfl-ray", title="Command line")
    return text.replace(
        "# Command line\n", "# Command line\n\nExamples of every command are in [Commands](../cli.md).\n", 1
    )


def method_pages() -> dict[str, str]:
    """Returns a page for each published method, and their index."""
    pages = {f"reference/methods/{name}.md": _method_page(cls) for name, cls in REGISTRY.items()}
    rows = "\n".join(
        f"| [{_title(cls)}]({name}.md) | `{name}` | {_cell(cls.summary())} |" for name, cls in sorted(REGISTRY.items())
    )
    pages["reference/methods/index.md"] = (
        "# Methods\n\n"
        "One page per published method: its paper, the equations that are implemented, where the implementation\n"
        "departs from the paper, and its options. In an experiment a method is a name or a name with options:\n"
        "`methods: [fedavg, {ifca: {num_clusters: 4}}]`. [Your own method](../../extend/method.md) shows how to add\n"
        "one.\n\n"
        f"| method | name in the config | |\n|---|---|---|\n{rows}\n"
    )
    return pages


def _header(cls: type[Method[Any]]) -> str:
    return inspect.getdoc(inspect.getmodule(cls)) or ""


def _title(cls: type[Method[Any]]) -> str:
    """Returns the method's name as its paper writes it."""
    return _header(cls).partition(":")[0]


def _method_page(cls: type[Method[Any]]) -> str:
    description, _, deviations = _header(cls).partition("Deviations: ")
    rows = [
        f"| `{one['name']}` | `{default_text(one['default'])}` | {_cell(range_text(one) or one['type'])} | "
        f"{_cell(_meaning(one))} |"
        for one in cls.options()
    ]
    options = "\n".join(
        ["| option | default | range | meaning, and source of the default |", "|---|---|---|---|", *rows]
    )
    averaging = (
        f"It takes no other `aggregation` than the mean: {_escaped(cls.only_mean)}.\n\n" if cls.only_mean else ""
    )
    return (
        f"# {_title(cls)}\n\n*{_escaped(cls.summary())}*\n\n"
        f'```bash\ncfl-ray run "methods=[fedavg, {cls.name}]"\n```\n\n'
        f"## Paper and equations\n\n{_prose(description)}\n\n"
        f"## Deviations from the paper\n\n{_prose(deviations[:1].upper() + deviations[1:])}\n\n"
        f"## Phases\n\n`{drawn(cls.phases)}`: {_phases(cls)}. More: "
        f"[phases and events](../../metrics.md#phases-and-events).\n\n"
        f"## Options\n\n{averaging}{options if rows else 'It has no options.'}\n"
    )


def _phases(cls: type[Method[Any]]) -> str:
    return "; ".join(f"`{phase}`, {meaning}" for phase, meaning in phase_meanings(cls.phases).items())


def _meaning(option: dict[str, Any]) -> str:
    return f"{option['doc']} (default: {option['source']})" if option["source"] else option["doc"] or ""


def _prose(text: str) -> str:
    """Returns the text of a docstring as Markdown: indented lines are equations and stay as they are."""
    blocks = re.split(r"\n\s*\n", text.strip("\n"))
    return "\n\n".join(_block(block) for block in blocks)


def _block(block: str) -> str:
    if block.startswith("    "):
        return "```text\n" + "\n".join(line.removeprefix("    ") for line in block.splitlines()) + "\n```"
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", _escaped(block))


def _escaped(text: str) -> str:
    """Returns text in which nothing but code between backticks is markup."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*_\[\]{}])", r"\\\1", part).replace("<", "&lt;") for part in parts
    )


def _cell(text: str) -> str:
    return _escaped(text).replace("|", "\\|")


def api_page() -> str:
    """Returns a page with every public name, for mkdocstrings to fill in. Raises ValueError for a forgotten one."""
    listed = [name for names in API.values() for name in names]
    if forgotten := set(cfl_ray.__all__) - set(listed):
        raise ValueError(f"docs/generate/reference.py: API has no heading for {sorted(forgotten)}")
    lines = [
        "# Python",
        "",
        "Names without a module are imported from `cfl_ray`; the others are returned by these or passed to them.",
        "Letters at the end of a name say the axes of an array ([glossary](../glossary.md#shape-suffixes)).",
        "",
    ]
    for heading, names in API.items():
        lines += [f"## {heading}", ""]
        for name in names:
            lines += [f"::: {name if '.' in name else f'cfl_ray.{name}'}"]
            if name in _OPTIONS:
                lines += ["    options:", f"      {_OPTIONS[name]}"]
            lines += [""]
    return "\n".join(lines)


def cite_page(file: Path) -> str:
    """Returns how to cite the software, from CITATION.cff."""
    said = yaml.safe_load(file.read_text())
    version = said["version"]
    authors = " and ".join(f"{{{one['name']}}}" for one in said["authors"])
    return (
        f"# How to cite\n\n{said['message']} The page of each [method](reference/methods/index.md) names its paper.\n\n"
        "```bibtex\n"
        f"@software{{cfl_ray,\n  title = {{{said['title']}}},\n  author = {authors},\n  version = {{{version}}},\n"
        f"  license = {{{said['license']}}}\n}}\n```\n\n"
        "In [Citation File Format](https://citation-file-format.github.io) it is the file `CITATION.cff`.\n"
    )
