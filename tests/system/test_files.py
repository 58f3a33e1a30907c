"""Files that are read whatever is in their place, and files that only their user can read."""

import errno
import hashlib
import os
import stat
from pathlib import Path

import pytest

from cfl_ray.errors import ConfigError, DataError
from cfl_ray.system import files
from cfl_ray.system.files import (
    append_line,
    cut_torn_line,
    drafted,
    open_private,
    private_folder,
    private_umask,
    read_file,
    read_json,
    write_json,
)


def test_links_are_followed_only_where_the_user_names_them(tmp_path):
    (tmp_path / "file").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_json(tmp_path / "link", follow=True) == {}
    for act in (lambda path: read_json(path), lambda path: open_private(path, "ab"), cut_torn_line):
        with pytest.raises(DataError, match="link.* it is a link|link is a link"):
            act(tmp_path / "link")
    write_json(tmp_path / "link", {"new": 1})
    assert (tmp_path / "file").read_text() == "{}" and not (tmp_path / "link").is_symlink()


def test_what_is_no_file_is_an_error_and_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    reasons = {"pipe": "a device or a pipe", "loop": "it is a link", ".": "Is a directory"}
    for name, reason in reasons.items():
        for read in (read_file, read_json, cut_torn_line):
            with pytest.raises(DataError, match=f"cannot be read: .*{reason}"):
                read(tmp_path / name)
    with pytest.raises(DataError, match="/dev/zero cannot be read: it is a device or a pipe"):
        read_file(tmp_path / "/dev/zero")
    assert read_file(tmp_path / "nothing") is read_json(tmp_path / "nothing") is None


@pytest.mark.parametrize("content", [b"", b"\xff", b"[1]", b"3", b"[" * 100_000, b"9" * 5000, b'{"a": 1'])
def test_what_is_no_json_object_is_damaged(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(DataError, match="x.json is damaged"):
        read_json(tmp_path / "x.json")


def test_a_folder_that_takes_no_file_is_named_with_the_file_that_was_wanted(tmp_path):
    (tmp_path / "a").write_text("")
    for path in (Path("/proc/page.html"), tmp_path / "none" / "page.html", tmp_path / "a" / "page.html"):
        with pytest.raises(OSError) as error:
            write_json(path, {})
        assert error.value.filename == str(path)


def test_private_files_and_folders_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        private_folder(tmp_path / "a/b")
        write_json(tmp_path / "a/x.json", {})
        open_private(tmp_path / "a/log", "ab").close()
        with drafted(tmp_path / "a/draft") as draft:
            draft.write_text("x")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a").rglob("*")}
    assert modes == {"b": 0o700, "x.json": 0o600, "log": 0o600, "draft": 0o600}
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


def test_the_umask_is_private_while_any_thread_wants_it_and_the_same_as_before_in_the_end(monkeypatch):
    monkeypatch.setattr(files, "_umask", files._Umask())  # a tracker that hangs in another test keeps its own
    before = os.umask(0o022)
    try:
        first, second = private_umask(), private_umask()
        first.__enter__(), second.__enter__()
        first.__exit__(None, None, None)  # the threads overlap
        assert os.umask(0o077) == 0o077
        second.__exit__(None, None, None)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_a_draft_does_not_follow_a_link_that_waits_for_it(tmp_path):
    (tmp_path / "victim").write_text("untouched")
    (tmp_path / f".{os.getpid()}.x").symlink_to(tmp_path / "victim")
    with drafted(tmp_path / "x") as draft:
        draft.write_text("new")
    assert (tmp_path / "victim").read_text() == "untouched" and (tmp_path / "x").read_text() == "new"


def test_a_folder_or_a_device_is_never_replaced(tmp_path, monkeypatch):
    (tmp_path / "device").symlink_to("/dev/null")
    for path, message in ((tmp_path, "is a folder; name a file in it"), (tmp_path / "device", "is a device or a pipe")):
        with pytest.raises(ConfigError, match=message), drafted(path):
            pass
    monkeypatch.setattr(files, "_DEVICES", tmp_path)  # where a shell redirects it, /dev/stdout is a link to a file
    with pytest.raises(ConfigError, match="stdout is a device or a pipe"), drafted(tmp_path / "stdout"):
        pass
    assert (tmp_path / "device").is_symlink() and [one.name for one in tmp_path.iterdir()] == ["device"]


def test_errors_of_a_full_disk_name_the_file(tmp_path):
    with pytest.raises(OSError) as drafting, drafted(tmp_path / "model.pt"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert drafting.value.filename == str(tmp_path / "model.pt") and not list(tmp_path.iterdir())
    with open_private(tmp_path / "lines", "ab") as file:
        file.write(b"{}\n")

        class Full:
            name, fileno = file.name, file.fileno

            def write(self, line):
                file.write(line[:1])
                raise OSError(errno.ENOSPC, "No space left on device")

        with pytest.raises(OSError) as appending:
            append_line(Full(), b"{}\n")
    assert appending.value.filename == str(tmp_path / "lines") and (tmp_path / "lines").read_bytes() == b"{}\n"


def test_a_file_is_hashed_again_only_if_it_has_changed(tmp_path, monkeypatch):
    read, real = [], files.sha256
    monkeypatch.setattr(files, "sha256", lambda file: read.append(file) or real(file))
    table = tmp_path / "table.csv"
    table.write_text("1,2")
    first = [files.sha256_once(table) for _ in range(3)]
    table.write_text("1,3")
    os.utime(table, ns=(0, 1))  # the clock of the file system may not have ticked
    assert [*first, files.sha256_once(table)] == [hashlib.sha256(text).hexdigest() for text in [b"1,2"] * 3 + [b"1,3"]]
    assert read == [table, table]


def test_a_lock_makes_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="moved/run.lock"):
        files.lock_in_folder(tmp_path / "moved" / "run.lock", 1)
    with files.lock_in_folder(tmp_path / "run.lock", 1):
        assert [*tmp_path.iterdir()] == [tmp_path / "run.lock"]
