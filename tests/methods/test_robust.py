"""Robust aggregation: every method that averages, formulas of one round, special cases, and attacked runs."""

import numpy as np
import pytest
import torch
from checksums import EARLY
from closeness import close
from federations import Spoiled, attack_of, planted
from rounds import COHORTS, accuracy, assert_equal, groups

from cfl_ray.core.aggregation.rules import RULES, Mean, Median, MultiKrum, NormClipping, TrimmedMean
from cfl_ray.core.clients import ClientState, LocalTraining
from cfl_ray.core.weights import cluster_weights
from cfl_ray.errors import ConfigError
from cfl_ray.methods import REGISTRY, construct
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.fednova import FedNova
from cfl_ray.methods.ifca import IFCA

ROBUST = [name for name in RULES if name != "mean"]
REFUSED = {
    "local": ROBUST,
    "fedamp": ROBUST,
    "feroma": ROBUST,
    "pfedgraph": ROBUST,
    "fedcac": ROBUST,
    "fedccfa": ROBUST,
    "fedpac": ROBUST,
    "fedproto": ROBUST,
    "scaffold": ROBUST,
    "fednova": ["median", "trimmed_mean", "multi_krum"],
}


def results(one, ids, row=0) -> np.ndarray:
    """float64 (M, P): the training result of each client, from model `row`."""
    clients = one.clients(ids)
    return clients.train(clients.send(one.model(row)[None]), features=one.network.spec.all).features_MF.double().numpy()


AVERAGING = sorted(name for name, cls in REGISTRY.items() if not cls.only_mean)


def play(name: str, *cohorts, **options):
    """The state after short rounds, and the stage."""
    one = groups(federation=planted(samples=60), epochs=1)
    return one.play(REGISTRY[name](**EARLY.get(name, {}), **options), *cohorts), one


class TestEveryMethod:
    @pytest.mark.parametrize("name", REGISTRY)
    def test_has_a_rule_or_names_the_reason(self, name):
        """A rule that is not refused changes the models: one that needs all results, and one that adds them up."""
        refused = REFUSED.get(name, [])
        for rule in refused:
            with pytest.raises(ConfigError, match=rf"{name}.aggregation must be mean.*, got '{rule}': "):
                construct(REGISTRY[name], {"aggregation": rule})
        rounds = [None] * (3 if name in EARLY else 2)
        mean = play(name, *rounds)[0] if refused != ROBUST else None
        for rule in {"median", "norm_clipping"}.difference(refused):
            found, _ = play(name, *rounds, aggregation=rule)
            assert found.models_KP.isfinite().all(), rule
            same = found.models_KP.shape == mean.models_KP.shape and torch.equal(found.models_KP, mean.models_KP)
            assert not same or name == "ifca_cam", rule  # in clusters of less than three clients a rule is the mean

    @pytest.mark.parametrize("name", AVERAGING)
    def test_nothing_clipped_and_no_suspects_is_the_mean(self, name):
        """Bit for bit and with the same traffic for clipping.

        Also in every cluster, with private columns, damping, and deferred averages.
        """
        weights = {} if name in ("fednova", "fedsoft") else {"weights": "uniform"}  # those two have no other weights
        expected, one = play(name, *COHORTS[:3], **weights)
        found, other = play(name, *COHORTS[:3], **weights, aggregation={"norm_clipping": {"bound": 1e6}})
        assert_equal(found, expected)
        assert one.stats.traffic == other.stats.traffic
        if weights:
            found, _ = play(name, *COHORTS[:3], **weights, aggregation={"multi_krum": {"attackers": 0}})
            assert np.array_equal(found.assign_N, expected.assign_N)
            assert close(found.models_KP, expected.models_KP, 1e-5)


def test_a_rule_for_sums_of_the_method_itself_is_refused():
    with pytest.raises(ConfigError, match="cfl.aggregation must be mean with stale_updates reapply.*use drop"):
        construct(REGISTRY["cfl"], {"stale_updates": "reapply", "aggregation": "median"})
    assert FedNova(aggregation="norm_clipping").aggregation_rule == NormClipping()


