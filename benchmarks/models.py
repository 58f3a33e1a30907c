"""The networks of the workloads as users write them: modules with a `forward` that calls functions."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """784-hidden-10."""

    def __init__(self, classes: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(28 * 28, hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x_B: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, 1, 28, 28)."""
        return self.fc2(F.relu(self.fc1(x_B.view(x_B.size(0), -1))))


class LeNet5(nn.Module):
    """LeNet-5 without padding."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 4 * 4, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x_B: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, 1, 28, 28)."""
        x_B = F.max_pool2d(F.relu(self.conv1(x_B)), 2)
        x_B = F.max_pool2d(F.relu(self.conv2(x_B)), 2)
        x_B = x_B.view(-1, 16 * 4 * 4)
        x_B = F.relu(self.fc2(F.relu(self.fc1(x_B))))
        return self.fc3(x_B)


class LeafCNN(nn.Module):
    """Two 5x5 convolutions of 32 and 64 channels with pooling, and 512 hidden units."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 5)
        self.conv2 = nn.Conv2d(32, 64, 5)
        self.fc1 = nn.Linear(64 * 4 * 4, 512)
        self.fc2 = nn.Linear(512, classes)

    def forward(self, x_B: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, 1, 28, 28)."""
        x_B = F.max_pool2d(F.relu(self.conv1(x_B)), 2)
        x_B = F.max_pool2d(F.relu(self.conv2(x_B)), 2)
        return self.fc2(F.relu(self.fc1(x_B.flatten(1))))


class SmallCNN(nn.Module):
    """Two 3x3 convolutions of 32 and 64 channels, one pooling, and 128 hidden units; with dropout if wanted."""

    def __init__(self, classes: int, channels: int, side: int, dropout: bool = False) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.fc1 = nn.Linear(64 * ((side - 4) // 2) ** 2, 128)
        self.fc2 = nn.Linear(128, classes)
        self.drop1, self.drop2 = (nn.Dropout(p if dropout else 0.0) for p in (0.25, 0.5))

    def forward(self, x_B: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, channels, side, side)."""
        x_B = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x_B)))), 2)
        x_B = F.relu(self.fc1(self.drop1(x_B).flatten(1)))
        return self.fc2(self.drop2(x_B))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": MLP,
    "lenet5": LeNet5,
    "leaf_cnn": LeafCNN,
    "small_cnn": SmallCNN,
}
