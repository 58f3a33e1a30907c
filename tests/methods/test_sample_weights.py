"""Weights of samples by client programs of a user's file, by engine and by formula; chains and single samples."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from closeness import close
from federations import Spoiled
from linear import ETA, N_0, N_1, STEPS, assert_close, data, matrix, mean, sgd, stage
from plain import LOCAL, SIZES, Torch
from plain import stage as batched
from rounds import groups
from test_mixtures import sample_losses, softmax, weighted_sgd
from torch.nn.functional import cross_entropy

from cfl_ray import Mixture
from cfl_ray.core.clients import ClientProgram, LocalTraining, Proximal
from cfl_ray.core.local_sgd import ExampleNoise
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.privacy import PrivacyError
from cfl_ray.core.rng import stream
from cfl_ray.core.versions import Received, Versions
from cfl_ray.engine.describing import ClientView
from cfl_ray.errors import RunError
from cfl_ray.plugins.loading import load_plugin

PAGE = (Path(__file__).parents[2] / "docs" / "extend" / "client_program.md").read_text()
ENGINES = ["sequential", "vectorised", pytest.param("manual", marks=pytest.mark.cpu)]
PRIOR_MK = np.array([[0.3, 0.7], [0.9, 0.1]])


@pytest.fixture
def shown(tmp_path):
    """Returns a class of a file that the page shows."""

    def found(place: str) -> type:
        file, _, name = place.partition(":")
        (source,) = re.findall(rf"```python\n# {file}\n(.*?)```", PAGE, re.S)
        (tmp_path / file).write_text(source)
        return load_plugin(f"{tmp_path / file}:{name}", "class")

    return found


@dataclass(frozen=True)
class Hard(Mixture):
    def responsibilities(self, loss_nK, y_n, held):
        return torch.nn.functional.one_hot(loss_nK.argmin(1), loss_nK.shape[1]).float()


@dataclass(frozen=True)
class OfClient(Mixture):
    """Equal for all samples of a client, by its mean loss."""

    def responsibilities(self, loss_nK, y_n, held):
        return (held["mixture"].log() - loss_nK.mean(0)).softmax(0).expand_as(loss_nK)


def hard(loss_nK, pi_K):
    return np.eye(loss_nK.shape[1])[loss_nK.argmin(1)]


def of_client(loss_nK, pi_K):
    return np.tile(softmax((np.log(pi_K) - loss_nK.mean(0))[None]), (len(loss_nK), 1))


class TestOwnMixtures:
    @pytest.mark.parametrize("engine", ENGINES)
    @pytest.mark.parametrize(("program", "formula"), [(Hard(), hard), (OfClient(), of_client)])
    def test_one_exchange(self, engine, program, formula):
        one = stage(engine=engine)
        theta = torch.stack([one.model(k) for k in range(2)])
        clients = one.clients()
        how = LocalTraining(program=program, given={"mixture": PRIOR_MK})
        updates = clients.train_mixture(clients.broadcast(theta), how, average=clients.weights())
        w = [matrix(row_P) for row_P in theta]
        q = [formula(np.stack([sample_losses(one, i, each) for each in w], 1), PRIOR_MK[i]) for i in (0, 1)]
        for k, row_P in enumerate(updates.averaged(default=theta)):
            assert_close(row_P, mean(*(weighted_sgd(one, i, w[k], q[i][:, k]) for i in (0, 1))))
        assert close(updates.weight_MK, np.stack([each.mean(0) for each in q]), 1e-5)
        assert np.abs(q[0] - 0.5).max() > 0.05 and not one.stats.fallbacks

    @pytest.mark.parametrize("engine", ENGINES)
    def test_rounds_of_the_method_that_the_page_shows(self, engine, shown):
        one = stage(engine=engine)
        theta, pi = [matrix(one.model(k)) for k in (0, 1)], np.full((2, 2), 0.5)
        for _ in range(2):
            loss = [np.stack([sample_losses(one, i, w) for w in theta], 1) for i in (0, 1)]
            q = [softmax((np.log(pi[i]) - loss[i]) / 2) for i in (0, 1)]
            theta = [mean(*(weighted_sgd(one, i, w, q[i][:, k]) for i in (0, 1))) for k, w in enumerate(theta)]
            pi = np.stack([each.mean(0) for each in q])
        state = one.play(shown("tempered.py:TemperedEM")(temperature=2.0), None, None)
        for k in (0, 1):
            assert_close(state.models_KP[k], theta[k])
        assert close(state.weight_NK, pi, 1e-5) and not one.stats.fallbacks

    def test_fitted_weights_of_a_newcomer(self, shown):
        """E and M steps from equal weights, in which the losses do not change."""
        one, method = stage(), shown("tempered.py:TemperedEM")(temperature=0.5, fit_steps=3)
        state = method.init(one.start())
        loss = np.stack([sample_losses(one, 1, matrix(row_P)) for row_P in state.models_KP], 1)
        pi = np.full(2, 0.5)
        for _ in range(3):
            pi = softmax((np.log(pi) - loss) / 0.5).mean(0)
        assert close(method.join(state, one.clients([1])).weight_NK[1], pi, 1e-5)

    @pytest.mark.parametrize("engine", ENGINES)
    def test_a_broadcast_anchor_is_the_model_that_is_trained(self, engine):
        """theta_ik <- theta_ik - eta (weighted gradient + mu (theta_ik - theta_k)), for each k."""
        one, mu = stage(engine=engine), 0.4
        theta = torch.stack([one.model(k) for k in range(2)])
        clients = one.clients()
        received = clients.broadcast(theta)
        how = LocalTraining(program=Hard(), given={"mixture": PRIOR_MK}, proximal=[Proximal(mu, received)])
        found = clients.train_mixture(received, how, average=clients.weights()).averaged(default=theta)
        w = [matrix(row_P) for row_P in theta]
        q = [hard(np.stack([sample_losses(one, i, each) for each in w], 1), None) for i in (0, 1)]
        for k in (0, 1):
            trained = []
            for i in (0, 1):
                x, y = data(one, i)
                row = w[k]
                for _ in range(STEPS):
                    p = softmax(x @ row.T)
                    row = row - ETA * ((q[i][:, k, None] * (p - y)).T @ x / len(x) + mu * (row - w[k]))
                trained.append(row)
            assert_close(found[k], mean(*trained))

    def test_without_weigh_every_client_trains_all_models(self):
        """With a program that keeps numbers for each of its models."""
        one = stage(engine="vectorised")
        theta = torch.stack([one.model(k) for k in range(2)])
        clients = one.clients()
        updates = clients.train_mixture(
            clients.broadcast(theta), LocalTraining(program=Counts()), average=clients.weights("uniform")
        )
        for k, row_P in enumerate(updates.averaged(default=theta)):
            assert_close(row_P, mean(*(sgd(one, i, matrix(theta[k])) for i in (0, 1)), "uniform"))
        assert (updates.weight_MK == 1).all()
        assert {key: value.tolist() for key, value in one.client_states.items()} == {
            (f"Counts-{k}", i): [float(STEPS)] for k in (0, 1) for i in (0, 1)
        }


@dataclass(frozen=True)
class Counts(ClientProgram):
    def keeps(self, spec):
        return {"steps": torch.zeros(1)}

    def finish(self, client, start_P, row_P, held):
        held["steps"] = held["steps"] + client.steps


@dataclass(frozen=True)
class Reporting(Mixture):
    """Reports the sums of responsibilities; `late`: after the last step, by an own `finish`."""

    def responsibilities(self, loss_nK, y_n, held):
        held["sums"] = loss_nK.softmax(1).sum(0)
        return loss_nK.softmax(1)

    def reports(self, spec: ParamSpec):
        return {"sums": 2}


@dataclass(frozen=True)
class ReportingLate(Reporting):
    def finish(self, client: ClientView, start_P, row_P, held):
        held["sums"] = held["sums"] * 10


class TestReports:
    @pytest.mark.parametrize(("program", "factor"), [(Reporting(), 1), (ReportingLate(), 10)])
    @pytest.mark.parametrize("engine", ["span", "vectorised"])
    def test_they_are_counted_once_for_all_models(self, program, factor, engine):
        one = stage(engine=engine)
        theta, clients = torch.stack([one.model(k) for k in range(2)]), one.clients()
        received, before = clients.broadcast(theta), clients.stats.traffic.up_bits
        updates = clients.train_mixture(received, LocalTraining(program=program), average=np.ones(2))
        loss = [np.stack([sample_losses(one, i, matrix(row_P)) for row_P in theta], 1) for i in (0, 1)]
        expected = np.stack([softmax(each).sum(0) for each in loss])
        assert close(updates.reported("sums"), factor * expected, 1e-5)
        # known before the first step, they need no row of a client, so that `span` may compute sums alone
        assert updates.updates.training.finishes == (factor == 10)
        assert clients.stats.traffic.up_bits - before == 32 * 2 * (2 * one.network.spec.size + 2)

    def test_of_an_excluded_client_they_are_nan(self):
        one = groups(federation=Spoiled([1]))
        theta, clients = torch.stack([one.model(k) for k in range(2)]), one.clients([0, 1])
        updates = clients.train_mixture(
            clients.broadcast(theta), LocalTraining(program=Reporting()), average=np.ones(2)
        )
        assert updates.reported("sums").isnan().tolist() == [[False] * 2, [True] * 2]
        assert np.isnan(updates.weight_MK).tolist() == [[False] * 2, [True] * 2]


class TestOneModel:
    """`weigh` in `train`: each client's samples by their losses under the model that it received."""

    @pytest.mark.parametrize("engine", ENGINES)
    def test_rounds_of_the_method_that_the_page_shows(self, engine, shown):
        """Mini-batches: the mean of weight * loss over the samples of each batch."""
        one, w = batched(engine), None
        state = one.play(shown("trimmed.py:Trimmed")(), None, None)
        clients, w = Torch(one), one.model()
        for round in (1, 2):
            rows = []
            for i in range(len(SIZES)):
                x, y = one.federation.train(i)
                clients.load(w)
                loss_n = cross_entropy(clients.module(x), y, reduction="none").detach()
                weight_n, row = (loss_n <= loss_n.quantile(0.8)).float(), w.clone()
                for index_B in clients.batches(i, round):
                    clients.load(row)
                    loss_B = cross_entropy(clients.module(x[index_B]), y[index_B], reduction="none")
                    grads = torch.autograd.grad((weight_n[index_B] * loss_B).mean(), list(clients.module.parameters()))
                    row = row - LOCAL.lr * torch.cat([g.reshape(-1) for g in grads])
                rows.append(row)
            w = torch.tensor(SIZES, dtype=torch.float32) / sum(SIZES) @ torch.stack(rows)
        assert close(state.models_KP[0], w, 2e-5) and not one.stats.fallbacks

    @pytest.mark.parametrize("engine", ["sequential", "span"])
    def test_clients_with_models_of_their_own(self, engine):
        """The losses are those under the row that the client received, with the logits of a frozen model."""
        one = stage(engine=engine)
        theta, clients = torch.stack([one.model(k) for k in range(3)]), one.clients()
        received = clients.broadcast(theta)
        how = LocalTraining(program=Share(), frozen_model=received.choose(np.array([2, 2])))
        updates = clients.train(received.choose(np.array([1, 0])), how=how, average=np.eye(2))
        w = [matrix(row_P) for row_P in theta]
        for i, k in ((0, 1), (1, 0)):
            x, y = data(one, i)
            loss_n = sample_losses(one, i, w[k] + w[2])
            q_n, row = loss_n / loss_n.sum(), w[k]
            for _ in range(STEPS):
                row = row - ETA * (q_n[:, None] * (softmax(x @ (row + w[2]).T) - y)).T @ x / len(x)
            assert_close(updates.averaged(default=theta[:2])[i], row)

    def test_of_asynchronous_clients(self):
        one = stage()
        clients = replace(one.clients(), received=Received(Versions(), {}, 0))
        sent = clients.send(one.model()[None])
        assert clients.train(sent, how=LocalTraining(program=Share()), average=np.ones(2)).valid_M.all()

    def test_noise_on_single_samples_does_not_protect_them(self):
        one = stage()
        clients = replace(one.clients(), local=replace(one.local, examples=ExampleNoise(1.0, 1.0)))
        with pytest.raises(PrivacyError, match="results of weighted samples"):
            clients.train(clients.send(one.model()[None]), how=LocalTraining(program=Share()))
        with pytest.raises(PrivacyError, match="results of several models"):
            clients.train_mixture(clients.broadcast(one.model()[None]), average=np.ones(2))

    def test_it_finds_what_a_client_keeps_for_a_single_model(self):
        """Of several models it would depend on the model."""
        one = stage()
        clients, w = one.clients(), one.model()[None]
        how = LocalTraining(program=Finds(), given={"mixture": np.ones((2, 1))})
        assert clients.train(clients.send(w), how=how).reported("found").tolist() == [[2.0]] * 2
        updates = clients.train_mixture(clients.broadcast(w), how, average=np.ones(2))
        assert updates.reported("found").tolist() == [[1.0]] * 2


