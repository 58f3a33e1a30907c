"""A torch Dataset as a federation, and a network whose layers find their sizes themselves."""

import torch
from torch import nn
from torch.utils.data import Dataset

from cfl_ray import Experiment, federation_from_dataset, simulate


class Stripes(Dataset):
    """Images (1, 8, 8) with horizontal (0) or vertical (1) stripes, in noise."""

    def __init__(self, samples: int):
        draw = torch.Generator().manual_seed(0)
        self.noise = torch.randn(samples, 1, 8, 8, generator=draw)

    def __len__(self) -> int:
        return len(self.noise)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        stripes = torch.tensor([1.0, -1.0]).repeat(4).expand(8, 8)
        return self.noise[index] + (stripes if index % 2 else stripes.T), index % 2


def network(num_classes: int) -> nn.Module:
    """A convolution and a linear layer, without input sizes."""
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(num_classes))


def main() -> float:
    """Returns the accuracy of FedAvg after three rounds."""
    federation = federation_from_dataset(Stripes(200), clients=torch.arange(200) // 20)
    results = simulate(
        Experiment(
            data=federation,
            model=network,
            rounds=3,
            methods=["fedavg"],
            cohort={"fraction": 1.0},
            tracking={"enabled": False},
        )
    )
    return results.methods["fedavg"].final["accuracy"]


if __name__ == "__main__":
    print(main())
