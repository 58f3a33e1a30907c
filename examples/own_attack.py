"""An attack: free riders, which upload the model that they received, with a little noise."""

import torch


def free_rider(upload_P, start_P, draw, sigma=0.01):
    """The received model and Gaussian noise, instead of a trained model."""
    noise = draw.standard_normal(len(start_P))
    return start_P + sigma * torch.from_numpy(noise)
