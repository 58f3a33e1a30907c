"""Simulated attackers: clients that train on wrong labels, or upload something other than their training result.

With w the model that a client received and W its training result, an attacker uploads
    sign_flip    w - scale (W - w)
    scaled       w + scale (W - w)           (E. Bagdasaryan et al., arXiv:1807.00459)
    gaussian     w + sigma N(0, I)           (P. Blanchard et al., NeurIPS 2017, arXiv:1703.02757, Section 5)
    colluders    w + scale ||W - w|| u       u is one random direction for all attackers of a round:
                                             sybils (C. Fung et al., arXiv:1808.04866)
    label_flip   W, trained on labels C - 1 - y (Fung et al.)
A signature that is not a model is forged in the same way, with w = 0. Client state is never forged.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.rng import stream, torch_stream
from cfl_ray.core.work import Address
from cfl_ray.errors import ConfigError, RunError
from cfl_ray.plugins.calling import call_plugin, described, place_of

UPLOAD = ("upload_P", "start_P", "draw")  # arguments of a user's attack


@dataclass(frozen=True)
class AttackKind:
    """A kind of attack in `ATTACK_KINDS`, whose fields are keys of its section; this one changes nothing."""

    def labels(self, client: int, y: Tensor, classes: int, address: Address) -> Tensor:
        """The labels (n,) that an attacker trains on."""
        return y

    def upload(self, client: int, value_F: Tensor, sent_F: Tensor, address: Address) -> Tensor:
        """The upload (F,) of an attacker. value_F: its result. sent_F: the model that it received."""
        return value_F


@dataclass(frozen=True)
class LabelFlip(AttackKind):
    """The labels in reverse order."""

    def labels(self, client: int, y: Tensor, classes: int, address: Address) -> Tensor:
        return classes - 1 - y


@dataclass(frozen=True)
class SignFlip(AttackKind):
    """The update in the other direction."""

    scale: float = 1.0

    def upload(self, client: int, value_F: Tensor, sent_F: Tensor, address: Address) -> Tensor:
        return sent_F - self.scale * (value_F - sent_F)


@dataclass(frozen=True)
class Scaled(AttackKind):
    """A multiple of the update."""

    scale: float = 1.0

    def upload(self, client: int, value_F: Tensor, sent_F: Tensor, address: Address) -> Tensor:
        return sent_F + self.scale * (value_F - sent_F)


@dataclass(frozen=True)
class Gaussian(AttackKind):
    """Noise in place of the update."""

    sigma: float = 1.0

    def upload(self, client: int, value_F: Tensor, sent_F: Tensor, address: Address) -> Tensor:
        draw = torch_stream(address.seed, address.round, address.exchange, client, "attack")
        return sent_F + self.sigma * torch.randn(len(value_F), generator=draw).to(value_F.device)


@dataclass(frozen=True)
class Colluders(AttackKind):
    """An update as long as the honest one, in the direction of all attackers of the round."""

    scale: float = 1.0

    def upload(self, client: int, value_F: Tensor, sent_F: Tensor, address: Address) -> Tensor:
        draw = torch_stream(address.seed, address.round, -1, -1, "attack")
        direction_F = torch.randn(len(value_F), generator=draw).to(value_F.device)
        return sent_F + self.scale * (value_F - sent_F).norm() / direction_F.norm() * direction_F


@dataclass(frozen=True)
class OwnAttack(AttackKind):
    """A user's attack.

    plugin: a function f(upload_P, start_P, draw), or an object with a method `upload` of this signature, a method
    `labels(y, num_classes, draw)`, or both.
    """

    plugin: Any

    def labels(self, client: int, y: Tensor, classes: int, address: Address) -> Tensor:
        if not hasattr(self.plugin, "labels"):
            return y
        draw = stream(address.seed, address.round, -1, client, "own attack/labels")
        returned = call_plugin("attack", self.plugin.labels, y.cpu().numpy().copy(), classes, draw)
        labels = np.asarray(returned)
        if labels.shape != tuple(y.shape) or labels.dtype.kind not in "iu":
            where = f"attack {place_of(self.plugin.labels)} returned {described(returned)}"
            raise RunError(f"{where}, expected integer labels of shape {tuple(y.shape)}")
        if len(bad := labels[(labels < 0) | (labels >= classes)]):
            raise RunError(f"attack {place_of(self.plugin.labels)} returned label {bad[0]}, expected 0..{classes - 1}")
        return torch.from_numpy(labels.astype(np.int64)).to(y.device)

    def upload(self, client: int, value_F: Tensor, sent_F: Tensor, address: Address) -> Tensor:
        function = getattr(self.plugin, "upload", None) or (self.plugin if callable(self.plugin) else None)
        if function is None:
            return value_F
        draw = stream(address.seed, address.round, address.exchange, client, "own attack/upload")
        returned = call_plugin("attack", function, value_F.cpu().clone(), sent_F.cpu().clone(), draw)
        try:
            forged_F = torch.as_tensor(returned).detach().float()
        except (TypeError, ValueError, RuntimeError):
            forged_F = torch.zeros(0)
        if forged_F.shape != value_F.shape:
            raise RunError(
                f"attack {place_of(function)} returned {described(returned)}, "
                f"expected an upload like the one it was passed: numbers of shape {tuple(value_F.shape)}"
            )
        return forged_F.to(value_F.device)


@dataclass(frozen=True)
class Attack:
    """The attacking clients, their attack, and its first round. The default is no attack."""

    kind: AttackKind = AttackKind()
    clients: frozenset[int] = frozenset()
    from_round: int = 1

    @property
    def ids(self) -> np.ndarray:
        """Ids of the attacking clients, int64, ascending."""
        return np.array(sorted(self.clients), np.int64)

    def attacks(self, client: int, address: Address) -> bool:
        """Whether this client attacks in this exchange."""
        return address.round >= self.from_round and client in self.clients

    def labels(self, client: int, y: Tensor, classes: int, address: Address) -> Tensor:
        """The labels (n,) that this client trains on."""
        return self.kind.labels(client, y, classes, address) if self.attacks(client, address) else y

    def upload(self, client: int, value_F: Tensor, sent_F: Tensor, address: Address) -> Tensor:
        """The upload (F,) of this client: `value_F` itself, or its forgery if the client attacks."""
        if not self.attacks(client, address):
            return value_F
        return self.kind.upload(client, value_F, sent_F.to(value_F.device), address)


def check_own(attack: Any) -> None:
    """Raises ConfigError if a user's attack is neither a function nor an object with `upload` or `labels`."""
    if not (callable(attack) or hasattr(attack, "upload") or hasattr(attack, "labels")):
        raise ConfigError(
            f"attack {place_of(attack)} is no attack: expected a function f({', '.join(UPLOAD)}), or a class with a "
            f"method upload({', '.join(UPLOAD)}) or labels(y, num_classes, draw)"
        )
