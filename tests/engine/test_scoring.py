import numpy as np
import pytest
import torch
from federations import Stage, linear, planted
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score
from torch.nn.functional import cross_entropy

from cfl_ray.core import work
from cfl_ray.core.work import Address, Rows
from cfl_ray.data import federation_from_arrays
from cfl_ray.engine.scoring import confusion, scores
from cfl_ray.nn.network import Network


@pytest.fixture(scope="module")
def predicted():
    """A random model on 3000 random samples (several batches): network, x, y, prediction."""
    network = Network(linear, (16,))
    draw = np.random.default_rng(0)
    x, y = (
        torch.from_numpy(draw.standard_normal((3000, 16))).float(),
        torch.from_numpy(draw.integers(0, 3, 3000)),
    )  # class 3 never occurs
    network.load(network.new_model(0, 0))
    return network, x, y, network.module(network.input(x)).detach().cpu()


def test_confusion_counts_against_scikit_learn(predicted):
    network, x, y, logits = predicted
    counts, loss_C = confusion(network.logits(x).cpu(), y, 4)
    assert np.array_equal(counts, confusion_matrix(y, logits.argmax(1), labels=range(4)))
    losses = cross_entropy(logits, y, reduction="none").numpy()
    assert np.allclose(loss_C, [losses[y == c].sum() for c in range(4)], rtol=1e-5)


@pytest.mark.parametrize("labels", [None, [0, 1, 2, 3], [1], [0, 2]])
def test_scores_against_scikit_learn(predicted, labels):
    """Restricted to the images of some labels: macro-F1 over the classes that occur there, true or predicted."""
    network, x, y, logits = predicted
    keep = np.isin(y, range(4) if labels is None else labels)
    true, found = y[keep], logits.argmax(1)[keep]
    accuracy, macro_f1, loss = scores(
        *confusion(network.logits(x).cpu(), y, 4), None if labels is None else np.isin(range(4), labels)
    )
    assert accuracy == pytest.approx(accuracy_score(true, found))
    assert macro_f1 == pytest.approx(f1_score(true, found, average="macro", zero_division=0))
    assert loss == pytest.approx(cross_entropy(logits[keep], true).item(), rel=1e-5)


def test_scores_without_images_are_no_numbers(predicted):
    network, x, y, _ = predicted
    assert np.isnan(scores(*confusion(network.logits(x).cpu(), y, 4), np.array([False, False, False, True]))).all()


def label_view():
    """Six clients with the labels {i mod 4, i + 1 mod 4}, tested on the samples of these labels of one test set."""
    x, y = (torch.cat(parts).numpy() for parts in zip(*(planted(1, 1, 60, seed).train(0) for seed in range(2))))
    draw = np.random.default_rng(0)
    owner = np.array([draw.choice([i for i in range(6) if label in (i % 4, (i + 1) % 4)]) for label in y])
    x_test, y_test = planted(1, 1).test_set(0)
    return federation_from_arrays(x, y, owner, x_test=x_test, y_test=y_test, view="label", num_classes=4)


@pytest.mark.parametrize("federation", [planted(6, 2), label_view()], ids=["cluster view", "label view"])
def test_shared_and_own_tests_agree(federation):
    """Counts of one test per (model, test set), viewed per client, equal the test of each client on its own samples."""
    stage = Stage(federation, linear)
    models_KP = torch.stack([stage.model(k) for k in range(3)])
    ids, row_M, address = np.arange(6), np.array([0, 1, 2, 2, 1, 0]), Address(0, 1, -1)
    assert federation.num_clients == 6
    own = stage.backend.run(work.EvaluateClients(address, ids, (models_KP,), start=Rows(0, row_M))).arrays["scores"]
    shared = stage.backend.run(
        work.EvaluateShared(address, federation.test_set_of(ids), (models_KP,), start=Rows(0, row_M))
    ).arrays
    labels_MC = federation.labels_of(ids)
    for client in ids:
        labels_C = None if labels_MC is None else labels_MC[client]
        assert np.allclose(
            own[client], scores(shared["confusion"][client], shared["loss"][client], labels_C), rtol=1e-5
        )
    assert len(np.unique(own[:, 0])) > 2, "all clients have the same score"


def test_own_test_uses_the_client_state_and_at_most_so_many_samples():
    stage = Stage(planted(2), linear)
    stage.backend.restore([(("mine", 1), stage.model(7))])
    tests = work.EvaluateClients(
        Address(0, 1, -1),
        np.arange(2),
        (stage.model(3)[None],),
        start=Rows(0, np.zeros(2, int)),
        client_state=work.ClientState("mine"),
        max_test_samples=100,
    )
    found = stage.backend.run(tests).arrays["scores"]
    for client, model in ((0, 3), (1, 7)):
        stage.network.load(stage.model(model))
        x, y = stage.federation.test(client, 100)
        assert len(y) == 100 and found[client, 0] == pytest.approx(
            (stage.network.logits(x).cpu().argmax(1) == y).float().mean().item()
        )


def test_tuned_clients_train_first_and_keep_nothing():
    stage = Stage(planted(2), linear)
    start = Rows(0, np.zeros(2, int))
    plain, tuned = (
        stage.backend.run(
            work.EvaluateClients(
                Address(0, 1, -1), np.arange(2), (stage.model()[None],), start=start, tune=tune, steps_M=steps
            )
        ).arrays["scores"]
        for tune, steps in ((None, None), (stage.local, np.array([20, 20])))
    )
    assert (tuned[:, 0] > plain[:, 0] + 0.2).all() and stage.client_states == {}
