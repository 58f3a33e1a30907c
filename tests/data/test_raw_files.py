"""Raw files are known by their content; which of them are read again is counted, not timed."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from cfl_ray.config.data import SOURCE_KINDS
from cfl_ray.data import build, decoding, from_config, raw_files
from cfl_ray.data.decoding import DECODING
from cfl_ray.data.raw_files import DigestIndex, RawFiles
from cfl_ray.data.shards import MANIFEST
from cfl_ray.errors import DataError


@pytest.fixture
def files(tmp_path):
    """Two files that are older than the times of any file system are coarse."""
    (tmp_path / "raw").mkdir()
    for name in "ab":
        (tmp_path / "raw" / name).write_bytes(name.encode() * 3)
    return [tmp_path / "raw" / name for name in "ab"]


@pytest.fixture
def exact(monkeypatch):
    """File systems with exact times, so that files that were just written are in the index."""
    monkeypatch.setattr(raw_files, "_COARSEST_NS", -(10**12))


@pytest.fixture
def read(monkeypatch):
    """The names of the files whose content is read, in order."""
    names = []
    record = RawFiles._record
    monkeypatch.setattr(
        RawFiles,
        "_record",
        lambda self, place, *rest: names.append(Path(self.paths[place]).name) or record(self, place, *rest),
    )
    return names


def digest_with(index_folder, files):
    """The digest of files, with the index of earlier calls."""
    raw = RawFiles.of(files)
    index = DigestIndex(index_folder, raw.root)
    raw.recall(index)
    digest = raw.digest()
    if raw.keep(index):
        index.save()
    return digest


def test_only_changed_files_are_read_again(tmp_path, files, exact, read):
    first = digest_with(tmp_path, files)
    assert digest_with(tmp_path, files) == first and read == ["a", "b"]
    files[1].write_bytes(b"BBB")  # of equal size
    assert digest_with(tmp_path, files) != first and read == ["a", "b", "b"]
    files[1].write_bytes(b"bbb")
    assert digest_with(tmp_path, files) == first


def test_a_replaced_file_with_the_old_times_is_read(tmp_path, files, exact, read):
    """As `cp -p` and `rsync -t` leave it: size and modification time are equal, inode and time of change are not."""
    first, times = digest_with(tmp_path, files), files[0].stat()
    files[0].write_bytes(b"AAA")
    os.utime(files[0], ns=(times.st_atime_ns, times.st_mtime_ns))
    assert files[0].stat().st_mtime_ns == times.st_mtime_ns
    assert digest_with(tmp_path, files) != first and read == ["a", "b", "a"]


def test_files_that_changed_just_before_their_digest_are_read_again(tmp_path, files, read):
    """They may change once more without a new time."""
    digest_with(tmp_path, files)
    digest_with(tmp_path, files)
    assert read == ["a", "b"] * 2


def test_touched_and_moved_files_are_the_same(tmp_path, files, exact):
    first = digest_with(tmp_path, files)
    files[0].touch()
    assert digest_with(tmp_path, files) == first
    files[0].parent.rename(tmp_path / "moved")
    assert digest_with(tmp_path, [tmp_path / "moved" / name for name in "ab"]) == first


def test_a_renamed_file_is_another(tmp_path, files):
    first = digest_with(tmp_path, files)
    (files[0].parent / "inner").mkdir()
    files[0].rename(files[0].parent / "inner" / "a")
    assert digest_with(tmp_path, [files[0].parent / "inner" / "a", files[1]]) != first


def test_a_link_counts_by_its_content(tmp_path, files, exact):
    link = tmp_path / "raw" / "link"
    link.symlink_to(files[0])
    digests = {digest_with(tmp_path, [link, files[1]])}
    files[0].write_bytes(b"AAA")
    digests.add(digest_with(tmp_path, [link, files[1]]))
    assert len(digests) == 2


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format": "cfl_ray raw files 1", "files": {"a": 3}}', "\udc00", "1" * 5000]
)
def test_a_damaged_index_is_as_none(tmp_path, files, exact, read, text):
    first = digest_with(tmp_path, files)
    (index,) = tmp_path.glob("raw-*.json")
    index.write_bytes(text.encode(errors="surrogatepass"))
    assert digest_with(tmp_path, files) == first and read == ["a", "b"] * 2


def test_an_index_that_cannot_be_written_is_no_error(tmp_path, files, exact):
    (tmp_path / "file").touch()
    assert digest_with(tmp_path / "file" / "folder", files) == digest_with(tmp_path, files)


def test_entries_of_removed_files_are_removed(tmp_path, files, exact):
    digest_with(tmp_path, files)
    files[0].unlink()
    files[1].write_bytes(b"new")
    digest_with(tmp_path, files[1:])
    (index,) = tmp_path.glob("raw-*.json")
    assert list(json.loads(index.read_text().splitlines()[1])) == ["b"]


def test_files_that_vanish_or_change_are_named(files, monkeypatch):
    raw = RawFiles.of(files)
    raw.read(files[0])
    files[0].write_bytes(b"other")
    with pytest.raises(DataError, match="raw/a has changed while the data set was read; run again"):
        raw.read(files[0])
    with pytest.raises(DataError, match="raw/a has changed while the data set was read"):
        raw.check_unchanged()
    files[1].unlink()
    with pytest.raises(DataError, match="raw/b cannot be read: No such file"):
        raw.digest()
    with pytest.raises(DataError, match="raw/b cannot be read: No such file"):
        RawFiles.of(files)


# ---- shards


def folder_of_images(root: Path, value: int) -> dict:
    for label, kind in enumerate("ab"):
        (root / "f" / kind).mkdir(parents=True, exist_ok=True)
        for number in range(4):
            Image.new("L", (3, 3), 10 * label + number + 1 + value).save(root / "f" / kind / f"{number}.png")
    return {"source": "image_folder", "root": str(root / "f")}


def clients_of_images(root: Path, value: int) -> dict:
    """The same images, with other clients."""
    data = folder_of_images(root, 0)
    lines = [f"{kind}/{number}.png,{(number + value) // 2 % 2}" for kind in "ab" for number in range(4)]
    (root / "f" / "clients.csv").write_text("\n".join(["file,client", *lines]))
    return data | {"partition": {"kind": "writer", "clients": None}}


def leaf(root: Path, value: int) -> dict:
    (root / "train").mkdir(exist_ok=True)
    users = {name: {"x": [[(0.25, 0.75)[value]] * 784] * 4, "y": [0, 1, 2, 3]} for name in ("ann", "bob")}
    content = {"users": list(users), "num_samples": [4, 4], "user_data": users}
    (root / "train/all.json").write_text(json.dumps(content))
    return {"source": "femnist_leaf", "root": str(root)}


def parquet(root: Path, value: int) -> dict:
    images = [Image.new("L", (3, 3), number + 1 + 100 * value) for number in range(8)]
    for number, image in enumerate(images):
        image.save(root / f"{number}.png")
    rows = [{"bytes": (root / f"{number}.png").read_bytes(), "path": "x"} for number in range(8)]
    table = pa.table({"image": rows, "label": [number % 2 for number in range(8)]})
    pq.write_table(table, root / "train.parquet", compression="none", use_dictionary=False)
    return {"source": "images", "root": str(root), "train_files": "train.parquet"}


def medmnist(root: Path, value: int) -> dict:
    x, y = np.full((8, 3, 3), value, np.uint8), np.arange(8).reshape(8, 1) % 2
    np.savez(root / "bmnist.npz", train_images=x, train_labels=y, test_images=x, test_labels=y)
    return {"source": "medmnist", "root": str(root), "train_files": "bmnist.npz"}


def table(root: Path, value: int) -> dict:
    (root / "t.csv").write_text("a,label\n" + f"{1 + value},0\n{3 + value},1\n" * 4)
    return {"source": "csv", "root": str(root / "t.csv")}


def content_of(federation):
    return [tuple(part.tolist() for part in federation.train(client)) for client in range(federation.num_clients)]


SOURCES = [folder_of_images, clients_of_images, leaf, parquet, medmnist, table]


@pytest.mark.parametrize("write", SOURCES)
@pytest.mark.parametrize("old_times", [False, True])
def test_a_file_replaced_by_another_of_equal_size_makes_new_shards(tmp_path, exact, write, old_times):
    """Also with the old modification times. The old shards stay, and are used again with the old files."""

    def build_with(value, times=None):
        data = {"partition": {"clients": 2}} | write(tmp_path, value)
        for path in tmp_path.rglob("*") if times else ():
            if path in times and path.is_file():
                os.utime(path, ns=(times[path].st_mtime_ns, times[path].st_mtime_ns))
        return build(SOURCE_KINDS.of(**data), 0, tmp_path / "shards", converts_changed=True)

    first = build_with(0)
    known = {path: path.stat() for path in tmp_path.rglob("*") if "shards" not in path.parts}
    second = build_with(1, known if old_times else None)
    sizes = {path: path.stat().st_size for path in known}
    assert sizes == {path: status.st_size for path, status in known.items()}  # the sizes tell nothing
    assert content_of(second) != content_of(first) and second.uri.startswith(f"{first.uri}-")
    assert f"changed since {first.uri} was written" in second.warnings[0]
    assert f"converted anew into {second.uri}" in second.warnings[0]
    assert first.recipe["digests"] != second.recipe["digests"]
    again = build_with(1)
    assert again.uri == second.uri and not any("converted anew" in line for line in again.warnings)
    back = build_with(0)
    assert back.uri == first.uri and content_of(back) == content_of(first)


@pytest.mark.parametrize("write", [folder_of_images, leaf])
def test_files_are_read_once_for_conversion_and_their_digests(tmp_path, exact, read, write):
    data = SOURCE_KINDS.of(**{"partition": {"clients": 2}} | write(tmp_path, 0))
    build(data, 0, tmp_path / "shards", converts_changed=True)
    files = list((tmp_path / "f").rglob("*.png"))
    expected = sorted(path.name for path in files) or ["all.json"]
    counted = sorted(set(read))
    assert counted == sorted(set(expected)) and len(read) <= len(expected) + 1  # the first image decides the shape
    read.clear()
    build(data, 0, tmp_path / "shards", converts_changed=True)
    assert read == []


def as_of_an_earlier_version(shards):
    """Removes the digests and the version of the decoding from a manifest."""
    file = Path(shards.uri) / MANIFEST
    manifest = json.loads(file.read_text())
    del manifest["recipe"]["digests"]
    manifest["recipe"].pop("decoding", None)
    file.write_text(json.dumps(manifest))


def test_shards_without_digests_are_compared_from_now_on(tmp_path, exact):
    data = SOURCE_KINDS.of(partition={"clients": 2}, **folder_of_images(tmp_path, 0))
    first = build(data, 0, tmp_path / "shards", converts_changed=True)
    as_of_an_earlier_version(first)
    again = build(data, 0, tmp_path / "shards", converts_changed=True)
    assert again.uri == first.uri and again.recipe["digests"] == first.recipe["digests"]
    assert "are of an earlier version, which recorded names and sizes of the raw files" in again.warnings[0]
    assert not any(
        "earlier version" in line for line in build(data, 0, tmp_path / "shards", converts_changed=True).warnings
    )
    folder_of_images(tmp_path, 1)
    assert build(data, 0, tmp_path / "shards", converts_changed=True).uri != first.uri


def test_shards_without_digests_in_a_folder_that_is_read_only(tmp_path, exact, monkeypatch):
    data = SOURCE_KINDS.of(partition={"clients": 2}, **folder_of_images(tmp_path, 0))
    as_of_an_earlier_version(build(data, 0, tmp_path / "shards", converts_changed=True))

    def refuse(*given):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(raw_files, "write_text", refuse)
    for path in (tmp_path / "shards").glob("raw-*"):
        path.unlink()
    lines = build(data, 0, tmp_path / "shards", converts_changed=True).warnings
    assert any("cannot be written: changes of the content go unnoticed" in line for line in lines)


def test_many_files_need_no_reading(tmp_path, exact, read):
    """Reuse looks at the times of files only."""
    raw = tmp_path / "many"
    raw.mkdir()
    files = [raw / f"{number}" for number in range(2000)]
    for file in files:
        file.write_bytes(b"x")
    digest_with(tmp_path, files)
    read.clear()
    digest_with(tmp_path, files)
    assert read == []


# ---- shards whose images an earlier version decoded otherwise


def grey_8(number):
    return Image.new("L", (3, 3), number + 1)


def opaque(number):
    return Image.new("RGBA", (3, 3), (number + 1, 2, 3, 255))


def transparent(number):
    return Image.new("RGBA", (3, 3), (number + 1, 2, 3, 0 if number == 7 else 255))


def grey_16(number):
    return Image.fromarray(np.full((3, 3), 1000 * number + 300, np.uint16))


def coloured_entry(number):
    image = Image.new("P", (3, 3), number)
    image.putpalette([*range(30)])
    return image


def clear_entry(number):
    image = coloured_entry(number)
    image.info["transparency"] = 7
    return image


def images_of(root, kind, draw):
    """A data set of eight images, as a folder per class, a parquet file or a data set of Hugging Face."""
    root.mkdir(exist_ok=True)
    rows, given = [], {"partition": {"clients": 2}, "root": str(root), "test": {"view": "holdout"}}
    for number in range(8):
        file = root / ("ab"[number % 2] if kind == "image_folder" else ".") / f"{number}.png"
        file.parent.mkdir(exist_ok=True)
        draw(number).save(file)
        rows.append({"bytes": file.read_bytes(), "path": None})
    columns = pa.table({"image": rows, "label": [number % 2 for number in range(8)]})
    if kind == "images":
        pq.write_table(columns, root / "train.parquet")
    if kind == "hf_disk":
        with pa.ipc.new_stream(root / "data-00000-of-00001.arrow", columns.schema) as stream:
            stream.write_table(columns)
    return given | {"source": kind, **({"train_files": "train.parquet"} if kind == "images" else {})}


ANEW = "images of .* were decoded by an earlier version, which dropped transparency, clipped 16 bits"


@pytest.mark.parametrize("kind", ["image_folder", "images", "hf_disk"])
@pytest.mark.parametrize("draw", [transparent, grey_16, clear_entry])
def test_images_that_an_earlier_version_decoded_otherwise_are_decoded_again(tmp_path, exact, kind, draw):
    """A run is refused; once converted, all runs use the new shards, and do not decode the images to find out."""
    data, shards = SOURCE_KINDS.of(**images_of(tmp_path / "raw", kind, draw)), tmp_path / "shards"
    first = build(data, 0, shards)
    assert first.recipe["decoding"] == DECODING and build(data, 0, shards).uri == first.uri
    as_of_an_earlier_version(first)
    with pytest.raises(DataError, match=f"{ANEW}.*cfl-ray prepare"):
        build(data, 0, shards)
    again = build(data, 0, shards, converts_changed=True)
    assert again.uri.startswith(f"{first.uri}-") and any(re.match(ANEW, line) for line in again.warnings)
    third = build(data, 0, shards)
    assert third.uri == again.uri and not any("decoded" in line for line in third.warnings)


@pytest.mark.parametrize("kind", ["image_folder", "images", "hf_disk"])
@pytest.mark.parametrize("draw", [grey_8, opaque, coloured_entry])
def test_shards_of_other_images_are_reused(tmp_path, exact, kind, draw):
    data, shards = SOURCE_KINDS.of(**images_of(tmp_path / "raw", kind, draw)), tmp_path / "shards"
    first = build(data, 0, shards)
    assert "decoding" not in first.recipe
    as_of_an_earlier_version(first)
    assert build(data, 0, shards).uri == first.uri


def test_the_mode_of_a_column_counts(tmp_path, exact):
    given = images_of(tmp_path / "raw", "hf_disk", opaque)
    features = {"image": {"_type": "Image", "mode": "L"}, "label": {"_type": "Value", "dtype": "int64"}}
    (tmp_path / "raw/dataset_info.json").write_text(json.dumps({"features": features}))
    first = build(SOURCE_KINDS.of(**given), 0, tmp_path / "shards")
    as_of_an_earlier_version(first)
    with pytest.raises(DataError, match=f"{ANEW} and ignored the mode of a column"):
        build(SOURCE_KINDS.of(**given), 0, tmp_path / "shards")


def test_a_later_version_of_the_decoding_converts_images_of_these_kinds_alone(tmp_path, exact, monkeypatch):
    """Also if the raw data have changed before."""
    shards, found = tmp_path / "shards", {}
    for draw in (transparent, grey_8):
        given = images_of(tmp_path / draw.__name__, "image_folder", draw)
        build(SOURCE_KINDS.of(**given), 0, shards / draw.__name__)
        images_of(tmp_path / draw.__name__, "image_folder", lambda number, draw=draw: draw(7 - number))
        second = build(SOURCE_KINDS.of(**given), 0, shards / draw.__name__, converts_changed=True)
        found[draw] = (SOURCE_KINDS.of(**given), second.uri)
    for module in (decoding, from_config):
        monkeypatch.setattr(module, "DECODING", DECODING + 1)
    for draw, (data, uri) in found.items():
        again = build(data, 0, shards / draw.__name__, converts_changed=True)
        assert (again.uri == uri) == (draw is grey_8)
        assert again.recipe.get("decoding") == (None if draw is grey_8 else DECODING + 1)
        assert build(data, 0, shards / draw.__name__).uri == again.uri
