from dataclasses import dataclass

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage, uneven
from torch import nn

from cfl_ray.clustering.signatures import CentreState, SignatureState, place_by_training, unplaced, whole_update
from cfl_ray.core.clients import UpdateFeatures
from cfl_ray.core.state import UNASSIGNED


@dataclass(frozen=True, kw_only=True)
class Timed(SignatureState):
    round_S: np.ndarray
    pair_SS: np.ndarray


def state(**fields) -> Timed:
    assign_N = np.array([0, 1, 0, UNASSIGNED, 1], np.int32)
    fields = {"round_S": np.zeros(0, np.int64), "pair_SS": np.zeros((0, 0))} | fields
    return Timed(models_KP=torch.zeros(2, 3), assign_N=assign_N, signature_SF=torch.zeros(0, 2), **fields)


class TestSignatures:
    def test_are_appended_or_replaced(self):
        first = state().remember(np.array([4, 2]), torch.tensor([[1.0, 2], [3, 4]]), round_S=np.array([1, 1]))
        both = first.remember(np.array([2, 0]), torch.tensor([[5.0, 6], [7, 8]]), round_S=np.array([2, 2]))
        assert both.seen_S.tolist() == [4, 2, 0] and both.signature_SF.tolist() == [[1, 2], [5, 6], [7, 8]]
        assert both.round_S.tolist() == [1, 2, 2] and both.cluster_S.tolist() == [1, 0, 0]
        assert first.signature_SF.tolist() == [[1, 2], [3, 4]], "a state is never changed"
        assert both.remember(np.zeros(0, np.int64), torch.zeros(0, 2)) is both

    def test_of_different_lengths_are_padded(self):
        one = state().remember(np.array([1]), torch.ones(1, 3)).remember(np.array([0]), torch.ones(1, 1))
        assert one.signature_SF.tolist() == [[1, 1, 1], [1, 0, 0]]

    def test_of_leavers_are_dropped_with_all_their_values(self):
        ids = np.array([4, 2, 0])
        one = state().remember(ids, torch.arange(6.0).reshape(3, 2), round_S=np.array([1, 2, 3]))
        left = one.forget(np.array([2, 3]))
        assert type(left) is Timed and left.seen_S.tolist() == [4, 0] and left.round_S.tolist() == [1, 3]
        assert left.signature_SF.tolist() == [[0, 1], [4, 5]]
        assert left.assign_N.tolist() == [0, 1, UNASSIGNED, UNASSIGNED, 1]


class TestPlacement:
    """One step with learning rate 1 from zeros ends in minus the gradient, here computed by hand."""

    def placed(self, centre_KF, **options) -> tuple[CentreState, Stage, np.ndarray]:
        one = Stage(uneven([6, 6, 6], (4,), classes=2), lambda: nn.Linear(4, 2, bias=False))
        start_KP = torch.zeros(1, 8)
        before = CentreState(
            models_KP=torch.ones(len(centre_KF), 8),
            assign_N=np.full(3, UNASSIGNED, np.int32),
            start_KP=start_KP,
            centre_KF=centre_KF,
        )
        update = whole_update(one.network.spec, None)
        after = place_by_training(before, one.clients(), update, "l2", np.ones(3, np.int64), **options)
        return after, one, self.updates(one)

    def updates(self, one: Stage) -> np.ndarray:
        rows = []
        for client in range(3):
            x, y = one.federation.train(client)
            error = 0.5 - np.eye(2)[y]  # softmax of logits 0, less the label
            rows.append(-one.local.lr * (error.T @ x.double().numpy() / len(x)).reshape(-1))
        return np.array(rows)

    def test_is_in_the_cluster_with_the_nearest_centre(self):
        expected = self.updates(Stage(uneven([6, 6, 6], (4,), classes=2), lambda: nn.Linear(4, 2, bias=False)))
        after, _, _ = self.placed(torch.from_numpy(expected[[2, 0, 1]]).float())
        assert after.assign_N.tolist() == [1, 2, 0] and torch.equal(after.models_KP, torch.ones(3, 8))

    def test_beyond_the_limit_founds_a_cluster(self):
        """Far from the only centre, each client founds a cluster within 0, and all found one within their distance."""
        far_KF = torch.full((1, 8), 100.0)
        apart, _, expected = self.placed(far_KF, within=0.0)
        assert apart.assign_N.tolist() == [1, 2, 3] and apart.models_KP.tolist() == [[1.0] * 8] + [[0.0] * 8] * 3
        assert close(apart.centre_KF[1:], expected, 1e-5)
        distance = np.linalg.norm(expected[1:] - expected[0], axis=1).max()
        together, _, _ = self.placed(far_KF, within=distance + 1e-3)
        assert together.assign_N.tolist() == [1, 1, 1] and len(together.centre_KF) == 2

    def test_of_no_clients_changes_nothing(self):
        after, one, _ = self.placed(torch.zeros(1, 8))
        assert len(unplaced(after, one.clients())) == 0
        features = UpdateFeatures(one.network.spec.all)
        assert place_by_training(after, one.clients([]), features, "l2") is after


def test_a_state_needs_all_its_fields():
    with pytest.raises(TypeError, match="signature_SF"):
        SignatureState(models_KP=torch.zeros(1, 2), assign_N=np.zeros(1, np.int32))
