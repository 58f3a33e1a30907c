"""A server that is killed while it writes a checkpoint leaves the one before, and the run ends with the same figures."""

import json
import os
import signal
import time

from cfl_ray import run, simulate


def unlisted(folder):
    """Files of a checkpoint that is being written: no manifest names them."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    listed = set()
    for name in names:
        if name[0].isdigit() and name.endswith(".json"):
            try:
                listed |= {name, *(file["name"] for file in json.loads((folder / name).read_text())["files"])}
            except FileNotFoundError:  # discarded meanwhile
                continue
    return sorted(names - listed)


def test_server_killed_while_it_writes(experiment, figures, cluster, actors, notes, tmp_path, meanwhile, until):
    """Twice: in the checkpoint of round 2, and in the one of a later round that the next server writes. Each is 25 MB."""
    large = experiment(model={"options": {"hidden": 40_000}}, local={"epochs": 1}, rounds=4, runtime={"hosts": 1})
    folder, ended, torn = tmp_path / "run/ditto/checkpoints", [], []

    def kill():
        for count in (1, 2):
            until(lambda: len(watcher.rounds) >= count)
            (server,) = until(lambda: (found := [pid for pid in actors("ServerActor") if pid not in ended]) and len(found) == 1 and found)
            deadline = time.monotonic() + 60
            while True:  # as soon as there is a file: the whole is written within some tens of milliseconds
                done, started = set(os.listdir(folder)), unlisted(folder)
                if started and f"{max(watcher.rounds) + 1:06d}.json" not in done:
                    break
                assert time.monotonic() < deadline, "no checkpoint was written"
                time.sleep(0.001)
            os.kill(server, signal.SIGKILL)
            ended.append(server)
            until(lambda: server not in actors("ServerActor"))
            torn.append(unlisted(folder))

    watcher = notes()
    meanwhile(kill)
    assert figures(run(large, tmp_path / "run", watcher)) == figures(simulate(large))
    assert len(ended) == 2 and all(torn), torn
    assert len([line for line in watcher.lines if "the server died and was started again" in line]) == 2
    assert not unlisted(folder)
    assert [json.loads(line)["round"] for line in (tmp_path / "run/ditto/metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]
