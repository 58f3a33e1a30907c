"""Rules of aggregation by themselves, against numpy on random rows; what they do with ties, with few results, and with private columns."""

import numpy as np
import pytest
import torch

from cfl_ray.core.params import Columns
from cfl_ray.core.robust import RULES, Mean, Median, MultiKrum, NormClipping, TrimmedMean, aggregate, parse
from cfl_ray.core.work import Address, Combine, Mix, MixPending, Outcome, Own, Rows, Train
from cfl_ray.engine.reduce import combined

P = 40


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(count, P)).astype(np.float32)


class TestNames:
    def test_of_every_rule(self):
        assert [parse(name).name for name in RULES] == ["mean", "median", "trimmed_mean", "multi_krum", "norm_clipping"]
        assert parse({"trimmed_mean": {"share": 0.2}}) == TrimmedMean(0.2) and parse({"multi_krum": None}) == MultiKrum() and parse("mean") == Mean()

    @pytest.mark.parametrize("value, message", [
        ("medain", "aggregation must be one of mean, median, trimmed_mean, multi_krum, norm_clipping, or one with its parameters"),
        ({"median": {}, "mean": {}}, "must be one of"),
        (["median"], "must be one of"),
        (None, "must be one of"),
        ({"trimmed_mean": 0.2}, r"must be one of .*, got \{'trimmed_mean': 0.2\}"),
        ({"median": {"share": 0.2}}, "aggregation median has no parameter 'share'"),
        ({"trimmed_mean": {"shar": 0.2}}, r"aggregation trimmed_mean has no parameter 'shar' \(did you mean 'share'\?\)"),
        ({"trimmed_mean": {"share": 0.5}}, "trimmed_mean.share must be in 0 .. 0.5, without 0.5, got 0.5"),
        ({"trimmed_mean": {"share": True}}, "got True"),
        ({"multi_krum": {"attackers": 0.5}}, "multi_krum.attackers must be a share in 0 .. 0.5, without 0.5, or a whole number, got 0.5"),
        ({"multi_krum": {"attackers": -1}}, "got -1"),
        ({"multi_krum": {"keep": 0}}, "multi_krum.keep must be a whole number from 1 on, or null, got 0"),
        ({"norm_clipping": {"bound": 0}}, "norm_clipping.bound must be above 0, or null, got 0"),
        ({"norm_clipping": {"bound": float("inf")}}, "got inf"),
    ])  # fmt: skip
    def test_of_others_are_refused(self, value, message):
        with pytest.raises(ValueError, match=message):
            parse(value)


class TestFormulas:
    @pytest.mark.parametrize("count", [3, 4, 7, 10])
    def test_median(self, count):
        rows_nP = rows(count)
        assert np.array_equal(Median()([rows_nP[:, :9], rows_nP[:, 9:]]), np.median(rows_nP.astype(np.float64), 0))

    @pytest.mark.parametrize("count, share, cut", [(10, 0.3, 3), (10, 0.29, 2), (7, 0.2, 1), (4, 0.49, 1), (5, 0.1, 0), (100, 0.29, 29)])
    def test_trimmed_mean(self, count, share, cut):
        """0.29 of 100 is 29, although the product in float64 is a little less."""
        rows_nP = rows(count)
        expected = np.sort(rows_nP.astype(np.float64), 0)[cut : count - cut].mean(0)
        assert np.allclose(TrimmedMean(share)([rows_nP]), expected, rtol=0, atol=1e-12)

    def test_half_the_rows_cannot_move_the_median_beyond_the_others(self):
        rows_nP = rows(9)
        rows_nP[:4] = 1e6
        found = Median()([rows_nP])
        assert (found <= rows_nP[4:].max(0)).all() and (found >= rows_nP[4:].min(0)).all()

    def test_squared_distances(self):
        rows_nP = rows(6)
        expected = ((rows_nP[:, None].astype(np.float64) - rows_nP) ** 2).sum(2)
        found = MultiKrum()([rows_nP[:, :7], rows_nP[:, 7:]])
        assert np.allclose(found, expected, rtol=1e-6, atol=1e-9)

    def test_squared_distances_of_the_honest_are_exact_however_far_the_others_are(self):
        rows_nP = rows(7) * 1e-2
        expected = ((rows_nP[:5, None].astype(np.float64) - rows_nP[:5]) ** 2).sum(2)
        rows_nP[5:] += 1e6
        assert np.allclose(MultiKrum()([rows_nP])[:5, :5], expected, rtol=1e-4, atol=1e-12)

    @pytest.mark.parametrize("attackers, suspects", [(2, 2), (0.3, 3), (0, 0), (9, 3), (0.1, 1)])
    def test_multi_krum(self, attackers, suspects):
        """n = 10: f is 3 at most, since 10 >= 2 * 3 + 3. Scores by hand; m = n - f."""
        rows_nP = rows(10, seed=3)
        squared_nn = ((rows_nP[:, None] - rows_nP) ** 2).sum(2)
        score_n = [sum(sorted(np.delete(squared_nn[i], i))[: 10 - suspects - 2]) for i in range(10)]
        expected = sorted(np.argsort(score_n)[: 10 - suspects].tolist())
        assert MultiKrum(attackers).chosen(squared_nn).tolist() == expected
        assert MultiKrum(attackers, keep=1).chosen(squared_nn).tolist() == [int(np.argmin(score_n))]

    def test_multi_krum_leaves_out_those_far_off(self):
        rows_nP = rows(10)
        rows_nP[[2, 5, 7]] += 20
        assert MultiKrum(0.3).chosen(MultiKrum()([rows_nP])).tolist() == [0, 1, 3, 4, 6, 8, 9]

    def test_on_ties_the_first_are_taken(self):
        assert MultiKrum(2).chosen(np.zeros((7, 7))).tolist() == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("count, most", [(3, 0), (4, 0), (5, 1), (6, 1), (7, 2), (100, 48)])
    def test_no_more_are_suspected_than_krum_allows(self, count, most):
        assert MultiKrum(1000).suspects(count) == most and (most == 0 or count >= 2 * most + 3)


