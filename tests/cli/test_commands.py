"""Commands: their output, and for invalid input one message that names the cause, exit status 2 and no traceback."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import call, status_of

import cfl_ray
from cfl_ray.cli import console, main
from cfl_ray.config import load
from cfl_ray.errors import Interrupted, RunStopped
from cfl_ray.lifecycle import launch
from cfl_ray.methods import resolve
from cfl_ray.setup.prepare import prepare


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("MLFLOW_TRACKING_URI", "RAY_ADDRESS", "CFL_RAY_DATA"):
        monkeypatch.delenv(name, raising=False)


QUICK = ["methods=[fedavg]", "rounds=1", "tracking.enabled=false", "runtime.engine=manual", "local.epochs=1"]
INVALID = {
    "unknown key": (["local.epoch=3"], "unknown key 'local.epoch' (did you mean 'epochs'?)"),
    "unknown method": (["methods=[stofcl]"], "unknown method 'stofcl' (did you mean 'stocfl'?)"),
    "unknown option": (["methods=[{stocfl: {taw: 0.5}}]"], "stocfl has no option 'taw' (did you mean 'tau'?)"),
    "unknown model": (["model.name=lenet"], "unknown model 'lenet' (did you mean 'lenet5'?)"),
    "unknown model option": (["model.options={hiden: 3}"], "hiden"),
    "client left empty": (["data.partition.clients=8000"], "data.partition.clients"),
    "absent data": (["data.source=mnist"], "data.download"),
    "no such file": (["nowhere.yaml"], "there is no config file nowhere.yaml"),
    "a key without a value": (["local.lr"], "there is no config file local.lr; if the key local.lr is meant, write"),
    "plugin absent": (["methods=[mine.py:Mine]"], "there is no file"),
    "a folder whose variable is not set": (["--run-dir", ""], "the name of a folder is empty"),
    "a folder whose variable is blank": (["--run-dir", " "], "the name of a folder is empty"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_input_is_one_message(case, capsys):
    arguments, expected = INVALID[case]
    status, _, message = call(capsys, "run", *arguments)
    assert status == 2
    assert expected in message
    assert "Traceback" not in message
    assert not list(Path().glob("runs/*/config.yaml"))


def test_no_cluster_at_the_address(capsys, monkeypatch):
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # another test may have joined a cluster
    status, _, message = call(capsys, "run", "runtime.address=127.0.0.1:1")
    assert status == 2
    assert "no Ray cluster at 127.0.0.1:1" in message and "ray start --head" in message and "Traceback" not in message
    assert not list(Path().glob("runs/*/config.yaml"))


def test_the_installed_script_lists_the_commands():
    script = Path(sys.executable).with_name("cfl-ray")
    done = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=300)
    commands = ("run", "resume", "status", "join", "leave", "stop", "check", "config", "methods", "export", "prepare")
    assert done.returncode == 0 and all(f" {command} " in done.stdout for command in commands), (
        done.stdout + done.stderr
    )


def test_the_version_and_the_completion_of_the_shell(capsys, monkeypatch):
    import cfl_ray

    monkeypatch.setattr("shellingham.detect_shell", lambda *_: ("bash", "/bin/bash"))
    assert call(capsys, "--version") == (0, f"cfl-ray {cfl_ray.__version__}\n", "")
    status, printed, _ = call(capsys, "--show-completion")
    assert status == 0 and "COMPREPLY" in printed
    status, printed, _ = call(capsys, "--help")
    assert "groups clients with similar data" in printed and "Start with `cfl-ray run`" in printed


def test_model_with_a_wrong_number_of_outputs(capsys):
    net = "from torch import nn\ndef Net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 7))\n"
    Path("net.py").write_text(net)
    status, _, message = call(capsys, "run", "model={name: 'net.py:Net'}")
    assert status == 2 and "10 classes" in message and "7" in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rounds: [1,\n", "line 2, column 1: .*; close the bracket"),
        ("rounds: 3\n  seed: 1\n", "line 2, column 7: .*; indent the keys of a section alike"),
        ("name: a: b\n", "line 1, column 8: .* a text with ': ' into quotes"),
        ("data:\n\tsource: digits\n", "line 2, column 1: .*; indent with spaces, not with tabs"),
        ("methods:\n  - ifca\n - fedavg\n", "line 3, column 2: .*; indent the entries"),
        ("name: 'a\n", "line 2, column 1: .*; close the quotes"),
    ],
)
def test_invalid_yaml_is_named_in_one_line_with_its_place_and_the_cure(text, says, capsys):
    Path("broken.yaml").write_text(text)
    status, _, message = call(capsys, "check", "broken.yaml")
    assert status == 2 and re.search(f"broken.yaml is not valid YAML: {says}", message)
    assert len(message.strip().splitlines()) == 1


def test_a_run_directory_of_another_config_is_refused_and_unchanged(capsys):
    quick = ["--in-process", "--run-dir", "here", *QUICK]
    assert call(capsys, "run", *quick)[0] == 0
    before = {path: path.read_bytes() for path in Path("here").rglob("*") if path.is_file()}
    status, _, message = call(capsys, "run", *quick, "seed=1")
    assert status == 2 and "belongs to another config" in message
    status, _, message = call(capsys, "run", *quick)
    assert status == 2 and "cfl-ray resume" in message
    assert before == {path: path.read_bytes() for path in Path("here").rglob("*") if path.is_file()}
    assert call(capsys, "resume", "nowhere")[0] == 2


def test_a_finished_run_is_not_resumed_but_shown(capsys, monkeypatch):
    assert call(capsys, "run", "--in-process", "--run-dir", "my run", *QUICK)[0] == 0
    monkeypatch.setattr("cfl_ray.lifecycle.launch.prepare", pytest.fail)  # nothing is prepared
    status, printed, _ = call(capsys, "resume", "my run")
    lines = printed.splitlines()
    assert status == 0 and lines[0] == "my run is finished: nothing is left to do."
    assert "results after the last round" in lines[1] and "fedavg" in printed and "finished in" not in printed
    status, _, message = call(capsys, "stop", "my run")
    assert status == 1
    assert message == (
        "error: my run is not live, so it takes no request to stop; it is finished, see `cfl-ray status 'my run'`\n"
    )


def test_resuming_a_live_run_says_one_thing(capsys, monkeypatch):
    from cfl_ray.run_directory import RunDirectory

    monkeypatch.setattr("cfl_ray.run_directory.lock._LOCK_SECONDS", 0)
    assert call(capsys, "run", "--in-process", "--run-dir", "my run", *QUICK)[0] == 0
    with RunDirectory("my run").hold():
        status, printed, message = call(capsys, "resume", "my run")
    folder = Path("my run").absolute()
    assert (status, printed) == (1, "")
    assert message == f"error: {folder} is live already; see it with: cfl-ray status '{folder}'\n"


def test_a_first_override_is_taken_as_it_is(capsys):
    """It stands where the file may be, whose name neither has two slashes in a row nor is so long."""
    changes = ["data.shards=s3://bucket/shards", *(f"local.lr={digits}" for digits in ("0.1", "0.1" + 300 * "0"))]
    for change in changes:
        status, printed, message = call(capsys, "check", change, "tracking.enabled=false")
        assert status == 0, message
        assert printed.splitlines()[-1].endswith(f"cfl-ray run {change} tracking.enabled=false")


def test_a_run_in_the_folder_of_a_study_is_refused(capsys):
    Path("mine").mkdir()
    Path("mine/study.yaml").write_text("name: mine\nexperiment: {}\n")
    status, _, message = call(capsys, "run", "--in-process", "--run-dir", "mine", *QUICK)
    assert status == 2 and "mine is the folder of a study; choose another folder for the run" in message
    assert list(Path("mine").iterdir()) == [Path("mine/study.yaml")]


def test_a_run_whose_config_is_empty_is_no_run_of_the_defaults(capsys):
    call(capsys, "run", "--in-process", "--run-dir", "one", *QUICK)
    Path("one/config.yaml").write_text("")
    before = sorted(Path("one").rglob("*"))
    for command in ("resume", "table", "report", "export"):
        more = ["-o", "model.pt"] if command == "export" else []
        status, _, message = call(capsys, command, "one", *more)
        assert status == 2 and "one/config.yaml is empty" in message, command
    assert sorted(Path("one").rglob("*")) == before


def test_output_is_standard_output(capsysbinary):
    """A page goes there as it is, and is no file called `-`; a model has no ending there that says its format."""
    call(capsysbinary, "run", "--in-process", "--run-dir", "one", *QUICK)
    status, page, message = call(capsysbinary, "report", "one", "-o", "-")
    assert status == 0 and page.startswith(b"<!doctype html>") and page.rstrip().endswith(b"</html>") and not message
    status, printed, message = call(capsysbinary, "export", "one", "-o", "-")
    assert status == 2 and b"a model is not written to standard output" in message and not printed
    status, _, message = call(capsysbinary, "report", "one", "-o", "page.pdf")
    assert status == 2 and b"page.pdf: a report is written as .html, got '.pdf'" in message
    assert not Path("-").exists() and not Path("page.pdf").exists()


def test_a_character_that_the_terminal_lacks_ends_no_command():
    program = (
        "from cfl_ray.cli import commands\n"
        "commands.app = lambda *_, **__: print('0.5 \\u00b1 0.1')\n"
        "commands.main([])\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=300,
    )
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, b"0.5 ? 0.1\n", b"")


@pytest.mark.slow
def test_resume_delivers_what_a_finished_run_could_not_whatever_its_place(capsys, monkeypatch):
    """The other commands look below `output` alone, where a run with --run-dir need not be."""
    with monkeypatch.context() as patch:
        patch.setattr("cfl_ray.tracking.mlflow_tracker.accepts_connection", lambda uri: False)
        run = ["run", "--in-process", "--run-dir", "here", "output=there", *QUICK, "tracking.enabled=true"]
        status, printed, _ = call(capsys, *run)
    assert status == 0 and "or cfl-ray resume, delivers them" in printed
    status, printed, _ = call(capsys, "resume", "--in-process", "here")
    where = [Path("here").absolute(), Path("here/fedavg").absolute()]
    assert status == 0 and all(f"{place} to MLflow, which was out of reach before" in printed for place in where)
    assert "Delivered 0" not in printed  # the parent run has no rounds
    assert "Delivered" not in call(capsys, "resume", "--in-process", "here")[1]


@pytest.mark.parametrize("reason", ["No space left on device", "Broken pipe"])
def test_a_run_goes_on_without_an_output_that_cannot_be_written(reason, capsys, monkeypatch):
    """As of a full disk, or `| tee log` after tee has ended. Other commands print results, and fail without it."""

    def lost():
        if reason == "Broken pipe":
            read, write = os.pipe()
            os.close(read)
            return os.fdopen(write, "w")
        return open("/dev/full", "w")

    monkeypatch.setattr(console._output, "may_be_lost", False)
    with lost() as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert status_of("run", "--in-process", "--run-dir", "here", *QUICK) == 0
    message = capsys.readouterr().err
    assert message.count("note:") == 1 and f"standard output cannot be written ({reason})" in message
    assert Path("here/end.json").exists()

    monkeypatch.setattr(console._output, "may_be_lost", False)
    output = lost()
    monkeypatch.setattr(sys, "stdout", output)
    monkeypatch.setattr(console.out, "quiet", False)  # Rich sets it when a pipe is closed
    with pytest.raises((OSError, SystemExit)):
        console.say("a result")
    with contextlib.suppress(OSError):
        output.close()


def test_closed_standard_files_are_open_for_what_a_command_starts(tmp_path):
    """Otherwise a socket takes the place of one of them, and forks of the process lack `sys.stdout`."""
    program = """