@dataclass(frozen=True)
class Finds(Counts):
    """Reports how many of two numbers `weigh` finds: a given and a kept one."""

    def reports(self, spec: ParamSpec):
        return {"found": 1}

    def weigh(self, client, loss_nK, held):
        held["found"] = len(held.keys() & {"mixture", "steps"})
        return torch.ones_like(loss_nK)


@dataclass(frozen=True)
class Share(ClientProgram):
    def weigh(self, client, loss_nK, held):
        return loss_nK / loss_nK.sum(0)


@dataclass(frozen=True)
class Wrong(ClientProgram):
    result: str

    def weigh(self, client, loss_nK, held):
        if self.result == "numbers":
            held["mixture"] = "none"
            return loss_nK
        return {"shape": loss_nK.mean(1), "list": [1.0], "nan": loss_nK * torch.nan, "error": None}[self.result]


class TestErrors:
    @pytest.mark.parametrize(
        ("result", "message"),
        [
            ("shape", r"Wrong.*weigh returned Tensor of float32 and shape \(12,\), expected .* shape \(12, 1\)"),
            ("list", r"weigh returned list of 1, expected a weight of each of 12 samples for each of 1 models"),
            ("numbers", r"after weigh, held\['mixture'\] is str 'none', expected numbers"),
        ],
    )
    def test_they_name_the_program(self, result, message):
        clients = stage().clients()
        with pytest.raises(RunError, match=message):
            clients.train(clients.send(stage().model()[None]), how=LocalTraining(program=Wrong(result)))

    def test_weights_that_are_not_finite_exclude_the_client(self):
        one = stage()
        clients = one.clients()
        updates = clients.train(clients.send(one.model()[None]), how=LocalTraining(program=Wrong("nan")))
        assert not updates.valid_M.any() and "weights that are not finite" in one.stats.rejected[1]

    def test_a_program_without_weigh_fits_no_mixture(self):
        clients = stage().clients()
        with pytest.raises(ValueError, match="fit_mixture: the client program ClientProgram has no weigh"):
            clients.fit_mixture(clients.broadcast(stage().model()[None]), LocalTraining())

    def test_given_numbers_of_another_length(self):
        clients, how = stage().clients(), LocalTraining(program=Hard(), given={"mixture": np.ones((3, 1))})
        with pytest.raises(ValueError, match=r"given 'mixture' has the shape \(3, 1\), expected one entry for each"):
            clients.train_mixture(clients.broadcast(stage().model()[None]), how, average=np.ones(2))


