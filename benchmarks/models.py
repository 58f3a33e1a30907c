"""The networks of the workloads as users write them: modules with a `forward` that calls functions."""

from collections.abc import Callable

import torch
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


class DropoutMLP(nn.Module):
    """784-400-200 with two dropouts, as layers or as functions."""

    def __init__(self, classes: int, functional: bool = False) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(784, 400), nn.Linear(400, 200), nn.Linear(200, classes)
        self.drop1, self.drop2 = nn.Dropout(0.5), nn.Dropout(0.5)
        self.functional = functional

    def forward(self, x_B: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, 1, 28, 28)."""
        x_B = F.relu(self.fc1(x_B.flatten(1)))
        x_B = F.dropout(x_B, training=self.training) if self.functional else self.drop1(x_B)
        x_B = F.relu(self.fc2(x_B))
        x_B = F.dropout(x_B, training=self.training) if self.functional else self.drop2(x_B)
        return self.fc3(x_B)


class ResNet8(nn.Module):
    """Three residual blocks of 16, 32 and 64 channels, with GroupNorm."""

    def __init__(self, classes: int, channels: int = 1) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.GroupNorm(8, 16), nn.ReLU())
        self.blocks = nn.Sequential(_Block(16, 16, 1), _Block(16, 32, 2), _Block(32, 64, 2))
        self.fc = nn.Linear(64, classes)

    def forward(self, x_B: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, channels, H, W)."""
        return self.fc(self.blocks(self.first(x_B)).mean((2, 3)))


class _Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, out), nn.GroupNorm(8, out)
        self.shortcut: nn.Module = nn.Identity()
        if channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.GroupNorm(8, out))

    def forward(self, x_B: Tensor) -> Tensor:
        inner_B = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x_B)))))
        return F.relu(inner_B + self.shortcut(x_B))


class LSTM(nn.Module):
    """An LSTM of 64 units that reads the rows of an image."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(28, 64, batch_first=True), nn.Linear(64, classes)

    def forward(self, x_B: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, 1, 28, 28)."""
        return self.fc(self.lstm(x_B.squeeze(1))[0][:, -1])


class Transformer(nn.Module):
    """Two encoder layers of 64 features on the rows of an image."""

    def __init__(self, classes: int, dropout: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=dropout, batch_first=True)
        self.embed, self.encoder = nn.Linear(28, 64), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.fc = nn.Linear(64, classes)

    def forward(self, x_B: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, 1, 28, 28)."""
        return self.fc(self.encoder(self.embed(x_B.squeeze(1))).mean(1))


class ViT(nn.Module):
    """Three encoder layers of 64 features on patches of 4 x 4."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, activation="gelu", batch_first=True)
        self.patches = nn.Conv2d(3, 64, 4, 4)
        self.positions = nn.Parameter(torch.zeros(64, 64))
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.fc = nn.Linear(64, classes)

    def forward(self, x_B: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, 3, 32, 32)."""
        patches_BTF = self.patches(x_B).flatten(2).mT + self.positions
        return self.fc(self.encoder(patches_BTF).mean(1))


class GPT(nn.Module):
    """Two causal encoder layers of 64 features on tokens, which predict the next token."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            64, 4, 256, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.embed, self.positions = nn.Embedding(classes, 64), nn.Parameter(torch.zeros(64, 64))
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.fc = nn.LayerNorm(64), nn.Linear(64, classes, bias=False)
        self.causal = nn.Transformer.generate_square_subsequent_mask(64)

    def forward(self, x_BT: Tensor) -> Tensor:
        """Logits (B, T, classes) of the tokens after tokens (B, T), T at most 64."""
        length = x_BT.shape[1]
        inner_BTF = self.embed(x_BT) + self.positions[:length]
        return self.fc(self.norm(self.encoder(inner_BTF, mask=self.causal[:length, :length])))


class Mixer(nn.Module):
    """Three mixer blocks of 64 features on patches of 4 x 4."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 4, 4)
        self.tokens = nn.ModuleList(nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 64)) for _ in range(3))
        self.features = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(6))
        self.fc = nn.Linear(64, classes)

    def forward(self, x_B: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, 3, 32, 32)."""
        inner_BTF = self.patches(x_B).flatten(2).mT
        for block in range(3):
            inner_BTF = inner_BTF + self.tokens[block](self.norms[2 * block](inner_BTF).mT).mT
            inner_BTF = inner_BTF + self.features[block](self.norms[2 * block + 1](inner_BTF))
        return self.fc(inner_BTF.mean(1))


class LowRank(nn.Module):
    """A frozen layer with a trained change of rank 8."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.body = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 8, bias=False), nn.Linear(8, outputs, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.up(self.down(x))


class LoRAEncoder(nn.Module):
    """Encoder layers of 768 features on tokens, as those of DistilBERT: frozen, with changes of rank 8."""

    def __init__(self, classes: int, layers: int = 6, features: int = 768) -> None:
        super().__init__()
        self.heads = features // 64
        self.embed = nn.Embedding(1000, features).requires_grad_(False)
        self.attention = nn.ModuleList(LowRank(features, 3 * features) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(features, features).requires_grad_(False) for _ in range(layers))
        self.wide = nn.ModuleList(LowRank(features, 4 * features) for _ in range(layers))
        self.narrow = nn.ModuleList(nn.Linear(4 * features, features).requires_grad_(False) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(features).requires_grad_(False) for _ in range(2 * layers))
        self.fc = nn.Linear(features, classes)

    def forward(self, x_BT: Tensor) -> Tensor:
        """Logits (B, classes) of tokens (B, T)."""
        inner_BTF = self.embed(x_BT)
        for layer, (attention, out, wide, narrow) in enumerate(
            zip(self.attention, self.out, self.wide, self.narrow, strict=True)
        ):
            parts = (part.unflatten(-1, (self.heads, 64)).transpose(1, 2) for part in attention(inner_BTF).chunk(3, -1))
            mixed_BTF = F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
            inner_BTF = self.norms[2 * layer](inner_BTF + out(mixed_BTF))
            inner_BTF = self.norms[2 * layer + 1](inner_BTF + narrow(F.gelu(wide(inner_BTF))))
        return self.fc(inner_BTF[:, 0])


MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": MLP,
    "lenet5": LeNet5,
    "leaf_cnn": LeafCNN,
    "small_cnn": SmallCNN,
    "dropout_mlp": DropoutMLP,
    "resnet8": ResNet8,
    "lstm": LSTM,
    "transformer": Transformer,
    "vit": ViT,
    "gpt": GPT,
    "mixer": Mixer,
}
