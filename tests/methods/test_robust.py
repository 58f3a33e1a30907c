"""Robust aggregation within methods: every one that averages, the formulas of one round, special cases, and honest clients among attackers."""

import numpy as np
import pytest
import torch
from federations import Spoiled, planted
from playing import COHORTS, accuracy, assert_equal, groups

from cfl_ray.core.clients import Own
from cfl_ray.core.errors import ConfigError
from cfl_ray.core.grouping import by_cluster, everyone
from cfl_ray.core.robust import RULES, Mean, Median, MultiKrum, NormClipping, TrimmedMean
from cfl_ray.engine.attack import Attack
from cfl_ray.methods import REGISTRY, construct
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.fednova import FedNova
from cfl_ray.methods.ifca import IFCA

ROBUST = [name for name in RULES if name != "mean"]
EARLY = {"autocfl": {"min_rounds": 1, "max_rounds": 2}, "fedgroup": {"num_clusters": 2, "alpha": 4, "pretrain_steps": 5}, "fl_hc": {"cluster_round": 2}, "ifca_cam": {"warmup_rounds": 1}}
REFUSED = {"local": ROBUST, "fednova": ["median", "trimmed_mean", "multi_krum"]}


def results(one, ids, row=0) -> np.ndarray:
    """float64 (M, P): what each client makes of the model, one after another."""
    clients = one.clients(ids)
    return clients.train(clients.send(one.model(row)[None]), keep=one.network.spec.all).kept_MF.double().numpy()


AVERAGING = [name for name in REGISTRY if name != "local"]


