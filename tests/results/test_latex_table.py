"""Tables of LaTeX: what is marked, which columns, the caption, escapes."""

import math

import pytest
from scipy.stats import ttest_rel

from cfl_ray.errors import ConfigError
from cfl_ray.report.drawing import p_in_words
from cfl_ray.results.client_scores import ClientPairs, ClientScores
from cfl_ray.results.comparison import is_dense
from cfl_ray.results.latex_table import escaped, latex_table
from cfl_ray.results.significance import ChosenTest

BEST, NEAR, FAR = [0.90, 0.94, 0.92], [0.89, 0.95, 0.90], [0.10, 0.13, 0.12]


class Scores(ClientScores):
    """Given pairs of any two methods."""

    def __init__(self, pairs_of):
        super().__init__({})
        self.pairs_of = pairs_of

    def pairs(self, key, other, metric):
        return self.pairs_of(key, other)


def found(experiment="e", **more):
    values = {"fed_avg": FAR, "ifca": BEST, "cfl": NEAR} | more
    return {
        (experiment, method): {
            seed: {"accuracy": one, "test_loss": 1 - one, "num_clusters": 3.0} for seed, one in enumerate(of_seeds)
        }
        for method, of_seeds in values.items()
    }


def test_the_best_is_bold_and_what_is_not_worse_is_underlined():
    text = latex_table(found(), ["accuracy"])
    lines = text.splitlines()
    # in percent; standard deviation of 90, 94, 92: 2; of 10, 13, 12: sqrt(7/3) = 1.53
    assert r"ifca & $\mathbf{92.00} \pm 2.00$ \\" in lines
    assert r"cfl & $\underline{91.33} \pm 3.21$ \\" in lines
    assert r"fed\_avg & $11.67 \pm 1.53$ \\" in lines
    assert r"method & Accuracy (\%) $\uparrow$ \\" in lines and r"\begin{tabular}{lr}" in lines, (
        "only the column asked for"
    )
    assert all(rf"\{rule}rule" in lines for rule in ("top", "mid", "bottom"))
    (caption,) = [line for line in lines if line.startswith(r"\caption")]
    assert "mean $\\pm$ standard deviation over 3 seeds" in caption and "paired t-test over seeds, $n = 3$" in caption
    assert "without a correction" in caption
    assert "Holm's correction over methods" in latex_table(found(), ["accuracy"], test=ChosenTest(correction="holm"))


def test_of_losses_the_least_is_the_best_and_of_numbers_of_clusters_none():
    lines = latex_table(found(), ["test_loss", "num_clusters"]).splitlines()
    assert r"ifca & $\mathbf{0.080} \pm 0.020$ & $3.0 \pm 0.0$ \\" in lines
    assert sum("mathbf" in line for line in lines) == 1


def test_holm_may_decide_a_mark():
    """p = 0.0302 of the first alone is below 0.05, and twice this value is not (two methods are compared)."""
    rows = {"fed_avg": [0.5, 0.6, 0.55], "ifca": [0.7, 0.74, 0.72], "cfl": [0.69, 0.72, 0.715]}
    chosen = (ChosenTest(correction=how) for how in ("none", "holm"))
    plain, holm = (latex_table(found(**rows), ["accuracy"], test=test) for test in chosen)
    assert "underline" not in plain.partition("fed")[2].partition("ifca")[0]
    assert plain.count("underline{") <= holm.count("underline{")


def test_experiments_are_columns_of_one_metric_and_blocks_of_several():
    both = found("a_1") | found("b")
    assert r"method & a\_1 & b \\" in latex_table(both, ["accuracy"])
    text = latex_table(both, ["accuracy", "test_loss"])
    assert text.count(r"\midrule") == 2 and r"\multicolumn{3}{l}{a\_1} \\" in text
    del both["b", "cfl"]
    assert r"cfl & $\underline{91.33} \pm 3.21$ &  \\" in latex_table(both, ["accuracy"])


