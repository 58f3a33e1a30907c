"""Experiments are read from strict YAML and written as the same; an error names the key and what is valid."""

import ast
import dataclasses
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml

import cfl_ray
from cfl_ray.config import ConfigSection, Experiment, load
from cfl_ray.config.paths import recorded_in
from cfl_ray.config.reading import QUICKSTART
from cfl_ray.config.unused import warnings_of
from cfl_ray.core.method import Method
from cfl_ray.data import federation_from_arrays
from cfl_ray.errors import ConfigError, DataError
from cfl_ray.methods import REGISTRY, resolve
from cfl_ray.methods.ifca import IFCA
from cfl_ray.methods.stocfl import StoCFL
from cfl_ray.plugins.loading import load_plugin

DISCRIMINATORS = ("kind", "source")  # of unions, whose description lists the kinds


def refused(message: str, **values):
    """Asserts that these values raise ConfigError with this message."""
    with pytest.raises(ConfigError, match=message):
        Experiment(**values)


@pytest.fixture
def federation():
    draw = np.random.default_rng(0)
    return federation_from_arrays(
        draw.random((20, 3)).astype("float32"), draw.integers(0, 2, 20), np.repeat([0, 1], 10)
    )


@pytest.fixture
def file(tmp_path):
    """Writes a YAML file and returns its path."""

    def write(text: str):
        path = tmp_path / "experiment.yaml"
        path.write_text(text)
        return path

    return write


