"""Means weighted by test samples, and the protocol by which each method is scored."""

import numpy as np
import pytest
from small_runs import PLANTED, merged

from cfl_ray import ConfigError, Experiment, compare_runs, run, simulate
from cfl_ray.data import federation_from_arrays
from cfl_ray.setup.prepare import prepare

UNEVEN = {  # digits of five clients with unequal numbers of test samples
    "rounds": 2,
    "data": {"partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 5, "min_samples": 20}, "validation": {}},
    "model": "mlp",
    "local": {"epochs": 1, "batch_size": 32},
    "cohort": {"fraction": 0.6},
    "evaluation": {"tuned_epochs": 1},
    "runtime": {"engine": "manual"},
    "tracking": {"enabled": False},
}


def final(tmp_path, **evaluation):
    values = merged(UNEVEN, {"evaluation": evaluation, "output": str(tmp_path)})
    return simulate(Experiment(methods=["fedavg"], **values))["fedavg"]


def test_weights_are_numbers_of_test_samples(tmp_path):
    """sum n_i a_i / sum n_i for every protocol and both parts; spreads stay those of clients."""
    plain, weighted = final(tmp_path), final(tmp_path, weights="samples")
    for part, samples in (("", weighted.test), ("validation/", weighted.validation)):
        n_M = np.array([len(samples(client)[1]) for client in range(5)])
        assert len(set(n_M.tolist())) > 1
        hits = sum(
            (weighted.personal_model(client)(samples(client)[0]).argmax(1) == samples(client)[1]).sum().item()
            for client in range(5)
        )
        assert weighted.final[f"{part}accuracy"] == pytest.approx(hits / n_M.sum())
        if not part:
            scores = weighted.client_metrics().query("round == 2").sort_values("client")
            for name, column in (("accuracy", "accuracy"), ("macro_f1", "macro_f1"), ("test_loss", "loss")):
                assert weighted.final[name] == pytest.approx(np.average(scores[column], weights=n_M))
                assert plain.final[name] == pytest.approx(scores[column].mean())
        for ending in ("_local", "_local_trained", "_tuned"):
            assert weighted.final[f"{part}accuracy{ending}"] != plain.final[f"{part}accuracy{ending}"]
        assert weighted.final[f"{part}accuracy_std"] == plain.final[f"{part}accuracy_std"]
    assert len(weighted.records) == len(plain.records)


def test_past_data_have_the_weight_of_their_own_test_samples(tmp_path):
    """Clients 0 and 1 exchange data of different size before round 2, and are tested on what they had."""
    exchange = [{"round": 2, "change": [{"clients": [0, 1], "data_of": [1, 0]}]}]
    values = merged(UNEVEN, {"evaluation": {"past": True, "weights": "samples"}, "output": str(tmp_path)})
    result = simulate(Experiment(methods=["local"], schedule=exchange, **values))["local"]
    samples = [result.test(client, round=1) for client in (0, 1)]
    n_M = [len(y) for _, y in samples]
    hits_M = [(result.personal_model(client)(x).argmax(1) == y).sum().item() for client, (x, y) in enumerate(samples)]
    assert n_M[0] != n_M[1] and hits_M[0] * n_M[1] != hits_M[1] * n_M[0]
    assert result.final["accuracy_past"] == pytest.approx(sum(hits_M) / sum(n_M))


@pytest.mark.parametrize("view", ["label", "cluster"])
def test_weights_of_shared_test_sets(view):
    """A client that is tested on some labels of a shared test set has the number of their samples as its weight."""
    y, owner = np.array([0, 0, 0, 0, 1, 1, 2, 2]), np.array([0, 0, 0, 0, 0, 1, 1, 1])
    x, y_test = np.eye(8, dtype=np.float32), np.array([0] * 5 + [1] * 2 + [2] * 4)
    x_test = np.zeros((11, 8), np.float32)
    federation = federation_from_arrays(x, y, owner, x_test=x_test, y_test=y_test, view=view)
    expected = {"label": [5 + 2, 2 + 4]}.get(view, [11, 11])
    assert federation.num_test_samples(np.arange(2)).tolist() == expected


def test_each_method_is_scored_by_its_protocol(tmp_path):
    evaluation = {"reported": {"ditto": "local", "mine": "tuned"}, "tuned_epochs": 1}
    methods = ["fedavg", "ditto", {"fedavg": {"label": "mine"}}]
    keep = {"which": "best", "metric": "reported"}
    values = merged(PLANTED, {"evaluation": evaluation, "rounds": 3, "methods": methods, "keep": keep})
    found = run(Experiment(**values, output=str(tmp_path)), on_ray=False)
    for label, name in (("fedavg", "accuracy"), ("ditto", "accuracy_local"), ("mine", "accuracy_tuned")):
        of_rounds = [record.metrics[name] for record in found[label].records]
        assert [record.metrics["reported"] for record in found[label].records] == of_rounds
        assert found[label].best_round == 1 + int(np.argmax(of_rounds))
    table = compare_runs([found.run_dir], ["reported"], round="best").set_index("method")["reported"]
    assert table["ditto"] == max(record.metrics["accuracy_local"] for record in found["ditto"].records)


@pytest.mark.parametrize(
    ("evaluation", "message"),
    [
        ({"reported": {"fedavgg": "local"}}, r"evaluation.reported: there is no method 'fedavgg' \(did you mean"),
        ({"reported": {"fedavg": "local"}, "local": False}, r"fedavg is scored by protocol local, .*local: true"),
        (
            {"reported": {"fedavg": "tuned"}},
            r"fedavg is scored by protocol tuned, .* set evaluation.tuned_epochs to at",
        ),
    ],
)
def test_a_protocol_that_is_not_measured_is_refused(evaluation, message):
    with pytest.raises(ConfigError, match=message):
        prepare(Experiment(**merged(PLANTED, {"evaluation": evaluation, "methods": ["fedavg"], "rounds": 1})))
    prepare(Experiment(**merged(PLANTED, {"evaluation": {"reported": {"apfl": "tuned"}}, "methods": ["fedavg"]})))
