"""Private rounds: what one client can change in the sums, the noise on them, and what a server may not read."""

import itertools
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from closeness import close
from federations import Spoiled, Stage, linear, protected
from torch import nn

from cfl_ray.config.privacy import SignatureConfig
from cfl_ray.core.clients import ClientState, LocalTraining
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.privacy import PrivacyError
from cfl_ray.core.rng import Draws
from cfl_ray.core.secure_aggregation import SecureAggregation
from cfl_ray.core.work import AverageDeferred, Train
from cfl_ray.data.synthetic import SyntheticFederation
from cfl_ray.errors import ConfigError
from cfl_ray.methods import REGISTRY, construct
from cfl_ray.privacy.noisy_sums import AdaptiveClip, Noise, Privacy, PrivateRun, rounded_norm

NORM, COHORT = 0.05, 4.0
SUMS_ONLY = (
    "apfl ditto fedavg fedavg_plus fedbabu fedbn fedem fedper fedprox fedprox_plus fedrep ifca ifca_cam lg_fedavg "
    "pfedme fedala fedrod moon"
)
READS = "its server reads {} of single clients"
REFUSED = {
    "autocfl": READS.format("further numbers"),
    "fedamp": READS.format("the models"),
    "fedas": READS.format("the Fisher information"),
    "fedcac": READS.format("further numbers"),
    "fedccfa": READS.format("the classifiers"),
    "clove": READS.format("the losses"),
    "feroma": READS.format("the models"),
    "flux": READS.format("the losses"),
    "feddrift": READS.format("further numbers"),
    "fedgwc": READS.format("the losses of local steps"),
    "fednova": READS.format("further numbers"),
    "fedrc": READS.format("the label masses that clients report"),
    "fedsoft": READS.format("further numbers"),
    "pfedgraph": READS.format("the models"),
    "fedpac": READS.format("the heads"),
    "fedproto": READS.format("the prototypes that clients report"),
    "scaffold": READS.format("the change that clients upload beside their models"),
}
WITH_SIGNATURES = "cfl cflgp cgpfl fedac fedclust fedgroup fesem pacfl stocfl"


def stage(engine="manual", lr=5.0) -> Stage:
    """Clients whose updates are far above NORM."""
    federation = SyntheticFederation(8, input=(6,), classes=3, groups=2, samples=12, seed=0)
    model = lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    return Stage(federation, model, LocalSGD(lr=lr, epochs=1, batch_size=4), engine)


def private(z=1.0, secret=b"", **changes) -> PrivateRun:
    """Without a secret, there is no noise: a dry run."""
    return PrivateRun(Privacy(z, NORM, COHORT, **changes), Noise(secret))


@dataclass
class Recording:
    """A backend that keeps the sums before the noise, in the scale of the clients."""

    backend: object
    sums: list

    def run(self, work):
        outcome = self.backend.run(work)
        if isinstance(work, Train | AverageDeferred) and work.averaging is not None:
            total_R = work.averaging.total_R
            self.sums.append({row: mean_P * total_R[row] for row, mean_P in outcome.means.items()})
        return outcome

    def __getattr__(self, name):
        return getattr(self.backend, name)


def sums_of(name, ids, run, engine="sequential", first=1, secure=None):
    """The sums of every exchange of a method's round with these clients, and its state."""
    one = stage(engine)
    one.backend = Recording(one.backend, [])
    method = REGISTRY[name]()
    clients = protected(one.clients(ids, first), noise=run, masks=secure)
    state = method.round(method.init(one.start()), clients, Draws(0, first))
    if name == "feddrift":
        method.round(method.drift(state, clients), clients, Draws(0, first + 1))
    return one.backend.sums, state


def joint_change(sums, others):
    """Largest norm, over the exchanges, of the change of all sums together."""
    found = []
    for mine, theirs in zip(sums, others, strict=True):
        rows = mine.keys() | theirs.keys()
        zero = torch.zeros(53)
        parts = [mine.get(row, zero).double() - theirs.get(row, zero).double() for row in rows]
        found.append(torch.cat(parts).norm().item() if parts else 0.0)
    return max(found)


@pytest.mark.parametrize("name", SUMS_ONLY.split())
def test_one_client_changes_all_sums_of_an_exchange_by_at_most_the_norm(name):
    """Removing a client changes what it uploads, which is clipped with all models of an exchange together."""
    run = private()
    everyone, _ = sums_of(name, [0, 1, 2, 3, 4], run)
    changes = [joint_change(everyone, sums_of(name, [i for i in range(5) if i != out], run)[0]) for out in range(5)]
    assert max(changes) <= NORM * (1 + 1e-4)
    assert max(changes) > NORM / 2, "the clients of this test upload more than the norm"