# values of an experiment, and below them the error as a regular expression
REFUSED = r"""
methods: fedavg
    ^methods: expected a list, write \[fedavg\], got 'fedavg'$
methods: {ifca: {}}
    ^methods: expected a list, write \[\{ifca: ...\}\], got \{'ifca': \{\}\}$
name: größe
    ^name: expected ASCII letters, digits and _ . -, the first a letter or digit, got
name: xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx
    ^name: String should have at most 100 characters, got 'xxx
schedule: 5
    ^schedule: expected a list, e\.g\. \[{round: \.\.\.}\], got 5$
fedavg: {mu: 3}
    unknown key 'fedavg'; valid: .*; options of a method .* methods\.fedavg\.OPTION
round: 3
    unknown key 'round' \(did you mean 'rounds'\?\)
local: {epoch: 3}
    unknown key 'local.epoch' \(did you mean 'epochs'\?\)
data: {partition: {alhpa: 3}}
    unknown key 'data.partition.alhpa' \(did you mean 'alpha'\?\)
data: {source: csv, columns: {lable: y}}
    unknown key 'data.columns.lable' \(did you mean 'label'\?\)
schedule: [{round: 1}, {round: 2, joins: [1]}]
    unknown key 'schedule.1.joins' \(did you mean 'join'\?\)
schedule: [{round: 1, change: [{clients: 1, drift: {kind: gradual, ovr: 3}}]}]
    unknown key 'schedule.0.change.0.drift.gradual.ovr' \(did you mean 'over'\?\)
cohort: {zzz: 1}
    unknown key 'cohort.zzz'; valid: availability, clients, dropout, fraction
local: {batch_size: 9223372036854775808}
    ^local.batch_size: .* at most 9223372036854775807, got 9223372036854775808$
rounds: 1000000000000000000000000000000
    ^rounds: a whole number is at most 9223372036854775807, got 1000000000000000000000000000000$
model: {name: 3}
    ^model.name: a model is a name, .*, got 3$
schedule: [{join: [1]}]
    ^schedule.0.round: Field required$
rounds: true
    rounds takes a number, got true$
local: {lr: false}
    ^local: lr takes a number, got false$
data: {shift: {kind: rotated, angles: [0, true]}}
    angles takes numbers, got \[0, true\]$
data: {shift: {kind: pathological, label_sets: [[0, 1], [2, false]]}}
    label_sets takes numbers, got \[\[0, 1\], \[2, false\]\]$
rounds: 0
    ^rounds: .*greater than or equal to 1, got 0$
seed: -1
    ^seed: .*greater than or equal to 0, got -1$
seed: 2147483648
    ^seed: .*less than 2147483648, got 2147483648$
cohort: {fraction: 1.5}
    ^cohort.fraction: .*less than or equal to 1, got 1.5$
cohort: {fraction: 0}
    ^cohort.fraction: .*greater than 0, got 0$
cohort: {dropout: 1}
    ^cohort.dropout: .*less than 1, got 1$
local: {lr: 0}
    ^local.lr: .*greater than 0, got 0$
local: {momentum: 1.0}
    ^local.momentum: .*less than 1, got 1.0$
local: {clip_norm: .inf}
    ^local.clip_norm: .*finite number, got inf$
data: {shift: {kind: rotated, angles: [0, .inf]}}
    ^data.shift.angles.1: .*finite number, got inf$
data: {shift: {kind: noise, sigmas: [0, .nan]}}
    ^data.shift.sigmas.1: .*finite number, got nan$
local: {epochs: 2.5}
    ^local.epochs: .*integer.*, got 2.5$
data: {shift: {kind: rotate}}
    ^data.shift: unknown shift 'rotate' \(did you mean 'rotated'\?\)$
data: {shift: {options: {a: 1}, kind: rotated}}
    ^data.shift.options is a key of kind file.py:Name, and kind is rotated; its keys are: angles$
data: {partition: {cut: [{keep: 1.0, clients: 3}]}}
    ^data.partition.cut.0.keep: .*less than 1, got 1.0$
data: {partition: {cut: [{keeps: 0.1, clients: 3}]}}
    unknown key 'data.partition.cut.0.keeps' \(did you mean 'keep'\?\)
data: {source: synthetic, synthetic_shape: [-1]}
    ^data.synthetic_shape.0: .*greater than or equal to 1, got -1$
data: {partition: {sizes: [10, 0], clients: 2}}
    ^data.partition.sizes.1: .*greater than or equal to 1, got 0$
data: {partition: {sizes: [10, 20], clients: 3}}
    ^data.partition: sizes has 2 entries, clients is 3; give every client its size
data: {source: sea, partition: {share_alpha: 0.5}}
    partition.share_alpha has no meaning for source sea, which is not divided; leave it out
data: {partition: {sizes: [10], clients: 1, kind: classes}}
    ^data.partition.sizes is a key of kind iid, and kind is classes; its keys are: clients, samples,
data: {partition: {groups: 4}}
    ^data.partition.groups is a key of kind dirichlet \| classes, and kind is iid; its keys are:
data: {partition: {groups: 1, kind: classes}}
    ^data.partition.groups: .*greater than or equal to 2, got 1$
data: {partition: {groups: 4, kind: classes, classes_per_client: 4}}
    ^data.partition: classes_per_client is 4, but a group has 3 classes; lower it or raise classes_per_group
data: {partition: {groups: 4, kind: classes}, shift: {kind: rotated}}
    ^data: partition.groups \(4\) and shift.kind \(rotated\) both make true groups; set one of them
data: {test: {pool: true, view: cluster}}
    ^data.test: pool divides the test images among the clients, so view must be holdout, not cluster
data: {test: {pool: true, view: holdout}, partition: {kind: writer}}
    ^data: test.pool: the writers of the test images are not known, so partition.kind cannot be writer
data: {source: synthetic, partition: {cut: [{keep: 0.1, clients: 3}]}}
    ^data: partition.cut has no meaning for source synthetic, which is not divided; leave it out
data: {source: synthetic, synthetic_groups: 1099511627776}
    ^data.synthetic_groups: .*less than or equal to 1000000, got 1099511627776$
data: {source: synthetic, partition: {clients: 1099511627776}}
    ^data.partition.clients: .*less than or equal to 100000000, got 1099511627776$
privacy: {target_epsilon: 1.0e+30}
    ^privacy.target_epsilon: .*less than or equal to 1000, got 1e.30$
privacy: {noise_multiplier: 1.0e-30}
    ^privacy.noise_multiplier: .*greater than or equal to 0.01, got 1e-30$
privacy: {noise_multiplier: 1, signatures: {noise_multiplier: 1.0e+30}}
    ^privacy.signatures.noise_multiplier: .*less than or equal to 10000, got 1e.30$
{privacy: {examples: {noise_multiplier: 1}}, schedule: [{round: 3, change: [{clients: [0, 1], data_of: [1, 0]}]}]}
    ^privacy, and schedule.change.data_of in round 3: the accounts are of clients
privacy: {noise_multiplier: 1, clip: 1.0e+30}
    ^privacy.clip: .*less than or equal to 1000000000, got 1e.30$
privacy: {noise_multiplier: 1, extrapolate: {cohort: 100, population: 100000000000}}
    ^privacy.extrapolate.population: .*less than or equal to 10000000000, got 100000000000$
data: {shift: {kind: blur, radii: [0, 1.0e+30]}}
    ^data.shift.radii.1: .*less than or equal to 1000, got 1e.30$
schedule: [{round: 2, change: [{clients: 0, blur: 1.0e+30}]}]
    ^schedule.0.change.0.blur: .*less than or equal to 1000, got 1e.30$
privacy: {noise_multiplier: 1, clip_lr: 1.0e+30}
    ^privacy.clip_lr: .*less than or equal to 100, got 1e.30$
attack: {kind: sign}
    ^attack: unknown attack 'sign' \(did you mean 'sign_flip'\?\)$
attack: {kind: scaled, fraction: 1}
    ^attack.fraction: .*less than 1, got 1$
attack: {kind: scaled, clients: []}
    ^attack.clients: .*at least 1 item.*, got \[\]$
attack: {kind: scaled, clients: [3, -1]}
    ^attack.clients.1: .*greater than or equal to 0, got -1$
attack: {kind: scaled, scale: 0}
    ^attack.scale: .*greater than 0, got 0$
attack: {from_rounds: 3}
    unknown key 'attack.from_rounds' \(did you mean 'from_round'\?\)
runtime: {engine: fast}
    ^runtime.engine: .*'sequential'.*, got 'fast'$
methods: []
    ^methods: .*at least 1 item.*, got \[\]$
name: a/b
    ^name: .*, got 'a/b'$
data: {federation: mine.py}
    ^data.federation: a Federation made in Python, got .*; in a file, name the data by data.source$
schedule: [{round: 1, join: 9-3}]
    ^schedule.0.join: '9-3' is not a client: write an id or a range of ids, e.g. 7 or 0-9
schedule: [{round: 1, leave: [x-3]}]
    ^schedule.0.leave: 'x-3' is not a client: write an id or a range of ids
schedule: [{round: 1, change: [{clients: [1]}]}]
    ^schedule.0.change.0: nothing would change; say rotate, relabel, swap, noise, blur, brightness
schedule: [{round: 1, change: [{clients: [1], noise: 0.1, blur: 1}]}]
    ^schedule.0.change.0: noise and blur are two domains, and clients are in one; give one of them
schedule: [{round: 1, change: [{clients: [1], swap: [2, 2]}]}]
    ^schedule.0.change.0: swap names label 2 twice; name two labels
schedule: [{round: 1, change: [{clients: [1], rotate: 45}]}]
    ^schedule.0.change.0: rotate must be a multiple of 90 degrees, got 45
schedule: [{round: 1, change: [{clients: 1-3, data_of: 5}]}]
    ^schedule.0.change.0: data_of names 1 client for 3; give one for each
schedule: [{round: 3}]
    ^schedule.0: nothing happens before round 3; give it join, leave or change
schedule: [{round: 3, change: [{clients: 1, back_to: 3}]}]
    ^schedule.0: back_to must be a round before round 3, got 3
schedule: [{round: 3, change: [{clients: 1, back_to: 1, data_of: 2}]}]
    ^schedule.0.change.0: data_of and back_to both say which data the clients have
schedule: [{round: 3, change: [{clients: 1-3, relabel: 1, drift: {kind: recurrent, rounds: [9, 5]}}]}]
    rounds must ascend, got .9, 5.
schedule: [{round: 3, change: [{clients: 1-3, relabel: 1, drift: {kind: recurrent, rounds: [3]}}]}]
    ^schedule.0: drift.rounds must be after round 3, got 3
schedule: [{round: 3, change: [{clients: 1-3, relabel: 1, drift: {kind: incremental, groups: 4, every: 1}}]}]
    drift.groups is 4 for 3 clients
schedule: [{round: 3, change: [{clients: 1-3, relabel: 1, drift: {kind: gradual, over: 10000000000}}]}]
    drift.gradual.over: .*less than or equal to 10000, got 10000000000$
schedule: [{round: 3, change: [{clients: 1-3, relabel: 1, drift: {kind: gradual, over: 1}}]}]
    drift.gradual.over: .*greater than or equal to 2, got 1
schedule: [{round: 3, change: [{clients: 1-3, relabel: 1, drift: {kind: gradual, over: 4}, data_of: [3, 7, 8]}]}]
    data_of: client 3 gives its data and takes others, and gradual drift would repeat that
cohort: {availability: 1.5}
    ^cohort.availability.chance: .*less than or equal to 1, got 1.5$
cohort: {availability: {kind: diurnal, period: 1.0e-300}}
    ^cohort.availability.period: .*greater than or equal to 0.000001, got 1e-300$
cohort: {availability: {kind: diurnal, zones: 1000000000}}
    ^cohort.availability.zones: .*less than or equal to 10000, got 1000000000$
clock: {kind: classes, classes: [{share: 1.0e+308}]}
    ^clock.classes.0.share: .*less than or equal to 1000000000, got 1e.308$
cohort: {availability: {kind: trace}}
    ^cohort.availability.file: Field required$
cohort: {availability: {kind: diurnal, periods: 3}}
    unknown key 'cohort.availability.periods' \(did you mean 'period'\?\)
cohort: {clients: 50}
    ^cohort.clients: 50 clients per round, but the federation has 40; at most 40$
data: {shift: {kind: rotated, offsets: [1]}}
    ^data.shift.offsets is a key of kind shifted, and kind is rotated;
data: {shift: {kind: rotated, groups: 3}}
    ^data.shift.groups is a key of kind file.py:Name, and kind is rotated;
data: {shift: {angles: [0, 9]}}
    ^data.shift.angles is a key of kind rotated \| rotated_labels, and kind is none;
data: {partition: {alpha: 0.3}}
    ^data.partition.alpha is a key of kind dirichlet, and kind is iid;
data: {synthetic_groups: 9}
    ^data.synthetic_groups is a key of source synthetic, and source is digits;
data: {options: {size: 9}}
    ^data.options is a key of source file.py:Name, and source is digits;
data: {source: 'load.py:f', vocabulary: 9}
    ^data.vocabulary is a key of source hf_disk \| sent140_leaf, and source is file.py:Name;
cohort: {availability: {chance: 0.2}}
    ^cohort.availability.chance is a key of kind bernoulli \| diurnal, and kind is always;
attack: {kind: gaussian, scale: 2}
    ^attack.scale is a key of kind sign_flip \| scaled \| colluders, and kind is gaussian;
""".strip().splitlines()


