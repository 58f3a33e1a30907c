"""Authentication, open ports, and untrusted input: pickles, paths in data and credentials."""

import contextlib
import json
import os
import re
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

from cfl_ray import Experiment, config, data
from cfl_ray.cli import main
from cfl_ray.core.errors import ConfigError, DataError
from cfl_ray.data import open_shards

ROOT = Path(__file__).parents[1]
TEXTS = [
    path
    for folder in ("cfl_ray", "jobs", "cluster_configs", "docs", "tests")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in {".py", ".yaml", ".md", ".sh"} and "__pycache__" not in path.parts
] + [ROOT / "README.md"]

STARTS = re.compile(r"""^[^#\n]*(?<![`"])\bray start --|\bray\.init\(|\bCluster\(""", re.M)


@contextlib.contextmanager
def live_run(folder: Path, **variables: str) -> Iterator[list[psutil.Process]]:
    """The processes of a live `cfl-ray run` on a cluster of its own, in the folder `run`, with these variables."""
    excluded = ("RAY_ADDRESS", "RAY_AUTH_MODE", "MLFLOW_TRACKING_URI")
    environment = {name: value for name, value in os.environ.items() if name not in excluded} | variables
    log = folder / "log"
    options = ["rounds=100000", "methods=[fedavg]", "tracking.enabled=false", f"output={folder}"]
    command = [sys.executable, "-m", "cfl_ray", "run", "--run-dir", str(folder / "run"), *options]
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + 400
        while "fedavg round" not in log.read_text():  # a note about clients that join before round 8
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(120)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """The processes of a live run."""
    with live_run(tmp_path_factory.mktemp("live")) as processes:
        yield processes


def listening(processes):
    """Pairs of process and address for every port that is open."""
    return [
        (process, connection.laddr)
        for process in processes
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]


@pytest.mark.slow
def test_a_cluster_of_its_own_listens_on_loopback_only(live):
    found = listening(live)
    assert len(found) > 3
    loopback = ("127.0.0.1", "::1", "::ffff:127.0.0.1", "::ffff:::1")
    assert [(process.name(), address) for process, address in found if address.ip not in loopback] == []


@pytest.mark.slow
def test_a_cluster_of_its_own_requires_the_token(live):
    (port,) = {address.port for process, address in listening(live) if process.name() == "gcs_server"}
    script = (
        # Without ENABLE_RAY_CLUSTER = False, Ray connects to another address of the machine.
        "import ray; from ray._private import ray_constants; ray_constants.ENABLE_RAY_CLUSTER = False\n"
        f"ray.init(address='127.0.0.1:{port}', log_to_driver=False); print('connected')"
    )
    found = []
    for token in (
        {"RAY_AUTH_MODE": "token"},
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64},
    ):
        environment = os.environ | token | {"RAY_gcs_server_port_wait_time_s": "1"}
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
        found.append(("connected" in done.stdout, bool(re.search("(?i)authenticat|token", done.stderr))))
    assert found == [(True, False), (False, True), (False, True)]


def certificates(folder: Path) -> dict[str, str]:
    """Ray's variables for TLS, with certificates for 127.0.0.1 that an authority made for this test has signed."""
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    for command in (
        "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.crt -days 2 -subj /CN=authority",
        "req -newkey rsa:2048 -nodes -keyout tls.key -out tls.csr -subj /CN=node",
        "x509 -req -in tls.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out tls.crt -days 2 -extfile names",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    names = {"SERVER_CERT": "tls.crt", "SERVER_KEY": "tls.key", "CA_CERT": "ca.crt"}
    return {"RAY_USE_TLS": "1"} | {f"RAY_TLS_{name}": str(folder / file) for name, file in names.items()}


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
            variables = {"RAY_AUTH_MODE": "token", "RAY_gcs_server_port_wait_time_s": "1", "CFL_RAY_DEBUG": ""} | variables
            command = [sys.executable, "-m", "cfl_ray", "leave", str(tmp_path / "run"), "5"]
            done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=400)
            answers[name] = (done.returncode, done.stdout + done.stderr)
        assert answers["with"][0] == 0 and "client 5 leaves before round" in answers["with"][1], answers
        assert answers["without"][0] == 1 and "cannot be reached" in answers["without"][1], answers


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


def tracked_run(folder: Path) -> list[str]:
    """Overrides of a short run that is delivered to an unreachable server by a URI with a password."""
    uri = f"http://user:{SECRET}@127.0.0.1:9"
    runtime = "runtime={engine: sequential, hosts: 1}"
    return ["rounds=1", "methods=[fedavg]", runtime, f"tracking.uri={uri}", f"output={folder}"]


def readable_by_others(folder: Path) -> list[Path]:
    """Files that hold the secret and that other users may read."""
    holders = [path for path in folder.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert holders, "the config of the run needs the password to deliver"
    return [path for path in holders if path.stat().st_mode & 0o077]


def test_the_password_of_the_tracking_uri_is_not_printed(tmp_path, monkeypatch, capfd):
    """Neither by commands that succeed nor by one that fails."""
    monkeypatch.delenv("CFL_RAY_DEBUG", raising=False)
    options = tracked_run(tmp_path)
    commands = {
        ("check", *options): 0,
        ("run", "--in-process", "--run-dir", str(tmp_path / "run"), *options): 0,
        ("run", "--in-process", *options, "rounds=0"): 2,
    }
    for command, status in commands.items():
        with pytest.raises(SystemExit) as ended:
            main(list(command))
        printed = "".join(capfd.readouterr())
        assert (ended.value.code or 0) == status, printed
        assert printed and SECRET not in printed, command
    assert readable_by_others(tmp_path) == []


@pytest.mark.slow
def test_a_resumed_run_does_not_print_the_password_of_the_tracking_uri(tmp_path):
    run_dir = str(tmp_path / "run")
    with pytest.raises(SystemExit):
        main(["run", "--in-process", "--run-dir", run_dir, *tracked_run(tmp_path)])
    environment = os.environ | {"CFL_RAY_DEBUG": "", "RAY_AUTH_MODE": "token"}
    command = [sys.executable, "-m", "cfl_ray", "resume", run_dir]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0 and "results after the last round" in done.stdout, done.stdout + done.stderr
    assert SECRET not in done.stdout + done.stderr
    assert readable_by_others(tmp_path) == []
