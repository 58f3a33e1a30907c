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

import torch
from torch import Tensor

from cfl_ray.core.rng import torch_stream
from cfl_ray.core.work import Address


@dataclass(frozen=True)
class Attack:
    """Which clients attack, how, and from which round on. The default is no attack."""

    kind: str = "none"  # label_flip, sign_flip, scaled, gaussian or colluders
    clients: frozenset[int] = frozenset()
    scale: float = 1.0
    sigma: float = 1.0
    from_round: int = 1

    def attacks(self, client: int, address: Address) -> bool:
        """Whether this client attacks in this exchange."""
        return address.round >= self.from_round and client in self.clients

    def labels(self, client: int, y: Tensor, classes: int, address: Address) -> Tensor:
        """The labels (n,) that this client trains on."""
        return classes - 1 - y if self.kind == "label_flip" and self.attacks(client, address) else y

    def upload(self, client: int, value_F: Tensor, sent_F: Tensor, address: Address) -> Tensor:
        """The upload (F,) of this client: `value_F` itself, or its forgery where the client attacks."""
        if not self.attacks(client, address):
            return value_F
        sent_F = sent_F.to(value_F.device)
        if self.kind == "sign_flip":
            return sent_F - self.scale * (value_F - sent_F)
        if self.kind == "scaled":
            return sent_F + self.scale * (value_F - sent_F)
        if self.kind == "gaussian":
            draw = torch_stream(address.seed, address.round, address.exchange, client, "attack")
            return sent_F + self.sigma * torch.randn(len(value_F), generator=draw).to(value_F.device)
        if self.kind == "colluders":
            draw = torch_stream(address.seed, address.round, -1, -1, "attack")
            direction_F = torch.randn(len(value_F), generator=draw).to(value_F.device)
            return sent_F + self.scale * (value_F - sent_F).norm() / direction_F.norm() * direction_F
        return value_F
