"""All ways by which data come in: validation parts, names of classes, and the sentences on what clients are tested."""

from inspect import signature

import numpy as np
import pytest
from torch import from_numpy
from torch.utils.data import TensorDataset

from cfl_ray import Experiment, federation_from_arrays, federation_from_dataset
from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.data import build, describe, has_validation
from cfl_ray.data.own_data import KEYS
from cfl_ray.data.split import with_validation
from cfl_ray.data.synthetic import SyntheticFederation

HELD_OUT = "each client is tested on its own samples that are held out from training (data.test.view holdout)"
OWN = "each client is tested on its own samples of x_test (test_clients)"
WHOLE = "each client is tested on the whole test set (data.test.view cluster)"
OF_GROUP = "each client is tested on the test set of its true group (data.test.view cluster)"
OWN_PART = "validation: each client is measured on its own samples of the validation part"
WHOLE_PART = "validation: each client is measured on the whole validation set"
SHARE = "validation: 0.25 of each client's training samples are held out (drawn per class)"

# by source, the key or the name of its validation part; empty: only a share of the training samples
VALIDATION_PARTS = {
    **dict.fromkeys(("images", "femnist", "image_folder", "csv", "hf_disk"), "validation_files"),
    **dict.fromkeys(("arrays",), "x_validation"),
    **dict.fromkeys(("medmnist",), "val"),
    **dict.fromkeys(("digits", "mnist", "fashion_mnist", "cifar10", "cifar100", "svhn", "mnist_by_writer"), ""),
    **dict.fromkeys(("femnist_leaf", "shakespeare_leaf", "sent140_leaf", "synthetic", "sine", "circle", "sea"), ""),
}


def test_every_source_is_listed_and_takes_a_share():
    assert sorted(VALIDATION_PARTS) == sorted(SOURCE_KINDS.names())
    for source, part in VALIDATION_PARTS.items():
        data = SOURCE_KINDS.of(source=source, validation={"fraction": 0.25})
        assert hasattr(data, "validation_files") == (part == "validation_files"), source
        assert data.has_validation_part == (part == "val"), source


def test_every_way_for_arrays_has_the_same_parts():
    by_arrays, by_dataset = (
        set(signature(make).parameters) for make in (federation_from_arrays, federation_from_dataset)
    )
    pairs = {f"{name}{ending}" for name in "xy" for ending in ("", "_test", "_validation")}
    assert by_arrays - pairs == by_dataset - {"dataset", "test", "validation"}
    settings = {"holdout", "seed", "view", "normalize", "targets", "labels", "order"}  # keys of a config
    assert by_arrays - settings == set(KEYS)


def samples():
    """Two groups of two clients with opposite labels, and another part."""
    x, clients = np.arange(40, dtype=np.float32)[:, None] / 40, np.repeat(np.arange(4), 10)
    return {"x": x, "y": (np.arange(40) + clients // 2) % 2, "clients": clients, "class_names": ["even", "odd"]}


def part(name, clients=None):
    x, y = np.arange(8, dtype=np.float32)[:, None] / 8, np.arange(8) % 2
    return {f"x_{name}": x, f"y_{name}": y} | ({} if clients is None else {f"{name}_clients": np.arange(8) % 4})


@pytest.mark.parametrize(
    "arrays, tested, validated",
    [
        ({}, HELD_OUT, ""),
        (part("test"), WHOLE, ""),
        (part("test") | {"groups": np.repeat([0, 1], 20)}, WHOLE, ""),  # groups share the set
        (part("test", "each") | part("validation"), OWN, WHOLE_PART),
        (part("validation", "each"), HELD_OUT, OWN_PART),
    ],
)
@pytest.mark.parametrize("way", ["arrays", "dataset", "npz", "function"])
def test_samples_with_clients(arrays, tested, validated, way, tmp_path):
    """The same sentences before a run, in it, and for a view of the federation, whichever way the arrays take."""
    given = samples() | arrays
    if way == "npz":
        np.savez(tmp_path / "a.npz", **given)
        data = SOURCE_KINDS.of(source="arrays", root=str(tmp_path / "a.npz"))
    elif way == "function":
        np.savez(tmp_path / "a.npz", **given)
        (tmp_path / "own.py").write_text(
            f"import numpy as np\n\n\ndef load():\n    return dict(np.load({str(tmp_path / 'a.npz')!r}))\n"
        )
        data = SOURCE_KINDS.of(source=f"{tmp_path}/own.py:load")
    else:
        parts, pairs = {"dataset": "", "test": "_test", "validation": "_validation"}, {}
        for name, key in parts.items():
            if way == "dataset" and f"x{key}" in given:
                pairs[name] = TensorDataset(from_numpy(given.pop(f"x{key}")), from_numpy(given.pop(f"y{key}")))
        federation = federation_from_dataset(**pairs, **given) if pairs else federation_from_arrays(**given)
        check(federation, tested, validated)
        return
    summary, federation = describe(data, 0), build(data, 0, tmp_path / "shards")
    assert (summary.tested_on, summary.validated_on) == (tested, validated)
    check(federation, tested, validated)
    assert has_validation(Experiment(data=data)) == bool(validated)


def check(federation, tested, validated):
    assert federation.shape.class_names == ("even", "odd")
    assert (federation.tested_on, federation.validated_on) == (tested, validated)
    if not validated:
        share = with_validation(federation, 0.25, "random", 0)
        assert (share.tested_on, share.validated_on) == (tested, SHARE)


@pytest.mark.parametrize(
    "data, tested",
    [
        ({"source": "digits", "shift": {"kind": "rotated"}}, OF_GROUP),
        ({"source": "digits"}, WHOLE),
        (
            {"source": "digits", "test": {"max_samples": 9}},
            "each client is tested on at most 9 samples of the test set (data.test.view cluster)",
        ),
        ({"source": "digits", "test": {"view": "holdout"}}, HELD_OUT),
        (
            {"source": "digits", "test": {"view": "label"}},
            "each client is tested on the samples of its own labels in the whole test set (data.test.view label)",
        ),
        ({"source": "synthetic"}, OF_GROUP),
    ],
)
def test_other_sources(data, tested, tmp_path):
    data = SOURCE_KINDS.of(**{"partition": {"clients": 4}, "validation": {"fraction": 0.25}} | data)
    summary = describe(data, 0)
    assert (summary.tested_on, summary.validated_on) == (tested, SHARE)
    assert build(data, 0, tmp_path).tested_on == tested


def test_a_federation_of_ones_own_says_only_what_is_known():
    own = SyntheticFederation(clients=4, samples=4)
    assert own.tested_on == OF_GROUP and own.validated_on == ""
    own.view = "holdout"
    assert own.tested_on == "each client is tested on test samples of its own"
