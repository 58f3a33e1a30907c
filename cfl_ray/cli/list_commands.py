"""The commands `config`, `methods` and `list`, which describe keys, methods and parts."""

from typing import Annotated

import typer

from cfl_ray.cli.console import out
from cfl_ray.errors import ConfigError


def explain(
    key: Annotated[
        str | None,
        typer.Argument(help="A section or a key, e.g. local or local.lr; default: all.", show_default=False),
    ] = None,
) -> None:
    """List the keys of an experiment with their meaning, values and defaults: all, those of a section, or one."""
    from cfl_ray.cli.tables import show_keys
    from cfl_ray.config import keys

    show_keys(keys.find(key) if key else list(keys.sections()), out)


def methods(
    name: Annotated[str | None, typer.Argument(help="A method whose options are shown.", show_default=False)] = None,
) -> None:
    """List the methods, or the options of one method with their defaults and meaning."""
    from cfl_ray.cli import tables
    from cfl_ray.methods import REGISTRY, find

    if name is None:
        tables.list_methods(REGISTRY, out)
    else:
        tables.describe_method(find(name), out, name)


def list_parts(
    kind: Annotated[
        str | None, typer.Argument(help="A kind of part, e.g. models; default: all kinds.", show_default=False)
    ] = None,
) -> None:
    """List the kinds of parts of an experiment; or the parts of one kind, with parameters and how to add your own."""
    from cfl_ray.cli import tables
    from cfl_ray.cli.catalogue import KINDS, OTHER_NAMES
    from cfl_ray.errors import did_you_mean

    if kind is None:
        tables.list_kinds(KINDS, out)
    elif kind in KINDS:
        tables.list_parts(KINDS[kind], out)
    else:
        near = f" (did you mean {OTHER_NAMES[kind]!r}?)" if kind in OTHER_NAMES else did_you_mean(kind, KINDS)
        raise ConfigError(f"unknown kind {kind!r}{near}")
