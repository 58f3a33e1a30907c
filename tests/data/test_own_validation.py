"""Validation data that the source brings along."""

import numpy as np
import pyarrow as pa
import pytest
from data.test_split import arrays, equal, of
from PIL import Image

from cfl_ray import Experiment, simulate
from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.config.unused import warnings_of
from cfl_ray.data import build, federation_from_arrays, has_validation
from cfl_ray.data.changes import ChangingFederation, DataChange
from cfl_ray.data.from_config import with_shards
from cfl_ray.errors import DataError

VALIDATION = {"x_validation": np.full((3, 1), 7, np.float32), "y_validation": np.array([0, 1, 1])}


def table(file, first, count):
    """A CSV file whose input numbers its rows from `first`."""
    rows = "".join(f"{row / 2},{row % 2},{row % 3}\n" for row in range(first, first + count))
    file.write_text(f"a,label,client\n{rows}")


class TestArrays:
    def test_a_shared_validation_set(self):
        base, federation = arrays(), arrays(**VALIDATION)
        assert equal(base.train(0), federation.train(0)) and federation.validation.view == "cluster"
        assert of(federation.validation.test(2)) == [7, 7, 7]
        assert federation.validation.num_samples_N.tolist() == [3, 3, 3]
        assert federation.content != base.content

    def test_samples_of_single_clients(self):
        options = VALIDATION | {"validation_clients": [1, 0, 1], "x_test": None, "y_test": None, "holdout": 0.5}
        federation = arrays((20, 10, 2), **options)
        validation = federation.validation
        assert federation.num_samples_N.tolist() == [10, 5, 1] and validation.view == "holdout"
        assert validation.num_samples_N.tolist() == [1, 2, 0]
        assert validation.test(1)[1].tolist() == [0, 1] and len(validation.test(2)[1]) == 0
        assert of(validation.test(1)) == [7, 7] and 7 not in of(federation.test(1))

    def test_the_label_view_is_that_of_the_test_data(self):
        options = {"x_test": np.zeros((2, 1), np.float32), "y_test": np.arange(2), "view": "label"}
        y = np.array([0, 0, 1, 1])
        federation = federation_from_arrays(np.zeros((4, 1), np.float32), y, [0, 0, 1, 1], **options, **VALIDATION)
        assert [federation.validation.test(client)[1].tolist() for client in (0, 1)] == [[0], [1, 1]]

    def test_relabelled_clients_have_validation_sets_of_their_own(self):
        changing = ChangingFederation(arrays(**VALIDATION), [DataChange(2, (0,), offset=1)])
        validation = changing.at(2).validation
        assert validation.test_set_of(np.arange(3)).tolist() == [1, 0, 0]
        assert validation.test_set(1)[1].tolist() == [1, 0, 0]

    @pytest.mark.parametrize("options", [{}, {"validation_clients": [1, 0, 1]}])
    def test_shards_have_them(self, tmp_path, options):
        federation = arrays(**VALIDATION, **options)
        written = with_shards(federation, "own", tmp_path).validation
        assert written.view == federation.validation.view
        for client in range(3):
            assert equal(written.test(client), federation.validation.test(client))
        assert np.array_equal(written.num_samples_N, federation.validation.num_samples_N)

    @pytest.mark.parametrize(
        "options, message",
        [
            ({"x_validation": np.zeros((3, 1), np.float32)}, "x_validation and y_validation belong together"),
            (VALIDATION | {"x_validation": np.zeros((3, 2), np.float32)}, "x_validation holds float32 (2,)"),
            (VALIDATION | {"validation_clients": [0, 1, 9]}, "client 9 has no training sample"),
            ({"validation_clients": [0]}, "x_validation, which is not given"),
        ],
    )
    def test_arrays_that_do_not_fit(self, options, message):
        with pytest.raises(DataError) as error:
            arrays(**options)
        assert message in str(error.value)

    @pytest.mark.parametrize("clients", [{}, {"validation_clients": np.array([0, 1, 1])}])
    def test_an_npz_file(self, tmp_path, clients):
        x, y = np.arange(20, dtype=np.float32)[:, None], np.arange(20) % 2
        np.savez(tmp_path / "a.npz", x=x, y=y, clients=y, x_test=x, y_test=y, **VALIDATION, **clients)
        experiment = Experiment(data={"source": "arrays", "root": str(tmp_path / "a.npz")})
        assert has_validation(experiment)
        assert build(experiment.data, 0, tmp_path).validation.test(1)[1].tolist() == ([1, 1] if clients else [0, 1, 1])


