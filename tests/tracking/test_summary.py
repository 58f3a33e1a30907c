from cfl_ray.tracking import RoundRecord, summarise
from cfl_ray.tracking.record import mean_of_runs, rejected_updates, why_diverged


def curve(*accuracies):
    return [
        RoundRecord(round, {"accuracy": accuracy, "mbit_down": 2.0 * round, "mbit_up": 1.0 * round})
        for round, accuracy in enumerate(accuracies)
    ]


def test_the_first_round_at_the_target_counts():
    summary = summarise(curve(0.1, 0.4, 0.5, 0.3, 0.6), target=0.5, change_rounds=[1, 3])
    assert summary == {"rounds_to_target": 2, "mbit_to_target": 2 * 2.0 + 2 * 1.0, "rounds_to_stable_clusters": 3}


def test_the_same_target_of_p_local():
    records = [
        RoundRecord(round, {"accuracy": 0.1, "accuracy_local": local, "mbit_down": 2.0 * round, "mbit_up": 1.0 * round})
        for round, local in ((5, 0.3), (10, 0.6), (15, 0.7))
    ]
    assert summarise(records, 0.5, None) == {"rounds_to_target_local": 10, "mbit_to_target_local": 10 * (2.0 + 1.0)}
    error = [RoundRecord(one, {"mse_local": 1 / one}) for one in (1, 2, 4)]
    found = summarise(error, 0.5, None, "mse", higher_is_better=False)
    assert found == {"rounds_to_target_local": 2, "mbit_to_target_local": 0}


def test_no_target_or_one_that_is_not_reached_has_no_metrics():
    for target in (None, 0.9):
        assert summarise(curve(0.1, 0.4), target, change_rounds=None) == {}


def test_a_round_without_evaluation_is_not_at_target():
    assert summarise([RoundRecord(1, {"train_loss": 0.1})], target=0.01, change_rounds=None) == {}


def test_assignments_that_never_change_are_stable_from_the_start():
    assert summarise([], None, change_rounds=[]) == {"rounds_to_stable_clusters": 0}


def rounds_with(*counts, size=10, **metrics):
    """Records with these counts of rejected updates."""
    return [
        RoundRecord(round, {"cohort_size": size, "updates_rejected": count, "clients_rejected": count + 1} | metrics)
        for round, count in enumerate(counts, start=1)
    ]


def test_rejected_updates_are_counted_with_all_updates_of_the_run():
    found = rejected_updates(rounds_with(0, 3, 0, 4))
    assert (found.count, found.total, found.rounds, str(found)) == (7, 40, [2, 4], "7 of 40")
    without = [RoundRecord(1, {"updates_rejected": 2.0}), RoundRecord(2, {"updates_rejected": 0.0})]
    assert str(rejected_updates(without)) == "2" and rejected_updates(without).total is None


def test_a_method_has_diverged_if_a_tenth_of_its_updates_was_rejected_without_attackers():
    assert why_diverged(rounds_with(3, 0, 0)) == "3 of 30 updates were rejected as not finite or not valid"
    assert why_diverged(rounds_with(2, 0, 0)) is None
    assert why_diverged(rounds_with(9, 0, 0, accuracy_honest=0.9)) is None


def test_a_method_has_diverged_if_its_last_round_or_its_last_test_has_no_finite_result():
    nan, inf = float("nan"), float("inf")
    assert why_diverged([]) is None and why_diverged(rounds_with(10, 9, accuracy_honest=0.9)) is None
    assert why_diverged(rounds_with(0, 10)).startswith("all 10 updates of round 2, the last one, were rejected")
    assert why_diverged(rounds_with(0, 0, size=0)) is None  # no client was reachable
    assert why_diverged(rounds_with(0, test_loss=inf, accuracy=0.1)) == "its last test loss is inf"
    assert why_diverged(rounds_with(0, test_loss=nan, accuracy=0.1)) == "its last test loss is nan"
    assert why_diverged(rounds_with(0, test_loss=nan, accuracy=nan)) is None  # no test samples
    assert why_diverged(rounds_with(0, test_loss=inf, accuracy=0.1) + rounds_with(0, test_loss=0.3)) is None


def test_the_mean_of_runs_has_the_rounds_and_metrics_that_all_of_them_have():
    runs = [
        [RoundRecord(1, {"accuracy": 0.25, "ari": 1.0}), RoundRecord(2, {"accuracy": 0.5})],
        [RoundRecord(1, {"accuracy": 0.75}), RoundRecord(3, {"accuracy": 1.0})],
    ]
    (mean,) = mean_of_runs(runs)
    assert (mean.round, mean.metrics) == (1, {"accuracy": 0.5}) and mean_of_runs([]) == []
