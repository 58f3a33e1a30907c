"""Signatures: of this user, for one folder and one purpose."""

import os
import shutil

import pytest

from cfl_ray.security.signing import is_signed, sign


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CFL_RAY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_own_signatures_hold_and_no_others(home, tmp_path, monkeypatch):
    signature = sign("purpose", tmp_path, ["a", 1])
    assert is_signed("purpose", tmp_path, ["a", 1], signature)
    assert not is_signed("other", tmp_path, ["a", 1], signature)
    assert not is_signed("purpose", tmp_path, ["a", 2], signature)
    for other in (None, "", 3, "0" * 64, "é", "é é", f"{'0' * 64} {'1' * 64}"):
        assert not is_signed("purpose", tmp_path, ["a", 1], other), other
    assert (home / "key").stat().st_mode & 0o777 == 0o600 and home.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in home.iterdir()] == ["key"]
    monkeypatch.setenv("CFL_RAY_HOME", str(tmp_path / "other"))
    assert not is_signed("purpose", tmp_path, ["a", 1], signature) and not (tmp_path / "other").exists()
    assert sign("purpose", tmp_path, ["a", 1]) != signature


def test_of_one_folder_also_where_it_is_moved_or_restored_and_of_no_copy(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    signature = sign("purpose", folder, 1)
    folder.rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "copy")
    assert is_signed("purpose", tmp_path / "moved", 1, signature)
    assert not is_signed("purpose", tmp_path / "copy", 1, signature)
    os.rename(tmp_path / "copy", folder)  # as another pod sees it, whose file system has other inodes
    assert is_signed("purpose", folder, 1, signature)


def test_a_key_that_was_cut_is_replaced(home, tmp_path):
    before = sign("purpose", tmp_path, 1)
    (home / "key").write_bytes(b"short")
    assert not is_signed("purpose", tmp_path, 1, before)
    assert is_signed("purpose", tmp_path, 1, sign("purpose", tmp_path, 1))


def test_without_a_home_nothing_is_signed(home, tmp_path):
    home.write_text("a file")
    assert sign("purpose", tmp_path, 1) is None and not is_signed("purpose", tmp_path, 1, None)