class TestFiles:
    @pytest.mark.parametrize("client", [None, "client"])
    def test_tables(self, tmp_path, client):
        for name, first, count in (("train", 0, 24), ("test", 100, 4), ("validation", 200, 6)):
            table(tmp_path / f"{name}.csv", first, count)
        data = {"source": "csv", "root": str(tmp_path), "test_files": "test.csv", "validation_files": "validation.csv"}
        data |= {"columns": {"client": client, "features": ["a"]}}
        data |= {} if client else {"partition": {"clients": 3}}
        experiment = Experiment(data=data)
        assert has_validation(experiment)
        federation = build(experiment.data, 0, tmp_path / "shards")
        wanted = [[row / 2 for row in range(200, 206)]] * 3
        wanted = [[100.5, 102.0], [101.0, 102.5], [100.0, 101.5]] if client else wanted
        assert [of(federation.validation.test(number)) for number in range(3)] == wanted  # client: row mod 3
        assert federation.num_samples_N.sum() == (18 if client else 24)  # 3 * round(0.2 * 8) are held out for tests
        assert client or of(federation.test(0)) == [row / 2 for row in range(100, 104)]
        again = build(experiment.data, 0, tmp_path / "shards")
        assert again.validation.num_samples_N.tolist() == list(map(len, wanted))

    def test_a_share_beside_a_part_has_no_effect_and_this_is_said(self):
        data = {"source": "csv", "validation_files": "v.csv", "validation": {"fraction": 0.3}}
        (warning,) = [line for line in warnings_of(Experiment(data=data)) if "validation" in line]
        assert "data.validation.fraction (0.3) has no effect: source csv has a validation part of its own" in warning

    def test_a_pattern_without_a_file(self, tmp_path):
        table(tmp_path / "train.csv", 0, 4)
        with pytest.raises(DataError, match=r"data.validation_files: no file matches 'v.csv'"):
            build(SOURCE_KINDS.of(source="csv", root=str(tmp_path), validation_files="v.csv"), 0, tmp_path)

    def test_folders_of_images(self, tmp_path):
        for part, values in (("train", (1, 2, 3, 4)), ("test", (5, 6)), ("val", (7, 8))):
            for value in values:
                folder = tmp_path / part / f"class{value % 2}"
                folder.mkdir(parents=True, exist_ok=True)
                Image.new("L", (2, 2), value).save(folder / f"{value}.png")
        parts = {"train_files": "train", "test_files": "test", "validation_files": "val"}
        data = SOURCE_KINDS.of(source="image_folder", root=str(tmp_path), partition={"clients": 2}, **parts)
        validation = build(data, 0, tmp_path / "shards").validation
        assert (validation.test(0)[0][:, 0, 0, 0] * 255).round().tolist() == [8, 7]  # by class

    def test_a_part_of_a_saved_data_set(self, tmp_path):
        for part, values in (("train", [1, 2, 3, 4]), ("validation", [7, 8])):
            (tmp_path / part).mkdir()
            rows = pa.table({"image": [[float(value)] for value in values], "label": [value % 2 for value in values]})
            with pa.ipc.new_stream(str(tmp_path / part / "data-00000-of-00001.arrow"), rows.schema) as sink:
                sink.write_table(rows)
        parts = {"train_files": "train", "validation_files": "validation"}
        data = SOURCE_KINDS.of(source="hf_disk", root=str(tmp_path), partition={"clients": 2}, **parts)
        federation = build(data, 0, tmp_path / "shards")
        assert federation.view == "holdout" and of(federation.validation.test(1)) == [7, 8]

    def test_medmnist(self, tmp_path):
        parts = {"train": 8, "test": 3, "val": 2}
        arrays = {f"{part}_images": np.full((count, 2, 2), count, np.uint8) for part, count in parts.items()}
        arrays |= {f"{part}_labels": np.arange(count)[:, None] % 2 for part, count in parts.items()}
        np.savez(tmp_path / "pathmnist.npz", **arrays)
        common = {"source": "medmnist", "root": str(tmp_path), "partition": {"clients": 2}}
        first = build(SOURCE_KINDS.of(**common), 0, tmp_path / "shards")
        federation = build(SOURCE_KINDS.of(**common, validation={}), 0, tmp_path / "shards")
        assert first.validation is None and federation.num_samples_N.tolist() == [4, 4]
        assert len(federation.test(0)[1]) == 3 and len(federation.validation.test(0)[1]) == 2


def test_a_run_measures_shared_validation_sets_and_those_of_clients():
    finals = []
    for options in ({}, {"validation_clients": [0, 0, 0]}):
        data = {"federation": arrays(**VALIDATION, **options)}
        model, local = {"name": "mlp", "options": {"hidden": 4}}, {"batch_size": 5}
        experiment = Experiment(
            data=data, rounds=1, methods=["fedavg"], model=model, local=local, tracking={"enabled": False}
        )
        finals.append(simulate(experiment)["fedavg"].final)
    assert finals[0]["validation/accuracy"] == finals[1]["validation/accuracy"]  # one model, the same samples
    assert finals[0]["validation/clients"] == 3 and finals[1]["validation/clients"] == 1
