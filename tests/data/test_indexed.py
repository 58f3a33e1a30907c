import numpy as np
import pytest
import torch

from cfl_ray.data.indexed import Scaling
from cfl_ray.errors import DataError

MEAN, STD = [0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010]


def test_scaling_is_torchvisions_bit_for_bit():
    from torchvision.transforms import functional  # here, because it takes two seconds

    x = np.random.default_rng(0).integers(0, 256, (7, 3, 5, 5), dtype=np.uint8)
    expected = torch.stack([functional.normalize(functional.to_tensor(one.transpose(1, 2, 0)), MEAN, STD) for one in x])
    assert torch.equal(Scaling(255, [MEAN, STD]).to_tensor(x), expected)


def test_scaling_copies_even_what_needs_no_change():
    x = np.ones((2, 3), np.float32)
    Scaling(1.0, None).to_tensor(x).zero_()
    assert x.all()


@pytest.mark.parametrize("normalize", [[[0.5, 0.5], [0.5, 0.5]], [[0.5]], [[0.5], [0.0]], [[], []]])
def test_normalize_must_fit_the_channels(normalize):
    with pytest.raises(DataError, match="with 3 values each"):
        Scaling(255, normalize).check((3, 8, 8))


@pytest.mark.filterwarnings("error")
def test_values_beyond_float32_are_infinite_without_a_warning():
    x = np.array([[1e300, -1e300, np.nan, 1.0]])
    values = Scaling(1.0, None).to_tensor(x)[0]
    assert values.isinf().tolist() == [True, True, False, False] and values[2].isnan() and values[3] == 1
