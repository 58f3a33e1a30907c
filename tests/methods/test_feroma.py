"""Feroma: weights by profiles and rounds by plain formulas, parents by the ids of clients, drift and newcomers."""

import numpy as np
import pytest
import torch
from linear import assert_layers, deep_sgd, layers
from rounds import EnginesAndCheckpoints, floats
from test_flux import SIZES, P, deep, described, scaled, shifted

from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.feroma import Feroma
from cfl_ray.methods.flux import Descriptor

FLOATS = 2 * 3 * 4  # of a profile


def mixed(models: dict, profiles: dict, profile: np.ndarray, current: list, options: dict, fallback):
    """theta_i of a client with this profile; `current`: profiles of all clients of the round, for the scaling."""
    if not models:
        return fallback
    parents = sorted(models)
    points = scaled(np.stack([*current, *(profiles[j] for j in parents), profile]), options.get("blocks", "kinds"))
    d = np.sqrt(((points[len(current) : -1] - points[-1]) ** 2).sum(1))
    w = 1 / (d + 1e-8) if options.get("weighting") == "inverse" else np.exp(-d)
    w = w * (d <= options.get("threshold", np.inf)) * np.array(SIZES)[parents]
    if not w.any():
        return fallback
    return tuple(sum(share * models[j][part] for share, j in zip(w / w.sum(), parents)) for part in (0, 1))


@pytest.mark.parametrize("options", [{}, {"weighting": "inverse"}, {"threshold": 1.2}, {"blocks": "labels"}], ids=str)
def test_rounds_follow_the_formulas(options):
    """A round of FedAvg, then four with other cohorts in other orders: parents are known by id, not by position."""
    one, method = deep(), Feroma(warmup_rounds=1, **options)
    start = layers(one.model())
    trained = [deep_sgd(one, i, *start) for i in range(5)]
    average = lambda results, ids: tuple(
        np.average([result[part] for result in results], axis=0, weights=np.array(SIZES)[ids]) for part in (0, 1)
    )
    extractor = fallback = average(trained, list(range(5)))
    state = one.play(method, None)
    assert state.phase == "federate" and not len(state.seen_S)
    models, profiles = {}, {}
    for number, cohort in enumerate(([3, 4], [0, 1, 3], [2, 4], [0, 1, 2, 3, 4]), 2):
        current = [described(one, i, extractor[0]) for i in cohort]
        starts = [mixed(models, profiles, own, current, options, fallback) for own in current]
        results = [deep_sgd(one, i, *begin) for i, begin in zip(cohort, starts)]
        fallback = average(results, cohort)
        models |= dict(zip(cohort, results))
        profiles |= dict(zip(cohort, current))
        known = len(set(cohort) & set(state.seen_S.tolist())) if len(state.seen_S) else len(cohort)
        state = one.play(method, cohort, state=state, first=number)
        assert floats(one) == ((2 * len(cohort) - known) * P, len(cohort) * (P + FLOATS))
        for i, result in models.items():
            assert_layers(state.own_SP[state.positions(np.array([i]))[0]], *result)
        assert_layers(state.models_KP[0], *fallback)


def test_a_threshold_of_zero_is_fedavg_with_fresh_clients():
    """Without parents every client starts from the global model, which is FedAvg."""
    cohorts = [None, [0, 1], [2, 3], [4]]
    found, expected = deep().play(Feroma(warmup_rounds=1, threshold=0.0), *cohorts), deep().play(FedAvg(), *cohorts)
    assert torch.equal(found.models_KP, expected.models_KP)


def test_a_client_whose_data_stay_keeps_to_its_own_model_with_inverse_distances():
    """The fault of the official code: its own parent is at distance 0, with a weight of 1e8."""
    one = shifted()
    shares = {}
    for weighting in ("softmax", "inverse"):
        method = Feroma(warmup_rounds=1, weighting=weighting)
        state = one.play(method, None, None)
        descriptor = Descriptor.of(one.clients())
        shares[weighting] = method.shares(state, state.profile_SF, descriptor)
        assert np.allclose(shares[weighting].sum(1), 1) and (shares[weighting][:, 0] == 0).all()
    assert (np.diag(shares["inverse"][:, 1:]) > 0.999).all() and (np.diag(shares["softmax"][:, 1:]) < 0.5).all()
    same = np.arange(8)[:, None] % 2 == np.arange(8) % 2  # clients of one group
    assert shares["softmax"][:, 1:][same].min() > shares["softmax"][:, 1:][~same].max()


def test_predictions_are_by_the_present_inputs_also_of_newcomers_and_after_drift():
    """Without labels: a client whose inputs become those of the other group predicts with a model of that group."""
    one, method = shifted(), Feroma(warmup_rounds=1)
    state = one.play(method, [0, 1, 2, 3], [0, 1, 2, 3])
    group = lambda clients: state.seen_S[method.serve(state, clients).row_M - 1] % 2
    assert method.serve(state, one.clients([0, 1, 2, 3])).row_M.tolist() == [1, 2, 3, 4]
    assert group(one.clients([4, 5, 6, 7])).tolist() == [0, 1, 0, 1] and floats(one)[0] == 0
    train = one.federation.train
    one.federation.train = lambda client: train(client ^ 1)
    assert group(one.clients([0, 1, 2, 3])).tolist() == [1, 0, 1, 0]


def test_a_client_that_left_is_no_parent():
    one, method = shifted(), Feroma(warmup_rounds=1)
    state = one.play(method, [0, 1, 2], [0, 1, 2])
    left = method.leave(state, np.array([1]))
    assert left.seen_S.tolist() == [0, 2] and len(left.own_SP) == len(left.profile_SF) == len(left.samples_S) == 2
    assert torch.equal(left.own_SP[1], state.own_SP[2])


class TestAll(EnginesAndCheckpoints):
    METHOD = Feroma(warmup_rounds=1)
