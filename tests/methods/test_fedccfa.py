"""FedCCFA: MADD, groups by label and the loss on features by the formulas, and its reduction to FedRep."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import close
from federations import planted
from rounds import EnginesAndCheckpoints, accuracy, floats, groups, row_accuracy
from torch.nn.functional import cosine_similarity, cross_entropy

from cfl_ray.core.classifier import Classifier
from cfl_ray.core.clients import Batch, Clients
from cfl_ray.core.params import Columns
from cfl_ray.data.changes import ChangingFederation, DataChange
from cfl_ray.engine.describing import ClientView
from cfl_ray.methods.fedccfa import AlignedColumns, BalancedClassifier, FedCCFA, label_groups
from cfl_ray.methods.fedrep import FedRep


def test_groups_are_of_clients_with_samples_of_the_label():
    v_MCF = torch.zeros(5, 2, 3)
    v_MCF[:, :, 0], v_MCF[[3, 4], 0, 1] = 1.0, 5.0  # clients 3 and 4 have another row for label 0
    has_MC = torch.tensor([[1, 1], [1, 1], [0, 0], [1, 0], [1, 0]], dtype=torch.bool)
    assert label_groups(v_MCF, has_MC, 0.1).T.tolist() == [[0, 0, -1, 1, 1], [0, 1, -1, -1, -1]]


def view_of(one, client):
    clients = one.clients()
    x, y = one.federation.train(client)
    return ClientView(client, x, y, one.network, None, clients.local, None)


def test_the_balanced_classifier_is_trained_by_sgd_on_the_first_samples_of_each_label():
    one = groups(federation=planted(samples=60))
    classifier, view = Classifier.of(one.network.spec), view_of(one, 2)
    function = BalancedClassifier(classifier, 4, 0.3, 0.9, 0.01, per_class=3)
    found = function(view, one.model())
    chosen = np.sort(np.concatenate([np.flatnonzero(view.y == c)[:3] for c in range(4)]))
    features = view.features(one.model())[chosen]
    layer = torch.nn.Linear(16, 4)
    row_CF = classifier.rows(one.model())
    layer.weight.data, layer.bias.data = row_CF[:, :-1].clone(), row_CF[:, -1].clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        cross_entropy(layer(features), view.y[chosen]).backward()
        optimizer.step()
    expected = torch.cat([layer.weight.data, layer.bias.data[:, None]], 1)
    assert close(found[:-4].reshape(4, 17), expected, 2e-5)
    assert found[-4:].tolist() == np.bincount(view.y, minlength=4).tolist()
    assert len(found) == function.floats(16, 4)


def test_the_loss_on_features_is_that_of_the_cosines():
    draw = torch.Generator().manual_seed(0)
    feature_BF, y_B = torch.randn(5, 6, generator=draw), torch.tensor([0, 1, 2, 1, 0])
    prototype_CF = torch.randn(3, 6, generator=draw)
    loss = torch.tensor(2.0)

    def aligned(prototype_CF):
        batch = Batch(loss, feature_BF, torch.zeros(5, 3), y_B, torch.ones(5), None)
        held = {"prototypes": prototype_CF, "weight": torch.tensor(0.3)}
        return AlignedColumns(Columns(()), 0.0, 0.1).loss(batch, held).item()

    cosine = cosine_similarity(feature_BF[:, None], prototype_CF[None], dim=2)
    assert aligned(prototype_CF) == pytest.approx(2 + 0.3 * cross_entropy(cosine / 0.1, y_B).item(), rel=1e-5)
    without = prototype_CF.clone()
    without[1] = torch.nan
    keep, labels = [0, 2, 4], torch.tensor([0, 1, 0])  # of two labels
    expected = 2 + 0.3 * cross_entropy(cosine[keep][:, [0, 2]] / 0.1, labels).item()
    assert aligned(without) == pytest.approx(expected, rel=1e-5)
    assert aligned(torch.full_like(prototype_CF, torch.nan)) == 2


def test_with_groups_of_one_client_it_is_fedrep():
    """If all clients begin in the first round: later ones begin with the averaged classifier."""
    one, other = groups(), groups()
    method = FedCCFA(eps=0.0, classifier_epochs=2, classifier_lr=0.3, gamma=float("inf"), align_after=0)
    found = one.play(method, *[None] * 3)
    expected = other.play(FedRep(head_epochs=2), *[None] * 3)
    spec = one.network.spec
    base, head = spec.base, spec.head
    assert close(base.of(found.models_KP), base.of(expected.models_KP), 1e-5)
    for (_, client), head_F in other.client_states.items():
        (_, model_P), _ = found.models_of(np.array([client]), spec)
        assert close(head.of(model_P), head_F, 1e-5)


PLANTED = FedCCFA(eps=0.4, balanced_lr=2.0, balanced_epochs=20, classifier_lr=0.3, align_after=2)


def opposed():
    """Clients 0 to 3 have swapped the labels 0 and 1."""
    federation = ChangingFederation(planted(8, 1, 100), [DataChange(1, (0, 1, 2, 3), swap=(0, 1))])
    return groups(federation=federation, batch_size=20)


def test_clients_are_grouped_for_the_labels_about_which_they_disagree():
    one = opposed()
    state = one.play(PLANTED, *[None] * 6)
    assert one.stats.diagnostics.array("label_groups").value.tolist() == [2, 2, 1, 1]
    ids, spec = np.arange(8), one.network.spec
    row_MCF = Classifier.of(spec).rows(state.models_of(ids, spec)[0][1:])
    for c in range(4):
        for group in [range(4), range(4, 8)] if c < 2 else [range(8)]:
            rows, prototypes = row_MCF[list(group), c], state.prototypes_of(ids)[list(group), c]
            assert (rows == rows[0]).all() and (prototypes == prototypes[0]).all()
    assert not close(row_MCF[0, 0], row_MCF[4, 0], 0.1)
    one.federation = one.federation.at(6)
    assert accuracy(one, PLANTED, state).min() > 0.85


def test_rows_and_prototypes_are_means_over_the_groups(monkeypatch):
    """Of one round, from what the clients have trained."""
    one, seen = opposed(), {}
    train, describe = Clients.train, Clients.describe

    def trained(*args, **more):
        updates = train(*args, **more)
        seen["head"] = more.get("features") and updates.valid_features_MF
        return updates

    def described(self, function, *args, **more):
        found = describe(self, function, *args, **more)
        seen[type(function).__name__] = found[0]
        return found

    monkeypatch.setattr(Clients, "train", trained)
    monkeypatch.setattr(Clients, "describe", described)
    state = one.play(replace(PLANTED, eps=9.0), None)
    spec, classifier = one.network.spec, Classifier.of(one.network.spec)
    models_MP = one.model()[None].repeat(8, 1)
    spec.head.put(models_MP, seen["head"])
    mean_CF = classifier.rows(models_MP).mean(0)
    found_MCF = classifier.rows(state.models_of(np.arange(8), spec)[0][1:])
    assert close(found_MCF, mean_CF.expand_as(found_MCF), 1e-5)
    prototype_CF = seen["Prototypes"].reshape(8, 4, 17)[..., :-1].mean(0)
    found_SCF = state.prototype_SCF
    assert close(found_SCF, prototype_CF.expand_as(found_SCF), 1e-5)


def test_features_are_aligned_only_after_some_rounds():
    found = [opposed().play(replace(PLANTED, align_after=after), *[None] * 3) for after in (2, 3, 9)]
    assert not torch.equal(found[0].models_KP, found[1].models_KP)
    assert torch.equal(found[1].models_KP, found[2].models_KP)


def test_only_clients_with_prototypes_receive_them():
    one = opposed()
    one.play(replace(PLANTED, align_after=1), [0, 1], [1, 2, 3])
    assert floats(one)[0] == 3 * 340 + 4 * 16


def test_newcomers_have_the_averages_and_leavers_are_forgotten():
    one = opposed()
    state = one.play(PLANTED, [0, 1, 2, 4, 5])
    assert floats(one) == (5 * 340, 5 * (68 + 4 + 340 + 4 * 16))
    assert row_accuracy(one, state.models_KP[0], 7) == pytest.approx(accuracy(one, PLANTED, state, [7])[0])
    left = PLANTED.leave(state, np.array([1, 4]))
    assert left.seen_S.tolist() == [0, 2, 5] and torch.equal(left.prototype_SCF, state.prototype_SCF[[0, 2, 4]])
    assert left.prototypes_of(np.array([1])).isnan().all()
    models_KP, row_M = left.models_of(np.array([5, 1, 7, 0]), one.network.spec)
    assert row_M.tolist() == [1, 0, 0, 2] and torch.equal(models_KP[0], left.models_KP[0])
    assert torch.equal(Classifier.of(one.network.spec).rows(models_KP[1:]), left.row_SCF[[2, 0]])


class TestEngines(EnginesAndCheckpoints):
    METHOD = PLANTED
