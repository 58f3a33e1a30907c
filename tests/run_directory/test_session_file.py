"""session.json: read as written, and refused unless this user signed it."""

import json

import pytest

from cfl_ray.errors import ConfigError
from cfl_ray.run_directory.session_file import ServerAddress, publish_server, read_server_address

HERE = ServerAddress.here("127.0.0.1:6379", "server")


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("CFL_RAY_KEY", "a" * 64)


def test_is_read_as_written_and_does_not_hold_the_key(tmp_path):
    publish_server(tmp_path, HERE)
    assert read_server_address(tmp_path) == HERE and "a" * 8 not in (tmp_path / "session.json").read_text()
    assert (tmp_path / "session.json").stat().st_mode & 0o777 == 0o600


def test_of_another_user_is_refused(tmp_path, monkeypatch):
    publish_server(tmp_path, HERE)
    monkeypatch.setenv("CFL_RAY_KEY", "b" * 64)
    with pytest.raises(ConfigError, match="was not written by you in this folder, so its cluster is not contacted"):
        read_server_address(tmp_path)


def test_any_change_is_refused(tmp_path):
    publish_server(tmp_path, HERE)
    values = json.loads((tmp_path / "session.json").read_text())
    changes = (
        *({"address": "6.6.6.6:1"}, {"actor": "x"}, {"auth_mode": "other"}),
        *({"pid": 1}, {"more": 1}, {"signature": None}),
    )
    for change in changes:
        (tmp_path / "session.json").write_text(json.dumps(values | change))
        with pytest.raises(ConfigError, match="was not written by you"):
            read_server_address(tmp_path)


def test_of_another_folder_is_refused(tmp_path):
    """The same folder by another path is the same folder."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    publish_server(tmp_path / "one", HERE)
    (tmp_path / "link").symlink_to(tmp_path / "one")
    assert read_server_address(tmp_path / "link") == HERE
    (tmp_path / "one/session.json").rename(tmp_path / "other/session.json")
    with pytest.raises(ConfigError, match="was not written by you in this folder"):
        read_server_address(tmp_path / "other")


def test_without_a_key_there_is_none(tmp_path, monkeypatch):
    monkeypatch.delenv("CFL_RAY_KEY")
    (tmp_path / "home").write_text("no folder")
    monkeypatch.setenv("CFL_RAY_HOME", str(tmp_path / "home"))
    publish_server(tmp_path, HERE)
    assert read_server_address(tmp_path) is None and not (tmp_path / "session.json").exists()
