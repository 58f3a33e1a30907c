"""Aggregation rules against numpy on random rows: their formulas, ties, few results, and private columns."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from closeness import close

from cfl_ray.config import Experiment
from cfl_ray.core.aggregation import apply
from cfl_ray.core.aggregation.apply import aggregate, by_columns, range_cuts, squared_distances
from cfl_ray.core.aggregation.rules import RULES, Mean, Median, MultiKrum, NormClipping, TrimmedMean, parse_rule
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.params import Columns
from cfl_ray.core.work import Address, AverageDeferred, Averaging, ClientState, CombineColumns, Outcome, Rows, Train
from cfl_ray.engine.reduce import combine_columns
from cfl_ray.errors import ConfigError, RunError
from cfl_ray.methods.fedavg import FedAvg

P = 40
WEIGHTS = np.ones(1)  # these rules do not look at them


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, P)).astype(np.float32)


class TestNames:
    def test_of_every_rule(self):
        names = ["mean", "median", "trimmed_mean", "multi_krum", "norm_clipping"]
        assert [parse_rule(name).name for name in RULES] == names
        assert parse_rule("mean") == Mean() and parse_rule({"multi_krum": None}) == MultiKrum()
        assert parse_rule({"trimmed_mean": {"share": 0.2}}) == TrimmedMean(0.2)

    @pytest.mark.parametrize(
        "value, message",
        [
            ("medain", r"unknown aggregation rule 'medain' \(did you mean 'median'\?\)"),
            ({"median": {}, "mean": {}}, "aggregation must be a name, or one name with its options"),
            (["median"], r"aggregation must be one of mean, median, .*, got \['median'\]"),
            (None, "aggregation must be one of mean, median, .*, got None"),
            ({"trimmed_mean": 0.2}, r"aggregation must be a name, or .*, got \{'trimmed_mean': 0.2\}"),
            ({"median": {"share": 0.2}}, "aggregation Median has no option 'share'; it has none"),
            ({"trimmed_mean": {"shar": 0.2}}, r"TrimmedMean has no option 'shar' \(did you mean 'share'\?\)"),
            ({"trimmed_mean": {"share": 0.5}}, "trimmed_mean.share must be in 0 .. 0.5, without 0.5, got 0.5"),
            ({"trimmed_mean": {"share": True}}, "got True"),
            (
                {"multi_krum": {"attackers": 0.5}},
                "multi_krum.attackers must be a share in 0 .. 0.5, without 0.5, or a whole number, got 0.5",
            ),
            ({"multi_krum": {"attackers": -1}}, "got -1"),
            ({"multi_krum": {"keep": 0}}, "multi_krum.keep must be a whole number from 1 on, or null, got 0"),
            ({"norm_clipping": {"bound": 0}}, "norm_clipping.bound must be above 0, or null, got 0"),
            ({"norm_clipping": {"bound": float("inf")}}, "got inf"),
        ],
    )
    def test_of_others_are_rejected(self, value, message):
        with pytest.raises((ValueError, ConfigError), match=message):
            parse_rule(value)


class TestFormulas:
    @pytest.mark.parametrize("count", [3, 4, 7, 10])
    def test_median(self, count):
        rows_nP = rows(count)
        assert np.array_equal(
            by_columns(Median(), WEIGHTS, [rows_nP[:, :9], rows_nP[:, 9:]]), np.median(rows_nP.astype(np.float64), 0)
        )

    @pytest.mark.parametrize(
        "count, share, cut", [(10, 0.3, 3), (10, 0.29, 2), (7, 0.2, 1), (4, 0.49, 1), (5, 0.1, 0), (100, 0.29, 29)]
    )
    def test_trimmed_mean(self, count, share, cut):
        """0.29 of 100 is 29, although the product in float64 is a little less."""
        rows_nP = rows(count)
        expected = np.sort(rows_nP.astype(np.float64), 0)[cut : count - cut].mean(0)
        assert close(by_columns(TrimmedMean(share), WEIGHTS, [rows_nP]), expected, 1e-12)

    def test_half_the_rows_cannot_move_the_median_beyond_the_others(self):
        rows_nP = rows(9)
        rows_nP[:4] = 1e6
        found = by_columns(Median(), WEIGHTS, [rows_nP])
        assert (found <= rows_nP[4:].max(0)).all() and (found >= rows_nP[4:].min(0)).all()

    def test_squared_distances(self):
        rows_nP = rows(6)
        expected = ((rows_nP[:, None].astype(np.float64) - rows_nP) ** 2).sum(2)
        found = squared_distances([rows_nP[:, :7], rows_nP[:, 7:]])
        assert close(found, expected, 1e-6)

    def test_squared_distances_of_honest_results_are_exact_however_far_the_others_are(self):
        """Also with a column far from zero, beside whose squares those of the others are lost in float64."""
        rows_nP = rows(7) * 1e-2
        rows_nP[:, 0] += 1e6
        expected = ((rows_nP[:5, None].astype(np.float64) - rows_nP[:5]) ** 2).sum(2)
        rows_nP[5:] += 1e6
        assert close(squared_distances([rows_nP])[:5, :5], expected, 1e-6)

    @pytest.mark.parametrize("attackers, suspects", [(2, 2), (0.3, 3), (0, 0), (9, 3), (0.1, 1)])
    def test_multi_krum(self, attackers, suspects):
        """n = 10: f is 3 at most, since 10 >= 2 * 3 + 3. Scores by hand; m = n - f."""
        rows_nP = rows(10, seed=3)
        squared_nn = ((rows_nP[:, None] - rows_nP) ** 2).sum(2)
        score_n = [sum(sorted(np.delete(squared_nn[i], i))[: 10 - suspects - 2]) for i in range(10)]
        expected = sorted(np.argsort(score_n)[: 10 - suspects].tolist())
        assert MultiKrum(attackers).chosen(squared_nn).tolist() == expected
        assert MultiKrum(attackers, keep=1).chosen(squared_nn).tolist() == [int(np.argmin(score_n))]

    def test_multi_krum_leaves_out_distant_results(self):
        rows_nP = rows(10)
        rows_nP[[2, 5, 7]] += 20
        assert MultiKrum(0.3).chosen(squared_distances([rows_nP])).tolist() == [0, 1, 3, 4, 6, 8, 9]

    def test_on_ties_the_first_are_taken(self):
        assert MultiKrum(2).chosen(np.zeros((7, 7))).tolist() == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("count, most", [(3, 0), (4, 0), (5, 1), (6, 1), (7, 2), (100, 48)])
    def test_krum_suspects_no_more_than_it_allows(self, count, most):
        assert MultiKrum(1000).suspects(count) == most and (most == 0 or count >= 2 * most + 3)


class DeferredResults:
    """A backend whose clients' deferred results are the rows (n, P). It records its work."""

    def __init__(self, rows_nP: np.ndarray):
        self.rows, self.works = torch.from_numpy(rows_nP), []

    def run(self, work):
        self.works.append(work)
        return self.combined(work) if isinstance(work, CombineColumns) else self.averaged(work)

    def combined(self, work: CombineColumns) -> Outcome:
        parts = []
        for at, (start, stop) in enumerate(zip(work.ids_M, work.stop_M)):
            results = {i: self.rows[client, start:stop] for i, client in enumerate(work.members)}
            parts.append(combine_columns(work.take(np.array([at])), results)[0])
        longest = np.max([part.shape for part in parts], 0)
        padded = [np.pad(part, [(0, most - size) for most, size in zip(longest, part.shape)]) for part in parts]
        return Outcome({"combined": np.stack(padded)})

    def averaged(self, work: AverageDeferred) -> Outcome:
        averaging, means = work.averaging, {}
        arrived_R = np.bincount(averaging.out_E, averaging.weight_E, averaging.num_rows)
        for out, client, weight in zip(averaging.out_E, averaging.client_E, averaging.weight_E):
            if arrived_R[out] > 0:
                share = weight / arrived_R[out]
                means[out] = means.get(out, 0) + share * self.rows[work.ids_M[client]].double()
        return Outcome({}, means, arrived_R)


