"""The tables of the pages on other libraries: their arithmetic, and that their methods and rules exist."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cfl_ray import Experiment
from cfl_ray.methods import resolve
from jobs.coming_from import fl_bench, fl_bench_mended, flower, measured, pfllib, rules


def test_a_difference_is_compared_with_the_noise_of_the_seeds():
    """t(0.975, 4) sqrt((s1^2 + s2^2) / 3); of pairs t(0.975, 2) s / sqrt(3); up to 0.002 agrees without any noise."""
    theirs, ours = [0.5, 0.6, 0.7], [0.55, 0.65, 0.75]
    cells = measured.compared(theirs, ours)
    assert cells == ["0.6000 ± 0.1000", "0.6500 ± 0.1000", "+0.0500", f"{2.77645 * np.sqrt(0.02 / 3):.4f}", "yes"]
    assert (
        measured.compared([0.5] * 3, [0.501] * 3)[-1] == "yes" and measured.compared([0.5] * 3, [0.51] * 3)[-1] == "no"
    )
    cells = measured.compared(theirs, [0.55, 0.65, 0.72], paired=True)  # differences 0.05, 0.05, 0.02
    assert cells[2:] == ["+0.0400", f"{4.30265 * 0.03 / 3:.4f}", "yes"]


def test_scores_of_a_row_stand_side_by_side(capsys):
    scores = {"a": [(0.5, 0.6), (0.7, 0.6)], "b": [(0.2, 0.9), (0.2, 0.9)]}
    rows = [SimpleNamespace(label=name) for name in scores]
    found = measured.side_by_side("Theirs", rows, range(2), lambda row, seed: scores[row.label][seed])
    assert [row[:1] + row[3:4] + row[5:] for row in found] == [
        ["method", "difference", "agree"],
        ["a", "+0.0000", "yes"],
        ["b", "+0.7000", "no"],
    ]
    assert found[0][1] == "Theirs" and capsys.readouterr().out.count("\n") == 2


def test_our_runs_use_the_samples_and_the_rules():
    """`best` is the best of `reported` so far; the weights are the numbers of test samples, 12 and 3."""
    rng = np.random.default_rng(0)
    x = rng.random((44, 1, 4, 4)).astype(np.float32)
    y = np.arange(44) % 2
    whole = measured.Client(x[:20], y[:20], x[20:32], y[20:32])
    clients = [whole.part(1.0), whole.part(0.25)]
    assert [len(client.y) for client in clients] == [20, 5] and [len(client.y_test) for client in clients] == [12, 3]
    model = {"name": "mlp", "options": {"hidden": 4}}
    found = measured.ours("pfllib", clients, 0, 3, "fedavg", model, local={"lr": 0.5})
    assert found["best"].tolist() == np.maximum.accumulate(found["accuracy"]).tolist()
    assert np.allclose(found["accuracy"] * 15, np.round(found["accuracy"] * 15))  # a share of all 15 test samples


@pytest.mark.parametrize("rows", [pfllib.ROWS, fl_bench.ROWS], ids=["pfllib", "fl_bench"])
def test_the_methods_of_the_tables_exist(rows):
    for row in rows:
        (method,) = resolve([row.ours]).values()
        assert method.name == next(iter(row.ours)) if isinstance(row.ours, dict) else row.ours


def test_each_rule_changes_the_experiment():
    def of(changes):
        base = {"methods": list(rules.METHODS), "data": {"partition": {"clients": 10}, "test": {}}}
        return Experiment(protocol="pfllib", **rules.merged(base, changes)).config_hash

    hashes = [of(changes) for changes in rules.RULES.values()]
    assert len(set(hashes)) == len(rules.RULES) == 9


class Given:
    """A server of FL-bench as far as the repairs below call it."""

    client_cls = object

    def __init__(self):
        self.public_model_params = {"base.weight": torch.zeros(2), "classifier.weight": torch.tensor([1.0, 2.0])}
        self.c_local = [[torch.zeros(2)], [torch.ones(2)]]
        self.init_model()

    def init_model(self):
        pass

    def get_client_model_params(self, client_id):
        own = {"classifier.weight": torch.full((2,), 9.0)} if client_id == 1 else {}
        return {"regular_model_params": dict(self.public_model_params), "personal_model_params": own}

    def aggregate_client_updates(self, packages):
        self.public_model_params = {name: value + 5 for name, value in self.public_model_params.items()}


def test_clients_without_a_head_begin_with_the_first_one():
    """The average of the heads has moved by 5; the body is the average. A client with a head keeps it."""
    server = fl_bench_mended.first_heads(Given)()
    server.aggregate_client_updates({})
    new, old = (server.get_client_model_params(client)["regular_model_params"] for client in (0, 1))
    assert new["classifier.weight"].tolist() == [1, 2] and new["base.weight"].tolist() == [5, 5]
    assert old["classifier.weight"].tolist() == [6, 7]


def test_control_variates_are_stored():
    """c_i + (c_i+ - c_i) of the clients of the round."""
    server = fl_bench_mended.with_c_local(Given)()
    server.aggregate_client_updates({1: {"c_delta": [torch.tensor([0.5, -3.0])]}})
    assert [c_i[0].tolist() for c_i in server.c_local] == [[0, 0], [1.5, -2.0]]


def test_weights_of_fedamp_add_up_to_one():
    """Weights of others of 6 are divided by 6, and the own one is 0; of 0.5 they stay."""
    seen = []

    class Client:
        def set_parameters(self, others, own):
            seen.append((others.weight.item(), own.item()))

    class Server:
        def set_clients(self, kind):
            self.kind = kind

    server = pfllib.at_most_one(Server)()
    server.set_clients(Client)
    for total in (6.0, 0.5):
        others = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(others.weight, 12.0)
        server.kind().set_parameters(others, torch.tensor(1 - total))
    assert seen == [(2.0, 0.0), (12.0, 0.5)]


def test_flowers_adam_is_that_of_its_formula():
    """v = 0 at first, and the factors of the bias correction of round t + 1: 0.1 * 0.74 in the first round."""
    adam = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
    averages = flower.of_optimizer("fedadam", 0.0, True, **adam)
    w_P = np.zeros(3)
    result_nP = np.tile([1.0, -2.0, 0.5], (flower.CLIENTS, 1))
    step_P = averages(w_P, result_nP)
    assert np.allclose(step_P, 0.0742 * np.sign(result_nP[0]), rtol=0.02)
    plain_P = flower.of_optimizer("fedadam", **adam)(w_P, result_nP)
    delta_P = result_nP[0]
    assert np.allclose(plain_P, 0.1 * 0.1 * delta_P / (np.sqrt(0.99e-6 + 0.01 * delta_P**2) + 1e-3))


def test_results_that_multi_krum_chooses_are_weighed_by_samples():
    w_P = np.zeros(flower.WEIGHTS, np.float32)
    result_nP = flower.results_of(w_P, 1)
    options = {"attackers": 2, "keep": 9}  # all but the first one, which is far off
    plain_P = flower.of_rule("multi_krum", **options)(w_P, result_nP)
    weighted_P = flower.of_rule("multi_krum", True, **options)(w_P, result_nP)
    assert np.allclose(plain_P, result_nP[1:].mean(0), atol=1e-6)
    assert np.allclose(weighted_P, np.average(result_nP[1:], 0, flower.samples()[1:]), atol=1e-6)