class TestErrors:
    @pytest.mark.parametrize("values, message", zip(REFUSED[::2], REFUSED[1::2], strict=True))
    def test_a_value_is_refused(self, values, message):
        refused(message.strip(), **yaml.safe_load(values))

    def test_all_problems_are_reported_at_once(self):
        refused(
            "unknown key 'round'.*\n.*cohort.fraction|cohort.fraction.*\n.*unknown key 'round'",
            round=1,
            cohort={"fraction": 2},
        )

    @pytest.mark.parametrize("source", ["arrays", "own.py:data"])
    def test_the_default_number_of_clients_is_no_limit_for_samples_that_have_clients(self, source):
        """`data.partition.clients` is 40 unless it is set, and has no effect on them."""
        assert Experiment(data={"source": source}, cohort={"clients": 50}).data.known_clients is None

    @pytest.mark.parametrize("source, nearest", [("minst", "mnist"), ("cifar", "cifar10")])
    def test_an_unknown_data_set_names_the_nearest(self, source, nearest):
        refused(rf"unknown data set '{source}' \(did you mean '{nearest}'\?\)", data={"source": source})
        refused(
            rf"unknown data set '{source}' \(did you mean '{nearest}'\?\)",
            data={"shift": {"kind": "hybrid", "other": source}},
        )

    @pytest.mark.parametrize(
        "source, cure",
        [
            ("shops.csv", r": .*; write source: csv, root: shops.csv$"),
            ("made/SHOPS.PARQUET", r": .*; write source: csv, root: made/SHOPS.PARQUET$"),
            ("x.npz", r": .*; write source: arrays, root: x.npz$"),
            ("file.h5", r": .*; a function in a file of yours, my.py:load, reads others$"),
            ("./images/", r": data.source is a kind of data \(csv, arrays, .*\), data.root its file or folder; a"),
            ("my.py", r": write my.py:NAME, with the name of a function or class in that file$"),
        ],
    )
    def test_a_file_in_the_place_of_a_kind_of_data(self, source, cure):
        refused(f"unknown data set '{source}'{cure}", data={"source": source})

    @pytest.mark.parametrize("data", ["digits", 5, ["digits"]])
    def test_data_that_are_neither_a_section_nor_a_federation(self, data):
        refused("^data: expected a section of keys", data=data)

    def test_a_long_value_is_shortened(self):
        for key, value in {"data": tuple(range(900)), "rounds": "9" * 900}.items():
            with pytest.raises(ConfigError) as error:
                Experiment(**{key: value})
            assert "..." in str(error.value) and len(str(error.value)) < 400

    @pytest.mark.parametrize(
        "key, value",
        [("shift", {"kind": "rotated"}), ("partition", {"clients": 3}), ("normalize", [[0.5], [0.5]])],
    )
    def test_a_federation_is_used_as_it_is(self, key, value):
        federation = federation_from_arrays(np.zeros((4, 1, 2, 2)), np.zeros(4, int), np.arange(4) // 2)
        refused(f"^data: {key}.* would have no effect", data={"federation": federation, key: value})

    def test_nothing_is_changed_afterwards(self):
        with pytest.raises(Exception, match="frozen"):
            Experiment().rounds = 5


class TestYaml:
    @pytest.mark.parametrize(
        "overrides",
        [
            [],
            [
                "local.lr=1e-5",
                "local.batch_size=null",
                "cohort.clients=7",
                "methods=[local, {ifca: {num_clusters: 2}}]",
            ],
            [
                "schedule=[{round: 2, join: [3]}]",
                "data.shift.kind=pathological",
                "data.normalize=[[0.5], [0.25]]",
                "evaluation.target=0.9",
                "model.options={hidden: 7}",
            ],
            [
                "data.partition={kind: iid, clients: 2, sizes: [5, 6], cut: [{keep: 0.5, clients: 1}]}",
                "data.test={view: holdout, pool: true}",
            ],
            [
                "schedule=[{round: 2, join: [3, 5-9], leave: 11-12, "
                "change: [{clients: 0-4, rotate: 90}, {clients: [1, 2], data_of: [2, 1]}, "
                "{clients: 3, swap: [1, 2]}, {clients: 5, back_to: 1}, "
                "{clients: 0-3, relabel: 1, drift: {kind: gradual, over: 3}}]}]",
                "cohort.availability=0.5",
            ],
            ["cohort.availability={kind: diurnal, chance: 0.3, zones: 4}"],
            [
                "methods=[{ifca: {aggregation: {multi_krum: {attackers: 2}}}}]",
                "attack={kind: colluders, clients: [1, 2]}",
            ],
            ["data.shift.kind=none", "data.partition={kind: dirichlet, groups: 5, alpha: 10, capped: false}"],
        ],
    )
    def test_a_written_config_reads_as_the_same_experiment(self, overrides, file):
        experiment = load(None, overrides)
        text = experiment.to_yaml()
        again = load(file(text))
        assert again == experiment and again.to_yaml() == text and again.config_hash == experiment.config_hash

    def test_clients_are_ids_and_ranges(self):
        experiment = load(None, ["schedule=[{round: 2, join: [3, 5-9, 12, 13], leave: 20-21}]"])
        assert experiment.schedule[0].join == [3, 5, 6, 7, 8, 9, 12, 13] and experiment.schedule[0].leave == [20, 21]
        assert yaml.safe_load(experiment.to_yaml())["schedule"][0]["join"] == [3, "5-9", 12, 13]

    def test_a_drift_becomes_single_events(self):
        def events(drift, seed=0, **change):
            change = {"clients": [7, 1, 4, 5], "swap": [0, 1], "drift": drift} | change
            one = Experiment(seed=seed, schedule=[{"round": 5, "join": [9], "change": [change]}])
            assert one.events[0].join == [9] and not any(event.join for event in one.events[1:])
            return [(event.round, item.clients, item.back_to) for event in one.events for item in event.change]

        everyone = [7, 1, 4, 5]
        assert events(None) == [(5, everyone, None)]
        recurrent = events({"kind": "recurrent", "rounds": [8, 9, 12]})
        assert recurrent == [(5, everyone, None), (8, everyone, 4), (9, everyone, None), (12, everyone, 4)]
        incremental = events({"kind": "incremental", "groups": 3, "every": 2})
        assert incremental == [(5, [7], None), (7, [1], None), (9, [4, 5], None)]
        (first, *_) = Experiment(
            schedule=[
                {
                    "round": 1,
                    "change": [
                        {
                            "clients": [3, 4],
                            "data_of": [8, 9],
                            "drift": {"kind": "incremental", "groups": 2, "every": 1},
                        }
                    ],
                }
            ]
        ).events
        assert first.change[0].data_of == [8]

    def test_in_gradual_drift_the_new_data_become_more_frequent(self):
        def share(seed):
            drift = {"kind": "gradual", "over": 10}
            change = {"clients": "0-399", "relabel": 1, "drift": drift}
            has_new, shares = np.zeros(400, bool), []
            for event in Experiment(seed=seed, schedule=[{"round": 3, "change": [change]}]).events:
                for item in event.change:
                    assert (has_new[item.clients] == (item.back_to == 2)).all() and item.back_to in (None, 2)
                    has_new[item.clients] = item.back_to is None
                shares.append((event.round, has_new.mean()))
            return shares

        found = share(0)
        assert [round for round, _ in found] == list(range(3, 13)) and found[-1][1] == 1
        assert np.allclose([mean for _, mean in found], np.arange(1, 11) / 10, rtol=0, atol=0.1)
        assert found == share(0) != share(1)

    @pytest.mark.parametrize(
        "named",
        [
            lambda file: {"cohort": {"availability": {"kind": "trace", "file": file}}},
            lambda file: {"clock": {"kind": "trace", "file": file}},
            lambda file: {"data": {"source": "arrays", "root": file}},
            lambda file: {"model": {"name": "mlp", "weights": file}},
        ],
    )
    def test_a_file_whose_content_changed_makes_another_experiment(self, tmp_path, named):
        file, hashes = tmp_path / "file", []
        for text in ("1,2", "1,3"):
            file.write_text(text)
            hashes.append(Experiment(**named(str(file))).config_hash)
        assert hashes[0] != hashes[1]

    def test_every_key_is_written_except_a_federation(self):
        written = yaml.safe_load(Experiment().to_yaml())
        assert written.keys() == Experiment.model_fields.keys()
        for name, section in written.items():
            if isinstance(section, dict):
                assert section.keys() == type(getattr(Experiment(), name)).model_fields.keys() - {"federation"}

    def test_every_key_has_a_description(self):
        def is_section(value):
            return isinstance(value, type) and issubclass(value, ConfigSection)

        def below(section):
            return [section, *(found for child in section.__subclasses__() for found in below(child))]

        sections = [section for section in below(ConfigSection) if section.__module__.startswith("cfl_ray.")]
        missing = [
            f"{section.__name__}.{name}"
            for section in sections
            for name, key in section.model_fields.items()
            if not key.description and not is_section(key.annotation) and name not in DISCRIMINATORS
        ]
        assert len(sections) > 40 and missing == []

    @pytest.mark.parametrize(
        "text, message",
        [
            ("rounds: [1", "experiment.yaml is not valid YAML: line 1, column 11: "),
            ("methods: [fedavg\ndata: {}", "experiment.yaml is not valid YAML: line 2, column 5: expected ','"),
            ("name: x\n\tseed: 1", r"character '\\t' that cannot start any token; indent with spaces, not with tabs"),
            ("name: x\n seed: 1", "values are not allowed here; indent the keys of a section alike, and put a text"),
            ('name: "x', "unexpected end of stream; close the quotes"),
            ("- rounds", "experiment.yaml must hold keys and values, e.g. `rounds: 30`, got list"),
            ("just words", "experiment.yaml must hold keys and values, e.g. `rounds: 30`, got str"),
            ("3: 4", "experiment.yaml must hold keys and values, e.g. `rounds: 30`, got the key 3"),
            (
                "rounds: 1\nseed: 2\nrounds: 5",
                "not valid YAML: key 'rounds' is given twice, in lines 1 and 3; leave one",
            ),
            ("local: {lr: 0.1, lr: 0.2}", "key 'lr' is given twice, in line 1"),
            ("self: 4", "unknown key 'self'"),
            ("rounds: 2020-99-99", "experiment.yaml is not valid YAML: month must be in 1..12"),
            (f"rounds: {'[' * 5000}", "experiment.yaml is not valid YAML"),
            (f"rounds: {'[' * 200}{']' * 200}", "is not valid YAML: it is nested deeper than 100 levels"),
            ("methods: &a [*a]", "is not valid YAML: it is nested deeper than 100 levels"),
            (
                "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
                + "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)),
                "it has more than 10,000,000 values, as its aliases repeat them",
            ),
        ],
    )
    def test_other_files_are_refused(self, text, message, file):
        with pytest.raises(ConfigError, match=message) as error:
            load(file(text))
        assert "\n" not in str(error.value)

    def test_a_merged_mapping_may_have_the_keys_of_the_one_that_takes_it(self, file):
        text = "local: &shared {lr: 0.5, epochs: 2}\nmethods: [{fedavg: {local: {<<: *shared, lr: 0.1}}}]"
        assert load(file(text)).methods == [{"fedavg": {"local": {"lr": 0.1, "epochs": 2}}}]

    def test_a_folder_and_a_pipe_are_no_files(self, tmp_path):
        (tmp_path / "folder.yaml").mkdir()
        os.mkfifo(tmp_path / "pipe.yaml")
        for name, why in (("folder.yaml", "Is a directory"), ("pipe.yaml", "it is a device or a pipe")):
            with pytest.raises(DataError, match=f"{name} cannot be read: {why}"):
                load(tmp_path / name)

    def test_a_file_that_is_no_text(self, tmp_path):
        (tmp_path / "image.yaml").write_bytes(b"\x89PNG\r\n")
        with pytest.raises(ConfigError, match="image.yaml is no text in UTF-8"):
            load(tmp_path / "image.yaml")

    def test_a_file_that_is_not_there(self):
        with pytest.raises(ConfigError, match="there is no config file nowhere.yaml"):
            load("nowhere.yaml")

    def test_an_empty_file_is_all_defaults(self, file):
        assert load(file("")) == Experiment()

    def test_no_file_is_the_built_in_example(self):
        assert load().name == "rotated-digits" and load() == load(QUICKSTART)

    def test_events_of_the_built_in_example_follow_the_number_of_clients(self):
        for override, joining in (
            ("rounds=3", [38, 39]),
            ("data.partition.clients=8", [6, 7]),
            ("data.partition.clients=100", [98, 99]),
            ("data.partition.clients=3", None),
            ("data.source=arrays", None),
            ("data.source=my.py:load", None),
            ("schedule=[{round: 2, leave: [1]}]", []),
        ):
            schedule = load(None, [override]).schedule
            assert (schedule[0].join if schedule else None) == joining, override


class TestOverrides:
    def test_set_one_key_and_leave_the_others(self, file):
        path = file("rounds: 7\nlocal: {epochs: 3, lr: 0.5}\n")
        experiment = load(
            path, ["local.lr=0.05", "cohort.fraction=0.25", "model.name=lenet5", "data.partition.samples=10"]
        )
        assert (experiment.rounds, experiment.local.epochs, experiment.local.lr) == (7, 3, 0.05)
        assert (experiment.cohort.fraction, experiment.model.name) == (0.25, "lenet5")
        assert experiment.data.partition.samples == 10

    def test_another_model_does_not_get_the_options_of_the_model_in_the_file(self):
        assert load(None, ["model.name=mlp"]).model.options == {"hidden": 64}
        assert load(None, ["model.name=net.py:Net"]).model.options == {}
        assert load(None, ["model.options.width=8", "model.name=net.py:Net"]).model.options == {"width": 8}

    @pytest.mark.parametrize("text, value", [("1e-3", 0.001), ("0.5", 0.5), ("1", 1.0)])
    def test_numbers(self, text, value):
        assert load(None, [f"local.lr={text}"]).local.lr == value

    def test_the_last_one_counts(self):
        assert load(None, ["rounds=3", "rounds=4"]).rounds == 4

    def test_a_pattern_needs_no_quotes(self):
        overrides = ["data.source=csv", "data.root=x", "data.train_files=*.csv", "data.test_files=*"]
        data = load(None, [*overrides, "data.shift.kind=none", "data.partition.kind=iid"]).data
        assert (data.train_files, data.test_files) == ("*.csv", "*")

    @pytest.mark.parametrize(
        "override, message",
        [
            ("local.lr", "override 'local.lr' must look like section.key=value, e.g. local.lr=0.05"),
            ("=3", "override '=3' must look like section.key=value"),
            ("rounds.x=3", "override 'rounds.x=3': rounds is a value, not a section"),
            ("rounds=[3", r"rounds=\[3 is not valid YAML"),
            ("locl.lr=3", r"unknown key 'locl' \(did you mean 'local'\?\)"),
            ("lr=3", r"unknown key 'lr' \(did you mean local.lr\?\)"),
            ("data.clients=3", r"unknown key 'data.clients' \(did you mean data.partition.clients\?\)"),
            ("data.num_clients=3", r"unknown key 'data.num_clients' \(did you mean data.partition.clients\?\)"),
            ("data.alpha=3", r"unknown key 'data.alpha' \(did you mean data.partition.alpha\?\)"),
            ("local.learning_rate=3", r"unknown key 'local.learning_rate' \(did you mean 'lr'\?\)"),
            ("num_rounds=3", r"unknown key 'num_rounds' \(did you mean 'rounds'\?\)"),
            ("runtime.gpus=1", r"unknown key 'runtime.gpus' \(did you mean 'gpus_per_host'\?\)"),
            ("data.lr=3", r"unknown key 'data.lr' \(did you mean local.lr\?\)"),
        ],
    )
    def test_errors(self, override, message, file):
        with pytest.raises(ConfigError, match=message):
            load(file("rounds: 7"), [override])


class TestHash:
    @pytest.mark.parametrize(
        "override",
        [
            "runtime.hosts=3",
            "runtime.engine=vectorised",
            "runtime.precision=float32",
            "tracking.enabled=false",
            "output=elsewhere",
            "name=other",
            "data.root=/x",
            "data.shards=/y",
            "data.download=true",
        ],
    )
    def test_ignores_where_it_runs_and_where_results_go(self, override):
        assert load(None, [override]).config_hash == load().config_hash

    @pytest.mark.parametrize(
        "override",
        [
            "seed=1",
            "rounds=7",
            "local.lr=0.2",
            "cohort.dropout=0.1",
            "data.partition.clients=30",
            "model.name=lenet5",
            "methods=[fedavg]",
            "methods=[{fedprox: {mu: 0.1}}]",
            "schedule=[]",
            "evaluation.every=2",
            "attack.kind=scaled",
            "methods=[{fedavg: {aggregation: median}}]",
            "runtime.precision=tf32",
            "runtime.precision=bf16",
        ],
    )
    def test_changes_with_what_can_change_a_result(self, override):
        assert load(None, [override]).config_hash != load().config_hash

    def test_ignores_what_is_the_default(self):
        same = [{"local": {"epochs": 5}}, {"attack": {"kind": "none"}}, {"data": {"shift": {}}}, {"rounds": 30}]
        assert {Experiment(**values).config_hash for values in same} == {Experiment().config_hash}
        hashes = {Experiment(methods=[{"ifca": options}]).config_hash for options in ({}, {"aggregation": "mean"})}
        assert len(hashes) == 1
        options = {name: value for name, value in dataclasses.asdict(IFCA()).items() if name != "aggregation"}
        assert Experiment(methods=[IFCA()]).config_hash == Experiment(methods=[{"ifca": options}]).config_hash

    def test_former_names_of_keys_are_accepted_and_stay_in_the_hash(self):
        """The hash was computed before the keys were renamed."""
        with pytest.warns(FutureWarning, match=r"(max_images is called max_samples|local_images is .*) now"):
            former = Experiment(evaluation={"local_images": 7}, data={"test": {"max_images": 9}})
        present = Experiment(evaluation={"local_samples": 7}, data={"test": {"max_samples": 9}})
        assert former == present and former.config_hash == present.config_hash == "e58c0516b0f4"
        assert present.data.to_recipe()["test"]["max_images"] == 9
        assert "local_samples: 7" in former.to_yaml()
        with pytest.raises(ConfigError, match=r"unknown key 'data.test.max_images'.*max_samples"):
            Experiment(data={"test": {"max_images": 9, "max_samples": 9}})

    def test_the_record_of_an_earlier_version_is_read_without_a_warning(self, tmp_path):
        record = tmp_path / "config.yaml"
        record.write_text(
            f"{recorded_in(tmp_path)}evaluation: {{local_images: 7}}\ndata: {{test: {{max_images: 9}}}}\n"
        )
        with warnings.catch_warnings(action="error"):
            loaded = load(record)
        assert loaded.config_hash == "e58c0516b0f4" and loaded.data.test.max_samples == 9

    def test_is_stable(self):
        """Computed once with `load().config_hash`: a different hash makes every run another experiment."""
        assert (load().config_hash, Experiment().config_hash) == ("66873529f6f2", "68f6bba7ce99")

    def test_takes_an_entry_of_methods_that_is_none(self):
        assert Experiment(methods=[["fedavg"]]).config_hash != Experiment(methods=[{"fedavg": 3}]).config_hash

    def test_of_a_method_follows_its_class_and_options(self):
        methods = (REGISTRY["fedavg"](), REGISTRY["ifca"](), IFCA(num_clusters=2))
        assert len({Experiment(methods=[method]).config_hash for method in methods}) == 3
        assert len(Experiment().config_hash) == 12 and int(Experiment().config_hash, 16) >= 0

    def test_of_a_federation_made_in_python_follows_its_content(self, federation):
        draw = np.random.default_rng(1)
        other = federation_from_arrays(
            draw.random((20, 3)).astype("float32"), draw.integers(0, 2, 20), np.repeat([0, 1], 10)
        )
        hashes = [Experiment(data=data).config_hash for data in (federation, federation, other)]
        assert hashes[0] == hashes[1] != hashes[2]


class TestPython:
    def test_takes_a_federation_a_factory_and_methods(self, federation):
        def Net(num_classes): ...

        experiment = Experiment(data=federation, model=Net, methods=[StoCFL(tau=0.3), IFCA])
        assert experiment.data.federation is federation and experiment.data.source == "arrays"
        assert experiment.model.name is Net
        written = experiment.to_dict()
        options = dataclasses.asdict(StoCFL(tau=0.3))
        del options["local"], options["label"]  # which are null
        assert written["methods"] == [{"stocfl": options}, "ifca"]
        assert written["model"]["name"].endswith("Net")
        # A run directory with these can be resumed.
        assert resolve(written["methods"]) == {"stocfl": StoCFL(tau=0.3), "ifca": IFCA()}

    def test_the_package_offers_its_public_names_and_loads_them_on_first_use(self):
        assert cfl_ray.Experiment is Experiment and cfl_ray.Method is Method
        for name in cfl_ray.__all__:
            assert getattr(cfl_ray, name).__name__ == name and name in dir(cfl_ray)
        assert {name for name in dir(cfl_ray) if not name.startswith("__")} == set(cfl_ray.__all__)
        with pytest.raises(AttributeError, match="no attribute 'Experimnt'"):
            _ = cfl_ray.Experimnt

    def test_type_checkers_see_the_same_names(self):
        """Those that `if TYPE_CHECKING:` imports are those that `__getattr__` loads, from the same modules."""
        tree = ast.parse(Path(cfl_ray.__file__).read_text())
        (block,) = (
            node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        )
        imported = {alias.name: node.module for node in block.body for alias in node.names}
        loaded = {name: module for module, names in cfl_ray._MODULES.items() for name in names}
        assert imported == loaded and sorted(imported) == sorted(cfl_ray.__all__)


class TestMethods:
    def test_of_every_kind_in_order(self, tmp_path):
        (tmp_path / "mine.py").write_text(MINE)
        found = resolve(
            [
                "stocfl",
                {"ifca": {"num_clusters": 2}},
                f"{tmp_path}/mine.py:Mine",
                {f"{tmp_path}/mine.py:Mine": {"share": 0.5}},
                StoCFL(tau=0.1),
            ]
        )
        assert list(found) == ["stocfl", "ifca", "mine", "mine-share=0.5", "stocfl-tau=0.1"]
        assert found["ifca"] == IFCA(num_clusters=2)
        assert found["mine-share=0.5"].share == 0.5 and found["stocfl-tau=0.1"].tau == 0.1
        assert set(resolve(["all"])) == set(REGISTRY)

    def test_labels(self):
        found = resolve(
            [
                {"ifca": {"num_clusters": 2, "label": "ifca_2"}},
                "ifca",
                {"fedavg": {"local": {"momentum": 0.9}, "aggregation": {"trimmed_mean": {"share": 0.1}}}},
                {"fedavg": {"aggregation": {"median": None}}},
            ]
        )
        assert list(found) == [
            "ifca_2",
            "ifca",
            "fedavg-aggregation.trimmed_mean.share=0.1-local.momentum=0.9",
            "fedavg-aggregation=median",
        ]

    def test_names_in_the_spelling_of_the_papers(self):
        found = resolve(["FedAvg+", "FL+HC", "IFCA-CAM", "LG-FedAvg", "Per-FedAvg", "StoCFL"])
        assert list(found) == ["fedavg_plus", "fl_hc", "ifca_cam", "lg_fedavg", "per_fedavg", "stocfl"]

    def test_a_number_that_yaml_reads_as_text(self, file):
        """YAML 1.1 reads 1e-3 as a string; the method gets the number."""
        (method,) = resolve(load(file("methods: [{fedprox: {mu: 1e-3}}]")).methods).values()
        assert method.mu == 0.001

    @pytest.mark.parametrize(
        "entries, message",
        [
            (["stocf"], r"unknown method 'stocf' \(did you mean 'stocfl'\?\)"),
            ([{"stocfl": {"tua": 0.5}}], r"method stocfl has no option 'tua' \(did you mean 'tau'\?\)"),
            ([{"stocfl": {"tau": 1.5}}], "methods: stocfl.tau: Input should be less than or equal to 1, got 1.5"),
            (
                [{"ifca": {"num_clusters": "1e-3"}}],
                "methods: ifca.num_clusters: Input should be a valid integer, got 0.001",
            ),
            ([{"ifca": {}, "stocfl": {}}], "methods: an entry must be a name, or one name with its options"),
            (["fedavg", "fedavg"], "methods: 'fedavg' is listed twice"),
            ([{"fedavg": {"label": "a"}}, {"ifca": {"label": "a"}}], "methods: 'a' is listed twice"),
            (
                [{"fedavg": {"label": "../a"}}],
                "fedavg.label: expected ASCII letters, digits and _ . = -, .*got '../a",
            ),
            (["missing.py:Mine"], "method 'missing.py:Mine': there is no file /"),
            ([5], "methods: an entry is a name, .* got int 5"),
        ],
    )
    def test_errors(self, entries, message):
        with pytest.raises(ConfigError, match=message):
            resolve(entries)

    def test_a_file_without_that_class(self, tmp_path):
        (tmp_path / "mine3.py").write_text(MINE)
        with pytest.raises(ConfigError, match=r"mine3.py has no 'Min' \(did you mean 'Mine'\?\)"):
            resolve([f"{tmp_path}/mine3.py:Min"])
        with pytest.raises(ConfigError, match="is a int, not a subclass of cfl_ray.Method"):
            resolve([f"{tmp_path}/mine3.py:NUMBER"])


MINE = '''
from dataclasses import dataclass
from cfl_ray import Method
from cfl_ray.core.method import option

NUMBER = 3

@dataclass(frozen=True)
class Mine(Method, name="mine"):
    """Mine."""

    share: float = option(1, "a share", low=0, high=1)

    def init(self, start): ...
    def round(self, state, clients, rng): ...
    def serve(self, state, clients): ...
'''


def test_options_of_a_users_method_are_checked():
    @dataclass(frozen=True)
    class Local(Method, name="users_local"):
        def init(self, start): ...
        def round(self, state, clients, rng): ...
        def serve(self, state, clients): ...

    with pytest.raises(ConfigError, match="method users_local has no option 'x'"):
        resolve([{Local: {"x": 1}}])
    assert list(resolve([Local])) == ["users_local"] and "users_local" not in REGISTRY


class TestDefaultView:
    """The default of `data.test.view`: data of the client's own distribution."""

    @pytest.mark.parametrize(
        "data, view",
        [
            ({}, "cluster"),
            ({"shift": {"kind": "rotated"}}, "cluster"),
            ({"shift": {"kind": "pathological"}}, "cluster"),
            ({"partition": {"kind": "dirichlet"}}, "holdout"),
            ({"shift": {"kind": "rotated"}, "partition": {"kind": "dirichlet"}}, "holdout"),
            ({"partition": {"kind": "dirichlet", "groups": 3}}, "holdout"),
            ({"partition": {"kind": "classes"}}, "label"),
            ({"partition": {"kind": "iid", "cut": [{"keep": 0.1, "clients": 3}]}}, "label"),
            ({"partition": {"clients": 2, "sizes": [30, 100]}}, "label"),
            ({"partition": {"share_alpha": 1}}, "label"),
            ({"source": "femnist", "partition": {"kind": "writer", "clients": None}}, "holdout"),
            ({"source": "images", "root": "x"}, "holdout"),
            ({"source": "images", "root": "x", "test_files": "test/*"}, "cluster"),
            ({"test": {"pool": True}}, "holdout"),
            ({"source": "synthetic", "partition": {"kind": "dirichlet"}}, "cluster"),
            ({"source": "arrays", "root": "x.npz"}, None),  # decided by what the file holds
        ],
    )
    def test_has_the_distribution_of_the_client(self, data, view):
        found = Experiment(data=data).data.test.view
        assert found == view and Experiment(**Experiment(data=data).to_dict()).data.test.view == view

    def test_is_on_record_in_the_resolved_config(self):
        assert "view: holdout" in Experiment(data={"partition": {"kind": "dirichlet"}}).to_yaml()

    @pytest.mark.parametrize("kind, own", [("dirichlet", "holdout"), ("classes", "label")])
    def test_the_whole_test_set_under_label_skew_is_worth_a_warning(self, kind, own):
        (warning,) = Experiment(data={"partition": {"kind": kind}, "test": {"view": "cluster"}}).data.warnings
        assert f"partition.kind {kind} may give each client classes of its own; {own} tests" in warning
        assert not Experiment(data={"partition": {"kind": kind}}).data.warnings
        assert not Experiment(data={"test": {"view": "cluster"}}).data.warnings

    def test_users_that_are_not_the_clients(self):
        sources = ("femnist", "femnist_leaf", "shakespeare_leaf", "sent140_leaf", "mnist_by_writer")
        for source in sources:
            data = Experiment(data={"source": source, "root": "x"}).data
            users = "users" if source.endswith("leaf") else "writers"
            assert data.warnings == [
                f"the {users} of source {source} are not the clients: partition.kind iid divides all samples anew; for "
                f"a client of each of the {users} set data.partition: {{kind: writer, clients: null}}"
            ]
            writer = {"kind": "writer", "clients": None}
            assert not Experiment(data={"source": source, "root": "x", "partition": writer}).data.warnings


# values of an experiment, and below them the warning
WITHOUT_EFFECT = """
data: {partition: {kind: dirichlet, group_alpha: 3}}
    data.partition.group_alpha (3.0) has no effect: data.partition.groups is null
data: {test: {fraction: 0.3}}
    data.test.fraction (0.3) has no effect: data.test.view is cluster
data: {test: {view: all, fraction: 0.3}}
    data.test.fraction (0.3) has no effect: data.test.view is all
data: {test: {view: holdout, max_samples: 9}}
    data.test.max_samples (9) has no effect: data.test.view is holdout
data: {source: synthetic, partition: {kind: classes}}
    data.partition.kind (classes) has no effect: the samples of source synthetic belong to clients already
data: {source: arrays, root: x, partition: {clients: 9}}
    data.partition.clients (9) has no effect: the samples of source arrays belong to clients already
data: {source: sea, shift: {kind: rotated}}
    data.shift.kind (rotated) has no effect: the samples of source sea belong to clients already
data: {source: circle, test: {max_samples: 9}}
    data.test.max_samples (9) has no effect: source circle has the test samples that it gives to each client
data: {source: sine, normalize: [[0.5], [0.5]]}
    data.normalize ([[0.5], [0.5]]) has no effect: source sine generates the inputs as the model gets them
data: {source: image_folder, root: x, test_files: y, test: {view: holdout}}
    data.test_files (y) has no effect: data.test.view is holdout; data.test.pool: true divides them among the clients \
as well, data.test.view: cluster, label or all tests clients on them, and a function that returns clients and \
test_clients gives each client its own
local: {epochs: 3, steps: 9}
    local.epochs (3) has no effect: local.steps is 9
cohort: {fraction: 0.2, clients: 3}
    cohort.fraction (0.2) has no effect: cohort.clients is 3
clock: {kind: constant, availability_seconds: 60}
    clock.availability_seconds (60.0) has no effect: cohort.availability is always
attack: {kind: sign_flip, fraction: 0.2, clients: [3]}
    attack.fraction (0.2) has no effect: attack.clients names them
{rounds: 5, attack: {kind: sign_flip, from_round: 6}}
    attack.kind (sign_flip) has no effect: attack.from_round is 6, the last round is 5
asynchronous: {staleness: {kind: polynomial}}
    asynchronous.staleness.kind (polynomial) has no effect: asynchronous.buffer is null
data: {source: csv, root: x, columns: {image: a}, test: {view: holdout}}
    data.columns.image (a) has no effect: source csv does not read it
""".strip().splitlines()


@pytest.mark.parametrize("values, warning", zip(WITHOUT_EFFECT[::2], WITHOUT_EFFECT[1::2], strict=True))
def test_a_key_without_effect_is_worth_a_warning(values, warning):
    assert warnings_of(Experiment(**yaml.safe_load(values))) == [warning.strip()]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"data": {"shift": {"kind": "rotated_labels", "angles": [0], "label_sets": [[0, 1]]}}},
        {"data": {"shift": {"kind": "shift.py:f", "groups": 3, "options": {"by": 2}}}},
        {"data": {"partition": {"min_samples": 2}}},
        {"data": {"partition": {"kind": "dirichlet", "alpha": 3, "groups": 2, "group_alpha": 1, "capped": False}}},
        {"data": {"partition": {"kind": "divide.py:f", "min_samples": 2}, "test": {"fraction": 0.3}}},
        {"data": {"download": True, "root": "x"}},  # of all sources, though some need neither
        {"data": {"source": "synthetic", "synthetic_groups": 9, "partition": {"clients": 9}}},
        {"data": {"source": "load.py:f", "options": {"size": 9}}},
        {"cohort": {"clients": 3, "availability": {"kind": "diurnal", "zones": 3}}},
        {"local": {"steps": 9}},
        {"attack": {"kind": "scaled", "clients": [1], "scale": 9, "from_round": 2}},
        {"attack": {"kind": "attack.py:f", "fraction": 0.3}},
    ],
)
def test_a_key_with_an_effect_is_worth_no_warning(values):
    assert warnings_of(Experiment(**values)) == []


