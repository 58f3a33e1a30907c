"""Presets of other libraries: the keys they fill in, those they leave alone, and what is said about exceptions."""

import numpy as np
import pytest
import yaml

from cfl_ray import ConfigError, Experiment, config
from cfl_ray.config.protocol import PROTOCOLS, exceptions_in_words
from cfl_ray.config.reading import load
from cfl_ray.data import federation_from_arrays
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.system.nested import leaves_of

PLAIN = {"methods": ["fedavg", {"apfl": {"alpha": 0.3}}], "data": {"source": "mnist"}}


def written_out(name: str) -> dict:
    """The experiment of `PLAIN` with every key of a preset, by hand."""
    preset = PROTOCOLS[name]
    norm = {} if name == "fl_bench" else preset["methods"]
    methods = [{"fedavg": norm} if norm else "fedavg", {"apfl": {"alpha": 0.3} | norm}]
    keys = {key: value for key, value in preset.items() if key not in ("methods", "data")}
    return keys | {"methods": methods, "data": {"source": "mnist"} | preset["data"]}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_preset_is_the_experiment_with_its_keys_written_out(name, tmp_path):
    preset, by_hand = Experiment(protocol=name, **PLAIN), Experiment(**written_out(name))
    assert preset.config_hash == by_hand.config_hash != Experiment(**PLAIN).config_hash
    assert preset.data.to_recipe() == by_hand.data.to_recipe()
    assert preset.to_dict() == by_hand.to_dict() | {"protocol": name}
    assert exceptions_in_words(preset.to_dict()) == ""
    file = tmp_path / "record.yaml"
    file.write_text(preset.to_record())  # has every key, and the same preset
    loaded = load(file)
    assert loaded.to_dict() | {"output": "runs"} == preset.to_dict() and loaded.config_hash == preset.config_hash


def test_given_keys_win_and_are_said():
    given = {
        "rounds": 7,
        "data": {"partition": {"alpha": 0.5, "clients": 5}, "test": {"fraction": 0.2}},
        "local": {"batch_size": 20, "momentum": 0.9},
        "methods": [{"fedavg": {"norm": "shared"}}, "fedper"],
        "evaluation": {"reported": {"apfl": "server", "fedper": "local"}},
        "keep": "best",
    }
    one = Experiment(protocol="pfllib", **given)
    assert (one.rounds, one.data.partition.alpha, one.data.test.fraction, one.local.batch_size) == (7, 0.5, 0.2, 20)
    assert (one.data.partition.min_samples, one.data.test.pool, one.local.lr, one.local.momentum) == (
        40,
        True,
        5e-3,
        0.9,
    )
    assert one.methods == [{"fedavg": {"norm": "shared"}}, {"fedper": {"norm": "local_statistics"}}]
    assert one.evaluation.reported == {"apfl": "server", "fedper": "local"} and one.keep.metric == "reported"
    assert exceptions_in_words(one.to_dict()) == (
        "protocol pfllib, except for (in brackets: the protocol): rounds 7 (2000), data.partition.clients 5 (20), "
        "data.partition.alpha 0.5 (0.1), data.test.fraction 0.2 (0.25), local.batch_size 20 (10), "
        "evaluation.reported.apfl server (local), methods.fedavg.norm shared (local_statistics)"
    )


def test_sections_and_methods_made_in_python_are_given_too():
    sections = {"local": config.LocalConfig(lr=0.3), "evaluation": config.EvaluationConfig(every=2)}
    one = Experiment(protocol="pfllib", methods=[FedAvg(weights="uniform")], **sections)
    assert (one.local.lr, one.local.batch_size, one.evaluation.every, one.evaluation.weights) == (0.3, 10, 2, "samples")
    assert one.methods == [FedAvg(weights="uniform")]  # as it was made
    assert "methods.fedavg.norm shared (local_statistics)" in exceptions_in_words(one.to_dict())
    owner = np.arange(20) % 2
    federation = federation_from_arrays(np.zeros((20, 2), np.float32), owner, owner)
    data = {"source": "arrays", "federation": federation}
    for given in (federation, data):
        assert Experiment(protocol="pfllib", data=given).data == Experiment(data=given).data


