"""The page as text: its figures, their captions, and that it needs and lets in nothing from elsewhere."""

import html
import json
import re
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go
import pytest
from pages import CLIENTS, HOSTILE, experiment, per_client, report, with_phases

from cfl_ray.core.reassigned import Reassigned
from cfl_ray.report.classes import MOST_CLASSES, class_figures
from cfl_ray.report.clusters import client_figures, cluster_figures, mixture_figures
from cfl_ray.report.curves import curves
from cfl_ray.report.drawing import as_json, look
from cfl_ray.report.matrices import matrix_figures
from cfl_ray.report.page import render
from cfl_ray.report.report_data import MethodRun, PerClient, RecordedConfusion, RecordedMatrix, ReportedExperiment
from cfl_ray.tracking import RoundRecord


@pytest.fixture(scope="module")
def page():
    return render(report())


def plots(text: str) -> list[dict]:
    """The figures of a page, from their JSON."""
    found = re.findall(r'<script type="application/json" id="figure-\d+-data">(.*?)</script>', text, re.S)
    return [json.loads(one) for one in found]


def captions(text: str) -> dict[str, str]:
    """Captions by title."""
    figures = re.findall(r"<figure>.*?<h4>(.*?)</h4>.*?<figcaption>(.*?)</figcaption>", text, re.S)
    return {html.unescape(title): html.unescape(caption) for title, caption in figures}


def without_library(text: str) -> str:
    return re.sub(r'<script type="application/octet-stream" id="library">[^<]*</script>', "", text)


def test_every_figure_is_there_with_a_title_and_a_caption(page):
    assert list(captions(page)) == [
        "table1, digits: ours and published",
        "Accuracy, P-server: the model that the server gives next",
        "Accuracy, P-local: the model that a client holds",
        "Accuracy, P-tune: after further local epochs",
        "Accuracy, P-server, against the traffic of a client",
        "Agreement of clusters with true groups (adjusted Rand index)",
        "Clusters that have members",
        "Share of the largest cluster: do clusters collapse into one?",
        "Accuracy, P-server, over the clients in the last evaluation",
        "ifca: sizes of its clusters (seed 0)",
        "ifca: cluster of each client by round (seed 0)",
        "ifca: similarity of the clients, ordered by cluster (round 4, seed 0)",
        "ifca: similarity of the clients, against their labels (round 4, seed 0)",
        "ifca: signatures of the clients (round 4, seed 0)",
    ]
    assert len(plots(page)) == len(captions(page))
    for title in captions(page):
        assert f'role="img" aria-label="{html.escape(title)}.' in page


@pytest.mark.parametrize("classes, drawn", [(3, 3), (62, 62), (120, MOST_CLASSES)])
def test_classes_are_drawn_by_method_and_cluster(classes, drawn):
    """Of each class but the first a half is taken for the class before; the last has the most samples."""
    names = [HOSTILE, *(f"class number {label}" for label in range(1, classes))]
    counts_CC = np.eye(classes, dtype=int) + np.eye(classes, k=-1, dtype=int)
    counts_CC[-1] *= 3
    recorded = RecordedConfusion(4, names, range(20), np.array([(k + 1) * counts_CC for k in range(20)]))
    shown = experiment()
    shown.methods["ifca"][:] = [replace(run, confusion=recorded) for run in shown.methods["ifca"]]
    accuracies, confusions = class_figures(shown)
    for figure in (accuracies, confusions):
        go.Figure(json.loads(as_json(figure.plot)))
        assert HOSTILE not in as_json(figure.plot) and ("The 100 of 120 classes" in figure.caption) == (classes > drawn)
    (heat,) = accuracies.plot["data"]
    assert heat["z"].shape == (13, drawn) and heat["y"][:2] == ["ifca, all clients", "ifca, cluster 8"]
    assert heat["z"][0, -1] == 0.5 and ("texttemplate" in heat) == (classes == 3)
    assert "Of ifca's 20 clusters the 12 with the most test samples are drawn." in accuracies.caption
    assert f"from 0.500 (class number 1) to 1.000 ({HOSTILE})" in accuracies.caption
    assert len(confusions.plot["data"]) == 6 and confusions.title == "ifca: confusion of classes (round 4, seed 0)"
    most = f"class number {classes - 1} as class number {classes - 2}, 630 of 1260 samples (50 %)"
    assert f"The most frequent confusion: {most}." in confusions.caption
    shares_CC = confusions.plot["data"][1]["z"]  # of cluster 15, the first of the five largest
    assert shares_CC.shape == (drawn, drawn) and shares_CC[1, 0] == 0.5


