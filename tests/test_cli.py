"""Bad input: one clear message that names the thing, the limit and what to do; exit status 2; no traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

from cfl_ray.cli import main


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS", "CFL_RAY_DATA"):
        monkeypatch.delenv(name, raising=False)


def call(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    said = capsys.readouterr()
    return ended.value.code or 0, said.out, said.err


BAD = {
    "unknown key": (["local.epoch=3"], "unknown key 'local.epoch' (did you mean 'epochs'?)"),
    "unknown section": (["locale.epochs=3"], "did you mean 'local'?"),
    "unknown method": (["methods=[stofcl]"], "unknown method 'stofcl' (did you mean 'stocfl'?)"),
    "unknown option": (["methods=[{stocfl: {taw: 0.5}}]"], "stocfl has no option 'taw' (did you mean 'tau'?)"),
    "option out of range": (["methods=[{stocfl: {tau: 2}}]"], "stocfl.tau must be in -1 .. 1, got 2"),
    "option no number": (["methods=[{ifca: {num_clusters: many}}]"], "ifca.num_clusters must be in 1 .. inf, got 'many'"),
    "method twice": (["methods=[ifca, ifca]"], "'ifca' is listed twice"),
    "unknown model": (["model.name=lenet"], "unknown model 'lenet' (did you mean 'lenet5'?)"),
    "unknown model option": (["model.options={hiden: 3}"], "hiden"),
    "model that does not fit": (["model.name=lenet5", "model.options={}"], "samples of shape (1, 8, 8)"),
    "unknown data set": (["data.source=fmnist"], "unknown data set 'fmnist'"),
    "out of range": (["cohort.fraction=1.5"], "cohort.fraction: Input should be less than or equal to 1, got 1.5"),
    "more clients than there are": (["cohort.clients=41"], "41 clients per round, but the federation has 40"),
    "client left empty": (["data.partition.clients=8000"], "data.partition.clients"),
    "absent data": (["data.source=mnist"], "data.download"),
    "schedule names nobody": (["schedule=[{round: 2, leave: [99]}]"], "client 99 does not exist; the federation has clients 0 .. 39"),
    "no such file": (["nowhere.yaml"], "there is no config file nowhere.yaml"),
    "override without value": (["rounds=3", "lr"], "must look like section.key=value"),
    "plugin absent": (["methods=[mine.py:Mine]"], "there is no file"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_clearly(case, capsys):
    arguments, expected = BAD[case]
    status, _, said = call(capsys, "run", *arguments)
    assert status == 2
    assert expected in said
    assert "Traceback" not in said
    assert not list(Path("runs").glob("*/config.yaml")) if Path("runs").exists() else True


def test_no_cluster_at_the_address(tmp_path):
    """In a process of its own: this one may have joined a cluster already."""
    command = [Path(sys.executable).with_name("cfl-ray"), "run", "runtime.address=127.0.0.1:1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "no Ray cluster at 127.0.0.1:1" in done.stderr and "ray start --head" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("runs/*/config.yaml"))


def test_model_with_the_wrong_number_of_outputs(capsys):
    Path("net.py").write_text("from torch import nn\ndef Net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7))\n")
    status, _, said = call(capsys, "run", "model={name: 'net.py:Net'}")
    assert status == 2 and "10 classes" in said and "7" in said


def test_broken_yaml_is_named(capsys):
    Path("broken.yaml").write_text("rounds: [1,\n")
    status, _, said = call(capsys, "check", "broken.yaml")
    assert status == 2 and "broken.yaml is not valid YAML" in said


def test_a_run_directory_of_another_config_is_refused_and_left_alone(capsys):
    quick = ["--in-process", "--run-dir", "here", "methods=[fedavg]", "rounds=1", "tracking.enabled=false"]
    assert call(capsys, "run", *quick)[0] == 0
    before = {path: path.read_bytes() for path in Path("here").rglob("*") if path.is_file()}
    status, _, said = call(capsys, "run", *quick, "seed=1")
    assert status == 2 and "belongs to another config" in said
    status, _, said = call(capsys, "run", *quick)
    assert status == 2 and "cfl-ray resume" in said
    assert before == {path: path.read_bytes() for path in Path("here").rglob("*") if path.is_file()}
    assert call(capsys, "resume", "nowhere")[0] == 2


def test_a_damaged_shard_is_named_and_can_be_made_again(capsys):
    quick = ["--in-process", "methods=[fedavg]", "rounds=1", "tracking.enabled=false"]
    assert call(capsys, "prepare")[0] == 0
    shard = max(Path("runs/shards").rglob("*.arrow"), key=lambda file: file.stat().st_size)
    whole = bytearray(shard.read_bytes())
    whole[len(whole) // 2] ^= 1
    shard.write_bytes(whole)
    status, _, said = call(capsys, "run", *quick)
    assert status == 2 and shard.name in said and "sha256" in said
    shard.write_bytes(whole[:-100])
    status, _, said = call(capsys, "run", *quick)
    assert status == 2 and shard.name in said
    shard.unlink()
    assert call(capsys, "run", *quick)[0] == 2


def test_check_runs_nothing_and_its_config_runs(capsys):
    status, said, _ = call(capsys, "check", "rounds=1", "methods=[fedavg]")
    assert status == 0 and "40 clients" in said and "15,010" not in said and "Run it with" in said
    assert not Path("runs").exists()
    resolved = said[: said.index("federation:")]
    Path("resolved.yaml").write_text(resolved)
    assert call(capsys, "run", "--in-process", "resolved.yaml")[0] == 0


def test_check_says_what_waits_to_be_averaged(capsys):
    """Of 19 clients a model of 187,510 parameters each."""
    said = call(capsys, "check", "methods=[ditto, {fedavg: {aggregation: median}}, fesem]", "model={name: mlp, options: {hidden: 2500}}")[1]
    assert "stay in the object store until it is known how to average them: fedavg 14.3 MB, fesem 14.3 MB" in said


def test_methods_lists_and_explains(capsys):
    from cfl_ray.methods import REGISTRY

    status, said, _ = call(capsys, "methods")
    assert status == 0 and all(name in said for name in REGISTRY)
    for name in REGISTRY:
        status, said, _ = call(capsys, "methods", name)
        assert status == 0 and "Departures" in said
        assert all(item["name"] in said for item in REGISTRY[name].options())
    assert call(capsys, "methods", "stokfl")[0] == 2


def test_prepare_writes_once(capsys):
    assert call(capsys, "prepare")[0] == 0
    (manifest,) = Path("runs/shards").rglob("manifest.json")
    written = manifest.stat().st_mtime_ns
    status, said, _ = call(capsys, "prepare")
    assert status == 0 and "40 clients" in said and manifest.stat().st_mtime_ns == written
