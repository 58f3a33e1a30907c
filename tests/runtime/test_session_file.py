"""session.json: read as written, and refused unless this user's token signed it."""

import json

import pytest

from cfl_ray.errors import ConfigError
from cfl_ray.runtime.session_file import ServerAddress, publish_server, read_server_address

HERE = ServerAddress.here("127.0.0.1:6379", "server")


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 64)


def test_is_read_as_written_and_does_not_hold_the_token(tmp_path):
    publish_server(tmp_path, HERE)
    assert read_server_address(tmp_path) == HERE and "a" * 8 not in (tmp_path / "session.json").read_text()
    assert (tmp_path / "session.json").stat().st_mode & 0o777 == 0o600


def test_of_another_user_is_refused(tmp_path, monkeypatch):
    publish_server(tmp_path, HERE)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "b" * 64)
    with pytest.raises(ConfigError, match="Ray token for this folder, so its cluster is not contacted"):
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
        with pytest.raises(ConfigError, match="was not written with your Ray token"):
            read_server_address(tmp_path)


def test_of_another_folder_is_refused(tmp_path):
    """The same folder by another path is the same folder."""
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    publish_server(tmp_path / "one", HERE)
    (tmp_path / "link").symlink_to(tmp_path / "one")
    assert read_server_address(tmp_path / "link") == HERE
    (tmp_path / "one/session.json").rename(tmp_path / "other/session.json")
    with pytest.raises(ConfigError, match="was not written with your Ray token for this folder"):
        read_server_address(tmp_path / "other")


def test_without_a_token_there_is_none(tmp_path, monkeypatch):
    publish_server(tmp_path, HERE)
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="cannot be checked: you have no Ray token here"):
        read_server_address(tmp_path)
    (tmp_path / "session.json").unlink()
    publish_server(tmp_path, HERE)
    assert read_server_address(tmp_path) is None and not (tmp_path / "session.json").exists()
