"""Secure sums: what the server gets of masked uploads, that it is the sum of whole numbers, and what is refused."""

import copy
import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from federations import Stage, protected
from scipy import stats
from torch import nn

from cfl_ray.core.clients import ClientState
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.params import Columns
from cfl_ray.core.privacy import PrivacyError
from cfl_ray.core.rng import Draws, stream
from cfl_ray.core.secure_aggregation import SecureAggregation, missing, traffic
from cfl_ray.core.work import Address, Averaging, Train, UpdateFeatures
from cfl_ray.data.synthetic import SyntheticFederation
from cfl_ray.engine.reduce import HostSums
from cfl_ray.engine.secure_sums import mask
from cfl_ray.errors import ConfigError
from cfl_ray.methods import REGISTRY

COLUMNS = 53
SECURE = SecureAggregation(clip=0.5, levels=2**12, bits=24, neighbours=4, threshold=0.5)
SUMS_ONLY = (
    "apfl ditto fedavg fedavg_plus fedbabu fedbn fedem fedper fedprox fedprox_plus fedrep ifca ifca_cam lg_fedavg "
    "pfedme fedala fedrod moon"
)
UPDATES, NUMBERS = "the updates", "further numbers"
REFUSED = {
    "autocfl": UPDATES,
    "cfl": UPDATES,
    "cflgp": UPDATES,
    "cgpfl": UPDATES,
    "fedac": UPDATES,
    "fedamp": UPDATES,
    "fedas": "the Fisher information",
    "fedcac": UPDATES,
    "fedccfa": "the classifiers",
    "fedclust": UPDATES,
    "clove": "the losses",
    "feroma": "the models",
    "flux": "the losses",
    "feddrift": NUMBERS,
    "fedgroup": UPDATES,
    "fedgwc": "the losses of local steps",
    "fednova": NUMBERS,
    "fedrc": "the label masses that clients report",
    "fedsoft": NUMBERS,
    "fesem": UPDATES,
    "pacfl": "descriptions",
    "pfedgraph": UPDATES,
    "fedpac": "the heads",
    "fedproto": "the prototypes that clients report",
    "scaffold": "the change that clients upload beside their models",
    "stocfl": "descriptions",
}


def stage(engine="sequential", lr=1.0) -> Stage:
    federation = SyntheticFederation(9, input=(6,), classes=3, groups=2, samples=12, seed=0)
    model = lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    return Stage(federation, model, LocalSGD(lr=lr, epochs=1, batch_size=4), engine)


@dataclass
class Recording:
    """A backend that also keeps, of every secure sum, the sum of the whole numbers of clients that are read singly."""

    backend: object
    found: list = field(default_factory=list)  # (means of the secure sums, those of plain sums)

    def run(self, work):
        plain = None if work.secure is None else self.plain(work)
        outcome = self.backend.run(work)
        if plain is not None:
            self.found.append((outcome.means, plain))
        return outcome

    def plain(self, work: Train):
        """Means from uploads that are read one by one, by the formulas of the module."""
        secure, averaging, backend = work.secure, work.averaging, copy.copy(self.backend)
        backend.client_states = copy.deepcopy(self.backend.client_states)
        features = UpdateFeatures(Columns(((0, COLUMNS),)))
        uploads = backend.run(replace(work, secure=None, averaging=None, features=features)).arrays["features"]
        sums = {}
        for out, client, weight in zip(averaging.out_E, averaging.client_E, averaging.weight_E, strict=True):
            change_P = uploads[client] - work.tables[work.start.table][work.start.row_M[client]].numpy()
            if secure.private is not None:
                secure.private.put(change_P, np.zeros(secure.private.count))
            at, identity = work.address, int(work.ids_M[client])
            draw = stream(at.seed, at.round, at.exchange, identity, f"secure/rounding/{out}").random(COLUMNS)
            u = round(weight * secure.unit)
            scaled = np.clip(change_P.astype(float), -secure.clip, secure.clip) * (u / secure.clip)
            numbers = [math.floor(x + d) for x, d in zip(scaled, draw, strict=True)]
            if secure.private is not None:
                for start, stop in secure.private.ranges:
                    numbers[start:stop] = [0] * (stop - start)
            total_P, total = sums.get(out, ([0] * COLUMNS, 0))
            sums[out] = [a + b for a, b in zip(total_P, numbers, strict=True)], total + u
        return {
            int(out): torch.tensor([number * (secure.clip / total) for number in total_P], dtype=torch.float64).float()
            for out, (total_P, total) in sums.items()
        }

    def __getattr__(self, name):
        return getattr(self.backend, name)