def averaged(
    rule, rows_nP, weight_RM, valid=None, client_state=None, sent_P=None
) -> tuple[np.ndarray, Outcome, DeferredResults]:
    """Averages by the rule, float64 (R, P) and NaN for rows without members, with their outcome and the backend."""
    count, backend = len(rows_nP), DeferredResults(rows_nP)
    sent_KP = torch.zeros(1, P) if sent_P is None else torch.from_numpy(sent_P)[None]
    training = Train(
        Address(0, 1, 1),
        np.arange(count),
        (sent_KP,),
        start=Rows(0, np.zeros(count, int)),
        local=LocalSGD(),
        steps_M=np.ones(count, int),
        client_state=client_state,
        deferred_cuts=range_cuts(rule, P, client_state, count),
    )
    distance = np.linalg.norm(rows_nP.astype(np.float64) - sent_KP.numpy(), axis=1)
    trained = Outcome({"valid": np.ones(count, bool) if valid is None else valid, "upload_distance": distance})
    averaging = Averaging.of(weight_RM, count)
    outcome = aggregate(rule, backend, training, trained, np.arange(count), averaging)
    result_RP = np.full((averaging.num_rows, P), np.nan)
    for out, mean_P in outcome.means.items():
        result_RP[out] = mean_P
    return result_RP, outcome, backend


