"""Figures for papers: size, the same bytes from the same records, what is drawn and what is refused."""

import re

import numpy as np
import pytest

from cfl_ray.core.reassigned import Reassigned
from cfl_ray.errors import ConfigError
from cfl_ray.report.paper_figures import write_curves, write_matrix
from cfl_ray.report.report_data import MethodRun, PerClient, ReportedExperiment
from cfl_ray.tracking.record import RoundRecord

IDS = np.arange(4, dtype=np.int32)


def records(offset: float) -> list[RoundRecord]:
    return [
        RoundRecord(round, {"accuracy": 0.1 * round + offset, "accuracy_std": 0.0, "mbit_down": round, "mbit_up": 0.0})
        for round in (1, 2, 3)
    ]


@pytest.fixture
def experiment() -> ReportedExperiment:
    first = (1, Reassigned(IDS, np.array([0, 0, 2, 2], np.int32)))
    second = (3, Reassigned(IDS[:1], np.array([2], np.int32)))
    clustered = [MethodRun(seed, records(seed / 10), (first, second)) for seed in (0, 1)]
    mixed = [MethodRun(0, records(0.0), mixtures=[(2, IDS, np.full((4, 2), 0.5))])]
    methods = {"ifca": clustered, "fedavg": [MethodRun(0, records(0.3))], "fedem": mixed}
    groups = PerClient(np.arange(4), np.array([1, 0, 1, 0], np.int32))
    return ReportedExperiment("e", {}, "", "", methods, groups)


@pytest.mark.parametrize("style", ["pdf", "svg"])
def test_the_same_records_give_the_same_bytes(experiment, tmp_path, style):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_curves(tmp_path / folder, experiment, "accuracy", "round", 3.3, style)
        write_matrix(tmp_path / folder, experiment, "ifca", 3.3, style)
    names = [f"accuracy_by_round.{style}", f"clusters_ifca.{style}"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == names
    for name in names:
        content = (tmp_path / "a" / name).read_bytes()
        assert content == (tmp_path / "b" / name).read_bytes() and b"20" + b"26" not in content


def test_the_width_is_that_of_the_column(experiment, tmp_path):
    """An inch has 72 points."""
    svg = write_curves(tmp_path, experiment, "accuracy", "mbit", 3.3, "svg").read_text()
    assert f'width="{3.3 * 72:g}pt"' in svg and "Traffic per client (Mbit)" in svg and ">Accuracy<" in svg
    assert all(f">{label}<" in svg for label in experiment.methods) and "7px" in svg
    wide = write_matrix(tmp_path, experiment, "ifca", 7, "svg").read_text()
    assert 'width="504pt"' in wide and "4 clients by true group" in wide


def test_clusters_that_have_members_are_rows(experiment, tmp_path):
    def rows(**which) -> list[str]:
        svg = write_matrix(tmp_path, experiment, style="svg", width=3.3, **which).read_text()
        axis = svg.partition('id="matplotlib.axis_2"')[2]
        return re.findall(r">(\d+)</text>", axis)

    assert rows(label="ifca", round=2) == ["0", "2"] and rows(label="fedem") == ["0", "1"]


def test_what_cannot_be_drawn(experiment, tmp_path):
    for arguments, message in (
        (("accuracyy", "round"), "no run has the metric 'accuracyy' .did you mean 'accuracy'"),
        (("accuracy", "virtual_seconds"), "accuracy has no values by virtual_seconds; name another axis"),
    ):
        with pytest.raises(ConfigError, match=message):
            write_curves(tmp_path, experiment, *arguments, 3.3, "pdf")
    for label, round, message in (
        ("ifka", None, "e has no method 'ifka'"),
        ("fedavg", None, "fedavg has no clusters"),
        ("ifca", 4, "--round 4: the run has the rounds 1 .. 3"),
        ("fedem", 1, "mixture weights are recorded from round 2 on"),
    ):
        with pytest.raises(ConfigError, match=message):
            write_matrix(tmp_path, experiment, label, 3.3, "pdf", round)
    assert not list(tmp_path.iterdir())
