"""Gradients of DP-SGD: gradients of single samples are clipped, and noise is added to their sum.

    g = (sum over samples j of the batch of clip(grad loss_j, C) + N(0, (z C)^2)) / B

B is the expected number of samples, a constant. M. Abadi et al., Deep Learning with Differential Privacy, CCS 2016,
arXiv:1607.00133, Algorithm 1; batches are the Poisson samples of `LocalSGD.batches`. A sample whose gradient is not
finite counts as zeros.
"""

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from cfl_ray.core.rng import secret_stream
from cfl_ray.engine.local_steps import LocalGradient
from cfl_ray.engine.task import TrainingTask
from cfl_ray.nn.network import Network

_FLOATS = 1 << 26  # of gradients of single samples that are in memory at a time


class ExampleGradient(LocalGradient):
    """Noisy gradients at the loaded row, tensor by tensor; the gradients of single samples by one `vmap`."""

    def __init__(self, network: Network, task: TrainingTask, frozen_BC: Tensor | None):
        super().__init__(network, task)
        assert task.local.examples is not None
        self.settings, address = task.local.examples, task.address
        self.draw = secret_stream(self.settings.secret, address.round, address.exchange, task.client, "examples")
        self.frozen_BC, self.x, self.y = frozen_BC, network.input(task.x), task.y.to(network.device)
        self.expected = float(task.local.batch_of(task.size))
        self.names = list(network.spec.tensors(network.row()))[: network.spec.num_params]
        self.at_once = max(_FLOATS // max(network.spec.trained, 1), 1)
        in_dims = (None, 0, 0, 0, None if frozen_BC is None else 0)
        self.of_samples = vmap(grad_and_value(self._loss), in_dims=in_dims)

    def of_batch(self, batch: int) -> list[Tensor]:
        index = self.batches[batch]
        index_B = torch.arange(len(self.y), device=self.y.device) if index is None else torch.as_tensor(index)
        total, losses = [torch.zeros_like(part) for part in self.network.params], [torch.zeros(0)]
        masks = self.masks(batch, len(index_B))
        for first in range(0, len(index_B), self.at_once):
            part = slice(first, first + self.at_once)
            grads, loss_b = self._clipped(index_B[part], [mask[part] for mask in masks])
            losses.append(loss_b.detach().cpu())
            for tensor, grad_bX in zip(total, grads, strict=True):
                tensor += grad_bX.sum(0)
        if self.settings.secret:
            scale = self.settings.noise_multiplier * self.settings.clip
            for tensor in total:
                noise = torch.from_numpy(self.draw.standard_normal(tuple(tensor.shape))).mul_(scale)
                tensor += noise.to(tensor)
        loss_B = torch.cat(losses)
        # a batch without samples has the loss of the previous step
        self.losses.append(loss_B.mean() if len(loss_B) else (self.losses or [torch.zeros(())])[-1])
        return [tensor.div_(self.expected) for tensor in total]

    def _clipped(self, index_b: Tensor, masks: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Clipped gradients of single samples, each (b, ...), and their losses (b,)."""
        params = dict(zip(self.names, (part.detach() for part in self.network.params), strict=True))
        of_layers = {f"{name}.mask": mask[:, None] for name, mask in zip(self.network.dropouts, masks, strict=True)}
        frozen_bC = None if self.frozen_BC is None else self.frozen_BC[index_b]
        grad_of, loss_b = self.of_samples(params, of_layers, self.x[index_b], self.y[index_b], frozen_bC)
        grads = [grad_of[name] for name in self.names]
        squares = [grad_bX.reshape(len(grad_bX), -1).double().square().sum(1) for grad_bX in grads]
        norm_b = torch.stack(squares).sum(0).sqrt()
        factor_b = (self.settings.clip / norm_b.clamp(min=1e-300)).clamp(max=1.0)
        factor_b = torch.where(factor_b < 1, factor_b * (1 - 1e-6), factor_b)  # so that rounding cannot exceed the norm
        for grad_bX in grads:
            shape = (-1, *[1] * (grad_bX.ndim - 1))
            grad_bX.mul_(factor_b.to(grad_bX).view(shape))
            grad_bX.masked_fill_(~torch.isfinite(norm_b).view(shape), 0.0)
        return grads, loss_b

    def _loss(
        self,
        params: dict[str, Tensor],
        masks: dict[str, Tensor],
        x: Tensor,
        y: Tensor,
        frozen_C: Tensor | None,
    ) -> Tensor:
        with self.network.without_cudnn():
            logits_1C = self.network.trained_outputs(x[None], params | masks)
        logits_1C = logits_1C if frozen_C is None else logits_1C + frozen_C
        return self.network.task.loss(logits_1C, y[None]).sum()