import os, pathlib, sys
from cfl_ray.cli import main
try:
    main(["--version"])
finally:
    files, nowhere = [stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)], os.stat(os.devnull)
    pathlib.Path(sys.argv[1]).write_text(str([(file, os.path.samestat(os.fstat(file), nowhere)) for file in files]))
"""
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", program, tmp_path / "files"]
    subprocess.run(closed, check=True, timeout=300)
    assert (tmp_path / "files").read_text() == "[(0, True), (1, True), (2, True)]"


def test_a_working_directory_that_was_removed_is_named(tmp_path):
    (tmp_path / "gone").mkdir()
    script = 'cd gone && rmdir "$PWD" && exec "$@"'
    environment = os.environ | {"PYTHONPATH": str(Path(cfl_ray.__file__).parents[1])}
    command = ["sh", "-c", script, "sh", sys.executable, "-m", "cfl_ray", "run"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (
        2,
        "error: the working directory was removed; change to a folder that exists: cd\n",
    )


def test_an_interruption_while_the_command_line_is_imported_shows_no_traceback(monkeypatch, capsys):
    class Interrupting:
        def find_spec(self, name, *_):
            if name == "cfl_ray.cli.commands":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "cfl_ray.cli.commands", raising=False)
    monkeypatch.delattr(sys.modules["cfl_ray.cli"], "commands", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert call(capsys, "--version") == (130, "", "")


def test_an_interrupted_command_does_not_wait_for_its_processes():
    """After a second Ctrl-C they may be at work still; they end by themselves when the command has ended."""
    program = (
        "import multiprocessing, os\n"
        "from cfl_ray.cli import commands\n"
        "from cfl_ray.errors import Interrupted\n"
        "read, write = os.pipe()\n"
        "def work():\n"
        "    os.close(write)\n"
        "    os.read(read, 1)  # until the command has ended\n"
        "def interrupted(*_, **__):\n"
        "    multiprocessing.get_context('fork').Process(target=work).start()\n"
        "    raise Interrupted('stopped')\n"
        "commands.app = interrupted\n"
        "commands.main([])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (130, "error: stopped\n")


def test_commands_for_a_folder_with_spaces_can_be_pasted(capsys):
    quick = ["--in-process", "--run-dir", "my run", *QUICK]
    assert call(capsys, "run", *quick)[0] == 0
    status, _, message = call(capsys, "run", *quick)
    command = message.split("`")[1]
    assert shlex.split(command) == ["cfl-ray", "resume", str(Path("my run").absolute())]
    Path("my run/end.json").unlink()
    Path("my run/fedavg/end.json").unlink()
    assert "cfl-ray resume 'my run'" in call(capsys, "status", "my run")[1]


def test_ctrl_c_in_a_run_names_the_command_that_goes_on_and_no_exception_handler_takes_it(capsys, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("cfl_ray.cli.progress.Display.round", interrupt)
    monkeypatch.setattr(os, "_exit", sys.exit)  # if tests before have imported Ray
    status, _, message = call(capsys, "run", "--in-process", "--run-dir", "here", *QUICK)
    assert status == 130
    assert message.endswith(f"go on with: cfl-ray resume {shlex.quote(str(Path('here').absolute()))} --in-process\n")
    assert issubclass(Interrupted, KeyboardInterrupt) and not issubclass(Interrupted, Exception)


@pytest.mark.parametrize("name, shown", [("sweep", "sweep.sampler = grid"), ("study", "seeds = [0]")])
def test_the_keys_of_a_study_are_explained(capsys, name, shown):
    status, printed, _ = call(capsys, "config", name)
    assert status == 0 and shown in printed


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(capsys, monkeypatch):
    """The second one starts while the first one prepares its data."""
    statuses = []

    def prepare_beside_another(*arguments):
        monkeypatch.setattr(launch, "prepare", prepare)
        statuses.append(call(capsys, "run", "--in-process", *QUICK)[0])
        return prepare(*arguments)

    monkeypatch.setattr(launch.time, "strftime", lambda form: "20260101-120000")
    monkeypatch.setattr(launch, "prepare", prepare_beside_another)
    statuses.append(call(capsys, "run", "--in-process", *QUICK)[0])
    assert statuses == [0, 0] and len(list(Path("runs").glob("*/config.yaml"))) == 2


def test_a_damaged_shard_is_named(capsys):
    assert call(capsys, "prepare")[0] == 0
    shard = max(Path("runs/shards").rglob("*.arrow"), key=lambda file: file.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    status, _, message = call(capsys, "run", "--in-process", *QUICK)
    assert status == 2 and shard.name in message and "sha256" in message
    shard.write_bytes(content[:-100])
    status, _, message = call(capsys, "run", "--in-process", *QUICK)
    assert status == 2 and shard.name in message
    shard.unlink()
    status, _, message = call(capsys, "run", "--in-process", *QUICK)
    assert status == 2 and shard.name in message


def test_check_names_the_engine_and_measures_it_if_asked(capsys):
    auto = [*QUICK, "runtime.engine=auto"]
    status, printed, _ = call(capsys, "check", *auto)
    assert status == 0 and "\nengine manual: estimated " in printed and "measured" not in printed
    status, printed, _ = call(capsys, "check", "--time-engines", *auto)
    assert status == 0 and "\nengine manual: estimated " in printed
    ratios = [float(ratio) for ratio in re.findall(r"^  \w+ \S+ ms, (\S+) of the least$", printed, re.MULTILINE)]
    assert len(ratios) == 4 and ratios == sorted(ratios) and ratios[0] == 1
    assert "\n  span cannot: batches are smaller than a client's data\n" in printed
    Path("study.yaml").write_text("experiment: {rounds: 1}\n")
    status, _, message = call(capsys, "check", "--time-engines", "study.yaml")
    assert status == 2 and "--time-engines measures one run" in message


def test_check_runs_nothing_and_its_config_runs(capsys):
    status, printed, _ = call(capsys, "check", *QUICK)
    assert status == 0 and "federation: 40 clients" in printed
    last = printed.splitlines()[-1]
    assert last == f"The config is valid. Run it with: {shlex.join(['cfl-ray', 'run', *QUICK])}"
    status, printed, _ = call(capsys, "check", "--yaml", *QUICK)
    assert status == 0 and not Path("runs").exists()
    Path("resolved.yaml").write_text(printed)
    assert call(capsys, "run", "--in-process", "resolved.yaml")[0] == 0


def test_check_shows_first_what_differs_from_the_defaults(capsys):
    printed = call(capsys, "check", "local.lr=0.05", "tracking.uri=http://me:secret@host", *QUICK)[1]
    table = printed[: printed.index("federation:")]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if "│" in line]
    assert ["local.lr", "0.05", "0.1"] in rows and ["rounds", "1", "30"] in rows
    assert ["data.shift.kind", "rotated", "none"] in rows and ["tracking.uri", "http://***@host", "null"] in rows
    assert "seed" not in table and "secret" not in printed


def test_the_command_that_check_prints_can_be_pasted(capsys):
    folder = Path("my experiments")
    folder.mkdir()
    (folder / "mine.yaml").write_text("rounds: 1\n")
    given = [str(folder / "mine.yaml"), "methods=[{stocfl: {tau: 0.5}}]", "name=it.s"]
    for command in ("check", "prepare"):
        last = call(capsys, command, *given)[1].splitlines()[-1]
        assert shlex.split(last[last.index("cfl-ray run") :]) == ["cfl-ray", "run", *given]


UNFIT = {
    "a label that is a file": (
        ["methods=[{fedavg: {label: config.yaml}}]"],
        "methods: 'config.yaml' cannot be a label, for it is the name of a file or folder of the run directory",
    ),
    "unknown client changes": (
        ["schedule=[{round: 2, change: [{clients: 41, relabel: 1}]}]"],
        "schedule, round 2: client 41 does not exist; the federation has clients 0 .. 39",
    ),
    "all leave": (
        ["schedule=[{round: 2, leave: 0-39}]", "rounds=3"],
        "schedule: no client is left in round 2; let fewer leave or others join",
    ),
    "all join later": (["schedule=[{round: 2, join: 0-39}]"], "schedule: all 40 clients join later"),
    "unknown attacker": (["attack={kind: sign_flip, clients: [40]}"], "attack.clients: client 40 does not exist"),
    "no trace": (["cohort.availability={kind: trace, file: gone.csv}"], "there is no file gone.csv"),
    "no GPU to compute on": (["runtime.device=cuda"], "runtime.device: cuda, but torch finds no GPU here"),
    "a schedule that fails in a step": (["local.step_schedule={step: {every: 0}}"], "option every of a schedule is at"),
    "model that does not fit": (["model.name=lenet5", "model.options={}"], "samples of shape (1, 8, 8)"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_check_refuses_what_a_run_refuses(case, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    changes, expected = UNFIT[case]
    checked = call(capsys, "check", *QUICK, *changes)
    run = call(capsys, "run", "--in-process", *QUICK, *changes)
    assert checked[0] == run[0] == 2
    assert checked[2] == run[2] and expected in checked[2]
    assert checked[1] == ""  # the message is all there is


def test_check_refuses_hosts_for_which_this_machine_has_no_room(capsys, monkeypatch):
    """As a run does when its Ray has started; where the run joins a cluster, its room is not known."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    status, _, message = call(capsys, "check", "runtime.gpus_per_host=0.5", "runtime.hosts=2", *QUICK)
    assert status == 2 and "2 hosts with 0.5 GPU each need 1 GPUs, the cluster has 0" in message
    assert "to check for a cluster, name it: RAY_ADDRESS=HEAD:6379" in message
    status, _, message = call(capsys, "check", "runtime.cpus_per_host=1000", *QUICK)
    assert status == 2 and "1 host with 1000 CPU needs 1000 CPUs" in message
    for change in ("runtime.gpus_per_host=0.5", "runtime.device=cuda"):
        assert call(capsys, "check", change, "runtime.address=auto", *QUICK)[0] == 0


