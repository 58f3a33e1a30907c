"""Damaged and hostile files: every reader gives a message that a user can act on; nothing is run, and nothing written.

A mutant that a reader accepts is fine. Mutants are drawn from a seed that the failure names.
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from mutants import other_bytes, other_json, other_json_lines, other_value, put_something_else

from cfl_ray import Experiment, compare_runs, config, data, load_run, resume, simulate
from cfl_ray.checkpoint.lease import Lease
from cfl_ray.checkpoint.manifest import _digest
from cfl_ray.checkpoint.store import CheckpointStore
from cfl_ray.cli import live_client
from cfl_ray.core.reassigned import Reassigned
from cfl_ray.data import open_shards
from cfl_ray.errors import UserError
from cfl_ray.results import trust
from cfl_ray.results.arrow_log import ClientMetrics, Reassignments
from cfl_ray.results.reporting import report_page
from cfl_ray.results.run_record import recorded_hash
from cfl_ray.run_directory import RunDirectory, session_file
from cfl_ray.run_directory.session_file import ServerAddress, publish_server
from cfl_ray.runtime.journal import Journal, JournalEvent
from cfl_ray.security import credentials
from cfl_ray.tracking import Mlflow, RunLog, delivery, mlflow_tracker, read_end, read_info, read_records
from cfl_ray.tracking.trackers import CsvFile

CONFIG = RunDirectory.config.name

Mutate = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True)
class Target:
    """A kind of file: which one is changed, how, and what then reads it."""

    file: str
    mutate: Mutate
    read: Callable[[Path], object]  # of the folder of all files
    mutants: int  # a quarter of them in the normal suite; the others, and as many again, in the slow one
    writes: bool = False  # whether reading goes on with writing


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """A finished run in the folder `run`, shards in `shards`, and a mark that files leave that are imported."""
    folder = tmp_path_factory.mktemp("pristine")
    experiment = Experiment(
        rounds=2,
        methods=["ifca", "ditto"],
        model={"options": {"hidden": 4}},
        output=str(folder),
        data={"source": "synthetic", "synthetic_shape": [8], "synthetic_samples": 6, "partition": {"clients": 6}},
        local={"batch_size": 8},
        runtime={"engine": "manual", "checkpoint_every": 1},
        tracking={"trackers": ["csv"]},
    )
    simulate(experiment, folder / "run")
    for method in ("ifca", "ditto"):
        Journal(folder / "run" / method).add(JournalEvent(2, leave=(3,)), JournalEvent(2, join=(3,)))
        Mlflow("http://127.0.0.1:9", "fuzz", folder / "run").set_destination(folder / "run" / method)
    Mlflow("http://127.0.0.1:9", "fuzz").set_destination(folder / "run")
    publish_server(folder / "run", ServerAddress.here("127.0.0.1:9", "server"))
    digits = config.load(None, ["data.partition.clients=4", "data.test.view=label"]).data
    shutil.move(data.build(digits, 0, folder / "made").uri, folder / "shards")
    shutil.rmtree(folder / "made")
    (folder / "evil.py").write_text(f"open({str(folder / 'was_imported')!r}, 'w')\n")
    (folder / "mine.yaml").write_text(experiment.to_yaml())
    (folder / "home").mkdir()
    (folder / "home/credentials.json").write_text(json.dumps({"http://***@host": "http://new:word@host"}))
    return folder


def _read_config(folder: Path) -> None:
    experiment = config.load(folder / "mine.yaml")
    experiment.to_record(), experiment.config_hash
    with suppress(UserError):
        trust.check_config(None, experiment)


def _other_yaml(content: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.4:
        return other_bytes(content, draw)
    values = other_value(yaml.safe_load(content), draw)
    text = yaml.safe_dump(values)
    if draw.random() < 0.2:
        word = draw.choice(text.split())
        tag = draw.choice(("!!python/object/apply:os.abort []", "!!python/name:os.abort", "&a [*a]", "!x y", "*a"))
        text = text.replace(word, tag, 1)
    return text.encode()


def _read_record(folder: Path) -> None:
    run_dir = folder / "run"
    live_client.status(run_dir)
    trust.load_record(run_dir)
    recorded_hash(RunDirectory(run_dir))


def _other_record(content: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.5:
        return _other_yaml(content, draw)
    lines = content.splitlines(keepends=True)
    if draw.random() < 0.5:  # a record that names code
        word = draw.choice([word for word in content.split() if word.isalpha()])
        return content.replace(word, b"evil.py:Name", 1)
    return b"# paths as written " + draw.choice((b"[", b"{}", b"[1]", b"3", b'[["a"]]')) + b"\n" + b"".join(lines)


def _read_shards(folder: Path) -> None:
    federation = open_shards(folder / "shards")
    for client in range(min(federation.num_clients, 4)):
        federation.client_name(client)
        federation.train(client)
        federation.test(client)
    federation.group_transform(0)
    assert federation.digest and federation.tested_on


def _resigned(content: bytes, draw: random.Random) -> bytes:
    """A mutant of a checkpoint's manifest with the checksum of its content, as a forger would write it."""
    if draw.random() < 0.3:
        return other_json(content, draw)
    values = other_value({key: value for key, value in json.loads(content).items() if key != "sha256"}, draw)
    if not isinstance(values, dict):
        return json.dumps(values).encode()
    return json.dumps(values | {"sha256": _digest(values)}).encode()


