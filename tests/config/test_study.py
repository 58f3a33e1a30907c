"""Studies as YAML: what is merged, what names folders, what is refused and why."""

from pathlib import Path

import pytest
import yaml

from cfl_ray import load
from cfl_ray.config.study import Study, load_study, merged
from cfl_ray.config.sweep import RangeConfig, SweepConfig, name_of
from cfl_ray.errors import ConfigError


def study(**changes) -> Study:
    return Study(**{"name": "mine", "experiment": {}} | changes)


def write(folder: Path, **keys) -> Path:
    file = folder / "study.yaml"
    file.write_text(yaml.safe_dump({"name": "mine", "experiment": {"rounds": 2}} | keys))
    return file


def test_settings_change_the_shared_keys_at_any_depth():
    given = {"data": {"source": "digits", "partition": {"clients": 8}}, "methods": ["fedavg", "ifca"]}
    changes = {"data": {"partition": {"kind": "iid"}}, "methods": ["local"]}
    assert merged(given, changes) == {
        "data": {"source": "digits", "partition": {"clients": 8, "kind": "iid"}},
        "methods": ["local"],  # lists are replaced
    }
    assert given["methods"] == ["fedavg", "ifca"] and given["data"]["partition"] == {"clients": 8}
    made = study(experiment=given, settings={"plain": None, "own": changes})
    assert made.values("plain", {}) == given and made.values("own", {}) == merged(given, changes)
    assert made.setting_names == ["plain", "own"] and study().setting_names == ["all"]


def test_parameters_of_a_trial_are_set_after_the_setting():
    made = study(
        experiment={"methods": [{"stocfl": {"tau": 0.1}}, "fedavg"]},
        settings={"a": {"local": {"lr": 0.5, "epochs": 2}}},
    )
    values = made.values("a", {"local.lr": 0.1, "methods.stocfl.tau": 0.7})
    assert values["local"] == {"lr": 0.1, "epochs": 2} and values["methods"] == [{"stocfl": {"tau": 0.7}}, "fedavg"]
    with pytest.raises(ConfigError, match=r"sweep: methods\.stokfl\.tau: no method 'stokfl'.*did you mean 'stocfl'"):
        made.values("a", {"methods.stokfl.tau": 0.7})


