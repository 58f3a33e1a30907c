"""Counts of a forward pass."""

import torch
from torch import nn

from cfl_ray.nn.counts import counts_of
from cfl_ray.nn.network import Network


class Scaled(nn.Module):
    """Six functions: a linear layer, two in place, a product, a norm and a quotient; reshapes are free."""

    def __init__(self):
        super().__init__()
        self.fc, self.scale = nn.Linear(12, 5), nn.Parameter(torch.ones(5))

    def forward(self, x):
        h = torch.relu_(self.fc(x.flatten(1)).view(x.shape[0], -1)) * self.scale
        return h.clamp_(max=1) / h.norm(dim=1, keepdim=True)


def test_functions_and_numbers_of_a_sample():
    """The sample, 12; the layer, its activation, product, bound and quotient, 5 each, and a norm."""
    assert counts_of(Network(Scaled, (3, 4))) == (6, 12 + 5 * 5 + 1, 0)


def test_multiplications_of_convolutions():
    """Outputs 4 x 3 x 6 of kernels with 2 x 3 x 2 values; in groups, 4 x 4 x 6 with 1 x 2 x 3."""
    layers = nn.Conv2d(2, 4, (3, 2)), nn.Conv2d(4, 4, (2, 3), padding=(1, 1), groups=4)
    network = Network(lambda: nn.Sequential(*layers, nn.Flatten(), nn.Linear(96, 3)), (2, 5, 7))
    assert counts_of(network).convolved == 4 * 3 * 6 * 2 * 3 * 2 + 4 * 4 * 6 * 2 * 3


def test_statistics_and_generators_stay_as_they_were():
    network = Network(lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)), (6,))
    before, state = network.row().clone(), torch.get_rng_state()
    counts = counts_of(network)
    assert torch.equal(network.row(), before) and torch.equal(torch.get_rng_state(), state)
    assert counts.activations == 6 + 4 + 4 + 3 and counts_of(network) == counts
