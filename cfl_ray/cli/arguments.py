"""Arguments and options that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

STDOUT = Path("-")  # as the value of --output

File = Annotated[  # str: a Path would drop a slash of an override such as data.shards=s3://bucket/shards
    str | None,
    typer.Argument(help="Experiment as YAML; default: the built-in example, rotated digits.", show_default=False),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        help="Keys of the experiment to override, e.g. rounds=50 local.lr=0.05 methods=[stocfl]",
        metavar="[SECTION.KEY=VALUE]...",
        show_default=False,
    ),
]
RunDir = Annotated[
    Path, typer.Argument(metavar="RUN", help="Run directory, as `cfl-ray run` printed it.", show_default=False)
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Use the Python files that the run names (resume: also its cluster and MLflow server), although you did "
        "not start it on this machine.",
    ),
]
InProcess = Annotated[
    bool,
    typer.Option("--in-process", help="Run in this process without Ray, for debugging; the results are the same."),
]
OnlySettings = Annotated[list[str] | None, typer.Option("--setting", help="Only this setting; can be repeated.")]
OnlyMethods = Annotated[list[str] | None, typer.Option("--method", help="Only this method; can be repeated.")]
OnlySeeds = Annotated[list[int] | None, typer.Option("--seed", help="Only this seed; can be repeated.")]
