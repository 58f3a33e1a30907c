"""Pairs of clients in tests of two methods."""

import numpy as np
import pyarrow as pa
import pytest

from cfl_ray.results import comparison
from cfl_ray.results.client_scores import ClientPairs, ClientScores
from cfl_ray.results.results import MethodResult
from cfl_ray.results.significance import ChosenTest, pairs_in_words


def scores_of(**rows):
    """The scores of the clients of methods: (accuracy, loss) of each client, for each seed."""
    results = {}
    for method, of_seeds in rows.items():
        for seed, of_clients in enumerate(of_seeds):
            columns = [np.full(len(of_clients), 1, np.int32), np.arange(len(of_clients)), *np.float32(of_clients).T]
            table = pa.table(dict(zip(("round", "client", "accuracy", "loss"), columns, strict=True)))
            results.setdefault(("e", method), {})[seed] = MethodResult(method, [], {}, clients=table)
    return ClientScores(results)


def test_clients_that_share_samples_and_models_are_one_pair_and_seeds_are_averaged():
    """Groups {0, 1} and {2, 3} have a test set each; only the means 0.5 and 0.7 over the seeds count."""
    a, b, c, d = (0.4, 1.0), (0.6, 1.1), (0.6, 1.2), (0.8, 1.3)
    zero = [(0.0, 2.0)] * 2 + [(0.0, 2.5)] * 2
    scores = scores_of(ours=[[a, a, c, c], [b, b, d, d]], theirs=[zero, zero])
    pairs = scores.pairs(("e", "ours"), ("e", "theirs"), "accuracy")
    assert pairs.ours == pytest.approx({0: 0.5, 2: 0.7}) and pairs.theirs == {0: 0.0, 2: 0.0}
    assert (pairs.clients, pairs.overlap) == (4, False)
    assert scores.pairs(("e", "ours"), ("e", "theirs"), "test_loss").ours == pytest.approx({0: 1.05, 2: 1.25})
    assert scores.pairs(("e", "ours"), ("e", "theirs"), "accuracy_worst_10") == ClientPairs()


def test_equal_accuracies_on_other_samples_are_pairs_of_their_own_and_shared_samples_are_told():
    one = [(0.5, 1.0 + client) for client in range(3)]
    pairs = scores_of(ours=[one], theirs=[one]).pairs(("e", "ours"), ("e", "theirs"), "accuracy")
    assert (len(pairs.ours), pairs.clients, pairs.overlap) == (3, 3, False), "their losses differ"
    shared = scores_of(ours=[one], theirs=[[(0.4, 1.0)] * 3]).pairs(("e", "ours"), ("e", "theirs"), "accuracy")
    assert (len(shared.ours), shared.overlap) == (3, True), "personal models on one test set"
    undefined = [[(0.5, np.nan)] * 3]
    assert len(scores_of(ours=undefined, theirs=undefined).pairs(("e", "ours"), ("e", "theirs"), "accuracy").ours) == 1


def test_duplicates_do_not_lower_p():
    """Ten clients of each of four test sets, all better off: p = 2 / 2^4 instead of 2 / 2^40."""
    better = [(0.5 + 0.1 * group, 1.0 + group) for group in range(4) for _ in range(10)]
    worse = [(0.3, 2.0 + group) for group in range(4) for _ in range(10)]
    metrics = {("e", name): {0: {"accuracy": value}} for name, value in (("a", 0.65), ("b", 0.3))}
    tested = comparison.tests_of(metrics, "accuracy", scores_of(a=[better], b=[worse]), ChosenTest("wilcoxon"))
    assert tested["e", "b"].p == pytest.approx(2 / 2**4)
    words = pairs_in_words("wilcoxon", list(tested.values()))
    assert words.startswith("n = 4 pairs of 40 clients") and words.endswith("p is at least 0.125")
