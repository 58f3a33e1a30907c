"""Ranks of methods over settings and seeds: means, Friedman test and critical difference."""

from dataclasses import replace

import numpy as np
import pytest
from pages import report
from scipy.stats import chi2

from cfl_ray.report.page import render
from cfl_ray.report.ranks import Ranks, alike, rank_diagram, ranks_of, ranks_table

# Table 6 of J. Demsar, JMLR 2006: AUC of C4.5 and its variants on 14 data sets
VARIANTS = ("C4.5", "C4.5+m", "C4.5+cf", "C4.5+m+cf")
AUC = """
.763 .768 .771 .798 .599 .591 .590 .569 .954 .971 .968 .967
.628 .661 .654 .657 .882 .888 .886 .898 .936 .931 .916 .931
.661 .668 .609 .685 .583 .583 .563 .625 .775 .838 .866 .875
1.000 1.000 1.000 1.000 .940 .962 .965 .962 .619 .666 .614 .669
.972 .981 .9751 .975 .957 .978 .946 .970
"""


def published(**changes):
    value_BM = np.array(AUC.split(), float).reshape(14, 4)
    return {
        ("", method): {seed: {"auc": value} for seed, value in enumerate(value_BM[:, column])}
        for column, method in enumerate(VARIANTS)
    } | changes


def test_ranks_and_critical_difference_are_those_of_the_published_example():
    """Average ranks 3.143, 2.000, 2.893, 1.964; chi^2 = 9.28; q = 2.569, CD = 1.25 (ibid., section 3.2.2)."""
    found = ranks_of(published(), "auc")
    assert found.mean_rank == pytest.approx(dict(zip(VARIANTS, (3.143, 2.0, 2.893, 1.964))), abs=1e-3)
    assert list(found.mean_rank) == ["C4.5+m+cf", "C4.5+m", "C4.5+cf", "C4.5"] and found.blocks == 14
    assert found.critical_difference == pytest.approx(1.25, abs=5e-3)
    counts = [np.unique(row, return_counts=True)[1] for row in np.array(AUC.split(), float).reshape(14, 4)]
    ties = sum((count**3 - count).sum() for count in counts) / (14 * 4 * (4**2 - 1))  # SciPy corrects for them
    assert found.p == pytest.approx(chi2.sf(9.28 / (1 - ties), 3), abs=1e-4)
    assert [found.is_near_best(method) for method in found.mean_rank] == [True, True, True, True]
    assert "Two methods differ at level 0.05 if their mean ranks are more than 1.3 apart" in ranks_table(found)


def test_less_may_be_better_and_incomplete_pairs_do_not_count():
    found = published()
    reverse = ranks_of(found, "auc", less_is_better=True)
    assert reverse.mean_rank["C4.5"] == pytest.approx(5 - 3.143, abs=1e-3)
    del found["", "C4.5"][3]
    found["", "C4.5"][4] = {}
    assert ranks_of(found, "auc").blocks == 12


def test_without_enough_methods_or_pairs_there_are_none():
    found = published()
    two = {key: found[key] for key in list(found)[:2]}
    one = {key: {0: of_seeds[0]} for key, of_seeds in found.items()}
    assert ranks_of(two, "auc") is None and ranks_of(one, "auc") is None and ranks_of(found, "accuracy") is None
    means = (0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1, 0.6, 0.6)  # equal up to rounding
    equal = {key: {seed: {"auc": mean} for seed in range(3)} for key, mean in zip(found, means)}
    same = ranks_of(equal, "auc")
    assert same.p == 1 and set(same.mean_rank.values()) == {2.5}


def test_the_critical_difference_diagram_joins_methods_that_do_not_differ():
    ranks = Ranks("accuracy", {"a": 1.0, "b": 1.5, "c": 2.5, "d": 3.0, "e": 6.0}, 8, 0.001, 1.6)
    *bars, points = rank_diagram(ranks).plot["data"]
    assert [bar["x"].tolist() for bar in bars] == [[1.0, 2.5], [1.5, 3.0]]
    assert points["x"].tolist() == [1.0, 1.5, 2.5, 3.0, 6.0] and points["y"].tolist() == [4, 3, 2, 1, 0]
    assert alike([1.0, 4.0], 2.9) == [] and alike([1.0, 1.0, 1.0], 0.0) == [(0, 2)]
    assert "Critical difference of mean ranks" in render(replace(report(), ranks=ranks))


def test_ranks_are_a_table_under_their_tests():
    assert "Ranks over settings" not in render(report())
    ranks = Ranks("accuracy", {"two": 1.0, "one": 2.25, "three": 2.75}, 8, 1e-5, 1.3)
    text = render(replace(report(), ranks=ranks))
    assert "Mean ranks of 3 methods by accuracy over 8 pairs of setting and seed." in text and "p &lt; 0.001" in text
    assert [ranks.is_near_best(method) for method in ranks.mean_rank] == [True, True, False]
    section = text[text.index("Ranks over settings") :]
    assert section.index(">two<") < section.index(">2.2<") < section.index(">three<")
