"""Token ids as inputs: sentences whose clients disagree about what a word means, and a small Transformer."""

import numpy as np
import torch
from torch import Tensor, nn


def sentences(clients: int = 8, samples: int = 60, length: int = 6, words: int = 20) -> dict:
    """Sentences of word numbers. The label says whether the first half of the words prevails; odd clients negate it."""
    draw = np.random.default_rng(0)
    x = draw.integers(0, words, (clients * samples, length))
    client = np.repeat(np.arange(clients), samples)
    y = ((x < words // 2).sum(1) > length // 2) ^ (client % 2 == 1)
    return {"x": x, "y": y.astype(int), "clients": client, "groups": client % 2, "vocabulary": words}


class Transformer(nn.Module):
    """One encoder layer over embedded tokens (B, length), the mean over the tokens, and a linear layer."""

    def __init__(self, input_shape: tuple[int, ...], num_classes: int, words: int = 20, width: int = 16):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.place = nn.Parameter(torch.zeros(input_shape[0], width))
        self.encode = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(self.embed(x) + self.place).mean(1))