def test_without_clipping_the_change_is_larger():
    change = joint_change(sums_of("fedavg", [0, 1, 2], None)[0], sums_of("fedavg", [0, 1], None)[0])
    assert change > 10 * NORM


@pytest.mark.parametrize("engine", ["manual", "vectorised", "span"])
def test_every_engine_clips(engine):
    reference, _ = sums_of("ifca", range(6), private())
    found, _ = sums_of("ifca", range(6), private(), engine)
    assert joint_change(reference, found) < 1e-5


@pytest.mark.parametrize("name", WITH_SIGNATURES.split())
def test_a_server_that_reads_single_uploads_needs_signatures(name):
    with pytest.raises(PrivacyError, match="of single clients, which noise on sums does not protect; give"):
        sums_of(name, range(8), private())
    run = private(signatures=SignatureConfig(noise_multiplier=1.0, clip=0.5), secret=b"key")
    sums_of(name, range(8), run)
    assert run.releases.signatures == 1, "each client uploaded one vector in this round"


@pytest.mark.parametrize("name", REFUSED)
def test_other_uploads_are_refused(name):
    run = private(signatures=SignatureConfig(noise_multiplier=1.0, clip=0.5), secret=b"key")
    with pytest.raises(PrivacyError, match=REFUSED[name]):
        sums_of(name, range(8), run)


def test_a_check_by_the_clients_is_refused_if_the_server_sees_its_result():
    """FedGroup: label shares stay on the clients, but a client that is cold-started again tells that they changed."""
    run, one = private(signatures=SignatureConfig(noise_multiplier=1.0, clip=0.5)), stage()
    method = construct(REGISTRY["fedgroup"], {"migrate": 0.2})
    with pytest.raises(PrivacyError, match=READS.format("changes of the labels")):
        method.round(method.init(one.start()), protected(one.clients(), noise=run), Draws(0, 1))


def test_every_method_is_in_one_of_these_lists():
    groups = [SUMS_ONLY.split(), WITH_SIGNATURES.split(), list(REFUSED), ["local", "per_fedavg", "fl_hc", "fesem_cam"]]
    assert sorted(itertools.chain(*groups)) == sorted(REGISTRY)


def test_equal_weights_are_needed():
    clients = protected(stage().clients([0, 1]), noise=private())
    start = clients.send(torch.zeros(1, 53))
    with pytest.raises(PrivacyError, match=r"privacy needs equal weights of all clients, got 1 \.\. 3"):
        clients.train(start, average=torch.tensor([[1.0, 3.0]]))
    with pytest.raises(PrivacyError, match="every client in one average"):
        clients.train(start, average=torch.ones(2, 2))
    with pytest.raises(PrivacyError, match=r"start from each other's results \(chained\)"):
        clients.train(start, how=LocalTraining(chained=True), average=torch.ones(1, 2))
    twice = clients.select([0, 0, 1])
    with pytest.raises(PrivacyError, match="in an exchange more than once"):
        twice.train(twice.send(torch.zeros(1, 53)), average=torch.ones(1, 3))
    updates = clients.train(start, average=torch.ones(1, 2))
    with pytest.raises(PrivacyError, match="training losses"):
        updates.train_loss_M  # noqa: B018


class TestNoise:
    def test_has_the_standard_deviation_of_the_plan_in_rows_with_and_without_clients(self):
        """z C over the expected number of clients of a row, COHORT / 2; the sum itself is the same."""
        clients = protected(stage(lr=1e-9).clients([0, 1, 2]), noise=private(2.0, b"key"))
        start_KP = torch.zeros(2, 53)
        rows = []
        for _ in range(100):
            updates = clients.train(clients.send(start_KP), average=torch.tensor([[1.0, 1, 1], [0, 0, 0]]))
            rows.append(updates.averaged(start_KP))
        noise = torch.stack(rows)
        expected = 2.0 * NORM / (COHORT / 2)
        for row in range(2):
            assert noise[:, row].std().item() == pytest.approx(expected, rel=0.05)
            assert abs(noise[:, row].mean().item()) < 5 * expected / noise[:, row].numel() ** 0.5

    def test_depends_on_the_key_and_the_address_alone(self):
        states = [sums_of("fedavg", [0, 1], private(1.0, key))[1].models_KP for key in (b"a", b"a", b"b")]
        assert states[0].equal(states[1]) and not states[0].equal(states[2])

    def test_is_released_for_an_empty_cohort(self):
        for name in SUMS_ONLY.split():
            run = private(1.0, b"key")
            _, state = sums_of(name, [], run)
            run.end_round()
            assert sum(run.releases.sampled.values()) == 1 and torch.isfinite(state.models_KP).all()

    def test_fixed_denominators_do_not_follow_the_cohort(self):
        """The average of three clients is the sum of those of two and of one, all over the same number."""
        averages = []
        for ids in ([0, 1], [2], [0, 1, 2]):
            clients = protected(stage().clients(ids), noise=private())
            start = clients.send(torch.zeros(1, 53))
            averages.append(clients.train(start, average=torch.ones(1, len(ids))).averaged(torch.zeros(1, 53)))
        assert close(averages[2], averages[0] + averages[1], 1e-5)


