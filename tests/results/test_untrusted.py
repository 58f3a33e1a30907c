"""A record that names anything outside its directory, by any key of the config, touches nothing there without trust."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cfl_ray import simulate

HERE = Path(__file__).parent


@pytest.mark.slow
def test_no_key_of_a_record_leads_outside_without_trust(experiment, tmp_path, monkeypatch):
    """The keys come from the schema, so that new ones are covered."""
    monkeypatch.setenv("CFL_RAY_HOME", str(tmp_path / "home"))
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("data", "bare", "code.py", "outside_module.py"):
        (outside / name).write_text("def Name(*a, **b): pass\n")
    run = tmp_path / "run"
    simulate(experiment(rounds=1, methods=["fedavg"]), run)
    for end in run.rglob("end.json"):
        end.unlink()
    command = [sys.executable, HERE / "audited_resume.py", run, outside]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["touched"] == []
    assert any("code.py" in what for what in found["trusted"]), "the hook sees nothing"
    refused = {name.partition(":")[0] for name in found["refused"]}
    assert {"data.root", "data.shards", "output", "tracking.uri", "runtime.address", "model.name", "methods"} <= refused
    assert len(found["refused"]) > len(found["resumed"])
