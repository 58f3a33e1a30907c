"""Sweeps: their trials, the order of these, and what the next start does."""

import io
import sys

import pandas as pd
import pytest
from rich.console import Console
from scipy.stats import ttest_rel
from studies import figures_of

from cfl_ray import load
from cfl_ray.cli.study_progress import show_trials
from cfl_ray.config.sweep import HalvingConfig, SweepConfig, Trial
from cfl_ray.errors import ConfigError, Interrupted
from cfl_ray.results import comparison
from cfl_ray.results.comparison import collected, of_best_trials, recorded_result
from cfl_ray.study import run, study_plan
from cfl_ray.study.halving import stages_of, survivors
from cfl_ray.study.run import StudyWatcher, run_study
from cfl_ray.study.status import study_status
from cfl_ray.study.study_plan import Selection, plan
from cfl_ray.study.sweep import LearningTrials, best_of, goal_of, rank, to_frame, trials_of

RANGES = {"local.lr": {"low": 0.01, "high": 1, "log": True}, "methods.fedavg.weights": ["samples", "uniform"]}


def tpe(trials: int, **changes) -> SweepConfig:
    pytest.importorskip("optuna", reason="the sampler tpe needs optuna: pip install -e .[sweep]")
    return SweepConfig(**{"parameters": RANGES, "sampler": "tpe", "trials": trials} | changes)


def score(parameters: dict) -> float:
    """Largest at a learning rate of 0.2 with uniform weights."""
    return -abs(parameters["local.lr"] - 0.2) + 0.1 * (parameters["methods.fedavg.weights"] == "uniform")


def play(trials, together: int, limit: int = 1000) -> list[dict]:
    """Tells the trials their scores, batch after batch; the first ones up to a limit."""
    told: list[dict] = []
    while len(told) < limit and (batch := trials.next(together)):
        for trial in batch:
            trials.tell(trial, score(trial.parameters))
            told.append(dict(trial.parameters))
    return told


def parameters_of(trials) -> list[dict]:
    return [dict(trial.parameters) for trial in trials]


def test_goals():
    parameters = {"local.lr": [0.1]}
    for metric, goal in (("accuracy", "maximize"), ("test_loss", "minimize"), ("mse", "minimize")):
        assert goal_of(SweepConfig(parameters=parameters, metric=metric)) == goal
    for metric, goal in (("mse_local", "minimize"), ("r2", "maximize"), ("mbit_to_target", "minimize")):
        assert goal_of(SweepConfig(parameters=parameters, metric=metric)) == goal
    assert goal_of(SweepConfig(parameters=parameters, metric="test_loss", goal="maximize")) == "maximize"


def test_trials_without_a_sampler(study):
    assert play(trials_of(study()), 3, 0) == [] and list(trials_of(study()).next(3)) == [Trial()]
    grid = trials_of(study(experiment={"methods": ["fedavg"]}, sweep={"parameters": {"local.lr": [0.1, 0.2]}}))
    assert grid.later() == 2
    expected = [Trial({"local.lr": 0.1}, "fedavg"), Trial({"local.lr": 0.2}, "fedavg")]
    assert list(grid.next(1)) == expected == list(grid.so_far()) and not grid.next(1) and not grid.later()


def test_the_estimator_learns_and_repeats_itself(tmp_path):
    found = []
    for name in ("a", "b"):
        trials = LearningTrials(tpe(40))
        (tmp_path / name).mkdir()
        trials.open(tmp_path / name)
        found.append(play(trials, 1))
    assert found[0] == found[1] and len(found[0]) == 40
    assert sum(map(score, found[0][30:])) > sum(map(score, found[0][:10])), "those of ten random draws"
    assert all(one["local.lr"] == float(f"{one['local.lr']:.6g}") for one in found[0])