class TestClipping:
    def trained(self, run, **options):
        one = stage()
        clients = protected(one.clients([0]), noise=run)
        options, start_1P = {"average": torch.ones(1, 1)} | options, one.model()[None]
        updates = clients.train(clients.send(start_1P), **options)
        return (updates.averaged(start_1P) - start_1P)[0] * COHORT

    def test_flat_is_to_the_norm(self):
        assert self.trained(private()).norm().item() == pytest.approx(NORM, rel=1e-4)

    def test_per_layer_is_to_its_share_in_every_tensor(self):
        ends = [0, *stage().network.spec.ends]
        change_P = self.trained(private(per_layer=True))
        norms = [change_P[a:b].norm().item() for a, b in zip(ends, ends[1:])]
        assert norms == pytest.approx([NORM / 2] * 4, rel=1e-4)

    def test_private_columns_do_not_use_up_the_norm(self):
        head = stage().network.spec.head
        change_P = self.trained(private(), client_state=ClientState("head", head))
        assert change_P.norm().item() == pytest.approx(NORM, rel=1e-4)
        assert not head.of(change_P[None]).any()

    def test_an_update_within_the_norm_stays(self):
        one, how = stage(), LocalTraining(sgd=LocalSGD(lr=1e-4, epochs=1))
        plain = one.clients([0])
        start_1P = one.model()[None]
        expected = plain.train(plain.send(start_1P), how=how, average=torch.ones(1, 1)).averaged(start_1P) - start_1P
        assert close(self.trained(private(), how=how), expected[0], 1e-2)

    def test_adaptive_goes_to_the_quantile(self):
        """All updates are larger than C, so it grows by exp(eta gamma) a round; its release is part of z."""
        run = private(1.0, adaptive=AdaptiveClip(quantile=0.5, lr=0.2, count_noise=5.0))
        clients = protected(stage().clients([0, 1, 2, 3]), noise=run)
        clients.train(clients.send(torch.zeros(1, 53)), average=torch.ones(1, 4))
        assert run.norm == pytest.approx(NORM * np.exp(0.2 * 0.5))
        run.end_round()
        assert run.releases.sampled == Counter({1.0: 1})
        assert run.privacy.sum_multiplier == pytest.approx((1 - 1 / 100) ** -0.5)

    def test_adaptive_counts_all_clients_if_all_take_part(self):
        run = private(1.0, adaptive=AdaptiveClip(quantile=0.5, lr=0.2, count_noise=5.0))
        clients = protected(stage().clients(range(8)), noise=run, sampled=False)
        how = LocalTraining(sgd=LocalSGD(lr=1e-9, epochs=1))
        clients.train(clients.send(torch.zeros(1, 53)), how=how, average=torch.ones(1, 8))
        assert run.norm == pytest.approx(NORM * np.exp(-0.2 * 0.5)), "all 8 of 8 are within C, not 8 of a cohort of 4"

    def test_adaptive_noise_is_that_of_the_norm_in_the_training(self):
        """Of two averages of the same results, with the first of which C shrinks to a thousandth."""
        run = private(1.0, b"key", adaptive=AdaptiveClip(quantile=0.5, lr=2 * np.log(1000), count_noise=1e6))
        clients = protected(stage().clients([0, 1, 2, 3]), noise=run)
        how = LocalTraining(sgd=LocalSGD(lr=1e-9, epochs=1))
        updates = clients.train(clients.send(torch.zeros(1, 53)), how=how, defer_aggregation=True)
        noise = []
        for _ in range(2):
            run.norm = NORM if not noise else NORM / 1000
            noise.append(clients.average(updates, torch.ones(1, 4)).averaged(torch.zeros(1, 53)) * COHORT)
        assert [one.std().item() for one in noise] == pytest.approx([NORM, NORM], rel=0.3)

    def test_adaptive_needs_noise_on_the_count(self):
        with pytest.raises(ConfigError, match="count_noise must be above 0.5, z / 2, got 0.4"):
            private(1.0, adaptive=AdaptiveClip(0.5, 0.2, 0.4)).privacy.sum_multiplier  # noqa: B018