def test_events_after_the_last_round_are_worth_a_note(capsys):
    late = "schedule=[{round: 5, leave: [1]}, {round: 9, join: [3]}]"
    note = "note: the events of the schedule in rounds 5, 9 are ignored: the last round is 1"
    assert note in call(capsys, "check", late, *QUICK)[1]
    assert note in call(capsys, "run", "--in-process", late, *QUICK)[1]
    assert "are ignored" not in call(capsys, "check", "schedule=[]", *QUICK)[1]


def test_check_shows_the_size_of_deferred_results(capsys):
    """19 clients, a model of 187,510 parameters each: 19 * 187,510 * 4 bytes = 14.3 MB."""
    methods = "methods=[ditto, {fedavg: {aggregation: median}}, fesem]"
    printed = call(capsys, "check", methods, "model={name: mlp, options: {hidden: 2500}}")[1]
    assert "stay in the object store until their weights are known: fedavg 14.3 MB, fesem 14.3 MB" in printed


def test_check_says_on_what_models_are_chosen_for_the_evaluation(capsys):
    limited = "ifca: models for the evaluation are chosen on 9 training samples of each client, the same random ones"
    overrides = ["evaluation.choice_samples=9", "methods=[fedavg, ifca]"]
    assert limited in call(capsys, "check", *overrides)[1]
    for other in ("evaluation.choice_samples=null", "methods=[fedavg, {ifca: {select: test_accuracy}}]"):
        assert "are chosen on" not in call(capsys, "check", *overrides, other)[1]


