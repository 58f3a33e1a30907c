"""The shape of images that convolutional networks take."""

from cfl_ray.errors import ConfigError


def image_shape(network: str, input_shape: tuple[int, ...], least: int) -> tuple[int, int, int]:
    """Channels, height and width of a sample. Raises ConfigError if it is no image, or has a side below `least`."""
    if len(input_shape) == 3 and min(input_shape[1:]) >= least:
        channels, height, width = input_shape
        return channels, height, width
    if len(input_shape) == 2:
        remedy = "give them an axis of one channel, x[:, None]"
    elif len(input_shape) == 3 and input_shape[2] <= 4 < least <= min(input_shape[:2]):
        remedy = "their channels seem to be last; put them first, x.transpose(0, 3, 1, 2)"
    elif len(input_shape) == 3:
        remedy = "model mlp takes smaller ones, or enlarge them"
    else:
        remedy = "model mlp takes numbers of any shape"
    raise ConfigError(
        f"model {network} takes images (channels, height, width) with sides of at least {least}, got samples of shape "
        f"{tuple(input_shape)}; {remedy}"
    )