class TestSignatures:
    def test_are_clipped_with_noise_and_counted_by_client(self):
        run = private(secret=b"key", signatures=SignatureConfig(noise_multiplier=3.0, clip=0.5))
        clients = protected(stage().clients([1, 5]), noise=run)
        found, _ = clients.describe(lambda client, anchor_P: 100 * torch.ones(4000))
        assert (found - 0.5 / 4000**0.5).std().item() == pytest.approx(3.0 * 0.5, rel=0.03)
        clients.select([1]).describe(lambda client, anchor_P: torch.ones(4))
        assert run.releases.signatures_N.tolist() == [0, 1, 0, 0, 0, 2]

    def test_show_which_clients_are_in_the_cohort(self):
        """A round counts if there are sums of the cohort, not of all clients; of a client no more than its vectors."""
        run = private(2.0, b"key", signatures=SignatureConfig(noise_multiplier=3.0, clip=0.5))
        for sampled, trains in ((True, True), (False, True), (True, False), (True, True), (True, True)):
            clients = protected(stage().clients([1, 5]), noise=run, sampled=sampled)
            clients.select([0] if run.releases.shown else [1]).describe(lambda client, anchor_P: torch.ones(4))
            cohort = protected(clients, noise=run)
            if trains:
                cohort.train(cohort.send(torch.zeros(1, 53)), average=torch.ones(1, 2))
            run.end_round()
        assert (run.releases.shown, run.releases.signatures_N.tolist()) == (3, [0, 4, 0, 0, 0, 1])
        again = private(2.0)
        again.restore(run.to_values(), run.releases.signatures_N)
        assert again.releases.known == 3 and replace(run.releases, shown=9).known == 4

    def test_an_evaluation_reads_what_it_wants(self):
        clients = replace(protected(stage().clients([1, 5]), noise=private()), evaluated=True)
        assert clients.losses(clients.known_models(torch.zeros(2, 53))).shape == (2, 2)


