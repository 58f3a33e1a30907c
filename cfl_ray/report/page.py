"""The report page: an HTML file that needs no network.

It contains Plotly's library, compressed. Its content security policy (CSP) allows only scripts whose hashes it names,
and no requests. Names and notes of users are escaped in the template, in the data of figures and in Plotly's labels.
"""

import base64
import hashlib
import itertools
import math
import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata, resources

import jinja2

from cfl_ray.report.against import against_figures
from cfl_ray.report.classes import class_figures
from cfl_ray.report.clusters import client_figures, cluster_figures, mixture_figures
from cfl_ray.report.curves import curves
from cfl_ray.report.drawing import PageFigure, as_json, tested_in_words, with_spread
from cfl_ray.report.matrices import matrix_figures
from cfl_ray.report.ranks import rank_diagram
from cfl_ray.report.report_data import Comparison, Report, ReportedExperiment
from cfl_ray.tracking.metric_titles import title_of
from cfl_ray.tracking.record import test_metric

TableCell = tuple[str, float | str]  # its text, and the value by which rows are sorted
_ROUGH = ("num_clusters", "rounds_to_target", "rounds_to_recover", "seconds")  # columns shown with a single decimal


@dataclass(frozen=True)
class TableHeading:
    """The heading of a column."""

    text: str
    note: str = ""  # shown on hovering
    number: bool = True


@dataclass(frozen=True)
class PlacedFigure:
    """A figure as data of the template."""

    key: str
    figure: PageFigure
    json: str
    legend: Sequence[int]  # number of letters of each entry


_RANK_HEADINGS = [
    TableHeading("method", number=False),
    TableHeading("mean rank"),
    TableHeading("within the critical difference of the best", number=False),
]
_PUBLISHED_HEADINGS = [
    *(TableHeading(text, number=False) for text in ("table", "setting", "method", "metric")),
    *(TableHeading(text) for text in ("ours", "seeds", "published", "difference")),
    TableHeading("note", number=False),
]


def render(report: Report) -> str:
    """The page as HTML."""
    numbers = itertools.count(1)  # of the figures on the page
    diagram = [] if report.ranks is None else [_placed(rank_diagram(report.ranks), next(numbers))]
    against = [_placed(figure, next(numbers)) for figure in against_figures(report.comparisons)]
    chapters = [(experiment, _parts(experiment, numbers)) for experiment in report.experiments]
    (library, packed_library), script, style = _library(), _text("report.js"), _text("report.css")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    return environment.from_string(_text("report.html")).render(
        report=report,
        headings=_table_headings(report),
        rows=_table_rows(report),
        rank_headings=_RANK_HEADINGS,
        ranks=_rank_rows(report),
        rank_diagram=diagram,
        against=against,
        published_headings=_PUBLISHED_HEADINGS,
        published=[_published_row(comparison) for comparison in report.comparisons],
        chapters=chapters,
        style=style,
        script=script,
        library=packed_library,
        hashes=" ".join(_hash(text) for text in (library, script)),
        version=metadata.version("cfl-ray"),
        plotly=metadata.version("plotly"),
    )


# ---- figures


def _placed(figure: PageFigure, number: int) -> PlacedFigure:
    """A figure prepared for the template, with its number on the page."""
    traces = [trace for trace in figure.plot["data"] if trace.get("showlegend", True)]
    names = [trace["name"] for trace in traces if "name" in trace]
    if len(names) < 2:  # a legend with a single entry is not shown
        figure.plot["layout"]["showlegend"] = False
        names = []
    # in a script element, "</" would end the JSON and "<!--" would make it a comment
    json = as_json(figure.plot).replace("<", "\\u003c")
    return PlacedFigure(f"figure-{number}", figure, json, [len(name) for name in names])


