"""Attackers: what they upload, that their client state stays honest, and that they change nothing for other clients."""

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage, attack_of, linear, planted, uneven
from torch import nn

import cfl_ray
from cfl_ray.core.aggregation.rules import NormClipping
from cfl_ray.core.clients import ClientState, LocalTraining, UpdateFeatures
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.rng import torch_stream
from cfl_ray.errors import ConfigError
from cfl_ray.setup.prepare import prepare

BAD = [1, 4]
KINDS = ["label_flip", "sign_flip", "scaled", "gaussian", "colluders"]


def stage(kind: str = "none", engine: str = "sequential", **options) -> Stage:
    one = Stage(planted(6), linear, LocalSGD(epochs=2, lr=0.3), engine)
    one.backend.worker.attack = attack_of(kind, BAD, **options)
    return one


def uploads(one: Stage, number: int = 1, **options) -> np.ndarray:
    """float64 (M, P): the upload of every client after training from the common model."""
    clients = one.clients(round=number)
    updates = clients.train(clients.send(one.model()[None]), features=one.network.spec.all, **options)
    return updates.features_MF.double().numpy()


def noise(client: int, length: int, exchange: int = 1) -> np.ndarray:
    return torch.randn(length, generator=torch_stream(0, 1, exchange, client, "attack")).double().numpy()


class TestFormulas:
    def sent_and_honest(self):
        one = stage()
        return one.model().double().numpy(), uploads(one)

    def test_sign_flip_and_scaled(self):
        sent_P, honest_MP = self.sent_and_honest()
        for kind, factor in (("sign_flip", -3.0), ("scaled", 3.0)):
            assert close(uploads(stage(kind, scale=3.0))[BAD], sent_P + factor * (honest_MP[BAD] - sent_P), 1e-5)

    def test_gaussian(self):
        """Noise around the model that was sent, different for every attacker."""
        sent_P, _ = self.sent_and_honest()
        found = uploads(stage("gaussian", sigma=2.0))
        for client in BAD:
            assert close(found[client], sent_P + 2.0 * noise(client, len(sent_P)), 2e-5)

    def test_colluders_move_in_one_direction_as_far_as_their_training(self):
        sent_P, honest_MP = self.sent_and_honest()
        change = uploads(stage("colluders", scale=2.0))[BAD] - sent_P
        direction_P = noise(-1, len(sent_P), exchange=-1)
        expected = (
            2.0 * np.linalg.norm(honest_MP[BAD] - sent_P, axis=1)[:, None] * direction_P / np.linalg.norm(direction_P)
        )
        assert close(change, expected, 2e-5)

    def test_label_flip(self):
        """An attacker's update is that of a client whose labels are 3 - y, of four classes."""
        found, honest = uploads(stage("label_flip")), stage()
        train = honest.federation.train
        honest.federation.train = lambda client: (train(client)[0], 3 - train(client)[1])
        assert np.array_equal(found[BAD], uploads(honest)[BAD]) and not np.array_equal(
            found[BAD], uploads(stage())[BAD]
        )