class TestKinds:
    def test_another_kind_in_an_override_drops_the_keys_of_the_kind_in_the_file(self, file):
        given = file("data: {source: csv, train_files: a.csv, partition: {kind: dirichlet, alpha: 3, min_samples: 2}}")
        data = load(given, ["data.partition.kind=classes", "data.source=mnist"]).data
        assert data.to_recipe(exclude_defaults=True)["partition"] == {"kind": "classes", "min_samples": 2}
        assert data.source == "mnist" and load(given).data.partition.alpha == 3

    @pytest.mark.parametrize("turn", [1, -1])
    def test_a_key_in_an_override_of_another_kind_is_an_error(self, turn):
        with pytest.raises(ConfigError, match=r"^data.shift.angles is a key of kind rotated \| "):
            load(None, ["data.shift.kind=noise", "data.shift.angles=[0]"][::turn])


def test_a_federation_from_python_has_no_warnings(federation):
    assert warnings_of(Experiment(data=federation)) == []


def test_paths_of_a_file_are_relative_to_its_folder(tmp_path, monkeypatch):
    """A path in the YAML that exists beside it; those of overrides, and absent ones, stay as they are."""
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "my.py").write_text("")
    (tmp_path / "conf" / "mine.yaml").write_text(
        "methods: [fedavg, 'my.py:Mine', {'my.py:Mine': {step: 1}}]\nmodel: {name: 'my.py:Net'}\n"
        "data: {source: 'my.py:load', root: data}\n"
    )
    monkeypatch.chdir(tmp_path)
    found = load("conf/mine.yaml")
    assert found.methods == ["fedavg", "conf/my.py:Mine", {"conf/my.py:Mine": {"step": 1}}]
    assert (found.model.name, found.data.source, found.data.root) == ("conf/my.py:Net", "conf/my.py:load", "conf/data")
    changed = load("conf/mine.yaml", ["model.name=my.py:Net", "data.root=data"])
    assert (changed.model.name, changed.data.root) == ("my.py:Net", "data")
    (tmp_path / "conf" / "my.py").unlink()
    assert load("conf/mine.yaml").model.name == "my.py:Net"
    with pytest.raises(ConfigError, match=f"there is no file {tmp_path}/conf/my.py or {tmp_path}/my.py"):
        load_plugin("my.py:Net", "model")


