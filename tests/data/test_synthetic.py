import pickle
import time

import numpy as np
import pytest
import torch

from cfl_ray.data.changes import ChangingFederation, DataChange
from cfl_ray.data.synthetic import ConceptFederation, SyntheticFederation


def test_a_million_clients_cost_nothing_until_read():
    start = time.perf_counter()
    federation = SyntheticFederation(1_000_000)
    assert federation.num_clients == 1_000_000 and federation.num_samples_N[999_999] == 50
    assert time.perf_counter() - start < 0.1
    assert federation.group_N.dtype == np.int32 and np.bincount(federation.group_N).tolist() == [250_000] * 4
    assert len(pickle.dumps(federation)) < 1000


def test_a_client_is_the_same_in_every_process_and_differs_by_seed():
    federation = SyntheticFederation(1_000_000, seed=1)
    x, y = federation.train(777_777)
    assert (x.shape, x.dtype, y.dtype) == ((50, 1, 28, 28), torch.float32, torch.int64)
    assert all(map(torch.equal, pickle.loads(pickle.dumps(federation)).train(777_777), (x, y)))
    assert not torch.equal(SyntheticFederation(1_000_000, seed=2).train(777_777)[0], x)
    assert not torch.equal(federation.train(777_773)[0], x)


def test_one_test_set_per_group():
    federation = SyntheticFederation(10, groups=3, input=(5,))
    assert federation.test_set_of(np.array([0, 4, 8])).tolist() == [0, 1, 2]
    assert torch.equal(federation.test(4)[0], federation.test_set(1)[0])
    assert len(federation.test(4, max_samples=20)[1]) == 20
    with pytest.raises(IndexError, match="test set 3 of 3"):
        federation.test_set(3)
    with pytest.raises(ValueError, match="one test set per group"):
        federation.holdout(0)


def classify(x_train, y_train, x_test, classes):
    """Nearest class mean."""
    means = torch.stack([x_train[y_train == label].flatten(1).mean(0) for label in range(classes)])
    return torch.cdist(x_test.flatten(1), means).argmin(1)


def test_one_model_fits_a_group_and_none_fits_all_groups():
    federation = SyntheticFederation(80, input=(1, 8, 8), groups=4)
    x_test, y_test = federation.test_set(2)

    def accuracy(clients):
        x, y = (torch.cat(parts) for parts in zip(*(federation.train(client) for client in clients)))
        return (classify(x, y, x_test, 10) == y_test).float().mean()

    assert accuracy(range(2, 80, 4)) > 0.95
    assert accuracy(range(80)) < 0.5


@pytest.mark.parametrize("classes, groups", [(10, 4), (2, 4), (3, 7)])
def test_gradients_at_a_common_point_separate_the_groups(classes, groups):
    federation = SyntheticFederation(24, input=(1, 8, 8), classes=classes, groups=groups)
    signatures = []
    for client in range(24):
        x, y = federation.train(client)
        # Gradient of a linear model whose parameters are zero.
        residual = torch.full((len(y), classes), 1 / classes) - torch.nn.functional.one_hot(y, classes)
        signatures.append((residual.T @ x.flatten(1)).flatten())
    cosine = torch.nn.functional.cosine_similarity(
        torch.stack(signatures)[:, None], torch.stack(signatures)[None], dim=2
    )
    same = torch.from_numpy(federation.group_N[:, None] == federation.group_N)
    same.fill_diagonal_(False)
    other = torch.from_numpy(federation.group_N[:, None] != federation.group_N)
    assert cosine[same].min() > cosine[other].max()


@pytest.mark.parametrize("name, inputs, concepts", [("sine", 2, 2), ("circle", 2, 2), ("sea", 3, 4)])
def test_points_have_the_labels_of_their_clients_concept(name, inputs, concepts):
    federation = ConceptFederation(2 * concepts, name=name, samples=4000)
    again = pickle.loads(pickle.dumps(federation))
    for client in range(concepts):
        x, y = federation.train(client)
        assert x.shape == (4000, inputs) and x.min() >= 0 and x.max() <= 1 and federation.group_N[client] == client
        a, b = x[:, 0].double(), x[:, 1].double()
        expected = {
            "sine": [b <= a.sin(), b > a.sin()],
            "circle": [(a - 0.2) ** 2 + (b - 0.5) ** 2 > 0.15**2, (a - 0.6) ** 2 + (b - 0.5) ** 2 > 0.25**2],
            "sea": [a + b <= 0.8, a + b <= 0.9, a + b <= 0.7, a + b <= 0.95],
        }[name][client]
        agree = (y == expected).float().mean().item()
        assert agree == pytest.approx(0.9 if name == "sea" else 1, abs=0.02 if name == "sea" else 1e-3)
        assert all(map(torch.equal, again.train(client), (x, y)))
        assert torch.equal(federation.test(client)[1], federation.test(client + concepts)[1])


def test_a_swap_of_the_labels_of_sine_is_its_other_concept():
    changed = ChangingFederation(ConceptFederation(4, name="sine"), [DataChange(2, (0,), swap=(0, 1))]).at(2)
    assert changed.group_N.tolist() == [1, 1, 0, 1]
