"""Server optimisers with every method that averages: formulas of two clients, reductions, and models that go on."""

from dataclasses import replace
from hashlib import sha256

import pytest
import torch
from checksums import EARLY
from closeness import close
from federations import Stage, planted
from linear import N_0, N_1, assert_close, matrix, sgd, stage
from torch import nn

from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.server_optimizers import FedAvgM, ServerMoments
from cfl_ray.methods import REGISTRY, construct
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.ifca import IFCA

AVERAGING = sorted(name for name, cls in REGISTRY.items() if not cls.only_mean and not cls().needs_mean)


def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


def play(name: str, rounds: int, server=None, **options) -> tuple[object, Stage]:
    one = Stage(planted(6, samples=20), model, LocalSGD(epochs=1, batch_size=10, lr=0.3), server=server)
    return one.play(construct(REGISTRY[name], EARLY.get(name, {}) | options), *[None] * rounds), one


def test_the_formula_of_two_clients():
    """Two rounds of FedAvgM: v <- 0.9 v + (Avg W_i - w), w <- w + 0.5 v."""
    one, w, v = stage(), None, 0.0
    method = FedAvg(server_optimizer={"fedavgm": {"lr": 0.5, "momentum": 0.9}})
    w = matrix(one.model())
    for _ in range(2):
        mean = (N_0 * sgd(one, 0, w) + N_1 * sgd(one, 1, w)) / (N_0 + N_1)
        v = 0.9 * v + (mean - w)
        w = w + 0.5 * v
    assert_close(one.play(method, None, None).models_KP[0], w)


@pytest.mark.parametrize("name", AVERAGING)
def test_momentum_0_and_rate_1_are_the_method_itself_to_the_last_bit(name):
    plain, _ = play(name, 3)
    stepped, one = play(name, 3, server_optimizer={"fedavgm": {"momentum": 0.0, "lr": 1.0}})
    tensors, others = (state.to_checkpoint()[0] for state in (plain, stepped))
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensors[key], others[key]) for key in tensors), name
    assert one.server is not None and one.server.moments, "no average had a step"


class Watched(ServerMoments):
    """Notes the models that go on from one that a step of the round before has made, without its moments."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.made, self.made_before, self.went_on, self.lost = set(), set(), 0, 0

    def begin(self):
        self.made, self.made_before = set(), self.made
        super().begin()

    def moved(self, average, before_RP, mean_RP, changed, trained):
        keys = [row_P.numpy().tobytes() for row_P in before_RP]
        for row in changed:
            if keys[row] in self.made_before and keys.count(keys[row]) == 1:
                self.went_on += 1
                self.lost += (average, sha256(keys[row]).digest()) not in self.before
        after_RP = super().moved(average, before_RP, mean_RP, changed, trained)
        self.made |= {after_RP[row].numpy().tobytes() for row in changed}
        return after_RP


SPLITTING = {"num_clusters": 1, "adaptation": "rho", "rho_low": 0.0, "rho_high": 0.05}


@pytest.mark.parametrize("name, options", [*((name, {}) for name in AVERAGING), ("fedac", SPLITTING)])
def test_every_model_that_goes_on_has_its_moments_in_all_phases(name, options):
    """Warm-up, clustering, splits: in whichever order a round makes its averages."""
    known = []

    class Spy(FedAvgM):
        def __call__(self, delta_P, moments):
            known.append(moments is not None)
            return super().__call__(delta_P, moments)

    server = Watched(Spy(lr=0.5, momentum=0.5))
    state, _ = play(name, 6, server, **options)
    assert server.went_on and not server.lost and any(known)
    assert torch.isfinite(state.models_KP).all()
    assert state.num_clusters > 1 or options != SPLITTING


def test_a_leaf_goes_on_with_its_moments_while_another_one_splits():
    """CFL, three groups of two clients: the leaf of two members is as in a run in which the other does not split."""

    def last_round(**options):
        method = construct(REGISTRY["cfl"], {"eps1": 10.0, "eps2": 0.0, "min_rounds": 1, "server_optimizer": "fedavgm"})
        one = Stage(planted(6, groups=3, samples=40), model, LocalSGD(epochs=2, batch_size=20, lr=0.3))
        state = one.play(method, None, None)
        assert state.members_K.tolist() == [4, 2]
        return one.play(replace(method, **options), None, None, state=state, first=3)

    split, whole = last_round(), last_round(eps1=0.0)
    assert (split.num_clusters, whole.num_clusters) == (3, 2)
    assert torch.equal(split.models_KP[1], whole.models_KP[1])


@pytest.mark.parametrize("lr, splits", [(1e-3, False), (1.0, False), (1e3, False), (1e-3, True), (1e3, True)])
def test_the_split_of_a_leaf_depends_on_the_mean_update_not_on_the_step_of_the_server(lr, splits):
    one = Stage(planted(6, samples=40), model, LocalSGD(epochs=2, batch_size=20, lr=0.3))
    first_KP = one.model()[None]
    mean_norm = float((one.play(FedAvg(), None).models_KP - first_KP).norm())
    eps1 = mean_norm * (1.01 if splits else 0.99)
    options = {"eps1": eps1, "eps2": 0.0, "min_rounds": 0, "server_optimizer": {"fedavgm": {"lr": lr}}}
    assert one.play(construct(REGISTRY["cfl"], options), None).num_clusters == 1 + splits


def test_gradient_averaging_steps_with_the_damped_change():
    """IFCA with gradients: a cluster's change is its share of the participants times the mean change."""
    method = IFCA(num_clusters=2, average="gradients", server_optimizer={"fedavgm": {"lr": 2.0, "momentum": 0.0}})
    plain = IFCA(num_clusters=2, average="gradients")
    start = torch.stack([Stage(planted(8), model).model(k) for k in range(2)])
    single, double = (
        Stage(planted(8, samples=40), model, LocalSGD(lr=0.3)).play(one, None).models_KP for one in (plain, method)
    )
    assert close(double - start, 2 * (single - start), 1e-5)


