"""URIs of SQLite files, as SQLAlchemy reads them, which MLflow uses."""

from pathlib import Path

from cfl_ray.errors import ConfigError

_PLAIN = "sqlite:///"
# of paths that would have another meaning in a plain URI; in that form MLflow also makes a folder named by the encoded
# text
_ENCODED = "sqlite+pysqlite:///"


def sqlite_uri(path: Path) -> str:
    """The URI of a file. Raises ConfigError for a path that no URI of this version of SQLAlchemy can express."""
    plain = f"{_PLAIN}{path}"
    if sqlite_path(plain) == path.absolute():
        return plain
    from sqlalchemy.engine import URL  # imported here: it takes 0.1 s, and few paths need it

    encoded = URL.create(_ENCODED.partition(":")[0], database=str(path)).render_as_string()
    if sqlite_path(encoded) != path.absolute():
        raise ConfigError(
            f"{path}: the installed version of SQLAlchemy cannot open a database in a folder with ? in its name; "
            "choose another output folder, set tracking.uri, or install SQLAlchemy 2.1 or newer"
        )
    return encoded


def sqlite_path(uri: str) -> Path | None:
    """The absolute path of the file of a URI; None for any other URI."""
    prefix = next((prefix for prefix in (_PLAIN, _ENCODED) if uri.startswith(prefix)), None)
    if prefix is None:
        return None
    database: str | None = uri.removeprefix(prefix)
    if "%" in uri or "?" in uri:
        from sqlalchemy.engine import make_url

        database = make_url(uri).database
    return Path(database or "").absolute()


def absolute_sqlite(uri: str, folder: Path | None = None) -> str:
    """The URI with an absolute path, if it is that of an SQLite file.

    folder: where relative paths begin; None: in the working directory, which has to exist for relative paths alone.
    """
    if not uri.startswith(_PLAIN) or uri.startswith(f"{_PLAIN}/"):
        return uri
    query = "".join(uri.partition("?")[1:])
    path = sqlite_path(uri.removesuffix(query))
    assert path is not None
    return sqlite_uri((folder or Path.cwd()) / path.relative_to(Path.cwd())) + query