def test_methods_lists_all_and_explains_one(capsys):
    from cfl_ray.methods import REGISTRY

    status, printed, _ = call(capsys, "methods")
    assert status == 0 and all(name in printed for name in REGISTRY)
    for name in REGISTRY:
        status, printed, _ = call(capsys, "methods", name)
        assert status == 0 and "Deviations" in printed and "A client keeps: " in printed
        kept = {
            "fedamp": "a model",
            "feroma": "a model and a profile",
            "fedcac": "a model and a mask",
            "pfedgraph": "a model",
            "fedccfa": "a classifier",
            "fedpac": "a classifier",
        }.get(name)
        of_clients = re.findall(r"The server keeps for clients: (a [\w ]+) of each that has taken part", printed)
        assert of_clients == [kept] * (kept is not None), name
        assert all(option["name"] in printed for option in REGISTRY[name].options())
    assert call(capsys, "methods", "stokfl")[0] == 2


def test_methods_refers_to_ones_own_as_a_config_does(capsys):
    Path("ema.py").write_text(
        "from dataclasses import dataclass\nfrom cfl_ray.methods.fedavg import FedAvg\n\n"
        "@dataclass(frozen=True)\nclass EMA(FedAvg, name='ema'):\n    decay: float = 0.8\n"
    )
    printed = call(capsys, "methods", "ema.py:EMA")[1]
    shown = printed.rpartition("In a config: ")[2]
    assert yaml.safe_load(shown) == {"methods": [{"ema.py:EMA": {"weights": "samples"}}]}
    assert list(resolve(yaml.safe_load(shown)["methods"])) == ["ema"], "a config that is accepted"


