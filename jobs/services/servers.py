"""Databases and an object store as processes of this machine, on loopback, with folders of their own.

Each is a context manager; `missing` says what a machine lacks for it.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

POSTGRESQL, MARIADB, S3 = "postgresql", "mariadb", "s3"
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
REGION = "us-east-1"
BUCKET = "parts"
_START_SECONDS = 120.0
_PROGRAMS = {POSTGRESQL: ("postgres", "initdb"), MARIADB: ("mariadbd", "mariadb-install-db")}
_PACKAGES = {POSTGRESQL: ("psycopg2",), MARIADB: ("pymysql",), S3: ("moto", "boto3")}
_USERS = {POSTGRESQL: "postgres", MARIADB: "mysql"}  # of Debian's packages: these servers refuse to run as root


def missing(kind: str) -> str:
    """Returns the programs and packages that a server of this kind lacks here, in words; empty if it can start."""
    lacking = [name for name in _PROGRAMS.get(kind, ()) if _program(name) is None]
    lacking += [name for name in _PACKAGES.get(kind, ()) if find_spec(name) is None]
    return f"{kind} needs {', '.join(lacking)}" if lacking else ""


def version(kind: str) -> str:
    """The version of a database, as its server says it."""
    words = [_program(_PROGRAMS[kind][0]) or "", "--version"]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    number = re.search(r"\d+(\.\d+)+", said)
    return f"{kind} {number[0] if number else said.strip()}"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def served(
    *command: str | Path, port: int | None = None, user: str | None = None, seconds: float = _START_SECONDS
) -> Iterator[int]:
    """The port of a server on this machine. port: None: a free one, with which the command ends."""
    words = [*command, *([str(port := free_port())] if port is None else [])]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, user=user)
    try:
        deadline = time.monotonic() + seconds
        while socket.socket().connect_ex(("127.0.0.1", port)):
            if time.monotonic() > deadline or server.poll() is not None:
                raise RuntimeError(f"{command[0]} does not start")
            time.sleep(0.05)
        yield port
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


@contextmanager
def postgresql() -> Iterator[str]:
    """The URI of an empty database of a PostgreSQL server."""
    with _folder(_USERS[POSTGRESQL]) as (folder, user):
        data, port = folder / "data", free_port()
        _run(_program("initdb"), "-D", data, "-U", "parts", "-A", "trust", "--no-sync", "-E", "UTF8", user=user)
        options = ("-h", "127.0.0.1", "-p", str(port), "-k", folder, "-F")
        with served(_program("postgres") or "", "-D", data, *options, port=port, user=user):
            _until(lambda: _run(_program("createdb"), "-h", "127.0.0.1", "-p", str(port), "-U", "parts", "parts"))
            yield f"postgresql+psycopg2://parts@127.0.0.1:{port}/parts"


@contextmanager
def mariadb() -> Iterator[str]:
    """The URI of an empty database of a MariaDB server."""
    with _folder(_USERS[MARIADB]) as (folder, user):
        data, port = folder / "data", free_port()
        common = ("--no-defaults", f"--datadir={data}", *([f"--user={user}"] if user else []))
        method = "--auth-root-authentication-method=normal"
        _run(_program("mariadb-install-db"), *common, method, "--skip-test-db", "--force")
        options = (f"--port={port}", "--bind-address=127.0.0.1", f"--socket={folder / 'socket'}", "--skip-name-resolve")
        with served(_program("mariadbd") or "", *common, *options, f"--pid-file={folder / 'pid'}", port=port):
            _until(lambda: _make_database(port))
            yield f"mysql+pymysql://root@127.0.0.1:{port}/parts"


@contextmanager
def s3() -> Iterator[str]:
    """The host and port of a server of S3 (moto) with the bucket `BUCKET`; `s3_variables` has what clients need."""
    with served(sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p") as port:
        import boto3

        store = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{port}",
            region_name=REGION,
            aws_access_key_id="parts",
            aws_secret_access_key="parts",
        )
        store.create_bucket(Bucket=BUCKET)
        yield f"127.0.0.1:{port}"


def s3_variables(address: str) -> dict[str, str]:
    """Environment variables of a client of the server at `address`, among them MLflow's server."""
    return dict.fromkeys(KEYS, "parts") | {
        "MLFLOW_S3_ENDPOINT_URL": f"http://{address}",
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


DATABASES: Mapping[str, Callable[[], object]] = {POSTGRESQL: postgresql, MARIADB: mariadb}


def _make_database(port: int) -> None:
    import pymysql

    with pymysql.connect(host="127.0.0.1", port=port, user="root") as connection, connection.cursor() as cursor:
        cursor.execute("CREATE DATABASE parts CHARACTER SET utf8mb4")


def _program(name: str) -> str | None:
    """The path of a program, also of PostgreSQL's, which Debian keeps off PATH; None without it."""
    folders = [os.environ.get("PATH", ""), "/usr/sbin", *map(str, sorted(Path("/usr/lib/postgresql").glob("*/bin")))]
    return shutil.which(name, path=os.pathsep.join(folders))


def _run(program: str | None, *arguments: str | Path, user: str | None = None) -> None:
    subprocess.run([program or "", *arguments], check=True, capture_output=True, user=user, cwd="/")


def _until(action: Callable[[], None]) -> None:
    """Repeats an action of a server that still starts until it succeeds."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            return action()
        except Exception:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


@contextmanager
def _folder(user: str) -> Iterator[tuple[Path, str | None]]:
    """A new folder, and the user to whom it belongs where this process is root; else None: this process's own."""
    with tempfile.TemporaryDirectory(prefix="parts-") as name:
        folder, owner = Path(name), user if os.geteuid() == 0 else None
        if owner:
            shutil.chown(folder, owner)
        yield folder, owner