def mean(rows_nP: np.ndarray) -> np.ndarray:
    return rows_nP.astype(float).mean(0)


def median(rows_nP: np.ndarray) -> np.ndarray:
    return np.median(rows_nP.astype(float), 0)


class TestAverages:
    ROWS = rows(12)

    def test_of_several_rows_have_members_of_their_own(self):
        weight_RM = np.zeros((4, 12))
        weight_RM[0, :5], weight_RM[1, 5:11], weight_RM[3] = 1, np.arange(1, 7), 1  # row 2 has no members, row 3 all
        found, outcome, _ = averaged(Median(), self.ROWS, weight_RM)
        for out, mine in ((0, slice(0, 5)), (1, slice(5, 11)), (3, slice(0, 12))):
            assert close(found[out], median(self.ROWS[mine]), 1e-12)
        assert 2 not in outcome.means and outcome.arrived_R.tolist() == pytest.approx([1, 1, 0, 1])

    @pytest.mark.parametrize("rule", [Median(), TrimmedMean(0.3), MultiKrum(0.3)], ids=lambda rule: rule.name)
    @pytest.mark.parametrize("count", [1, 2])
    def test_of_one_or_two_results_is_their_mean_whatever_their_weights(self, rule, count):
        weight_RM = np.zeros((1, 12))
        weight_RM[0, :count] = [1, 5][:count]
        found = averaged(rule, self.ROWS, weight_RM)[0][0]
        assert close(found, mean(self.ROWS[:count]), 1e-12)

    @pytest.mark.parametrize("count", [3, 4])
    def test_krum_below_five_results_is_the_median(self, count):
        """With f = 0 it is the mean of all results."""
        rows_nP, weight_RM = self.ROWS[:count], np.ones((1, count))
        assert close(averaged(MultiKrum(), rows_nP, weight_RM)[0][0], median(rows_nP), 1e-12)
        assert close(averaged(MultiKrum(attackers=0), rows_nP, weight_RM)[0][0], mean(rows_nP), 1e-12)

    def test_krum_is_the_mean_of_the_chosen(self):
        far = self.ROWS.copy()
        far[[1, 4, 9]] += 30
        found = averaged(MultiKrum(3), far, np.ones((1, 12)))[0][0]
        assert close(found, mean(np.delete(far, [1, 4, 9], 0)), 1e-5)

    @pytest.mark.parametrize(
        "rule", [Median(), TrimmedMean(0.3), MultiKrum(0.3), NormClipping()], ids=lambda rule: rule.name
    )
    def test_excluded_clients_and_clients_without_weight_do_not_count(self, rule):
        spoiled, weight = self.ROWS.copy(), np.ones(12)
        spoiled[3], weight[8] = np.nan, 0
        found, outcome, _ = averaged(rule, spoiled, [weight], valid=np.arange(12) != 3)
        expected, _, _ = averaged(rule, np.delete(self.ROWS, [3, 8], 0), np.ones((1, 10)))
        assert close(found, expected, 1e-9) and outcome.arrived_R[0] == pytest.approx(10 / 11)
        assert outcome.arrays["valid"].tolist() == [client != 3 for client in range(12)]

    @pytest.mark.parametrize("rule", [Median(), MultiKrum(0.3)], ids=lambda rule: rule.name)
    def test_private_columns_have_no_effect(self, rule):
        """With them the first three results would be far from the others."""
        far = self.ROWS.copy()
        far[:3, 10:20] += 1000
        client_state = ClientState("some", Columns(((10, 20),)))
        found, _, _ = averaged(rule, far, np.ones((1, 12)), client_state=client_state)
        shared = np.r_[0:10, 20:P]
        expected, _, _ = averaged(rule, np.pad(far[:, shared], ((0, 0), (0, 10))), np.ones((1, 12)))
        assert close(found[0, shared], expected[0, :30], 1e-9)

    def test_clipped_changes_are_averaged_by_weight(self):
        weight_M, sent_P = np.arange(1, 13), rows(1, seed=9)[0]
        for bound in (None, 2.0, 1e9):
            change = self.ROWS.astype(float) - sent_P
            length = np.linalg.norm(change, axis=1)
            scale = np.minimum(1, (np.median(length) if bound is None else bound) / length)
            expected = sent_P + (weight_M[:, None] * scale[:, None] * change).sum(0) / weight_M.sum()
            found, outcome, _ = averaged(NormClipping(bound), self.ROWS, [weight_M], sent_P=sent_P)
            assert close(found[0], expected, 1e-9) and outcome.arrived_R[0] == pytest.approx(1)

    def test_results_without_a_change_are_the_sent_model(self):
        sent_P = rows(1)[0]
        found = averaged(NormClipping(), np.tile(sent_P, (4, 1)), np.ones((1, 4)), sent_P=sent_P)[0]
        assert close(found[0], sent_P, 1e-9)