def test_data_files_are_looked_for_in_the_folder_of_the_config(tmp_path):
    (tmp_path / "houses.csv").write_text("a,label\n1,0\n")
    (tmp_path / "mine.yaml").write_text("data: {source: csv, train_files: houses.csv}\n")
    assert load(tmp_path / "mine.yaml").data.root == str(tmp_path)
    assert load(tmp_path / "mine.yaml", ["data.root=there"]).data.root == "there"
    (tmp_path / "houses.csv").unlink()
    assert load(tmp_path / "mine.yaml").data.root is None


class TestRecord:
    VALUES = {
        "methods": ["fedavg", {"fedavg": {"aggregation": {"own.py:R": {"a": 1}}}}],
        "model": {"name": "own.py:N"},
        "data": {"shift": {"kind": "own.py:f"}, "root": "here"},
        "runtime": {"backend": "own.py:B"},
    }

    def test_names_files_by_absolute_paths_and_keeps_the_hash(self, tmp_path, monkeypatch):
        (tmp_path / "own.py").write_text("")
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path)
        experiment = Experiment(**self.VALUES)
        (tmp_path / "config.yaml").write_text(experiment.to_record())
        monkeypatch.chdir("/")
        again = load(tmp_path / "config.yaml")
        assert again.model.name == f"{tmp_path}/own.py:N" and again.data.root == f"{tmp_path}/here"
        assert again.methods[1] == {"fedavg": {"aggregation": {f"{tmp_path}/own.py:R": {"a": 1}}}}
        assert again.config_hash == experiment.config_hash != Experiment().config_hash
        assert again.to_dict_as_written() == {**experiment.to_dict(), "output": f"{tmp_path}/runs"} != again.to_dict()
        assert again.data.to_recipe() == experiment.data.to_recipe()
        assert (
            load(tmp_path / "config.yaml", ["rounds=3"]).config_hash == Experiment(**self.VALUES, rounds=3).config_hash
        )
        (tmp_path / "copy.yaml").write_text(again.to_record())
        assert load(tmp_path / "copy.yaml").to_record() == again.to_record() == (tmp_path / "config.yaml").read_text()

    def test_without_files_it_is_the_plain_yaml_with_an_absolute_output(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert Experiment().to_record() == Experiment(output=f"{tmp_path}/runs").to_yaml()

    def test_the_output_may_be_in_the_home_folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path))
        experiment = Experiment(output="~/runs")
        assert experiment.output == f"{tmp_path}/runs" and experiment.config_hash == Experiment().config_hash
        assert f"output: {tmp_path}/runs" in experiment.to_record()

    def test_what_a_run_writes_beside_its_folder_is_found_from_any_folder(self, tmp_path, monkeypatch):
        """Shards and the MLflow store of a resumed run are those of the run; they are no part of the hash."""
        monkeypatch.chdir(tmp_path)
        for output, shards, uri, expected in (
            ("runs", None, None, [f"{tmp_path}/runs", None, None]),
            ("/a", "cut", "sqlite:///m.db", ["/a", f"{tmp_path}/cut", f"sqlite:///{tmp_path}/m.db"]),
            ("/a", "s3://b/c", "https://mlflow", ["/a", "s3://b/c", "https://mlflow"]),
            ("/a", "/b", "sqlite:////c.db", ["/a", "/b", "sqlite:////c.db"]),
        ):
            experiment = Experiment(output=output, data={"shards": shards}, tracking={"uri": uri})
            (tmp_path / "config.yaml").write_text(experiment.to_record())
            again = load(tmp_path / "config.yaml")
            assert [again.output, again.data.shards, again.tracking.uri] == expected
            assert again.config_hash == experiment.config_hash

    @pytest.mark.parametrize("shards", ["shards", "shards of 12:30"])
    def test_paths_of_a_run_that_has_moved_are_found_beside_its_new_place(self, tmp_path, monkeypatch, shards):
        old, new = tmp_path / "old", tmp_path / "new"
        (old / "runs" / "first").mkdir(parents=True)
        (old / "own.py").write_text("")
        (old / shards).mkdir()
        monkeypatch.chdir(old)
        experiment = Experiment(**(self.VALUES | {"data": {"shards": shards, "shift": {"kind": "own.py:f"}}}))
        header = recorded_in(old / "runs" / "first")
        (old / "runs" / "first" / "config.yaml").write_text(header + experiment.to_record())
        assert load(old / "runs" / "first" / "config.yaml").moved == {}
        old.rename(new)
        monkeypatch.chdir("/")
        again = load(new / "runs" / "first" / "config.yaml")
        assert (again.output, again.data.shards) == (f"{new}/runs", f"{new}/{shards}")
        assert again.data.shift.kind == f"{new}/own.py:f" and again.runtime.backend == f"{new}/own.py:B"
        assert again.moved[f"{old}/runs"] == f"{new}/runs"
        assert again.config_hash == experiment.config_hash
        assert again.data.to_recipe() == experiment.data.to_recipe()

    def test_paths_that_still_exist_or_are_nowhere_stay(self, tmp_path):
        run = tmp_path / "moved"
        run.mkdir()
        (tmp_path / "there").mkdir()
        record = Experiment(output=f"{tmp_path}/there", data={"shards": "/nowhere/shards"}).to_record()
        (run / "config.yaml").write_text(recorded_in(tmp_path / "before") + record)
        again = load(run / "config.yaml")
        assert (again.output, again.data.shards, again.moved) == (f"{tmp_path}/there", "/nowhere/shards", {})

    def test_one_file_written_in_two_ways_stays_as_written(self, tmp_path, monkeypatch):
        """Its absolute path alone would not give back the hash."""
        (tmp_path / "own.py").write_text("")
        monkeypatch.chdir(tmp_path)
        experiment = Experiment(model="own.py:N", evaluation={"metrics": ["./own.py:N"]})
        assert experiment.to_record() == experiment.model_copy(update={"output": f"{tmp_path}/runs"}).to_yaml()