class TestOneRound:
    @pytest.mark.parametrize("rule", ROBUST)
    def test_of_fedavg(self, rule):
        """Of eight clients: two are trimmed at either end, and two suspected."""
        one = groups()
        rows_MP, start_P = results(one, None), one.model().double().numpy()
        change_MP, num_samples_M = rows_MP - start_P, one.federation.num_samples_N
        length_M = np.linalg.norm(change_MP, axis=1)
        scale_M = np.minimum(1, np.median(length_M) / length_M)
        expected = {
            "median": np.median(rows_MP, 0),
            "trimmed_mean": np.sort(rows_MP, 0)[2:6].mean(0),
            "multi_krum": rows_MP[MultiKrum(2).chosen(((rows_MP[:, None] - rows_MP) ** 2).sum(2))].mean(0),
            "norm_clipping": start_P + (num_samples_M * scale_M) @ change_MP / num_samples_M.sum(),
        }
        found = one.play(FedAvg(aggregation=rule), None).models_KP[0]
        assert close(found, expected[rule], 1e-5)

    def test_of_ifca_is_the_median_of_every_cluster(self):
        """A cluster without participants keeps its model."""
        state = groups().play(IFCA(num_clusters=3, aggregation="median"), None)
        start_KP, filled = IFCA(num_clusters=3).init(groups().start()).models_KP, 0
        for k in range(3):
            ids = np.flatnonzero(state.assign_N == k)
            expected = (
                torch.from_numpy(np.median(results(groups(), ids, row=k), 0)).float() if len(ids) else start_KP[k]
            )
            assert close(state.models_KP[k], expected, 1e-6)
            filled += len(ids) > 2
        assert filled

    def test_excludes_rejected_clients(self):
        federation = Spoiled([3])
        found = groups(federation=federation).play(FedAvg(aggregation="median"), None).models_KP[0]
        valid = np.delete(np.arange(8), 3)
        assert torch.equal(found, torch.from_numpy(np.median(results(groups(federation=federation), valid), 0)).float())

    def test_without_valid_results_keeps_the_model(self):
        federation = Spoiled(range(8))
        one = groups(federation=federation)
        for rule in ROBUST:
            assert torch.equal(one.play(FedAvg(aggregation=rule), None).models_KP[0], one.model()), rule

    def test_leaves_private_columns_to_their_clients(self):
        """Their lengths and distances do not count."""
        for rule in (Median(), MultiKrum(1), NormClipping()):
            one = groups()
            clients, spec = one.clients(aggregation=rule), one.network.spec
            sent = clients.send(one.model()[None])
            clients.train(sent, client_state=ClientState("head", spec.head))
            for key in one.client_states:
                one.client_states[key].mul_(100)  # heads far from each other; `client_states` shares the stored tensors
            updates = clients.train(sent, client_state=ClientState("head", spec.head), average=clients.num_samples_M)
            averaged = updates.averaged(default=one.model()[None])
            assert torch.equal(spec.head.of(averaged[0]), spec.head.of(one.model())) and averaged.isfinite().all()
            assert not torch.equal(spec.base.of(averaged[0]), spec.base.of(one.model()))


@pytest.mark.parametrize("rule", [Median(), TrimmedMean(0.3), MultiKrum(), NormClipping()], ids=lambda rule: rule.name)
class TestExchanges:
    def test_the_same_average_at_once_and_later(self, rule):
        one = groups()
        clients = one.clients(aggregation=rule)
        updates = clients.train(clients.send(one.model()[None]), average=clients.num_samples_M, defer_aggregation=True)
        later = clients.average(updates, clients.num_samples_M)
        assert torch.equal(updates.averaged(one.model()[None]), later.averaged(one.model()[None])) and np.array_equal(
            updates.weight_R, later.weight_R
        )

    def test_the_weight_that_arrived_is_that_of_the_mean(self, rule):
        weight_KM = cluster_weights(np.array([0, 0, 0, 1, 1, 1, 1, 1]), np.arange(1, 9), 3)
        found = {}
        for by in (rule, Mean()):
            one = groups(federation=Spoiled([6]))
            clients = one.clients(aggregation=by)
            found[by.name] = clients.train(clients.send(one.model()[None]), average=weight_KM).weight_R
        assert found[rule.name].tolist() == pytest.approx(found["mean"].tolist(), rel=1e-9) and found[rule.name][2] == 0

    def test_the_exchanges_that_follow_have_the_draws_of_the_mean(self, rule):
        """Mini-batches of a second training do not depend on the exchanges that the first average needed."""
        rows = []
        for by in (rule, Mean()):
            one = groups(batch_size=30)
            clients = one.clients(aggregation=by)
            clients.train(clients.send(one.model()[None]), average=clients.num_samples_M)
            rows.append(clients.train(clients.send(one.model(1)[None]), features=one.network.spec.all).features_MF)
        assert torch.equal(*rows)

    def test_a_chain_has_an_average_too(self, rule):
        one = groups()
        clients = one.clients(aggregation=rule)
        averaged = clients.train(
            clients.send(one.model()[None]),
            how=LocalTraining(chained=True),
            average=clients.num_samples_M,
        ).averaged(one.model()[None])
        assert averaged.isfinite().all() and not torch.equal(averaged[0], one.model())


ATTACKERS = [0, 1, 2, 3, 4, 5]  # three of eight in each group


def honest_accuracy(kind: str, rule) -> float:
    """P-server accuracy of the other ten clients after some rounds of IFCA."""
    one = groups(federation=planted(16, samples=80), lr=0.5, batch_size=20, epochs=3)
    scale = 30.0 if kind == "colluders" else 3.0
    one.backend.worker.attack = attack_of(kind, ATTACKERS, scale=scale, sigma=5.0)
    method = IFCA(num_clusters=2, aggregation=rule)
    rounds = 7 if rule == "norm_clipping" else 3  # clipped changes are shorter
    return accuracy(one, method, one.play(method, *[None] * rounds), np.arange(6, 16)).mean()


class TestAttackers:
    """Three of eight clients in each cluster."""

    def test_without_an_attack_the_mean_learns(self):
        assert honest_accuracy("none", "mean") > 0.9

    @pytest.mark.parametrize("kind", ["sign_flip", "gaussian", "colluders"])
    def test_harm_the_mean_and_not_the_robust_rules(self, kind):
        assert honest_accuracy(kind, "mean") < 0.7
        for rule in (
            "median",
            {"trimmed_mean": {"share": 0.45}},
            {"multi_krum": {"attackers": 3, "keep": 3}},
            "norm_clipping",
        ):
            assert honest_accuracy(kind, rule) > 0.85, rule
