"""A server that is killed while it writes a checkpoint leaves the one before; the run ends with the same figures."""

import json
import os
import signal
import time

import pytest

from cfl_ray import run, simulate

pytestmark = pytest.mark.slow


def being_written(folder):
    """Files of a checkpoint that is not complete: drafts, and entries later than all that a manifest names."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    last = 0
    for name in names:
        if name[0].isdigit() and name.endswith(".json"):
            try:
                files = json.loads((folder / name).read_text())["files"]
            except FileNotFoundError:  # discarded meanwhile
                continue
            last = max([last, *(segment(file["name"]) for file in files)])
    return [name for name in names if name.startswith(".") or (name.endswith(".safetensors") and segment(name) > last)]


def segment(name):
    return int(name.partition("-")[0])


def test_server_killed_while_it_writes(experiment, figures, cluster, actors, notes, tmp_path, meanwhile, until):
    """Twice: in a checkpoint of the first server, and in one of the next. Each has 25 MB, some tens of milliseconds."""
    large = experiment(
        model={"options": {"hidden": 40_000}},
        local={"epochs": 1},
        rounds=16,
        runtime={"engine": "sequential", "hosts": 1, "retries": 16},
        evaluation={"every": 16, "local": False},
    )
    folder, torn = tmp_path / "run/ditto/checkpoints", []

    def kill():
        ended = set()
        while len(torn) < 2:
            server = until(lambda: next(iter(set(actors("ServerActor")) - ended), None))
            deadline = time.monotonic() + 300
            while not being_written(folder):  # looked at more often than `until` does
                assert time.monotonic() < deadline, "no checkpoint was written"
                time.sleep(0.001)
            ended.add(server)
            try:
                os.kill(server, signal.SIGKILL)
            except ProcessLookupError:  # that of an earlier test, which has ended
                continue
            until(lambda: server not in actors("ServerActor"))
            if left := being_written(folder):  # otherwise it was complete when the signal came
                torn.append(left)

    watcher = notes()
    meanwhile(kill)
    assert figures(run(large, tmp_path / "run", watcher)) == figures(simulate(large))
    assert len(torn) == 2 and not being_written(folder)
    assert len([line for line in watcher.lines if "the server died and was started again" in line]) >= 2
    lines = (tmp_path / "run/ditto/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == list(range(1, 17))
