"""Checks for every method that clusters its clients once and then averages within clusters."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from federations import Spoiled, Stage, planted
from rounds import accuracy, assert_equal, assert_survives_an_interruption, floats, mlp, sampled

from cfl_ray.clustering.agreement import agreement
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.method import Method
from cfl_ray.core.state import State

CLIENTS, GROUPS, INPUTS = 12, 3, 16
P, HEAD = 16 * 16 + 16 + 16 * 4 + 4, 16 * 4 + 4


@dataclass
class Reaching(Stage):
    """A stage on which the clients `online` can be reached; None: all."""

    online: Sequence[int] | None = None

    def clients(self, ids=None, round=1, **options):
        online = np.arange(self.federation.num_clients) if self.online is None else np.asarray(self.online, np.int64)
        reachable = (online, self.federation.num_samples_N[online])
        return replace(super().clients(ids, round, **options), reachable=lambda waits: reachable)


def stage(federation=None, engine: str = "manual", **local) -> Reaching:
    settings = LocalSGD(**{"epochs": 5, "batch_size": 40, "lr": 0.5} | local)
    return Reaching(planted(CLIENTS, GROUPS) if federation is None else federation, mlp, settings, engine)


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
        state = one.play(self.method, *sampled(CLIENTS, participation, self.clustered + rounds))
        assert state.phase == "federate" and state.num_clusters == GROUPS
        known = state.assign_N >= 0
        assert known.sum() >= CLIENTS - 1
        assert agreement(one.federation.group_N[known], state.assign_N[known])["ari"] == 1
        assert np.nanmean(accuracy(one, self.method, state)) > 0.85

    def test_continues_from_a_checkpoint_after_any_round(self, tmp_path):
        drawn = [*[None] * self.clustered, [0, 1, 5, 6], [2, 3, 7]]
        assert_survives_an_interruption(lambda: stage(self.federation(), epochs=1), self.method, drawn, tmp_path)

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

    def test_all_clients_are_served_the_common_model_before_the_clustering(self):
        one = stage(self.federation())
        state = one.play(self.method, *[[0]] * (self.clustered - 1))
        common_KP = state.models_KP if state.num_clusters else state.start_KP
        serving = self.method.serve(state, one.clients())
        assert torch.equal(serving.models_KP[serving.row_M], common_KP.repeat(CLIENTS, 1))

    def test_newcomers_before_the_clustering_cost_nothing_and_take_part_in_it(self):
        one = stage(self.federation())
        first = self.method.init(one.start())
        assert self.method.join(first, one.clients([3])) is first and floats(one) == (0, 0)
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
        assert_equal(first, state)
        one.federation.spoiled.clear()
        state = one.play(self.method, None, state=state, first=self.clustered + 1)
        assert state.phase == "federate" and (state.assign_N >= 0).all()
        one.federation.spoiled.add(7)
        left = self.method.leave(state, np.array([7]))
        assert_equal(left, self.method.join(left, one.clients([7], self.clustered + 2)))

    @pytest.mark.parametrize("clients", [1, 2])
    def test_few_clients(self, clients):
        one = stage(planted(clients, 1))
        state = one.play(self.method, *[None] * (self.clustered + 1))
        assert (state.assign_N >= 0).all() and state.num_clusters == state.assign_N.max() + 1 <= clients
        assert accuracy(one, self.method, state).mean() > 0.8
