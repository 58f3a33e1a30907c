"""Targets that are no classes: in arrays, functions, tables and shards, and what cannot be done without classes."""

import json

import numpy as np
import pytest
import torch
from closeness import close

from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.data import build, describe, federation_from_arrays, federation_from_dataset
from cfl_ray.data.arrays import data_set_from_arrays
from cfl_ray.data.chained import grown
from cfl_ray.data.changes import ChangingFederation, DataChange
from cfl_ray.data.plan import make_plan
from cfl_ray.data.shard_writer import write_shards
from cfl_ray.data.shards import open_shards
from cfl_ray.errors import DataError

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(20, 3)).astype(np.float32)
TOKENS = DRAW.integers(0, 6, (20, 4))
Y = {
    "real": DRAW.normal(size=(20, 2)).astype(np.float32),
    "binary": DRAW.integers(0, 2, (20, 3)),
    "tokens": DRAW.integers(0, 6, (20, 4)),
}
OUTPUTS = {"real": (2,), "binary": (3,), "tokens": (4, 6)}
OWNER = np.arange(20) // 5


def arrays(targets: str, **more) -> dict:
    tokens = {"vocabulary": 6} if targets == "tokens" else {}
    return {"x": TOKENS if tokens else X, "y": Y[targets], "targets": targets, **tokens, **more}


def assert_all_samples(federation, targets: str) -> None:
    """Every sample is somewhere, with its target, in the type of a batch."""
    parts = [
        part(client) for client in range(federation.num_clients) for part in (federation.train, federation.holdout)
    ]
    x, y = (torch.cat(tensors).double().numpy() for tensors in zip(*parts))
    found = np.concatenate([x, y.reshape(len(y), -1)], 1)
    given = arrays(targets)
    expected = np.concatenate([given["x"], given["y"].reshape(20, -1)], 1).astype(np.float64)
    assert close(sorted(found.tolist()), sorted(expected.tolist()), 1e-7)
    assert parts[0][1].dtype == federation.shape.target_dtype and federation.shape.outputs == OUTPUTS[targets]


@pytest.mark.parametrize("targets", Y)
def test_arrays(targets):
    assert_all_samples(federation_from_arrays(**arrays(targets, clients=OWNER)), targets)


@pytest.mark.parametrize("targets", Y)
def test_shards(tmp_path, targets):
    config = SOURCE_KINDS.of(partition={"clients": 4}, test={"view": "holdout"})
    write_shards(tmp_path / "shards", make_plan(data_set_from_arrays(**arrays(targets)), None, config, 0), {})
    federation = open_shards(tmp_path / "shards", verify=True)
    assert_all_samples(federation, targets)
    manifest = json.loads((tmp_path / "shards" / "manifest.json").read_text())
    assert (manifest["targets"], tuple(manifest["target_shape"])) == (targets, Y[targets].shape[1:])


def test_one_real_number_per_sample():
    federation = federation_from_arrays(X, Y["real"][:, 0], OWNER, targets="real")
    assert federation.shape.outputs == (1,) and federation.train(0)[1].shape == (4,)


def test_a_dataset():
    pairs = list(zip(torch.from_numpy(X), torch.from_numpy(Y["real"])))
    assert_all_samples(federation_from_dataset(pairs, OWNER, targets="real"), "real")
    with pytest.raises(DataError, match=r"the target of dataset\[1\] has shape \(1,\), but dataset\[0\] has \(2,\)"):
        federation_from_dataset([pairs[0], (pairs[1][0], pairs[1][1][:1])], [0, 1], targets="real")


def test_a_function_and_its_shards(tmp_path):
    (tmp_path / "heat.py").write_text(
        "import numpy as np\n\n\ndef load():\n    x = np.arange(60, dtype='float32').reshape(20, 3)\n"
        "    return x, x.sum(1)\n"
    )
    data = SOURCE_KINDS.of(source=f"{tmp_path}/heat.py:load", partition={"clients": 4}, test={"view": "holdout"})
    federation = build(data, 0, tmp_path / "shards", targets="real")
    x, y = federation.train(2)
    assert torch.equal(y, x.sum(1)) and federation.recipe["targets"] == "real"
    assert describe(data, 0, "real").shape == federation.shape
    with pytest.raises(DataError, match="y must be integers of shape"):
        build(data, 0, tmp_path / "shards")


