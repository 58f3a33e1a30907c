"""Maps of signatures by t-SNE."""

import numpy as np
import pytest
from studies import InlinePool

from cfl_ray import UserError
from cfl_ray.config.study import Study
from cfl_ray.study import run
from jobs import tsne


def test_clouds_that_are_apart_stay_apart_and_neighbours_are_counted():
    rng = np.random.default_rng(0)
    group_S = np.repeat([0, 1, 2], 20)
    signature_SQ = np.eye(3)[group_S].astype(np.float32) * 10 + rng.normal(0, 0.1, (60, 3)).astype(np.float32)
    found = tsne.Map("all", tsne.plane(signature_SQ, 10.0), group_S)
    assert found.points_S2.shape == (60, 2) and found.purity == 1
    assert tsne.Map("all", found.points_S2, rng.permutation(group_S)).purity < 0.7
    assert np.array_equal(found.points_S2, tsne.plane(signature_SQ, 10.0))


def test_a_study_becomes_a_figure_with_a_panel_for_each_run_that_has_signatures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "WorkerPool", InlinePool)
    study = Study(
        name="maps",
        seeds=[0],
        experiment={
            "rounds": 1,
            "methods": ["fedavg", {"stocfl": {"tau": 0.3}}],
            "data": {"shift": {"kind": "rotated", "angles": [0, 180]}, "partition": {"clients": 12}},
            "cohort": {"fraction": 1.0},
            "tracking": {"enabled": False},
            "runtime": {"backend": "in_process"},
        },
    )
    run.run_study(study, tmp_path / "maps", at_once=1)
    tsne.main([str(tmp_path / "maps")])
    printed = capsys.readouterr().out
    assert "all, stocfl, seed-0: 12 clients" in printed and "fedavg" not in printed
    assert (tmp_path / "maps" / "tsne.png").read_bytes().startswith(b"\x89PNG")
    (panel,) = tsne.maps(tmp_path / "maps")
    assert sorted(panel.group_S.tolist()) == [0] * 6 + [1] * 6


def test_a_study_without_signatures_and_too_few_clients(tmp_path):
    with pytest.raises(UserError, match="no run in .* has the diagnostic signatures"):
        tsne.maps(tmp_path)
    with pytest.raises(UserError, match="at least 4 clients with a signature, got 3"):
        tsne.plane(np.zeros((3, 2), np.float32), 30.0)
