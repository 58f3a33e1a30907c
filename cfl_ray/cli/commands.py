"""The program `cfl-ray`: its commands and exit status.

Exit status: 0 success, 1 failed run, 2 invalid input, 3 a method diverged, 130 interrupted.
"""

import atexit
import gc
import io
import os
import sys
import traceback
from multiprocessing import active_children
from pathlib import Path
from typing import Annotated

import typer

import cfl_ray
from cfl_ray.cli import folder_commands, inspect_commands, result_commands, run_commands
from cfl_ray.cli.console import err, say
from cfl_ray.errors import Interrupted, RunStopped, UserError, says_where
from cfl_ray.errors.redaction import redact
from cfl_ray.plugins.calling import is_user_file, with_place
from cfl_ray.system.collection import skip_last_collections

# new objects until the garbage collector looks for cycles; with Python's 700 it takes a fifth of the time of imports
_OBJECTS = 50_000

app = typer.Typer(
    help="Clustered federated learning: groups clients with similar data and trains one model per group.",
    epilog="Start with `cfl-ray run`: it downloads nothing and takes about half a minute.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.command(short_help="Run an experiment.")(run_commands.run)
app.command(short_help="Resume a run or a study.")(run_commands.resume)
app.command(short_help="Show the progress of a run or a study.")(run_commands.status)
app.command(short_help="Let clients join a live run.")(run_commands.join)
app.command(short_help="Let clients leave a live run.")(run_commands.leave)
app.command(short_help="Stop a live run after its current round.")(run_commands.stop)
app.command(short_help="Validate an experiment and estimate its cost.")(inspect_commands.check)
app.command(name="config", short_help="List the keys of an experiment, or explain one.")(inspect_commands.explain)
app.command(short_help="List the methods, or the options of one.")(inspect_commands.methods)
app.command(name="list", short_help="List data sets, models, shifts, trackers ... with their parameters.")(
    inspect_commands.list_parts
)
app.command("compare", help=run_commands.COMPARE, short_help="Run a study: methods x settings x seeds.")(
    run_commands.launch
)
app.command(
    "sweep", help=run_commands.SWEEP, short_help="Run a study over values of any keys: grid, random or Optuna."
)(run_commands.launch)
app.command(short_help="Compare the methods of runs over seeds.")(result_commands.table)
app.command(short_help="Write the report of runs: one HTML page.")(result_commands.report)
app.command(short_help="Draw figures of runs for a paper: PDF or SVG.")(result_commands.figure)
app.command(short_help="Write a trained model to a file.")(result_commands.export)
app.command(short_help="Show what differs between two runs.")(folder_commands.diff)
app.command(short_help="Show the disk space of runs and shards.")(folder_commands.du)
app.command(short_help="Drop checkpoints and shards that no run needs.")(folder_commands.clean)
app.command(short_help="Write the shards of a federation.")(run_commands.prepare)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=lambda wanted: _version(wanted))
    ] = False,
) -> None:
    """Options of the program itself; its help text is that of `app`."""


def _version(wanted: bool) -> None:
    if wanted:
        say(f"cfl-ray {cfl_ray.__version__}")
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line. Every error becomes a message and an exit status."""
    gc.set_threshold(_OBJECTS)
    atexit.register(skip_last_collections)
    _open_standard_files()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # for characters that the terminal lacks, such as ±
    try:
        app(arguments, standalone_mode=True)
    except RunStopped as stopped:
        say(str(stopped))
    except UserError as error:
        _fail(str(error), error.exit_status)
    except KeyboardInterrupt as error:  # possibly a second Ctrl-C, while the first Ctrl-C ends the run
        _fail(_message_of_interruption(error) or "stopped", Interrupted.exit_status)
    except SystemExit as error:  # Typer's, ours, or that of a plugin, whose status would be taken for that of the run
        if (message := _message_of_interruption(error)) is not None:
            _fail(message, Interrupted.exit_status)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        if is_user_file(Path(frame.filename)):
            _fail(f"SystemExit: {error} ({frame.filename}, line {frame.lineno}); a plugin cannot end the process", 1)
        raise
    except OSError as error:
        _fail(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}", 1)
    except Exception as error:
        if os.environ.get("CFL_RAY_DEBUG"):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = "" if says_where(error) else f"{Path(frame.filename).name}, line {frame.lineno}"
        _fail(f"{with_place(error, place)}; set CFL_RAY_DEBUG=1 for the whole traceback", 1)


def _open_standard_files() -> None:
    """Opens /dev/null in the place of a closed stdin, stdout or stderr, which the next socket would take."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))  # has the lowest number that is free


def _message_of_interruption(error: BaseException | None) -> str | None:
    """Returns the message of the Interrupted exception during which `error` was raised; None without it."""
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return str(error) if error else None


def _fail(message: str, status: int) -> None:
    err.print(redact(f"error: {message}"), markup=False, soft_wrap=True, style="red")
    if status == Interrupted.exit_status and ("ray" in sys.modules or active_children()):
        # Without the exit handlers, which may wait for processes; those of Ray and of a study end with this process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
