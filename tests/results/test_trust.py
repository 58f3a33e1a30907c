"""Run directories of other users: nothing that they name is imported or connected to without trust."""

import json
import os
import shutil
import sys

import pytest
from commands import status_of

from cfl_ray import compare_runs, load_run, resume, simulate
from cfl_ray.cli import live_client
from cfl_ray.config import RuntimeConfig, TrackingConfig, load
from cfl_ray.config.study import load_study
from cfl_ray.errors import ConfigError
from cfl_ray.results import trust
from cfl_ray.results.trust import UntrustedError, check_config, load_record, load_study_record, sign_study
from cfl_ray.security.credentials import remember_credentials

CODE = """
from pathlib import Path
Path(__file__).with_name("was_imported").touch()

def weigh(updates_MP, weight_M):
    return weight_M

def clip(x, y, **options):
    return x, y

def score(outputs, targets):
    return (outputs.argmax(-1) == targets).float().mean()
"""


@pytest.fixture
def own(experiment, tmp_path, monkeypatch):
    """The directory of this user's finished run with a metric of its own file; what imported the file is forgotten."""
    monkeypatch.setenv("CFL_RAY_HOME", str(tmp_path / "home"))
    (tmp_path / "mine_of_trust.py").write_text(CODE)
    metric = f"{tmp_path / 'mine_of_trust.py'}:score"
    simulate(experiment(rounds=1, evaluation={"metrics": [metric]}), tmp_path / "run")
    (tmp_path / "was_imported").unlink()
    return tmp_path / "run"


@pytest.fixture
def imports(tmp_path):
    """Returns a function: whether the user's file was imported since it was called last."""
    for name in [name for name in sys.modules if name.endswith("_of_trust")]:
        del sys.modules[name]
    mark = tmp_path / "was_imported"

    def since() -> bool:
        found = mark.exists()
        mark.unlink(missing_ok=True)
        return found

    return since


def test_nothing_changes_for_own_runs_also_moved_ones(own, tmp_path):
    moved = shutil.move(own, tmp_path / "moved")
    assert load_record(moved).evaluation.metrics == load(moved / "config.yaml").evaluation.metrics
    load_run(moved)["ditto"].model(0)
    assert (status_of("export", moved, "--cluster", 0, "-o", tmp_path / "model.pt"), status_of("resume", moved)) == (
        0,
        0,
    )
    assert (status_of("table", moved), status_of("status", moved)) == (0, 0)
    assert (moved / "signature.json").stat().st_mode & 0o777 == 0o600


