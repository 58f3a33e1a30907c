"""A full disk, by a limit on the size of files: the run ends with a reason, no file is torn, it can be resumed."""

import json
import resource
from pathlib import Path

import pytest

from cfl_ray import resume, run, simulate
from cfl_ray.errors import RunError
from cfl_ray.results.arrow_log import whole_batches
from cfl_ray.runtime.session import InProcessSession
from cfl_ray.setup.prepare import prepare

FULL = r"(File too large|No space left on device).*Every saved round is kept; go on with: cfl.ray.resume.*run"


@pytest.fixture
def limit():
    """Returns a function: no file of a process (0: this one) may grow beyond so many bytes, until the test ends."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size, pid=0: resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def room(limit):
    return lambda: limit(resource.RLIM_INFINITY)


def whole_lines(file: Path) -> list[int]:
    """Rounds of a log, each line or batch of which is whole."""
    if file.suffix == ".arrow":
        batches, end, _ = whole_batches(file)
        assert end == file.stat().st_size
        return [batch["round"][0].as_py() for batch in batches]
    text = file.read_text()
    assert text.endswith("\n")
    return [json.loads(line)["round"] for line in text.splitlines()]


def leftovers(directory: Path) -> list[Path]:
    return [path for path in directory.rglob(".*") if path.suffix != ".lock"]


def test_checkpoint(experiment, figures, notes, tmp_path, limit, room):
    """A part of it can be written."""
    small = experiment()
    with pytest.raises(RunError, match=r"run/ditto/checkpoints/\S+ could not be written: .*" + FULL):
        simulate(small, tmp_path / "run", watcher := notes(lambda number: limit(2500) if number == 2 else None))
    room()
    assert watcher.rounds == [1, 2] and not leftovers(tmp_path / "run")
    assert whole_lines(tmp_path / "run/ditto/metrics.jsonl") == [1, 2]
    assert figures(resume(tmp_path / "run", on_ray=False)) == figures(simulate(small))


def test_the_state_is_failed(experiment, tmp_path, limit, room):
    session = InProcessSession(prepare(experiment()), tmp_path / "run")
    rounds = session.rounds("ditto", print)
    next(rounds), next(rounds)
    limit(10)
    with pytest.raises(RunError, match="could not be written"):
        next(rounds)
    room()
    session.close()
    assert (session.loop.status, session.loop.round) == ("failed", 1)


def test_logs(experiment, figures, notes, tmp_path, limit, room):
    """IFCA's clients move in all of the first rounds, in which only logs are written."""
    small = experiment(methods=["ifca"], cohort={"fraction": 0.5}, runtime={"checkpoint_every": 4})
    expected = figures(simulate(small, tmp_path / "whole"))
    for name, more in (("metrics.jsonl", 10), ("reassignments.arrow", 0)):
        run_dir = tmp_path / name / "run"
        log = run_dir / "ifca" / name
        watcher = notes(lambda round: limit(log.stat().st_size + more) if round == 1 else None)
        with pytest.raises(RunError, match=FULL):
            simulate(small, run_dir, watcher)
        room()
        assert watcher.rounds == [1] and whole_lines(log) == [1] and not leftovers(run_dir)
        assert figures(resume(run_dir, on_ray=False)) == expected
        for file in ("ifca/reassignments.arrow", "ifca/artifacts/assignments.parquet"):
            assert (run_dir / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_artifacts(experiment, figures, notes, tmp_path, limit, room, drawn):
    """The last round is kept; the artifacts are made when the run is resumed."""
    small = experiment(rounds=2)
    with pytest.raises(RunError, match=FULL):
        simulate(small, tmp_path / "run", notes(lambda number: limit(1500) if number == 2 else None))
    room()
    assert json.loads((tmp_path / "run/ditto/end.json").read_text())["status"] == "FAILED"
    assert not leftovers(tmp_path / "run")
    assert figures(resume(tmp_path / "run", on_ray=False)) == figures(simulate(small))
    artifacts = {path.name for path in (tmp_path / "run/ditto/artifacts").iterdir()}
    assert {"accuracy_by_round.png", "assignments.parquet", "config.yaml"} <= artifacts


def test_config(experiment, tmp_path, limit, room):
    """A part of config.yaml would be taken for another config."""
    limit(100)
    with pytest.raises(RunError, match="config.yaml.*Nothing was kept|Nothing was kept"):
        simulate(experiment(), tmp_path / "run")
    room()
    assert not (tmp_path / "run/config.yaml").exists() and not leftovers(tmp_path / "run")


def test_a_run_that_is_moved_goes_on_in_its_new_place(experiment, figures, notes, tmp_path):
    """No folder is left in the old one."""
    small, old, new = experiment(), tmp_path / "run", tmp_path / "new"
    with pytest.raises(RunError, match=f"{old} was removed or moved .* cfl-ray resume NEW_PLACE"):
        simulate(small, old, notes(lambda number: old.rename(new) if number == 2 else None))
    assert not old.exists()
    assert figures(resume(new, on_ray=False)) == figures(simulate(small))


def test_run_folder_that_is_no_folder(experiment, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(RunError, match="Not a directory. Nothing was kept"):
        simulate(experiment(), tmp_path / "file/run")


@pytest.mark.slow
def test_checkpoint_on_ray(experiment, figures, cluster, actors, notes, tmp_path, limit):
    """The limit is a host's, which writes its clients' states; they take more than a file may hold."""
    runtime = {"engine": "sequential"}
    large = experiment(model={"options": {"hidden": 4096}}, local={"epochs": 1}, rounds=3, runtime=runtime)

    def fill(number):
        if number == 1:
            for host in actors("ClientHost"):
                limit(1 << 20, host)

    with pytest.raises(RunError, match=r"run/ditto/checkpoints/\S+ could not be written: .*" + FULL):
        run(large, tmp_path / "run", watcher := notes(fill))
    assert watcher.rounds == [1] and not leftovers(tmp_path / "run")
    assert figures(resume(tmp_path / "run")) == figures(simulate(large))
