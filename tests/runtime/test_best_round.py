"""The end of a method by `stopping`, and the models of its best round: which round, and the same bits after faults."""

import json
import math
import os
import signal

import numpy as np
import pytest
import torch
from small_runs import PLANTED, figures, merged, simulate_until

from cfl_ray import ConfigError, Experiment, load_run, resume, run, simulate
from cfl_ray.core.clients import RoundStats
from cfl_ray.data import federation_from_arrays
from cfl_ray.errors import DataError
from cfl_ray.lifecycle import driver
from cfl_ray.runtime.parts.best_round import BestRound
from cfl_ray.runtime.round_evaluation import RoundEvaluation
from cfl_ray.setup.criterion import Criterion, RoundChoice
from cfl_ray.setup.prepare import prepare
from cfl_ray.tracking import read_end
from cfl_ray.tracking.record import BEST_ROUND

NAN, INF = math.nan, math.inf
RISES = [0.1, 0.3, 0.6, 0.5, 0.6, 0.55, 0.4, 0.3]  # best in round 3, again in round 5


def experiment(**changes):
    return Experiment(**merged(PLANTED, {"rounds": 8, "methods": ["ditto"], "keep": "best"} | changes))


def fed(values, rounds=None, every=1, **criterion):
    """A part that has seen these evaluations, and the round with which it ends the method (None: with none)."""
    of = Criterion("score", **criterion)
    part = BestRound(RoundChoice(of if of.patience else None, of), every)
    for turn, value in enumerate(values, 1):
        stats = RoundStats(turn * every)
        part.cohort(stats, None, lambda: None)
        stats.metrics |= {} if value is None else {"score": value}
        part.end_evaluation(stats)
        if part.ends(stats.round):
            return part, stats.round
    return part, None


@pytest.mark.parametrize(
    ("values", "criterion", "ended", "best"),
    [
        (RISES, {"patience": 4}, 7, 3),  # 3 + 4: the equal value of round 5 is no improvement
        (RISES, {"patience": 5}, 8, 3),
        (RISES, {"patience": 6}, None, 3),
        (RISES, {"patience": 100}, None, 3),
        ([0.5, 0.502, 0.504], {"patience": 2, "min_delta": 0.002}, None, 3),  # 0.504 - 0.5 exceeds it
        ([0.5, 0.502, 0.502, 0.4], {"patience": 2, "min_delta": 0.002}, 3, 2),  # 0.002 is not more than 0.002
        ([0.5, 0.501, 0.5021, 0.5021], {"patience": 3, "min_delta": 0.002}, None, 3),  # a slow rise is one
        ([0.1, 0.2, 0.3], {"patience": 1, "minimizes": True}, 2, 1),
        ([3.0, 2.0, 2.5, 1.0, 1.0, 1.0], {"patience": 2, "minimizes": True}, 6, 4),
        ([NAN, NAN, NAN], {"patience": 2}, 2, 0),
        ([NAN, 0.1, NAN, 0.2, NAN, NAN], {"patience": 2}, 6, 4),
        ([0.1, INF, INF], {"patience": 2}, 3, 1),
        ([-INF, 5.0, 6.0], {"patience": 2, "minimizes": True}, None, 2),
        ([None, None, 0.3, 0.2], {"patience": 1}, 4, 3),  # no value at all, as of newcomers, is no evaluation
        ([0.0, 0.0], {"patience": 1}, 2, 1),
    ],
)
def test_where_it_ends_and_which_round_is_best(values, criterion, ended, best):
    part, found = fed(values, **criterion)
    assert (found, part.kept_round) == (ended, best)
    assert part.pinned == ({best} if best else set())


def test_the_reason_names_metric_direction_and_best_round():
    part, _ = fed([0.5, 0.6, 0.601, 0.6], patience=2, min_delta=0.002)
    text = "stopped after round 4: score has not risen by more than 0.002 for 2 evaluations; best round 3"
    assert part.ends(4) == text
    part, _ = fed([0.5, 0.6], every=5, patience=1, minimizes=True)
    assert part.ends(10) == "stopped after round 10: score has not fallen for 1 evaluation; best round 5"
    part, _ = fed([NAN], patience=1)
    assert (
        part.ends(1) == "stopped after round 1: score has not risen for 1 evaluation; no evaluation had a finite value"
    )


