"""Virtual time: the seconds of clients in a round, on devices that are part of the experiment.

    seconds of a client = [s (samples trained + samples tested / 3) + bits down / down + bits up / up] * exp(jitter z)

with s, down and up of the client's device, and z a standard normal of the client and the round. A forward pass takes a
third of a training step (FedScale's rule, F. Lai et al., ICML 2022, arXiv:2105.11367).

Every draw has a key, so a time does not depend on the process that computes it, or on earlier calls.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # its subpackages load on first use

from cfl_ray.core.rng import stream, uniforms
from cfl_ray.errors import RunError
from cfl_ray.plugins.calling import call_plugin, described, place_of

FORWARD = 1 / 3  # time of a forward pass, in units of a training step on the same sample
ARGUMENTS = ("clients", "draw")  # of a user's function


def normals(seed: int, round: int, exchange: int, clients: np.ndarray, purpose: str) -> np.ndarray:
    """A standard normal for each of these clients, float64, by key as `core.rng.uniforms`."""
    uniform_M = uniforms(seed, round, exchange, clients, purpose) + 2.0**-54  # avoids ndtri(0), -inf
    return scipy.special.ndtri(uniform_M)


@dataclass(frozen=True)
class Speed:
    """Speeds of M devices, float64 (M,)."""

    seconds_M: np.ndarray  # per training sample
    down_M: np.ndarray  # bit/s; infinity: downloads take no time
    up_M: np.ndarray

    @classmethod
    def of(cls, seconds: float, down_mbps: float | None, up_mbps: float | None) -> "Speed":
        """One device (1,); None: no limit."""
        down, up = (np.inf if mbps is None else mbps * 1e6 for mbps in (down_mbps, up_mbps))
        return cls(np.array([seconds]), np.array([down]), np.array([up]))

    def take(self, index_M: np.ndarray) -> "Speed":
        """The devices at `index_M`."""
        return Speed(self.seconds_M[index_M], self.down_M[index_M], self.up_M[index_M])


# the speeds of the devices of clients, as a function of their ids; the same in all rounds
Devices = Callable[[np.ndarray], Speed]


def lognormal(
    clients: np.ndarray, *, median: Speed, seed: int, sigma: float = 0.0, bandwidth_sigma: float = 0.0
) -> Speed:
    """Speeds of a median device (1,), its seconds times exp(sigma z), its bandwidths times exp(bandwidth_sigma z').

    With both sigmas 0, all clients have the median device.
    """
    compute_M, network_M = (
        np.exp(deviation * normals(seed, -1, -1, clients, f"clock {name}")) if deviation else np.ones(len(clients))
        for name, deviation in (("compute", sigma), ("network", bandwidth_sigma))
    )
    return Speed(median.seconds_M * compute_M, median.down_M * network_M, median.up_M * network_M)


def of_classes(clients: np.ndarray, *, classes: Speed, share_C: np.ndarray, seed: int) -> Speed:
    """Speeds by classes of devices (C,); the class of each client is drawn by the shares, which add up to 1."""
    draws = uniforms(seed, -1, -1, clients, "clock class")
    return classes.take(np.searchsorted(np.cumsum(share_C)[:-1], draws, side="right"))


def measured(clients: np.ndarray, *, rows: Speed) -> Speed:
    """Speeds from a table of devices (R,); client i has row i modulo R."""
    return rows.take(np.asarray(clients) % len(rows.seconds_M))


def own(clients: np.ndarray, *, function: Callable[..., Any], num_clients: int, seed: int) -> Speed:
    """Speeds by a user's function f(clients, draw) -> (seconds per sample, bit/s down, bit/s up).

    It is called for all clients. num_clients: of the federation at the start. Raises RunError, with the function's file
    and line, for a result of another form.
    """
    everyone = np.arange(max(num_clients, int(clients.max(initial=-1)) + 1))
    result = call_plugin("clock", function, everyone, stream(seed, -1, -1, -1, "own clock"))
    parts = [np.asarray(part, np.float64) for part in result] if isinstance(result, tuple) else []
    if len(parts) != 3 or any(part.shape != everyone.shape for part in parts):
        raise RunError(
            f"clock {place_of(function)} returned {described(result)}, expected (seconds per sample >= 0, "
            f"bit/s down > 0, bit/s up > 0), an array of shape ({len(everyone)},) each"
        )
    valid = ((parts[0] >= 0) & np.isfinite(parts[0]), parts[1] > 0, parts[2] > 0)
    names = ("seconds per sample, expected a finite number >= 0", "bit/s down, expected > 0", "bit/s up, expected > 0")
    for part, valid_N, name in zip(parts, valid, names, strict=True):
        if len(bad := np.flatnonzero(~valid_N)):
            raise RunError(f"clock {place_of(function)} gave client {bad[0]} {part[bad[0]]:g} {name}")
    return Speed(*parts).take(clients)


@dataclass(frozen=True)
class Load:
    """Work of a client in a round."""

    down_bits: float
    up_bits: float
    trainings: float = 1.0  # in units of the method's local training: its epochs on the client's samples
    tests: float = 0.0  # forward passes over its samples, e.g. K if it compares K models


@dataclass(frozen=True)
class Clock:
    """The virtual seconds of clients in a round."""

    devices: Devices
    seed: int
    jitter: float = 0.0
    deadline: float | None = None  # after which a round waits for no further client; None: it waits for all
    availability_seconds: float | None = None  # length of a round of the availability; None: a round of the run

    def seconds(
        self, round: int, clients: np.ndarray, trained_M: np.ndarray, sizes_M: np.ndarray, load: Load, draw: int = 0
    ) -> np.ndarray:
        """Seconds (M,) of these clients in a round.

        trained_M: samples of one local training, summed over its epochs. sizes_M: n_i. draw: number of the draw, if a
        client starts several times in the same round.
        """
        speed = self.devices(clients)
        samples_M = trained_M * load.trainings + sizes_M * load.tests * FORWARD
        seconds_M = speed.seconds_M * samples_M + load.down_bits / speed.down_M + load.up_bits / speed.up_M
        if self.jitter:
            seconds_M = seconds_M * np.exp(self.jitter * normals(self.seed, round, draw, clients, "clock jitter"))
        return np.asarray(seconds_M, np.float64)