class TestSecureSums:
    """Discrete Gaussian noise of the clients; 16 steps in the norm, so that rounding counts."""

    SECURE = SecureAggregation(levels=32, bits=24, neighbours=4, threshold=0.5)

    def changes(self, name):
        """Change of the sums by each of 5 clients, in units of the bound NORM D / L."""
        run, ids = private(), range(5)
        everyone, _ = sums_of(name, ids, run, secure=self.SECURE)
        without = [sums_of(name, [i for i in ids if i != out], run, secure=self.SECURE)[0] for out in ids]
        columns = 53 * (3 if name == "fedem" else 1)  # a client of FedEM uploads all its models
        return [joint_change(everyone, sums) / NORM * 16 / rounded_norm(16, columns) for sums in without]

    @pytest.mark.parametrize("name", SUMS_ONLY.split())
    def test_one_client_changes_the_whole_numbers_by_at_most_their_norm(self, name):
        changes = self.changes(name)
        assert 0.5 < max(changes) <= 1 + 1e-5

    def test_rounding_once_can_exceed_that_norm(self, monkeypatch):
        monkeypatch.setattr("cfl_ray.privacy.noisy_sums.rounded_norm", lambda unit, columns: 10**6)
        assert max(change for name in ("fedavg", "ifca", "fedem", "ditto") for change in self.changes(name)) > 1

    def test_the_bound_of_the_norm(self):
        """D of the docstring; for many levels, rounding costs next to nothing."""
        assert rounded_norm(16, 53) == int((256 + 53 / 4 + 16 + 53**0.5 / 2) ** 0.5) + 1 == 17
        assert rounded_norm(1, 4) == int((1 + 4 / 4 + 1 + 4**0.5 / 2) ** 0.5) + 1 == 3, "below 1 + sqrt(4)"
        assert rounded_norm(2**21, 11_000_000) / 2**21 - 1 < 1e-6

    def noise(self, ids, absent=(), rounds=100, **settings):
        """Noise of the sum of clients that upload nearly nothing, in steps, over these rounds, and the last run."""
        secure, rows = replace(self.SECURE, **settings), []
        for round in range(1, rounds + 1):
            run = private(2.0, b"key")
            one = stage(lr=1e-30)
            clients = protected(one.clients(ids, round), noise=run, masks=secure, absent=np.array(absent, np.int64))
            start_KP = torch.zeros(2, 53)
            updates = clients.train(clients.send(start_KP), average=torch.ones(2, len(ids)) * torch.tensor([[1], [0]]))
            rows.append(updates.averaged(start_KP) * (COHORT / 2) / NORM * 16)
        return torch.stack(rows), one.stats, run

    @pytest.mark.parametrize("ids, absent, agreed, threshold", [([0, 1, 2], [], 3, 1.0), ([0, 1, 2, 3], [4], 5, 0.6)])
    def test_the_noise_is_that_of_the_clients_that_report(self, ids, absent, agreed, threshold):
        """Each adds z D / sqrt(t), t = ceil(threshold n): at least z D in all, in rows with and without clients."""
        noise, stats, _ = self.noise(ids, absent, threshold=threshold)
        least = int(np.ceil(threshold * agreed))
        expected = int(np.ceil(2.0 * 17 / least**0.5)) * len(ids) ** 0.5
        assert not stats.lost_sums and expected >= 2.0 * 17
        for row in range(2):
            assert noise[:, row].std().item() == pytest.approx(expected, rel=0.05)
        assert (noise - noise.round()).abs().max() < 1e-3, "multiples of the grid's step"

    def test_a_sum_with_too_little_noise_is_lost_and_charged(self):
        noise, stats, run = self.noise([0, 1, 2], [4], rounds=2, threshold=0.8)
        assert not noise.any() and "report, its masks need 3; the sum is lost" in stats.lost_sums[0]
        run.end_round()
        assert run.releases.sampled == Counter({2.0: 1})

    def test_clients_without_a_valid_update_upload_zeros_and_noise(self):
        one = stage()
        one.federation = Spoiled([1], 4)
        network = Stage(one.federation, linear)
        secure = replace(self.SECURE, threshold=1.0)
        clients = protected(network.clients([0, 1, 2]), noise=private(2.0, b"key"), masks=secure)
        updates = clients.train(clients.send(torch.zeros(1, 68)), average=torch.ones(1, 3))
        assert updates.valid_M.tolist() == [True, False, True] and not network.stats.lost_sums
        assert updates.outcome.arrays["reported"].all() and updates.outcome.means[0].abs().min() >= 0

    def test_depends_on_the_key_and_not_on_masks(self):
        def models(key, **settings):
            secure = replace(self.SECURE, **settings)
            return sums_of("ifca", range(6), private(1.0, key), secure=secure)[1].models_KP

        assert models(b"a").equal(models(b"a", neighbours=2)) and not models(b"a").equal(models(b"b"))

    @pytest.mark.parametrize("name", SUMS_ONLY.split())
    def test_an_empty_cohort_releases_nothing_and_is_charged(self, name):
        run = private(1.0, b"key")
        _, state = sums_of(name, [], run, secure=self.SECURE)
        run.end_round()
        assert sum(run.releases.sampled.values()) == 1 and torch.isfinite(state.models_KP).all()

    def test_noise_that_cannot_be_accounted_for_is_refused(self):
        with pytest.raises(ConfigError, match=r"of 100 clients .* of 1 steps, it must be 3 \.\. 67108864; set more"):
            private(0.1).privacy.share_of_noise(rounded_norm(16, 53), 100)
        with pytest.raises(ConfigError, match="set fewer levels"):
            private(40.0).privacy.share_of_noise(2**21, 1)

    def test_the_ring_holds_the_tails(self):
        wanted = "9 standard deviations, 1132462080, a ring of 32 bits holds less than 2147483648; set more"
        SecureAggregation().check(900, 10_000)
        with pytest.raises(ConfigError, match=wanted):
            SecureAggregation().check(900, 4_194_304)


def test_rounds_with_several_sums_are_one_release_of_less_noise():
    run = private(2.0)
    clients = protected(stage().clients([0, 1]), noise=run)
    for _ in range(4):
        clients.train(clients.send(torch.zeros(1, 53)), average=torch.ones(1, 2))
    everyone = replace(clients, reachable=lambda waits: (np.arange(8), np.ones(8, np.int64))).all_reachable()
    everyone.train(everyone.send(torch.zeros(1, 53)), average=torch.ones(1, 8))
    run.end_round()
    assert run.releases.sampled == Counter({1.0: 1}), "2 / sqrt(4)"
    assert run.releases.unsampled == Counter({2.0: 1}), "all clients are no sample"
    again = private(2.0)
    again.restore(run.to_values(), run.releases.signatures_N)
    assert (again.norm, again.releases.sampled, again.releases.unsampled) == (
        run.norm,
        run.releases.sampled,
        run.releases.unsampled,
    )
