import json

import numpy as np
import pytest

from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.data.leaf import ALPHABET
from cfl_ray.data.sources import locate
from cfl_ray.errors import DataError

PIXELS = np.random.default_rng(0).integers(0, 256, (5, 784), dtype=np.uint8)


def user(rows, y=None):
    return {"x": (PIXELS[rows] / 255).tolist(), "y": [10 + row for row in rows] if y is None else y}


def write(folder, name, **users):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    content = {"users": list(users), "num_samples": [len(one["y"]) for one in users.values()], "user_data": users}
    (folder / name).write_text(json.dumps(content))


def read(root, source="femnist_leaf", **data):
    return locate(source, SOURCE_KINDS.of(source=source, root=str(root), **data)).read(True, None)


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


def test_a_test_part_without_effect_is_told(tmp_path):
    write(tmp_path, "train/a.json", f0=user([0, 1], [0, 1]))
    by_writer = {"kind": "writer", "clients": None}
    assert not read(tmp_path, partition=by_writer).warnings[1:]  # of labels
    write(tmp_path, "test/a.json", f0=user([3, 4], [0, 1]))
    told = read(tmp_path, partition=by_writer).warnings[0]
    assert told.startswith(f"the samples in {tmp_path / 'test'} have no effect: data.test.view is holdout; ")
    for test in ({"view": "cluster"}, {"pool": True}):
        assert "no effect" not in str(read(tmp_path, test=test).warnings)


def test_shakespeare_is_the_next_character(tmp_path):
    write(tmp_path, "train/a.json", HAMLET={"x": ["a" * 80, "b" * 79 + "~"], "y": ["b", "\n"]})
    images = read(tmp_path, "shakespeare_leaf")
    assert len(ALPHABET) == 80 and images.num_classes == images.vocabulary == 81
    assert images.train_x.shape == (2, 80) and (images.train_x[0] == ALPHABET.index("a")).all()
    assert images.train_x[1, -1] == 80 and images.train_y.tolist() == [ALPHABET.index("b"), 0]
    assert images.client.tolist() == ["HAMLET"] * 2


def test_sent140_is_words(tmp_path):
    def tweet(text):
        return ["1", "Mon", "NO_QUERY", "ann", text, "training"]

    ann = {"x": [tweet("Good good day"), tweet("day !")], "y": [1, 0]}
    write(tmp_path, "train/a.json", ann=ann, bob={"x": [tweet("bad")], "y": ["4"]})
    images = read(tmp_path, "sent140_leaf", vocabulary=5)
    # by frequency, then alphabet: day 2, good 3, ! 4; "bad" is outside the vocabulary
    assert images.train_x[:, :4].tolist() == [[3, 3, 2, 0], [2, 4, 0, 0], [1, 0, 0, 0]]
    assert images.train_y.tolist() == [1, 0, 1] and images.train_x.shape == (3, 25) and images.num_classes == 2


@pytest.mark.parametrize(
    "source, ann, message",
    [
        ("femnist", {"x": [[0.5] * 783], "y": [1]}, r"needs x of shape \(1, 784\) and y of \(1,\), got \(1, 783\)"),
        ("femnist", {"x": [[1.5] * 784], "y": [1]}, r"must lie in \[0, 1\], got 1.5..1.5"),
        ("femnist", {"x": [[float("nan")] * 784], "y": [1]}, r"must lie in \[0, 1\], got nan"),
        ("femnist", user([0], y=[62]), "must lie in 0..61, got 62..62"),
        ("femnist", {"x": [[0.5] * 784, [0.5]], "y": [1, 2]}, "cannot be read"),
        ("shakespeare", {"x": ["short"], "y": ["a"]}, "needs texts of 80 characters, got 5 characters"),
        ("shakespeare", {"x": ["a" * 80], "y": ["ab"]}, "needs texts of 1 characters, got 2 characters"),
        ("shakespeare", {"x": [], "y": ["a"]}, "needs lists x and y of 1 entries, got 0 and 1"),
        ("sent140", {"x": ["hm"], "y": [3]}, r"must lie in 0..1 \(or be 4\), got 3..3"),
        ("sent140", {"x": None, "y": [1]}, "needs lists x and y of 1 entries, got NoneType and 1"),
        ("sent140", {"x": ["hm"], "y": [float("inf")]}, "must be 0 or 1: cannot convert float infinity"),
        ("femnist", user([0], y=[10**30]), "cannot be read: OverflowError"),
    ],
)
def test_unusable_content_is_named(tmp_path, source, ann, message):
    write(tmp_path, "train/a.json", ann=ann)
    with pytest.raises(DataError, match=f"a.json: .*user 'ann' {message}"):
        read(tmp_path, f"{source}_leaf")