def test_phases_are_bands_of_the_curves_and_events_are_on_the_time_axis():
    shown = experiment()
    with_phases(shown.methods["ifca"], "cluster")
    figures = {figure.title: figure for figure in curves(shown)}
    for title in ("Clusters that have members", "Accuracy, P-server: the model that the server gives next"):
        band = figures[title].plot["layout"]["shapes"][0]
        assert (band["x0"], band["x1"], band["label"]["text"]) == (0.5, 2.5, "ifca: cluster"), title
    timeline = figures["Phases, and events of clusters"]
    go.Figure(json.loads(as_json(timeline.plot)))
    bars = [(one["base"], one["x"], one["y"]) for one in timeline.plot["data"] if one["type"] == "bar"]
    assert bars == [([0.5], [2], ["ifca"]), ([2.5], [2], ["ifca"])]
    marks = {one["name"]: (one["x"], one["text"]) for one in timeline.plot["data"] if one["type"] == "scatter"}
    text = "cluster 0 split into 0, 1 (mean 0.25)"
    assert marks == {"phase": ([2], ["phase cluster -&gt; federate"]), "split": ([3], [text])}
    assert timeline.caption.endswith(f"In round 3, ifca: {text}.")


@pytest.mark.parametrize(
    ("phases", "names"),
    [
        ({"ifca": "a"}, ["ifca: a"]),
        ({"fedavg": "b", "ifca": "a"}, ["fedavg: b, ifca: a"]),
        ({"fedavg": "a long name", "ifca": "a"}, ["phases: fedavg, ifca"]),
        ({"a_method_with_a_long_name": "b", "ifca": "a"}, ["2 phases"]),
    ],
)
def test_bands_that_begin_together_have_one_name(phases, names):
    shown = experiment(other=next(iter({*phases} - {"ifca"}), "fedavg"))
    for label, phase in phases.items():
        with_phases(shown.methods[label], phase)
    shapes = curves(shown)[0].plot["layout"]["shapes"]
    assert len(shapes) == len(phases)
    assert [shape["label"]["text"] for shape in shapes if "label" in shape] == names


def test_runs_with_a_clock_have_a_curve_over_virtual_time():
    shown = experiment()

    def drawn(slower):
        for factor, runs in enumerate(shown.methods.values(), 1):
            for run in runs:
                for record in run.records:
                    record.metrics["virtual_seconds"] = 10.0 * factor**slower * record.round
        return next(figure for figure in curves(shown) if figure.title == "Accuracy, P-server, against virtual time")

    equal = drawn(0).caption
    assert equal.count(" 40.0 s for ") == 2 and "first" not in equal and "last)" not in equal
    figure = drawn(1)
    first, last = list(shown.methods)[0], list(shown.methods)[-1]
    assert figure.caption.startswith(f"The last evaluation is after: {first} 40.0 s for")
    assert f"{last} {40.0 * len(shown.methods):.1f} s for" in figure.caption
    lines = [one for one in figure.plot["data"] if one.get("mode") == "lines+markers"]
    assert list(lines[0]["x"]) == [10.0, 20.0, 30.0, 40.0]