METRIC_OF_MANY = """def mine(outputs, targets):
    if len(targets) > 20:  # a trial has two samples of each class
        return outputs.wrong
    return 0.0
"""


def test_an_error_that_names_the_authors_line_names_no_other(capsys):
    Path("mine.py").write_text(METRIC_OF_MANY)
    status, _, message = call(capsys, "run", *QUICK, "evaluation.metrics=[mine.py:mine]", "runtime.backend=in_process")
    assert status == 1 and message.count("line") == 2 and re.search(r"mine\.py, line 1\) failed.*\(line 3\)\.", message)
    assert ". Every saved round is kept; go on with: cfl-ray resume " in message


def test_a_plugin_that_ends_the_process_is_an_error(capsys):
    Path("mine.py").write_text("def load():\n    raise SystemExit(0)\n")
    status, _, message = call(capsys, "check", "data.source=mine.py:load")
    assert status == 1 and "SystemExit: 0 (" in message and "mine.py, line 2); a plugin cannot end" in message


@pytest.mark.parametrize("command", ["check", "run"])
def test_own_parts_that_cannot_work_are_refused(capsys, command):
    Path("mine.py").write_text("def mine(outputs, targets):\n    return outputs\n")
    status, _, message = call(capsys, command, *QUICK, "evaluation.metrics=[mine.py:mine]")
    assert (
        status == 2 and "mine.py, line 1) returns Tensor of float32 and shape (20, 10), expected one number" in message
    )