def test_a_stopped_search_goes_on_with_its_journal(tmp_path):
    """Trials so far are given again; the others follow from the results, not from the start of the draws."""
    whole = LearningTrials(tpe(14))
    (tmp_path / "whole").mkdir()
    whole.open(tmp_path / "whole")
    expected = play(whole, 2)
    first = LearningTrials(tpe(14))
    first.open(tmp_path)
    told = play(first, 2, limit=6)
    waiting = parameters_of(first.next(2))
    second = LearningTrials(tpe(14))
    second.open(tmp_path)
    assert parameters_of(second.searches[None].left) == told + waiting
    assert play(second, 2) == expected
    third = LearningTrials(tpe(16))
    second.searches[None].study.ask()  # stopped before it had parameters
    third.open(tmp_path)
    assert len(play(third, 2)) == 16 == len(third.so_far()), "more trials are added"


def test_failed_trials_are_replaced_at_the_next_start(tmp_path):
    trials = LearningTrials(tpe(3))
    trials.open(tmp_path)
    batch = trials.next(5)
    assert len(batch) == 3
    for trial in batch:
        trials.tell(trial, None)
    assert not trials.next(5), "not within one start"
    again = LearningTrials(tpe(3))
    again.open(tmp_path)
    others = again.next(5)
    assert len(others) == 3 and not [one for one in others if one in batch]


def test_a_journal_of_another_search_is_refused(tmp_path):
    LearningTrials(tpe(3)).open(tmp_path)
    LearningTrials(tpe(5)).open(tmp_path)
    for changes in ({"metric": "macro_f1"}, {"goal": "minimize"}, {"parameters": {"local.lr": [0.1]}}):
        with pytest.raises(ConfigError, match="has the trials of another sweep: .* choose another folder"):
            LearningTrials(tpe(3, **changes)).open(tmp_path)


def test_choices_of_any_kind(tmp_path):
    values = [None, True, 1, "one", [1, 2], {"trimmed_mean": {"share": 0.1}}]
    trials = LearningTrials(tpe(12, parameters={"local.clip_norm": values}))
    trials.open(tmp_path)
    found = [one.parameters["local.clip_norm"] for one in trials.next(12)]
    assert found and all(any(one is value or one == value for value in values) for one in found)


