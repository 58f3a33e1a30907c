"""`run`, `simulate`, `resume` and `run_study` in a notebook: the progress of the command line as plain lines.

`cfl_ray` exports these in place of the functions that they wrap if it is imported by a notebook's kernel.
"""

import sys
from collections.abc import Callable
from functools import wraps
from inspect import signature
from pathlib import Path
from typing import Any

from rich.console import Console

from cfl_ray import config
from cfl_ray.cli.progress import Display
from cfl_ray.cli.study_progress import StudyDisplay
from cfl_ray.lifecycle import launch
from cfl_ray.results.results import Results
from cfl_ray.results.trust import load_record
from cfl_ray.study import run as study_run
from cfl_ray.study.run import StudyResults

_WIDTH = 120  # characters of a line
_LEAST = 10.0  # seconds from a line to the next


def _console() -> Console:
    """Plain text on the output of the present cell."""
    return Console(file=sys.stdout, force_terminal=False, force_jupyter=False, width=_WIDTH)


def _shown(function: Callable[..., Results]) -> Callable[..., Results]:
    """The function with a `Display`, unless it is given a watcher."""

    @wraps(function)
    def with_display(*arguments: Any, **options: Any) -> Results:
        given = signature(function).bind(*arguments, **options).arguments
        if given.get("watcher") is not None:
            return function(*arguments, **options)
        experiment = given.get("experiment")
        if experiment is None and function is launch.resume:
            experiment = load_record(Path(given["run_dir"]), given.get("trust", False))
        experiment = experiment or config.load()
        rounds = getattr(experiment, "rounds", 1)  # other objects are refused with advice
        with Display(_console(), rounds, _LEAST) as display:
            results = function(**given | {"watcher": display})
        if display.experiment is not None:  # it has started
            display.show_table(results)
        return results

    return with_display


@wraps(study_run.run_study)
def run_study(*arguments: Any, **options: Any) -> StudyResults:
    """`run_study` with a `StudyDisplay`, unless it is given a watcher."""
    given = signature(study_run.run_study).bind(*arguments, **options).arguments
    if given.get("watcher") is not None:
        return study_run.run_study(*arguments, **options)
    with StudyDisplay(_console()) as display:
        results = study_run.run_study(**given | {"watcher": display})
    display.finish(results)
    return results


run, simulate, resume = (_shown(function) for function in (launch.run, launch.simulate, launch.resume))
