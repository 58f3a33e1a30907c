"""Studies from start to end, started again, changed, and refused."""

import errno
import io
import json
import re
import shlex
import shutil
from pathlib import Path

import pandas as pd
import pytest
from studies import InlinePool, figures_of, files_of

import cfl_ray
from cfl_ray.errors import ConfigError, Interrupted, RunError
from cfl_ray.lifecycle import recorder
from cfl_ray.results import comparison
from cfl_ray.results.comparison import by_experiment, compare_runs, format_table
from cfl_ray.results.recorded_runs import find_runs
from cfl_ray.results.reporting import report_of
from cfl_ray.results.study_folder import run_folders
from cfl_ray.run_directory import RunDirectory
from cfl_ray.study import run, worker_pool
from cfl_ray.study.run import StudyWatcher, run_study
from cfl_ray.study.status import study_status
from cfl_ray.study.study_plan import Selection, metric_warnings, plan
from cfl_ray.tracking import read_end, read_info, read_records

STUDY = RunDirectory.study.name

EXPERIMENTS = Path(__file__).parents[2] / "jobs" / "experiments"
ALL_RUNS = [f"all, {method}, seed {seed}" for seed in (0, 1) for method in ("fedavg", "two")]


class Notes(StudyWatcher):
    """Keeps what a study reports."""

    def __init__(self):
        self.warnings = []

    def warn(self, text):
        self.warnings.append(text)


def test_processes_of_their_own_give_the_same_figures(study, tmp_path, inline, monkeypatch):
    """One process after another run in it, and all runs in this process."""
    here = run_study(study(seeds=[0]), tmp_path / "here")
    monkeypatch.setattr(run, "WorkerPool", worker_pool.WorkerPool)
    other = run_study(study(seeds=[0]), tmp_path / "other", at_once=1)
    assert not here.failed and not other.failed
    assert len(figures_of(tmp_path / "here")) == 2 and figures_of(tmp_path / "here") == figures_of(tmp_path / "other")


def test_what_is_finished_is_not_run_again(study, inline):
    first = run_study(study())
    before, done = files_of(first.root), list(inline)
    assert done == ALL_RUNS and (first.root / "study.yaml").stat().st_mode & 0o777 == 0o600
    again = run_study(study())
    assert inline == done and files_of(first.root) == before
    pd.testing.assert_frame_equal(first.to_frame(), again.to_frame())


def test_a_longer_study_begins_with_the_rounds_of_a_shorter_one(study, inline, tmp_path):
    """One run is finished there, one has stopped, and two have not begun."""
    longer = {"experiment": {"rounds": 3}}
    whole = run_study(study(**longer), tmp_path / "whole")
    run_study(study(), tmp_path / "short", Selection(seeds=[0]))
    (tmp_path / "short/all/two/seed-0/ifca/end.json").unlink()
    found = run_study(study(**longer), tmp_path / "long", extend=tmp_path / "short")
    assert not found.failed and figures_of(found.root) == figures_of(whole.root)
    names = {"fedavg": "fedavg", "two": "ifca"}
    began = {
        run: read_info(run / names[label]).params.get("session.extends") for _, label, run in run_folders(found.root)
    }
    earlier = {run: tmp_path / "short" / run.relative_to(found.root) for run in began}
    assert began == {run: str(earlier[run]) if "seed-0" in run.name else None for run in began}