@pytest.mark.parametrize(
    ("data", "filled", "left"),
    [  # keys of the preset that are filled in, and keys without a meaning for these data
        ({"partition": {"kind": "classes"}}, {"partition.clients": 20, "test.pool": True}, ["partition.min_samples"]),
        ({"partition": {"sizes": [9, 9], "clients": 2, "kind": "iid"}}, {"test.fraction": 0.25}, []),
        ({"partition": {"kind": "dirichlet", "groups": 2}}, {"partition.alpha": 0.1, "partition.capped": True}, []),
        ({"source": "femnist", "partition": {"kind": "writer"}}, {"test.view": "holdout"}, ["test.pool"]),
        ({"source": "csv", "columns": {"client": "who"}}, {"test.fraction": 0.25}, ["test.pool"]),
        ({"source": "csv", "train_files": "a"}, {"partition.kind": "dirichlet"}, ["test.pool"]),
        ({"source": "csv", "train_files": "a", "test_files": "b"}, {"test.pool": True}, []),
        ({"source": "synthetic"}, {"partition.clients": 20}, ["test.pool", "test.fraction"]),
        ({"source": "arrays"}, {}, ["test.pool", "test.fraction", "partition.clients"]),
        ({"source": "my.py:data"}, {"partition.kind": "dirichlet"}, ["test.pool"]),
        ({"test": {"view": "cluster"}}, {"partition.kind": "dirichlet"}, ["test.pool", "test.fraction"]),
        ({"shift": {"kind": "rotated"}}, {"partition.kind": "dirichlet", "test.pool": True}, []),
    ],
)
def test_keys_of_data_are_filled_in_where_they_have_a_meaning(data, filled, left):
    found = leaves_of(Experiment(protocol="pfllib", data=data).to_dict()["data"])
    default = leaves_of(Experiment(data=data).to_dict()["data"])
    assert {key: found[key] for key in filled} == filled
    assert {key: found.get(key) for key in left} == {key: default.get(key) for key in left}


@pytest.mark.parametrize(
    ("given", "section", "key", "value"),
    [  # a key that replaces one of the preset
        ({"local": {"steps": 3}}, "local", "epochs", 5),
        ({"local": {"steps": None}}, "local", "epochs", 1),
        ({"cohort": {"clients": 4}}, "cohort", "fraction", 0.5),
        ({"keep": "last"}, "keep", "metric", None),
        ({"keep": {"which": "last"}}, "keep", "metric", None),
        ({"keep": {"metric": "accuracy"}}, "keep", "which", "best"),
    ],
)
def test_a_key_that_replaces_another_keeps_the_preset_away(given, section, key, value):
    assert getattr(getattr(Experiment(protocol="pfllib", **given), section), key) == value


def test_bad_values_are_refused_as_without_a_preset():
    cases = (
        ({"protocol": "flower"}, r"protocol: .*'pfllib'.* 'fl_bench'"),
        ({"local": 3}, r"local: expected a section of keys"),
        ({"local": {"batchsize": 3}}, r"unknown key 'local.batchsize' \(did you mean"),
        ({"methods": "fedavg"}, r"methods: "),
        ({"data": {"partition": {"kind": "dirichlit"}}}, r"unknown partition 'dirichlit'"),
        ({"data": {"partition": "iid"}}, r"data.partition: expected a section of keys"),
        ({"data": {"source": "csv", "columns": 3}}, r"data.columns: expected a section of keys"),
        ({"local": {"drop_last": "singel"}}, r"local.drop_last: it is true, false or single, got 'singel'"),
    )
    for given, message in cases:
        with pytest.raises(ConfigError, match=message):
            Experiment(**{"protocol": "pfllib"} | given)


@pytest.mark.parametrize("entry", ["all", None, {}, 3, ["fedavg"], {"fedavg": 3}, {"fedavg": {}, "ifca": {}}])
def test_entries_of_methods_that_name_no_single_method_stay_as_they_are(entry):
    assert Experiment(protocol="pfllib", methods=[entry]).methods == [entry]


def test_a_config_without_a_preset_has_the_hash_that_it_had(tmp_path):
    """The hash is that of the keys that differ from the defaults, and none of the new ones is among them."""
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"rounds": 3, "protocol": None}))
    assert load(tmp_path / "a.yaml").config_hash == Experiment(rounds=3).config_hash
    assert Experiment().config_hash == HASH


HASH = "68f6bba7ce99"  # of an experiment without any key, before there were presets