def test_an_extra_evaluation_of_the_last_round_is_forgotten_if_the_run_goes_on():
    """Every 5 rounds; round 12 is evaluated since it is the last, and its value is the best so far."""
    part, _ = fed([0.5, 0.6], every=5, patience=2)
    part.end_evaluation(RoundStats(12, metrics={"score": 0.9}))
    assert (part.kept_round, part.pinned) == (12, {10, 12})
    again = BestRound(RoundChoice(*part.criteria.values()), 5)
    again.restore({}, part.to_checkpoint()[1], None)
    assert (again.kept_round, again.pinned, again.last_round(12, 12)) == (12, {10, 12}, 12)
    again.cohort(RoundStats(13), None, lambda: None)
    assert (again.kept_round, again.pinned) == (10, {10})


# ---- runs


@pytest.fixture
def scripted(monkeypatch):
    """Sets the mean accuracy of evaluated rounds; that of each client stays as it is."""

    def script(values):
        real = RoundEvaluation.evaluate

        def evaluate(self, stats, state):
            real(self, stats, state)
            stats.metrics["accuracy"] = values[stats.round - 1]

        monkeypatch.setattr(RoundEvaluation, "evaluate", evaluate)

    return script


def rows(result, clients=(0, 3)):
    """The models of some clients."""
    return [torch.cat([p.flatten() for p in result.personal_model(client).parameters()]) for client in clients]


def same(ours, theirs):
    return all(a.equal(b) for a, b in zip(rows(ours), rows(theirs), strict=True))


STOPS = {"stopping": {"metric": "accuracy", "patience": 3}}


@pytest.mark.parametrize(("method", "keeps_files"), [("ditto", False), ("fedem", True), ("fedper", True)])
def test_the_models_are_those_of_a_run_that_ends_with_the_best_round(method, keeps_files, scripted, tmp_path):
    """Ditto keeps states of clients, FedEM mixtures, FedPer private layers; the run without `stopping` ends with 8."""
    scripted(RISES)
    found = simulate(experiment(methods=[method]), tmp_path / "run" if keeps_files else None)[method]
    short = simulate(experiment(methods=[method], rounds=3, keep="last"))[method]
    assert found.best_round == found.trained.round == 3 and len(found.records) == 8
    assert same(found, short) and found.assignments().equals(short.assignments())
    assert found.final["accuracy"] == 0.6 and found.metrics_of("last")["accuracy"] == 0.3
    assert found.metrics_of("best")["accuracy"] == 0.6


@pytest.mark.parametrize("rounds", [[3, 4], pytest.param([1, 2, 5, 6], marks=pytest.mark.slow)])
def test_a_resumed_run_ends_and_keeps_as_an_uninterrupted_one(rounds, scripted, tmp_path):
    scripted(RISES)
    whole = simulate(experiment(**STOPS), tmp_path / "whole")["ditto"]
    assert (whole.best_round, len(whole.records)) == (3, 6)  # 3 + 3
    text = "stopped after round 6: accuracy has not risen for 3 evaluations; best round 3"
    assert whole.ended == text and read_end(whole.directory).reason == text
    for round in rounds:
        folder = tmp_path / str(round)
        simulate_until(round, experiment(**STOPS, runtime={"keep_last": 1}), folder)
        loaded = load_run(folder)["ditto"]
        assert loaded.trained.round == loaded.best_round == min(round, 3)
        resumed = resume(folder, on_ray=False)["ditto"]
        assert figures(resumed) == figures(whole) and resumed.ended == text
        assert resumed.trained.round == 3 and same(resumed, whole)


def test_the_checkpoint_of_the_best_round_stays_until_another_is_best(scripted, tmp_path):
    """Ten rounds in which every segment is merged with others: the files of round 2 stay, those of round 1 do not."""
    scripted([0.1, 0.9, *[0.2] * 8])
    changes = {"rounds": 10, "runtime": {"keep_last": 1, "checkpoint_every": 1}}
    found = simulate(experiment(**changes), tmp_path / "run")["ditto"]
    folder = found.directory / "checkpoints"
    manifests = {int(file.stem): json.loads(file.read_text()) for file in folder.glob("*.json")}
    assert sorted(manifests) == [2, 10] and manifests[10]["pinned"] == [2] and "pinned" not in manifests[2]
    needed = {file["name"] for manifest in manifests.values() for file in manifest["files"]}
    assert {file.name for file in folder.glob("*.safetensors")} == needed
    assert not {file["name"] for file in manifests[2]["files"]} & {file["name"] for file in manifests[10]["files"]}
    assert same(found, simulate(experiment(rounds=2, keep="last"))["ditto"])
    (folder / manifests[2]["files"][0]["name"]).unlink()
    with pytest.raises(DataError, match="the models of the best round cannot be read .*checkpoint of round 2"):
        load_run(tmp_path / "run")["ditto"].model()


