"""Every experiment that is shown loads, checks and, where its data are at hand, runs."""

import os
from pathlib import Path

import pytest

from cfl_ray import config, data, forecast, models
from cfl_ray.core.errors import DataError
from cfl_ray.methods import resolve

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "jobs" / "experiments").glob("*.yaml"))


@pytest.fixture(autouse=True)
def data_folder(monkeypatch):
    beside = ROOT.parent / "shared" / "data"
    if "CFL_RAY_DATA" not in os.environ and beside.is_dir():
        monkeypatch.setenv("CFL_RAY_DATA", str(beside))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_experiment_is_valid(file):
    experiment = config.load(file)
    assert experiment.name and resolve(experiment.methods)
    assert config.Experiment(**experiment.to_dict()).config_hash == experiment.config_hash
    try:
        size = data.describe(experiment.data, experiment.seed)
    except DataError as absent:
        pytest.skip(f"data absent: {absent}")
    models.recipe(experiment.model.name, experiment.model.options, size.input, size.num_classes)
    assert size.clients >= (experiment.cohort.clients or 1)


def test_the_sizes_are_those_of_the_papers():
    sizes = {}
    for name in ("stocfl_rotated_mnist", "stocfl_rotated_mnist_1200", "stocfl_femnist"):
        try:
            size = data.describe(config.load(ROOT / "jobs" / "experiments" / f"{name}.yaml").data, 0)
        except DataError as absent:
            pytest.skip(f"data absent: {absent}")
        sizes[name] = (size.clients, size.samples[1], size.groups)
    assert sizes["stocfl_rotated_mnist"] == (4800, 50, 4)
    assert sizes["stocfl_rotated_mnist_1200"] == (1200, 200, 4)
    assert sizes["stocfl_femnist"][0] == 376


def test_forecast_counts_what_a_run_books(tmp_path, monkeypatch):
    """`cfl-ray check` and the run agree about traffic, for every method, to the bit."""
    import cfl_ray
    from cfl_ray.core.local import LocalSGD
    from cfl_ray.data.federation import Shape
    from cfl_ray.methods import REGISTRY

    monkeypatch.chdir(tmp_path)
    experiment = cfl_ray.Experiment(
        rounds=2, methods=["all"], data={"source": "synthetic", "synthetic_shape": [6], "synthetic_samples": 200, "partition": {"clients": 8}}, cohort={"fraction": 1.0},
        model={"name": "mlp", "options": {"hidden": 4}}, local={"epochs": 1}, runtime={"engine": "sequential"},
    )  # fmt: skip
    results = cfl_ray.simulate(experiment)
    spec = cfl_ray.runtime.launch.prepare(experiment).network().spec
    assert set(results.methods) == set(REGISTRY)
    for label, method in resolve(experiment.methods).items():
        expected = forecast.traffic(method, 8, 8, spec, LocalSGD(epochs=1), Shape((6,), 10))
        down, up = (expected.first_round[side] + expected.later_round[side] for side in (0, 1))
        final = results[label].final
        assert (final["mbit_down"], final["mbit_up"]) == pytest.approx((down, up), rel=1e-12), label
