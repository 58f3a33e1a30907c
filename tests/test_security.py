"""Authentication, open ports, and untrusted input: pickles, paths in data and credentials."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from certificates import certificates
from commands import call, status_of
from pyarrow import fs

from cfl_ray import Experiment, config, data, simulate
from cfl_ray.data import folder, open_shards
from cfl_ray.errors import ConfigError, DataError, RunError
from cfl_ray.run_directory.session_file import ServerAddress, publish_server
from cfl_ray.runtime.journal import JoinedShards, Journal, JournalEvent

ROOT = Path(__file__).parents[1]
TEXTS = [
    path
    for folder in ("cfl_ray", "jobs", "cluster_configs", "docs", "tests")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".yaml", ".md", ".sh"} and "__pycache__" not in path.parts
] + [ROOT / "README.md"]

GATED = f"{ROOT / 'tests/runtime/gated.py'}:Gated"
STARTS = re.compile(r"""^[^#\n]*(?<![`"])\bray start --|\bray\.init\(|\b(?:Local)?Cluster\(""", re.M)


@contextlib.contextmanager
def live_run(folder: Path, **variables: str) -> Iterator[list[psutil.Process]]:
    """The processes of a `cfl-ray run` on a cluster of its own, in the folder `run`, which waits in round 2.

    variables: of the environment of the run.
    """
    excluded = ("RAY_ADDRESS", "RAY_AUTH_MODE", "MLFLOW_TRACKING_URI")
    environment = {name: value for name, value in os.environ.items() if name not in excluded} | variables
    log, gate = folder / "log", folder / "gate"
    gate.write_text("1")
    options = [f"methods=[{{'{GATED}': {{gate: '{gate}'}}}}]", "runtime={engine: sequential, hosts: 1}"]
    options += ["rounds=9", "tracking.enabled=false", f"output={folder}"]
    command = [sys.executable, "-m", "cfl_ray", "run", "--run-dir", str(folder / "run"), *options]
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + 400
        while "gated round 1" not in log.read_text():
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()


def listening(processes):
    """Pairs of process and address for every port that is open."""
    return [
        (process, connection.laddr)
        for process in processes
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]


@pytest.mark.slow
class TestAClusterOfItsOwn:
    @pytest.fixture(scope="class")
    def live(self, tmp_path_factory):
        """The processes of a live run."""
        with live_run(tmp_path_factory.mktemp("live")) as processes:
            yield processes

    def test_listens_on_loopback_only(self, live):
        found = listening(live)
        assert len(found) > 3
        loopback = ("127.0.0.1", "::1", "::ffff:127.0.0.1", "::ffff:::1")
        assert [(process.name(), address) for process, address in found if address.ip not in loopback] == []

    def test_requires_the_token(self, live):
        (port,) = {address.port for process, address in listening(live) if process.name() == "gcs_server"}
        script = (
            # Without ENABLE_RAY_CLUSTER = False, Ray connects to another address of the machine.
            "import ray; from ray._private import ray_constants; ray_constants.ENABLE_RAY_CLUSTER = False\n"
            f"ray.init(address='127.0.0.1:{port}', log_to_driver=False); print('connected')"
        )
        tokens = (
            {"RAY_AUTH_MODE": "token"},
            {"RAY_AUTH_MODE": "disabled"},
            {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
        )
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environments = [os.environ | token | {"RAY_gcs_server_port_wait_time_s": "1"} for token in tokens]
        drivers = [subprocess.Popen([sys.executable, "-c", script], env=one, **pipes) for one in environments]
        printed = [driver.communicate(timeout=400) for driver in drivers]
        found = [("connected" in out, bool(re.search("(?i)authenticat|token", error))) for out, error in printed]
        assert found == [(True, False), (False, True), (False, True)]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")
def test_a_run_with_the_tls_of_ray(tmp_path):
    """Beside the token: the cluster shows its certificate, demands the client's, and answers no one without TLS."""
    tls = certificates(tmp_path)
    with live_run(tmp_path, **tls) as processes:
        (port,) = {address.port for process, address in listening(processes) if process.name() == "gcs_server"}
        context = ssl.create_default_context(cafile=tls["RAY_TLS_CA_CERT"])
        context.load_cert_chain(tls["RAY_TLS_SERVER_CERT"], tls["RAY_TLS_SERVER_KEY"])
        context.set_alpn_protocols(["h2"])
        with socket.create_connection(("127.0.0.1", port)) as plain:
            shown = context.wrap_socket(plain, server_hostname="127.0.0.1").getpeercert()
        assert ("IP Address", "127.0.0.1") in shown["subjectAltName"]
        answers = {}
        for name, variables in {"with": tls, "without": {}}.items():
            variables = {
                "RAY_AUTH_MODE": "token",
                "RAY_gcs_server_port_wait_time_s": "1",
                "CFL_RAY_DEBUG": "",
            } | variables
            command = [sys.executable, "-m", "cfl_ray", "leave", str(tmp_path / "run"), "5"]
            done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=400)
            answers[name] = (done.returncode, done.stdout + done.stderr)
        assert answers["with"][0] == 0 and "client 5 leaves before round" in answers["with"][1], answers
        assert answers["without"][0] == 2 and "uses TLS, and this process does not" in answers["without"][1], answers


def test_every_file_that_starts_ray_enables_the_token():
    starting = [path for path in TEXTS if STARTS.search(path.read_text())]
    assert len(starting) > 3
    for path in starting:
        if path == ROOT / "cfl_ray/runtime/on_ray/connect.py":
            continue  # `launch` sets RAY_AUTH_MODE before it imports ray
        configured = [path, *(folder / "conftest.py" for folder in path.parents if (folder / "conftest.py").exists())]
        assert any("RAY_AUTH_MODE" in file.read_text() for file in configured), path


class Trap:
    """Unpickling this leaves a file behind."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (Path(self.file),)


def arrays(file: Path) -> Experiment:
    return Experiment(data={"source": "arrays", "root": str(file), "test": {"view": "holdout"}})


class TestNoPickleIsRead:
    def test_from_arrays(self, tmp_path):
        trap = np.array([Trap(tmp_path / "executed")] * 4, object)
        np.savez(tmp_path / "trap.npz", x=trap, y=np.zeros(4, int), clients=np.arange(4))
        with pytest.raises(DataError, match="cannot be read as an .npz file of plain arrays"):
            data.build(arrays(tmp_path / "trap.npz").data, 0, tmp_path)
        assert not (tmp_path / "executed").exists()

    def test_from_a_pickle_in_the_place_of_arrays(self, tmp_path):
        np.save(tmp_path / "trap.npy", np.array([Trap(tmp_path / "executed")], object))
        with pytest.raises(DataError):
            data.build(arrays(tmp_path / "trap.npy").data, 0, tmp_path)
        assert not (tmp_path / "executed").exists()

    def test_from_a_config(self, tmp_path):
        path = f"!!python/object/apply:pathlib.Path [{tmp_path / 'executed'}]"
        (tmp_path / "trap.yaml").write_text(f"name: !!python/object/apply:pathlib.Path.touch [{path}]\n")
        with pytest.raises(ConfigError, match="not valid YAML"):
            config.load(tmp_path / "trap.yaml")
        assert not (tmp_path / "executed").exists()

    def test_by_any_module_of_the_package(self):
        """That is: no torch.load, allow_pickle, yaml loader that creates objects, read_pickle, eval or exec."""
        forbidden = re.compile(
            r"torch\.load\(|allow_pickle=True|yaml\.(load|unsafe_load|full_load)\(|read_pickle|(?<![.\w])(eval|exec)\("
        )
        modules = [path for path in TEXTS if path.is_relative_to(ROOT / "cfl_ray") and path.suffix == ".py"]
        assert len(modules) > 50 and [path for path in modules if forbidden.search(path.read_text())] == []


class TestNamesFromDataAreNoPaths:
    def test_file_names_in_a_manifest(self, tmp_path):
        shards = data.build(config.load(None, ["data.partition.clients=4"]).data, 0, tmp_path).uri
        file = Path(shards) / "manifest.json"
        manifest = json.loads(file.read_text())
        for name in ("../../outside.arrow", "/etc/passwd", "a/b.arrow", "..", "train-00000.arrow\x00"):
            manifest["train"][0]["name"] = name
            file.write_text(json.dumps(manifest))
            with pytest.raises(DataError, match="manifest.json"):
                open_shards(shards)

    def test_the_name_of_an_experiment(self):
        for name in ("../evil", "/tmp/evil", "a/../../b", ".hidden", ""):
            with pytest.raises(ConfigError, match="name"):
                Experiment(name=name)


SECRET = "s3cretword"
TRACKING = f"http://user:{SECRET}@127.0.0.1:9"
SHARDS = f"s3://KEY:{SECRET}@bucket/shards?endpoint_override={SECRET}.example"


def tracked_run(folder: Path) -> list[str]:
    """Overrides of a short run that is delivered to an unreachable server by a URI with a password."""
    runtime = "runtime={engine: sequential, hosts: 1}"
    return ["rounds=1", "methods=[fedavg]", runtime, f"tracking.uri={TRACKING}", f"output={folder}"]


def holders(folder: Path) -> list[Path]:
    """Files that hold the secret, in their names or their content."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if SECRET in str(path) or SECRET.encode() in path.read_bytes()]


@pytest.fixture
def object_store(monkeypatch, tmp_path):
    """A folder in the place of an object store, which takes any URI."""
    store = tmp_path / "store"
    store.mkdir()
    monkeypatch.setattr(folder, "_open_uri", lambda uri: (fs.SubTreeFileSystem(str(store), fs.LocalFileSystem()), "x"))
    monkeypatch.setenv("CFL_RAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CFL_RAY_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CFL_RAY_DEBUG", raising=False)
    return store


@pytest.fixture
def cli(capfd):
    """Returns a function: runs a command, expects an exit status, and returns what it printed, without the secret."""

    def command(*arguments: object, status: int = 0) -> str:
        ended, *streams = call(capfd, *arguments)
        printed = "".join(streams)
        assert ended == status and printed, printed
        assert SECRET not in printed, arguments
        return printed

    return command


def test_credentials_are_neither_printed_nor_recorded(object_store, tmp_path, cli):
    """Those of shards, of newcomers that join, and of MLflow: by commands that succeed and by ones that fail."""
    rows = [f"{n % 7},{n % 5},{n % 2},{n % 4}" for n in range(80)]
    (tmp_path / "table.csv").write_text("\n".join(["a,b,y,c", *rows]))
    options = [
        *tracked_run(tmp_path / "out"),
        "data={source: csv, train_files: table.csv, root: '" + str(tmp_path) + "', columns: {label: y, client: c}}",
        "data.partition={kind: writer, clients: 4}",
        "data.test={view: holdout}",
        "schedule=[]",
        f"data.shards={SHARDS}",
    ]
    run_dir = tmp_path / "out/run"
    prepared = cli("prepare", *options)
    assert "Shards: s3://***@bucket/shards" in prepared
    (pasted,) = (line.removeprefix("Next: ") for line in prepared.splitlines() if line.startswith("Next: "))
    _, verb, *words = shlex.split(pasted)
    assert verb == "run" and config.load(None, words).data.shards == SHARDS, "the hidden parts are this user's"
    cli("check", *options)
    cli("check", "--yaml", *options)
    cli("run", "--in-process", "--run-dir", run_dir, *options)
    Journal(run_dir / "fedavg").add(JournalEvent(1, shards=JoinedShards(SHARDS, "0" * 64)))
    assert Journal(run_dir / "fedavg").events[0].shards.uri == SHARDS  # found again by this user
    cli("status", run_dir)
    cli("status", "--json", run_dir)
    cli("resume", run_dir)
    assert config.load(run_dir / "config.yaml").data.shards == SHARDS
    for file in object_store.rglob("manifest.json"):
        file.write_text("{}")
    assert "is damaged" in cli("prepare", *options, status=2)
    assert "rounds" in cli("run", "--in-process", *options, "rounds=0", status=2)
    assert holders(tmp_path / "out") == []
    assert holders(tmp_path) == [tmp_path / "home/credentials.json"]
    assert (tmp_path / "home/credentials.json").stat().st_mode & 0o777 == 0o600


def test_credentials_that_are_not_known_are_asked_for(object_store, tmp_path):
    experiment = config.load(None, [f"data.shards={SHARDS}", f"tracking.uri={TRACKING}"])
    (tmp_path / "config.yaml").write_text(experiment.to_record())  # of another user: nothing is kept here
    loaded = config.load(tmp_path / "config.yaml")
    assert loaded.config_hash == experiment.config_hash and SECRET not in loaded.to_yaml()
    with pytest.raises(DataError, match=r"the credentials of s3://\*\*\*@bucket/shards.* are not known here"):
        open_shards(loaded.data.shards)


def test_no_user_error_has_credentials():
    for error in (ConfigError, DataError, RunError):
        assert str(error(f"{SHARDS} cannot be read")) == "s3://***@bucket/shards?endpoint_override=*** cannot be read"
        assert str(error(f"{SHARDS} cannot be read; {TRACKING}/x is refused")) == "s3://***@127.0.0.1:9/x is refused"


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_what_a_run_writes_about_itself_is_for_its_user_alone(tmp_path, umask):
    """Whatever the umask, which holds for what is made to be shared: exported models, shards, the folder of runs."""
    before = os.umask(umask)
    try:
        trackers = ["mlflow", "csv", "tensorboard"]
        experiment = Experiment(
            rounds=2,
            methods=["ifca"],
            output=str(tmp_path / "out"),
            data={"source": "synthetic", "synthetic_shape": [8], "partition": {"clients": 6}},
            runtime={"engine": "manual", "checkpoint_every": 1},
            tracking={"trackers": trackers},
        )
        run_dir = tmp_path / "out/run"
        simulate(experiment, run_dir)
        Journal(run_dir / "ifca").add(JournalEvent(2, leave=(1,)))
        publish_server(run_dir, ServerAddress.here("127.0.0.1:1", "server"))
        assert status_of("export", run_dir, "--cluster", 0, "-o", tmp_path / "model.pt") == 0
    finally:
        os.umask(before)
    modes = {path: path.lstat().st_mode & 0o777 for path in [run_dir, *run_dir.rglob("*")]}
    files, folders = ({path: mode for path, mode in modes.items() if path.is_file() == kind} for kind in (True, False))
    names = {path.name for path in files}
    assert {
        "config.yaml",
        "run.json",
        "end.json",
        "metrics.jsonl",
        "reassignments.arrow",
        "client_metrics.arrow",
    } <= names
    assert {"events.jsonl", "mlflow.json", "metrics.csv", "session.json", "assignments.parquet"} <= names
    assert {path: oct(mode) for path, mode in files.items() if mode != 0o600} == {}
    assert {path: oct(mode) for path, mode in folders.items() if mode != 0o700} == {}
    assert (tmp_path / "out/mlflow.db").stat().st_mode & 0o777 == 0o600
    for shared, most in ((tmp_path / "model.pt", 0o666), (tmp_path / "out", 0o777)):
        assert shared.stat().st_mode & 0o777 == most & ~(umask), shared


@pytest.mark.slow
def test_a_resumed_run_prints_and_records_no_credentials(tmp_path):
    run_dir = tmp_path / "run"
    assert status_of("run", "--in-process", "--run-dir", run_dir, *tracked_run(tmp_path / "out")) == 0
    environment = os.environ | {"CFL_RAY_DEBUG": "", "RAY_AUTH_MODE": "token"}
    command = [sys.executable, "-m", "cfl_ray", "resume", str(run_dir)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0 and "results after the last round" in done.stdout, done.stdout + done.stderr
    assert SECRET not in done.stdout + done.stderr and holders(run_dir) == []
