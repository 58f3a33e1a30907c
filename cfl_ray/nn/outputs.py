"""Outputs of networks in evaluation mode, by the written-out passes where these are faster."""

from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from cfl_ray.nn.network import Network
from cfl_ray.nn.operations import Differentiated, PatchConvolution
from cfl_ray.nn.passes import Passes, are_passes_in_evaluation, passes_of, why_no_passes

_BATCH = 64  # activations of few channels stay in the cache


def outputs_of_row(network: Network, row_P: Tensor, x: Tensor) -> Tensor:
    """Outputs (n, *output_shape) of a row in evaluation mode. The row stays loaded."""
    network.load(row_P)
    return outputs_of(network, x)


def outputs_of(network: Network, x: Tensor) -> Tensor:
    """Outputs (n, *output_shape) of the loaded row in evaluation mode.

    Those of convolutions with few channels by written-out passes, in half the time of PyTorch on a CPU.
    """
    if network not in _PASSES:
        _PASSES[network] = _fast_passes(network)
    passes = _PASSES[network]
    if passes is None or x.dtype != torch.float32 or not len(x):
        return network.logits(x)
    passes.row_P.copy_(network.flat)
    with np.errstate(all="ignore"):
        return torch.cat([passes.outputs(part) for part in x.split(_BATCH)])


def _fast_passes(network: Network) -> Passes | None:
    """Passes of their own, whose arrays no training uses, if they are faster than those of PyTorch; else None."""
    if network.device.type != "cpu" or network.precision != "float32" or why_no_passes(network):
        return None
    kinds = {type(step.operation) for step in passes_of(network).steps}
    if PatchConvolution not in kinds or Differentiated in kinds or not are_passes_in_evaluation(network):
        return None
    return Passes(network)


_PASSES: WeakKeyDictionary[Network, Passes | None] = WeakKeyDictionary()
