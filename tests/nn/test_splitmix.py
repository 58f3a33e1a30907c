"""Random words by key."""

import numpy as np
import torch
from scipy import stats
from torch import nn

from cfl_ray.nn.layers import AddressedDropout
from cfl_ray.nn.network import Network
from cfl_ray.nn.splitmix import keys_on, split, words

CPU = torch.device("cpu")


def test_words_are_those_of_splitmix64():
    """The first five of the key 1234567, as in the public test vectors of the generator."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert words([1234567], 5).numpy().view(np.uint64)[0].tolist() == expected
    assert split([1234567], 3) == [expected[3]]


def test_a_tensor_of_keys_has_the_words_of_numbers():
    keys = [0, 1, 2**63 + 5, 2**64 - 1]
    tensor = keys_on(torch.device("meta"), keys)
    assert tensor.is_meta and keys_on(CPU, keys) is keys
    tensor = torch.tensor([key - 2**64 if key >> 63 else key for key in keys])
    assert torch.equal(words(tensor, 20_000), words(keys, 20_000))
    for number in (0, 7, 10**6):
        found = split(tensor, number)
        assert found.numpy().view(np.uint64).tolist() == split(keys, number)
        assert torch.equal(split(tensor, torch.tensor([number])), found)


def test_masks_keep_a_share_of_the_activations():
    """Shares of many masks follow the binomial distribution; masks of other keys and batches are independent."""
    layer = AddressedDropout(0.25)
    layer.sample_shape = (100,)
    keys = split(keys_on(CPU, [3]), 0)
    masks = torch.cat([layer.draw(split(keys, number), 10) for number in range(400)]).flatten(1)
    assert set(masks.unique().tolist()) == {0.0, np.float32(1 / 0.75)}
    kept = (masks > 0).sum(1).numpy()
    assert stats.kstest(stats.binom.cdf(kept, 1000, 0.75), "uniform").pvalue > 1e-3
    assert abs(np.corrcoef((masks > 0).numpy())[np.triu_indices(400, 1)]).max() < 0.17


def test_a_smaller_batch_has_the_first_rows_of_a_larger_one():
    network = Network(
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Dropout2d(0.5), nn.Flatten(), nn.Dropout(0.3)), (1, 5, 5)
    )
    keys = keys_on(network.device, [5, 6])
    large, small = network.masks(keys, 2, 7), network.masks(keys, 2, 3)
    assert [mask.shape for mask in large] == [(2, 7, 4, 1, 1), (2, 7, 36)]
    for mask, first in zip(large, small):
        assert torch.equal(mask[:, :3], first) and not torch.equal(mask[0], mask[1])
    assert not torch.equal(network.masks(keys, 3, 7)[1], large[1])


def test_dropout_of_everything_keeps_nothing():
    layer = AddressedDropout(1.0)
    layer.sample_shape = (4,)
    assert torch.equal(layer.draw(keys_on(CPU, [1]), 2), torch.zeros(1, 2, 4))
