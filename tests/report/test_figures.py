import math

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread

from cfl_ray.report.figures import write_figures
from cfl_ray.tracking import RoundRecord


def curve(top, clusters=None):
    """Ten records whose accuracy rises to `top`."""
    extra = {"num_clusters": clusters, "ari": 0.5} if clusters else {}
    return [RoundRecord(round, {"accuracy": top * round / 9, "mbit_up": float(round), **extra}) for round in range(10)]


@pytest.fixture
def plotted(monkeypatch):
    """The figures that are plotted, in place of their files."""
    found = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: found.append(figure) or path.touch())
    return found


def test_figures_are_drawn_for_what_was_recorded(tmp_path):
    written = write_figures(tmp_path / "figures", {"fedavg": curve(0.5), "ifca": curve(0.9, clusters=4)})
    assert [path.name for path in written] == ["accuracy_by_round.png", "accuracy_by_mbit.png", "clusters_by_round.png"]
    for path in written:
        height, width, _ = imread(path).shape
        assert width == 7.5 * 100
        assert height >= 4.2 * 100


def test_runs_with_a_clock_have_a_figure_over_virtual_time(tmp_path, plotted):
    records = [RoundRecord(round, {"accuracy": 0.1 * round, "virtual_seconds": 7.0 * round}) for round in (1, 2, 3)]
    written = write_figures(tmp_path, {"fedavg": records})
    at = [path.name for path in written].index("accuracy_by_virtual_seconds.png")
    (axes,) = plotted[at].axes
    assert axes.get_xlabel() == "Virtual time (s)" and axes.lines[0].get_xdata().tolist() == [7.0, 14.0, 21.0]


def test_the_legend_names_the_methods_that_are_drawn_in_their_order(tmp_path, plotted):
    empty = [RoundRecord(1, {})]
    write_figures(tmp_path, {"fedavg": curve(0.5), "empty": empty, "ifca": curve(0.9, clusters=4)})
    named = [[text.get_text() for text in figure.legends[0].get_texts()] for figure in plotted]
    assert named == [["fedavg", "ifca"], ["fedavg", "ifca"], ["ifca"]]


def test_no_cluster_figure_where_no_method_has_clusters(tmp_path):
    written = write_figures(tmp_path, {"fedavg": curve(0.5)})
    assert [path.name for path in written] == ["accuracy_by_round.png", "accuracy_by_mbit.png"]
    assert write_figures(tmp_path, {}) == []


def test_every_method_shows_in_its_colour(tmp_path):
    path = write_figures(tmp_path, {"fedavg": curve(0.5), "ifca": curve(0.9)})[0]
    pixels = np.round(255 * imread(path)[:, :, :3]).astype(np.uint8)
    for colour in ([0x00, 0x72, 0xB2], [0xD5, 0x5E, 0x00]):
        assert (pixels == colour).all(2).any()


@pytest.mark.parametrize("rounds", [1, 2, 3, 7, 300])
def test_ticks_are_at_whole_rounds(rounds, tmp_path, plotted):
    records = [RoundRecord(round, {"accuracy": 0.5, "num_clusters": 2}) for round in range(1, rounds + 1)]
    write_figures(tmp_path, {"ifca": records})
    by_round = [plotted[0], plotted[2]]
    for axes in (axes for figure in by_round for axes in figure.axes):
        low, high = axes.get_xlim()
        shown = [tick for tick in axes.get_xticks() if low <= tick <= high]
        assert shown and all(tick == int(tick) for tick in shown), shown


def test_a_diverged_run_and_a_single_round_do_not_stop_the_drawing(tmp_path):
    diverged = [RoundRecord(1, {"accuracy": 0.1}), RoundRecord(2, {"accuracy": math.nan})]
    diverged += [RoundRecord(round, {"accuracy": y}) for round, y in enumerate((1e299, -1e308, 1.7e308, -math.inf), 3)]
    assert write_figures(tmp_path, {"diverged": diverged, "single": [RoundRecord(1, {"accuracy": 0.3})]})


def test_labels_of_ticks_are_not_cut_off(tmp_path, plotted):
    """Also long ones, and those with a power of ten above the panel."""
    for scores in (0.9986, 0.9994), (-500_000.0, 1.0), (0.0, 1e30):
        write_figures(tmp_path, {"fedavg": [RoundRecord(round, {"accuracy": y}) for round, y in enumerate(scores)]})
    for figure in plotted:
        drawn = figure.axes[0].get_tightbbox(FigureCanvasAgg(figure).get_renderer())
        assert figure.bbox.count_contains(drawn.get_points()) == 2, figure.axes[0].get_yticklabels()
