"""A Slurm cluster of this machine: munged, slurmctld and slurmd on loopback, in a folder of their own, as root."""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from jobs.services.servers import free_port

PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "scancel", "scontrol")
_START_SECONDS = 120.0
_CONFIG = """
ClusterName=parts
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=30
InactiveLimit=0
MinJobAge=3600
SchedulerParameters=batch_sched_delay=1,sched_interval=5
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def missing() -> str:
    """Returns the programs or rights that Slurm lacks here, in words; empty if it can start."""
    lacking = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if lacking:
        return f"Slurm needs {', '.join(lacking)}: packages slurm-wlm and munge"
    return "" if os.geteuid() == 0 else "slurmd needs root"


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin"


class Slurm:
    """The commands of a cluster. environment: of its users."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _path()}

    def __call__(self, *words: str | Path, folder: Path | None = None, **variables: str) -> str:
        """Returns the output of a command. Raises RuntimeError if it fails."""
        environment = self.environment | variables
        done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{words}: {done.stderr}")
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Facts of a job, such as JobState and Restarts."""
        shown = self("scontrol", "--oneliner", "show", "job", number)
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def logs(self) -> str:
        """The ends of the logs, for a test that fails."""
        return "\n".join(file.read_text()[-2000:] for file in sorted(self.folder.glob("*.log")))


@contextmanager
def slurm() -> Iterator[Slurm]:
    """A cluster with one node, ready for jobs."""
    with tempfile.TemporaryDirectory(prefix="parts-") as name, ExitStack() as started:
        folder, host = Path(name), socket.gethostname().partition(".")[0]
        for part in ("state", "spool"):
            (folder / part).mkdir()
        values = {"host": host, "controller": free_port(), "daemon": free_port(), "cpus": os.cpu_count()}
        (folder / "slurm.conf").write_text(_CONFIG.format(folder=folder, **values))
        cluster, key, munge = Slurm(folder), folder / "munge.key", folder / "munge.socket"
        cluster("mungekey", "--create", f"--keyfile={key}")
        options = [f"--{part}-file={folder}/munged.{part}" for part in ("log", "pid", "seed")]
        _start(
            started, cluster, ["munged", "--foreground", "--force", f"--socket={munge}", f"--key-file={key}", *options]
        )
        _until(munge.exists, cluster)
        for words in (["slurmctld", "-D", "-i"], ["slurmd", "-D", "-N", host]):
            _start(started, cluster, [*words, "-f", str(folder / "slurm.conf")])
        _until(lambda: "State=IDLE" in cluster("scontrol", "--oneliner", "show", "node", host), cluster)
        yield cluster


def _start(started: ExitStack, cluster: Slurm, words: Sequence[str]) -> None:
    with (cluster.folder / f"{words[0]}.out.log").open("wb") as log:
        process = subprocess.Popen(words, env=cluster.environment, stdout=log, stderr=log)

    def end() -> None:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    started.callback(end)


def _until(is_true: Callable[[], bool], cluster: Slurm) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            if is_true():
                return
            reason = ""
        except RuntimeError as error:
            reason = str(error)
        if time.monotonic() > deadline:
            raise RuntimeError(f"Slurm does not start: {reason}\n{cluster.logs()}")
        time.sleep(0.2)