@pytest.mark.parametrize("kind", KINDS)
class TestEveryKind:
    def test_changes_nothing_for_honest_clients(self, kind):
        honest_M = np.delete(np.arange(6), BAD)
        assert np.array_equal(uploads(stage(kind, scale=2.0))[honest_M], uploads(stage())[honest_M])

    def test_begins_in_its_round(self, kind):
        assert np.array_equal(uploads(stage(kind, scale=2.0, from_round=2), number=1), uploads(stage(), number=1))
        assert not np.array_equal(uploads(stage(kind, scale=2.0, from_round=2), number=2), uploads(stage(), number=2))

    def test_draws_the_same_again(self, kind):
        assert np.array_equal(uploads(stage(kind)), uploads(stage(kind)))

    @pytest.mark.parametrize("engine", ["manual", "vectorised", "span"])
    def test_is_the_same_with_every_engine(self, kind, engine):
        """With few enough samples that `span` applies."""
        rows = []
        for name in ("sequential", engine):
            one = Stage(
                uneven([5, 7, 6, 8, 5], (36,)),
                lambda: nn.Sequential(nn.Linear(36, 3)),
                LocalSGD(epochs=3, lr=0.3),
                name,
            )
            one.backend.worker.attack = attack_of(kind, BAD, scale=2.0)
            rows.append(uploads(one))
        assert close(*rows, 1e-5)

    def test_uploads_the_same_for_every_use(self, kind):
        """As features, averaged at once, and averaged later."""
        one = stage(kind, scale=2.0)
        clients = one.clients()
        updates = clients.train(
            clients.send(one.model()[None]), features=one.network.spec.all, average=torch.eye(6), defer_aggregation=True
        )
        default = one.model().repeat(6, 1)
        assert close(updates.averaged(default), updates.features_MF, 1e-5)
        assert torch.equal(clients.average(updates, torch.eye(6)).averaged(default), updates.averaged(default))

    def test_sends_forged_signatures(self, kind):
        found, honest = (
            one.clients().describe(
                lambda client, anchor_P: client.gradient(anchor_P), one.clients().known_models(one.model()[None])
            )[0]
            for one in (stage(kind, scale=2.0), stage())
        )
        changed_M = (found != honest).any(1)
        assert np.flatnonzero(changed_M).tolist() == BAD

    def test_keeps_its_training_result_as_client_state(self, kind):
        """Of a label flip, the result of training on flipped labels."""
        one, honest = stage(kind, scale=2.0), stage("label_flip" if kind == "label_flip" else "none")
        for each in (one, honest):
            clients = each.clients()
            clients.train(
                clients.send(each.model()[None]),
                client_state=ClientState("mine", private=False),
                features=UpdateFeatures(each.network.spec.all),
            )
        assert all(
            torch.equal(one.client_states["mine", client], honest.client_states["mine", client]) for client in range(6)
        )


def test_flipped_labels_count_in_losses_and_not_in_tests():
    one, honest = stage("label_flip"), stage()
    losses = [each.clients().losses(each.clients().broadcast(each.model()[None])) for each in (one, honest)]
    assert np.flatnonzero((losses[0] != losses[1]).any(1)).tolist() == BAD
    found = [each.clients().accuracies(each.clients().broadcast(each.model()[None])) for each in (one, honest)]
    assert np.array_equal(*found)


def test_a_chain_continues_from_the_forgery():
    """Client 2 starts from the upload of client 1: noise."""
    one, honest = stage("gaussian"), stage()
    found, expected = (uploads(each, how=LocalTraining(chained=True)) for each in (one, honest))
    assert np.array_equal(found[0], expected[0]) and np.abs(found[2] - expected[2]).max() > 0.3


def test_a_forgery_beyond_the_limit_is_rejected():
    one = stage("gaussian", sigma=1e6)
    clients = one.clients()
    updates = clients.train(clients.send(one.model()[None]), features=one.network.spec.all)
    assert updates.valid_M.tolist() == [client not in BAD for client in range(6)] and set(one.stats.rejected) == set(
        BAD
    )


def test_clipping_measures_the_forged_change():
    one = stage("scaled", scale=1000.0)
    clients = one.clients(aggregation=NormClipping())
    averaged = clients.train(clients.send(one.model()[None]), average=torch.ones(1, 6)).averaged(one.model()[None])
    assert (averaged[0] - one.model()).norm() < 3 * np.linalg.norm(
        uploads(stage()) - one.model().double().numpy(), axis=1
    ).max()