class TestEveryMethod:
    @pytest.mark.parametrize("name", REGISTRY)
    @pytest.mark.parametrize("rule", ROBUST)
    def test_runs_with_every_rule_or_says_why_not(self, name, rule):
        """And the rule makes a difference to its models."""
        if rule in REFUSED.get(name, []):
            with pytest.raises(ConfigError, match=rf"{name}.aggregation must be mean.*, got '{rule}': "):
                construct(REGISTRY[name], {"aggregation": rule})
            return
        options = EARLY.get(name, {})
        wanted = {"multi_krum": {"attackers": 0.3, "keep": 1}} if rule == "multi_krum" else rule
        mean, found = (groups().play(REGISTRY[name](**options, **more), None, None, None) for more in ({}, {"aggregation": wanted}))
        assert found.models_KP.isfinite().all()
        same = found.models_KP.shape == mean.models_KP.shape and torch.equal(found.models_KP, mean.models_KP)
        trimmed_none = rule == "trimmed_mean" and len(mean.models_KP) > 1  # floor(0.3 * 3) values: only rounding may differ
        assert not same or trimmed_none or name == "ifca_cam", "in clusters of less than three this rule may be the mean"

    @pytest.mark.parametrize("name", AVERAGING)
    def test_nothing_clipped_and_nobody_suspected_is_the_mean_bit_for_bit(self, name):
        """Also in every cluster, with private columns, damping, and results that are mixed later."""
        expected = groups().play(REGISTRY[name](**EARLY.get(name, {})), *COHORTS)
        assert_equal(groups().play(REGISTRY[name](**EARLY.get(name, {}), aggregation={"norm_clipping": {"bound": 1e6}}), *COHORTS), expected)
        if name == "fednova":
            return
        uniform, krum = {"weights": "uniform"}, {"aggregation": {"multi_krum": {"attackers": 0}}}
        expected = groups().play(REGISTRY[name](**EARLY.get(name, {}), **uniform), *COHORTS)
        found = groups().play(REGISTRY[name](**EARLY.get(name, {}), **uniform, **krum), *COHORTS)
        assert np.array_equal(found.assign_N, expected.assign_N) and torch.allclose(found.models_KP, expected.models_KP, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("name", AVERAGING)
    def test_traffic_is_that_of_the_mean(self, name):
        one, other = groups(), groups()
        one.play(REGISTRY[name](), None)
        other.play(REGISTRY[name](aggregation="norm_clipping"), None)
        assert one.books.ledger == other.books.ledger


def test_what_a_method_sums_itself_is_refused():
    with pytest.raises(ConfigError, match="cfl.aggregation must be mean with stale_updates reapply.*use drop"):
        construct(REGISTRY["cfl"], {"stale_updates": "reapply", "aggregation": "median"})
    assert FedNova(aggregation="norm_clipping").rule == NormClipping()


class TestOneRound:
    def test_of_fedavg_with_the_median(self):
        for ids in ([0, 1, 2, 3, 4], [0, 1, 2, 5]):
            found = groups().play(FedAvg(aggregation="median"), ids).models_KP[0]
            assert torch.equal(found, torch.from_numpy(np.median(results(groups(), ids), 0)).float())

    def test_of_fedavg_with_the_trimmed_mean(self):
        found = groups().play(FedAvg(aggregation={"trimmed_mean": {"share": 0.25}}), None).models_KP[0]
        assert np.allclose(found, np.sort(results(groups(), None), 0)[2:6].mean(0), rtol=0, atol=1e-7)

    def test_of_fedavg_with_krum(self):
        rows_MP = results(groups(), None)
        chosen = MultiKrum(2).chosen(((rows_MP[:, None] - rows_MP) ** 2).sum(2))
        assert len(chosen) == 6
        found = groups().play(FedAvg(aggregation={"multi_krum": {"attackers": 2}}), None).models_KP[0]
        assert np.allclose(found, rows_MP[chosen].mean(0), rtol=0, atol=1e-6)

    def test_of_fedavg_with_clipped_changes(self):
        one = groups()
        change_MP = results(one, None) - one.model().double().numpy()
        length_M, size_M = np.linalg.norm(change_MP, axis=1), one.federation.size_N
        scale_M = np.minimum(1, np.median(length_M) / length_M)
        expected = one.model().double().numpy() + (size_M * scale_M) @ change_MP / size_M.sum()
        assert np.allclose(one.play(FedAvg(aggregation="norm_clipping"), None).models_KP[0], expected, rtol=0, atol=1e-6)

    def test_of_ifca_is_the_median_of_every_cluster(self):
        """A cluster without participants keeps its model."""
        state = groups().play(IFCA(num_clusters=3, aggregation="median"), None)
        start_KP, filled = IFCA(num_clusters=3).init(groups().start()).models_KP, 0
        for k in range(3):
            ids = np.flatnonzero(state.assign_N == k)
            expected = torch.from_numpy(np.median(results(groups(), ids, row=k), 0)).float() if len(ids) else start_KP[k]
            assert torch.allclose(state.models_KP[k], expected, rtol=0, atol=1e-7)
            filled += len(ids) > 2
        assert filled

    def test_leaves_rejected_clients_out(self):
        federation = Spoiled([3])
        found = groups(federation=federation).play(FedAvg(aggregation="median"), None).models_KP[0]
        sound = np.delete(np.arange(8), 3)
        assert torch.equal(found, torch.from_numpy(np.median(results(groups(federation=federation), sound), 0)).float())

    def test_of_nobody_leaves_the_model(self):
        federation = Spoiled(range(8))
        one = groups(federation=federation)
        for rule in ROBUST:
            assert torch.equal(one.play(FedAvg(aggregation=rule), None).models_KP[0], one.model()), rule

    def test_leaves_private_columns_to_their_clients(self):
        """Their lengths and distances do not count either."""
        for rule in (Median(), MultiKrum(1), NormClipping()):
            one = groups()
            clients, spec = one.clients(rule=rule), one.network.spec
            sent = clients.send(one.model()[None])
            clients.train(sent, own=Own("head", spec.head))
            for key in one.memory:
                one.memory[key].mul_(100)  # heads far from each other, kept by their clients
            updates = clients.train(sent, own=Own("head", spec.head), mix=everyone(clients.size_M))
            mixed = updates.mixed(empty=one.model()[None])
            assert torch.equal(spec.head.of(mixed[0]), spec.head.of(one.model())) and mixed.isfinite().all()
            assert not torch.equal(spec.base.of(mixed[0]), spec.base.of(one.model()))


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(0.3), MultiKrum(), NormClipping()], ids=lambda rule: rule.name)
class TestThePort:
    def test_the_same_average_whenever_it_is_asked_for(self, rule):
        one = groups()
        clients = one.clients(rule=rule)
        updates = clients.train(clients.send(one.model()[None]), mix=everyone(clients.size_M), mix_later=True)
        later = clients.mix(updates, everyone(clients.size_M))
        assert torch.equal(updates.mixed(one.model()[None]), later.mixed(one.model()[None])) and np.array_equal(updates.weight_R, later.weight_R)

    def test_the_weight_that_arrived_is_that_of_the_mean(self, rule):
        weight_KM = by_cluster(np.array([0, 0, 0, 1, 1, 1, 1, 1]), np.arange(1, 9), 3)
        found = {}
        for by in (rule, Mean()):
            one = groups(federation=Spoiled([6]))
            clients = one.clients(rule=by)
            found[by.name] = clients.train(clients.send(one.model()[None]), mix=weight_KM).weight_R
        assert found[rule.name].tolist() == pytest.approx(found["mean"].tolist(), rel=1e-9) and found[rule.name][2] == 0

    def test_the_exchanges_that_follow_have_the_draws_of_the_mean(self, rule):
        """Mini-batches of a second training, whatever the first one's average took."""
        rows = []
        for by in (rule, Mean()):
            one = groups(batch_size=30)
            clients = one.clients(rule=by)
            clients.train(clients.send(one.model()[None]), mix=everyone(clients.size_M))
            rows.append(clients.train(clients.send(one.model(1)[None]), keep=one.network.spec.all).kept_MF)
        assert torch.equal(*rows)

    def test_a_chain_has_an_average_too(self, rule):
        one = groups()
        clients = one.clients(rule=rule)
        mixed = clients.train(clients.send(one.model()[None]), mix=everyone(clients.size_M), relay=True).mixed(one.model()[None])
        assert mixed.isfinite().all() and not torch.equal(mixed[0], one.model())


ATTACKERS = [0, 1, 2, 3, 4, 5]  # three of eight in each group


def honest_accuracy(kind: str, rule) -> float:
    """Of the other ten clients, after four rounds of IFCA."""
    one = groups(federation=planted(16), lr=0.5, batch_size=20, epochs=2)
    one.backend.worker.attack = Attack(kind, frozenset(ATTACKERS), scale=30.0 if kind == "colluders" else 3.0, sigma=5.0)
    method = IFCA(num_clusters=2, aggregation=rule)
    return accuracy(one, method, one.play(method, *[None] * 4), np.arange(6, 16)).mean()


class TestAttackers:
    """Three of eight clients in each cluster."""

    def test_are_the_reason_why_the_mean_does_not_learn(self):
        assert honest_accuracy("none", "mean") > 0.9

    @pytest.mark.parametrize("kind", ["sign_flip", "gaussian", "colluders"])
    def test_take_from_the_mean_what_they_cannot_take_from_the_others(self, kind):
        assert honest_accuracy(kind, "mean") < 0.7
        for rule in ("median", {"trimmed_mean": {"share": 0.45}}, {"multi_krum": {"attackers": 3, "keep": 3}}, "norm_clipping"):
            assert honest_accuracy(kind, rule) > 0.85, rule
