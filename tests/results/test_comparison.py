"""Tables of methods over seeds."""

import io
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from commands import call
from scipy.stats import ttest_rel

import cfl_ray
from cfl_ray.errors import ConfigError
from cfl_ray.report.drawing import with_spread
from cfl_ray.results import comparison
from cfl_ray.results.comparison import (
    ROUNDS,
    by_experiment,
    compare_runs,
    format_table,
    is_less_better,
    mean_and_spread,
    table_of,
    values_of,
)
from cfl_ray.results.results import MethodResult
from cfl_ray.results.significance import ChosenTest, holm
from cfl_ray.run_directory import RunDirectory
from cfl_ray.tracking import RoundRecord


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three seeds of two methods, and one run of another experiment of the same name."""
    folder = tmp_path_factory.mktemp("comparison")
    found = []
    for number, (seed, hidden) in enumerate(((0, 4), (1, 4), (2, 4), (0, 8))):
        experiment = cfl_ray.Experiment(
            name="small",
            seed=seed,
            rounds=2,
            methods=["fedavg", "local"],
            model={"options": {"hidden": hidden}},
            data={"source": "digits", "shift": {"kind": "rotated"}, "partition": {"clients": 4, "samples": 30}},
            local={"epochs": 2, "batch_size": 10},
            tracking={"enabled": False},
            runtime={"engine": "manual"},
            output=str(folder),
        )
        cfl_ray.simulate(experiment, folder / f"run-{number}")
        found.append(folder / f"run-{number}")
    return found


def test_methods_that_are_not_finished_are_named(runs, tmp_path, capsys, caplog):
    copied = tmp_path / "runs" / "cut"
    shutil.copytree(runs[1], copied)
    (copied / "local" / "end.json").unlink()
    log = copied / "local" / "metrics.jsonl"
    log.write_text(log.read_text().splitlines()[0] + "\n")
    expected = f"Not finished, so compared after fewer rounds: local of {copied} (round 1)."
    for options in ((), ("--format", "latex"), ("--format", "html")):
        status, printed, _ = call(capsys, "table", runs[0], copied, "--metric", "accuracy", "--trust", *options)
        assert status == 0 and expected in printed
    _, printed, error = call(capsys, "table", runs[0], copied, "--trust", "--format", "csv")
    assert expected not in printed and expected in " ".join(error.split())
    with caplog.at_level("WARNING"):
        cfl_ray.compare_runs([runs[0], copied], trust=True)
    assert [line for line in caplog.messages if line.startswith("Not finished")] == [expected]
    assert "Not finished" not in call(capsys, "table", *runs[:2])[1]
    message = f"{tmp_path}/runs is a folder above 1 run; name one of them, such as {copied}"
    assert message in " ".join(call(capsys, "table", tmp_path / "runs")[2].split())
    study = tmp_path / "above" / "study"
    study.mkdir(parents=True)
    (study / RunDirectory.study.name).touch()
    message = f"{tmp_path}/above is a folder above 1 study; name one of them, such as {study}"
    assert message in " ".join(call(capsys, "table", tmp_path / "above")[2].split())


def test_mean_spread_and_p_over_the_seeds(runs):
    frame = compare_runs(runs[:3])
    assert frame["method"].tolist() == ["fedavg", "local"] and frame["runs"].tolist() == [3, 3]
    values = {
        method: np.array([cfl_ray.load_run(run)[method].final["accuracy"] for run in runs[:3]])
        for method in ("fedavg", "local")
    }
    for row, method in enumerate(values):
        assert frame["accuracy"][row] == pytest.approx(values[method].mean())
        assert frame["accuracy_std"][row] == pytest.approx(values[method].std(ddof=1))
    best = int(frame["accuracy"].argmax())
    expected = ttest_rel(values["fedavg"], values["local"]).pvalue
    assert np.isnan(frame["p"][best]) and frame["p"][1 - best] == pytest.approx(expected)
    difference_S = values[frame["method"][1 - best]] - values[frame["method"][best]]
    assert frame["effect"][1 - best] == pytest.approx(difference_S.mean() / difference_S.std(ddof=1))
    cells = [line.split("|")[-2].strip() for line in format_table(frame, "md").splitlines()[2:]]
    assert cells[best] == "" and re.fullmatch(r"0\.\d{3} \(d -\d+\.\d\)", cells[1 - best])
    assert format_table(compare_runs(runs[:2]), "md").count("| needs three seeds |") == 2


def test_the_usual_columns_are_those_that_were_recorded():
    values = {"accuracy": 0.5, "mbit": 1.0, "seconds": 2.0}
    assert not {"accuracy_honest", "virtual_seconds"} & set(table_of({("a", "fedavg"): {0: values}}).columns)
    attacked = table_of({("a", "fedavg"): {0: values | {"accuracy_honest": 0.7, "virtual_seconds": 18.0}}})
    assert attacked["accuracy_honest"].tolist() == [0.7] and attacked["virtual_seconds"].tolist() == [18.0]


def test_other_settings_are_another_experiment(runs):
    frame = compare_runs(runs)
    names = [f"small (model.options.hidden={hidden})" for hidden in (4, 8)]
    assert frame["experiment"].tolist() == [name for name in names for _ in range(2)]
    assert frame["runs"].tolist() == [3, 3, 1, 1]
    assert frame["p"][2:].isna().all() and frame["accuracy_std"][2:].isna().all()


def test_experiments_of_one_name_are_named_by_the_keys_in_which_they_differ():
    def names(*changes):
        return comparison.names_of([("x", cfl_ray.Experiment(**one)) for one in changes])

    assert names({}, {"local": {"lr": 0.5}}) == ["x (local.lr=0.1)", "x (local.lr=0.5)"]
    assert names({"rounds": 3}, {"privacy": {"noise_multiplier": 2.0}, "rounds": 3}) == [
        "x",
        "x (privacy.noise_multiplier=2.0, privacy.clip=1.0, privacy.clipping=flat, 3 more)",
    ]
    assert names({"name": "a", "seed": 1}, {"output": "elsewhere"}) == ["x", "x (2)"], "keys that decide no figures"
    long = names({}, {"methods": ["local"], "local": {"lr": 0.5}, "evaluation": {"metrics": ["macro_f1"] * 9}})[1]
    assert long.startswith("x (local.lr=0.5, evaluation.metrics=[") and long.endswith("...)") and len(long) < 90
    equal = cfl_ray.Experiment()
    named = [("smaller", equal), ("small", equal), ("small", equal)]
    assert comparison.names_of(named) == ["smaller", "small", "small (2)"], "the start of a name is not the name"


def test_what_figures_depend_on_makes_an_experiment():
    plain = cfl_ray.Experiment()
    same = cfl_ray.Experiment(seed=3, name="other", methods=["local"], runtime={"hosts": 2}, output="elsewhere")
    assert comparison.settings_of(plain) == comparison.settings_of(same)
    for other in ({"rounds": 3}, {"runtime": {"precision": "bf16"}}, {"local": {"lr": 0.2}}):
        assert comparison.settings_of(plain) != comparison.settings_of(cfl_ray.Experiment(**other))


def test_metrics_by_name(runs):
    frame = compare_runs(runs[:2], ["macro_f1", "seconds"])
    assert [name for name in frame.columns if not name.endswith("_std")] == [
        "experiment", "method", "runs", "macro_f1", "seconds", "mbit", "p", "effect"
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"no run has the metric 'macro_f'.*did you mean 'macro_f1'"):
        compare_runs(runs[:1], ["macro_f"])


def test_the_same_seed_twice_is_refused(runs):
    with pytest.raises(ConfigError, match="another run has the same settings, method fedavg and seed 0; name one"):
        compare_runs([runs[0], runs[0]])


def test_two_methods_under_one_label_are_no_seeds_of_one_method(tmp_path):
    """A label leaves out the options of a method; without this, the mean over the seeds would be of two methods."""
    data = {"source": "digits", "partition": {"clients": 4, "samples": 20}}
    for seed, clusters in ((0, 2), (1, 3)):
        experiment = cfl_ray.Experiment(
            seed=seed,
            rounds=1,
            methods=[{"ifca": {"num_clusters": clusters}}],
            data=data,
            tracking={"enabled": False},
            runtime={"engine": "manual"},
            output=str(tmp_path),
        )
        cfl_ray.simulate(experiment, tmp_path / f"run-{seed}")
    with pytest.raises(ConfigError, match="run-1: its method ifca is ifca-num_clusters=3, and that of .*run-0 is ifca"):
        compare_runs([tmp_path / "run-0", tmp_path / "run-1"])


def test_formats(runs):
    frame = compare_runs(runs[:3], ["accuracy"])
    markdown = format_table(frame, "md").splitlines()
    assert markdown[0] == "| method | runs | accuracy | mbit | seconds | p |" and len(markdown) == 4
    assert f"{frame['accuracy'][0]:.3f} ± {frame['accuracy_std'][0]:.3f}" in markdown[2]
    pd.testing.assert_frame_equal(pd.read_csv(io.StringIO(format_table(frame, "csv"))), frame)
    assert format_table(frame, "html").count("<tr") == 3


def test_the_lower_loss_is_the_better_one(runs):
    frame = compare_runs(runs[:3], ["test_loss"])
    assert np.isnan(frame["p"][int(frame["test_loss"].argmin())])


@pytest.mark.parametrize(
    "metric, less",
    [("newcomer_mse_tuned", True), ("mae_past", True), ("accuracy_std", True), ("newcomer_accuracy", False)],
)
def test_metrics_made_of_a_score_have_its_direction(metric, less):
    assert is_less_better(metric) == less


def test_the_best_of_an_own_score_of_which_less_is_better_is_the_lowest():
    values = {"high": [3.0, 4.0, 6.0], "low": [1.0, 3.0, 2.0]}
    found = {("e", m): {s: {"own": v, "own_p90": v} for s, v in enumerate(of)} for m, of in values.items()}
    frame = table_of(found, ["own"])
    assert np.isnan(frame["p"][1]) and frame["effect"][0] > 0


def found_of(**values):
    """Metrics by method and seed, of one experiment; None: a seed that the method lacks."""
    return {
        ("e", method): {seed: {"accuracy": one} for seed, one in enumerate(of_seeds) if one is not None}
        for method, of_seeds in values.items()
    }


def test_a_method_without_the_metric_keeps_no_other_one_from_the_test():
    low, high = [0.1, 0.2, 0.4], [0.3, 0.1, 0.9]
    frame = table_of(found_of(nothing=[np.nan] * 3, low=low, high=high), ["accuracy"])
    assert frame["p"].isna().tolist() == [True, False, True]
    assert frame["p"][1] == pytest.approx(ttest_rel(low, high).pvalue)


def test_seeds_that_one_of_two_methods_lacks_are_not_tested():
    frame = table_of(found_of(low=[0.5, 0.6, 0.7, 0.1, np.nan], high=[0.5, None, 0.9, 0.3, 0.8]), ["accuracy"])
    assert frame["p"][0] == pytest.approx(ttest_rel([0.5, 0.7, 0.1], [0.5, 0.9, 0.3]).pvalue) and np.isnan(
        frame["p"][1]
    )


def test_a_method_with_fewer_seeds_keeps_no_other_one_from_the_test():
    """In a study that is not finished, the highest mean may be that of a single seed."""
    low, high = [0.1, 0.2, 0.4], [0.3, 0.1, 0.9]
    frame = table_of(found_of(one=[0.95], low=low, high=high), ["accuracy"])
    assert frame["p"].isna().tolist() == [True, False, True]
    assert frame["p"][1] == pytest.approx(ttest_rel(low, high).pvalue)


def test_methods_are_tested_against_a_named_one():
    """The best method, high, is tested, too; an experiment without the named method has no test."""
    low, middle, high = [0.1, 0.2, 0.4], [0.3, 0.1, 0.5], [0.6, 0.9, 0.7]
    found = found_of(low=low, middle=middle, high=high) | {("f", "low"): {0: {"accuracy": 0.5}}}
    frame = table_of(found, ["accuracy"], test=ChosenTest(against="middle"))
    expected = [ttest_rel(low, middle).pvalue, np.nan, ttest_rel(high, middle).pvalue, np.nan]
    assert frame["p"].tolist() == pytest.approx(expected, nan_ok=True) and frame["effect"][2] > 0
    corrected = table_of(found, ["accuracy"], test=ChosenTest(correction="holm", against="middle"))
    assert corrected["p"][:3].tolist() == pytest.approx(holm(expected[:3]), nan_ok=True)
    with pytest.raises(ConfigError, match="no run is of the method 'midle'.*did you mean 'middle'"):
        table_of(found, ["accuracy"], test=ChosenTest(against="midle"))


@pytest.mark.filterwarnings("error")
def test_infinite_values_and_equal_differences_are_not_tested():
    infinite = table_of(found_of(a=[np.inf, np.inf, 0.7], b=[0.5, 0.6, 0.7]), ["accuracy"])
    assert infinite["accuracy"][0] == np.inf and infinite[["accuracy_std", "p"]].iloc[0].isna().all()
    for other in ([0.5, 0.6, 0.7], [0.6, 0.7, 0.8]):  # 0.6 - 0.5 is not exactly 0.8 - 0.7
        assert table_of(found_of(a=[0.5, 0.6, 0.7], b=other), ["accuracy"])["p"].isna().all()


def test_the_spread_over_clients_is_a_metric():
    found = {("e", "m"): {seed: {"accuracy": 0.5, "accuracy_std": 0.1 + 0.1 * seed} for seed in (0, 1)}}
    frame = table_of(found, ["accuracy_std", "accuracy_std"])
    assert frame.columns.tolist() == ["experiment", "method", "runs", "accuracy_std", "accuracy_std_std", "p", "effect"]
    assert f"| m | 2 | 0.150 ± {0.1 / 2**0.5:.3f} |" in format_table(frame, "md")
    both = table_of(found, ["accuracy", "accuracy_std"])
    spread = "accuracy_std_over_clients"
    assert both.columns.tolist()[3:-2] == ["accuracy", "accuracy_std", spread, f"{spread}_std"]
    assert both[spread][0] == frame["accuracy_std"][0] and both["accuracy_std"][0] == 0
    assert f"| m | 2 | 0.500 ± 0.000 | 0.150 ± {0.1 / 2**0.5:.3f} |" in format_table(both, "md")


def of_best(best: float | None) -> MethodResult:
    """Accuracy 0.9 in round 1 and 0.5 in round 2, which is the last."""
    kept = {} if best is None else {"best_round": best}
    records = [
        RoundRecord(
            round,
            {"accuracy": accuracy, "accuracy_std": 0.0, "mbit_down": round, "mbit_up": 0.0, "round_seconds": 3.0}
            | kept,
        )
        for round, accuracy in ((1, 0.9), (2, 0.5))
    ]
    return MethodResult("fedavg", records, {})


def test_a_row_is_of_the_round_whose_models_are_kept():
    assert {round: values_of(of_best(1.0), round)["accuracy"] for round in ROUNDS} == {
        "kept": 0.9,
        "best": 0.9,
        "last": 0.5,
    }
    assert values_of(of_best(1.0))["mbit"] == 1 and values_of(of_best(1.0))["best_round"] == 1
    assert values_of(of_best(None))["accuracy"] == 0.5
    seconds = [values_of(of_best(1.0), round)["seconds"] for round in ROUNDS]
    assert seconds == [3.0, 3.0, 6.0], "up to the same round as the traffic"
    with pytest.raises(ConfigError, match="fedavg has no best round: it keeps the models of the last one"):
        values_of(of_best(None), "best")
    with pytest.raises(ConfigError, match="round must be one of kept, best, last, got '3'"):
        compare_runs([], round="3")
    with pytest.raises(ConfigError, match="test must be one of ttest, wilcoxon, got 't-test'"):
        compare_runs([], test="t-test")
    with pytest.raises(ConfigError, match="correction must be one of none, holm, got 'bonferroni'"):
        compare_runs([], correction="bonferroni")


def test_names_end_no_cell_of_a_table():
    frame = table_of({(name, "a|b"): {0: {"accuracy": 0.5}} for name in ("method", "p", "c\nd")}, ["accuracy"])
    wide = by_experiment(frame, "accuracy")
    for table, columns in ((frame, 5), (wide, 4)):
        lines = format_table(table, "md").splitlines()
        assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {columns + 1} and r"a\|b" in lines[-1]
    assert wide.columns.tolist() == ["method", "method", "p", "c\nd"]


def test_small_values_keep_their_digits():
    assert mean_and_spread(1.34e-5, 1.41e-6) == "1.3e-05 ± 1.4e-06" and mean_and_spread(-2e-4, np.nan) == "-0.0002"
    assert mean_and_spread(1234.56, 0.25) == "1234.6 ± 0.2" and with_spread(1234.56, 0.25) == "1,234.6 ±\u00a00.2"
    assert mean_and_spread(0.0, 0.0) == "0.000 ± 0.000" and mean_and_spread(1e-5, 0.1) == "0.000 ± 0.100"


def test_a_single_folder_or_metric_is_named_in_a_list():
    """A text is a sequence of letters, and the first of a path is the folder /."""
    for run in ("runs/one", Path("runs/one")):
        with pytest.raises(ConfigError, match=r"takes a list of runs, got 'runs/one'; write \['runs/one'\]"):
            cfl_ray.compare_runs(run)
    with pytest.raises(ConfigError, match="takes a list of metrics, got 'accuracy'"):
        cfl_ray.compare_runs(["runs/one"], "accuracy")