# ---- what needs no mechanism of its own


@pytest.mark.parametrize("engine", ENGINES)
def test_a_chain_of_two_models(engine, shown):
    """w_i <- SGD from w_t, then v_i <- SGD from v on f_i + (lam / 2) |v - w_i|^2."""
    one, lam = stage(engine=engine), 0.3
    clients = one.clients()
    first, second = (one.model(k)[None] for k in (0, 1))
    how = LocalTraining(program=shown("teacher.py:NearTeacher")(lam), given={"teacher": clients.send(first)})
    updates = clients.train(clients.send(second), how=how, average=clients.weights())
    teachers = [sgd(one, i, matrix(first[0]), steps=1) for i in (0, 1)]
    students = [sgd(one, i, matrix(second[0]), lam, teachers[i]) for i in (0, 1)]
    assert_close(updates.averaged(default=second)[0], mean(*students))
    assert_close(updates.uploaded("teacher", default=first)[0], mean(*teachers))


@dataclass(frozen=True)
class HalfWay(ClientProgram):
    def begin(self, client, start_P, held):
        return (start_P + held["first"]) / 2


def test_a_chain_of_clients_goes_through_begin():
    """Client 1 starts half way between the first model and the result of client 0."""
    one = stage()
    clients, w = one.clients(), one.model()[None]
    sent = clients.send(w)
    how = LocalTraining(program=HalfWay(), given={"first": sent}, chained=True)
    updates = clients.train(sent, how=how, average=np.array([0.0, 1.0]))
    before = sgd(one, 0, matrix(w[0]))
    assert_close(updates.averaged(default=w)[0], sgd(one, 1, (before + matrix(w[0])) / 2))


