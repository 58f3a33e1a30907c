"""FedEM and FedRC: a round as the papers' formulas in NumPy, special cases, mixtures that are recovered, newcomers."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import close
from federations import Spoiled, Stage, linear, planted
from linear import ETA, N_0, N_1, STEPS, assert_close, data, matrix, stage
from rounds import COHORTS, accuracy, floats, groups, mlp
from torch import nn
from training_tasks import logits_of

from cfl_ray.core.aggregation.rules import RULES, MultiKrum, TrimmedMean
from cfl_ray.core.clients import LocalTraining
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.mixtures import entropy
from cfl_ray.data import federation_from_arrays
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.fedem import FedEM, Likelihoods
from cfl_ray.methods.fedrc import FedRC

METHODS = [FedEM, FedRC]
TRIMMED = int(TrimmedMean().share * 7)  # of seven results, at each end


def sample_losses(one: Stage, client: int, w: np.ndarray) -> np.ndarray:
    x, y = data(one, client)
    logits = x @ w.T
    return -((logits - np.log(np.exp(logits).sum(1, keepdims=True))) * y).sum(1)


def weighted_sgd(one: Stage, client: int, w: np.ndarray, q_n: np.ndarray) -> np.ndarray:
    """Steps on (1 / n) sum_s q(s) loss(w; s)."""
    x, y = data(one, client)
    for _ in range(STEPS):
        p = np.exp(x @ w.T) / np.exp(x @ w.T).sum(1, keepdims=True)
        w = w - ETA * (q_n[:, None] * (p - y)).T @ x / len(x)
    return w


def softmax(rows: np.ndarray) -> np.ndarray:
    p = np.exp(rows - rows.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


class TestFormulas:
    """Two rounds of two clients and two models, with mixture weights that are not equal."""

    def test_fedem(self):
        one = stage()
        theta = [matrix(one.model(k)) for k in (0, 1)]
        pi = np.full((2, 2), 0.5)
        for _ in range(2):
            q = [softmax(np.log(pi[i]) - np.stack([sample_losses(one, i, w) for w in theta], 1)) for i in (0, 1)]
            trained = [[weighted_sgd(one, i, w, q[i][:, k]) for i in (0, 1)] for k, w in enumerate(theta)]
            theta = [(N_0 * of_0 + N_1 * of_1) / (N_0 + N_1) for of_0, of_1 in trained]
            pi = np.stack([q[i].mean(0) for i in (0, 1)])
        state = one.play(FedEM(num_models=2), None, None)
        for k in (0, 1):
            assert_close(state.models_KP[k], theta[k])
        assert close(state.weight_NK, pi, 1e-5) and np.ptp(pi) > 0.01
        assert state.assign_N.tolist() == pi.argmax(1).tolist()

    def test_fedrc(self):
        """The table divides the likelihoods: the second round differs from FedEM's."""
        one = stage()
        theta = [matrix(one.model(k)) for k in (0, 1)]
        omega, share = np.full((2, 2), 0.5), np.full((3, 2), 1 / 3)
        labels = [data(one, i)[1].argmax(1) for i in (0, 1)]
        for _ in range(2):
            loss = [np.stack([sample_losses(one, i, w) for w in theta], 1) for i in (0, 1)]
            gamma = [softmax(np.log(omega[i]) - loss[i] - np.log(share[labels[i]])) for i in (0, 1)]
            trained = [[weighted_sgd(one, i, w, gamma[i][:, k]) for i in (0, 1)] for k, w in enumerate(theta)]
            theta = [(N_0 * of_0 + N_1 * of_1) / (N_0 + N_1) for of_0, of_1 in trained]
            omega = np.stack([gamma[i].mean(0) for i in (0, 1)])
            mass = sum(np.stack([gamma[i][labels[i] == label].sum(0) for label in range(3)]) for i in (0, 1))
            share = mass / mass.sum(0)
        state = one.play(FedRC(num_models=2), None, None)
        for k in (0, 1):
            assert_close(state.models_KP[k], theta[k])
        assert close(state.weight_NK, omega, 1e-5) and close(state.share_CK, share, 1e-5)
        assert not close(stage().play(FedEM(num_models=2), None, None).weight_NK, omega, 1e-3)

    def test_clients_outside_the_cohort_hold_a_damped_average_back(self):
        """Official code of FedEM: they count with the last global model."""
        one = stage()
        clients = replace(one.clients([0]), reachable=lambda waits: (np.arange(2), np.array([N_0, N_1])))
        plain, damped = (FedEM(num_models=2, damped=damped) for damped in (False, True))
        first = plain.init(one.start())
        whole, part = (method.round(first, clients, None).models_KP - first.models_KP for method in (plain, damped))
        assert close(part, whole * N_0 / (N_0 + N_1), 1e-5) and whole.abs().max() > 0.05


