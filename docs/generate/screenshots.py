"""Pictures of real runs: `python docs/generate/screenshots.py FOLDER` runs what FOLDER lacks, and draws them.

They are MLflow's page of a metric, the report, and the figure of accuracy by traffic. It needs Chromium,
and Pillow, which Matplotlib brings.
"""

import base64
import io
import json
import sys
import time
import unittest.mock
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlencode

from PIL import Image

from cfl_ray import load, load_run, simulate
from cfl_ray.report import figures
from cfl_ray.results.reporting import write_report
from cfl_ray.tracking.mlflow_tracker import Destination

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from browser import Browser  # noqa: E402  of the tests

from jobs.chaos.mlflow_server import MlflowServer  # noqa: E402

SIX = "methods=[fedavg,ditto,ifca,fesem,fl_hc,stocfl]"
SEEDS = 3  # of the six methods
SHOWN = (  # figures of the report in its picture, besides the table
    "Accuracy, P-server: the model that the server gives next",
    "Accuracy, P-local: the model that a client holds",
    "ifca: sizes of its clusters (seed 0)",
    "ifca: cluster of each client by round (seed 0)",
    "fl_hc: distance of the clients, ordered by cluster (round 5, seed 0)",
    "fl_hc: signatures of the clients (round 5, seed 0)",
)
DPI = 150  # of the figure
COLOURS = 256  # of a picture of a page
SETTLED_SECONDS = 3.0  # until a page has moved its parts to their places


def missing_runs(folder: Path) -> None:
    """Makes the runs that the folder lacks."""
    out = f"output={folder}"
    if not (folder / "digits").exists():
        simulate(load(None, [out]), folder / "digits")
    for seed in range(SEEDS):
        if not (place := folder / f"six-{seed}").exists():
            simulate(load(None, [out, "rounds=30", "evaluation.tuned_epochs=1", SIX, f"seed={seed}"]), place)


def optimised(picture: bytes, file: Path) -> None:
    """Writes a PNG with a palette."""
    Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(file, optimize=True)


def shot(browser: Browser, x: float, y: float, width: float, height: float) -> bytes:
    """A part of the page as PNG."""
    clip = {"x": x, "y": y, "width": width, "height": height, "scale": 1}
    return base64.b64decode(browser.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"])


def opened(browser: Browser, url: str, width: int, height: int) -> None:
    """Opens a page of MLflow without its assistant, in a window of this size."""
    browser.visit(url)
    browser.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
    browser.wait("document.body.innerText.includes('Settings')")
    time.sleep(SETTLED_SECONDS)
    browser.run("document.querySelector('button[aria-label=Close]')?.click()")  # not on every page


def metric_page(browser: Browser, server: str, run_dir: Path) -> None:
    """The accuracy of the methods by round, without MLflow's navigation."""
    of_methods = [Destination.read(run_dir / method) for method in load_run(run_dir).methods]
    runs, experiments = [one.run_id for one in of_methods], [of_methods[0].experiment_id]
    query = {"runs": runs, "metric": "accuracy", "experiments": experiments, "plot_metric_keys": ["accuracy"]}
    query |= {"plot_layout": {}, "deselected_curves": [], "last_linear_y_axis_range": []}
    words = {name: json.dumps(value) for name, value in query.items()} | {"x_axis": "step", "y_axis_scale": "linear"}
    words |= {"line_smoothness": "1", "show_point": "false"}
    opened(browser, f"{server}/#/metric?{urlencode(words)}", 1306, 900)
    browser.wait(f"document.body.innerText.split(' (accuracy)').length > {len(runs)}")
    browser.run("document.head.insertAdjacentHTML('beforeend', '<style>.modebar { display: none }</style>')")
    title = "[...document.querySelectorAll('h1, h2')].find(one => one.innerText === 'accuracy')"
    time.sleep(SETTLED_SECONDS)
    optimised(
        shot(browser, browser.run(f"{title}.getBoundingClientRect().x") - 16, 8, 1100, 477), IMAGES / "mlflow.png"
    )


def report(browser: Browser, run_dirs: Sequence[Path]) -> None:
    """The table of the report of several seeds, and some of its figures."""
    with TemporaryDirectory() as folder:
        browser.open(write_report(run_dirs, Path(folder) / "report.html"), width=1300)
        browser.run(f"""(shown => {{
            document.querySelectorAll('header, footer').forEach(one => one.remove())
            for (const one of document.querySelectorAll('figure'))
                if (!shown.includes(one.querySelector('h4').textContent)) one.remove()
            for (const one of document.querySelectorAll('.figures'))
                if (!one.children.length) {{ one.previousElementSibling.remove(); one.remove() }}
        }})({json.dumps(SHOWN)})""")
        assert browser.run("document.querySelectorAll('figure').length") == len(SHOWN)
        time.sleep(SETTLED_SECONDS)
        height = browser.run("document.body.scrollHeight")
        optimised(shot(browser, 0, 0, 1300, height), IMAGES / "report.png")


def main(folder: Path) -> None:
    """Draws all pictures. folder: of the runs."""
    missing_runs(folder)
    digits = folder / "digits"
    with TemporaryDirectory() as drawn, unittest.mock.patch.object(figures, "DPI", DPI):
        records = {label: result.records for label, result in load_run(digits).methods.items()}
        figures.write_figures(drawn, records)
        optimised((Path(drawn) / "accuracy_by_mbit.png").read_bytes(), IMAGES / "accuracy_by_mbit.png")
    server = MlflowServer(folder / "mlflow.db")
    server.start()
    try:
        with TemporaryDirectory() as profile, Browser(Path(profile)) as browser:
            metric_page(browser, server.uri, digits)
            report(browser, [folder / f"six-{seed}" for seed in range(SEEDS)])
    finally:
        server.kill()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
