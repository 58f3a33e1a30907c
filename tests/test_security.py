"""Who may connect, what is listened on, and what is never read, followed or shown."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from cfl_ray import Experiment, config, data
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


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A `cfl-ray run` at work on a cluster of its own: its processes, and the address of the cluster."""
    folder = tmp_path_factory.mktemp("live")
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_MODE", "MLFLOW_TRACKING_URI")}
    log = folder / "log"
    command = [sys.executable, "-m", "cfl_ray.cli", "run", "rounds=100000", "methods=[fedavg]", "tracking.enabled=false", f"output={folder}"]
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + 200
        while "fedavg round" not in log.read_text():  # somebody joined in round 8
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def listening(processes):
    return [(process, one.laddr) for process in processes for one in process.net_connections(kind="inet") if one.status == psutil.CONN_LISTEN]


def test_a_run_of_its_own_listens_on_loopback_alone(live):
    found = listening(live)
    assert len(found) > 3
    assert [(process.name(), address) for process, address in found if address.ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1")] == []


def test_a_run_of_its_own_takes_nobody_without_the_token(live):
    (port,) = {address.port for process, address in listening(live) if process.name() == "gcs_server"}
    script = (
        "import ray; from ray._private import ray_constants; ray_constants.ENABLE_RAY_CLUSTER = False\n"  # else Ray asks the machine's other address
        f"ray.init(address='127.0.0.1:{port}', log_to_driver=False); print('let in')"
    )
    found = []
    for token in ({"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
        environment = os.environ | token | {"RAY_gcs_server_port_wait_time_s": "1"}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=200)
        found.append(("let in" in done.stdout, bool(re.search("(?i)authenticat|token", done.stderr))))
    assert found == [(True, False), (False, True), (False, True)]


@pytest.mark.parametrize("path", [path for path in TEXTS if STARTS.search(path.read_text())], ids=lambda path: str(path.relative_to(ROOT)))
def test_whatever_starts_a_ray_has_the_token_on(path):
    texts = [path.read_text(), *(folder.joinpath("conftest.py").read_text() for folder in path.parents if folder.joinpath("conftest.py").exists())]
    assert any("RAY_AUTH_MODE" in text for text in texts) or path == ROOT / "cfl_ray/runtime/cluster.py"  # whose callers set it: see `launch`


class Trap:
    """Unpickling this leaves a file behind."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (Path(self.file),)


class TestNoPickleIsRead:
    def test_from_arrays(self, tmp_path):
        trap = np.array([Trap(tmp_path / "executed")] * 4, object)
        np.savez(tmp_path / "trap.npz", x=trap, y=np.zeros(4, int), clients=np.arange(4))
        with pytest.raises(DataError, match="cannot be read as an .npz file of plain arrays"):
            data.build(Experiment(data={"source": "arrays", "root": str(tmp_path / "trap.npz"), "test": {"view": "holdout"}}).data, 0, tmp_path)
        assert not (tmp_path / "executed").exists()

    def test_from_a_bare_pickle_in_the_place_of_arrays(self, tmp_path):
        np.save(tmp_path / "trap.npy", np.array([Trap(tmp_path / "executed")], object))
        with pytest.raises(DataError):
            data.build(Experiment(data={"source": "arrays", "root": str(tmp_path / "trap.npy"), "test": {"view": "holdout"}}).data, 0, tmp_path)
        assert not (tmp_path / "executed").exists()

    def test_from_a_config(self, tmp_path):
        (tmp_path / "trap.yaml").write_text(f"name: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [{tmp_path / 'executed'}]]\n")
        with pytest.raises(ConfigError, match="not valid YAML"):
            config.load(tmp_path / "trap.yaml")
        assert not (tmp_path / "executed").exists()

    def test_by_any_module_of_the_package(self):
        """What could read one: torch.load, numpy's allow_pickle, yaml's loaders that make objects, pandas."""
        forbidden = re.compile(r"torch\.load\(|allow_pickle=True|yaml\.(load|unsafe_load|full_load)\(|read_pickle|(?<![.\w])(eval|exec)\(")
        assert [path for path in TEXTS if path.is_relative_to(ROOT / "cfl_ray") and path.suffix == ".py" and forbidden.search(path.read_text())] == []


class TestNamesFromDataAreNoPaths:
    @pytest.mark.parametrize("name", ["../../outside.arrow", "/etc/passwd", "a/b.arrow", "..", "train-00000.arrow\x00"])
    def test_file_names_in_a_manifest(self, name, tmp_path):
        shards = data.build(config.load(None, ["data.partition.clients=4"]).data, 0, tmp_path).uri
        manifest = json.loads((Path(shards) / "manifest.json").read_text())
        manifest["train"][0]["name"] = name
        (Path(shards) / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(DataError, match="manifest.json"):
            open_shards(shards)

    @pytest.mark.parametrize("name", ["../evil", "/tmp/evil", "a/../../b", ".hidden", ""])
    def test_the_name_of_an_experiment(self, name):
        with pytest.raises(ConfigError, match="name"):
            Experiment(name=name)


def test_a_credential_of_the_tracking_uri_is_never_printed(tmp_path):
    """By no command, whether it works or fails; the run's own files, which need it to deliver, are the owner's alone."""
    uri = "http://somebody:s3cretword@127.0.0.1:9"
    environment = os.environ | {"CFL_RAY_DEBUG": "", "RAY_AUTH_MODE": "token"}
    small = ["rounds=1", "methods=[fedavg]", f"tracking.uri={uri}", f"output={tmp_path}"]
    for command in (["check", *small], ["run", "--in-process", "--run-dir", str(tmp_path / "run"), *small], ["resume", str(tmp_path / "run")], ["run", "--in-process", "rounds=0", *small[1:]]):
        done = subprocess.run([sys.executable, "-m", "cfl_ray.cli", *command], env=environment, capture_output=True, text=True, timeout=200)
        assert "s3cretword" not in done.stdout + done.stderr, command
    holders = [path for path in tmp_path.rglob("*") if path.is_file() and b"s3cretword" in path.read_bytes()]
    assert [path for path in holders if path.stat().st_mode & 0o077] == []