def test_list_shows_the_parts_of_every_kind_and_how_to_bring_ones_own(capsys):
    from cfl_ray.cli.catalogue import KINDS, OTHER_NAMES

    status, printed, _ = call(capsys, "list")
    assert status == 0 and all(kind in printed for kind in KINDS)
    for name, kind in KINDS.items():
        status, printed, _ = call(capsys, "list", name)
        assert status == 0 and all(part in printed for part in kind.registry.names())
        assert kind.own in printed and kind.page in printed and kind.registry.group in printed
    status, _, errors = call(capsys, "list", "modls")
    assert status == 2 and "unknown kind 'modls' (did you mean 'models'?)" in errors
    for other, name in OTHER_NAMES.items():
        status, _, errors = call(capsys, "list", other)
        assert status == 2 and f"unknown kind {other!r} (did you mean {name!r}?)" in errors and name in KINDS


def test_config_explains_every_key(capsys):
    status, printed, _ = call(capsys, "config")
    assert status == 0
    for shown in ("rounds = 30  (whole number >= 1)", "T, number of communication rounds"):
        assert shown in printed
    status, printed, _ = call(capsys, "config", "local")
    assert status == 0 and "local.lr = 0.1  (number > 0 and <= 100)" in printed and "rounds = 30" not in printed
    status, printed, _ = call(capsys, "config", "local.lr")
    assert status == 0 and "eta, learning rate" in printed and "local.epochs" not in printed
    status, _, message = call(capsys, "config", "local.lrr")
    assert (status, message) == (2, "error: unknown key 'local.lrr' (did you mean 'local.lr'?)\n")


def test_prepare_writes_once(capsys):
    assert call(capsys, "prepare")[0] == 0
    (manifest,) = Path("runs/shards").rglob("manifest.json")
    written = manifest.stat().st_mtime_ns
    status, printed, _ = call(capsys, "prepare")
    assert status == 0 and "40 clients" in printed and manifest.stat().st_mtime_ns == written


def test_prepare_writes_the_shards_of_a_users_function(capsys):
    x = "{'x': np.eye(20), 'y': np.arange(20) % 2, 'clients': np.arange(20) // 5}"
    Path("own.py").write_text(f"import numpy as np\ndef load(): return {x}")
    for _ in range(2):
        status, printed, _ = call(
            capsys, "prepare", "data.source=own.py:load", "data.shift.kind=none", "data.test.view=null"
        )
        (manifest,) = Path("runs/shards").glob("load-*/manifest.json")
        assert status == 0 and "4 clients" in printed and f"Shards: {manifest.parent.absolute()}" in printed