def test_what_a_study_cannot_extend_is_refused(study, inline, tmp_path):
    run_study(study(seeds=[0]), tmp_path / "short")
    before = list(inline)
    longer = study(seeds=[0], experiment={"rounds": 3})
    with pytest.raises(ConfigError, match=r"another folder for the study, .* begin with the 2 rounds .*\(--extend\)"):
        run_study(longer, tmp_path / "short")
    with pytest.raises(ConfigError, match="extend: .*short is this study's own folder"):
        run_study(longer, tmp_path / "short", extend=tmp_path / "short")
    with pytest.raises(ConfigError, match="extend: .*nothing holds no study"):
        run_study(longer, tmp_path / "long", extend=tmp_path / "nothing")
    with pytest.raises(
        ConfigError, match="extend: .*short has none of the runs of this study, such as all, fedavg, seed 7"
    ):
        run_study(study(seeds=[7], experiment={"rounds": 3}), tmp_path / "long", extend=tmp_path / "short")
    with pytest.raises(ConfigError, match=r"extend: only `rounds` may differ .*local.lr \(0.1 there, 0.5 here\)"):
        other = {"rounds": 3, "local": {"epochs": 1, "batch_size": 10, "lr": 0.5}}
        run_study(study(seeds=[0], experiment=other), tmp_path / "long", extend=tmp_path / "short")
    assert inline == before and not (tmp_path / "long").exists()


def test_the_command_that_continues_a_longer_study(study, inline, tmp_path, monkeypatch):
    run_study(study(seeds=[0]), tmp_path / "short")

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(InlinePool, "run", stop)
    message = "cfl-ray compare .*long/study.yaml --folder=.*long --extend=.*short"
    with pytest.raises(Interrupted, match=message):
        run_study(study(seeds=[0], experiment={"rounds": 3}), tmp_path / "long", extend=tmp_path / "short")