@pytest.mark.parametrize("engine", ENGINES)
def test_own_clipping_of_single_samples(engine, shown):
    """w <- w - eta / 4 sum_j g_j / (|g_j| + r), over four samples j of each step."""
    one, r = stage(engine=engine), 0.5
    clients, w = one.clients(), one.model()[None]
    how = LocalTraining(program=shown("clipped.py:Normalised")(r), sgd=replace(clients.local, batch_size=1))
    updates = clients.train(clients.send(w), how=how, average=clients.weights())
    rows = []
    for i, size in ((0, N_0), (1, N_1)):
        (x, y), row = data(one, i), matrix(w[0])
        draw = stream(one.seed, 1, 1, i, "batches")
        order = np.concatenate([draw.permutation(size) for _ in range(-(-4 * STEPS // size))])
        for step in range(STEPS):
            total = 0.0
            for j in order[4 * step : 4 * step + 4]:
                g = (softmax(x[j : j + 1] @ row.T) - y[j : j + 1]).T @ x[j : j + 1]
                total = total + g / (np.linalg.norm(g) + r)
            row = row - ETA * total / 4
        rows.append(row)
    assert_close(updates.averaged(default=w)[0], mean(*rows))
    assert not close(rows[0], sgd(one, 0, matrix(w[0])), 1e-2)
