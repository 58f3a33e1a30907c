"""The head of a model, the columns that are sent, and the layer that is called last."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from training_tasks import logits_of

from cfl_ray.core.classifier import Classifier
from cfl_ray.nn.network import Network


class Body(nn.Sequential):
    def __init__(self, affine: bool = True):
        super().__init__(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, affine=affine), nn.ReLU(), nn.Flatten())


class Classified(nn.Module):
    """A body with a head. kept: the body stays in evaluation mode. first: the head is registered first."""

    def __init__(self, frozen: bool = False, kept: bool = False, first: bool = False, head: nn.Module | None = None):
        super().__init__()
        head = nn.Linear(16, 3) if head is None else head
        if first:
            self.head = head
        self.body = Body().requires_grad_(not frozen)
        if not first:
            self.head = head
        self.kept = kept

    def train(self, mode: bool = True) -> "Classified":
        super().train(mode)
        if self.kept:
            self.body.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def network_of(**options) -> Network:
    return Network(lambda: Classified(**options), (1, 4, 4))


HEAD, STATISTICS = 16 * 3 + 3, 8


@pytest.mark.parametrize("kept", [False, True])
def test_the_head_of_a_frozen_body_has_none_of_its_statistics(kept):
    spec = network_of(frozen=True, kept=kept).spec
    assert spec.head.ranges == ((0, HEAD),) and spec.size == HEAD + STATISTICS
    assert spec.base.ranges == ((HEAD, HEAD + STATISTICS),)
    assert spec.top(5) == spec.head


def test_statistics_that_training_does_not_change_are_not_sent():
    kept, trained = network_of(frozen=True, kept=True).spec, network_of(frozen=True).spec
    assert kept.sent() == HEAD and kept.sent(kept.base) == 0
    assert trained.sent() == HEAD + STATISTICS and trained.sent(trained.base) == STATISTICS
    assert kept == trained, "the rows are the same"


@pytest.mark.parametrize(
    ("head", "count", "columns"),
    [
        (nn.Sequential(nn.Linear(16, 5), nn.Linear(5, 3)), 1, 5 * 3 + 3),
        (nn.Sequential(nn.Linear(16, 5), nn.Linear(5, 3)), 2, 16 * 5 + 5 + 5 * 3 + 3),
        (nn.Linear(16, 3, bias=False), 1, 48),
        (nn.Sequential(nn.Linear(16, 3), nn.BatchNorm1d(3)), 1, 6 + 6),  # with its own statistics
        (parametrizations.weight_norm(nn.Linear(16, 3)), 1, 3 + 3 + 16 * 3),  # bias, lengths, directions
        (parametrizations.spectral_norm(nn.Linear(16, 3)), 1, 3 + 16 * 3 + 3 + 16),  # with its two vectors
        (
            nn.Sequential(parametrizations.orthogonal(nn.Linear(16, 5)), nn.Linear(5, 3)),
            2,
            5 + 16 * 5 + 16 * 16 + 5 * 3 + 3,
        ),
    ],
)
def test_heads(head, count, columns):
    assert network_of(head=head).spec.top(count).count == columns


def test_a_parametrised_layer_is_one_layer():
    """Its bias and the parameters from which its weight is computed; its inputs are the features of the model."""
    network = network_of(head=parametrizations.weight_norm(nn.Linear(16, 2)))
    assert network.spec.layers == ("body.0", "body.1", "head") and network.last_layer == "head"
    assert network.spec.linear == network.spec.head
    row_P, x = network.new_model(0, 0), torch.rand(2, 1, 4, 4)
    features, outputs = network.evaluated(row_P, x)
    assert features.shape == (2, 16) and torch.equal(outputs, logits_of(network, row_P, x))
    with pytest.raises(ValueError, match="the last layer 'head' must be linear.* it has no weight of its own"):
        Classifier.of(network.spec)


def test_the_layer_that_is_called_last():
    assert network_of().last_layer == "head"
    swapped = network_of(first=True)
    assert swapped.spec.layers[-1] == "body.1" and swapped.last_layer == "head"


def test_an_output_layer_with_the_weights_of_another_layer():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
            self.output = nn.Linear(4, 5, bias=False)
            self.output.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.output(self.norm(self.embedding(x).mean(1)))

    network = Network(Tied, (3,), dtype=torch.int64)
    assert network.spec.layers == ("embedding", "norm") and network.last_layer == "output"


def test_a_last_layer_whose_call_is_not_seen():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.attention = nn.Linear(4, 4), nn.MultiheadAttention(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)[None]
            return self.attention(x, x, x)[0][0]

    assert Network(Attention, (4,)).last_layer == "attention.out_proj"


class Transposed(nn.Module):
    """A layer whose weight is (F, C), as those of GPT-2 are."""

    def __init__(self, features: int, outputs: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(features, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Normed(nn.Linear):
    """A linear layer of vectors of length 1."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.normalize(x))


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bf,cf->bc", x, self.weight) + self.bias


@pytest.mark.parametrize("head", [Transposed(16, 16), Transposed(16, 3), Normed(16, 3)])
def test_a_matrix_that_is_used_in_another_way_is_no_classifier(head):
    with pytest.raises(ValueError, match="the last layer 'head' must be linear.* its weight .* is a matrix, but"):
        Classifier.of(network_of(head=head).spec)


@pytest.mark.parametrize("head", [nn.Linear(16, 3), OwnLinear(16, 3), nn.Linear(16, 3, bias=False)])
def test_a_linear_head_is_a_classifier(head):
    assert Classifier.of(network_of(head=head).spec).num_features == 16
