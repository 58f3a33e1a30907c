"""The command line. Every command says what happened and what to do next; exit status 2 is bad input, 1 a failed run."""

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cfl_ray.core.errors import ConfigError, Interrupted, Stopped, UserError

IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray where this is the entry point of a submitted job
app = typer.Typer(
    help="Clustered federated learning: many clients with different data; find which belong together, train a model per group.",
    epilog="Begin with `cfl-ray run`: it needs no download and takes about a minute.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
out, err = Console(highlight=False), Console(stderr=True, highlight=False)

File = Annotated[Path | None, typer.Argument(help="Experiment as YAML; without it, the built-in example: rotated digits.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(help="Changes to it, e.g. rounds=50 local.lr=0.05 methods=[stocfl]", metavar="[SECTION.KEY=VALUE]...", show_default=False)]
RunDir = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run, as `cfl-ray run` printed it.", show_default=False)]


@app.command(short_help="Run an experiment.")
def run(
    file: File = None,
    overrides: Overrides = None,
    run_dir: Annotated[Path | None, typer.Option(help="Where files go; default: a new folder below `output`.", show_default=False)] = None,
    in_process: Annotated[bool, typer.Option("--in-process", help="Without Ray, in this process: the same numbers, for debugging.")] = False,
    replay: Annotated[Path | None, typer.Option(help="Another run of this config: who joined and left it while it was live does so here.", show_default=False)] = None,
) -> None:
    """Run an experiment: every method, live progress, one table at the end."""
    from cfl_ray.display import Display
    from cfl_ray.runtime import launch

    experiment = _load(file, overrides)
    with Display(out, experiment.rounds) as display:
        if in_process:
            results = launch.simulate(experiment, run_dir or launch.new_run_dir(experiment), watcher=display, replay=replay)
        else:
            results = launch.run(experiment, run_dir, watcher=display, replay=replay)
    display.finish(results)


@app.command(short_help="Go on with a run that was stopped.")
def resume(run_dir: RunDir) -> None:
    """Go on with a run that was stopped, from its last checkpoint."""
    from cfl_ray import config
    from cfl_ray.display import Display
    from cfl_ray.runtime import launch
    from cfl_ray.runtime.atwork import CONFIG

    rounds = config.load(run_dir / CONFIG).rounds if (run_dir / CONFIG).is_file() else 0
    with Display(out, rounds) as display:
        results = launch.resume(run_dir, watcher=display)
    display.finish(results)


@app.command(short_help="Where a run stands.")
def status(run_dir: RunDir, as_json: Annotated[bool, typer.Option("--json", help="For scripts.")] = False) -> None:
    """Where a run stands: round, accuracy, clusters, hosts, clients online, last fault; what to do where it is not live."""
    import dataclasses
    import json

    from cfl_ray.runtime import live

    found = live.status(run_dir)
    if as_json:
        out.print(json.dumps(dataclasses.asdict(found), indent=1), markup=False, soft_wrap=True)
        return
    from cfl_ray.tables import show_status

    show_status(found, out)


@app.command(short_help="Let clients join a live run.")
def join(
    run_dir: RunDir,
    clients: Annotated[list[str] | None, typer.Argument(help="Known clients that are offline: ids or ranges, e.g. 7 0-9.", metavar="[CLIENT]...", show_default=False)] = None,
    shards: Annotated[str | None, typer.Option(help="Shards of newcomers, as `cfl-ray prepare` wrote them: a path or URI.", show_default=False)] = None,
) -> None:
    """Let clients join a live run before its next round: all those in --shards as newcomers, or known ones that are offline."""
    from cfl_ray.core.ids import parse_ids
    from cfl_ray.runtime import live

    if (shards is None) == (not clients):
        raise ConfigError("join: name either clients that the federation knows or, with --shards, where the newcomers' shards are")
    if shards is not None:
        _say(live.ask(run_dir, "join_shards", shards if "://" in shards else os.path.abspath(Path(shards).expanduser())))
    else:
        _say(live.ask(run_dir, "join", parse_ids(clients)))


@app.command(short_help="Let clients leave a live run.")
def leave(
    run_dir: RunDir, clients: Annotated[list[str], typer.Argument(help="Ids or ranges, e.g. 7 0-9.", metavar="CLIENT...", show_default=False)]
) -> None:
    """Let clients leave a live run before its next round; what they own is dropped."""
    from cfl_ray.core.ids import parse_ids
    from cfl_ray.runtime import live

    _say(live.ask(run_dir, "leave", parse_ids(clients)))


@app.command(short_help="End a live run after this round.")
def stop(run_dir: RunDir) -> None:
    """End a live run after the round at work, which is saved; `cfl-ray resume` goes on with it."""
    from cfl_ray.runtime import live

    _say(live.ask(run_dir, "stop"))


@app.command(short_help="Validate an experiment and say what it will need.")
def check(file: File = None, overrides: Overrides = None) -> None:
    """Validate an experiment and print what it would be: resolved config, federation, memory and traffic. Runs nothing."""
    from cfl_ray import forecast
    from cfl_ray.tracking import redact

    experiment = _load(file, overrides)
    out.print(redact(experiment.to_yaml()), markup=False, soft_wrap=True)
    forecast.show(experiment, out)
    named = " ".join([str(file) if file else "", *(overrides or ())]).strip()
    out.print(redact(f"The config is valid. Run it with: cfl-ray run {named}".rstrip()), markup=False, soft_wrap=True)


@app.command(short_help="List the methods, or one's options.")
def methods(name: Annotated[str | None, typer.Argument(help="A method, for its options.", show_default=False)] = None) -> None:
    """List the methods, or the options of one with defaults and meaning."""
    from cfl_ray import tables
    from cfl_ray.methods import REGISTRY, find

    tables.list_methods(REGISTRY, out) if name is None else tables.describe_method(find(name), out)


@app.command(short_help="Write the shards of a federation.")
def prepare(file: File = None, overrides: Overrides = None) -> None:
    """Write the shards of an experiment's federation, or say that they are there already."""
    from cfl_ray.display import Display
    from cfl_ray.runtime.setup import prepare as prepare_setup

    experiment = _load(file, overrides)
    with Display(out, experiment.rounds) as display:
        federation = prepare_setup(experiment, display.preparing).federation
    where = getattr(federation, "uri", None)
    sizes = federation.size_N
    out.print(f"{federation.num_clients} clients, {sizes.min()} to {sizes.max()} training samples each, {federation.shape.num_classes} classes", markup=False)
    out.print(f"Shards: {where}" if where else "No shards: this federation is made while it is read.", markup=False, soft_wrap=True)
    out.print(f"Next: cfl-ray run {file or ''}".rstrip(), markup=False)


def _load(file: Path | None, overrides: list[str] | None):
    """The experiment; an argument with `=` and no such file is an override of the built-in example."""
    from cfl_ray import config
    from cfl_ray.methods import resolve

    changes = list(overrides or ())
    if file is not None and "=" in str(file) and not file.exists():
        file, changes = None, [str(file), *changes]
    experiment = config.load(file, changes)
    resolve(experiment.methods)
    if IN_JOB in os.environ and not Path(experiment.output).is_absolute():  # a job's working directory is a copy that goes with it
        experiment = experiment.model_copy(update={"output": str(Path.home() / experiment.output)})
    _deliver_earlier_results(experiment)
    return experiment


def _deliver_earlier_results(experiment) -> None:
    from cfl_ray.tracking import deliver_pending, resolve_uri

    if experiment.tracking.enabled:
        uri = resolve_uri(experiment.tracking, experiment.output)
        for done in deliver_pending(experiment.output, uri, warn=lambda text: err.print(text, markup=False, soft_wrap=True)):
            out.print(f"Delivered {done.rounds} rounds of {done.run_dir} to MLflow, which did not take them before.", markup=False, soft_wrap=True)


def _say(text: str) -> None:
    out.print(text, markup=False, soft_wrap=True)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line; errors become one message and an exit status."""
    try:
        app(arguments, standalone_mode=True)
    except Stopped as told:
        _say(str(told))
    except UserError as error:
        _fail(str(error), error.exit_status)
    except KeyboardInterrupt as error:  # perhaps a second one, on the way out of what the first one stopped
        _fail(_what_stopped(error) or "stopped", Interrupted.exit_status)
    except OSError as error:
        _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 1)
    except Exception as error:
        if os.environ.get("CFL_RAY_DEBUG"):
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        _fail(f"{type(error).__name__}: {error} ({Path(where.filename).name}, line {where.lineno}); set CFL_RAY_DEBUG=1 for the whole traceback", 1)


def _what_stopped(error: BaseException | None) -> str | None:
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return str(error) if error else None


def _fail(message: str, status: int) -> None:
    err.print(f"error: {message}", markup=False, soft_wrap=True, style="red")
    if status == Interrupted.exit_status and "ray" in sys.modules:  # at once: what is left of Ray goes with this process
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
