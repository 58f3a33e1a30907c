"""Convolutional networks of the papers. Their docstrings give the parameter counts that identify them."""

from torch import nn

from cfl_ray.models.image_shape import image_shape


def _two_convolutions(
    network: str, input_shape: tuple[int, ...], first: int, second: int, batch_norm: bool = False
) -> tuple[list[nn.Module], int]:
    """Two 5x5 convolutions without padding, each with ReLU and pooling, and flattening; the size of the output."""
    channels, height, width = image_shape(network, input_shape, least=16)
    layers = [
        nn.Conv2d(channels, first, 5),
        *([nn.BatchNorm2d(first)] if batch_norm else []),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, 5),
        *([nn.BatchNorm2d(second)] if batch_norm else []),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    ]
    sides = [((edge - 4) // 2 - 4) // 2 for edge in (height, width)]
    return layers, second * sides[0] * sides[1]


def lenet5(input_shape: tuple[int, ...], num_classes: int, projection: int = 0, batch_norm: bool = False) -> nn.Module:
    """LeNet-5 without padding: 62,006 parameters on 3x32x32 and 44,426 on 1x28x28 (FedClust, PACFL).

    projection: outputs of a projection head before the last layer (MOON: 256); 0: none.
    batch_norm: BatchNorm after each convolution (FL-bench).
    """
    convolutions, size = _two_convolutions("lenet5", input_shape, 6, 16, batch_norm)
    head = [nn.Linear(84, 84), nn.ReLU(), nn.Linear(84, projection)] if projection else []
    return nn.Sequential(
        *convolutions,
        nn.Linear(size, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        *head,
        nn.Linear(projection or 84, num_classes),
    )


def femnist_cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """The CNN of StoCFL's FEMNIST experiment, with Xavier initialisation.

    1,206,590 parameters on 1x28x28 with 62 classes.
    """
    channels, height, width = image_shape("femnist_cnn", input_shape, least=6)
    network = nn.Sequential(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, num_classes),
    )
    for layer in network:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            assert layer.bias is not None
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return network


def leaf_cnn(input_shape: tuple[int, ...], num_classes: int, hidden: int = 512) -> nn.Module:
    """Two 5x5 convolutions (32 and 64 channels) with pooling and one hidden layer: CAM's CNN.

    582,026 parameters on 1x28x28 and 878,538 on 3x32x32, with 10 classes.
    """
    convolutions, size = _two_convolutions("leaf_cnn", input_shape, 32, 64)
    return nn.Sequential(*convolutions, nn.Linear(size, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))


def autocfl_cnn(input_shape: tuple[int, ...], num_classes: int, channels: tuple[int, int] = (20, 50)) -> nn.Module:
    """Two 5x5 convolutions with pooling and one linear layer: AutoCFL's CNN.

    channels: (20, 50) gives 33,580 parameters on MNIST, (16, 32) gives 18,378 on Fashion-MNIST and (6, 16) gives 6,882
        on CIFAR-10.
    """
    convolutions, size = _two_convolutions("autocfl_cnn", input_shape, *channels)
    return nn.Sequential(*convolutions, nn.Linear(size, num_classes))


def digits_cnn(input_shape: tuple[int, ...], num_classes: int, channels: int = 16) -> nn.Module:
    """A small CNN for 8x8 images: one 3x3 convolution with `channels` channels, pooling, one linear layer."""
    depth, height, width = image_shape("digits_cnn", input_shape, least=2)
    return nn.Sequential(
        nn.Conv2d(depth, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(channels * (height // 2) * (width // 2), num_classes),
    )
