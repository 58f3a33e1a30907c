"""Experiments and studies in jobs/experiments are valid, run, have the sizes of their papers and their numbers."""

import os
import re
from functools import cache
from pathlib import Path

import pytest

from cfl_ray import config, data, models, simulate
from cfl_ray.config.partition import PARTITION_KINDS
from cfl_ray.config.study import Study, load_study, merged
from cfl_ray.errors import DataError
from cfl_ray.methods import resolve
from cfl_ray.plugins.loading import load_plugin
from cfl_ray.results.published import load_published
from cfl_ray.study.study_plan import StudyRun, plan
from cfl_ray.study.sweep import trials_of
from cfl_ray.tracking.record import METRICS

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "jobs" / "experiments"
FILES = sorted(FOLDER.glob("*.yaml"))
PUBLISHED = sorted((FOLDER / "published").glob("*.yaml"))
STUDIES = sorted(file for file in FOLDER.glob("*/*.yaml") if file not in PUBLISHED)
NAMES = [f"{file.parent.name}/{file.stem}" for file in STUDIES]


@pytest.fixture(autouse=True)
def data_folder(monkeypatch):
    shared = ROOT.parent / "shared" / "data"
    if "CFL_RAY_DATA" not in os.environ and shared.is_dir():
        monkeypatch.setenv("CFL_RAY_DATA", str(shared))


@cache
def study_of(name: str) -> Study:
    return load_study(FOLDER / f"{name}.yaml")


@cache
def runs_of(name: str) -> list[StudyRun]:
    study = study_of(name)
    return plan(study, trials=trials_of(study).first())


def one_for_each_setting(name: str) -> dict[str, StudyRun]:
    """Cells of one seed and the first trial, by setting."""
    found: dict[str, StudyRun] = {}
    for run in runs_of(name):
        found.setdefault(run.setting.removesuffix(run.trial).removesuffix(",") or run.setting, run)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_experiment_is_valid(file):
    experiment = config.load(file)
    assert experiment.name and resolve(experiment.methods)
    assert config.Experiment(**experiment.to_dict()).config_hash == experiment.config_hash
    if not has_data(experiment):
        pytest.skip("valid, but its data are not here")


@pytest.mark.parametrize("name", NAMES)
def test_study_is_valid(name):
    """All its runs, without data; its name is that of its file, and its head says what a reader must know."""
    runs = runs_of(name)
    assert len({(run.setting, run.method, run.seed) for run in runs}) == len(runs)
    assert study_of(name).name == name.replace("/", "-").replace("_", "-")
    head = (FOLDER / f"{name}.yaml").read_text().partition("name:")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert "Expected: " in head or name.endswith("/budget")
    assert "Cost" in head and ("arXiv:" in head or "doi:" in head or "NeurIPS" in head)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_study_fits_its_data(name):
    found = [has_data(run.experiment) for run in one_for_each_setting(name).values()]
    if not any(found):
        pytest.skip("no data of any of its settings")


def has_data(experiment) -> bool:
    """Whether the data are on this machine, and as many clients as the experiment names."""
    try:
        size = data.describe(experiment.data, experiment.seed)
    except DataError as missing:
        if "not found" in str(missing) or "data.partition.clients is 3597" in str(missing):
            return False  # not on this machine, or a part of FEMNIST's writers
        raise
    models.recipe(experiment.model.name, experiment.model.options, size.shape.input, size.shape.num_classes)
    assert size.clients >= (experiment.cohort.clients or 1)
    assert all(client < size.clients for event in experiment.schedule for client in event.join)
    return True


def test_the_sizes_are_those_of_the_papers():
    """Clients, median images of a client, true groups."""
    expected = {
        ("stocfl/table1", "clients_4800"): (4800, 50, 4),
        ("stocfl/table1", "clients_1200"): (1200, 200, 4),
        ("stocfl/figure3", "hybrid"): (200, 600, 2),
        ("stocfl/cfl_setting", "shifted_mnist"): (20, 0.8 * 60_000 / 5, 4),  # a fifth is held out
        ("autocfl/table1", "mnist_input_im"): (20, 1800, 2),
    }
    for (name, setting), sizes in expected.items():
        try:
            size = data.describe(one_for_each_setting(name)[setting].experiment.data, 0)
        except DataError as missing:
            pytest.skip(f"no data: {missing}")
        assert (size.clients, size.samples[1], size.groups) == sizes, (name, setting)


# ---- every study runs, on a small stand-in for its data

DIGITS = ("autocfl/table1", "fedac/num_clusters", "fedclust/table1", "stocfl/figure8")  # those of the normal suite