def test_without_optuna(study, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(
        ConfigError, match=r"sweep.sampler: tpe needs Optuna; install it with pip install 'cfl-ray\[sweep\]'"
    ):
        trials_of(study(sweep={"parameters": RANGES, "sampler": "tpe", "trials": 2}))


# ---- the order of trials


def ranked_of(study, values: dict[tuple[float, int], float], seeds=(0, 1), **changes):
    sweep = {"parameters": {"local.lr": [0.1, 0.2, 0.3]}, "metric": "accuracy"} | changes
    made = study(seeds=list(seeds), experiment={"methods": ["fedavg"]}, sweep=sweep)
    runs = plan(made, trials=made.drawn())
    metric = made.sweep.metric
    found = {}
    for (lr, seed), value in values.items():
        found.setdefault((f"lr={lr}", "fedavg"), {})[seed] = {metric: value}
    return rank(made, runs, found)


def test_the_best_mean_is_first_and_what_lacks_seeds_is_last(study):
    values = {(0.1, 0): 0.5, (0.1, 1): 0.7, (0.2, 0): 0.8, (0.2, 1): 0.6, (0.3, 0): 0.9}
    ranked = ranked_of(study, values)
    assert [one.parameters["local.lr"] for one in ranked] == [0.2, 0.1, 0.3]
    assert ranked[0].mean == pytest.approx((0.8 + 0.6) / 2) and ranked[0].std == pytest.approx(0.1 * 2**0.5)
    (best,) = best_of(ranked)
    assert best.overrides == "local.lr=0.2"
    frame = to_frame(ranked, "accuracy")
    assert frame.columns.tolist() == [
        *("setting", "method", "place", "local.lr", "runs", "accuracy", "accuracy_std", "p", "effect", "folder")
    ]
    assert frame["runs"].tolist() == [2, 2, 1] and frame["place"].tolist() == [1, 2, 3] and frame["p"].isna().all()
    assert [one.parameters["local.lr"] for one in ranked_of(study, values, metric="test_loss")] == [0.1, 0.2, 0.3]
    assert best_of(ranked_of(study, {})) == []


def test_equal_trials_share_a_place_and_three_seeds_are_tested(study):
    best, worse = [0.5, 0.7, 0.9], [0.4, 0.65, 0.6]
    columns = {0.1: best[::-1], 0.2: worse, 0.3: best}
    values = {(lr, seed): value for lr, of_seeds in columns.items() for seed, value in enumerate(of_seeds)}
    ranked = ranked_of(study, values, seeds=[0, 1, 2])
    assert [(one.place, one.parameters["local.lr"]) for one in ranked] == [(1, 0.1), (1, 0.3), (3, 0.2)]
    assert ranked[2].p == pytest.approx(ttest_rel(worse, best[::-1]).pvalue) and ranked[2].effect < 0
    out = Console(file=io.StringIO(), width=120)
    show_trials(ranked, best_of(ranked), "accuracy", out)
    printed = out.file.getvalue()
    assert printed.count(" 1 = ") == 2 and f"{ranked[2].p:.3f} (d " in printed
    assert "accuracy 0.700 ± 0.200 over 3 runs, equal to 1 other trial, with" in printed


def test_trials_that_diverge_are_the_worst_and_have_no_spread(study):
    ranked = ranked_of(
        study, {(0.1, 0): float("inf"), (0.1, 1): float("inf"), (0.2, 0): 2.0, (0.2, 1): 4.0}, metric="test_loss"
    )
    assert [one.mean for one in ranked[:2]] == [3.0, float("inf")]
    assert to_frame(ranked, "test_loss")["test_loss_std"].isna().tolist() == [False, True, True]


# ---- whole sweeps


def test_a_learning_sweep_over_one_value(study, inline):
    pytest.importorskip("optuna")
    sweep = {"parameters": {"local.lr": [0.1]}, "sampler": "tpe", "trials": 2}
    results = run_study(study(seeds=[0], experiment={"rounds": 1, "methods": ["fedavg"]}, sweep=sweep))
    assert not results.failed and inline == ["lr=0.1, fedavg, seed 0"]


def test_the_runs_of_a_sweep_over_methods_are_counted(study, inline):
    sweep = {"parameters": {"methods": [["fedavg"], ["fedavg", "local"]]}}
    root = run_study(study(seeds=[0], experiment={"rounds": 1}, sweep=sweep)).root
    found = study_status(root)
    assert (found.runs, found.finished, found.state) == (3, 3, "finished")


def test_a_grid_for_each_method_in_each_setting(study, inline):
    parameters = {"local.lr": [0.001, 0.2], "data.partition.clients": [5, 6]}
    results = run_study(
        study(settings={"a": {}, "b": {"local": {"epochs": 2}}}, seeds=[0], sweep={"parameters": parameters})
    )
    assert len(inline) == 2 * 2 * 4 and study_status(results.root).runs == 16
    assert [(one.setting, one.method) for one in results.best] == [
        ("a", "fedavg"), ("a", "two"), ("b", "fedavg"), ("b", "two")
    ]  # fmt: skip
    run_metrics, scores = collected([results.root])
    kept, of_clients, values = of_best_trials(results.root, run_metrics, scores)
    assert {(one.setting, one.method): one.values for one in results.best} == {
        key: {seed: metrics["accuracy"] for seed, metrics in of_seeds.items()} for key, of_seeds in kept.items()
    }
    assert list(of_clients.results) == list(kept)
    assert values == {(one.setting, one.method): one.overrides for one in results.best}
    frame = pd.read_csv(results.root / "artifacts" / "trials.csv")
    assert len(frame) == 16
    for best in results.best:
        group = frame[(frame["setting"] == best.setting) & (frame["method"] == best.method)]
        assert pytest.approx(best.mean) == group["accuracy"].max() == group["accuracy"].iloc[0]
    inline.clear()
    assert not run_study(results.study).failed and inline == []


def test_values_of_best_trials_have_keys_without_a_section(study, inline):
    parameters = {"rounds": [1, 2], "model": [{"name": "mlp", "options": {"hidden": 8}}], "local.lr": [1.0]}
    sweep = {"parameters": parameters}
    results = run_study(study(seeds=[0], experiment={"methods": ["fedavg"]}, sweep=sweep))
    *_, values = of_best_trials(results.root, *collected([results.root]))
    (best,) = results.best
    named = f"rounds={best.parameters['rounds']} model={{name: mlp, options: {{hidden: 8}}}} local.lr=1"
    assert values == {(best.setting, "fedavg"): named}


def test_values_that_are_no_names_of_folders(study, inline):
    rules = ["mean", {"trimmed_mean": {"share": 0.2}}]
    sweep = {"parameters": {"methods.fedavg.aggregation": rules}}
    results = run_study(study(seeds=[0], experiment={"methods": ["fedavg"]}, sweep=sweep))
    assert not results.failed and len(results.run_metrics) == 2
    assert results.best[0].overrides in (
        "methods.fedavg.aggregation=mean",
        "'methods.fedavg.aggregation={trimmed_mean: {share: 0.2}}'",
    )


def test_a_trial_that_fails(study, inline):
    sweep = {"parameters": {"model.options.hidden": ["many", 8]}}
    results = run_study(study(seeds=[0], experiment={"methods": ["fedavg"]}, sweep=sweep))
    (failed,) = results.failed
    assert failed.run.parameters == {"model.options.hidden": "many"}
    assert [(one.parameters["model.options.hidden"], len(one.values)) for one in results.trials] == [
        (8, 1),
        ("many", 0),
    ]
    frame = pd.read_csv(results.root / "artifacts" / "trials.csv")
    assert frame["runs"].tolist() == [1, 0] and frame["accuracy"].isna().tolist() == [False, True]


def test_a_learning_sweep_that_is_stopped_goes_on(study, inline, tmp_path):
    pytest.importorskip("optuna", reason="the sampler tpe needs optuna: pip install -e .[sweep]")
    sweep = {"parameters": RANGES, "sampler": "tpe", "trials": 4}
    made = study(seeds=[0], experiment={"methods": ["fedavg"], "rounds": 1}, sweep=sweep)

    class Impatient(StudyWatcher):
        def ended(self, outcome):
            if len(inline) == 3:
                raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="cfl-ray resume"):
        run_study(made, at_once=1, watcher=Impatient())
    results = run_study(made, at_once=1)
    whole = run_study(made, tmp_path / "whole", at_once=1)
    assert figures_of(results.root) == figures_of(whole.root) and len(figures_of(whole.root)) == 4
    assert [one.parameters for one in results.trials] == [one.parameters for one in whole.trials]