def test_what_averaged_statistics_of_batchnorm_mean_is_said_once(capsys):
    Path("net.py").write_text(
        "from torch import nn\n\n\ndef with_norm(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5), nn.Linear(5, classes))\n"
    )
    for command in (["check"], ["run", "--in-process"]):
        for model, count in (("net.py:with_norm", 1), ("mlp", 0)):
            status, printed, _ = call(capsys, *command, f"model={model}", "schedule=[]", *QUICK)
            assert status == 0
            assert printed.count("variances of clients are averaged like weights") == count, (command, model)


def test_what_clients_are_tested_on_is_said_before_and_after(capsys):
    """Under label skew, by default their own held-out samples; the whole test set is worth a warning."""
    skewed = ["data.shift.kind=none", "data.partition={kind: dirichlet, clients: 5}", "schedule=[]", *QUICK]
    held_out = "each client is tested on its own samples that are held out from training (data.test.view holdout)"
    _, output, _ = call(capsys, "check", "data.test.view=null", *skewed)
    assert output.count(held_out) == 1 and "warning" not in output
    _, output, _ = call(capsys, "run", "--in-process", "data.test.view=null", *skewed)
    assert output.count(held_out) == 2 and output.index(held_out) < output.index("results after")
    _, output, _ = call(capsys, "check", "data.test.view=cluster", *skewed)
    assert "each client is tested on the whole test set (data.test.view cluster)" in output
    assert "warning: data.test.view cluster tests clients on all classes alike" in output
    _, output, _ = call(capsys, "check")
    assert "each client is tested on the test set of its true group (data.test.view cluster)" in output


def test_more_clusters_than_clients_are_worth_a_warning(capsys):
    _, output, _ = call(capsys, "check", "methods=[{ifca: {num_clusters: 40}}, {fesem: {num_clusters: 41}}, pacfl]")
    assert output.count("warning") == 1
    assert "warning: fesem.num_clusters (41) is more than the 40 clients: some clusters stay empty" in output


def test_a_method_warns_of_what_it_cannot_do_with_this_cohort(capsys):
    """FedSoft draws fewer clients for a centre than take part; FedGWC splits if at most half of the clients do."""
    methods = "methods=[{fedsoft: {clients_per_cluster: %s}}, {fedsoft: {num_clusters: 1, label: one}}, fedgwc]"
    twelve = "data.partition.clients=12"
    for command in (["check"], ["run", "--in-process", *QUICK]):
        _, output, _ = call(capsys, *command, methods % 12, twelve, "schedule=[]", "cohort.fraction=1")
        output = " ".join(output.split())
        assert output.count("warning") == 2, output
        assert "warning: fedsoft: clients_per_cluster (12) is not below the 12 clients of a round" in output
        assert "warning: fedgwc: no cluster splits with more than half of the clients in a round: 12 of 12" in output
    for fewer in (5, "null"):
        _, output, _ = call(capsys, "check", methods % fewer, twelve, "schedule=[]", "cohort.fraction=0.5")
        assert "warning" not in output


def test_an_output_that_cannot_be_written_is_worth_a_warning(capsys):
    Path("file").write_text("")
    _, output, _ = call(capsys, "check", "output=file/runs")
    here = Path.cwd()
    assert f"warning: output: {here}/file/runs cannot be written: {here}/file is not a folder" in " ".join(
        output.split()
    )
    _, output, _ = call(capsys, "check", "output=new/runs")
    assert "warning" not in output and not Path("new").exists()


def test_training_that_diverges_is_worth_a_warning_and_a_status(capsys):
    status, output, error = call(capsys, "run", "--in-process", "--run-dir", "far", "local.lr=100", *QUICK)
    (warning,) = [line for line in output.splitlines() if "were rejected as not finite or not valid" in line]
    count, total = map(int, re.match(r"warning: (\d+) of (\d+) updates of clients were rejected", warning).groups())
    assert 1 < count < total and "(fedavg, " in warning and "lower local.lr" in warning
    found = json.loads(call(capsys, "status", "--json", "far")[1])
    assert found["rejected"] == {"fedavg": count} and found["updates"] == {"fedavg": total}
    why = f"{count} of {total} updates were rejected as not finite or not valid"
    assert status == 3 and error.startswith(f"error: fedavg diverged: {why};") and found["diverged"] == {"fedavg": why}
    assert f"fedavg {count} of {total}" in call(capsys, "status", "far")[1]