def test_clients_whose_data_change_have_a_curve_with_lines_at_the_changes():
    title, shown = "Accuracy, P-server, of the clients whose data change", experiment()
    assert title not in {figure.title for figure in curves(shown)}
    scores = {"fedavg": {1: 0.4, 2: 0.5, 3: 0.1, 4: 0.3}, "ifca": {1: 0.7, 2: 0.8, 3: 0.6, 4: 0.9}}
    recovery = {"fedavg": {"backward_transfer": -0.25}, "ifca": {"backward_transfer": -0.5, "rounds_to_recover": 2.0}}
    methods = {
        label: [replace(run, changed_scores=scores[label], recovery=recovery[label]) for run in runs]
        for label, runs in shown.methods.items()
    }
    shown = replace(shown, methods=methods, changes={3: 5})
    figure = next(figure for figure in curves(shown) if figure.title == title)
    go.Figure(json.loads(as_json(figure.plot)))
    lines = {one["name"]: one["y"] for one in figure.plot["data"] if one.get("mode") == "lines+markers"}
    assert {label: list(y) for label, y in lines.items()} == {
        label: list(of_round.values()) for label, of_round in scores.items()
    }
    (line,) = figure.plot["layout"]["shapes"]
    assert (line["x0"], line["x1"], line["line"]["dash"]) == (2.5, 2.5, "dot")
    assert figure.caption == (
        "Data of 5 clients change before round 3 (dotted). Rounds until they score as before, within 0.02: ifca 2. "
        "Not recovered from every change: fedavg. Score on the data before, now minus then: fedavg -0.250, ifca -0.500."
    )
    twice = replace(shown, changes={2: 4, 3: 5})
    caption = next(figure.caption for figure in curves(twice) if figure.title == title)
    assert caption.startswith("Data of 4.5 clients on average change before rounds 2, 3 (dotted).")


def test_captions_state_the_numbers_of_the_records(page):
    found = captions(page)
    spread = np.std([0.8, 0.9], ddof=1)
    caption = found["Accuracy, P-server: the model that the server gives next"]
    assert caption.startswith(f"ifca ends best with 0.850 ±\u00a0{spread:.3f} in round 4, fedavg with 0.550 ±")
    assert caption.endswith("over 2 seeds.")
    assert f"fedavg {1.5 * 4:.3f} Mbit for 0.550" in found["Accuracy, P-server, against the traffic of a client"]
    assert found["Clusters that have members"] == "At the end: ifca 2; the clients have 3 true groups (dotted)."
    assert found["Share of the largest cluster: do clusters collapse into one?"] == (
        "ifca: the largest cluster holds 75 % of the clients in round 4. The largest true group holds 33 %."
    )
    # 9 of 12 clients in cluster 0 until round 2, then 6
    sizes = found["ifca: sizes of its clusters (seed 0)"]
    assert "holds 50 % of the clients in round 4, at most 75 % (round 1); 2 clusters have members" in sizes
    assert found["ifca: cluster of each client by round (seed 0)"] == (
        "ifca: 3 of 12 clients go from one cluster to another, 3 times in all, most often from 0 to 7 (3 times), and "
        "last in round 3."
    )
    cluster = np.array([7, 7, 7, 0, 0, 0, 0, 0, 0, 7, 7, 7])
    same_group = np.arange(CLIENTS)[:, None] % 3 == np.arange(CLIENTS)[None, :] % 3
    pairs, inside = ~np.eye(CLIENTS, dtype=bool), cluster[:, None] == cluster[None, :]
    assert (
        f"{same_group[pairs & inside].mean():.3f} within clusters and {same_group[pairs & ~inside].mean():.3f} between"
        in found["ifca: similarity of the clients, ordered by cluster (round 4, seed 0)"]
    )
    assert (  # 1 in a group, where the divergence is 0, and 0 between groups, where it is 1
        "of the similarity and the divergence of labels is -1.000 over 66 pairs of 12 clients."
        in found["ifca: similarity of the clients, against their labels (round 4, seed 0)"]
    )
    signatures = found["ifca: signatures of the clients (round 4, seed 0)"]
    assert "the plane holds 100 % of the variance" in signatures  # three corners of a triangle
    assert "0 of 2 clusters have clients of one true group only" in signatures
    worst = np.percentile([*np.linspace(0.7, 0.9, 12), *np.linspace(0.8, 1.0, 12)], 10)
    assert f"at most {worst:.3f} with ifca" in found["Accuracy, P-server, over the clients in the last evaluation"]
    against = found["table1, digits: ours and published"]
    assert "1 of 1 published numbers lie within two standard deviations" in against
    assert f"Misprints: ifca ({HOSTILE})" in against