def test_a_learning_sweep_makes_the_runs_that_a_selection_left_out(study, inline):
    pytest.importorskip("optuna", reason="the sampler tpe needs optuna: pip install -e .[sweep]")
    sweep = {"parameters": RANGES, "sampler": "tpe", "trials": 2}
    made = study(seeds=[0, 1], experiment={"methods": ["fedavg"], "rounds": 1}, sweep=sweep)
    run_study(made, only=Selection(seeds=[1]), at_once=1)
    assert len(inline) == 2
    results = run_study(made, at_once=1)
    assert len(inline) == 4 and [len(one.values) for one in results.trials] == [2, 2]
    assert study_status(results.root).state == "finished"


def test_a_learning_sweep_that_draws_listed_values_again_is_finished(study, inline):
    """Four trials of two values make two runs in each setting; without a setting's runs the study is not finished."""
    pytest.importorskip("optuna", reason="the sampler tpe needs optuna: pip install -e .[sweep]")
    sweep = {"parameters": {"local.lr": [0.1, 0.2]}, "sampler": "tpe", "trials": 4}
    settings = {"a": {}, "b": {"local": {"epochs": 2}}}
    made = study(seeds=[0], experiment={"methods": ["fedavg"], "rounds": 1}, settings=settings, sweep=sweep)
    part = study_status(run_study(made, only=Selection(settings=["a"]), at_once=1).root)
    assert part.state == "stopped" and part.left == part.finished > 0 and part.next
    whole = study_status(run_study(made, at_once=1).root)
    assert (whole.state, whole.left, whole.next) == ("finished", 0, None) and whole.finished == 2 * part.finished


