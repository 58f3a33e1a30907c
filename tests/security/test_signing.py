"""Signatures: of this user, on this machine, for one purpose."""

import pytest

from cfl_ray.security.signing import is_signed, sign


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CFL_RAY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_own_signatures_hold_and_no_others(home, tmp_path, monkeypatch):
    signature = sign("purpose", ["a", 1])
    assert is_signed("purpose", ["a", 1], signature)
    assert not is_signed("other", ["a", 1], signature) and not is_signed("purpose", ["a", 2], signature)
    assert not any(is_signed("purpose", ["a", 1], other) for other in (None, "", 3, "0" * 64, "é"))
    assert (home / "key").stat().st_mode & 0o777 == 0o600 and home.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in home.iterdir()] == ["key"]
    monkeypatch.setenv("CFL_RAY_HOME", str(tmp_path / "other"))
    assert not is_signed("purpose", ["a", 1], signature) and not (tmp_path / "other").exists()
    assert sign("purpose", ["a", 1]) != signature


def test_a_key_that_was_cut_is_replaced(home):
    before = sign("purpose", 1)
    (home / "key").write_bytes(b"short")
    assert not is_signed("purpose", 1, before)
    assert is_signed("purpose", 1, sign("purpose", 1))


def test_without_a_folder_nothing_is_signed(home):
    home.write_text("a file")
    assert sign("purpose", 1) is None and not is_signed("purpose", 1, None)