class Pending:
    """A backend with results that were left behind; every other client is unsound. Counts what it is asked."""

    def __init__(self, rows_nP: np.ndarray):
        self.rows, self.asked = torch.from_numpy(rows_nP), []

    def run(self, work):
        self.asked.append(work)
        if isinstance(work, Combine):
            memory = {i: self.rows[client] for i, client in enumerate(work.members)}
            parts = [combined(work.take(np.array([at])), memory)[0] for at in range(len(work.ids_M))]
            longest = np.max([part.shape for part in parts], 0)
            return Outcome({"combined": np.stack([np.pad(part, [(0, most - size) for most, size in zip(longest, part.shape)]) for part in parts])})
        assert isinstance(work, MixPending)
        sums = {}
        for out, client, weight in zip(work.mix.out_E, work.mix.client_E, work.mix.weight_E):
            sums[out] = sums.get(out, 0) + weight * self.rows[work.ids_M[client]].double()
        return Outcome({}, sums, np.bincount(work.mix.out_E, work.mix.weight_E, work.mix.num_rows))


def averaged(rule, rows_nP, weight_RM, ok=None, own=None, sent_P=None) -> tuple[np.ndarray, Outcome, Pending]:
    """float64 (R, P), NaN for rows without members."""
    count, weight_RM = len(rows_nP), np.asarray(weight_RM, float)
    sent_KP = torch.zeros(1, P) if sent_P is None else torch.from_numpy(sent_P)[None]
    training = Train(Address(0, 1, 1), np.arange(count), (sent_KP,), own=own, start=Rows(0, np.zeros(count, int)))
    length = np.linalg.norm(rows_nP.astype(np.float64) - sent_KP.numpy(), axis=1)
    found = Outcome({"ok": np.ones(count, bool) if ok is None else np.array(ok), "length": length})
    out_E, client_E = np.nonzero(weight_RM)
    total_R = weight_RM.sum(1)
    mix = Mix(len(weight_RM), out_E, client_E, weight_RM[out_E, client_E] / total_R[out_E], total_R)
    backend = Pending(rows_nP)
    outcome = aggregate(rule, backend, training, found, np.arange(count), mix)
    result = np.full((len(weight_RM), P), np.nan)
    for out, sum_P in outcome.sums.items():
        result[out] = sum_P / outcome.mass_R[out]
    return result, outcome, backend