def played(name, secure=SECURE, absent=((),), engine="sequential"):
    """The sums of a method's rounds, and its state. absent: in each round, the clients that do not report."""
    one = stage(engine)
    one.backend = Recording(one.backend)
    method = REGISTRY[name]()
    state = method.init(one.start())
    for round, silent in enumerate(absent, 1):
        clients = protected(one.clients(range(8), round), masks=secure, absent=np.array(silent, np.int64))
        state = method.round(state, clients, Draws(0, round))
    return one.backend.found, state


@pytest.mark.parametrize("name", SUMS_ONLY.split())
def test_the_sum_of_masked_uploads_is_that_of_the_whole_numbers(name):
    """Bit for bit, of the definition in Python's integers; in round 2, client 8 agrees on masks and does not report."""
    found, _ = played(name, absent=((), (8,)))
    assert len(found) >= 2
    for secure, plain in found:
        assert secure.keys() == plain.keys() and secure
        assert all(secure[out].equal(plain[out]) for out in plain)
        assert any(plain[out].abs().max() > 0 for out in plain)


def test_masks_change_no_bit_of_a_round():
    states = [played("ifca", secure=replace(SECURE, neighbours=k))[1].models_KP for k in (2, 4, 8)]
    assert states[0].equal(states[1]) and states[0].equal(states[2])