def test_trials_that_most_methods_lack_are_rows():
    """Two methods with two trials each of their own: 4 of 8 cells."""
    trials = found("mu=1", fed_avg=FAR) | found("mu=2", fed_avg=FAR) | found("k=1") | found("k=2")
    sparse = {key: values for key, values in trials.items() if ("mu" in key[0]) == (key[1] == "fed_avg")}
    sparse = {key: values for key, values in sparse.items() if key[1] != "cfl"}
    assert not is_dense(sparse) and is_dense(found("a") | found("b"))
    text = latex_table(sparse, ["accuracy"])
    assert r"\multicolumn{2}{l}{mu=1} \\" in text and text.count("fed\\_avg &") == 2


def test_a_test_over_clients():
    """Ten clients that are better off by 1 % to 10 %: p = 2 / 2^10."""
    runs = {("e", name): {0: {"accuracy": value}} for name, value in (("a", 0.9), ("b", 0.845))}
    scores = {"a": dict.fromkeys(range(10), 0.9), "b": {i: 0.9 - 0.01 * (i + 1) for i in range(10)}}
    found = Scores(lambda key, other: ClientPairs(scores[key[1]], scores[other[1]], 10))
    test = ChosenTest("wilcoxon", "holm")
    text = latex_table(runs, ["accuracy"], found, test)
    assert (
        "Wilcoxon signed-rank test over clients, $n = 10$ clients, each" in text
        and r"Accuracy (\%) $\uparrow$ of one seed" in text
    )
    shared = Scores(lambda key, other: ClientPairs(scores[key[1]], scores[other[1]], 30, overlap=True))
    text_of_shared = latex_table(runs, ["accuracy"], shared, test)
    assert "$n = 10$ pairs of 30 clients" in text_of_shared and "in common" in text_of_shared
    assert r"a & $\mathbf{90.00}$ \\" in text and r"b & $84.50$ \\" in text
    without = latex_table(runs, ["accuracy"], Scores(lambda key, other: ClientPairs()), test)
    assert "No test of differences, which needs a metric of single clients" in without
    assert "which needs three seeds" in latex_table(runs, ["accuracy"])


def test_what_lacks_values_is_empty_and_names_are_escaped():
    runs = found() | {("e", r"50%_{x}\a~b^c#&$"): {0: {"accuracy": math.nan, "test_loss": 0.0, "num_clusters": 1.0}}}
    text = latex_table(runs, ["accuracy"])
    assert r"50\%\_\{x\}\textbackslash{}a\textasciitilde{}b\textasciicircum{}c\#\&\$ &  \\" in text
    assert escaped("a\nb") == "a b"
    with pytest.raises(ConfigError, match="no run has the metric 'acc'"):
        latex_table(runs, ["acc"])


def test_a_method_without_rivals_is_not_the_best():
    text = latex_table({("e", "m"): {0: {"accuracy": 0.5}}}, ["accuracy"])
    assert r"m & $50.00$ \\" in text and r"\caption{Accuracy (\%) $\uparrow$ of one seed.}" in text


def test_headings_have_units_and_directions_and_p_values_are_shown_on_request():
    metrics = ["accuracy", "test_loss", "num_clusters"]
    plain, text = (latex_table(found(), metrics, p_values=wanted) for wanted in (False, True))
    assert r"method & Accuracy (\%) $\uparrow$ & Loss $\downarrow$ & Clusters \\" in plain
    heading = r"method & Accuracy (\%) $\uparrow$ & $p$ & Loss $\downarrow$ & $p$ & Clusters & $p$ \\"
    assert heading in text and r"\begin{tabular}{lrrrrrr}" in text
    p = ttest_rel(FAR, BEST).pvalue
    assert rf"fed\_avg & $11.67 \pm 1.53$ & ${p_in_words(p)}$ & $0.883" in text
    assert r"ifca & $\mathbf{92.00} \pm 2.00$ &  & $\mathbf{0.080}" in text, "the best is not tested"


def test_the_caption_names_the_best_round():
    assert "best round" not in latex_table(found(), ["accuracy"])
    assert "those of each run's best round, whose models are kept" in latex_table(found(), ["accuracy"], of_best=True)