@pytest.mark.parametrize("engine", ["sequential", "span"])
def test_every_model_can_have_client_weights_of_its_own(engine):
    """theta_k <- sum_i a_ki theta_ik / sum_i a_ki, and a model without weight keeps its value."""
    one = replace(stage(), engine=engine)
    theta = torch.stack([one.model(k) for k in range(3)])
    weight_KM = np.array([[0.2, 0.6], [3.0, 0.0], [0.0, 0.0]])
    clients = one.clients()
    how = LocalTraining(program=Likelihoods(), given={"mixture": np.full((2, 3), 1 / 3)})
    updates = clients.train_mixture(clients.broadcast(theta), how, average=weight_KM)
    found = updates.averaged(default=theta)
    w = [matrix(row_P) for row_P in theta]
    q = [softmax(-np.stack([sample_losses(one, i, each) for each in w], 1)) for i in (0, 1)]
    trained = [[weighted_sgd(one, i, each, q[i][:, k]) for i in (0, 1)] for k, each in enumerate(w)]
    assert_close(found[0], (0.2 * trained[0][0] + 0.6 * trained[0][1]) / (0.2 + 0.6))
    assert_close(found[1], trained[1][0])
    assert torch.equal(found[2], theta[2])
    assert np.allclose(updates.updates.arrived_R[:2], 1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("rule", [name for name in RULES if name != "mean"])
def test_a_rule_is_applied_to_every_model_separately(method, rule):
    """To the results W_ik of model k alone; a client whose data are not valid is no member."""
    valid = [0, 1, 2, 3, 4, 6, 7]
    one = groups(federation=Spoiled([5]), epochs=1)
    robust = method(num_models=3, aggregation=rule)
    state = robust.init(one.start())
    clients = one.clients(aggregation=robust.aggregation_rule)
    found = robust.round(state, clients, None).models_KP.double().numpy()
    trained_MKP = np.stack(
        [method(num_models=3).round(state, one.clients([i]), None).models_KP.double().numpy() for i in valid]
    )
    start_KP, weight_M = state.models_KP.double().numpy(), one.federation.num_samples_N[valid]
    for k, rows_MP in enumerate(trained_MKP.swapaxes(0, 1)):
        changes_MP = rows_MP - start_KP[k]
        length_M = np.linalg.norm(changes_MP, axis=1)
        scale_M = weight_M / weight_M.sum() * np.minimum(1, np.median(length_M) / length_M)
        chosen = MultiKrum().chosen(((rows_MP[:, None] - rows_MP) ** 2).sum(2))
        expected = {
            "median": np.median(rows_MP, 0),
            "trimmed_mean": np.sort(rows_MP, 0)[TRIMMED : len(rows_MP) - TRIMMED].mean(0),
            "multi_krum": rows_MP[chosen].mean(0),
            "norm_clipping": start_KP[k] + scale_M @ changes_MP,
        }
        assert close(found[k], expected[rule], 1e-5), k
    assert not close(found[0], found[1], 1e-2)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("local", [{}, {"batch_size": 30, "momentum": 0.9}])
@pytest.mark.parametrize("rule", RULES)
def test_one_model_is_fedavg_with_every_rule(method, local, rule):
    """Bit for bit: the draws are those of FedAvg's only exchange."""
    found = groups(**local).play(method(num_models=1, aggregation=rule), *COHORTS).models_KP
    assert torch.equal(found, groups(**local).play(FedAvg(aggregation=rule), *COHORTS).models_KP)


def test_fedrc_with_equal_shares_is_fedem():
    """In every round; the table that the round has made is not used."""
    one, other = groups(), groups()
    found, expected = FedRC().init(one.start()), FedEM().init(other.start())
    equal_CK = found.share_CK
    for _ in range(4):
        found = FedRC().round(found.advance(share_CK=equal_CK), one.clients(), None)
        expected = FedEM().round(expected, other.clients(), None)
        assert not close(found.share_CK, equal_CK, 1e-2)
        assert close(found.models_KP, expected.models_KP, 1e-5)
        assert close(found.weight_NK, expected.weight_NK, 1e-5)


@pytest.mark.parametrize("engine", [pytest.param("manual", marks=pytest.mark.cpu), "span", "vectorised"])
@pytest.mark.parametrize("local", [{}, {"batch_size": 25, "steps": 5}])
def test_engines_weigh_samples_alike(engine, local):
    one, other = (groups(name, **local) for name in ("sequential", engine))
    expected, found = (each.play(FedEM(num_models=2), None, None) for each in (one, other))
    assert close(found.models_KP, expected.models_KP, 5e-5)
    assert close(found.weight_NK, expected.weight_NK, 1e-4) and np.ptp(expected.weight_NK) > 0.01
    assert not other.stats.fallbacks or engine == "span"


# ---- what mixtures find


def mixed_clients(shares: list[float], samples: int = 120, seed: int = 0):
    """Client i has a share of its samples from one concept and the rest from another, which disagree on every label."""
    concepts = planted(2, 2, samples=samples * len(shares), seed=seed)
    parts, owners = [], []
    for client, share in enumerate(shares):
        for group, count in ((0, round(share * samples)), (1, samples - round(share * samples))):
            x, y = concepts.train(group)
            parts.append((x[client * samples :][:count], y[client * samples :][:count]))
            owners.append(np.full(count, client))
    x, y = (torch.cat(list(arrays)).numpy() for arrays in zip(*parts))
    owner = np.concatenate(owners)
    return federation_from_arrays(x, y, owner, x_test=x, y_test=y, test_clients=owner, num_classes=4)


@pytest.mark.parametrize("method", METHODS)
def test_shares_of_planted_mixtures_are_recovered(method):
    shares = [0.9, 0.7, 0.5, 0.3, 0.1, 0.8]
    one = Stage(mixed_clients(shares), mlp, LocalSGD(epochs=2, batch_size=30, lr=0.5))
    state = one.play(method(num_models=2), *[None] * 40)
    found = state.weight_NK[:, 0] if state.weight_NK[0, 0] > 0.5 else state.weight_NK[:, 1]
    assert np.abs(found - shares).max() < 0.12


@pytest.mark.parametrize("method", METHODS)
def test_groups_that_disagree_are_separated(method):
    one = Stage(planted(samples=100), mlp, LocalSGD(epochs=5, lr=0.5, batch_size=40))
    state = one.play(method(num_models=2), *[None] * 15)
    assert set(state.assign_N[::2]) != set(state.assign_N[1::2]) and len(set(state.assign_N[::2])) == 1
    assert entropy(state.weight_NK).max() < 0.3 and accuracy(one, method(num_models=2), state).min() > 0.9


def label_skew() -> Stage:
    """One concept; the even clients have the labels 0 and 1, the odd ones 2 and 3."""
    x, y = planted(1, 1, samples=800).train(0)
    order = torch.argsort(y, stable=True)
    x, y = x[order].numpy(), y[order].numpy()
    owner = np.where(y < 2, 2 * (np.arange(len(y)) % 3), 2 * (np.arange(len(y)) % 3) + 1)
    federation = federation_from_arrays(x, y, owner, x_test=x, y_test=y, test_clients=owner, num_classes=4)
    return Stage(federation, mlp, LocalSGD(epochs=2, batch_size=30, lr=0.3))


def test_label_skew_separates_the_clients_of_fedem_and_not_those_of_fedrc():
    """The mean distance between the mixtures of clients with other labels."""
    apart = []
    for method in METHODS:
        state = label_skew().play(method(num_models=2), *[None] * 15)
        apart.append(np.abs(state.weight_NK[::2].mean(0) - state.weight_NK[1::2].mean(0)).max())
    assert apart[0] > 0.5 and apart[1] < 0.25


# ---- clients without weights


@pytest.mark.parametrize("method", METHODS)
class TestClientsWithoutWeights:
    @pytest.fixture
    def found(self, method):
        one = groups(federation=planted(samples=100), epochs=5, lr=0.5, batch_size=40)
        return one, one.play(method(num_models=2), *[[0, 1, 2, 3]] * 15)

    def test_they_predict_with_a_fitted_mixture(self, method, found):
        one, state = found
        serving = method(num_models=2).serve(state, one.clients())
        assert not state.weight_NK[4:].any() and np.allclose(serving.weight_MK.sum(1), 1)
        assert np.allclose(serving.weight_MK[4:6], state.weight_NK[:2], atol=0.1) and floats(one) == (0, 0)
        assert accuracy(one, method(num_models=2), state).min() > 0.9

    def test_newcomers_keep_theirs(self, method, found):
        one, state = found
        clients = one.clients([6, 7])
        after = method(num_models=2).join(state, clients)
        assert np.allclose(after.weight_NK[6:], state.weight_NK[:2], atol=0.1)
        assert after.assign_N[6:].tolist() == state.assign_N[:2].tolist()
        gone = method(num_models=2).leave(after, np.array([6]))
        assert not gone.weight_NK[6].any() and gone.assign_N[6] == -1 and gone.weight_NK[7].any()

    def test_a_client_with_invalid_data_keeps_its_weights(self, method):
        one = Stage(Spoiled([0]), mlp, LocalSGD(epochs=3, lr=0.3))
        state = one.play(method(num_models=2), None, None)
        assert not state.weight_NK[0].any() and state.weight_NK[1:].all() and 0 in one.stats.excluded
        assert torch.isfinite(state.models_KP).all()


def test_a_diverged_model_has_no_weight_and_all_diverged_exclude_the_client():
    one = groups()
    state = FedEM(num_models=2).init(one.start())
    broken = state.models_KP.clone()
    broken[1] = torch.nan
    after = one.play(FedEM(num_models=2), None, state=state.advance(models_KP=broken))
    assert (after.weight_NK == [1, 0]).all()
    one.play(FedEM(num_models=2), [0, 1], state=state.advance(models_KP=broken * torch.nan))
    assert "weights that are not finite" in one.stats.rejected[0]


def test_mixture_weights_of_many_clients_are_on_disk():
    """For each client: 4 bytes in the next state, of its model, and 13 for a while to count the members of models."""
    clients, count = 100_000, 3
    one = Stage(planted(clients, samples=1), mlp, LocalSGD(steps=1))
    method, cohort = FedEM(num_models=count), np.arange(100)
    state = method.init(one.start())
    weight_NK = np.full((clients, count), 1 / count, np.float32)
    state = state.advance(weight_NK=weight_NK, assign_N=np.zeros(clients, np.int32))
    method.round(state, one.clients(cohort), None)  # what is allocated once, such as modules
    tracemalloc.start()
    try:
        after = method.round(state, one.clients(cohort), None)
        kept, peak = (size / clients for size in tracemalloc.get_traced_memory())
    finally:
        tracemalloc.stop()
    assert kept < 4 + 4 and peak < 4 + 13 + 4, (kept, peak)
    assert not np.array_equal(after.weight_NK[cohort], weight_NK[cohort])
    assert (after.weight_NK[100:] == weight_NK[100:]).all() and (state.weight_NK == weight_NK).all()
    later = method.leave(method.round(after, one.clients(cohort + 50), None), np.arange(10))
    assert not later.weight_NK[:10].any() and (later.weight_NK[10:50] == after.weight_NK[10:50]).all()
    again = type(later).from_checkpoint(*later.to_checkpoint())
    assert (again.weight_NK == later.weight_NK).all()


def test_the_train_loss_is_that_of_the_mixture():
    one = Stage(planted(2, 1), linear, LocalSGD(steps=1, lr=0.1))
    method = FedEM(num_models=2)
    state, clients = method.init(one.start()), one.clients()
    method.round(state, clients, None)
    for client in (0, 1):
        x, y = one.federation.train(client)
        rows = [logits_of(one.network, row_P, x).cpu() for row_P in state.models_KP]
        loss_nK = torch.stack([nn.functional.cross_entropy(logits, y, reduction="none") for logits in rows], 1)
        expected = ((-loss_nK).softmax(1) * loss_nK).sum(1).mean().item()
        assert close(clients.stats.train_loss[client], expected, 1e-5)
