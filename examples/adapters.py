"""A frozen Transformer with trained low-rank adapters: clients send, average and keep the adapters alone."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


def sentences(clients: int = 8, samples: int = 60, length: int = 6, words: int = 20) -> dict:
    """Sentences of word numbers. The label says whether the first half of the words prevails; odd clients negate it."""
    draw = np.random.default_rng(0)
    x = draw.integers(0, words, (clients * samples, length))
    client = np.repeat(np.arange(clients), samples)
    y = ((x < words // 2).sum(1) > length // 2) ^ (client % 2 == 1)
    return {"x": x, "y": y.astype(int), "clients": client, "groups": client % 2, "vocabulary": words}


class LowRank(nn.Module):
    """A linear layer, and the product of two small matrices beside it (LoRA, arXiv:2106.09685)."""

    def __init__(self, layer: nn.Linear, rank: int):
        super().__init__()
        self.layer = layer
        self.lora_a = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)


class Block(nn.Module):
    """Attention, and two linear layers with adapters."""

    def __init__(self, width: int, heads: int, rank: int):
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, heads, batch_first=True)
        self.up, self.down = LowRank(nn.Linear(width, 4 * width), rank), LowRank(nn.Linear(4 * width, width), rank)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.between(x))))


class AdaptedTransformer(nn.Module):
    """Blocks over embedded tokens (B, length), the mean over the tokens, and a head. Adapters and head are trained.

    Its random weights stand for pretrained ones, which `model.weights` would load.
    """

    def __init__(
        self, num_classes: int, words: int = 20, width: int = 32, depth: int = 2, heads: int = 4, rank: int = 4
    ):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width, heads, rank) for _ in range(depth)))
        self.head = nn.Linear(width, num_classes)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("lora_" in name or name.startswith("head."))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(x)).mean(1))
