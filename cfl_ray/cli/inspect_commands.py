"""The commands that run nothing: `check`, of an experiment or a study, and `config`, `methods` and `list`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.text import Text

from cfl_ray.cli import inputs
from cfl_ray.cli.console import out, say
from cfl_ray.cli.run_commands import study_from
from cfl_ray.errors import ConfigError, command

if TYPE_CHECKING:  # the help text does not wait for torch
    from cfl_ray.study.study_plan import Selection


def check(
    file: inputs.File = None,
    overrides: inputs.Overrides = None,
    as_yaml: Annotated[
        bool, typer.Option("--yaml", help="Print only the whole resolved config, as a file for `cfl-ray run`.")
    ] = False,
    time_engines: Annotated[
        bool, typer.Option("--time-engines", help="Also measure each engine here; a run does not use the times.")
    ] = False,
    trust: inputs.Trust = False,
    settings: inputs.OnlySettings = None,
    methods: inputs.OnlyMethods = None,
    seeds: inputs.OnlySeeds = None,
) -> None:
    """Validate an experiment and print what differs from the defaults, sizes, expected memory and traffic.

    Trains nothing, and refuses what `cfl-ray run` refuses, except faults of your own shift or backend, which it does
    not call. It imports the Python files that the config names (file.py:Name), and tries the parts in them on random
    numbers. FILE may be a study: then all its runs are validated, or those that --setting, --method and --seed select,
    and sizes and traffic are printed for the first setting, and of the others what differs.
    """
    from cfl_ray.cli import printed_tables
    from cfl_ray.cli.estimate import estimate, show, show_engine_times
    from cfl_ray.config.study import is_study_file

    if file is not None and inputs.is_file(file) and is_study_file(file):
        from cfl_ray.study.study_plan import Selection

        if time_engines:
            raise ConfigError("--time-engines measures one run; give the experiment, not the study")
        _check_study(Path(file), overrides, Selection(settings or (), methods or (), seeds or ()), as_yaml, trust)
        return
    if settings or methods or seeds:
        raise ConfigError("--setting, --method and --seed select runs of a study; an experiment is one run")
    experiment = inputs.load_experiment(file, overrides, trust)
    estimated = estimate(experiment)
    if as_yaml:
        say(experiment.to_yaml(credentials=False).rstrip())
        return
    printed_tables.show_differences(experiment, out)
    show(estimated, out)
    if time_engines:
        show_engine_times(estimated, out)
    say(f"The config is valid. Run it with: {command('run', file, *(overrides or ()))}")


def _check_study(file: Path, overrides: list[str] | None, only: "Selection", as_yaml: bool, trust: bool) -> None:
    from cfl_ray.cli.estimate import estimate_study, show_study
    from cfl_ray.study.run import plan_study

    study = study_from(file, overrides, trust)
    runs, root = plan_study(study, only=only)
    estimated = estimate_study(runs)
    if as_yaml:
        say(study.to_yaml(credentials=False).rstrip())
        return
    show_study(estimated, study, len({run.seed for run in runs}), root, out)
    verb = "sweep" if study.sweep else "compare"
    say(f"The study is valid. Run it with: {command(verb, file, *only.options, *(overrides or ()))}")


def explain(
    key: Annotated[
        str | None,
        typer.Argument(
            help="A section or a key, e.g. local or local.lr; of a study: study, sweep, ...; default: all.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """List the keys of an experiment with their meaning, values and defaults: all, those of a section, or one.

    `study` lists the keys of a study.
    """
    from cfl_ray.cli.printed_tables import indented
    from cfl_ray.config import Experiment, keys
    from cfl_ray.config.study import Study

    of_study = key is not None and key.split(".")[0] in {"study", *Study.model_fields} - {*Experiment.model_fields}
    config, name = (Study, (key or "").removeprefix("study").lstrip(".")) if of_study else (Experiment, key)
    for section in keys.find(config, name) if name else keys.sections(config):
        out.print(Text.assemble((section.name or "top level", "bold"), f"  {section.meaning}"))
        for each in section.keys:
            default = f"  ({each.values}; required)" if each.default is None else f" = {each.default}  ({each.values})"
            indented(out, Text.assemble((each.name, "cyan"), default), 2)
            indented(out, Text(each.meaning), 6)


def methods(
    name: Annotated[str | None, typer.Argument(help="A method whose options are shown.", show_default=False)] = None,
) -> None:
    """List the methods, or the options of one method with their defaults and meaning."""
    from cfl_ray.cli import printed_tables
    from cfl_ray.methods import REGISTRY, find

    if name is not None:
        printed_tables.describe_method(find(name), out, name)
        return
    table = printed_tables.folding("name", "description")
    for label, cls in REGISTRY.items():
        table.add_row(label, cls.summary())
    out.print(table)
    say(
        "Options of a method: cfl-ray methods NAME. "
        "In a config: methods: [stocfl, {ifca: {num_clusters: 4}}, my_method.py:MyMethod]"
    )


def list_parts(
    kind: Annotated[
        str | None, typer.Argument(help="A kind of part, e.g. models; default: all kinds.", show_default=False)
    ] = None,
) -> None:
    """List the kinds of parts of an experiment; or the parts of one kind, with parameters and how to add your own."""
    from cfl_ray.cli.catalogue import KINDS, OTHER_NAMES
    from cfl_ray.cli.printed_tables import folding
    from cfl_ray.errors import did_you_mean

    if kind is None:
        table = folding("kind", "parts", "bring your own")
        for name, each in KINDS.items():
            table.add_row(name, escape(", ".join(each.registry.names())), escape(each.page))
        out.print(table)
        say("The parts of a kind with their parameters: cfl-ray list KIND")
        return
    if kind not in KINDS:
        near = f" (did you mean {OTHER_NAMES[kind]!r}?)" if kind in OTHER_NAMES else did_you_mean(kind, KINDS)
        raise ConfigError(f"unknown kind {kind!r}{near}")
    chosen, table = KINDS[kind], folding("name", "from", "description", "parameters and defaults")
    for part in chosen.parts():
        table.add_row(*map(escape, (part.name, part.origin, part.description, part.parameters or "none")))
    out.print(table)
    say(f"Your own: {chosen.own}")
    say(f"In a config: {chosen.example}")
    say(f"In an installed package: entry points of the group {chosen.registry.group}. More: {chosen.page}")
