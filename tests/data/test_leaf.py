import json

import numpy as np
import pytest

from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.data.sources import locate
from cfl_ray.errors import DataError

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 784), dtype=np.uint8)


def user(rows, y=None):
    return {"x": (PIXELS[rows] / 255).tolist(), "y": [10 + row for row in rows] if y is None else y}


def write(folder, name, **users):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    content = {"users": list(users), "num_samples": [len(one["y"]) for one in users.values()], "user_data": users}
    (folder / name).write_text(json.dumps(content))


def read(root, **data):
    return locate("femnist_leaf", SOURCE_KINDS.of(source="femnist_leaf", root=str(root), **data)).read(True, None)


def test_json_is_read_as_the_bytes_it_was_made_from(tmp_path):
    write(tmp_path / "femnist/data", "train/a.json", f0=user([0, 1]), f1=user([]))
    write(tmp_path / "femnist/data", "train/b.json", f2=user([2]))
    write(tmp_path / "femnist/data", "test/a.json", f0=user([3, 4]))
    images = read(tmp_path)
    assert np.array_equal(images.train_x.reshape(-1, 784), PIXELS[:3])
    assert np.array_equal(images.test_x.reshape(-1, 784), PIXELS[3:])
    assert images.client.tolist() == ["f0", "f0", "f2"] and images.train_y.tolist() == [10, 11, 12]
    assert images.num_classes == 62
    assert np.array_equal(read(tmp_path, train_files="femnist/data").train_x, images.train_x)


@pytest.mark.parametrize(
    "content, message",
    [
        (
            {"u": {"x": [[0.5] * 783], "y": [1]}},
            r"user 'u' needs x of shape \(1, 784\) and y of \(1,\), got \(1, 783\)",
        ),
        ({"u": {"x": [[1.5] * 784], "y": [1]}}, r"must lie in \[0, 1\], got 1.5..1.5"),
        ({"u": {"x": [[float("nan")] * 784], "y": [1]}}, r"must lie in \[0, 1\], got nan"),
        ({"u": user([0], y=[62])}, "must lie in 0..61, got 62..62"),
        ({"u": {"x": [[0.5] * 784, [0.5]], "y": [1, 2]}}, "data of user 'u' cannot be read"),
        ({"u": user([])}, "no user of its 1 JSON files has a sample"),
    ],
)
def test_unusable_content_is_named(tmp_path, content, message):
    write(tmp_path, "train/a.json", **content)
    with pytest.raises(DataError, match=message):
        read(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"users": []}'])
def test_other_json_is_refused(tmp_path, text):
    (tmp_path / "train").mkdir()
    (tmp_path / "train/a.json").write_text(text)
    with pytest.raises(DataError, match="a.json is not a LEAF file"):
        read(tmp_path)