REFUSED = {
    "no experiment": ({"experiment": None, "experimnt": {}}, "unknown key 'experimnt' (did you mean 'experiment'?)"),
    "the seed of an experiment": ({"experiment": {"seed": 3}}, "seed is decided by the study's `seeds`; leave it out"),
    "its name": ({"experiment": {"name": "x"}}, "name is decided by the study's `name`; leave it out"),
    "the seed of a setting": ({"settings": {"a": {"seed": 1}}}, "a.seed cannot differ between settings"),
    "its output": ({"settings": {"a": {"output": "x"}}}, "a.output cannot differ between settings: it is the same in"),
    "its tracking": ({"settings": {"a": {"tracking": {}}}}, "a.tracking cannot differ between settings"),
    "a name that is no folder": ({"settings": {"a b": {}}}, "a setting names a folder: at most 100 letters"),
    "one that leaves the study": ({"settings": {"../a": {}}}, "got '../a'"),
    "the folder of the tables": ({"settings": {"artifacts": {}}}, "got 'artifacts'"),
    "a file of the study": ({"settings": {"study.yaml": {}}}, "or folder of the study ("),
    "a study whose folder no file system has": ({"name": "a" * 101}, "name: String should have at most 100 characters"),
    "a metric twice": ({"metrics": ["ari", "ari"]}, "metrics: metric ari is listed twice"),
    "a range whose keys are numbers": (
        {"sweep": {"parameters": {"local.lr": {1: 2}}}},
        "local.lr: low: Field required",
    ),
    "a long one": ({"settings": {"a" * 101: {}}}, "at most 100 letters"),
    "a setting that is no mapping": ({"settings": {"a": [1]}}, "settings.a: Input should be a valid dictionary"),
    "a setting twice": (
        {"settings": {1: {"rounds": 2}, "1": {"rounds": 3}}},
        "two settings are named '1', as a text and as a number",
    ),
    "settings as a list": ({"settings": [1]}, "settings: Input should be a valid dictionary"),
    "a name with a slash": (
        {"name": "a/b"},
        "name: expected ASCII letters, digits and _ . -, the first a",
    ),
    "one seed": ({"seeds": 3}, "seeds: expected a list, write [3]"),
    "no seed": ({"seeds": []}, "seeds: List should have at least 1 item"),
    "a seed twice": ({"seeds": [1, 2, 1]}, "seed 1 is listed twice"),
    "tables without a file": ({"tables": ["t1"]}, "name their file as `published`"),
    "an object": (
        {"experiment": {"data": Path()}},
        "experiment.data is an object of type PosixPath, but the runs of a",
    ),
    "a number as a key": ({"experiment": {"data": {3: 1}}}, "keys are texts, got 3 in experiment.data"),
    "a sweep of nothing": ({"sweep": {"parameters": {}}}, "at least 1 item"),
    "one value": ({"sweep": {"parameters": {"local.lr": 0.1}}}, "local.lr needs a list of values, as in [0.1], or a"),
    "no value": ({"sweep": {"parameters": {"local.lr": []}}}, "local.lr has no values"),
    "a value twice": ({"sweep": {"parameters": {"local.lr": [0.1, 0.2, 0.1]}}}, "local.lr has the value 0.1 twice"),
    "a range the wrong way": (
        {"sweep": {"parameters": {"local.lr": {"low": 3, "high": 1}}, "sampler": "random", "trials": 2}},
        "local.lr: low must be less than high, got 3 and 1",
    ),
    "a range without end": ({"sweep": {"parameters": {"local.lr": {"low": 3}}}}, "local.lr: high: Field required"),
    "an infinite range": (
        {"sweep": {"parameters": {"local.lr": {"low": 1, "high": float("inf")}}}},
        "local.lr: high: Input should be a finite number",
    ),
    "a logarithm of 0": (
        {"sweep": {"parameters": {"local.lr": {"low": 0, "high": 1, "log": True}}}},
        "low must be greater than 0 with log, got 0",
    ),
    "half an epoch": (
        {"sweep": {"parameters": {"local.epochs": {"low": 0.5, "high": 3, "int": True}}}},
        "low and high must be whole numbers with int, got 0.5 and 3",
    ),
    "a range in a grid": (
        {"sweep": {"parameters": {"local.lr": {"low": 1, "high": 2}}}},
        "local.lr: a grid needs a list of values; use sampler random or tpe for a range",
    ),
    "trials of a grid": ({"sweep": {"parameters": {"a": [1]}, "trials": 3}}, "trials is for random and tpe, got 3"),
    "random without trials": (
        {"sweep": {"parameters": {"a": [1]}, "sampler": "random"}},
        "sampler random needs trials",
    ),
    "another sampler": (
        {"sweep": {"parameters": {"a": [1]}, "sampler": "bohb"}},
        "sweep.sampler: Input should be 'grid'",
    ),
    "a sweep over seeds": ({"sweep": {"parameters": {"seed": [1]}}}, "seed cannot be swept: it is decided by the"),
    "a sweep over folders": ({"sweep": {"parameters": {"output": ["a"]}}}, "output cannot be swept: it is the same in"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_said(case):
    changes, expected = REFUSED[case]
    with pytest.raises(ConfigError) as error:
        study(**changes)
    assert expected in str(error.value)


def test_values_of_a_range():
    real, log = RangeConfig(low=1, high=3), RangeConfig(low=1e-4, high=1, log=True)
    assert (real.at(0), real.at(0.5), real.at(1)) == (1, 2, 3) and log.at(0.5) == 0.01
    whole = RangeConfig(**{"low": 1, "high": 3, "int": True})
    assert [whole.at(share) for share in (0, 0.34, 0.67, 0.99, 1)] == [1, 2, 3, 3, 3]
    assert RangeConfig(low=0, high=1).at(1 / 3) == 0.333333, "six digits"


def test_trials_of_a_grid_and_of_random_draws():
    lists = {"local.lr": [0.1, 0.2], "local.epochs": [1, 2, 3]}
    grid = SweepConfig(parameters=lists).drawn()
    assert grid == [{"local.lr": lr, "local.epochs": e} for lr in (0.1, 0.2) for e in (1, 2, 3)]
    ranges = {"parameters": {"local.lr": {"low": 0.01, "high": 1, "log": True}, "local.epochs": [1, 2]}}
    drawn = SweepConfig(**ranges, sampler="random", trials=5).drawn()
    assert drawn == SweepConfig(**ranges, sampler="random", trials=5).drawn() and len(drawn) == 5
    assert drawn == SweepConfig(**ranges, sampler="random", trials=8).drawn()[:5], "more trials keep the first ones"
    assert drawn != SweepConfig(**ranges, sampler="random", trials=5, seed=1).drawn()
    assert all(0.01 <= one["local.lr"] <= 1 and one["local.epochs"] in (1, 2) for one in drawn)


def test_names_of_trials():
    assert name_of({"local.lr": 0.05, "methods.stocfl.tau": 1e-05}) == "lr=0.05,tau=1e-05"
    assert name_of({"local.lr": 1, "methods.a.lr": 2}) == "local.lr=1,methods.a.lr=2"
    assert name_of({"local.persist": True, "local.clip_norm": None}) == "persist=true,clip_norm=null"
    assert name_of({"local.lr": 0.12345678}) == "lr=0.12345678"


def test_names_of_trials_do_not_collide():
    long = "methods.stocfl." + "x" * 120
    different = [
        {long: 1},
        {long: 2},
        {"model.name": "a/b.py:Net"},
        {"model.name": "a-b.py:Net"},
        {"model.name": "a b.py:Net"},
        {"data.angles": [0, 90]},
        {"data.angles": ["0-90"]},
        {"data.angles": "0-90"},
        {"methods.fedavg.aggregation": {"trimmed_mean": {"share": 0.1}}},
        {"methods.fedavg.aggregation": {"trimmed_mean": {"share": 0.2}}},
        {"local.lr": 0.1234567},
        {"local.lr": 0.1234568},
    ]
    names = [name_of(one) for one in different]
    assert len(set(names)) == len(names)
    assert all(len(name) <= 100 and "/" not in name and " " not in name for name in names)


def test_what_is_written_is_read_again(tmp_path):
    made = study(
        experiment={"rounds": 2, "output": "/tmp/out"},
        settings={"a": {"local": {"lr": 0.5}}},
        sweep={"parameters": {"local.epochs": {"low": 1, "high": 4, "int": True}}, "sampler": "random", "trials": 2},
    )
    (tmp_path / "again.yaml").write_text(made.to_yaml())
    assert load_study(tmp_path / "again.yaml").model_dump() == made.model_dump()


# ---- files


def test_a_plain_experiment_and_a_study_name_the_right_command(tmp_path):
    (tmp_path / "plain.yaml").write_text("rounds: 3\n")
    with pytest.raises(ConfigError, match=r"plain\.yaml is no study: .*run by `cfl-ray run`"):
        load_study(tmp_path / "plain.yaml")
    file = write(tmp_path)
    with pytest.raises(ConfigError, match=rf"{file} is a study, no experiment; run it with: cfl-ray compare {file}"):
        load(file)
    write(tmp_path, sweep={"parameters": {"local.lr": [1]}})
    with pytest.raises(ConfigError, match="run it with: cfl-ray sweep"):
        load(file)
    with pytest.raises(ConfigError, match="there is no config file"):
        load_study(tmp_path / "none.yaml")


def test_overrides_win_over_settings(tmp_path):
    methods = ["fedavg", {"ifca": {"num_clusters": 2}}]
    settings = {"a": {"local": {"lr": 0.5}}, "b": {"methods": [{"ifca": {"num_clusters": 3}}]}, "c": {}}
    file = write(tmp_path, experiment={"methods": methods}, settings=settings)
    made = load_study(file, ["local.lr=0.2", "methods.ifca.num_clusters=5"])
    for name in settings:
        values = made.values(name, {})
        assert values["local"]["lr"] == 0.2 and {"ifca": {"num_clusters": 5}} in values["methods"]
    assert "local" not in made.settings["c"]


@pytest.mark.parametrize(
    "override, message",
    [
        ("seeds=[1]", "seeds is a key of the study, overrides are of its experiment"),
        ("seed=1", "seed is decided by the study's `seeds`"),
        ("name=x", "name is decided by the study's `name`"),
        ("local.lr=0.5", "the sweep decides local.lr"),
        ("methods.ifca.num_clusters=2", "no method 'ifca' is in the config"),
        ("lr", "must look like section.key=value"),
    ],
)
def test_overrides_that_cannot_be_meant(tmp_path, override, message):
    file = write(tmp_path, experiment={"methods": ["fedavg"]}, sweep={"parameters": {"local.lr": [0.1]}})
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        load_study(file, [override])


def test_own_files_are_found_from_any_folder_and_count_as_they_are_written(tmp_path, monkeypatch):
    """Beside the study, or in the working directory; the record in the study's folder refers to the same files."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "net.py").write_text("")
    (tmp_path / "rule.py").write_text("")
    (tmp_path / "here" / "numbers.yaml").write_text("")
    keys = {
        "experiment": {"model": "net.py:Net"},
        "settings": {"a": {"methods": [{"fedavg": {"aggregation": "rule.py:Rule"}}]}},
        "sweep": {"parameters": {"model.name": ["net.py:Net", "mlp"]}},
        "published": "numbers.yaml",
    }
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "here", **keys)
    made = load_study("here/study.yaml")
    assert made.experiment["model"] == f"{tmp_path}/here/net.py:Net"
    assert made.settings["a"]["methods"] == [{"fedavg": {"aggregation": f"{tmp_path}/rule.py:Rule"}}]
    assert made.sweep.parameters["model.name"] == [f"{tmp_path}/here/net.py:Net", "mlp"]
    assert made.published == f"{tmp_path}/here/numbers.yaml" and made.experiment["output"] == f"{tmp_path}/runs"
    assert made._written[f"{tmp_path}/here/net.py:Net"] == "net.py:Net"
    (tmp_path / "record.yaml").write_text(made.to_yaml())
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = load_study("../record.yaml")
    assert again.model_dump() == made.model_dump() and again._written == made._written


def test_a_relative_output_of_a_job_is_in_the_home_folder(tmp_path):
    assert load_study(write(tmp_path), base=tmp_path / "home").experiment["output"] == f"{tmp_path}/home/runs"


def test_infinite_values_stay_infinite(tmp_path):
    made = study(experiment={"data": {"options": [float("inf")]}}, sweep={"parameters": {"local.lr": [float("inf")]}})
    (tmp_path / "study.yaml").write_text(made.to_yaml())
    for one in (made, made.located(), load_study(tmp_path / "study.yaml")):
        assert one.experiment["data"]["options"] == one.sweep.parameters["local.lr"] == [float("inf")]