class TestTables:
    TABLE = "a,b,height,weight,shop\n" + "1,2,0.5,1,x\n3,4,1.5,0,y\n5,6,2.5,1,x\n7,8,3.5,0,y\n"

    def build(self, tmp_path, label, targets):
        (tmp_path / "t.csv").write_text(self.TABLE)
        columns = {"label": label, "client": "shop", "features": ["a", "b"]}
        data = {"source": "csv", "root": str(tmp_path), "columns": columns}
        division = {"partition": {"kind": "writer", "clients": None}, "test": {"view": "holdout"}}
        return build(SOURCE_KINDS.of(**data, **division), 0, tmp_path / "shards", targets=targets)

    def test_several_columns_are_a_target(self, tmp_path):
        federation = self.build(tmp_path, ["height", "weight"], "real")
        for part in (federation.train, federation.holdout):
            x, y = part(0)
            assert close(y[:, 0], x[:, 0] / 2, 1e-6) and (y[:, 1] == 1).all() and y.shape == (1, 2)

    def test_one_column_and_labels(self, tmp_path):
        assert self.build(tmp_path, "height", "real").train(1)[1].shape == (1,)
        y = self.build(tmp_path, ["weight"], "binary").train(1)[1]
        assert y.tolist() == [[0.0]] and y.dtype == torch.float32

    @pytest.mark.parametrize(
        "label, targets, text",
        [
            (["height", "weight"], "class", "data.columns.label names 2 columns, a class has 1"),
            (["height"], "binary", "values other than 0 and 1 in 4 of 4 rows, first in row 0"),
            (["shop"], "real", "label column 'shop' must hold numbers, it holds string, e.g. 'x' in row 0"),
            (["hight"], "real", "no column 'hight'.*did you mean 'height'"),
        ],
    )
    def test_what_does_not_fit(self, tmp_path, label, targets, text):
        with pytest.raises(DataError, match=text):
            self.build(tmp_path, label, targets)


def test_token_lists_of_a_saved_data_set(tmp_path):
    import pyarrow as pa

    def save(rows, folder="") -> None:
        (tmp_path / folder).mkdir(exist_ok=True)
        columns = [pa.array(TOKENS.tolist()), pa.array(rows), pa.array(OWNER)]
        table = pa.table(columns, names=["text", "next", "author"])
        file = str(tmp_path / folder / "data-0.arrow")
        with pa.OSFile(file, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)

    columns = {"image": "text", "label": "next", "client": "author"}
    data = SOURCE_KINDS.of(
        source="hf_disk",
        root=str(tmp_path),
        vocabulary=6,
        columns=columns,
        partition={"kind": "writer", "clients": None},
        test={"view": "holdout"},
    )
    save(Y["tokens"].tolist())
    assert_all_samples(build(data, 0, tmp_path / "shards", targets="tokens"), "tokens")
    save([[1, 2]] * 19 + [[1]])
    with pytest.raises(DataError, match="data.columns.label 'next' has 1 values in row 19, 2 in row 0"):
        build(data, 0, tmp_path / "others", targets="tokens")
    save(Y["tokens"].tolist())
    save(Y["tokens"][:, 1:].tolist(), "tests")
    with pytest.raises(DataError, match=r"tests/data-0.arrow holds targets of shape \(3,\), .* of \(4,\)"):
        build(SOURCE_KINDS.of(**dict(data) | {"test_files": "tests"}), 0, tmp_path / "others", targets="tokens")
    save((Y["tokens"] + 1).tolist())
    with pytest.raises(DataError, match="column 'next': label 6 does not fit num_classes 6; labels run from 0 to 5"):
        build(data, 0, tmp_path / "others", targets="tokens")


def test_an_npz_file(tmp_path):
    np.savez(tmp_path / "mine.npz", x=X, y=Y["real"], clients=OWNER)
    data = SOURCE_KINDS.of(source="arrays", root=str(tmp_path / "mine.npz"))
    assert_all_samples(build(data, 0, tmp_path, targets="real"), "real")