def test_a_run_of_another_user_or_machine_imports_nothing(own, imports, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CFL_RAY_HOME", str(tmp_path / "another home"))
    message = r"run was not made by you on this machine, and its config.yaml names the code in .*mine_of_trust.py"
    for act in (
        lambda: load_run(own),
        lambda: resume(own, on_ray=False),
        lambda: compare_runs([own]),
        lambda: load_record(own, connects=False),
    ):
        with pytest.raises(UntrustedError, match=message):
            act()
    for command in (("export", own, "-o", tmp_path / "m.pt"), ("table", own), ("resume", own)):
        assert status_of(*command) == 2
        assert "say --trust" in capsys.readouterr().err
    assert status_of("status", own) == 0
    assert not imports()


def test_a_copy_of_a_run_is_not_trusted_nor_a_copied_signature(own, imports, tmp_path):
    shutil.copytree(own, tmp_path / "copy")
    with pytest.raises(UntrustedError, match=r"signature\.json is of another folder, of another key or of an earlier"):
        load_record(tmp_path / "copy")
    with pytest.raises(UntrustedError):
        load_run(tmp_path / "copy")
    assert not imports()


def test_a_signature_of_an_earlier_version_says_what_to_do(own):
    """It held for any folder."""
    values = json.loads((own / "signature.json").read_text())
    (own / "signature.json").write_text(json.dumps(values | {"signature": "0" * 64}))
    with pytest.raises(UntrustedError, match="say --trust .* of an earlier version$"):
        resume(own, on_ray=False)
    load_record(own, trust=True)


def test_trust_is_an_option_and_lasts_where_the_run_goes_on(own, imports, tmp_path, monkeypatch):
    monkeypatch.setenv("CFL_RAY_HOME", str(tmp_path / "another home"))
    assert status_of("export", own, "--cluster", 0, "-o", tmp_path / "m.pt", "--trust") == 0 and imports()
    for command in (
        ("table", own),
        ("export", own, "-o", tmp_path / "m.pt"),
        ("report", own, "-o", tmp_path / "r.html"),
    ):
        assert status_of(*command) == 0, "it was trusted once"
    (tmp_path / "mine_of_trust.py").write_text(CODE + "# edited")
    assert status_of("table", own) == 2, "not its present version"
    assert (status_of("resume", "--trust", own), status_of("table", own)) == (0, 0)
    (own / "ditto/end.json").unlink()
    (own / "end.json").unlink()
    resume(own, on_ray=False, trust=True)
    assert load_run(own).methods


def test_on_a_terminal_the_user_is_asked(own, imports, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CFL_RAY_HOME", str(tmp_path / "another home"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    answers = iter([False, True])
    monkeypatch.setattr("typer.confirm", lambda text, err: next(answers))
    assert status_of("table", own) == 2 and not imports()
    assert "warning: " in capsys.readouterr().err
    assert status_of("table", own) == 0


@pytest.mark.parametrize("command", [("table",), ("report", "-o", "-"), ("figure",)])
def test_a_yes_to_one_run_is_none_to_the_next(command, own, imports, tmp_path, monkeypatch):
    """Each run that is not trusted is asked about, before any of them is read."""
    shutil.copytree(own, tmp_path / "other")
    monkeypatch.setenv("CFL_RAY_HOME", str(tmp_path / "another home"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    answers = iter([True, False])
    monkeypatch.setattr("typer.confirm", lambda text, err: next(answers))
    assert status_of(*command, own, tmp_path / "other") == 2 and not imports()
    assert list(answers) == []


def test_a_yes_to_one_run_is_none_to_those_of_a_folder(own, imports, tmp_path, monkeypatch):
    (tmp_path / "above").mkdir()
    shutil.copytree(own, tmp_path / "above/other")
    monkeypatch.setenv("CFL_RAY_HOME", str(tmp_path / "another home"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda text, err: True)
    assert status_of("report", own, tmp_path / "above", "-o", tmp_path / "r.html") == 2
    assert status_of("report", tmp_path / "above/other", "-o", tmp_path / "r.html") == 0


def test_a_yes_holds_for_the_command_if_it_cannot_be_kept(own, imports, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CFL_RAY_HOME", str(tmp_path / "file/home"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda text, err: True)
    monkeypatch.setattr(trust, "_of_this_process", {})
    for command in (("table", own), ("export", own, "--cluster", 0, "-o", tmp_path / "m.pt"), ("resume", own)):
        trust._of_this_process.clear()
        assert status_of(*command) == 0


def test_what_was_not_signed_is_not_trusted(own, tmp_path):
    """Another file in the record, other names in the signature, and nonsense in its place."""
    (tmp_path / "other_of_trust.py").write_text(CODE)
    record, signature = (own / "config.yaml").read_text(), (own / "signature.json").read_text()
    (own / "config.yaml").write_text(record.replace("mine_of_trust.py", "other_of_trust.py"))
    for text in (signature, signature.replace("mine_of_trust.py", "other_of_trust.py"), "[]", "{", '{"names": 3}'):
        (own / "signature.json").write_text(text)
        with pytest.raises(UntrustedError, match="other_of_trust.py"):
            load_run(own)


@pytest.mark.parametrize("place", ["methods", "model", "task", "aggregation", "source", "tracker", "schedule"])
def test_files_are_found_wherever_a_record_names_them(run_dir, tmp_path, place):
    file = f"{tmp_path / 'any_of_trust.py'}:Name"
    (tmp_path / "any_of_trust.py").write_text("raise SystemExit")
    overrides = {
        "methods": f"methods=['{file}']",
        "model": f"model.name={file}",
        "task": f"task={{loss: '{file}'}}",
        "aggregation": f"methods=[{{fedavg: {{aggregation: {{'{file}': {{}}}}}}}}]",
        "source": f"data.source={file}",
        "tracker": f"tracking.trackers=[{{'{file}': {{}}}}]",
        "schedule": f"local.schedule={{'{file}': {{}}}}",
    }
    (run_dir / "config.yaml").write_text(load(None, [overrides[place]]).to_record())
    with pytest.raises(UntrustedError, match="any_of_trust.py"):
        load_run(run_dir)


def test_a_cluster_and_a_server_of_a_stranger_are_not_connected_to(run_dir, monkeypatch):
    record = load(None, ["runtime.address=ray://6.6.6.6:1", "tracking.uri=http://6.6.6.6"]).to_record()
    (run_dir / "config.yaml").write_text(record)
    named = "names the Ray cluster ray://6.6.6.6:1, MLflow at http://6.6.6.6"
    with pytest.raises(UntrustedError, match=named):
        load_record(run_dir)
    assert load_record(run_dir, connects=False).methods and load_record(run_dir, trust=True).methods
    monkeypatch.setenv("CFL_RAY_HOME", str(run_dir / "another home"))  # which has no consent
    trust.sign_record(run_dir, load(None))  # all but the servers
    with pytest.raises(UntrustedError, match=named):
        load_record(run_dir)
    monkeypatch.setenv("RAY_ADDRESS", "ray://6.6.6.6:1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://6.6.6.6")
    load_record(run_dir)  # they are the user's own


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("data.shards=s3://stranger/shards", "data.shards s3://stranger/shards"),
        ("data.root=elsewhere", "data.root elsewhere"),
        ("clock={kind: trace, file: elsewhere}", "clock.file elsewhere"),
        ("output=/somewhere", "output /somewhere"),
        ("tracking.trackers=[{csv: {file: ../../x.csv}}]", r"tracking.trackers.csv.file \.\./\.\./x.csv"),
        ("tracking.trackers=[wandb]", "tracking.trackers wandb"),
        ("task={loss: 'os.path:join'}", "the code in os.path:join"),
    ],
)
def test_nothing_outside_the_directory_is_touched_without_trust(run_dir, override, named):
    (run_dir / "config.yaml").write_text(load(None, [override]).to_yaml())
    for act in (lambda: load_record(run_dir), lambda: resume(run_dir, on_ray=False)):
        with pytest.raises(UntrustedError, match=named):
            act()
    assert load_record(run_dir, trust=True).methods


def test_models_of_a_run_of_another_user_need_trust(run_dir, tmp_path, monkeypatch):
    """Reading the records does not; models need the data, wherever the record says that they are."""
    monkeypatch.setenv("CFL_RAY_HOME", str(tmp_path / "another home"))
    assert load_run(run_dir)["ditto"].records
    with pytest.raises(UntrustedError, match="names output"):
        load_run(run_dir)["ditto"].model(0)
    load_run(run_dir, trust=True)["ditto"].model(0)


def test_links_are_not_followed(run_dir, tmp_path):
    """Neither by commands that read nor by one that would empty the file that a link leads to."""
    (tmp_path / "secret").write_text("secret")
    log = run_dir / "ditto" / "metrics.jsonl"
    log.unlink()
    log.symlink_to(tmp_path / "secret")
    for act in (lambda: load_run(run_dir), lambda: resume(run_dir, on_ray=False), lambda: live_client.status(run_dir)):
        with pytest.raises(UntrustedError, match="the link ditto/metrics.jsonl -> .*secret"):
            act()
    assert (tmp_path / "secret").read_text() == "secret"


def test_a_key_of_the_environment_is_known_with_another_home(experiment, tmp_path, monkeypatch):
    """A pod that takes over has the key as a secret, and a home of its own; the config may name an MLflow server."""
    monkeypatch.setenv("CFL_RAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("CFL_RAY_KEY", "0123456789abcdef")
    uri = f"sqlite:///{tmp_path}/results.db"
    run = tmp_path / "run"
    simulate(experiment(rounds=1, tracking={"enabled": True, "uri": uri, "report": False}), run)
    (run / "end.json").unlink()
    (run / "ditto" / "end.json").unlink()
    monkeypatch.setenv("CFL_RAY_HOME", str(tmp_path / "another home"))
    monkeypatch.setenv("CFL_RAY_KEY", "another key, as long")
    with pytest.raises(UntrustedError, match="MLflow at sqlite.*CFL_RAY_KEY"):
        resume(run, on_ray=False)
    monkeypatch.delenv("CFL_RAY_KEY")
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    monkeypatch.setenv("CFL_RAY_KEY_FILE", str(tmp_path / "secret"))
    assert resume(run, on_ray=False)["ditto"].records
    (tmp_path / "secret").write_text("short")
    with pytest.raises(ConfigError, match="CFL_RAY_KEY_FILE: a key has at least 16 characters, got 5"):
        load_record(run)


class TestCheck:
    def test_imports_the_users_files(self, tmp_path, imports, capsys):
        (tmp_path / "checked_of_trust.py").write_text(CODE)
        assert status_of("check", f"evaluation.metrics=['{tmp_path / 'checked_of_trust.py'}:score']", "rounds=1") == 0
        assert imports()
        assert status_of("check", "--help") == 0
        assert "imports the Python files that the config names" in " ".join(capsys.readouterr().out.split())


class TestFilesOfAnotherUser:
    """One rule for the commands that take a config: code is the user's, or is trusted once."""

    @pytest.fixture
    def foreign(self, tmp_path, imports, monkeypatch):
        """A file of another user, with a config and a study that name it, not below the working directory."""
        monkeypatch.setenv("CFL_RAY_HOME", str(tmp_path / "home"))
        (tmp_path / "theirs").mkdir()
        (tmp_path / "here").mkdir()
        file = tmp_path / "theirs/foreign_of_trust.py"
        file.write_text(CODE.replace("__file__).with_name", "__file__).parents[1].joinpath"))
        keys = "{evaluation: {metrics: ['foreign_of_trust.py:score']}, rounds: 1, methods: [fedavg], "
        keys += f"data: {{partition: {{clients: 4}}}}, tracking: {{enabled: false}}, output: '{tmp_path}/out'}}\n"
        (tmp_path / "theirs/a.yaml").write_text(keys)
        (tmp_path / "theirs/study.yaml").write_text(f"name: one\nexperiment: {keys}")
        monkeypatch.chdir(tmp_path / "here")
        monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
        monkeypatch.setattr(trust, "_ROOT", -1)
        return file

    @pytest.mark.parametrize(
        "command",
        [
            "check a.yaml",
            "run --in-process a.yaml",
            "prepare a.yaml",
            "check study.yaml",
            "compare --dry-run study.yaml",
        ],
    )
    def test_is_not_imported_by_any_command(self, command, foreign, imports, capsys):
        *words, config = command.split()
        assert status_of(*words, foreign.parent / config) == 2 and not imports()
        printed = capsys.readouterr().err
        assert "foreign_of_trust.py belongs to another user" in printed and "say --trust" in printed

    def test_is_trusted_once_until_it_changes(self, foreign, imports):
        config = foreign.parent / "a.yaml"
        assert (status_of("check", "--trust", config), status_of("prepare", config)) == (0, 0) and imports()
        foreign.write_text(foreign.read_text() + "# edited")
        with pytest.raises(UntrustedError, match="belongs to another user"):
            check_config(str(config), load(config))

    def test_is_the_users_below_the_working_directory_and_on_the_command_line(self, foreign, imports, monkeypatch):
        config, named = foreign.parent / "a.yaml", f"evaluation.metrics=['{foreign}:score']"
        check_config(None, load(None, [named]), [named])
        monkeypatch.chdir(foreign.parent)
        check_config(str(config), load(config))


def test_the_config_of_a_run_is_trusted_as_the_run(own, imports, tmp_path, monkeypatch, capsys):
    """`run RUN/config.yaml` imports what `resume RUN` would."""
    monkeypatch.setenv("CFL_RAY_HOME", str(tmp_path / "another home"))
    for command in (("run", "--in-process"), ("check",), ("prepare",)):
        assert status_of(*command, own / "config.yaml") == 2 and not imports()
        assert "run was not made by you on this machine, and its config.yaml names" in capsys.readouterr().err
    extending = (
        "run",
        "--in-process",
        "--extend",
        own,
        tmp_path / "mine.yaml",
        "rounds=2",
        "--run-dir",
        tmp_path / "l",
    )
    shutil.copyfile(own / "config.yaml", tmp_path / "mine.yaml")
    assert status_of(*extending) == 2 and "was not made by you" in capsys.readouterr().err
    assert status_of("check", "--trust", own / "config.yaml") == 0 and imports()


class TestStudies:
    """The folder of a study is trusted like that of a run."""

    @pytest.fixture
    def study(self, tmp_path, monkeypatch):
        monkeypatch.setenv("CFL_RAY_HOME", str(tmp_path / "home"))
        (tmp_path / "mine_of_trust.py").write_text(CODE)
        folder = tmp_path / "study"
        folder.mkdir()
        (folder / "study.yaml").write_text(
            "name: one\nexperiment:\n  methods: [fedavg]\n"
            f"  evaluation: {{metrics: ['{tmp_path}/mine_of_trust.py:score']}}\n"
            "settings: {there: {runtime: {address: 'ray://elsewhere:10001'}}}\n"
        )
        return folder

    def test_of_others_name_code_and_servers_that_need_trust(self, study, imports, capsys):
        imports()
        with pytest.raises(UntrustedError, match=r"mine_of_trust.py, the Ray cluster ray://elsewhere:10001; what it"):
            load_study_record(study)
        assert status_of("resume", study) == 2 and "--trust" in capsys.readouterr().err
        assert not imports(), "a file of an untrusted study was imported"
        assert load_study_record(study, trust=True).name == "one"

    def test_a_cluster_of_the_environment_does_not_take_the_place_of_theirs(self, study, monkeypatch):
        """A study connects to the cluster that it names, unlike a run that is resumed."""
        monkeypatch.setenv("RAY_ADDRESS", "mine:6379")
        with pytest.raises(UntrustedError, match="the Ray cluster ray://elsewhere:10001"):
            load_study_record(study)

    def test_servers_among_the_values_of_a_sweep_need_trust_too(self, study):
        with (study / "study.yaml").open("a") as file:
            file.write("sweep: {parameters: {runtime.address: ['ray://swept:1'], local.lr: [0.1]}}\n")
        with pytest.raises(UntrustedError, match=r"runtime\.address ray://swept:1; what it"):
            load_study_record(study)

    def test_of_this_user_are_signed(self, study):
        sign_study(study, load_study(study / "study.yaml"))
        assert load_study_record(study).name == "one"
        text = (study / "study.yaml").read_text()
        (study / "study.yaml").write_text(text.replace("elsewhere", "another"))
        with pytest.raises(UntrustedError, match="ray://another"):
            load_study_record(study)

    def test_have_no_credentials_in_their_record(self, tmp_path, monkeypatch):
        monkeypatch.setenv("CFL_RAY_HOME", str(tmp_path / "home"))
        given = tmp_path / "given.yaml"
        given.write_text("name: one\nexperiment: {tracking: {uri: 'https://me:pass%2Fword@mlflow.example'}}\n")
        study = load_study(given)
        assert "pass" not in study.to_yaml(credentials=False) and "mlflow.example" in study.to_yaml(credentials=False)
        remember_credentials(study.model_dump(mode="json", by_alias=True))
        (tmp_path / "study.yaml").write_text(study.to_yaml(credentials=False))
        assert load_study(tmp_path / "study.yaml").experiment["tracking"] == study.experiment["tracking"]


def test_a_run_is_signed_with_servers_that_the_environment_names_too(own, monkeypatch):
    """Later, or on another cluster, the environment is another one."""
    named = load(own / "config.yaml").model_copy(
        update={"runtime": RuntimeConfig(address="head:6379"), "tracking": TrackingConfig(uri="https://mlflow.example")}
    )
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://mlflow.example")
    trust.sign_record(own, named)
    (own / "config.yaml").write_text(named.to_record())
    for name in ("RAY_ADDRESS", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name)
    assert load_record(own).runtime.address == "head:6379"


def test_a_cluster_of_the_environment_takes_the_place_of_that_of_a_record(own, monkeypatch):
    named = load(own / "config.yaml").model_copy(update={"runtime": RuntimeConfig(address="elsewhere:6379")})
    (own / "config.yaml").write_text(named.to_record())
    with pytest.raises(UntrustedError, match="the Ray cluster elsewhere:6379"):
        load_record(own)
    monkeypatch.setenv("RAY_ADDRESS", "mine:6379")
    assert load_record(own).runtime.address == "elsewhere:6379", "it is not connected to"
