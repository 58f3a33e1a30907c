"""Every experiment in jobs/experiments is valid, and where its data are available it has the sizes of its paper."""

import os
from pathlib import Path

import pytest

from cfl_ray import config, data, models
from cfl_ray.core.errors import DataError
from cfl_ray.methods import resolve

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "jobs" / "experiments").glob("*.yaml"))


@pytest.fixture(autouse=True)
def data_folder(monkeypatch):
    shared = ROOT.parent / "shared" / "data"
    if "CFL_RAY_DATA" not in os.environ and shared.is_dir():
        monkeypatch.setenv("CFL_RAY_DATA", str(shared))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_experiment_is_valid(file):
    experiment = config.load(file)
    assert experiment.name and resolve(experiment.methods)
    assert config.Experiment(**experiment.to_dict()).config_hash == experiment.config_hash
    try:
        size = data.describe(experiment.data, experiment.seed)
    except DataError as missing:
        pytest.skip(f"no data: {missing}")
    models.recipe(experiment.model.name, experiment.model.options, size.input, size.num_classes)
    assert size.clients >= (experiment.cohort.clients or 1)


def test_the_sizes_are_those_of_the_papers():
    sizes = {}
    for name in ("stocfl_rotated_mnist", "stocfl_rotated_mnist_1200", "stocfl_femnist"):
        try:
            size = data.describe(config.load(ROOT / "jobs" / "experiments" / f"{name}.yaml").data, 0)
        except DataError as missing:
            pytest.skip(f"no data: {missing}")
        sizes[name] = (size.clients, size.samples[1], size.groups)
    assert sizes["stocfl_rotated_mnist"] == (4800, 50, 4)
    assert sizes["stocfl_rotated_mnist_1200"] == (1200, 200, 4)
    assert sizes["stocfl_femnist"][0] == 376
