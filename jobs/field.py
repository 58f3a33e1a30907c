"""The table of the field: every method in five kinds of heterogeneity, docs/field.md.

    python -m jobs.field                  runs what is left of benchmarks/field.yaml, then writes the page
    python -m jobs.field --at-once 1      on one core
    python -m jobs.field --write          writes the page of the runs that are finished

It writes docs/results/field.csv and field_clients.csv, and from them docs/field.md and the ranks of docs/choosing.md.
"""

import argparse
import datetime
import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.compare import machine
from cfl_ray.errors import UserError
from jobs.results import field, heterogeneity


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/field"), help="of the runs (default: runs/field)")
    parser.add_argument("--at-once", type=int, help="most parallel runs (default: as many as fit)")
    parser.add_argument("--write", action="store_true", help="run nothing")
    given = parser.parse_args(arguments)
    if not given.write:
        at_once = [] if given.at_once is None else [f"--at-once={given.at_once}"]
        command = [sys.executable, "-m", "cfl_ray", "compare", str(field.STUDY), f"--folder={given.folder}", *at_once]
        if status := subprocess.run(command).returncode:
            sys.exit(status)
    write(given.folder)


def write(folder: Path) -> None:
    """Writes the figures of the finished runs, and the pages that are made from them."""
    load = f"load average {os.getloadavg()[0]:.0f}"
    line = f"{machine()}; PyTorch {torch.__version__}; {load}; {datetime.date.today()}."
    field.write_figures(*field.figures(folder), line)
    for page, text in heterogeneity.pages().items():
        page.write_text(text)
        print(f"wrote {page}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(str(error))