def test_a_run_without_a_valid_update_at_its_end_has_an_exit_status_of_its_own(capsys):
    few = ["data.partition.clients=5", "schedule=[]", "cohort.fraction=1"]
    diverging = ["local.lr=100", "local.momentum=0.99", "local.epochs=6", "local.batch_size=10"]
    status, output, error = call(capsys, "run", "--in-process", "--run-dir", "far", *few, *QUICK, *diverging)
    why = "all 5 updates of round 1, the last one, were rejected as not finite or not valid"
    assert status == 3 and error.startswith(f"error: fedavg diverged: {why}; lower local.lr") and "results" in output
    found = json.loads(call(capsys, "status", "--json", "far")[1])
    assert found["state"] == "finished" and found["diverged"] == {"fedavg": why}
    assert call(capsys, "resume", "far")[0] == 0  # nothing was left to do


def test_a_stopped_run_shows_what_it_has_and_goes_on_in_this_process(capsys, monkeypatch):
    def stop(*_):
        raise RunStopped("stopped after round 1 of fedavg, as asked")

    two = ["--in-process", "--run-dir", "here", *QUICK, "rounds=2"]
    with monkeypatch.context() as patched:
        patched.setattr("cfl_ray.cli.progress.Display.round", stop)
        main(["run", *two])
    printed = capsys.readouterr().out
    assert "results after the last round" in printed
    assert "note: fedavg ended after round 1 of 2, as asked\n" in printed
    assert printed.endswith(f"go on with: cfl-ray resume {shlex.quote(str(Path('here').absolute()))} --in-process\n")
    assert json.loads(call(capsys, "status", "--json", "here")[1])["early"] == {
        "fedavg": "after round 1 of 2, as asked"
    }
    assert "fedavg after round 1 of 2, as asked" in call(capsys, "status", "here")[1]
    monkeypatch.setattr("cfl_ray.runtime.on_ray.ray_session.RaySession.__init__", None)  # which would fail
    status, printed, _ = call(capsys, "resume", "here", "--in-process")
    assert status == 0 and "hosts: this process" in printed and "ended" not in printed


def test_a_private_run_that_ends_at_its_budget_says_so(capsys):
    pytest.importorskip("dp_accounting")
    private = ["rounds=4", "cohort.sampling=poisson", "privacy={noise_multiplier: 1.0, noise: reproducible}"]
    plan = prepare(load(None, [*QUICK, *private])).privacy["fedavg"]
    epsilon = plan.epsilon(plan.after(2))
    target = f"privacy.target_epsilon={(epsilon + plan.epsilon(plan.after(3))) / 2}"
    status, printed, _ = call(capsys, "run", "--in-process", "--run-dir", "here", *QUICK, *private, target)
    assert status == 0 and re.search(rf"epsilon.*\n(.*\n)+.*fedavg.* {epsilon:.3f}│", printed)
    why = f"after round 2 of 4, at epsilon {epsilon:.4g}: the next round would exceed privacy.target_epsilon"
    assert f"note: fedavg ended {why}\n" in printed
    found = json.loads(call(capsys, "status", "--json", "here")[1])
    assert found["early"] == {"fedavg": why} and found["metrics"]["epsilon"] == pytest.approx(epsilon)
    printed = call(capsys, "status", "here")[1]
    assert "ended early" in printed and f"{epsilon:.3f}" in printed


SECTIONS = {
    "clock=null": "clock: expected a section of keys, e.g. {kind: none}, got null",
    "clock=constant": "clock: expected a section of keys, e.g. {kind: constant}, got 'constant'",
    "privacy=8": "privacy: expected a section of keys, e.g. {target_epsilon: 8}, got 8",
    "cohort=5": "cohort: expected a section of keys, e.g. {clients: 5}, got 5",
    "data.shift=rotated": "data.shift: expected a section of keys, e.g. {kind: rotated}, got 'rotated'",
    "start=x": "start: expected a section of keys, e.g. {noise: ...}, got 'x'",
}


@pytest.mark.parametrize("override", SECTIONS)
def test_a_value_in_place_of_a_section_is_answered_by_one_that_can_stand_there(override, capsys):
    where = override.partition("=")[0]
    status, _, message = call(capsys, "check", override)
    assert (status, message) == (2, f"error: {SECTIONS[override]}; its keys: cfl-ray config {where}\n")
    assert call(capsys, "config", where)[0] == 0
    given = re.search(r"e\.g\. (\{.*\}), got", message)[1]
    assert "..." in given or load(None, [f"{where}={given}"])


def test_a_clustering_into_single_clients_is_worth_a_warning(capsys):
    alone = ["methods=[{fedclust: {threshold: 0.0}}]", "data.partition.clients=6", "schedule=[]", *QUICK[1:]]
    _, output, _ = call(capsys, "run", "--in-process", *alone)
    assert "warning: fedclust: 6 clusters of 6 clients: every client trains alone" in output
    assert "warning" not in call(capsys, "run", "--in-process", *QUICK)[1]
