"""The terminal of a real run: `python docs/generate/terminal.py RUN_DIR` runs the built-in example and draws it."""

import re
import sys
from io import StringIO
from pathlib import Path

from rich.console import CONSOLE_SVG_FORMAT, Console

from cfl_ray import load, run
from cfl_ray.cli.printed_tables import comparison
from cfl_ray.cli.progress import Display

IMAGE = Path(__file__).parents[1] / "images" / "terminal.svg"
WIDTH = 108  # columns
WITHOUT_FONTS = re.sub(
    r"@font-face \{\{.*?\}\}|<!--.*?-->", "", CONSOLE_SVG_FORMAT, flags=re.S
)  # they would be fetched


def main(run_dir: str) -> None:
    """Runs the built-in example and writes its bars and its table, as they stand at the end."""
    experiment = load()
    screen = Console(file=StringIO(), force_terminal=True, width=WIDTH, color_system="truecolor")
    with Display(screen, experiment.rounds) as display:
        results = run(experiment, run_dir, watcher=display)
    picture = Console(file=StringIO(), record=True, force_terminal=True, width=WIDTH, color_system="truecolor")
    picture.print("$ cfl-ray run")
    picture.print(display.progress.get_renderable())
    picture.print(comparison(results))
    IMAGE.write_text(picture.export_svg(title="cfl-ray run", code_format=WITHOUT_FONTS))


if __name__ == "__main__":
    main(sys.argv[1])
