import math

import pytest
from matplotlib.image import imread

from cfl_ray.report.figures import spread, write_figures
from cfl_ray.tracking import RoundRecord


def curve(top, clusters=None):
    extra = {"num_clusters": clusters, "ari": 0.5} if clusters else {}
    return [RoundRecord(round, {"accuracy": top * round / 9, "mbit_up": float(round), **extra}) for round in range(10)]


def test_figures_are_drawn_for_what_was_recorded(tmp_path):
    written = write_figures(tmp_path / "figures", {"fedavg": curve(0.5), "ifca": curve(0.9, clusters=4)})
    assert [path.name for path in written] == ["accuracy_by_round.png", "accuracy_by_mbit.png", "clusters_by_round.png"]
    for path in written:
        height, width, _ = imread(path).shape
        assert width == 7.5 * 150
        assert height >= 4.2 * 150


def test_no_cluster_figure_where_no_method_has_clusters(tmp_path):
    assert [path.name for path in write_figures(tmp_path, {"fedavg": curve(0.5)})] == ["accuracy_by_round.png", "accuracy_by_mbit.png"]
    assert write_figures(tmp_path, {}) == []


def test_every_method_shows_in_its_colour(tmp_path):
    path = write_figures(tmp_path, {"fedavg": curve(0.5), "ifca": curve(0.9)})[0]
    pixels = {tuple(round(255 * channel) for channel in pixel[:3]) for row in imread(path) for pixel in row}
    assert {(0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)} <= pixels


def test_a_diverged_run_and_a_single_round_do_not_stop_the_drawing(tmp_path):
    diverged = [RoundRecord(1, {"accuracy": 0.1}), RoundRecord(2, {"accuracy": math.nan})]
    assert write_figures(tmp_path, {"diverged": diverged, "single": [RoundRecord(1, {"accuracy": 0.3})]})


@pytest.mark.parametrize(
    ("wanted", "placed"),
    [([0.1, 0.5], [0.1, 0.5]), ([0.5, 0.5, 0.5], [0.5, 0.6, 0.7]), ([0.95, 1.0], [0.9, 1.0]), ([-1.0, 0.3], [0.0, 0.3])],
)
def test_spread(wanted, placed):
    assert spread(wanted, 0.1, 0.0, 1.0) == pytest.approx(placed)
