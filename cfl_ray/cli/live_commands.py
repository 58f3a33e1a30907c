"""The commands for a live run: `status`, `join`, `leave` and `stop`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from cfl_ray.cli.console import out, say
from cfl_ray.cli.inputs import RunDir
from cfl_ray.errors import ConfigError


def status(
    run_dir: RunDir, as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")] = False
) -> None:
    """Show the progress of a run: round, accuracy, clusters, hosts, clients online and last fault.

    For a run that is not live it also shows the command that resumes it. RUN may be the folder of a study; then it
    shows how many of its runs are finished and left, which are live, and why others failed.
    """
    import dataclasses
    import json

    from cfl_ray.cli import live_client, tables
    from cfl_ray.run_directory import RunDirectory
    from cfl_ray.study.status import study_status

    status = study_status(run_dir) if RunDirectory(run_dir).is_study else live_client.status(run_dir)
    if as_json:
        values = json.dumps(dataclasses.asdict(status))  # JSON has no NaN: null
        say(json.dumps(json.loads(values, parse_constant=lambda constant: None), indent=1))
    elif isinstance(status, live_client.RunStatus):
        tables.show_status(status, out)
    else:
        tables.show_study_status(status, out)


def join(
    run_dir: RunDir,
    clients: Annotated[
        list[str] | None,
        typer.Argument(
            help="Known clients that are offline, as ids or ranges, e.g. 7 0-9.",
            metavar="[CLIENT]...",
            show_default=False,
        ),
    ] = None,
    shards: Annotated[
        str | None,
        typer.Option(help="Shards of newcomers, as `cfl-ray prepare` wrote them: a path or URI.", show_default=False),
    ] = None,
) -> None:
    """Let clients join a live run before its next round: known clients that are offline, or newcomers (--shards)."""
    from cfl_ray.cli import live_client
    from cfl_ray.config.client_ids import parse_ids

    if (shards is None) == (not clients):
        raise ConfigError(
            "join: name either clients of the federation or, with --shards, the location of the newcomers' shards"
        )
    if shards is None:
        say(live_client.ask(run_dir, "join", parse_ids(clients or ())))
        return
    location = shards if "://" in shards else os.path.abspath(Path(shards).expanduser())
    say(live_client.ask(run_dir, "join_shards", location))


def leave(
    run_dir: RunDir,
    clients: Annotated[
        list[str], typer.Argument(help="Ids or ranges, e.g. 7 0-9.", metavar="CLIENT...", show_default=False)
    ],
) -> None:
    """Let clients leave a live run before its next round; their client state is dropped."""
    from cfl_ray.cli import live_client
    from cfl_ray.config.client_ids import parse_ids

    say(live_client.ask(run_dir, "leave", parse_ids(clients)))


def stop(run_dir: RunDir) -> None:
    """Stop a live run after its current round, which is saved; `cfl-ray resume` resumes it."""
    from cfl_ray.cli import live_client

    say(live_client.ask(run_dir, "stop"))