class TestAverages:
    ROWS = rows(12)

    def test_of_several_rows_have_their_own_members(self):
        weight_RM = np.zeros((4, 12))
        weight_RM[0, :5], weight_RM[1, 5:11], weight_RM[3] = 1, np.arange(1, 7), 1  # row 2 has no members, row 3 all
        found, outcome, _ = averaged(Median(), self.ROWS, weight_RM)
        for out, mine in ((0, slice(0, 5)), (1, slice(5, 11)), (3, slice(0, 12))):
            assert np.allclose(found[out], np.median(self.ROWS[mine].astype(float), 0), rtol=0, atol=1e-12)
        assert 2 not in outcome.sums and outcome.mass_R.tolist() == pytest.approx([1, 1, 0, 1])

    @pytest.mark.parametrize("rule", [Median(), TrimmedMean(0.3), MultiKrum(0.3)], ids=lambda rule: rule.name)
    @pytest.mark.parametrize("count", [1, 2])
    def test_of_one_or_two_results_is_their_mean_whatever_their_weights(self, rule, count):
        weight_RM = np.zeros((1, 12))
        weight_RM[0, :count] = [1, 5][:count]
        assert np.allclose(averaged(rule, self.ROWS, weight_RM)[0][0], self.ROWS[:count].astype(float).mean(0), rtol=0, atol=1e-12)

    @pytest.mark.parametrize("count", [3, 4])
    def test_krum_below_five_results_is_the_median(self, count):
        assert np.allclose(averaged(MultiKrum(), self.ROWS[:count], np.ones((1, count)))[0][0], np.median(self.ROWS[:count].astype(float), 0), atol=1e-12)
        nobody = averaged(MultiKrum(attackers=0), self.ROWS[:count], np.ones((1, count)))[0][0]
        assert np.allclose(nobody, self.ROWS[:count].astype(float).mean(0), atol=1e-12), "with nobody suspected it is the mean of all"

    def test_krum_is_the_mean_of_the_chosen(self):
        far = self.ROWS.copy()
        far[[1, 4, 9]] += 30
        assert np.allclose(averaged(MultiKrum(3), far, np.ones((1, 12)))[0][0], np.delete(far, [1, 4, 9], 0).astype(float).mean(0), atol=1e-6)

    @pytest.mark.parametrize("rule", [Median(), TrimmedMean(0.3), MultiKrum(0.3), NormClipping()], ids=lambda rule: rule.name)
    def test_clients_that_were_rejected_or_weigh_nothing_are_no_members(self, rule):
        spoiled, weight = self.ROWS.copy(), np.ones(12)
        spoiled[3], weight[8] = np.nan, 0
        found, outcome, _ = averaged(rule, spoiled, [weight], ok=np.arange(12) != 3)
        expected, _, _ = averaged(rule, np.delete(self.ROWS, [3, 8], 0), np.ones((1, 10)))
        assert np.allclose(found, expected, rtol=0, atol=1e-9) and outcome.mass_R[0] == pytest.approx(10 / 11)
        assert outcome.arrays["ok"].tolist() == [client != 3 for client in range(12)]

    @pytest.mark.parametrize("rule", [Median(), MultiKrum(0.3)], ids=lambda rule: rule.name)
    def test_private_columns_take_no_part(self, rule):
        """They would put the first three clients far off; they were never uploaded."""
        far = self.ROWS.copy()
        far[:3, 10:20] += 1000
        own = Own("some", Columns(((10, 20),)))
        found, _, _ = averaged(rule, far, np.ones((1, 12)), own=own)
        shared = np.r_[0:10, 20:P]
        expected, _, _ = averaged(rule, np.pad(far[:, shared], ((0, 0), (0, 10))), np.ones((1, 12)))
        assert np.allclose(found[0, shared], expected[0, :30], rtol=0, atol=1e-9)

    def test_clipped_changes_are_averaged_by_weight(self):
        weight_M, sent_P = np.arange(1, 13), rows(1, seed=9)[0]
        for bound in (None, 2.0, 1e9):
            change = self.ROWS.astype(float) - sent_P
            length = np.linalg.norm(change, axis=1)
            scale = np.minimum(1, (np.median(length) if bound is None else bound) / length)
            expected = sent_P + (weight_M[:, None] * scale[:, None] * change).sum(0) / weight_M.sum()
            found, outcome, _ = averaged(NormClipping(bound), self.ROWS, [weight_M], sent_P=sent_P)
            assert np.allclose(found[0], expected, rtol=0, atol=1e-9) and outcome.mass_R[0] == pytest.approx(1)

    def test_results_that_did_not_change_are_what_was_sent(self):
        sent_P = rows(1)[0]
        assert np.allclose(averaged(NormClipping(), np.tile(sent_P, (4, 1)), np.ones((1, 4)), sent_P=sent_P)[0], sent_P, atol=1e-9)


def test_large_rows_are_cut_into_ranges_that_change_nothing(monkeypatch):
    from cfl_ray.core import robust

    rows_nP = rows(8)
    whole = [averaged(rule, rows_nP, np.ones((1, 8)))[0] for rule in (Median(), TrimmedMean(0.2))]
    monkeypatch.setattr(robust, "_RANGE", 30)
    monkeypatch.setattr("cfl_ray.engine.reduce._BLOCK", 24)
    for rule, expected in zip((Median(), TrimmedMean(0.2)), whole):
        found, _, backend = averaged(rule, rows_nP, np.ones((1, 8)))
        assert len(backend.asked[0].ids_M) > 5 and np.array_equal(found, expected)