@pytest.mark.parametrize(
    "section, text",
    [
        ({"partition": {"kind": "dirichlet", "clients": 4}}, "data.partition.kind: dirichlet needs classes"),
        ({"partition": {"kind": "classes", "clients": 4}}, "data.partition.kind: classes needs classes"),
        ({"shift": {"kind": "shifted"}}, "data.shift.kind: shifted needs classes.*set none, rotated or hybrid"),
        ({"shift": {"kind": "pathological"}}, "data.shift.kind: pathological needs classes"),
    ],
)
def test_a_division_by_classes_is_refused(section, text):
    with pytest.raises(DataError, match=text):
        make_plan(
            data_set_from_arrays(**arrays("real")), None, SOURCE_KINDS.of(**{"test": {"view": "holdout"}} | section), 0
        )


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"y": Y["real"] * np.nan}, "y has NaN or infinity as float32 in 20 of 20 rows, first in row 0"),
        ({"y": np.zeros((20, 2, 2))}, r"y must have shape \(n,\) or \(n, d\) for targets 'real', got \(20, 2, 2\)"),
        ({"targets": "binary"}, "y has values other than 0 and 1 in 20 of 20 rows"),
        ({"targets": "tokens"}, r"y must be token ids from 0, integers \(n, T\), got float32"),
        ({"targets": "reel"}, "unknown targets 'reel'.*did you mean 'real'"),
        ({"num_classes": 3}, "num_classes is 3, but y of targets 'real' has 2 columns"),
        ({"x_test": X, "y_test": Y["real"], "view": "label"}, "the test view label needs classes"),
        ({"x_test": X, "y_test": Y["real"][:, :1]}, r"y_test holds float32 \(1,\), y holds float32 \(2,\)"),
        (
            {"x_test": X, "y_test": Y["real"][:, :1], "test_clients": OWNER},
            r"y_test holds float32 \(1,\), y holds float32 \(2,\)",
        ),
    ],
)
def test_wrong_arrays(changes, text):
    with pytest.raises(DataError, match=text):
        federation_from_arrays(**arrays("real", clients=OWNER) | changes)


def test_changes_and_growth():
    federation = federation_from_arrays(**arrays("real", clients=OWNER))
    with pytest.raises(DataError, match="relabel and swap need classes, the targets are 'real'; use rotate or data_of"):
        ChangingFederation(federation, [DataChange(1, (0,), offset=1)])
    swapped = ChangingFederation(federation, [DataChange(1, (0, 1), data_of=(1, 0))]).at(1)
    assert torch.equal(swapped.train(0)[1], federation.train(1)[1])
    with pytest.raises(DataError, match="targets: the new clients have binary, the federation has real"):
        grown(federation, federation_from_arrays(**arrays("binary", clients=OWNER)))


def test_a_data_set_of_classes_is_refused():
    with pytest.raises(DataError, match="data set 'digits' has classes, the task needs targets 'real'"):
        build(SOURCE_KINDS.of(source="digits"), 0, "unused", targets="real")


def test_ignored_tokens_are_kept_and_samples_of_only_these_refused(tmp_path):
    y = Y["tokens"].copy()
    y[:, 2:] = -100
    federation = federation_from_arrays(**arrays("tokens") | {"y": y}, clients=OWNER)
    assert sorted(federation.train(0)[1][:, 2:].unique().tolist()) == [-100] and federation.shape.num_classes == 6
    for row, value, message in (
        (7, -100, r"y: every target in row 7 is -100, which is not learned \(1 of 20 rows\); leave these samples out"),
        (7, -1, "y has negative token ids other than -100, which is not learned, in 1 of 20 rows, first in row 7"),
    ):
        wrong = y.copy()
        wrong[row] = value
        with pytest.raises(DataError, match=message):
            federation_from_arrays(**arrays("tokens") | {"y": wrong}, clients=OWNER)


def test_target_tokens_that_are_the_inputs_are_told():
    copied = np.where(np.arange(4) < 3, TOKENS, -100)  # padding is not learned
    (told,) = federation_from_arrays(**arrays("tokens") | {"y": copied}, clients=OWNER).warnings
    assert "the target tokens equal the input tokens at the same places" in told
    shifted = {"x": TOKENS[:, :-1], "y": TOKENS[:, 1:]}
    assert not federation_from_arrays(**arrays("tokens") | shifted, clients=OWNER).warnings
