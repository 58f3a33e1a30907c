"""Checks for every method that clusters its clients once and then averages within clusters."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from federations import Spoiled, Stage, planted
from rounds import mlp
from torch import Tensor

from cfl_ray.checkpoint.store import CheckpointStore
from cfl_ray.clustering.agreement import agreement
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.method import Method
from cfl_ray.core.state import State
from cfl_ray.engine.client_state import ClientStateStore
from cfl_ray.population.population import Population

CLIENTS, GROUPS, INPUTS = 12, 3, 16
P, HEAD = 16 * 16 + 16 + 16 * 4 + 4, 16 * 4 + 4


@dataclass
class Reaching(Stage):
    """A stage on which the clients `online` can be reached; None: all."""

    online: Sequence[int] | None = None

    def clients(self, ids=None, round=1, **options):
        online = np.arange(self.federation.num_clients) if self.online is None else np.asarray(self.online, np.int64)
        reachable = (online, self.federation.num_samples_N[online])
        return replace(super().clients(ids, round, **options), reachable=lambda: reachable)

    def floats(self) -> tuple[float, float]:
        """Traffic of the latest round in floats: (down, up)."""
        return self.stats.traffic.down_bits / 32, self.stats.traffic.up_bits / 32


def stage(federation=None, engine: str = "manual", **local) -> Reaching:
    settings = LocalSGD(**{"epochs": 5, "batch_size": 40, "lr": 0.5} | local)
    return Reaching(planted(CLIENTS, GROUPS) if federation is None else federation, mlp, settings, engine)


def cohorts(participation: float, rounds: int) -> list[np.ndarray]:
    population = Population(CLIENTS, (), 0)
    return [population.draw(number, participation).ids_M for number in range(1, rounds + 1)]


def accuracy(one: Stage, method: Method, state: State) -> float:
    """Mean P-server accuracy: the served model of every client on its group's test set."""
    serving = method.serve(state, one.clients())
    hits = []
    for client, row in enumerate(serving.row_M):
        one.network.load(serving.models_KP[row])
        x, y = one.federation.test(client)
        hits.append((one.network.logits(x).argmax(1) == y).float().mean().item())
    return float(np.mean(hits))


def restored(state: State, directory) -> State:
    """The state as it comes back from a checkpoint."""
    store = CheckpointStore(directory, "hash")
    tensors, scalars = state.to_checkpoint()
    store.save(1, tensors, {"state": scalars}, ClientStateStore())
    saved = CheckpointStore(directory, "hash").load()
    return type(state).from_checkpoint(saved.tensors, saved.values["state"])


def assert_same(one: State, other: State, tolerance: float = 0.0):
    """Both states have the same fields of the same types and dtypes, with values within `tolerance`."""
    for name, value in vars(one).items():
        found = getattr(other, name)
        assert type(found) is type(value), name
        if isinstance(value, (Tensor, np.ndarray)):
            assert found.dtype == value.dtype, name
            assert np.allclose(found, value, rtol=0, atol=tolerance, equal_nan=True), name
        else:
            expected = pytest.approx(value, abs=tolerance, nan_ok=True) if isinstance(value, float) else value
            assert found == expected, name


