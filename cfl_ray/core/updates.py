"""What the exchanges of a round come to: trained models, and the books of the round."""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from cfl_ray.core.params import Columns
from cfl_ray.core.work import LeftOut, Mix, Outcome, Train


@dataclass(frozen=True)
class Updates:
    """What a cohort's training came to."""

    outcome: Outcome
    mix: Mix | None
    private: Columns | None = None  # columns that stayed with the clients
    training: Train | None = None  # the exchange

    def mixed(self, empty: Tensor) -> Tensor:
        """float32 (R, P): the weighted mean of every output row. Rows without any update, and private columns, come from `empty`."""
        rows_RP = empty.clone()
        for row, sum_P in self.outcome.sums.items():
            if self.outcome.mass_R[row] > 0:
                rows_RP[row] = (sum_P / self.outcome.mass_R[row]).float()
        if self.private is not None:
            self.private.put(rows_RP, self.private.of(empty))
        return rows_RP

    def damped(self, start: Tensor, total: float) -> Tensor:
        """float32 (R, P): every row of `start` moved towards its weighted mean by the share that its weight has in `total`."""
        share_R = self.weight_R / total if total else np.zeros(len(start))
        return torch.stack([torch.lerp(a, b, share) for a, b, share in zip(start, self.mixed(empty=start), share_R.tolist())])

    @property
    def weight_R(self) -> np.ndarray:
        """float64 (R,): the weight that arrived for every output row, in the scale of `mix`."""
        return self.outcome.mass_R * np.nan_to_num(self.mix.total_R)

    @property
    def kept_MF(self) -> Tensor:
        """float32 (M, F): what was asked for with `keep`; rows of rejected clients are NaN."""
        return torch.from_numpy(self.outcome.arrays["kept"])

    @property
    def sound_MF(self) -> Tensor:
        """The rows of `kept_MF` that are not of rejected clients."""
        return self.kept_MF[torch.from_numpy(self.ok_M)]

    @property
    def norm_M(self) -> np.ndarray:
        """float64 (M,): Euclidean length of what was asked for with `keep`, before any projection; NaN for rejected clients."""
        return self.outcome.arrays["norm"]

    @property
    def ok_M(self) -> np.ndarray:
        """bool (M,): False for a client that was left out: its data or its update were not sound, or it took too long."""
        return self.outcome.arrays["ok"]

    @property
    def train_loss_M(self) -> np.ndarray:
        """float64 (M,): mean mini-batch loss over the last local epoch."""
        return self.outcome.arrays["train_loss"]


@dataclass
class Ledger:
    """Bits that crossed, summed over clients."""

    down_bits: int = 0
    up_bits: int = 0


@dataclass
class Round:
    """What a round leaves beside the next state: traffic, and what was noticed of its clients."""

    ledger: Ledger = field(default_factory=Ledger)
    exchanges: int = 0
    left_out: dict[int, LeftOut] = field(default_factory=dict)  # client -> why
    train_loss: dict[int, float] = field(default_factory=dict)
    held: dict[int, tuple[float, float]] = field(default_factory=dict)  # client -> P-local accuracy and macro-F1

    @property
    def rejected(self) -> dict[int, str]:
        """Clients whose data or results were not sound, and what was wrong with them."""
        return {client: left.why for client, left in self.left_out.items() if not left.late}

    @property
    def late(self) -> dict[int, str]:
        """Clients that took too long."""
        return {client: left.why for client, left in self.left_out.items() if left.late}
