"""Diagnostics that methods report for the figures of their papers, as formulas."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import close
from federations import planted
from rounds import accuracy, groups
from scipy.spatial.distance import pdist, squareform

from cfl_ray.config import EvaluationConfig
from cfl_ray.core.clients import Clients
from cfl_ray.core.rng import Draws
from cfl_ray.core.serving import Serving
from cfl_ray.methods import REGISTRY
from cfl_ray.runtime.evaluation import Evaluator

ROUNDS = 3
PAIRS = ("clients", "clients")
ARRAYS = {  # method: (options, {name: axes}) in three rounds
    "stocfl": ({}, {"signatures": ("clients", "components"), "cluster_similarity": ("clusters", "clusters")}),
    "autocfl": ({"min_rounds": 1, "max_rounds": 2}, {"distance": PAIRS, "signatures": ("clients", "components")}),
    "fedclust": ({}, {"distance": PAIRS, "signatures": ("clients", "components")}),
    "pacfl": ({}, {"distance": PAIRS}),
    "fl_hc": ({"cluster_round": 2}, {"distance": PAIRS, "signatures": ("clients", "components")}),
    "flux": ({"cluster_round": 1}, {"distance": PAIRS, "signatures": ("clients", "components")}),
    "fedgroup": ({"num_clusters": 2, "alpha": 4}, {"similarity": PAIRS, "signatures": ("clients", "components")}),
    "cfl": (
        {"eps1": 10.0, "eps2": 0.0, "min_rounds": 1},
        {"similarity": PAIRS, "signatures": ("clients", "components")},
    ),
    "fedac": ({"num_clusters": 2}, {"similarity": PAIRS, "signatures": ("clients", "components")}),
    "clove": ({"num_clusters": 2}, {"losses": ("clients", "clusters")}),
    "ifca": ({"num_clusters": 2}, {"losses": ("clients", "clusters")}),
    "ifca_cam": ({"num_clusters": 2, "warmup_rounds": 1}, {"losses": ("clients", "clusters")}),
    "fedem": ({"num_models": 2}, {"mixture_weights": ("clients", "clusters")}),
    "fedrc": ({"num_models": 2}, {"mixture_weights": ("clients", "clusters")}),
    "fedsoft": ({"tau": 1}, {"mixture_weights": ("clients", "clusters")}),
    "fesem": ({"num_clusters": 2}, {"centre_distance": ("clients", "clusters")}),
    "fesem_cam": ({"num_clusters": 2}, {"centre_distance": ("clients", "clusters")}),
    "cflgp": ({"num_clusters": 2}, {"similarity": PAIRS, "signatures": ("clients", "components")}),
    "pfedgraph": ({}, {"similarity": PAIRS, "graph": PAIRS}),
    "apfl": ({"adaptive": True}, {"alpha": ("clients",)}),
}
NUMBERS = {
    "pfedme": {"global_score"},
    "fedamp": {"self_weight"},
    "fedcac": {"collaborators"},
    "feddrift": {"pool"},
    "fedccfa": {"label_groups"},
}  # of methods without arrays


def played(name, options=None):
    """(stage, method, state, {diagnostic: (last round, value)}, evaluated clients) after three rounds."""
    one, method = groups(), REGISTRY[name](**(ARRAYS[name][0] if options is None else options))
    state, found = method.init(one.start()), {}
    for round in range(1, ROUNDS + 1):
        clients = one.clients(round=round)
        state = method.round(state, clients, Draws(one.seed, round))
        diagnostics = clients.stats.diagnostics
        found |= {label: (round, diagnostics.array(label)) for label in diagnostics.names}
        found |= {label: (round, value) for label, value in diagnostics.numbers.items()}
    evaluator = Evaluator(EvaluationConfig(local_samples=10**6), one.federation, one.backend, one.seed)

    def test(clients: Clients, serving: Serving) -> np.ndarray:
        return evaluator.scores(serving, clients)

    clients = replace(one.clients(round=ROUNDS), evaluated=True, tester=test)
    method.diagnose(state, clients)
    diagnostics = clients.stats.diagnostics
    found |= {label: (ROUNDS, diagnostics.array(label)) for label in diagnostics.names}
    found |= {label: (ROUNDS, value) for label, value in diagnostics.numbers.items()}
    return one, method, state, found, clients


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_a_method(name):
    one, _, state, found, _ = played(name)
    axes = {label: value.axes for label, (_, value) in found.items() if not isinstance(value, float)}
    assert axes == ARRAYS[name][1]
    for label, (_, diagnostic) in found.items():
        if label in axes:
            sizes = {"clients": 8, "clusters": state.num_clusters, "components": diagnostic.value.shape[-1]}
            assert diagnostic.value.shape == tuple(sizes[axis] for axis in diagnostic.axes), label
            assert np.isfinite(diagnostic.value).all()
            if diagnostic.axes[0] == "clients":
                assert sorted(diagnostic.labels[0]) == list(range(8))
    for label in {"similarity", "distance"} & axes.keys():  # clients of one group are nearer than those of two
        value, ids = found[label][1].value, found[label][1].labels[0]
        together = (ids[:, None] % 2 == ids % 2) & ~np.eye(8, dtype=bool)
        apart = ids[:, None] % 2 != ids % 2
        sign = 1 if label == "similarity" else -1
        if name != "pacfl":  # its groups have the same inputs
            assert (sign * value[together]).mean() > (sign * value[apart]).mean() + 0.3 * value.std(), name
        assert np.allclose(np.diag(value), 1 if label == "similarity" else 0, atol=1e-6)
        assert np.array_equal(value, value.T)


def test_fedac_reports_what_it_compares_uploads_by():
    """Cosines of z, or Euclidean distances of whole uploads."""
    _, _, state, found, _ = played("fedac", {"num_clusters": 2, "similarity": "l2", "pca_every": 1})
    round, distance = found["distance"]
    assert round == ROUNDS and "similarity" not in found
    assert np.array_equal(distance.labels[0], state.seen_S)
    assert close(distance.value, squareform(pdist(state.signature_SF.double())), 1e-5)
    _, _, state, found, _ = played("fedac", {"num_clusters": 2, "pca_every": 1})
    cosine_SS = 1 - squareform(pdist(state.z(state.signature_SF).double(), "cosine"))
    assert close(found["similarity"][1].value, cosine_SS, 1e-5) and "distance" not in found


def test_other_methods_report_none():
    for name in REGISTRY.keys() - ARRAYS.keys():
        assert played(name, {})[3].keys() == NUMBERS.get(name, set()), name


def test_stocfl_reports_the_score_of_omega_and_the_objective_of_equation_2():
    one, method, state, found, clients = played("stocfl", {"tau": 0.9, "lam": 0.1})
    omega = Serving(state.global_KP, clients.first_row())
    assert found["global_score"][1] == pytest.approx(clients.test(omega)[:, 0].mean())
    assert found["global_score"][1] != pytest.approx(accuracy(one, method, state).mean())
    mean_KF = np.stack([state.signature_SF[state.cluster_S == k].double().mean(0) for k in range(state.num_clusters)])
    cosine_KK = 1 - squareform(pdist(mean_KF, "cosine"))
    assert close(found["cluster_similarity"][1].value, cosine_KK, 1e-5) and state.num_clusters > 1
    # the sum over all pairs of clusters
    expected = sum(cosine_KK[k, j] for k in range(state.num_clusters) for j in range(k))
    assert found["objective"][1] == pytest.approx(expected, rel=1e-5)
    # a cluster that all members have left counts in no pair
    lonely = method.leave(state, state.seen_S[state.cluster_S == 0])
    clients.stats.diagnostics.numbers.clear()
    method.diagnose(lonely, clients)
    rest = sum(cosine_KK[k, j] for k in range(1, state.num_clusters) for j in range(1, k))
    assert clients.stats.diagnostics.numbers["objective"] == pytest.approx(rest, rel=1e-5)


def test_autocfl_reports_the_variance_of_progress():
    _, _, _, found, _ = played("autocfl", {"min_rounds": 5, "max_rounds": 6})
    one, method = groups(), REGISTRY["autocfl"](min_rounds=5, max_rounds=6)
    state = one.play(method, None, None, None)
    assert found["progress_variance"] == (3, np.var(state.loss_N)) and "distance" not in found


def test_ifca_reports_the_losses_by_which_clients_choose():
    one, method = groups(), REGISTRY["ifca"](num_clusters=2)
    state = method.init(one.start())
    clients = one.clients()
    after = method.round(state, clients, Draws(0, 1))
    losses = clients.stats.diagnostics.array("losses").value
    again = one.clients()
    assert np.allclose(losses, again.losses(again.known_models(state.models_KP)), rtol=1e-6)
    assert np.array_equal(losses.argmin(1), after.assign_N)
    evaluated = replace(one.clients(), evaluated=True)
    method.serve(after, evaluated)
    assert not evaluated.stats.diagnostics.names  # those of the evaluation are not those of the round


def test_a_client_whose_loss_is_not_finite_has_no_loss():
    one, method = groups(federation=planted()), REGISTRY["ifca"](num_clusters=2)
    state = method.init(one.start())
    state.models_KP[1] = torch.inf
    clients = one.clients()
    method.round(state, clients, Draws(0, 1))
    losses = clients.stats.diagnostics.array("losses").value
    assert np.isnan(losses[:, 1]).all() and np.isfinite(losses[:, 0]).all()


def test_fesem_reports_the_distances_of_the_e_step():
    _, _, state, found, _ = played("fesem")
    round, distance = found["centre_distance"]
    assert round == ROUNDS and np.array_equal(distance.value.argmin(1), state.assign_N[distance.labels[0]])
