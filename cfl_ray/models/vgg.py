"""VGG16 for small images. FedClust compares clients by its layers."""

from torch import nn

from cfl_ray.models.image_shape import image_shape

# output channels of the convolutions in each block; a pooling layer follows each block
_CHANNELS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16(input_shape: tuple[int, ...], num_classes: int, hidden: int = 512) -> nn.Module:
    """Thirteen 3x3 convolutions (configuration D of arXiv:1409.1556) and three linear layers, for sides of at least 32.

    Initialised as in torchvision. hidden: width of the first two linear layers; in ImageNet's VGG16 it is 4,096, and
    the input of the first is a map of 7x7. 15,245,130 parameters on 3x32x32 images with 10 classes.
    """
    inputs, height, width = image_shape("vgg16", input_shape, least=32)
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