class OneShot:
    """Subclasses name the method and the round in which it clusters."""

    method: Method
    clustered = 1

    def federation(self):
        return planted(CLIENTS, GROUPS)

    def clustering_state(self, one: Stage, *cohorts) -> State:
        """After the clustering round, and rounds with `cohorts`."""
        return one.play(self.method, *[None] * self.clustered, *cohorts)

    @pytest.mark.parametrize("participation, rounds", [(1.0, 3), (0.3, 15)])
    def test_finds_the_groups(self, participation, rounds):
        """All reachable clients take part in the clustering, however small the cohorts of other rounds are."""
        one = stage(self.federation())
        state = one.play(self.method, *cohorts(participation, self.clustered + rounds))
        assert state.phase == "federate" and state.num_clusters == GROUPS
        known = state.assign_N >= 0
        assert known.sum() >= CLIENTS - 1
        assert agreement(one.federation.group_N[known], state.assign_N[known])["ari"] == 1
        assert accuracy(one, self.method, state) > 0.85

    def test_continues_from_a_checkpoint_after_any_round(self, tmp_path):
        drawn, one = [*[None] * self.clustered, [0, 1, 5, 6], [2, 3, 7]], stage(self.federation(), epochs=1)
        states = [self.method.init(one.start())]
        for number, ids in enumerate(drawn, 1):
            states.append(one.play(self.method, ids, state=states[-1], first=number))
        for after, state in enumerate(states):
            again = restored(state, tmp_path / str(after))
            assert_same(state, again)
            assert_same(states[-1], one.play(self.method, *drawn[after:], state=again, first=after + 1))

    def test_a_cluster_without_participants_keeps_its_model(self):
        one = stage(self.federation())
        state = self.clustering_state(one)
        after = one.play(self.method, [0, 3], state=state, first=self.clustered + 1)
        mine = after.assign_N[0]
        assert after.assign_N[3] == mine and np.array_equal(after.assign_N, state.assign_N)
        for k in range(GROUPS):
            assert torch.equal(after.models_KP[k], state.models_KP[k]) == (k != mine)

    def test_newcomers_are_placed_with_their_group_and_served_its_model(self):
        """Client 11 joins when the others are clustered and have trained for three rounds."""
        one = stage(self.federation())
        one.online = range(11)
        state = one.play(self.method, *[range(11)] * (self.clustered + 3))
        assert state.assign_N[11] == -1
        waiting = self.method.serve(state, one.clients([11]))
        joined = self.method.join(state, one.clients([11], self.clustered + 4))
        assert joined.assign_N.tolist() == [*state.assign_N[:11], state.assign_N[2]]
        assert torch.equal(joined.models_KP, state.models_KP)
        serving = self.method.serve(joined, one.clients([11, 2]))
        assert torch.equal(serving.models_KP[serving.row_M], state.models_KP[state.assign_N[[2, 2]]])
        row = waiting.row_M[0]
        assert row == -1 or not torch.equal(waiting.models_KP[row], state.models_KP[state.assign_N[2]])

    def test_newcomers_are_compared_at_the_learning_rate_of_the_clustering(self):
        """A schedule may have lowered it by then: signatures of short trainings would all be near the fixed model."""
        one = stage(self.federation())
        one.online = range(9)
        state = one.play(self.method, *[range(9)] * self.clustered)
        for lr in (0.5, 1e-4, 0.0):
            one.local = replace(one.local, lr=lr)
            joined = self.method.join(state, one.clients([9, 10, 11], self.clustered + 1))
            assert joined.assign_N[9:].tolist() == state.assign_N[6:9].tolist(), lr

    def test_clients_that_were_unreachable_are_placed_when_they_first_take_part(self):
        one = stage(self.federation())
        one.online = range(10)
        state = one.play(self.method, *[range(10)] * self.clustered)
        one.online = None
        after = one.play(self.method, [10, 0], state=state, first=self.clustered + 1)
        assert after.assign_N.tolist() == [*state.assign_N[:10], state.assign_N[1], -1]
        mine = after.assign_N[10]
        assert not torch.equal(after.models_KP[mine], state.models_KP[mine]), "it takes part in the same round"

    def test_newcomers_before_the_clustering_cost_nothing_and_take_part_in_it(self):
        one = stage(self.federation())
        first = self.method.init(one.start())
        assert self.method.join(first, one.clients([3])) is first and one.floats() == (0, 0)
        assert one.play(self.method, *[None] * self.clustered, state=first).assign_N[3] >= 0

    def test_leavers_are_forgotten_and_their_cluster_keeps_its_model(self):
        """All clients of a group leave; two of them return and are served the cluster's last model."""
        one = stage(self.federation())
        state = self.clustering_state(one, None)
        gone = np.array([1, 4, 7, 10])
        left = self.method.leave(state, gone)
        assert left.assign_N[gone].tolist() == [-1] * 4
        assert np.array_equal(np.delete(left.assign_N, gone), np.delete(state.assign_N, gone))
        assert torch.equal(left.models_KP, state.models_KP)
        stay = np.delete(np.arange(CLIENTS), gone)
        after = one.play(self.method, stay, state=left, first=self.clustered + 2)
        self.check_return(one, state, after)

    def check_return(self, one, state, after):
        back = self.method.join(after, one.clients([4, 7], self.clustered + 3))
        assert back.assign_N[[4, 7]].tolist() == state.assign_N[[4, 7]].tolist()
        serving = self.method.serve(back, one.clients([4]))
        assert torch.equal(serving.models_KP[serving.row_M[0]], state.models_KP[state.assign_N[4]])

    def test_leavers_before_the_clustering_are_not_clustered(self):
        one = stage(self.federation())
        state = self.method.leave(self.method.init(one.start()), np.array([5]))
        one.online = [0, 1, 2, 3, 4, 6, 7, 8]
        assert one.play(self.method, *[[0, 1, 2]] * self.clustered, state=state).assign_N.tolist()[5] == -1

    def test_a_client_without_a_valid_result_is_excluded_and_placed_in_a_later_round(self):
        one = stage(Spoiled([4], CLIENTS, GROUPS))
        state = self.clustering_state(one)
        assert state.assign_N[4] == -1 and 4 in one.stats.rejected
        assert (np.delete(state.assign_N, 4) >= 0).all()
        assert one.play(self.method, None, state=state, first=self.clustered + 1).assign_N[4] == -1
        one.federation.spoiled.clear()
        after = one.play(self.method, [4], state=state, first=self.clustered + 1)
        assert after.assign_N[4] >= 0 and torch.isfinite(after.models_KP).all()

    def test_clustering_is_repeated_in_the_next_round_if_no_result_is_valid(self):
        """And a newcomer without a valid result leaves the state unchanged."""
        one = stage(Spoiled(range(CLIENTS), CLIENTS, GROUPS))
        first = self.method.init(one.start())
        state = one.play(self.method, *[None] * self.clustered, state=first)
        assert len(one.stats.rejected) == CLIENTS
        assert_same(first, state)
        one.federation.spoiled.clear()
        state = one.play(self.method, None, state=state, first=self.clustered + 1)
        assert state.phase == "federate" and (state.assign_N >= 0).all()
        one.federation.spoiled.add(7)
        left = self.method.leave(state, np.array([7]))
        assert_same(left, self.method.join(left, one.clients([7], self.clustered + 2)))

    @pytest.mark.parametrize("clients", [1, 2])
    def test_few_clients(self, clients):
        one = stage(planted(clients, 1))
        state = one.play(self.method, *[None] * (self.clustered + 1))
        assert (state.assign_N >= 0).all() and state.num_clusters == state.assign_N.max() + 1 <= clients
        assert accuracy(one, self.method, state) > 0.8