def test_a_run_that_did_not_stop_is_extended_as_if_it_had_made_all_rounds(scripted, tmp_path):
    """Every two rounds; round 3, the last of the shorter run, is evaluated too and best there, and is not in others."""
    scripted([0.0, 0.5, 0.9, 0.4, 0.0, 0.3, 0.0, 0.2])
    changes = {"evaluation": {"every": 2}, "stopping": {"metric": "accuracy", "patience": 2}}
    whole = simulate(experiment(**changes), tmp_path / "whole")["ditto"]
    short = simulate(experiment(**changes, rounds=3), tmp_path / "short")["ditto"]
    assert (short.best_round, short.ended) == (3, "")
    longer = simulate(experiment(**changes), tmp_path / "longer", extend=tmp_path / "short")["ditto"]
    assert longer.best_round == whole.best_round == 2 and same(longer, whole)
    assert (
        longer.ended == whole.ended == ("stopped after round 6: accuracy has not risen for 2 evaluations; best round 2")
    )


def test_a_method_that_stopped_is_not_trained_on_with_more_rounds(scripted, tmp_path):
    """It equals the run with more rounds, which stops there too."""
    scripted(RISES + RISES)
    simulate(experiment(**STOPS), tmp_path / "short")
    longer = simulate(experiment(**STOPS, rounds=16), tmp_path / "longer", extend=tmp_path / "short")["ditto"]
    assert (len(longer.records), longer.trained.round) == (6, 3)
    assert longer.ended == "stopped after round 6: accuracy has not risen for 3 evaluations; best round 3"


def test_the_models_of_the_best_round_are_verified_against_its_record(scripted, tmp_path, monkeypatch):
    scripted(RISES)
    seen, real = [], driver.verify
    monkeypatch.setattr(driver, "verify", lambda trained, *rest: seen.append(trained.round) or real(trained, *rest))
    simulate(experiment(), tmp_path / "run")
    assert seen == [3]


def test_without_a_finite_value_the_last_models_are_kept(scripted, tmp_path):
    scripted([NAN] * 8)
    found = simulate(experiment(rounds=2), tmp_path / "run")["ditto"]
    assert found.best_round is None and found.trained.round == 2


def test_only_evaluated_rounds_can_be_best_and_count(scripted, tmp_path):
    """Evaluated in rounds 2, 4, 6 and 8 of RISES: 0.3, 0.5, 0.55, 0.3."""
    scripted(RISES)
    found = simulate(experiment(evaluation={"every": 2}, runtime={"checkpoint_every": 5}), tmp_path / "run")["ditto"]
    assert found.best_round == found.trained.round == 6
    assert [record.metrics.get(BEST_ROUND) for record in found.records] == [None, 2, 2, 4, 4, 6, 6, 6]


def test_a_run_with_neither_writes_what_it_wrote(tmp_path):
    found = simulate(experiment(keep="last", rounds=1), tmp_path / "run")["ditto"]
    assert json.loads((found.directory / "end.json").read_text()).keys() == {"status", "summary", "time_ms"}
    manifest = json.loads((found.directory / "checkpoints/000001.json").read_text())
    assert "pinned" not in manifest and "best_round" not in manifest["values"]
    plain = Experiment(**merged(PLANTED, {"rounds": 1, "methods": ["ditto"]}))
    assert plain.config_hash == experiment(keep="last", rounds=1).config_hash != experiment(rounds=1).config_hash


@pytest.mark.slow
def test_on_ray_with_a_server_that_is_killed(cluster, actors, tmp_path, notes):
    """More loss is "better", so round 1 is best and a method ends 4 evaluations later; two servers die before."""
    kinds = {"keep": {"which": "best", "goal": "maximize", "metric": "test_loss"}, "methods": ["ditto", "ifca"]}
    kinds |= {"stopping": {"metric": "test_loss", "goal": "maximize", "patience": 4}}
    kinds["runtime"] = {"hosts": 2, "checkpoint_every": 3, "keep_last": 1}
    ours, after = simulate(experiment(**kinds), tmp_path / "ours"), [2, 4]

    def kill(round):
        if round in after:  # the round is made again by the next server
            after.remove(round)
            for server in actors("ServerActor"):
                os.kill(server, signal.SIGKILL)

    theirs = run(experiment(**kinds), tmp_path / "theirs", notes(kill))
    for label in ("ditto", "ifca"):
        assert figures(theirs[label]) == figures(ours[label]) and len(ours[label].records) == 5
        assert theirs[label].ended == ours[label].ended != ""
        assert theirs[label].trained.round == ours[label].trained.round == 1 and same(theirs[label], ours[label])