def test_a_metric_that_no_run_has(study, inline):
    sweep = {"parameters": {"local.lr": [0.1]}, "metric": "acuracy"}
    with pytest.raises(ConfigError, match="sweep.metric: no run has the metric 'acuracy' .did you mean 'accuracy'"):
        run_study(study(seeds=[0], sweep=sweep))


def test_trials_at_a_time_fill_the_room(study, monkeypatch, inline):
    """Each trial of a method has two seeds, 2 runs: for room of 9 runs, 5 trials."""
    asked = []

    class Counting(run.Trials):
        def next(self, together):
            asked.append(together)
            return []

    monkeypatch.setattr(run, "resources_for", lambda *_: run.Resources(9, None))
    monkeypatch.setattr(run, "trials_of", lambda study: Counting(study.drawn()))
    run_study(study(sweep={"parameters": {"local.lr": [0.1]}}))
    assert asked == [5]


def test_a_batch_of_trials_reads_its_own_runs(study, monkeypatch, inline):
    """Reading all runs after each batch would take a time quadratic in the number of trials."""
    pytest.importorskip("optuna", reason="the sampler tpe needs optuna: pip install -e .[sweep]")
    read, counts, tell = [], [], run._Launch._tell

    def counting(launch, trials):
        read.clear()
        tell(launch, trials)
        counts.append(len(read))

    def reading(*arguments):
        read.append(arguments)
        return recorded_result(*arguments)

    monkeypatch.setattr(run._Launch, "_tell", counting)
    monkeypatch.setattr(comparison, "recorded_result", reading)
    sweep = {"parameters": RANGES, "sampler": "tpe", "trials": 3}
    run_study(study(seeds=[0], experiment={"methods": ["fedavg"], "rounds": 1}, sweep=sweep), at_once=1)
    assert counts == [1, 1, 1]


# ---- several methods


def test_each_method_sweeps_its_own_options(study, inline):
    """Two rates x two weights of fedavg, and two rates of the other: six runs, not eight; each best is a config."""
    parameters = {"local.lr": [0.05, 0.2], "methods.fedavg.weights": ["samples", "uniform"]}
    results = run_study(study(seeds=[0], experiment={"rounds": 1}, sweep={"parameters": parameters}))
    assert not results.failed and len(inline) == 6 and study_status(results.root).state == "finished"
    assert [sorted(one.parameters) for one in results.best] == [sorted(parameters), ["local.lr"]]
    assert {one.setting for one in results.trials} == {"all"}
    assert (results.root / "lr=0.05,weights=samples" / "fedavg").is_dir(), "the name that it always had"
    for best in results.best:
        text = (results.root / "artifacts/best" / f"{best.method}.yaml").read_text()
        (results.root / "best.yaml").write_text(text)
        place = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in best.parameters.items())
        recorded = load(results.root / place / best.method / "seed-0" / "config.yaml")
        assert load(results.root / "best.yaml").config_hash == recorded.config_hash
        assert best.method not in best.overrides or best.method == "fedavg"


