"""Clients with the samples that both codes train on and are tested with, our runs of them, and tables of scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import scipy.stats

from cfl_ray import Experiment, federation_from_arrays, simulate

HIDDEN = 100
MODEL: dict[str, Any] = {"name": "mlp", "options": {"hidden": HIDDEN}}


class Labelled(Protocol):
    """A row of a table."""

    @property
    def label(self) -> str: ...


Row = TypeVar("Row", bound=Labelled)


@dataclass(frozen=True)
class Client:
    """Training and test samples of a client: pixels (n, 1, 28, 28) as the library scales them, and labels (n,)."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    def part(self, share: float) -> "Client":
        """The client with the first samples of both parts, the share of each."""
        train, test = (max(int(share * len(y)), 1) for y in (self.y, self.y_test))
        return Client(self.x[:train], self.y[:train], self.x_test[:test], self.y_test[:test])


def ours(
    protocol: str, clients: Sequence[Client], seed: int, rounds: int, method: Any, model: Any, **sections: Any
) -> dict[str, np.ndarray]:
    """The metrics of every round of our run with a preset; `best`: the best `reported` up to each round."""
    owner, test_owner = (np.repeat(np.arange(len(clients)), [len(y) for y in ys]) for ys in zip(*map(labels, clients)))
    federation = federation_from_arrays(
        np.concatenate([client.x for client in clients]),
        np.concatenate([client.y for client in clients]),
        owner,
        x_test=np.concatenate([client.x_test for client in clients]),
        y_test=np.concatenate([client.y_test for client in clients]),
        test_clients=test_owner,
        num_classes=10,
    )
    experiment = Experiment(
        protocol=protocol,
        data=federation,
        seed=seed,
        rounds=rounds,
        methods=[method],
        model=model,
        tracking={"enabled": False},
        **sections,
    )
    (result,) = simulate(experiment).methods.values()
    names = result.records[-1].metrics
    scores = {name: np.array([record.metrics.get(name, np.nan) for record in result.records]) for name in names}
    return scores | {"best": np.fmax.accumulate(scores["reported"])}


def labels(client: Client) -> tuple[np.ndarray, np.ndarray]:
    return client.y, client.y_test


def compared(theirs: Sequence[float], ours: Sequence[float], paired: bool = False) -> list[str]:
    """Cells: both means and standard deviations over seeds, their difference, and whether it is within seed noise.

    Noise: half the width of the 95 % interval of the difference, by Student's t; at least 0.002. paired: of the
    differences by seed, for runs whose seeds draw the same for both.
    """
    pair = [np.array(scores) for scores in (theirs, ours)]
    n, difference = len(theirs), pair[1].mean() - pair[0].mean()
    spread = (pair[1] - pair[0]).var(ddof=1) if paired else sum(scores.var(ddof=1) for scores in pair)
    noise = scipy.stats.t.ppf(0.975, (n - 1) * (1 if paired else 2)) * np.sqrt(spread / n)
    agrees = "yes" if abs(difference) <= max(noise, 0.002) else "no"
    means = [f"{scores.mean():.4f} ± {scores.std(ddof=1):.4f}" for scores in pair]
    return [*means, f"{difference:+.4f}", f"{noise:.4f}", agrees]


def side_by_side(
    library: str,
    rows: Sequence[Row],
    seeds: Sequence[int],
    scores: Callable[[Row, int], tuple[float, float]],
    paired: bool = False,
) -> list[list[str]]:
    """The rows of a table with the `label` of each row and `compared`; printed as they are found.

    scores: (theirs, ours) of a row with a seed.
    """
    found = [["method", library, "ours", "difference", "noise", "agree"]]
    for row in rows:
        theirs, ours_ = zip(*(scores(row, seed) for seed in seeds), strict=True)
        found.append([row.label, *compared(theirs, ours_, paired)])
        print(found[-1], flush=True)
    return found