class TestExperiments:
    def experiment(self, seed=0, **attack):
        data = {"source": "synthetic", "synthetic_shape": [4], "synthetic_samples": 20, "partition": {"clients": 10}}
        return cfl_ray.Experiment(
            seed=seed,
            rounds=2,
            methods=["fedavg"],
            data=data,
            attack=attack,
            model={"options": {"hidden": 4}},
            runtime={"engine": "sequential"},
            tracking={"enabled": False},
        )

    def run(self, **attack):
        return cfl_ray.simulate(self.experiment(**attack))["fedavg"]

    def test_report_the_accuracy_of_honest_clients(self):
        final = self.run(kind="sign_flip", fraction=0.3, scale=5).final
        assert 0 <= final["accuracy_honest"] <= 1 and final["accuracy_honest"] != final["accuracy"]
        assert "accuracy_honest" not in self.run().final

    def test_draw_the_attackers_by_their_seed(self):
        one, again, other = (
            prepare(self.experiment(seed, kind="gaussian", fraction=0.3)).attack.clients for seed in (0, 0, 1)
        )
        assert one == again != other and len(one) == len(other) == 3

    @pytest.mark.parametrize(
        "attack, message",
        [
            ({"clients": [3, 10]}, "attack.clients: client 10 does not exist; the federation has clients 0 .. 9"),
            ({"clients": list(range(10))}, "attack: all 10 clients attack, so none is honest; leave at least one out"),
        ],
    )
    def test_refuse_attackers_that_cannot_be(self, attack, message):
        with pytest.raises(ConfigError, match=message):
            self.run(kind="sign_flip", **attack)


class Both:
    """Labels become 0, and the upload is the received model with one number per draw."""

    def labels(self, y, num_classes, draw):
        return np.zeros_like(y)

    def upload(self, upload_P, start_P, draw):
        return start_P + draw.random()


class TestOwnAttacks:
    def test_forge_the_upload_of_attackers_alone(self):
        honest = uploads(stage())
        found = uploads(stage(lambda upload_P, start_P, draw: 2 * upload_P - start_P))
        sent_P = stage().model().double().numpy()
        assert close(found[BAD], 2 * honest[BAD] - sent_P, 1e-5)
        others = np.setdiff1d(np.arange(6), BAD)
        assert np.array_equal(found[others], honest[others])

    def test_draws_are_of_the_client_and_the_round(self):
        sent_P = stage().model().double().numpy()

        def draws(number):
            return (uploads(stage(Both()), number)[BAD] - sent_P).mean(1)

        assert np.allclose(draws(1), draws(1), rtol=0, atol=0) and len({*draws(1).round(6), *draws(2).round(6)}) == 4

    def test_labels_are_those_that_the_attacker_trains_on(self):
        class Zeros:
            def labels(self, y, num_classes, draw):
                return np.zeros_like(y)

        found, honest = uploads(stage(Zeros())), stage()
        train = honest.federation.train
        honest.federation.train = lambda client: (train(client)[0], train(client)[1] * (client not in BAD))
        assert np.array_equal(found, uploads(honest))

    @pytest.mark.parametrize(
        "own, message",
        [
            (lambda upload_P, start_P, draw: None, r"returned None, expected an upload .* of shape \(68,\)"),
            (
                lambda upload_P, start_P, draw: upload_P[None],
                r"returned Tensor of float32 and shape \(1, 68\)",
            ),
            (lambda upload_P, start_P, draw: 1 // 0, "failed: ZeroDivisionError"),
            (type("L", (), {"labels": lambda self, y, c, draw: y + 9})(), "returned label .*, expected 0..3"),
            (type("L", (), {"labels": lambda self, y, c, draw: y[:1]})(), "expected integer labels of shape"),
        ],
    )
    def test_wrong_results_name_the_authors_line(self, own, message):
        with pytest.raises(Exception, match=rf"attack .*<lambda> \(.*test_attack.py, line \d+\) .*{message}"):
            uploads(stage(own))

    def test_are_chosen_by_the_config(self, tmp_path):
        file = tmp_path / "own.py"
        file.write_text(
            "class Rider:\n    def __init__(self, by=0.0): self.by = by\n"
            "    def upload(self, upload_P, start_P, draw): return start_P + self.by\n"
        )
        experiment = TestExperiments().experiment(kind=f"{file}:Rider", options={"by": 0.5}, fraction=0.3)
        assert prepare(experiment).attack.kind.plugin.by == 0.5
        with pytest.raises(ConfigError, match="is no attack: expected a function f"):
            prepare(TestExperiments().experiment(kind=type("Empty", (), {})))
        assert experiment.to_dict()["attack"]["kind"] == f"{file}:Rider"
