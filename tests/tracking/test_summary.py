from cfl_ray.tracking import RoundRecord, summarise
from cfl_ray.tracking.summary import rounds_to_stable_clusters


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
    error = [RoundRecord(one, {"mse_local": 1 / one}, of_task=frozenset({"mse_local"})) for one in (1, 2, 4)]
    found = summarise(error, 0.5, None, "mse", higher_is_better=False)
    assert found == {"rounds_to_target_local": 2, "mbit_to_target_local": 0}


def test_no_target_or_one_that_is_not_reached_has_no_metrics():
    for target in (None, 0.9):
        assert summarise(curve(0.1, 0.4), target, change_rounds=None) == {}


def test_a_round_without_evaluation_is_not_at_target():
    assert summarise([RoundRecord(1, {"train_loss": 0.1})], target=0.01, change_rounds=None) == {}


def test_assignments_that_never_change_are_stable_from_the_start():
    assert rounds_to_stable_clusters([]) == 0