def _read_checkpoints(folder: Path) -> None:
    store = CheckpointStore(folder / "run/ditto", recorded_hash(RunDirectory(folder / "run")))
    checkpoint = store.load()
    for _, state in checkpoint.client_states() if checkpoint is not None else ():
        state.tensor()


def _read_trained(folder: Path) -> None:
    trained = load_run(folder / "run")["ditto"].trained
    trained.state_dict(0)
    trained.assignments()


def _read_results(folder: Path) -> None:
    results = load_run(folder / "run")
    results.to_frame()
    results["ditto"].client_metrics()
    live_client.status(folder / "run")


def _read_report(folder: Path) -> None:
    report_page([folder / "run"])


def _append_to_records(folder: Path) -> None:
    """As a driver does that goes on: torn ends are cut off."""
    for method in ("ifca", "ditto"):
        reassignments = Reassignments(folder / "run" / method)
        assert reassignments.rounds_with_changes is not None
        reassignments.add(9, Reassigned.of([(0, 1)]))
        reassignments.write(folder / "assignments.parquet", SimpleNamespace(num_clients=6, group_N=None))
    ClientMetrics(folder / "run/ditto")
    RunLog(folder / "run/ditto").start(read_info(folder / "run/ditto"))


def _resume(folder: Path) -> None:
    for end in (folder / "run").rglob("end.json"):
        end.unlink()
    resume(folder / "run", on_ray=False)


def _find_credentials(folder: Path) -> None:
    credentials.with_credentials("http://***@host")
    credentials.remember_credentials(["http://new:word@host"])
    assert credentials.with_credentials("http://***@host") in (None, "http://new:word@host")


def _read_session(folder: Path) -> None:
    session_file.read_server_address(folder / "run")
    with RunDirectory(folder / "run").hold(), pytest.raises(UserError):
        live_client.ask(folder / "run", "stop")


def _deliver(folder: Path) -> None:
    warnings: list[str] = []
    assert mlflow_tracker.deliver_pending(folder, "http://127.0.0.1:9", warn=warnings.append) == {}
    assert all(warnings)
    delivery.waiting_rounds(folder / "run/ditto", "mlflow")


def _read_csv(folder: Path) -> None:
    CsvFile().open(folder / "run/ditto", read_info(folder / "run"), 0)


