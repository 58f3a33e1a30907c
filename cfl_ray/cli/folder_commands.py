"""The commands for folders of runs: `diff` of two runs, `du` and `clean` for their disk space."""

from pathlib import Path
from typing import Annotated

import typer

from cfl_ray.cli.console import say
from cfl_ray.cli.inputs import place
from cfl_ray.errors import command, counted

Folder = Annotated[
    Path,
    typer.Argument(parser=place, metavar="[FOLDER]", help="A run, a study, or a folder above them.", show_default=True),
]
_LARGEST = 3  # other files that `du` names
_MB = 1e6


def diff(
    first: Annotated[Path, typer.Argument(parser=place, metavar="RUN", help="Run directory.", show_default=False)],
    second: Annotated[
        Path, typer.Argument(parser=place, metavar="RUN", help="Another run directory.", show_default=False)
    ],
) -> None:
    """Show what differs between two runs: config, code, data, versions and results. Imports no code of the runs."""
    from cfl_ray.results.difference import differences_of

    for section, lines in differences_of(first, second).items():
        say(f"{section}: {'equal' if not lines else ''}".rstrip())
        for line in lines:
            say("\n".join(f"  {part}" for part in line.splitlines()))


def du(folder: Folder = Path("runs")) -> None:
    """Show the disk space of runs and shards: records, checkpoints, logged models, copies of code."""
    from cfl_ray.results.disk_use import disk_use, other_files

    found = disk_use(folder)
    for use in sorted(found, key=lambda use: use.total, reverse=True):
        parts = sorted(((size / _MB, kind) for kind, size in use.bytes.items()), reverse=True)
        sizes = ", ".join(f"{kind} {size:.2f}" for size, kind in parts if size)
        say(f"{use.total / _MB:8.2f}  {_below(use.path, folder)}: {use.state}; {sizes}")
    others = other_files(folder, found)
    if others:
        largest = ", ".join(f"{_below(path, folder)} {size / _MB:.2f}" for path, size in others[:_LARGEST])
        say(f"{sum(size for _, size in others) / _MB:8.2f}  other files: {largest}{', ...' * (len(others) > _LARGEST)}")
    total = sum([use.total for use in found] + [size for _, size in others]) / _MB
    say(f"sizes in MB; {total:.2f} MB in all; what can be dropped: {command('clean', folder)}")


def clean(
    folder: Folder = Path("runs"),
    models: Annotated[
        bool, typer.Option("--models", help="Also the models of finished runs; their records are kept.")
    ] = False,
    figures: Annotated[
        bool,
        typer.Option("--figures", help="Also figures and reports of finished runs; cfl-ray report writes a new one."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Drop it; without this, it is only listed.")] = False,
) -> None:
    """List what no run needs, or drop it (--yes): earlier checkpoints of finished runs, and shards of no run here.

    Records are kept, models and figures of finished runs unless they are named, and everything of runs that are live
    or not finished. Shards are written again when a run needs them.
    """
    from cfl_ray.results.disk_use import droppable

    found = droppable(folder, models, figures)
    total = sum(each.bytes for each in found)
    for each in found:
        say(f"{_below(each.owner, folder)}: {each.what}, {each.bytes / _MB:.2f} MB")
        if yes:
            each.drop()
    if yes or not found:
        say(f"dropped: {total / _MB:.2f} MB" if found else "nothing can be dropped")
        return
    again = command("clean", folder, *["--models"] * models, *["--figures"] * figures, "--yes")
    say(f"{counted(len(found), 'part')}, {total / _MB:.2f} MB; nothing was dropped yet: {again}")


def _below(path: Path, folder: Path) -> Path:
    return path.relative_to(folder.absolute()) if path != folder.absolute() else path