def test_a_study_whose_tables_cannot_be_written_has_failed(study, inline, monkeypatch):
    """A full disk: the runs are kept, the end is on record, and the next start writes the tables."""
    with monkeypatch.context() as full:

        def no_space(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        full.setattr(comparison, "format_table", no_space)
        with pytest.raises(RunError, match="small: No space left on device; go on with: cfl-ray resume .*small"):
            run_study(study(seeds=[0]))
    root = Path(study().experiment["output"]) / study().name
    assert read_end(root).status == "FAILED" and len(inline) == 2
    assert not run_study(study(seeds=[0])).failed and len(inline) == 2
    assert read_end(root).status == "FINISHED" and (root / "artifacts" / "table.md").is_file()


def test_a_changed_study_runs_what_is_new(study, inline):
    root = run_study(study()).root
    before = files_of(root)
    inline.clear()
    methods = ["fedavg", "local", {"ifca": {"num_clusters": 2, "label": "two", "local": {"momentum": 0.5}}}]
    run_study(study(seeds=[0, 1, 2], experiment={"methods": methods}))
    assert sorted(inline) == sorted([f"all, local, seed {seed}" for seed in (0, 1, 2)] + [
        f"all, {method}, seed 2" for method in ("fedavg", "two")
    ])  # fmt: skip
    assert {file: time for file, time in files_of(root).items() if file in before} == before
    assert [(method, path.name) for _, method, path in run_folders(root)] == [
        (method, f"seed-{seed}") for method in ("fedavg", "local", "two") for seed in (0, 1, 2)
    ], "in the order of the study"


def test_runs_of_another_config_are_refused(study, inline):
    root = run_study(study(seeds=[0])).root
    before = files_of(root)
    with pytest.raises(
        ConfigError, match=r"all/fedavg/seed-0 belongs to another config: rounds .* move it away, or choose"
    ):
        run_study(study(seeds=[0], experiment={"rounds": 3}))
    methods = ["fedavg", {"ifca": {"num_clusters": 3, "label": "two", "local": {"momentum": 0.5}}}]
    shown = r"methods \(.* 2.* there, .* 3.* here\); .*or give the changed method a label of its own"
    with pytest.raises(ConfigError, match=shown):
        run_study(study(seeds=[0], experiment={"methods": methods}))
    assert files_of(root) == before
    with pytest.raises(ConfigError, match="is the folder of study 'small', this one is 'other'"):
        run_study(study(name="other"), root)
    with pytest.raises(ConfigError, match="holds a run; choose another folder"):
        run_study(study(name="other"), root / "all" / "fedavg" / "seed-0")


def test_a_selection_and_the_rest_later(study, inline):
    results = run_study(study(), only=Selection(methods=["two"], seeds=[1]))
    assert inline == ["all, two, seed 1"]
    found = study_status(results.root)
    assert (found.state, found.runs, found.finished, found.left) == ("stopped", 4, 1, 3)
    run_study(results.root / STUDY, results.root)
    assert sorted(inline) == sorted(ALL_RUNS)
    assert study_status(results.root).state == "finished"


def test_a_run_that_fails_does_not_end_the_others(study, inline, tmp_path, caplog):
    (tmp_path / "rule.py").write_text(
        "class Rule:\n    def weigh(self, squared_nn, weight_n):\n        if len(weight_n) == 5:\n"
        "            raise ValueError('five clients')\n        return weight_n\n"
    )
    methods = [{"fedavg": {"aggregation": f"{tmp_path}/rule.py:Rule"}}, "local"]
    changes = {"methods": methods, "cohort": {"fraction": 1.0}}
    five = {"five": {"data": {"partition": {"clients": 5}}}, "six": {}}
    changes["schedule"] = []
    results = run_study(study(experiment=changes, settings=five, seeds=[0]))
    assert inline == [f"{s}, {m}, seed 0" for s in ("five", "six") for m in ("fedavg", "local")]
    (failed,) = results.failed
    assert failed.status == "failed" and failed.run.name == "five, fedavg, seed 0" and "five clients" in failed.reason
    assert f"five, fedavg, seed 0 failed: {failed.reason}" in caplog.messages
    found = study_status(results.root)
    assert found.finished == 3 and list(found.failed) == ["five, fedavg, seed 0"]
    assert "five clients" in found.failed["five, fedavg, seed 0"]
    text = (results.root / "artifacts" / "table.md").read_text()
    assert text.endswith(
        f"Not in the table: 1 of the 4 runs of {results.root}, which are not finished, 1 failed; see cfl-ray status "
        f"{results.root}.\n"
    )
    (note,) = [note for note in report_of(find_runs([results.root], trust=True)).notes if "Not shown" in note]
    assert str(results.root / "five" / "fedavg" / "seed-0") in note


def test_an_unexpected_error_is_kept_with_its_traceback(study, inline, monkeypatch):
    def broken(*_):
        raise KeyError("surprise")

    with monkeypatch.context() as patch:
        patch.setattr(worker_pool, "run_of_study", broken)
        results = run_study(study(seeds=[0]))
    assert [outcome.reason for outcome in results.failed] == ["KeyError: 'surprise'"] * 2
    file = results.root / "all" / "fedavg" / "seed-0" / "failure.txt"
    assert "Traceback" in file.read_text() and "in broken" in file.read_text()
    assert not run_study(study(seeds=[0])).failed and not file.exists(), "tried again"


def test_an_interrupted_study_names_the_command_that_goes_on(study, inline, tmp_path):
    def interrupt(self, outcome):
        raise KeyboardInterrupt

    class Impatient(StudyWatcher):
        ended = interrupt

    resume = shlex.join(["cfl-ray", "resume", str(tmp_path / "small")])
    with pytest.raises(Interrupted, match=f"go on with: {re.escape(resume)}$"):
        run_study(study(seeds=[0]), watcher=Impatient())
    assert len(inline) == 1 and study_status(tmp_path / "small").next == resume
    again = shlex.join(["compare", f"{tmp_path}/small/study.yaml", f"--folder={tmp_path}/small", "--method", "two"])
    with pytest.raises(Interrupted, match=re.escape(again)):
        run_study(study(seeds=[0]), watcher=Impatient(), only=Selection(methods=["two"]))
    run_study(tmp_path / "small" / STUDY, tmp_path / "small")
    run_study(study(seeds=[0]), tmp_path / "whole")
    assert figures_of(tmp_path / "small") == figures_of(tmp_path / "whole")


def test_two_processes_on_one_study(study, inline, monkeypatch):
    root = run_study(study(seeds=[0])).root
    monkeypatch.setattr("cfl_ray.run_directory.lock._LOCK_SECONDS", 0)
    record = (root / STUDY).read_text()
    with RunDirectory(root).hold():
        assert study_status(root).state == "live"
        with pytest.raises(RunError, match="small is live already; see it with: cfl-ray status"):
            run_study(study(seeds=[0, 5]))
        assert (root / STUDY).read_text() == record, "nothing was changed"


def test_a_live_run_is_waited_for_and_then_refused(study, inline, monkeypatch):
    root = run_study(study(seeds=[0])).root
    monkeypatch.setattr(run, "END_SECONDS", -run._MORE_SECONDS)
    with (
        RunDirectory(root / "all" / "two" / "seed-0").hold(),
        pytest.raises(RunError, match="all, two, seed 0 is"),
    ):
        run_study(study())


def test_three_methods_are_ranked_over_settings_and_seeds(study, inline):
    results = run_study(study(experiment={"methods": ["fedavg", "local", "ditto"]}))
    text = (results.root / "artifacts" / "table.md").read_text()
    assert "Mean ranks of 3 methods by accuracy over 2 pairs of setting and seed." in text
    ranks = report_of(find_runs([results.root], trust=True)).ranks
    assert ranks is not None and ranks.blocks == 2 and set(ranks.mean_rank) == {"fedavg", "local", "ditto"}


def test_tables(study, inline):
    settings = {"b": {}, "a": {"local": {"lr": 0.3}}}
    results = run_study(study(settings=settings, metrics=["accuracy", "ari"]))
    artifacts = results.root / "artifacts"
    rows = pd.read_csv(artifacts / "results.csv")
    assert list(zip(rows["setting"], rows["method"], rows["seed"])) == [
        (setting, method, seed) for setting in settings for method in ("fedavg", "two") for seed in (0, 1)
    ]
    table = compare_runs([results.root], ["accuracy", "ari"])
    assert (artifacts / "table.md").read_text() == format_table(table, "md") + "\n"
    assert list(zip(table["experiment"], table["method"])) == [(s, m) for s in settings for m in ("fedavg", "two")]
    of_first = rows[(rows["setting"] == "b") & (rows["method"] == "two")]["accuracy"]
    assert table["accuracy"][1] == pytest.approx(of_first.mean())
    assert table["accuracy_std"][1] == pytest.approx(of_first.std())
    wide = by_experiment(table, "accuracy")
    assert wide.columns.tolist() == ["method", "b", "a"] and wide["method"].tolist() == ["fedavg", "two"]
    assert wide["b"][1] == f"{of_first.mean():.3f} ± {of_first.std():.3f}"
    assert format_table(wide, "md").splitlines()[0] == "| method | b | a |"
    assert format_table(wide, "html").count("<tr") == 3
    pd.testing.assert_frame_equal(pd.read_csv(io.StringIO(format_table(wide, "csv"))), wide)


def test_a_metric_that_no_run_has_is_a_warning(study, inline):
    notes = Notes()
    results = run_study(study(seeds=[0], metrics=["acuracy"]), watcher=notes)
    before, warning = notes.warnings
    assert "'acuracy' is no metric of all methods (did you mean 'accuracy'?)" in before
    assert (
        warning == "the table is without acuracy, which no run has"
        and "accuracy" in (results.root / "artifacts/table.md").read_text()
    )


def test_settings_of_the_same_data_share_their_shards(study, inline, tmp_path):
    data = {"source": "digits", "partition": {"clients": 4, "samples": 30}}
    settings = {"a": {}, "b": {"local": {"lr": 0.5}}, "c": {"data": {"partition": {"clients": 5}}}}
    results = run_study(
        study(seeds=[0], settings=settings, experiment={"rounds": 1, "methods": ["fedavg"], "data": data})
    )
    assert not results.failed
    assert len(list((tmp_path / "shards").glob("*/manifest.json"))) == 2, "of a and b, and of c"


def test_own_files_of_a_study_that_is_resumed_elsewhere(tmp_path, monkeypatch, inline, study):
    """The study's record is enough: it is found from another folder, and its runs are the same ones."""
    import yaml

    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "net.py").write_text(
        "from torch import nn\n\ndef Net(input_shape, num_classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(8, num_classes))\n"
    )
    keys = study(experiment={"model": "net.py:Net", "output": "out"}, published=None, seeds=[0]).model_dump(mode="json")
    (tmp_path / "own" / "mine.yaml").write_text(yaml.safe_dump(keys))
    monkeypatch.chdir(tmp_path / "own")
    results = run_study("mine.yaml", only=Selection(methods=["two"]))
    assert not results.failed and results.root == tmp_path / "own" / "out" / "small"
    monkeypatch.chdir(tmp_path)
    for again in (Path("own/out/small/study.yaml"), Path("own/mine.yaml")):
        assert not run_study(again, results.root).failed
    assert inline == ["all, two, seed 0", "all, fedavg, seed 0"]
    experiment = cfl_ray.load(results.root / "all/two/seed-0/config.yaml")
    assert experiment.to_dict_as_written()["model"]["name"] == "net.py:Net"