def test_large_rows_are_cut_into_ranges_without_any_effect(monkeypatch):
    rows_nP = rows(8)
    whole = [averaged(rule, rows_nP, np.ones((1, 8)))[0] for rule in (Median(), TrimmedMean(0.2))]
    monkeypatch.setattr(apply, "_RANGE", 30)
    monkeypatch.setattr("cfl_ray.engine.reduce._BLOCK", 24)
    for rule, expected in zip((Median(), TrimmedMean(0.2)), whole):
        found, _, backend = averaged(rule, rows_nP, np.ones((1, 8)))
        assert len(backend.works[0].ids_M) > 5 and np.array_equal(found, expected)


OWN = """class Rule:
    def __init__(self, a=1):
        self.a = a

    def weigh(self, squared_nn, weight_n):
        return weight_n
"""


class Halving:
    """Half of the sum: by columns."""

    def combine(self, values_nF, weight_n):
        return values_nF.sum(0) / 2


@dataclass(frozen=True)
class Nearest:
    """The `keep` results nearest to all others: by weights of any scale."""

    keep: int = 1

    def weigh(self, squared_nn, weight_n):
        found_n = np.zeros(len(weight_n))
        found_n[np.argsort(squared_nn.sum(1))[: self.keep]] = 7.0
        return found_n


class Shrinking:
    """Every change is cut to a quarter."""

    def scale(self, distance_n, weight_n):
        return np.full(len(distance_n), 0.25)


def returning(method: str, value):
    return type("Returning", (), {method: lambda self, values, weight_n: value})()