CHANGES = {  # of a file with the users ann and bob, who have a sample each
    "users twice": (lambda file: file["users"].append("ann"), "a.json: users lists 'ann' twice"),
    "no entry": (lambda file: file["user_data"].pop("bob"), "a.json: user_data has no entry for user 'bob'"),
    "not listed": (lambda file: file["users"].pop(), "a.json: users does not list user 'bob', who has an entry"),
    "no count": (lambda file: file["num_samples"].pop(), "a.json has 2 of users, 1 of num_samples, 2 of user_data"),
    "hierarchies": (lambda file: file.update(hierarchies=["x"]), "2 of user_data, 1 of hierarchies; each user needs"),
    "text": (lambda file: file.update(num_samples=["1", 1]), "num_samples of user 'ann' must be a whole number .* '1'"),
    "real": (lambda file: file.update(num_samples=[1, 1.5]), "num_samples of user 'bob' must be a whole number .* 1.5"),
    "none": (lambda file: file.update(num_samples=[0, 1]), "num_samples of user 'ann' is 0, but the user has data"),
    "more": (lambda file: file.update(num_samples=[1, 2]), r"user 'bob' needs x of shape \(2, 784\)"),
    "no x": (lambda file: file["user_data"]["bob"].pop("x"), "data of user 'bob' cannot be read: KeyError"),
    "lists": (lambda file: file.update(users={"ann": 1, "bob": 1}), "users and num_samples must be lists"),
}


@pytest.mark.parametrize("change, message", CHANGES.values(), ids=CHANGES)
def test_lists_that_disagree_are_named(tmp_path, change, message):
    write(tmp_path, "train/a.json", ann=user([0]), bob=user([1]))
    file = json.loads((tmp_path / "train/a.json").read_text())
    change(file)
    (tmp_path / "train/a.json").write_text(json.dumps(file))
    with pytest.raises(DataError, match=message):
        read(tmp_path)


def test_a_user_in_two_files(tmp_path):
    """In both parts a user is the same; in two files of one part, samples would be joined or lost."""
    write(tmp_path, "train/a.json", ann=user([0]))
    write(tmp_path, "test/a.json", ann=user([1]))
    assert read(tmp_path).client.tolist() == ["ann"]
    write(tmp_path, "train/b.json", ann=user([2]))
    with pytest.raises(DataError, match="user 'ann' is in .*train/a.json and in .*train/b.json; LEAF's own reader"):
        read(tmp_path)


def test_a_name_twice_in_an_object(tmp_path):
    write(tmp_path, "train/a.json", ann=user([0]))
    text = (tmp_path / "train/a.json").read_text()
    (tmp_path / "train/a.json").write_text(text.replace('"user_data": {', '"user_data": {"ann": {}, '))
    with pytest.raises(DataError, match="a.json has the name 'ann' twice in one object"):
        read(tmp_path)


def test_labels_and_users_without_samples_are_told(tmp_path):
    write(tmp_path, "train/a.json", ann=user([0, 2]), bob=user([]))
    images = read(tmp_path)
    assert images.notes == (f"{tmp_path}/train: read 1 user with 2 samples",)
    labels, empty = images.warnings
    assert "2 of 62 classes have training samples (labels 10, 12)" in labels
    assert empty == f"{tmp_path}: 1 user without samples is left out, e.g. bob"
    dense = read(tmp_path, labels="dense")
    assert dense.train_y.tolist() == [0, 1] and dense.class_names == ("10", "12") and dense.num_classes == 2
    assert len(dense.warnings) == 1


def test_files_without_a_sample(tmp_path):
    write(tmp_path, "train/a.json", ann=user([]))
    with pytest.raises(DataError, match="no user of its 1 JSON files has a sample"):
        read(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"users": []}', '{"users": 3, "num_samples": 4, "user_data": {}}'])
def test_other_json_is_refused(tmp_path, text):
    (tmp_path / "train").mkdir()
    (tmp_path / "train/a.json").write_text(text)
    with pytest.raises(DataError, match="a.json (is not|cannot be read as) a LEAF file"):
        read(tmp_path)
