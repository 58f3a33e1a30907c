"""VGG16 for small images, whose layers FedClust compares."""

from torch import nn

_CHANNELS = (
    (64, 64),
    (128, 128),
    (256, 256, 256),
    (512, 512, 512),
    (512, 512, 512),
)  # of the blocks before each pooling


def vgg16(input_shape: tuple[int, ...], num_classes: int, hidden: int = 512) -> nn.Module:
    """Thirteen 3x3 convolutions (configuration D of arXiv:1409.1556) and three linear layers; sides of at least 32.

    Initialised as torchvision does. hidden: width of the first two linear layers; ImageNet's VGG16 has 4,096 there,
    after a map of 7x7. 15,245,130 parameters on 3x32x32 images with 10 classes.
    """
    inputs, height, width = input_shape
    layers: list[nn.Module] = []
    for block in _CHANNELS:
        for outputs in block:
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    network = nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Linear(inputs * (height // 32) * (width // 32), hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, num_classes),
    )
    for layer in network:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, 0, 0.01)
        if isinstance(layer, (nn.Conv2d, nn.Linear)) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return network