@pytest.mark.parametrize("key", ["methods.two.num_clusters", "methods.ifca.num_clusters"])
def test_a_method_is_swept_by_its_label_or_its_name(study, key):
    made = study(sweep={"parameters": {key: [2, 3]}})
    assert made.drawn() == [Trial({}, "fedavg"), Trial({key: 2}, "two"), Trial({key: 3}, "two")]
    runs = plan(made, Selection(seeds=[0]), made.drawn())
    found = [(run.setting, run.experiment.methods) for run in runs]
    others = [(f"num_clusters={k}", [{"ifca": {"num_clusters": k}}]) for k in (2, 3)]
    assert found == [("all", ["fedavg"]), *others]


@pytest.mark.parametrize("name", ["mine.py:Mine", "own-name"])
def test_a_method_of_a_file_is_swept(study, tmp_path, name):
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom cfl_ray.methods.fedavg import FedAvg\n\n\n"
        '@dataclass(frozen=True)\nclass Mine(FedAvg, name="own-name"):\n    beta: float = 0.5\n'
    )
    key = f"methods.{name}.beta"
    made = study(experiment={"methods": ["fedavg", f"{file}:Mine"]}, sweep={"parameters": {key: [0.1, 0.2]}})
    assert [trial.parameters for trial in made.drawn()] == [{}, {key: 0.1}, {key: 0.2}]
    runs = plan(made, Selection(seeds=[0]), made.drawn())
    assert [(run.method, run.setting) for run in runs] == [
        *(("fedavg", "all"), ("own-name", "beta=0.1"), ("own-name", "beta=0.2"))
    ]


def test_a_key_of_local_that_a_method_replaces_is_not_swept_for_it(study):
    """The method `two` has a momentum of its own."""
    made = study(sweep={"parameters": {"local.momentum": [0.1, 0.9], "local.lr": [0.1]}})
    assert made.drawn() == [
        Trial({"local.momentum": 0.1, "local.lr": 0.1}, "fedavg"),
        Trial({"local.lr": 0.1}, "two"),
        Trial({"local.momentum": 0.9, "local.lr": 0.1}, "fedavg"),
    ]


def test_random_draws_of_a_method_are_those_of_the_whole(study):
    """Three draws of two keys: the methods see the same numbers, and equal ones are made once."""
    sweep = SweepConfig(
        parameters={"local.lr": {"low": 0.1, "high": 1}, "methods.two.num_clusters": [2, 3]}, sampler="random", trials=3
    )
    made = study(sweep=sweep)
    whole = sweep.drawn()
    assert [dict(one.parameters) for one in made.drawn() if one.method == "two"] == whole
    assert [one.parameters["local.lr"] for one in made.drawn() if one.method == "fedavg"] == [
        one["local.lr"] for one in whole
    ]
    only = study(sweep=sweep.model_copy(update={"parameters": {"methods.two.num_clusters": [2]}}))
    assert only.drawn() == [Trial({}, "fedavg"), Trial({"methods.two.num_clusters": 2}, "two")]


def test_each_method_has_a_search_of_its_own(tmp_path):
    keys_of = {"fedavg": list(RANGES), "other": ["local.lr"]}
    trials = LearningTrials(tpe(3), keys_of)
    trials.open(tmp_path)
    batch = trials.next(2)
    assert [trial.method for trial in batch] == ["fedavg", "other"] and trials.later() == 4
    for trial in batch:
        trials.tell(trial, trial.parameters["local.lr"])
    assert [sorted(trial.parameters) for trial in trials.so_far()] == [sorted(RANGES), ["local.lr"]]
    with pytest.raises(ConfigError, match="a search for each of several methods.*choose another folder"):
        LearningTrials(tpe(3)).open(tmp_path)


# ---- successive halving


