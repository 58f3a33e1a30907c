"""Processes of a study that are killed, and studies that are interrupted; the figures are the same."""

import os
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import yaml
from studies import figures_of

from cfl_ray.study import worker_pool
from cfl_ray.study.run import run_study
from cfl_ray.study.status import study_status
from cfl_ray.study.worker_pool import Resources

pytestmark = pytest.mark.slow
SLOW = "import time\n\ndef pause(outputs, targets):\n    time.sleep(0.01)\n    return float(len(targets))\n"


@pytest.fixture
def file(study, tmp_path):
    """A study whose runs take a second or two, on disk."""
    (tmp_path / "slow.py").write_text(SLOW)
    changes = {
        "rounds": 20,
        "evaluation": {"metrics": [f"{tmp_path}/slow.py:pause"]},
        "runtime": {"engine": "sequential", "checkpoint_every": 1},
    }
    made = study(experiment=changes)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(made.model_dump(mode="json")))
    return tmp_path / "small.yaml"


@pytest.fixture(scope="module")
def uninterrupted():
    """The figures of the study without any interruption, once they are known."""
    return {}


@pytest.fixture
def expected(file, tmp_path, inline, uninterrupted):
    """The figures of the same study without any interruption."""
    if not uninterrupted:
        run_study(file, tmp_path / "whole")
        uninterrupted.update(figures_of(tmp_path / "whole"))
    return uninterrupted


@pytest.fixture
def live(file, command, until):
    """The process of the study, once one of its runs is in the middle."""
    process = subprocess.Popen(
        [*command, "compare", str(file), "--at-once=2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    until(lambda: _in_the_middle(file.parent / "small") or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0]
    yield process
    process.kill()
    process.wait()


def _in_the_middle(root: Path) -> bool:
    logs = list(root.glob("*/*/seed-*/*/metrics.jsonl"))
    return any(3 <= log.read_text().count("\n") < 15 for log in logs)


def _workers(process: subprocess.Popen) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children()
    return [child for child in children if "spawn_main" in " ".join(child.cmdline())]


def test_a_process_that_is_killed_is_replaced(expected, live, file):
    # the one in the middle of a run: the other may not have begun its first
    max(_workers(live), key=lambda worker: worker.cpu_times().user).kill()
    printed = live.communicate(timeout=300)[0]
    assert live.returncode == 0, printed
    assert figures_of(file.parent / "small") == expected


def test_ctrl_c_and_on(expected, live, file, command):
    children = _workers(live)
    os.killpg(live.pid, signal.SIGINT)  # as a terminal does: to all processes
    printed = live.communicate(timeout=120)[0]
    root = file.parent / "small"
    assert live.returncode == 130 and f"go on with: cfl-ray resume {root}" in printed and "Traceback" not in printed
    assert not any(child.is_running() for child in children)
    assert study_status(root).state == "stopped" and study_status(root).stopped
    done = subprocess.run([*command, "resume", str(root)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert figures_of(root) == expected


SIGNALS = """
import os, signal, threading
from cfl_ray.study import worker_pool

sent, interrupts = [], 0

def send():
    count = 0
    while count < 20000 or not interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        count += 1
    sent.append(True)

signal.signal(signal.SIGINT, worker_pool._interrupt)
threading.Thread(target=send).start()
while not sent:
    try:
        while not sent:
            worker_pool._AtWork.now = True
    except KeyboardInterrupt:
        interrupts += 1
worker_pool._AtWork.now = False
print(interrupts)
"""


def test_signals_that_arrive_together_do_not_wait_for_each_other(command):
    done = subprocess.run([command[0], "-c", SIGNALS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and int(done.stdout), done.stderr


def test_the_processes_end_with_a_killed_parent_and_the_study_goes_on(expected, live, file, until):
    children = _workers(live)
    live.kill()
    live.wait()
    root = file.parent / "small"
    results = run_study(root / "study.yaml", root, at_once=1)  # at once: it waits for the runs that end
    assert not results.failed and figures_of(root) == expected
    until(lambda: not any(child.is_running() for child in children), 60)


def test_a_run_whose_process_always_dies_fails_alone(study, tmp_path):
    (tmp_path / "deadly.py").write_text("import os\n\ndef mine(outputs, targets):\n    os._exit(7)\n")
    deadly = {"evaluation": {"metrics": [f"{tmp_path}/deadly.py:mine"]}}
    results = run_study(
        study(seeds=[0], experiment={"methods": ["fedavg"]}, settings={"deadly": deadly, "other": {}}), at_once=2
    )
    (failed,) = results.failed
    assert failed.run.setting == "deadly" and failed.reason.startswith("its process died 3 times")
    assert study_status(results.root).failed == {"deadly, fedavg, seed 0": failed.reason}
    assert list(results.run_metrics) == [("other", "fedavg")]


def test_a_process_that_hangs_is_killed_at_the_end():
    worker = worker_pool._Worker(0, Resources(1, None))
    while not worker.ready:
        worker.hear()
    worker.run = SimpleNamespace(name="at work")
    os.kill(worker.process.pid, signal.SIGSTOP)
    worker.end(time.monotonic() + 1)
    assert worker.process.exitcode == -signal.SIGKILL


def test_a_script_without_a_guard_is_told_so(tmp_path, command):
    """Processes import the script that started them."""
    script = tmp_path / "script.py"
    script.write_text(
        "from cfl_ray.config.study import Study\nfrom cfl_ray.study.run import run_study\n"
        f"run_study(Study(name='a', experiment={{'rounds': 1, 'output': {str(tmp_path)!r}, "
        "'tracking': {'enabled': False}}))\n"
    )
    done = subprocess.run([command[0], script], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "ended before its first run" in done.stderr
    assert "put what the script does below" in done.stderr


def test_a_pool_of_one_runs_runs_until_it_is_closed(study, tmp_path):
    from cfl_ray.study.study_plan import plan

    runs = plan(study())
    with worker_pool.WorkerPool(tmp_path / "root") as pool:
        outcomes = pool.run(runs, Resources(1, None))
        first = next(outcomes)
        (worker,) = pool.workers
        assert first.run is runs[0] and first.status == "finished"
        worker.process.kill()
        assert [outcome.run for outcome in outcomes] == runs[1:], "another one takes its place"
        (other,) = pool.workers
        assert other.process.pid != worker.process.pid
    assert not other.process.is_alive()