def test_captions_say_of_which_round_groups_are_that_change():
    changing = replace(experiment(), groups_change=True)
    shown = " ".join(figure.caption for figure in (*matrix_figures(changing), *curves(changing)))
    assert shown.count("True groups are those of the last round") == 2, "similarities and signatures"
    assert "3 true groups (dotted) after the last round." in shown


def test_figures_are_valid_for_plotly(page):
    for plot in plots(page):
        go.Figure(plot)  # raises ValueError for a key or a value that Plotly does not know


def test_methods_look_different():
    assert len({(look(place).colour, look(place).dash) for place in range(24)}) == 24


def test_nothing_is_loaded_from_elsewhere(page):
    rest = without_library(page).replace(html.escape(HOSTILE), "")
    assert not re.search(r"https?:|@import|\bfetch\(|\burl\(|<link|<a |<iframe|<img", rest)
    assert not re.search(r"\b(src|href)=", rest)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    assert "default-src 'none'" in policy
    assert "unsafe-eval" not in policy and "script-src 'unsafe-inline'" not in policy and "connect-src" not in policy


def test_names_of_users_are_text():
    """Names with markup: escaped in the page, in the JSON of the figures, and in what Plotly takes for markup."""
    text = render(report(name="</title><script>alert(1)</script>", other=HOSTILE))
    rest = without_library(text)
    assert "<script>alert" not in rest and "<img" not in rest
    assert html.escape("</title><script>alert(1)</script>") in rest
    shown = [trace.get("name") for plot in plots(text) for trace in plot["data"]]
    assert html.escape(HOSTILE, quote=False) in shown and HOSTILE not in shown


def test_the_table_is_sortable_and_has_what_readers_need(page):
    heading = r'<th scope="col" aria-sort="none" class="number"[^>]*><button type="button">Accuracy, P-server<'
    assert re.search(heading, page)
    assert '<td data-value="0.85" class="number">0.850 ±\u00a00.071</td>' in page
    assert "<caption>Last evaluation of every method</caption>" in page
    assert '<html lang="en">' in page and 'name="viewport"' in page and "@media print" in page


def test_the_table_has_the_paired_test_with_what_it_tests_or_what_it_needs(page):
    assert "paired t-test of the first metric against the best method of the experiment" in without_library(page)
    shown = report()
    rows = [row | {"runs": 3, "p": 0.0123, "effect": -2.34} for row in shown.rows]
    assert rows and ">0.012 (d -2.3)</td>" in render(replace(shown, rows=rows))
    assert "0.00037 (d -62.0)" in render(
        replace(shown, rows=[row | {"runs": 3, "p": 3.7e-4, "effect": -62.0} for row in rows])
    )
    assert ">needs three seeds</td>" in render(replace(shown, rows=[row | {"runs": 2} for row in shown.rows]))


def test_a_metric_of_which_less_is_better():
    """The best is the lowest, the worst tenth of the clients the highest."""

    def run(end):
        metrics = [{"mse": end * round, "mse_std": 0.1, "mse_p90": end * round} for round in (2, 1)]
        return MethodRun(
            0,
            [RoundRecord(round, one, 0, frozenset(one)) for round, one in enumerate(metrics, 1)],
            scores={"mse": np.array([end, 2 * end])},
        )

    one = replace(experiment(), methods={"a": [run(3.0)], "b": [run(1.0)]}, score="mse", higher_is_better=False)
    assert curves(one)[0].caption == "b ends best with 1.000 in round 2, a with 3.000. One seed."
    assert "The worst tenth of the clients has at least 1.900 with b" in client_figures(one)[0].caption


