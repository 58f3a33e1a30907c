"""The functions of docs/extend/data.md that read clients which other tools have divided."""

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.data import build

PAGE = (Path(__file__).parents[2] / "docs/extend/data.md").read_text()


@pytest.fixture
def federation(tmp_path):
    """The federation of a function of the page."""
    code = re.search(r"```python\n# divided\.py\n(.*?)```", PAGE, re.S)
    (tmp_path / "divided.py").write_text(code[1])

    def made(function, **options):
        data = SOURCE_KINDS.of(source=f"{tmp_path}/divided.py:{function}", options=options)
        return build(data, 0, tmp_path)

    return made


def write_leaf(folder, part, *files):
    (folder / part).mkdir(parents=True)
    for number, users in enumerate(files):
        counts = [len(of["y"]) for of in users.values()]
        content = {"users": list(users), "num_samples": counts, "user_data": users}
        (folder / part / f"{number}.json").write_text(json.dumps(content))


def test_leaf(tmp_path, federation):
    """Users are in another order, and in other files, in both parts; two lack one of them."""

    def user(first, count):
        return {"x": [[first + i / 8] * 4 for i in range(count)], "y": [(first + i) % 3 for i in range(count)]}

    write_leaf(tmp_path, "train", {"b": user(0, 3), "a": user(1, 4)}, {"c": user(2, 5), "none": user(0, 0)})
    write_leaf(tmp_path, "test", {"c": user(12, 2), "new": user(0, 1), "none": user(5, 1)}, {"a": user(11, 2)})
    made = federation("leaf", folder=str(tmp_path), shape=[1, 2, 2])
    assert made.num_samples_N.tolist() == [4, 5]
    for client, first in enumerate((1, 2)):
        for (x, y), of in ((made.train(client), user(first, 3 + first)), (made.test(client), user(10 + first, 2))):
            assert np.array_equal(x, np.float32(of["x"]).reshape(-1, 1, 2, 2)) and y.tolist() == of["y"]


def test_fl_bench(tmp_path, federation):
    x, y = np.arange(40, dtype=np.uint8).reshape(20, 1, 1, 2), np.arange(20) % 4
    np.save(tmp_path / "data.npy", x)
    np.save(tmp_path / "targets.npy", y)
    draw = np.random.default_rng(0).permutation(20)
    rows = [{"train": draw[:9], "val": draw[:0], "test": draw[9:11]}, {"train": draw[11:18], "test": draw[18:]}]
    (tmp_path / "partition.pkl").write_bytes(pickle.dumps({"separation": {}, "data_indices": rows}))
    made = federation("fl_bench", folder=str(tmp_path))
    assert made.num_samples_N.tolist() == [9, 7]
    for client, of in enumerate(rows):
        for (samples, labels), part in ((made.train(client), "train"), (made.test(client), "test")):
            assert np.allclose(samples, x[of[part]] / 255) and labels.tolist() == y[of[part]].tolist()