class TestParts:
    def test_kinds_and_options_of_plugins_are_in_the_hash(self):
        hashes = {
            Experiment(**changes).config_hash
            for changes in (
                {},
                {"data": {"shift": {"kind": "my.py:f"}}},
                {"data": {"shift": {"kind": "my.py:f", "options": {"a": 1}}}},
                {"data": {"partition": {"kind": "my.py:f"}}},
                {"attack": {"kind": "my.py:f"}},
                {"attack": {"kind": "my.py:f", "options": {"a": 1}}},
                {"cohort": {"availability": {"kind": "my.py:f"}}},
                {"methods": [{"fedavg": {"aggregation": "my.py:Rule"}}]},
            )
        }
        assert len(hashes) == 8

    def test_angles_that_are_whole_are_whole_numbers(self):
        """So that a config has one hash, however they are written."""
        one, other = (
            Experiment(data={"shift": {"kind": "rotated", "angles": angles}}) for angles in ([0, 90], [0.0, 90.0])
        )
        assert one.config_hash == other.config_hash and one.to_yaml() == other.to_yaml()

    def test_relative_paths_of_parts_are_beside_the_file(self, tmp_path):
        """Every place of a config that can name a file of the user."""
        (tmp_path / "own.py").write_text("")
        (tmp_path / "mine.yaml").write_text(
            """
methods: ["own.py:M", {fedavg: {aggregation: {"own.py:R": {a: 1}}}}, {fedavg: {aggregation: "own.py:R"}}]
data: {source: "own.py:s", shift: {kind: "own.py:f"}, partition: {kind: "own.py:f"}}
model: {name: "own.py:N"}
cohort: {availability: {kind: "own.py:f"}}
attack: {kind: "own.py:f"}
runtime: {backend: {"own.py:B": {}}}
tracking: {trackers: ["own.py:T", {"own.py:U": {}}]}
"""
        )
        written = load(tmp_path / "mine.yaml").to_yaml()
        assert written.count(f"{tmp_path}/own.py:") == written.count("own.py:") == 12

    def test_objects_made_in_python_are_recorded_by_name(self):
        def shift(x, y, group, draw):
            return x, y

        experiment = Experiment(data={"shift": {"kind": shift}})
        assert experiment.to_dict()["data"]["shift"]["kind"] == f"{__name__}.{shift.__qualname__}"
        assert (
            Experiment(**yaml.safe_load(experiment.to_record())).data.shift.kind == f"{__name__}.{shift.__qualname__}"
        )
        with pytest.raises(ConfigError, match="data.shift: a shift is a name, file.py:Name or, in Python"):
            Experiment(data={"shift": {"kind": 5}})


def test_a_record_is_made_also_where_the_working_directory_is_gone(tmp_path, monkeypatch):
    """Ray may remove the folder of a job while the job runs."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert Experiment(rounds=3).to_record() == Experiment(rounds=3).to_yaml()


@pytest.mark.parametrize("key", ["gpus_per_host", "cpus_per_host"])
def test_a_share_that_ray_cannot_count_is_refused(key):
    with pytest.raises(ConfigError, match=rf"runtime.{key}.*the smallest share is 0.0001, got 1e-05"):
        load(None, [f"runtime.{key}=0.00001"])
    assert getattr(load(None, [f"runtime.{key}=0.0001"]).runtime, key) == 0.0001