def test_large_federations_are_sampled_and_the_caption_says_so():
    count = 100_000
    ids = np.arange(count)
    reassignments = [(1, Reassigned(ids.astype(np.int32), ids.astype(np.int32) % 2))]
    records = [RoundRecord(round, {"accuracy": 0.5, "accuracy_std": 0.1}) for round in range(1, 1001)]
    draw = np.random.default_rng(0)
    values, labels = draw.normal(size=(1000, 1000)).astype(np.float32), draw.integers(1, 50, (1000, 62))
    pairs = RecordedMatrix(1, ids[:1000], values, of_pairs=True, label_counts_SC=labels.astype(np.float32))
    signatures = RecordedMatrix(1, ids[:10_000], np.random.default_rng(0).normal(size=(10_000, 8)), of_pairs=False)
    run = MethodRun(
        0, records, reassignments, {"accuracy": np.full(count, 0.5)}, {"similarity": pairs, "signatures": signatures}
    )
    one = replace(experiment(), methods={"ifca": [run]}, groups=PerClient(ids, ids % 2))
    figures = [*curves(one), *client_figures(one), *cluster_figures(one), *matrix_figures(one)]
    assert sum(len(as_json(figure.plot)) for figure in figures) < 500_000
    text = " ".join(figure.caption for figure in figures)
    assert "150 of 100000 clients are drawn" in text
    assert "150 of 1000 clients are drawn" in text
    assert "2,000 of 499,500 pairs are drawn" in text
    assert "600 of 10000 clients are drawn" in text


def test_without_an_evaluation_there_is_still_a_page():
    text = render(replace(report(), experiments=[], rows=[], comparisons=[], columns=[]))
    assert "There are no results yet." in text


def test_signatures_that_are_not_defined_leave_the_others_where_they_are():
    """A client without any signature is left out; one value that is missing lies at the mean of its column."""
    values = np.array([[1.0, 0.0], [-1.0, 0.0], [np.nan, 2.0], [np.nan, np.nan]], np.float32)
    run = MethodRun(0, [], matrices={"signature": RecordedMatrix(1, np.arange(4), values, of_pairs=False)})
    (figure,) = matrix_figures(ReportedExperiment("small", {}, "", "", {"m": [run]}))
    assert "of 3 clients" in figure.caption and "Of 1 the signature are not defined." in figure.caption
    points = {client: (x, y) for trace in figure.plot["data"] if "customdata" in trace for (client, _), x, y in zip(
        trace["customdata"], trace["x"], trace["y"], strict=True
    )}  # fmt: skip
    assert points.keys() == {0, 1, 2} and np.linalg.norm(np.subtract(points[0], points[1])) == pytest.approx(2)
    nothing = RecordedMatrix(1, np.arange(4), np.full((4, 2), np.nan, np.float32), of_pairs=False)
    empty = MethodRun(0, [], matrices={"signature": nothing})
    assert matrix_figures(ReportedExperiment("small", {}, "", "", {"m": [empty]})) == []


def test_mixture_weights_are_stacked_bars_by_round_with_clients_of_a_group_side_by_side():
    weights = {1: [[0.5, 0.5], [0.6, 0.4], [0.5, 0.5]], 9: [[0.9, 0.1], [0.2, 0.8], [1.0, 0.0]]}
    mixtures = [(round, np.array([0, 1, 2]), np.array(weight_SK)) for round, weight_SK in weights.items()]
    one = ReportedExperiment(
        "small", {}, "", "", {"fedem": [MethodRun(0, [], mixtures=mixtures)]}, per_client({0: 0, 1: 1, 2: 0})
    )
    (figure,) = mixture_figures(one)
    first, second = figure.plot["data"]
    assert figure.plot["layout"]["xaxis"]["ticktext"] == ["0", "2", "1"]
    assert figure.plot["layout"]["yaxis"]["ticktext"] == ["round 1", "round 9"]
    top = np.add(first["base"], first["y"])
    assert np.allclose(top, second["base"]) and np.allclose(np.add(second["base"], second["y"]) - first["base"], 1)
    assert second["hovertext"][4] == "client 1, round 9: model 1 0.800"
    assert "round 9 the mean of the largest weights is 0.90" in figure.caption
    assert mixture_figures(experiment()) == []


def test_mixture_weights_of_many_clients_and_rounds_are_sampled():
    mixtures = [(round, np.arange(500), np.full((500, 3), 1 / 3)) for round in range(1, 21)]
    one = ReportedExperiment("large", {}, "", "", {"fedem": [MethodRun(0, [], mixtures=mixtures)]})
    (figure,) = mixture_figures(one)
    assert "60 of 500 clients are drawn" in figure.caption and len(figure.plot["layout"]["yaxis"]["ticktext"]) == 4
    assert len(as_json(figure.plot)) < 100_000
