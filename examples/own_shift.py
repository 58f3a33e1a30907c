"""A shift: the images of the second group are negatives."""


def invert(x, y, group, draw, top=16):
    """Values 0..top become top..0 in group 1, and stay in group 0."""
    return (top - x if group == 1 else x), y
