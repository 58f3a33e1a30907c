import numpy as np
import pytest
import torch
from closeness import close

from cfl_ray.core.sketch import sketch

L, F = 20_000, 512


def vectors(count: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal((count, L)).astype(np.float32))


def test_a_short_vector_is_returned_as_it_is():
    vector = torch.arange(16.0)
    assert sketch(vector, 16, 0) is vector


def test_every_coordinate_is_added_to_one_feature_with_a_sign():
    draw, signs = np.random.default_rng(1), []
    for at in draw.integers(0, L, 50):
        unit = torch.zeros(L)
        unit[at] = 3.0
        features = sketch(unit, F, 0)
        assert features.shape == (F,) and features.abs().max() == 3 and (features != 0).sum() == 1
        signs.append(features.sum().item() / 3)
    assert 10 < signs.count(1) < 40 and signs.count(1) + signs.count(-1) == 50


def test_is_linear():
    a, b = vectors(2)
    assert close(sketch(2 * a - 3 * b, F, 0), 2 * sketch(a, F, 0) - 3 * sketch(b, F, 0), 1e-4)


def test_depends_on_the_seed_alone():
    vector = vectors(1)[0]
    assert torch.equal(sketch(vector, F, 4), sketch(vector, F, 4))
    assert not torch.equal(sketch(vector, F, 4), sketch(vector, F, 5))


@pytest.mark.parametrize("cosine", [-0.5, 0.0, 0.5, 1.0])
def test_inner_products_are_kept_with_the_standard_error_promised(cosine):
    """Over 200 seeds, unbiased to 5 standard errors, with a standard deviation of at most sqrt(2 / F) up to 20 %."""
    a, b = torch.linalg.qr(vectors(2).T).Q.T
    b = cosine * a + np.sqrt(1 - cosine**2) * b
    found = np.array([(sketch(a, F, seed) @ sketch(b, F, seed)).item() for seed in range(200)])
    bound = np.sqrt(2 / F)
    assert abs(found.mean() - cosine) < 5 * bound / np.sqrt(200)
    assert bound / 4 < found.std() < 1.2 * bound