def test_merged_clusters_begin_anew():
    """StoCFL: two clusters with models merge; a client that is new and joins at once is no merge."""
    forgotten = []

    class Watched(ServerMoments):
        def forget(self, models_KP):
            forgotten.append(len(models_KP))
            super().forget(models_KP)

    one = Stage(planted(8, samples=40), model, LocalSGD(lr=0.3), server=Watched(FedAvgM(momentum=0.5)))
    method = construct(REGISTRY["stocfl"], {"tau": 1.0, "server_optimizer": "fedavgm"})
    apart = one.play(method, [0, 2], [0, 2])
    assert apart.num_clusters == 2 and forgotten == [0, 0]
    together = one.play(replace(method, tau=-1.0), [0, 4], state=apart, first=3)
    assert together.num_clusters == 1 and forgotten[2:] == [1]
    assert len(one.server.moments) == 2, "of the merged cluster and the global model"


def test_private_columns_have_no_step():
    state, one = play("fedper", 2, server_optimizer={"fedadam": {"lr": 0.5}})
    head = one.network.spec.head
    assert torch.equal(head.of(state.models_KP[0]), head.of(one.model()))
    assert not torch.equal(state.models_KP[0], one.model())


def test_a_robust_mean_is_the_change():
    one = stage()
    rule = replace(FedAvg(aggregation="median"), server_optimizer={"fedavgm": {"lr": 0.5, "momentum": 0.0}})
    w = matrix(one.model())
    mean = (sgd(one, 0, w) + sgd(one, 1, w)) / 2  # the median of two
    assert_close(one.play(rule, None).models_KP[0], w + 0.5 * (mean - w))


@pytest.mark.parametrize(
    "name, options",
    [
        ("local", {}),
        ("fednova", {}),
        ("ifca", {"share_base": True}),
        ("cgpfl", {"beta": 0.5}),
        ("cfl", {"stale_updates": "reapply"}),
        ("fedgroup", {"eta_g": 0.1}),
    ],
)
def test_methods_that_go_on_from_the_mean_themselves_refuse(name, options):
    with pytest.raises(Exception, match=f"{name}.server_optimizer must be none, got 'fedadam': "):
        construct(REGISTRY[name], options | {"server_optimizer": "fedadam"})
    assert construct(REGISTRY[name], options)
