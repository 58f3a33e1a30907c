"""One network, built once per process, that any row of parameters can be poured into."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from cfl_ray.core.params import Columns, ParamSpec
from cfl_ray.core.rng import torch_stream
from cfl_ray.engine.layers import AddressedDropout, replace_layers

_WIDE = 32  # channels from which oneDNN is faster channels-last (measured: 1.25 times on a CNN with 32 and 64)
_TESTED_AT_ONCE, _TESTED_AT_ONCE_CPU = 1024, 256  # samples: on a CPU, activations of few stay in the cache (twice as fast on a LeNet-5)


def _channels_last(x: Tensor) -> Tensor:
    """A copy with channels-last strides, also for one channel, where `contiguous` would leave them and kernels go by them."""
    return torch.empty_like(x, memory_format=torch.channels_last).copy_(x)


class Network:
    """A module whose parameters and float buffers are views into one flat row.

    factory:      builds the module; called once per independent initialisation.
    input_shape:  of one sample.
    """

    def __init__(self, factory: Callable[[], nn.Module], input_shape: tuple[int, ...], device: str = "cpu"):
        self.factory, self.input_shape, self.device = factory, tuple(input_shape), torch.device(device)
        self.module = self._build(seed=0, index=0)
        self.spec = ParamSpec.of(self.module)
        self._trial_forward()
        self.module.to(self.device)
        self.flat = self.spec.row_of(self.module).to(self.device)
        self.params = [p for p in self.module.parameters() if p.requires_grad]
        self.counters = {name: b.clone() for name, b in self.module.named_buffers() if not b.is_floating_point()}  # not in a row: clients begin anew
        self.channels_last = self.device.type == "cpu" and any(isinstance(m, nn.Conv2d) and m.out_channels >= _WIDE for m in self.module.modules())
        self.reordered: list[tuple[nn.Parameter, Tensor]] = []  # parameters kept in another memory order, with their place in `flat`
        self._pour()

    def _build(self, seed: int, index: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):  # initialisers of torch.nn know no other source
            torch.manual_seed(torch_stream(seed, -1, -1, index, "init").initial_seed())
            module = self.factory()
        replace_layers(module)
        return module

    def new_model(self, seed: int, index: int) -> Tensor:
        """Row (P,) of the `index`-th independent initialisation under `seed`."""
        return self.spec.row_of(self._build(seed, index))

    def _trial_forward(self) -> None:
        self.dropouts = {name: m for name, m in self.module.named_modules() if isinstance(m, AddressedDropout)}
        self.module.eval()
        with torch.no_grad():
            self.num_outputs = self.module(torch.zeros(2, *self.input_shape)).shape[-1]
        self.batch_statistics = any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.module.modules())

    def _pour(self) -> None:
        """Makes every parameter and float buffer a view into `flat`; weights that kernels want channels-last are copies."""
        views = self.spec.tensors(self.flat)
        for name, parameter in self.module.named_parameters():
            if self.channels_last and parameter.ndim == 4:
                parameter.data = _channels_last(views[name])
                self.reordered.append((parameter, views[name]))
            else:
                parameter.data = views[name]
        for path, module in self.module.named_modules():
            for name in list(module._buffers):
                full = f"{path}.{name}" if path else name
                if full in views:
                    module._buffers[name] = views[full]

    @torch.no_grad()
    def load(self, row_P: Tensor) -> None:
        """Makes the network the one with these parameters and buffers."""
        self.flat.copy_(row_P)
        for parameter, view in self.reordered:
            parameter.copy_(view)
        for name, first in self.counters.items():
            self.module.get_buffer(name).copy_(first)

    @torch.no_grad()
    def load_trained(self, trained: Tensor) -> None:
        """Replaces the trained parameters (trained columns,) and leaves buffers as they are."""
        self.flat[: self.spec.trained].copy_(trained)
        for parameter, view in self.reordered:
            parameter.copy_(view)

    @torch.no_grad()
    def row(self) -> Tensor:
        """The row (P,) of the network as it is now: valid until it changes again."""
        for parameter, view in self.reordered:
            view.copy_(parameter)
        return self.flat

    def views(self, row_P: Tensor, columns: Columns | None = None) -> list[Tensor]:
        """Views into a row, tensor by tensor in the order of the trained parameters; only those inside `columns`."""
        tensors = list(self.spec.tensors(row_P).values())[: self.spec.num_params]
        return [tensors[i] for i in self.tensors_in(columns)]

    def tensors_in(self, columns: Columns | None) -> list[int]:
        """Indices of the trained tensors inside `columns`."""
        starts = (0, *self.spec.ends)[: self.spec.num_params]
        if columns is None:
            return list(range(self.spec.num_params))
        inside = [i for i, start in enumerate(starts) if any(a <= start < b for a, b in columns.ranges)]
        return inside

    def input(self, x: Tensor) -> Tensor:
        """Samples on the network's device, in the memory layout that its kernels like."""
        x = x.to(self.device, non_blocking=True)
        return _channels_last(x) if self.channels_last and x.ndim == 4 else x

    def set_noise(self, batch: int, generator: torch.Generator | None) -> None:
        """Draws the dropout masks of the next training step."""
        for layer in self.dropouts.values():
            layer.mask = layer.draw(batch, generator).to(self.device)

    def logits_of(self, row_P: Tensor, x: Tensor) -> Tensor:
        """Outputs (n, C) of a row that is loaded for it."""
        self.load(row_P)
        return self.logits(x)

    @torch.no_grad()
    def logits(self, x: Tensor) -> Tensor:
        """Outputs (n, C) of the loaded row in evaluation mode."""
        self.module.eval()
        at_once = _TESTED_AT_ONCE_CPU if self.device.type == "cpu" else _TESTED_AT_ONCE
        return torch.cat([self.module(self.input(part)) for part in x.split(at_once)])