@pytest.mark.parametrize("engine", ["manual", "vectorised", "span"])
def test_every_engine_masks(engine):
    reference, _ = played("ifca")
    found, _ = played("ifca", engine=engine)
    for (mine, plain), (theirs, _) in zip(found, reference, strict=True):
        assert all(mine[out].equal(plain[out]) for out in plain) if engine == "manual" else mine.keys() == theirs.keys()
        assert all((mine[out] - theirs[out]).abs().max() < 2 * SECURE.clip / (SECURE.levels // 2) for out in theirs)


@pytest.mark.parametrize("name", REFUSED)
def test_methods_that_need_single_uploads_are_refused(name):
    sentence = f"its server reads {REFUSED[name]} of single clients, which secure aggregation hides; choose a method"
    one, method = stage(), REGISTRY[name]()
    clients = protected(one.clients(range(8)), masks=SECURE)
    with pytest.raises(PrivacyError, match=sentence):
        state = method.round(method.init(one.start()), clients, Draws(0, 1))
        method.round(method.drift(state, clients), clients, Draws(0, 2))


def test_every_method_is_in_one_of_these_lists():
    rest = ["local", "per_fedavg", "fl_hc", "fesem_cam"]  # without sums, in other tests, or refused in a later round
    assert sorted([*SUMS_ONLY.split(), *REFUSED, *rest]) == sorted(REGISTRY)


def test_losses_of_single_clients_are_refused():
    clients = protected(stage().clients([0, 1, 2]), masks=SECURE)
    updates = clients.train(clients.send(torch.zeros(1, COLUMNS)), average=torch.ones(1, 3))
    with pytest.raises(PrivacyError, match="the training losses of single clients, which secure aggregation hides"):
        updates.train_loss_M  # noqa: B018
    mixtures = clients.train_mixture(clients.send(torch.zeros(2, COLUMNS)), average=np.ones(3))
    with pytest.raises(PrivacyError, match="the training losses of single clients"):
        mixtures.train_loss_M  # noqa: B018
    with pytest.raises(PrivacyError, match="the colours of single clients"):
        clients.require_readable("the colours")
    with pytest.warns(DeprecationWarning, match="require_readable"), pytest.raises(PrivacyError, match="the colours"):
        clients.reads("the colours")
    with pytest.raises(PrivacyError, match="the losses of single clients"):
        clients.losses(clients.send(torch.zeros(1, COLUMNS)))


class TestMasks:
    def received(self, monkeypatch, ids, lr=1.0):
        """The totals that the server gets of these clients, int64 (R, P + 1), modulo 2^32."""
        totals, real = [], HostSums.values
        monkeypatch.setattr(HostSums, "values", lambda self: totals.append(dict(self.totals)) or real(self))
        one = stage(lr=lr)
        clients = protected(one.clients(ids), masks=replace(SECURE, bits=32))
        weight_RM = torch.zeros(40, len(ids))
        weight_RM[0] = 1
        clients.train(clients.send(torch.zeros(1, COLUMNS)), average=weight_RM)
        (found,) = totals
        return torch.stack([found[out] for out in range(40)]) & (2**32 - 1)

    @pytest.mark.parametrize("ids", [[3], [0, 1, 2], list(range(8))])
    def test_the_server_gets_uniform_numbers(self, ids, monkeypatch):
        """Of one client, some, or all; in every row, also those of no client. 2,160 numbers, Kolmogorov and Smirnov."""
        received = self.received(monkeypatch, ids)
        assert stats.kstest(received.flatten().numpy() / 2.0**32, "uniform").pvalue > 1e-3
        bits = (received[..., None] >> torch.arange(32)) & 1
        assert (bits.double().mean((0, 1)) - 0.5).abs().max() < 4.5 * 0.5 / received.numel() ** 0.5

    def test_pair_masks_cancel_and_own_masks_do_not(self):
        address, ids = Address(0, 1, 1), np.arange(7)
        _, secure = SECURE.of(Averaging.of(np.ones((1, 7)), 7), address, ids)
        shape, modulus = (2, 3), 2**SECURE.bits
        with_pairs = sum(mask(secure, address, i, secure.neighbour_MX[i], shape) for i in range(7)) % modulus
        own = sum(mask(secure, address, i, np.zeros(0, np.int64), shape) for i in range(7)) % modulus
        assert with_pairs.equal(own) and own.any()

    def test_graph_is_regular_symmetric_and_drawn_anew(self):
        ids_N = np.arange(20) * 3 + 1
        graphs = [SECURE.graph(ids_N, Address(0, 1, exchange)) for exchange in (1, 1, 2)]
        assert graphs[0].shape == (20, 4) and (graphs[0] == graphs[1]).all() and (graphs[0] != graphs[2]).any()
        pairs = {(a, b) for a, row in zip(ids_N.tolist(), graphs[0].tolist()) for b in row}
        assert len(pairs) == 80 and all((b, a) in pairs and a != b for a, b in pairs)
        assert SECURE.graph(np.arange(3), Address(0, 1, 1)).shape == (3, 2), "all others of a small cohort"


class TestDropout:
    def sums(self, ids, absent, threshold):
        one = stage()
        secure = replace(SECURE, threshold=threshold)
        clients = protected(one.clients(ids), masks=secure, absent=np.array(absent, np.int64))
        start = torch.zeros(1, COLUMNS)
        updates = clients.train(clients.send(start), average=torch.ones(1, len(ids)))
        return updates.averaged(start), one.stats.lost_sums, updates

    def test_below_the_threshold_the_sum_is_read(self):
        whole, lost, _ = self.sums([0, 1, 2, 3, 4], [5], 0.5)
        assert not lost and whole.abs().sum() > 0

    def test_beyond_it_the_sum_is_lost_and_models_stay(self):
        after, lost, updates = self.sums([0, 1], [2, 3, 4], 0.5)
        assert len(lost) == 1 and "report, its masks need 2; the sum is lost, and models stay as they were" in lost[0]
        assert not after.any() and updates.arrived_R.tolist() == [0]

    def test_a_client_alone_is_not_read(self):
        _, lost, _ = self.sums([4], [], 0.5)
        assert lost and "0 neighbours of client 4 report, its masks need 1" in lost[0]

    def test_masks_with_dropped_clients_need_the_holders_of_their_keys(self):
        """Of 5 clients, 1 may be absent: its 4 neighbours report. With 3 absent, each has at most 1 that does, or 2."""
        _, secure = SECURE.of(Averaging.of(np.ones((1, 5)), 5), Address(0, 1, 1), np.arange(5))
        assert secure.needed == 2
        assert not missing(secure, np.arange(5), np.array([False, True, True, True, True]))
        assert "its masks need 2" in missing(secure, np.arange(5), np.array([True, True, False, False, False]))

    def test_a_share_of_all_clients_has_to_report(self):
        """Client 0 and its two neighbours report: each has a neighbour that does, but 3 of 8 are less than half."""
        _, secure = replace(SECURE, neighbours=2).of(Averaging.of(np.ones((1, 8)), 8), Address(0, 1, 1), np.arange(8))
        reported = np.isin(np.arange(8), [0, *secure.neighbour_MX[0]])
        assert secure.needed == 1
        assert "3 clients report, the sum needs 4" in missing(secure, np.arange(8), reported)
        assert not missing(replace(secure, least=3), np.arange(8), reported)

    def test_the_least_number_is_exact(self):
        """A share of 0.28 of 25 clients is 7, although the product in float64 is more."""
        share = replace(SECURE, threshold=0.28, neighbours=24)
        _, secure = share.of(Averaging.of(np.ones((1, 26)), 26), Address(0, 1, 1), np.arange(26))
        assert share.least(25) == 7 and share.least(24) == 7 and share.least(26) == secure.least == 8
        assert replace(share, threshold=0.56).least(25) == 14


class TestRing:
    def test_a_sum_beyond_the_ring_is_refused_with_both_numbers(self):
        wanted = "1024 x levels / 2 = 2147483648, a ring of 32 bits holds less than 2147483648, 1023 clients"
        with pytest.raises(ConfigError, match=wanted):
            SecureAggregation().check(1024)
        SecureAggregation().check(1023)

    def test_the_largest_sums_do_not_wrap(self):
        """8 clients at the end of the clipping range: 8 x 2^15 in 19 bits, whose limit is 2^18 - 1; 7 fit."""
        settings = SecureAggregation(clip=1e-6, levels=2**16, bits=19, neighbours=2)
        found, _ = played("fedavg", secure=replace(settings, bits=20))
        ((secure, plain),) = found
        assert secure[0].equal(plain[0]) and secure[0].abs().max().item() == pytest.approx(1e-6)
        with pytest.raises(ConfigError, match="8 x levels / 2 = 262144"):
            played("fedavg", secure=settings)

    def test_rounding_is_unbiased(self):
        """Mean over rounds of a change of .3 steps; standard deviation sqrt(.21 / n)."""
        from cfl_ray.engine.secure_sums import quantised

        _, secure = SECURE.of(Averaging.of(np.ones((1, 2)), 2), Address(0, 1, 1), np.arange(2))
        change_P = torch.full((20_000,), 0.3 * secure.clip / secure.unit)
        found = quantised(secure, change_P, 1.0, np.random.default_rng(0))
        assert found[-1] == secure.unit and set(found[:-1].tolist()) == {0, 1}
        assert found[:-1].double().mean().item() == pytest.approx(0.3, abs=4 * (0.21 / 20_000) ** 0.5)

    def test_weights_are_part_of_the_sum(self):
        """1 : 3 as u = L / 3 and L; the share of what arrived follows from their sum."""
        clients = protected(stage().clients([0, 1, 2]), masks=replace(SECURE, clip=4.0, levels=2**14))
        start = torch.zeros(1, COLUMNS)
        updates = clients.train(clients.send(start), average=torch.tensor([[1.0, 3.0, 0.0]]))
        plain = stage().clients([0, 1, 2])
        expected = plain.train(plain.send(start), average=torch.tensor([[1.0, 3.0, 0.0]])).averaged(start)
        assert (updates.averaged(start) - expected).abs().max() < 2 * 4.0 / 2**13
        assert updates.weight_R.item() == pytest.approx(4.0, rel=3e-4)


def test_private_columns_are_not_uploaded():
    one = stage()
    head, start = one.network.spec.head, one.model()[None]
    clients = protected(one.clients([0, 1, 2]), masks=SECURE)
    updates = clients.train(clients.send(start), client_state=ClientState("head", head), average=torch.ones(1, 3))
    assert not head.of(updates.outcome.means[0]).any()
    assert head.of(updates.averaged(start)).equal(head.of(start))


def test_deferred_results_are_summed_securely():
    one = stage()
    plain = one.clients([0, 1, 2, 3])
    start = plain.send(one.model()[None])
    expected = plain.train(start, average=torch.ones(1, 4)).averaged(start.models_KP)
    secure = replace(SECURE, clip=4.0)
    clients = protected(one.clients([0, 1, 2, 3]), masks=secure)
    updates = clients.train(start, defer_aggregation=True)
    assert not one.stats.traffic.up_bits, "nothing is uploaded before it is added up"
    found = clients.average(updates, torch.ones(1, 4)).averaged(start.models_KP)
    assert one.stats.traffic.up_bits and not found.equal(expected)
    assert (found - expected).abs().max() < secure.clip / (secure.levels // 2)


def test_traffic_is_that_of_the_protocol():
    """2 x 53 numbers and 2 weights of 24 bits; keys and shares for 4 neighbours; the models as ever."""
    one = stage()
    clients = protected(one.clients(range(8)), masks=SECURE)
    start = clients.send(torch.zeros(2, COLUMNS))
    clients.train(start, average=torch.ones(2, 8))
    _, secure = SECURE.of(Averaging.of(np.ones((2, 8)), 8), Address(0, 1, 1), np.arange(8))
    assert traffic(secure, 2, COLUMNS) == (256 * 16, 2 * 54 * 24 + 256 * 14)
    assert one.stats.traffic.up_bits == 8 * (2 * 54 * 24 + 256 * 14)
    assert one.stats.traffic.down_bits == 8 * (32 * COLUMNS + 256 * 16)


def test_a_choice_is_not_uploaded():
    one = stage()
    for secure, expected in ((None, 8 * 32), (SECURE, 0)):
        clients = protected(one.clients(range(8)), masks=secure)
        clients.choose(clients.broadcast(torch.zeros(2, COLUMNS)), upload=True)
        assert one.stats.traffic.up_bits == expected
