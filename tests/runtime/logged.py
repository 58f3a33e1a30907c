"""Federations and models with planted faults: loaded by path, as a user's own file would be."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import torch

from cfl_ray.data.synthetic import SyntheticFederation


class LoggedFederation(SyntheticFederation):
    """The synthetic federation; appends a line `pid client` to `log` whenever a client's training data are read.

    While the file `log`.held exists, no read ends.

    huge:    this client's inputs are 1e30 times too large, so that its update is not finite.
    stuck:   reading this client's data never ends.
    odd:     this client's inputs are 1000 higher, for a model that fails on them.
    """

    def __init__(self, clients: int, log: str, huge: int = -1, odd: int = -1, stuck: int = -1):
        super().__init__(clients, input=(8,), samples=20)
        self.log, self.faults = log, (huge, odd, stuck)
        self.recipe = self.recipe | {"faults": self.faults}

    def __reduce__(self):
        return LoggedFederation, (self.num_clients, self.log, *self.faults)

    def train(self, client):
        with open(self.log, "a") as log:
            log.write(f"{os.getpid()} {client}\n")
        while os.path.exists(f"{self.log}.held"):
            time.sleep(0.02)
        huge, odd, stuck = self.faults
        while client == stuck:
            time.sleep(60)
        x, y = super().train(client)
        return (x * 1e30, y) if client == huge else (x + 1000, y) if client == odd else (x, y)


class OneBadHost(LoggedFederation):
    """The same; every read fails in the first process that reads, as on a machine that lacks a mount."""

    def __reduce__(self):
        return OneBadHost, (self.num_clients, self.log)

    def train(self, client):
        bad = Path(f"{self.log}.bad")
        with suppress(FileExistsError), bad.open("x") as file:
            file.write(str(os.getpid()))
        if bad.read_text() == str(os.getpid()):
            raise OSError("the mount is missing")
        return super().train(client)


class Choking(torch.nn.Linear):
    """A linear model that raises for inputs over 500."""

    def forward(self, x):
        if x.dim() and bool((x > 500).any()):
            raise ValueError("input over 500")
        return super().forward(x)


class PoisonedFederation(OneBadHost):
    """The same; the first six clients each have another kind of invalid data or update."""

    def __init__(self, log: str):
        super().__init__(12, log)

    def __reduce__(self):
        return PoisonedFederation, (self.log,)

    def train(self, client):
        x, y = super().train(client)
        poison = [
            lambda: (x * torch.nan, y),
            lambda: (x.index_fill(0, torch.tensor([7]), -torch.inf), y),
            lambda: (x * 1e6, y),
            lambda: (x[:, :5], y),
            lambda: (x, y + 9),
            lambda: (x * 2.0**16 / (x.abs().max() + 1), y),  # a valid input whose update is not valid
        ]
        return poison[client]() if client < len(poison) else (x, y)


class Hanging(torch.nn.Linear):
    """A linear model whose training never ends with inputs over 500; its evaluation does."""

    def forward(self, x):
        while self.training and bool((x > 500).any()):
            pass
        return super().forward(x)


def hanging(input_shape, num_classes):
    return Hanging(input_shape[0], num_classes)


def choking(input_shape, num_classes):
    return Choking(input_shape[0], num_classes)


def read(log: str | Path) -> list[tuple[int, int]]:
    """(pid, client) of every read so far, in order."""
    path = Path(log)
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []


def end(pid: int) -> None:
    """Ends a process as the out-of-memory killer does."""
    os.kill(pid, signal.SIGKILL)
