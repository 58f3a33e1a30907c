"""A partition: few clients have many samples, and many have few."""

import numpy as np


def power_law(labels, clients, draw, exponent=1.0, least=5):
    """Client i has a share of the samples proportional to 1 / (i + 1)^exponent, and at least `least` samples."""
    share = 1 / np.arange(1, clients + 1) ** exponent
    spare = len(labels) - least * clients
    sizes = least + np.floor(share / share.sum() * spare).astype(int)
    return np.split(draw.permutation(len(labels))[: sizes.sum()], np.cumsum(sizes)[:-1])
