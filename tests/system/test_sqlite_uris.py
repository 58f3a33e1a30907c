"""URIs of SQLite files name the same file for SQLAlchemy, which MLflow uses, whatever characters its path has."""

import sqlite3
import string
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from cfl_ray.system.sqlite_uris import absolute_sqlite, sqlite_path, sqlite_uri

ODD = [" ", "ü", "%41", "a?b=c&d", "#%?"]
CHARACTERS = [*(character for character in string.printable.strip() if character != "/"), *ODD]


@pytest.mark.parametrize("name", CHARACTERS)
def test_the_file_is_that_of_the_path(tmp_path, name):
    file = tmp_path / f"a{name}b" / "mlflow.db"
    file.parent.mkdir()
    uri = sqlite_uri(file)
    assert sqlite_path(uri) == file
    with create_engine(uri).connect() as connection:
        connection.execute(text("create table t (x)"))
    assert sqlite3.connect(file).execute("select name from sqlite_master").fetchall() == [("t",)]
    assert list(tmp_path.rglob("*.db")) == [file]


def test_ordinary_paths_have_the_plain_form():
    assert sqlite_uri(Path("/a b/c#d/mlflow.db")) == "sqlite:////a b/c#d/mlflow.db"


@pytest.mark.parametrize(
    "uri, expected",
    [
        ("sqlite:///runs/m.db", "sqlite:////work here/runs/m.db"),
        ("sqlite:///runs/m.db?timeout=5", "sqlite:////work here/runs/m.db?timeout=5"),
        ("sqlite:////abs/m.db", "sqlite:////abs/m.db"),
        ("http://host/?a=b", "http://host/?a=b"),
    ],
)
def test_a_relative_uri_becomes_absolute(uri, expected):
    assert absolute_sqlite(uri, Path("/work here")) == expected


def test_other_uris_have_no_file():
    assert sqlite_path("postgresql://host/db") is None
    assert sqlite_path("sqlite:///runs/m.db?timeout=5") == Path.cwd() / "runs/m.db"


def test_absolute_uris_need_no_working_directory(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert absolute_sqlite(f"sqlite:///{tmp_path}/m.db") == f"sqlite:///{tmp_path}/m.db"
    assert sqlite_uri(tmp_path / "a%20b") == f"sqlite+pysqlite:///{tmp_path}/a%2520b"