# ---- with validation data


def opposite():
    """Eight clients of two classes, on a line; the test samples have the other class of each pair."""
    draw = np.random.default_rng(0)
    x = draw.standard_normal((8 * 25, 3)).astype(np.float32)
    y, x_test = (x[:, 0] > 0).astype(np.int64), draw.standard_normal((60, 3)).astype(np.float32)
    owner = np.repeat(np.arange(8), 25)
    return federation_from_arrays(x, y, owner, x_test=x_test, y_test=(x_test[:, 0] < 0).astype(np.int64))


def test_validation_data_choose_where_test_data_would_choose_another_round():
    """What training learns is wrong for the test samples: their loss rises as that of the validation samples falls."""
    of_data = {"federation": opposite(), "validation": {"fraction": 0.2}}
    changes = {"methods": ["fedavg"], "rounds": 5, "keep": "best", "model": {"name": "mlp", "options": {"hidden": 4}}}
    common = {name: PLANTED[name] for name in ("local", "runtime", "tracking", "cohort")}
    found = simulate(
        Experiment(data=of_data, stopping={"metric": "validation/loss", "patience": 2}, **common, **changes)
    )
    result = found["fedavg"]
    frame = result.to_frame().set_index("round")
    assert frame["validation/loss"].idxmin() == result.best_round == result.trained.round == 5
    assert frame["test_loss"].idxmin() == 1 and frame["validation/accuracy"].iloc[-1] > 0.5 > result.final["accuracy"]
    by_default = prepare(Experiment(data=of_data, stopping={}, **common, **changes)).choice
    assert by_default == RoundChoice(Criterion("validation/accuracy", patience=10), Criterion("validation/accuracy"))
    assert by_default.warnings == []


# ---- what is chosen by


def choice(**changes):
    return prepare(experiment(**changes)).choice


def test_the_metric_follows_from_stopping_and_from_the_task():
    assert choice(keep="last") == RoundChoice()
    assert choice() == RoundChoice(None, Criterion("accuracy"))
    of_loss = choice(stopping={"metric": "test_loss", "patience": 4, "min_delta": 0.1})
    assert of_loss == RoundChoice(Criterion("test_loss", True, 0.1, 4), Criterion("test_loss", True))
    both = choice(
        stopping={"metric": "train_loss"}, keep={"which": "best", "metric": "num_clusters", "goal": "minimize"}
    )
    assert both == RoundChoice(Criterion("train_loss", True, 0.0, 10), Criterion("num_clusters", True))
    own = choice(keep={"which": "best", "metric": "ari"}, data={"synthetic_groups": 2})
    assert own.keeps_by == Criterion("ari")


def test_a_choice_by_test_data_is_warned_of():
    (of_stopping, of_keep) = choice(stopping={"metric": "test_loss"}).warnings
    assert of_stopping.startswith("stopping: the clients' test data choose the end by test_loss, which favours")
    assert of_keep.startswith("keep: the clients' test data choose the round of the kept models by test_loss")
    assert choice(keep={"which": "best", "metric": "train_loss"}).warnings == []
    assert "the true groups choose" in choice(keep={"which": "best", "metric": "ari"}).warnings[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"stopping": {"metric": "acuracy"}},
            r"no metric 'acuracy' \(did you mean 'accuracy'\?\); they have accuracy, ",
        ),
        ({"stopping": {"metric": "validation/accuracy"}}, "needs validation data; set data.validation, or name"),
        ({"stopping": {"patience": 3}}, "without validation data there is no metric that it could mean"),
        ({"keep": {"which": "best", "metric": "num_clusters"}}, "keep.goal: whether more or less of num_clusters"),
        ({"keep": {"which": "best", "metric": "accuracy_tuned"}}, "no metric 'accuracy_tuned'"),
        ({"keep": {"which": "best", "metric": "newcomer_accuracy"}}, "no metric 'newcomer_accuracy'"),
        ({"keep": "bst"}, "keep.which"),
        ({"stopping": {"metric": "accuracy", "patience": 0}}, "stopping.patience"),
        ({"stopping": {"metric": "accuracy", "min_delta": -1}}, "stopping.min_delta"),
        ({"stopping": {"metric": "accuracy", "goal": "more"}}, "stopping.goal"),
    ],
)
def test_what_cannot_decide_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        choice(**changes)