class TestEditedCode:
    """Runs of a study are of one version of the user's code, unless the user says otherwise."""

    @pytest.fixture
    def begun(self, tmp_path, monkeypatch, inline, study):
        """A study of two seeds, of which the first is finished; its model's file is in the working directory."""
        monkeypatch.chdir(tmp_path)
        self.write("ReLU")
        keys = {"model": f"{tmp_path}/net.py:Net", "output": "out", "rounds": 1, "methods": ["fedavg"]}
        of_files = study(experiment=keys)
        run_study(of_files, only=Selection(seeds=[0]))
        return of_files, tmp_path / "out/small"

    def write(self, act):
        Path("net.py").write_text(
            "from torch import nn\n\ndef Net(input_shape, num_classes):\n"
            f"    return nn.Sequential(nn.Linear(8, 8), nn.{act}(), nn.Linear(8, num_classes))\n"
        )

    @pytest.mark.parametrize("change", ["edited", "deleted"])
    def test_the_other_runs_get_the_copy(self, begun, change, caplog):
        of_files, root = begun
        expected = figures_of(run_study(of_files, "whole").root)
        self.write("Tanh") if change == "edited" else Path("net.py").unlink()
        with caplog.at_level("WARNING"):
            results = run_study(of_files, code="run" if change == "edited" else None)
        assert not results.failed and figures_of(root) == expected
        assert "has changed since its first runs, whose copy the others run, too: " in caplog.text
        first, second = (root / f"all/fedavg/seed-{seed}" for seed in (0, 1))
        kept = [next(run.glob("user_code/*/net.py")) for run in (first, second)]
        assert kept[0].samefile(kept[1])  # shared on the disk
        index = json.loads((second / "user_code/kept_code.json").read_text())
        assert [entry["file"] for entry in index["files"].values()] == [f"{root.parents[1]}/net.py"]
        records = [cfl_ray.load(run / "config.yaml").to_dict()["model"] for run in (first, second)]
        assert records[0] == records[1]

    def test_two_versions_are_said(self, begun, caplog):
        of_files, root = begun
        self.write("Tanh")
        with caplog.at_level("WARNING"):
            run_study(of_files, code="now")
        mixed = f"the runs of {root} are of two versions of the user's code, and its tables mix both"
        assert mixed in caplog.text and "-    return nn.Sequential(nn.Linear(8, 8), nn.ReLU()" in caplog.text
        with pytest.raises(ConfigError, match=r"are of two versions of .*/net.py, .*seed-0 and in .*seed-1: move"):
            run_study(of_files)
        caplog.clear()
        cfl_ray.compare_runs([root])
        assert "these runs have run 2 versions of" in caplog.text

    def test_runs_of_an_earlier_version_without_a_copy_are_not_mixed(self, begun):
        of_files, root = begun
        shutil.rmtree(root / "all/fedavg/seed-0/user_code")
        self.write("Tanh")
        with pytest.raises(ConfigError, match=r"/net.py was edited since .*small began.* kept no copy: restore"):
            run_study(of_files)
        assert not run_study(of_files, code="now").failed


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"settings": {"a": {}, "b": {"runtime": {"hosts": 3}}}},
            "runtime.hosts is the same in all runs of a study, got",
        ),
        ({"published": "/nowhere/numbers.yaml"}, "published: there is no file /nowhere/numbers.yaml"),
        (
            {"published": str(EXPERIMENTS / "published" / "fedclust.yaml"), "tables": ["table1", "tabel4"]},
            "tables: .*fedclust.yaml has no table 'tabel4' .did you mean 'table4'",
        ),
        (
            {"experiment": {"tracking": {"uri": "http://***@host"}}},
            r"tracking.uri: http://\*\*\*@host lacks its credentials.*; give tracking.uri=... with them",
        ),
    ],
)
def test_studies_that_cannot_start(study, changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        run_study(study(**changes))
    assert not (tmp_path / "small").exists()


def test_a_metric_that_no_run_may_have_is_told_before_the_runs(study, inline):
    told = Notes()
    results = run_study(study(metrics=["accuracy", "mbit", "acuracy", "cluster_accuracy"], seeds=[0]), watcher=told)
    assert told.warnings[0].startswith("metrics: 'acuracy' is no metric of all methods (did you mean 'accuracy'?); ")
    assert told.warnings[1] == "the table is without acuracy, cluster_accuracy, which no run has"
    table = results.table()
    assert [name for name in table if f"{name}_std" in table] == ["accuracy", "mbit", "seconds"]
    rates = {"parameters": {"local.lr": [0.1, 0.2]}, "metric": "omega_score"}
    (warning,) = metric_warnings(small := study(sweep=rates), plan(small, trials=small.drawn()))
    assert warning.startswith("sweep.metric: 'omega_score' is no metric of all methods; it is found only if a method")


def test_one_parent_in_mlflow_and_no_second_one(study, inline, drawn, tmp_path, monkeypatch):
    tracking = {"tracking": {"enabled": True}, "methods": ["fedavg"], "rounds": 1}
    monkeypatch.setattr(recorder, "write_figures", lambda *_: None)  # of single runs
    results = run_study(study(experiment=tracking), tmp_path / "runs" / "longer")
    run_study(study(experiment=tracking, seeds=[0, 1, 2]), tmp_path / "runs" / "longer")
    from mlflow import MlflowClient

    client = MlflowClient(results.tracking)
    runs = client.search_runs([client.get_experiment_by_name("cfl_ray").experiment_id])
    (parent,) = [one for one in runs if "mlflow.parentRunId" not in one.data.tags]
    names = {"accuracy_by_round.png", "accuracy_by_mbit.png"}  # means over the seeds
    assert names < {file.path for file in client.list_artifacts(parent.info.run_id)}
    note = parent.data.tags["mlflow.note.content"]
    assert "| all/fedavg |" in note and all(f"(get-artifact?path={name}&run_uuid=" in note for name in names)
    children = {one.data.tags["seed"]: one for one in runs if one is not parent}
    assert len(runs) == 4 and children.keys() == {"0", "1", "2"}
    for one in children.values():
        tags = one.data.tags
        assert tags["mlflow.parentRunId"] == parent.info.run_id and one.info.status == "FINISHED"
        names = [tags[key] for key in ("study", "setting", "label", "method")]
        assert names == ["longer", "all", "fedavg", "fedavg"] and parent.data.tags["study"] == "longer"
    mean = sum(one.data.metrics["accuracy"] for one in children.values()) / 3
    assert parent.info.status == "FINISHED" and parent.data.metrics["all/fedavg/accuracy"] == pytest.approx(mean)
    points = client.get_metric_history(parent.info.run_id, "all/fedavg/accuracy")
    assert [point.step for point in points] == [2, 3], "the number of finished runs"
    assert {file.path for file in client.list_artifacts(parent.info.run_id)} >= {
        "results.csv",
        "table.md",
        "report.html",
    }


def test_studies_with_one_name_are_both_in_the_table(study, inline, tmp_path, monkeypatch):
    changes = {"seeds": [0], "experiment": {"rounds": 1, "methods": ["fedavg"]}}
    for place in ("one", "two"):
        run_study(study(**changes), tmp_path / place / "small")
    monkeypatch.chdir(tmp_path / "one" / "small")
    frame = compare_runs([tmp_path / "one" / "small", tmp_path / "two" / "small"])
    assert frame["experiment"].tolist() == [f"{tmp_path}/{place}/small, all" for place in ("one", "two")]
    assert compare_runs([".", tmp_path / "two" / "small"])["experiment"].tolist()[0] == "., all"
    with pytest.raises(ConfigError, match="are one study; name it once"):
        compare_runs([".", tmp_path / "one" / "small"])


@pytest.mark.parametrize(
    "only, seeds", [(Selection(seeds=[1]), [0, 1]), (Selection(), [1]), (Selection(methods=["two"]), [1])]
)
def test_configs_are_not_mixed_in_a_setting(study, inline, only, seeds):
    """Also where the runs of the other config are not selected, or the study no longer has their seed."""
    root = run_study(study(seeds=[0])).root
    before = files_of(root)
    with pytest.raises(ConfigError, match="all/fedavg/seed-0 belongs to another config"):
        run_study(study(seeds=seeds, experiment={"rounds": 3}), only=only)
    assert files_of(root) == before


def test_runs_that_the_study_no_longer_names_do_not_count_as_its_own(study, inline):
    root = run_study(study(seeds=[0], settings={"a": {}, "b": {"local": {"lr": 0.5}}})).root
    notes = Notes()
    changed = study(settings={"b": {"local": {"lr": 0.5}}, "c": {}}, experiment={"methods": ["fedavg"]}, seeds=[0])
    run_study(changed, only=Selection(settings=["b"]), watcher=notes)
    assert notes.warnings == [
        "the folder has runs that the study no longer names: a, fedavg, seed 0 and 2 more; tables and reports show "
        "them too; move them away to leave them out"
    ]
    found = study_status(root)
    assert (found.runs, found.finished, found.state) == (2, 1, "stopped") and found.next is not None


def test_the_metrics_of_a_study_are_means(study, inline):
    """Not the spread of accuracy over the seeds under the name of its spread over the clients."""
    results = run_study(study(experiment={"rounds": 1, "methods": ["fedavg"]}))
    (record,) = read_records(results.root)
    frame = results.to_frame()
    assert record.metrics["all/fedavg/accuracy"] == pytest.approx(frame["accuracy"].mean())
    assert "all/fedavg/accuracy_std" not in record.metrics
    for _ in range(2):  # another metric of as many runs, once
        run_study(study(experiment={"rounds": 1, "methods": ["fedavg"]}, metrics=["accuracy", "accuracy_std"]))
    first, second = read_records(results.root)
    assert second.round == first.round + 1
    assert second.metrics["all/fedavg/accuracy_std"] == pytest.approx(frame["accuracy_std"].mean())


def test_settings_whose_names_differ_in_signs_alone_have_metrics_of_their_own(study, inline):
    settings = {"lr=0.1": {}, "lr+0.1": {"local": {"lr": 0.5}}}
    root = run_study(study(seeds=[0], settings=settings, experiment={"rounds": 1, "methods": ["fedavg"]})).root
    (record,) = read_records(root)
    assert {name for name in record.metrics if name.endswith("/accuracy")} == {
        "lr_0.1/fedavg/accuracy",
        "lr_0.1_2/fedavg/accuracy",
    }