@pytest.fixture(scope="module")
def methods_run():
    """The methods of the stand-ins that were run so far, with their options and local training."""
    return set()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DIGITS else pytest.mark.slow) for name in NAMES]
)
def test_study_runs_on_the_digits(name, tmp_path, methods_run):
    """Every method of the first setting, with its options; in `slow`, of all settings whose methods differ.

    After its first run, a study's methods that another study has run in the same way are not run again.
    """
    first = runs_of(name)[0]
    for run in runs_of(name):
        if name in DIGITS and run.setting != first.setting:
            continue
        experiment = on_digits(run, tmp_path)
        key = str(experiment.to_dict()["methods"]), experiment.local.model_dump_json()
        if run is first or key not in methods_run:
            (result,) = simulate(experiment).methods.values()
            assert len(result.records) == 2 and 0 <= result.final["accuracy"] <= 1
        methods_run.add(key)


def on_digits(run: StudyRun, output: Path) -> config.Experiment:
    """The experiment of a run on 8x8 digits among 16 clients for two rounds: its methods, shift and division."""
    values = run.experiment.to_dict()
    part = values["data"]["partition"]
    kind = "dirichlet" if part["kind"] == "writer" else part["kind"]
    PARTITION_KINDS.drop_others(part, kind)
    small = {
        "rounds": 2,
        "data": {
            "source": "digits",
            "normalize": None,
            "shift": {"kind": "none"} if values["data"]["shift"]["kind"] == "hybrid" else values["data"]["shift"],
            "partition": part
            | {"kind": kind, "clients": 16, "samples": 40, "cut": part["cut"][:1], "min_samples": 2}
            | {
                "dirichlet": {"alpha": max(part.get("alpha", 0), 1.0)},
                "classes": {"classes_per_client": 2},
                "iid": {"sizes": None},
            }.get(kind, {})
            | ({"groups": 4} if part.get("groups") else {}),
        },
        "methods": [with_layers(method) for method in values["methods"]],
        "model": {"name": "mlp", "options": {"hidden": 8}},
        "local": {"epochs": 1, "steps": None, "batch_size": 20},
        "cohort": {"fraction": 1.0},
        "schedule": [{"round": 2, "join": ["12-15"]}] if values["schedule"] else [],
        "evaluation": {"every": 1, "tuned_epochs": min(values["evaluation"]["tuned_epochs"], 1), "verify": False},
        "tracking": {"enabled": False},
        "runtime": {"engine": "manual"},
        "output": str(output),
    }
    return config.Experiment(**merged(values, small) | {"model": small["model"]})


def with_layers(method):
    """The method with one of the two layers that the stand-in's model has."""
    if not isinstance(method, dict):
        return method
    ((name, options),) = method.items()
    layer = {"layer": min(options["layer"], 2)} if options and options.get("layer") else {}
    return {name: options | layer} if layer else method


@pytest.mark.parametrize(
    "network",
    [
        "clove/networks.py:cifar10",
        "fedbabu/official.py:mobilenet",
        "fedpac/official.py:cifar_cnn",
        "fedpac/official.py:fashion_cnn",
        "fedproto/official.py:mnist_cnn",
        "flux/anda.py:lenet5",
    ],
)
def test_a_network_of_a_recipe_has_the_size_and_the_input_that_it_says(network):
    """`N parameters on CxHxW`, with 10 classes or as many as it says."""
    factory = load_plugin(str(FOLDER / network), "model")
    said = re.search(r"([\d,]+) parameters on (\d+)x(\d+)x(\d+)(?: with (\d+) classes)?", factory.__doc__)
    count, *shape, classes = (int(number.replace(",", "")) for number in (said[1], *said.groups("10")[1:]))
    assert sum(one.numel() for one in factory(tuple(shape), classes).parameters()) == count


# ---- published numbers

OF_RUNS = {f"{name}{suffix}" for name in ("rounds_to_target", "mbit_to_target") for suffix in ("", "_local")}


@pytest.mark.parametrize("file", PUBLISHED, ids=lambda file: file.stem)
def test_published_numbers_have_the_names_of_their_study(file):
    published = load_published(file)
    for name, table in published.tables.items():
        study = FOLDER / table.study
        assert study.is_file(), table.study
        key = table.study.removesuffix(".yaml")
        assert name in study_of(key).tables and study_of(key).published == str(file)
        assert {number.metric for _, _, number in table.cells()} <= set(METRICS) | OF_RUNS, name
        assert set(table.columns) <= set(study_of(key).setting_names)
        methods = {(run.setting, run.method) for run in runs_of(key)}
        missing = [(row, column) for row, column, _ in table.cells() if (column, row) not in methods]
        assert not missing, (name, missing)


def test_every_study_names_tables_that_exist():
    for name in NAMES:
        study = study_of(name)
        if study.published is not None:
            tables = load_published(study.published).tables
            assert {table for table in tables if tables[table].study == f"{name}.yaml"} == set(study.tables)