@pytest.mark.parametrize(
    "first, factor, trials, rounds, expected",
    [
        (1, 3, 9, 9, [(1, 3 * 2 + 1 * 6), (3, 6 / 2), (None, 0)]),  # 9 trials x 1, 3 x 2, 1 x 6 rounds
        (2, 2, 4, 4, [(2, 2 * 2 / 2), (None, 0)]),
        (5, 2, 4, 5, [(None, 0)]),
    ],
)
def test_the_stages_of_halving(first, factor, trials, rounds, expected):
    stages = stages_of(HalvingConfig(first=first, factor=factor), trials, rounds)
    assert [(stage.until, stage.later) for stage in stages] == expected


def test_of_each_method_the_best_go_on():
    trials = [Trial({"local.lr": lr}, method) for lr in range(1, 5) for method in ("a", "b")]
    values = {(trial.method, trial.name): float(trial.parameters["local.lr"]) for trial in trials}
    values["a", "lr=4"] = float("nan")
    going = survivors(trials, values, 3, minimize=False)  # ceil(4 / 3) = 2 of each
    assert [(one.method, one.parameters["local.lr"]) for one in going] == [("a", 2), ("a", 3), ("b", 3), ("b", 4)]
    assert [one.parameters["local.lr"] for one in survivors(trials, values, 4, minimize=True)] == [1, 1]


def test_trials_that_cannot_win_end_early_and_the_winner_is_that_of_whole_runs(study, inline, tmp_path):
    """Three rates, of which one goes on after round 1: its run is that of a sweep without halving, bit for bit."""
    sweep = {"parameters": {"local.lr": [0.0001, 0.3, 0.0002]}}
    experiment = {"rounds": 2, "methods": ["fedavg"]}
    halving = run_study(study(seeds=[0], experiment=experiment, sweep=sweep | {"halving": {"first": 1}}))
    whole = run_study(study(seeds=[0], experiment=experiment, sweep=sweep), tmp_path / "whole")
    assert not halving.failed and len(inline) == 4 + 3
    found = figures_of(halving.root)
    assert len(found) == 1 and found.items() <= figures_of(whole.root).items()
    status = study_status(halving.root)
    assert (status.state, status.finished, status.pruned, status.left) == ("finished", 1, 2, 0)
    inline.clear()
    assert not run_study(halving.study).failed and inline == [], "nothing is left to do"


# ---- the metric that chooses


def test_validation_data_choose_and_test_data_are_shown_beside(study, monkeypatch):
    monkeypatch.setattr(study_plan, "has_validation", lambda experiment: True)
    made = study(seeds=[0], experiment={"methods": ["fedavg"]}, sweep={"parameters": {"local.lr": [0.1, 0.2]}})
    runs = plan(made, trials=made.drawn())
    metric = study_plan.metric_of(made, runs)
    assert metric == "validation/accuracy" and goal_of(made.with_metric(metric).sweep) == "maximize"
    found = {
        ("lr=0.1", "fedavg"): {0: {metric: 0.9, "accuracy": 0.6}},  # the test data favour the other
        ("lr=0.2", "fedavg"): {0: {metric: 0.8, "accuracy": 0.7}},
    }
    ranked = rank(made.with_metric(metric), runs, found)
    assert [(one.mean, one.test_mean) for one in ranked] == [(0.9, 0.6), (0.8, 0.7)]
    assert to_frame(ranked, metric)["accuracy"].tolist() == [0.6, 0.7]
    out = Console(file=io.StringIO(), width=160)
    show_trials(ranked, best_of(ranked), metric, out)
    printed = out.file.getvalue()
    assert "test accuracy 0.600" in printed and "the test data chose nothing" in printed
    monkeypatch.undo()
    assert study_plan.metric_of(made, runs) == "accuracy"
    out = Console(file=io.StringIO(), width=160)
    show_trials(ranked, best_of(ranked), "accuracy", out)
    assert "on the clients' test data, which favours the tuned method" in out.file.getvalue()