class TestOwnRules:
    def test_by_columns(self):
        rows_nP = rows(5)
        found, _, _ = averaged(Halving(), rows_nP, np.ones((1, 5)))
        assert close(found[0], rows_nP.astype(np.float64).sum(0) / 2, 1e-5)

    def test_by_weights_of_any_scale(self):
        rows_nP = rows(6)
        sums = ((rows_nP[:, None].astype(np.float64) - rows_nP) ** 2).sum((1, 2))
        found, _, _ = averaged(Nearest(2), rows_nP, np.ones((1, 6)))
        assert close(found[0], rows_nP[np.argsort(sums)[:2]].mean(0), 1e-5)

    def test_by_factors_of_the_changes(self):
        """w + 1/4 (mean of W - w), with the weights of the method."""
        rows_nP, sent_P = rows(4), rows(1, seed=5)[0]
        weights = np.array([[1.0, 2, 3, 4]])
        found, _, _ = averaged(Shrinking(), rows_nP, weights, sent_P=sent_P)
        expected = sent_P + (weights[0] / 10 @ (rows_nP - sent_P)) / 4
        assert close(found[0], expected, 2e-5)

    def test_weights_of_the_method_are_passed_and_add_up_to_1(self):
        seen = []

        class Seeing:
            def weigh(self, squared_nn, weight_n):
                seen.append(weight_n)
                return weight_n

        rows_nP = rows(4)
        found, _, _ = averaged(Seeing(), rows_nP, np.array([[1.0, 2, 3, 0]]))
        assert close(seen[0], [1 / 6, 2 / 6, 3 / 6], 1e-12)
        assert close(found[0], np.array([1, 2, 3]) / 6 @ rows_nP[:3], 1e-5)

    @pytest.mark.parametrize(
        "rule, message",
        [
            (
                returning("combine", np.zeros((1, P))),
                rf"returned ndarray of float64 and shape \(1, {P}\), expected {P} ",
            ),
            (returning("combine", None), f"returned None, expected {P} numbers"),
            (returning("combine", np.full(P, np.nan)), f"returned nan at position 0 of {P}, expected finite numbers"),
            (returning("weigh", [1, 1]), r"returned list of 2, expected 5 numbers, shape \(5,\)"),
            (returning("weigh", [1, 1, -1, 1, 1]), "returned -1 at position 2 of 5, expected weights >= 0"),
            (returning("weigh", np.zeros(5)), "returned 0 for all 5 results"),
            (returning("scale", np.full(5, 1.5)), "returned 1.5 at position 0 of 5, expected factors in 0 .. 1"),
        ],
    )
    def test_wrong_results_name_the_authors_line(self, rule, message):
        with pytest.raises(RunError, match=rf"aggregation rule .*test_aggregation.py, line \d+\) {message}"):
            averaged(rule, rows(5), np.ones((1, 5)))

    def test_an_exception_names_the_authors_line(self):
        class Dividing:
            def weigh(self, squared_nn, weight_n):
                return [1 // 0]

        with pytest.raises(RunError, match=r"Dividing.weigh \(.*, line \d+\) failed: ZeroDivision.* \(line \d+\)"):
            averaged(Dividing(), rows(5), np.ones((1, 5)))

    def test_are_named_by_file_with_their_parameters(self, tmp_path):
        (tmp_path / "own.py").write_text(OWN)
        name = f"{tmp_path}/own.py:Rule"
        assert parse_rule(name).a == 1 and parse_rule({name: {"a": 5}}).a == 5 and parse_rule({name: None}).a == 1
        with pytest.raises(ConfigError, match=r"aggregation rule Rule \(.*own.py, line 1\) has no option 'b'"):
            parse_rule({name: {"b": 1}})
        with pytest.raises(
            ConfigError, match="aggregation must be a name, or one name with its options, .* got .*: 5}"
        ):
            parse_rule({name: 5})

    def test_are_objects_and_classes_in_python(self):
        rule = Nearest(3)
        assert parse_rule(rule) is rule and parse_rule(Nearest) == Nearest(1)

    def test_must_keep_exactly_one_contract(self):
        with pytest.raises(ConfigError, match="has no method of a rule; expected one of combine"):
            parse_rule(object())
        both = type("Both", (Halving, Shrinking), {})
        with pytest.raises(ConfigError, match="has combine and scale; expected one of"):
            parse_rule(both)

    def test_travel_with_their_method(self, tmp_path):
        """A host that does not have the file has the rule all the same."""
        file = tmp_path / "gone.py"
        file.write_text("class Rule:\n    def weigh(self, squared_nn, weight_n): return weight_n\n")
        method = FedAvg(aggregation={f"{file}:Rule": {}})
        file.unlink()
        assert type(method.aggregation_rule).__name__ == "Rule"

    def test_are_recorded_by_reference(self):
        experiment, shared = (
            Experiment(methods=[FedAvg(aggregation=Nearest(3))]),
            {"norm": "shared", "weights": "samples"},
        )
        assert experiment.to_dict()["methods"] == [
            {"fedavg": {"aggregation": {"Nearest": {"keep": 3}}, "server_optimizer": "none"} | shared}
        ]
        assert experiment.config_hash != Experiment(methods=[FedAvg(aggregation=Nearest(2))]).config_hash