TARGETS = {
    "config": Target("mine.yaml", _other_yaml, _read_config, 100),
    "record": Target(f"run/{CONFIG}", _other_record, _read_record, 60),
    "shards' manifest": Target("shards/manifest.json", other_json, _read_shards, 300),
    "shards' index": Target("shards/clients.arrow", other_bytes, _read_shards, 200),
    "shards' samples": Target("shards/train-00000.arrow", other_bytes, _read_shards, 100),
    "checkpoint's manifest": Target("run/ditto/checkpoints/000002.json", _resigned, _read_checkpoints, 200),
    "checkpoint in use": Target("run/ditto/checkpoints/000002.json", _resigned, _read_trained, 8),
    "writer": Target("run/ditto/writer.json", other_json, lambda folder: Lease(folder / "run/ditto").check(), 100),
    "journal": Target(
        "run/ditto/events.jsonl", other_json_lines, lambda folder: Journal(folder / "run/ditto").until(9), 200
    ),
    "session": Target("run/session.json", other_json, _read_session, 100),
    "metrics": Target(
        "run/ditto/metrics.jsonl", other_json_lines, lambda folder: list(read_records(folder / "run/ditto")), 200
    ),
    "metrics in use": Target("run/ditto/metrics.jsonl", other_json_lines, _read_results, 30),
    "table": Target("run/ditto/metrics.jsonl", other_json_lines, lambda folder: compare_runs([folder / "run"]), 20),
    "info": Target("run/run.json", other_json, lambda folder: read_info(folder / "run"), 100),
    "end": Target("run/end.json", other_json, lambda folder: read_end(folder / "run"), 100),
    "end in use": Target("run/ditto/end.json", other_json, _read_results, 30),
    "cursor": Target("run/ditto/mlflow.json", other_json, _deliver, 150),
    "delivered metrics": Target("run/ditto/metrics.jsonl", other_json_lines, _deliver, 50),
    "client metrics": Target("run/ditto/client_metrics.arrow", other_bytes, _read_results, 50),
    "signature": Target("run/signature.json", other_json, lambda folder: trust.load_record(folder / "run"), 50),
    "reassignments": Target("run/ifca/reassignments.arrow", other_bytes, _read_report, 30),
    "reassignments to append to": Target(
        "run/ifca/reassignments.arrow", other_bytes, _append_to_records, 60, writes=True
    ),
    "metrics to append to": Target("run/ditto/metrics.jsonl", other_json_lines, _append_to_records, 60, writes=True),
    "client metrics to append to": Target(
        "run/ditto/client_metrics.arrow", other_bytes, _append_to_records, 60, writes=True
    ),
    "journal of a run that goes on": Target("run/ditto/events.jsonl", other_json_lines, _resume, 3, writes=True),
    "credentials": Target("home/credentials.json", other_json, _find_credentials, 60, writes=True),
    "csv": Target("run/ditto/metrics.csv", other_bytes, _read_csv, 60, writes=True),
}


def contents(folder: Path) -> dict[str, object]:
    """Every file of a folder with its size and time; locks, which readers take, aside."""
    return {
        str(path.relative_to(folder)): (status.st_size, status.st_mtime_ns, status.st_mode)
        for path in folder.rglob("*")
        if not path.is_dir() and path.suffix != ".lock"
        for status in [path.lstat()]
    }


def check(target: Target, folder: Path, mark: Path, seed: str) -> None:
    """Reads the files; any exception but an error with a message, and any file that was written, fails the test."""
    before = {} if target.writes else contents(folder)
    try:
        target.read(folder)
    except UserError as error:
        assert str(error).strip(), seed
    except BaseException as error:
        error.add_note(f"mutant {seed} of {folder / target.file}")
        raise
    assert target.writes or contents(folder) == before, seed
    assert not [path for path in folder.rglob(".*") if path.name.startswith(f".{os.getpid()}.")], seed  # drafts
    assert not mark.exists(), seed


def run_mutants(name: str, mutants: range, pristine: Path, folder: Path, monkeypatch) -> None:
    target = TARGETS[name]
    monkeypatch.chdir(pristine)  # `evil.py` is here
    monkeypatch.setenv("CFL_RAY_HOME", str(folder / "home"))
    monkeypatch.setattr(mlflow_tracker, "accepts_connection", lambda uri: False)
    shutil.copytree(pristine, folder, dirs_exist_ok=True)
    if name != "signature":
        trust.sign_record(folder / "run", config.load(folder / "run" / CONFIG))
    publish_server(folder / "run", ServerAddress.here("127.0.0.1:9", "server"))
    file = folder / target.file
    whole = file.read_bytes() if file.exists() else b"{}"
    for mutant in mutants:
        seed = f"{name}-{mutant}"
        if target.read is _resume:
            shutil.rmtree(folder)
            shutil.copytree(pristine, folder)
            trust.sign_record(folder / "run", config.load(folder / "run" / CONFIG))
        file.write_bytes(target.mutate(whole, random.Random(seed)))
        check(target, folder, pristine / "was_imported", seed)
    for kind in range(0 if target.read is _resume else 6 if len(mutants) < 100 else 12):
        draw = random.Random(f"{name}-in-place-{kind}")
        put_something_else(file, draw)
        check(target, folder, pristine / "was_imported", f"{name}-in-place-{kind}")
        file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink(missing_ok=True)
        file.write_bytes(whole)


@pytest.mark.parametrize("name", TARGETS)
def test_readers_of(name, pristine, tmp_path, monkeypatch):
    run_mutants(name, range(TARGETS[name].mutants // 4), pristine, tmp_path / "files", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_many_readers_of(name, pristine, tmp_path, monkeypatch):
    """Three times as many as above, and others."""
    mutants = TARGETS[name].mutants
    run_mutants(name, range(mutants // 4, mutants), pristine, tmp_path / "files", monkeypatch)
