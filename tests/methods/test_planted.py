"""Planted groups are recovered exactly: the data are separable, so an adjusted Rand index below 1 is a defect.

For every method, whatever its clusters: rounds are pure functions, and clients with invalid data change nothing.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from checksums import EARLY
from closeness import close
from federations import Spoiled, Stage, planted
from rounds import accuracy, assert_equal, mlp, sampled, saved_and_loaded

from cfl_ray.checkpoint.store import CheckpointStore
from cfl_ray.clustering.agreement import agreement
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.method import Method
from cfl_ray.methods import REGISTRY
from cfl_ray.methods.cfl import CFL
from cfl_ray.methods.fedac import FedAC
from cfl_ray.methods.fesem import FeSEM
from cfl_ray.methods.fesem_cam import FeSEMCAM
from cfl_ray.methods.stocfl import StoCFL

CLIENTS, GROUPS, SAMPLES = 12, 3, 120
LOCAL = LocalSGD(epochs=5, batch_size=20, lr=0.5)
SHORT = LocalSGD(epochs=1, batch_size=20, lr=0.5)


def stage(local: LocalSGD = LOCAL) -> Stage:
    return Stage(planted(CLIENTS, GROUPS, SAMPLES), mlp, local)


@pytest.mark.parametrize(
    "method, clients, participation, rounds, lr",
    [
        (StoCFL(tau=0.5), 12, 1.0, 2, 0.5),
        (StoCFL(tau=0.5), 12, 0.3, 10, 0.5),
        (CFL(relative=True, min_rounds=5, eps1=0.6, eps2=0.5), 12, 0.3, 16, 0.5),
        (FeSEM(num_clusters=3), 9, 1.0, 2, 0.5),
        (FeSEM(num_clusters=3), 15, 0.4, 8, 0.5),
        (FeSEMCAM(num_clusters=3), 9, 1.0, 3, 0.3),
        (FeSEMCAM(num_clusters=3), 15, 0.4, 8, 0.3),
        (FedAC(num_clusters=3), 12, 1.0, 3, 0.5),
        (FedAC(num_clusters=3), 30, 0.3, 10, 0.5),
    ],
    ids=lambda value: value.name if isinstance(value, Method) else str(value),
)
def test_groups_are_found(method, clients, participation, rounds, lr):
    """By all clients, or by sampled cohorts: their clusters, and models that fit them."""
    one = Stage(planted(clients, GROUPS, SAMPLES), mlp, replace(LOCAL, lr=lr))
    drawn = sampled(clients, participation, rounds)
    state = one.play(method, *drawn)
    seen = np.unique(np.concatenate(drawn))
    assert len(seen) >= 0.9 * clients and state.num_clusters == GROUPS
    assert agreement(one.federation.group_N[seen], state.assign_N[seen])["ari"] == 1
    assert accuracy(one, method, state, seen).mean() > 0.9


def test_one_model_cannot_serve_the_groups():
    """The control of the test above: groups disagree about every label, so one model is right for a third."""
    one, method = stage(), REGISTRY["fedavg"]()
    assert accuracy(one, method, one.play(method, *[None] * 5)).mean() < 1 / GROUPS + 0.04


ONE = {
    "fedavg",
    "fedprox",
    "fedbn",
    "fednova",
    "ditto",
    "fedper",
    "fedrep",
    "fedbabu",
    "apfl",
    "pfedgraph",
    "fedamp",
    "feroma",
    "fedcac",
    "pfedme",
    "lg_fedavg",
    "per_fedavg",
    "local",
    "fedas",
    "fedccfa",
    "fedavg_plus",
    "fedprox_plus",
}
MIXED = {"fedem", "fedrc", "fedsoft"}  # every client counts in all models
# no clusters by round 2: two split later, groups see the same images, and nothing drifts
WHOLE = ONE | MIXED | {"cfl", "fedgwc", "pacfl", "feddrift"}


@pytest.mark.parametrize("name", sorted(set(REGISTRY) - WHOLE))
def test_clusters_without_participants_keep_their_model(name):
    """After two rounds of all clients, a round with clients of group 0 alone."""
    one, method = stage(), REGISTRY[name](**EARLY.get(name, {}))
    state = one.play(method, None, None)
    after = one.play(method, [0, 3], state=state, first=3)
    touched = np.unique(after.assign_N[[0, 3]])
    untouched = [k for k in range(state.num_clusters) if k not in touched]
    assert untouched and torch.equal(after.models_KP[untouched], state.models_KP[untouched])


@pytest.mark.parametrize("name", REGISTRY)
def test_a_round_is_a_pure_function_and_goes_on_from_a_checkpoint(name, tmp_path):
    """A round does not change the given state, and gives the same next state from a checkpoint of it."""
    one, method = stage(SHORT), REGISTRY[name](**EARLY.get(name, {}))
    state = one.play(method, [0, 1, 2, 3], [2, 3, 4, 5])
    before = {key: value.clone() for key, value in state.to_checkpoint()[0].items()}
    other, again = saved_and_loaded(CheckpointStore(tmp_path / name, "hash"), 2, state, one, stage(SHORT))
    after = one.play(method, [3, 4, 5, 6], state=state, first=3)
    assert all(torch.equal(value, before[key]) for key, value in state.to_checkpoint()[0].items())
    assert_equal(other.play(method, [3, 4, 5, 6], state=again, first=3), after)
    client_states = one.client_states
    assert client_states.keys() == other.client_states.keys()
    assert all(torch.equal(value, client_states[key]) for key, value in other.client_states.items())


@pytest.mark.parametrize("name", REGISTRY)
def test_a_client_with_invalid_data_changes_nothing_for_the_others(name):
    """Rounds with a client whose data are NaN, and the same rounds without it, end in the same models.

    Full batch: StoCFL requests the signature of such a client in every round, which shifts the addresses of later
    exchanges.
    """
    method, local = REGISTRY[name](), LocalSGD(epochs=2, lr=0.5)
    ids, others = list(range(8)), [0, 1, 2, 3, 4, 6, 7]
    spoiled, clean = (Stage(Spoiled([5], samples=60), mlp, local) for _ in range(2))
    with_it, without = spoiled.play(method, ids, ids), clean.play(method, others, others)
    assert spoiled.stats.rejected.keys() == {5} and not clean.stats.rejected
    assert close(with_it.models_KP, without.models_KP, 1e-5)
    assert np.array_equal(with_it.assign_N[others], without.assign_N[others])
    assert spoiled.client_states.keys() == clean.client_states.keys()


@pytest.mark.parametrize("name", REGISTRY)
def test_a_cohort_without_valid_data_changes_no_model(name):
    method = REGISTRY[name]()
    one = Stage(Spoiled([4, 5], samples=60), mlp, SHORT)
    state = one.play(method, [0, 1, 2, 3])
    after = one.play(method, [4, 5], state=state, first=2)
    assert torch.equal(after.models_KP, state.models_KP) and one.stats.rejected.keys() == {4, 5}
    fresh = one.play(method, [4, 5])
    assert not fresh.models_KP.isnan().any()