def _parts(experiment: ReportedExperiment, numbers: Iterator[int]) -> list[tuple[str, list[PlacedFigure]]]:
    """The figures of an experiment under their headings."""
    parts = {
        "Learning": curves(experiment),
        "Clients": client_figures(experiment),
        "Classes": class_figures(experiment),
        "Clusters": [*cluster_figures(experiment), *mixture_figures(experiment)],
        "Similarity and signatures": matrix_figures(experiment),
    }
    return [
        (title, [_placed(figure, next(numbers)) for figure in figures]) for title, figures in parts.items() if figures
    ]


# ---- tables


def _table_headings(report: Report) -> list[TableHeading]:
    several = [TableHeading("experiment", number=False)] if len(report.experiments) > 1 else []
    scores = {experiment.score for experiment in report.experiments}
    headings = [_heading(name, scores) for name in report.columns]
    note = (
        "paired t-test of the first metric against the best method of the experiment, over the seeds that both have "
        "(at least three): p, if their means were equal, and d, the mean difference over its standard deviation"
    )
    tested = [TableHeading("p", note)] if _is_compared(report) else []
    return [*several, TableHeading("method", number=False), TableHeading("seeds"), *headings, *tested]


def _heading(name: str, scores: Collection[str]) -> TableHeading:
    protocol = ", P-server" if test_metric(name) in scores else ""
    return TableHeading(f"{title_of(name).as_recorded}{protocol}", f"{name} (docs/metrics.md)")


def _is_compared(report: Report) -> bool:
    """Whether an experiment has several methods."""
    experiments = [row["experiment"] for row in report.rows]
    return len(set(experiments)) < len(experiments)


def _table_rows(report: Report) -> list[list[TableCell]]:
    rows = []
    for row in report.rows:
        experiment, method = str(row["experiment"]), str(row["method"])
        cells: list[TableCell] = [(experiment, experiment)] if len(report.experiments) > 1 else []
        cells += [(method, method), (str(row["runs"]), float(row["runs"]))]
        for name in report.columns:
            mean, std = row[name], row[f"{name}_std"]
            text = _with_std(mean, std) if name not in _ROUGH else _roughly(mean, std)
            cells.append((text, mean))
        if _is_compared(report):
            rivals = sum(row["experiment"] == other["experiment"] for other in report.rows)
            cells.append((tested_in_words(row["p"], row["effect"], row["runs"], rivals), row["p"]))
        rows.append(cells)
    return rows


def _with_std(mean: float, std: float) -> str:
    return "–" if math.isnan(mean) else with_spread(mean, std)


def _roughly(mean: float, std: float) -> str:
    """Mean and standard deviation with a single decimal, for counts and seconds."""
    return "–" if math.isnan(mean) else f"{mean:.1f}" if math.isnan(std) else f"{mean:.1f} ±\u00a0{std:.1f}"


def _rank_rows(report: Report) -> list[list[TableCell]]:
    ranks = report.ranks
    if ranks is None:
        return []
    near = {method: "yes" if ranks.is_near_best(method) else "" for method in ranks.mean_rank}
    return [
        [(method, method), (f"{rank:.1f}", rank), (near[method], near[method])]
        for method, rank in ranks.mean_rank.items()
    ]


def _published_row(row: Comparison) -> list[TableCell]:
    return [
        *((text, text) for text in (row.table, row.column, row.row, title_of(row.metric).text)),
        (_with_std(row.ours, row.ours_std), row.ours),
        (str(row.seeds), row.seeds),
        (_with_std(row.published, row.published_std), row.published),
        (f"{row.ours - row.published:+.2f}", row.ours - row.published),
        (f"misprint: {row.misprint}" if row.misprint else "", row.misprint),
    ]


# ---- embedded files


@cache
def _library() -> tuple[str, str]:
    """Plotly's library as source text, and compressed by zlib and encoded in base64."""
    source = (resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    return source, base64.b64encode(zlib.compress(source.encode(), 6)).decode()


def _text(name: str) -> str:
    return (resources.files("cfl_ray.report") / "template" / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """The source expression of this script in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
