"""The conditions of bitwise equal figures are recorded: a resumed run keeps the engine and warns about the others."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from small_runs import simulate_until

from cfl_ray import load_run, resume, simulate
from cfl_ray.engine.choice import EngineChoice
from cfl_ray.engine.engines import ENGINES
from cfl_ray.lifecycle.driver import Watcher
from cfl_ray.results.environment import Environment
from cfl_ray.run_directory import RunDirectory
from cfl_ray.system import cpu
from cfl_ray.tracking import RoundRecord

BY_RULE = "cfl_ray.setup.engine_choice.choice_of"
ENVIRONMENT = RunDirectory.environment.name


@pytest.fixture
def interrupted(experiment, tmp_path, monkeypatch):
    """The directory of a run that was interrupted after round 2, whose engine by the rule was `manual`."""
    monkeypatch.setattr(BY_RULE, lambda *_: EngineChoice("manual", "manual: by the rule"))
    simulate_until(2, experiment(runtime={"engine": "auto"}), tmp_path / "run")
    return tmp_path / "run"


def test_a_resumed_run_keeps_its_engine_whatever_the_rule_says_now(
    experiment, interrupted, figures, notes, monkeypatch
):
    monkeypatch.setattr(BY_RULE, lambda *_: EngineChoice("sequential", "sequential: by another rule"))
    watcher = notes()
    found = figures(resume(interrupted, watcher, on_ray=False))
    assert watcher.run_info["engine"] == "manual: as at the start of the run" and watcher.warnings == []
    assert found == figures(simulate(experiment(runtime={"engine": "manual"})))


def test_what_has_changed_is_said_with_both_values(interrupted, notes):
    file = interrupted / ENVIRONMENT
    kept = json.loads(file.read_text())
    assert kept == {  # no fallbacks: the engine trained all clients
        "engine": "manual",
        "device": "cpu",
        "instructions": cpu.instruction_set(),
        "torch": torch.__version__,
        "one_by_one": False,
        "has_deadline": False,
        "engine_reason": "manual: by the rule",
        "data": kept["data"],
        "code": {},
    }
    before = kept | {"torch": "1.0", "instructions": "VSX", "device": "cuda, a GPU", "has_deadline": True}
    file.write_text(json.dumps(before))
    watcher = notes()
    resume(interrupted, watcher, on_ray=False)
    begins = [line.partition(":")[0] for line in watcher.warnings]
    assert begins == [
        "this run began with device cuda, a GPU and continues with cpu",
        f"this run began with CPU instruction set VSX and continues with {cpu.instruction_set()}",
        f"this run began with PyTorch 1.0 and continues with {torch.__version__}",
        "this run began with time limit (runtime.round_deadline) on and continues with off",
    ]
    assert json.loads(file.read_text()) == before  # of the beginning, also for the next resume


@pytest.mark.parametrize("content", [None, "{", "[]", '{"engine": "manual"}'])
def test_a_run_without_them_begins_a_record(interrupted, notes, content):
    """Runs of earlier versions, and files that were damaged."""
    file = interrupted / ENVIRONMENT
    file.unlink() if content is None else file.write_text(content)
    watcher = notes()
    resume(interrupted, watcher, on_ray=False)
    assert watcher.warnings == [] and Environment(**json.loads(file.read_text())).engine == "manual"


def test_run_info_names_cpu_and_pytorch(experiment, notes):
    watcher = notes()
    simulate(experiment(rounds=1), None, watcher)
    assert watcher.run_info["cpu"] == f"{cpu.model()}, {cpu.instruction_set()}"
    assert watcher.run_info["torch"] == torch.__version__


def test_a_run_that_has_moved_goes_on_with_its_shards(experiment, tmp_path, figures, notes):
    """As on another machine, which has a copy of the output folder in another place."""
    old, new = tmp_path / "old", tmp_path / "new"
    few = {"data": {"source": "digits"}, "local": {"epochs": 1}, "cohort": {"fraction": 0.25}}
    digits = experiment(**few, tracking={"enabled": True})
    made = digits.model_copy(update={"output": str(old)})
    simulate_until(2, made, old / "run")
    cut = [path.name for path in (old / "shards").iterdir()]
    shutil.move(old, new)
    watcher = notes()
    found = figures(resume(new / "run", watcher, on_ray=False))
    assert found == figures(simulate(experiment(**few)))
    assert any(line.startswith(f"{old} of this run is not here; {new} takes its place") for line in watcher.warnings)
    # MLflow's store has the absolute folder of its artifacts, which is made anew
    assert not (old / "shards").exists() and [path.name for path in (new / "shards").iterdir()] == cut
    assert (new / "mlflow.db").exists() and load_run(new / "run")["ditto"].final


def test_an_output_that_is_nowhere_is_said(experiment, tmp_path, notes):
    made = experiment().model_copy(update={"output": str(tmp_path / "out")})  # synthetic data have no shards
    simulate_until(2, made, tmp_path / "run")
    watcher = notes()
    resume(tmp_path / "run", watcher, on_ray=False)
    assert any(
        line.startswith(f"{tmp_path}/out, the output folder of this run, is not here") for line in watcher.warnings
    )


def test_clients_that_the_chosen_engine_did_not_train_are_recorded_with_the_reason(
    experiment, notes, tmp_path, monkeypatch
):
    manual = ENGINES["manual"]
    refuses = replace(manual, why_not=lambda network, tasks: "an odd client" if tasks and tasks[0].client % 2 else None)
    monkeypatch.setitem(ENGINES, "manual", refuses)
    run_dir, made = tmp_path / "run", experiment(runtime={"engine": "manual"}, methods=["fedavg", "ditto"])
    simulate_until(2, made, run_dir)
    fallback = ["manual gives way to sequential for some or all clients: an odd client"]
    assert json.loads((run_dir / ENVIRONMENT).read_text())["fallbacks"] == {"fedavg": fallback}
    watcher = notes()
    resume(run_dir, watcher, on_ray=False)
    kept = json.loads((run_dir / ENVIRONMENT).read_text())
    assert kept["engine"] == "manual" and kept["fallbacks"] == {"fedavg": fallback, "ditto": fallback}
    assert watcher.warnings == []


def test_the_default_watcher_tells_the_reasons_of_a_round(caplog):
    Watcher().round("fedavg", RoundRecord(1, {}, fallbacks=("manual gives way",)))
    assert [record.getMessage() for record in caplog.records] == ["fedavg: manual gives way"]


@pytest.mark.slow
def test_simulate_tells_once_per_method_that_the_configured_engine_trained_none(experiment, caplog):
    """On a CPU, 4 clients are 4 chunks: the vectorised engine is left without a vmap batch."""
    few = {"data": {"partition": {"clients": 5}}, "cohort": {"fraction": 0.8}}
    made = experiment(runtime={"engine": "vectorised", "device": "cpu"}, rounds=2, methods=["fedavg"], **few)
    simulate(made)
    told = [text for record in caplog.records if "gives way to" in (text := record.getMessage())]
    assert len(told) == 1
    assert told[0].startswith("fedavg: vectorised gives way to sequential for some or all clients: clients of a chunk")
