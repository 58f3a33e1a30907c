"""The strategies of Flower beside the rules of this package: both average the same results, three times."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cfl_ray.core.aggregation.apply import squared_distances
from cfl_ray.core.aggregation.rules import RULES
from cfl_ray.core.server_optimizers import SERVER_OPTIMIZERS
from jobs.official.page import table

CLIENTS, WEIGHTS, ROUNDS, VERSION = 10, 5000, 3, "1.42.0"
Averages = Callable[[np.ndarray, np.ndarray], np.ndarray]  # w (P,), results (n, P) -> w after the round

HEAD = f"""## What the strategies compute

Flower {VERSION} (`flwr.serverapp.strategy`) and this package average the same {ROUNDS} x {CLIENTS} results of
{WEIGHTS:,} weights, one of which is far off, with 10 to {10 * CLIENTS} samples, by
`python -m jobs.coming_from flower`. *Difference*: the largest one of the weights after the last round, as a part of the
largest change. *With it*: the difference once our formula has what the last column names.
"""

FOOT = """`FedAvgM()` has `server_momentum=0.0`, which is FedAvg.

Strategies act on every array that clients upload, usually those of `model.state_dict()`, with what BatchNorm layers
hold. Here counts of batches are no part of a result, and statistics are averaged without a step:

| strategy | with BatchNorm layers |
|---|---|
| `Krum`, `MultiKrum`, `Bulyan` | counts of batches decide who is chosen (`findings/flwr_krum_batch_counts.sh`) |
| `FedAdam` | makes variances negative; models predict NaN (`findings/flwr_fedadam_batchnorm.sh`) |
| `FedYogi`, `FedAdagrad` | variances are stepped, too |
| `FedAvg` | as here with `norm: shared`; the count of batches becomes a real number |
"""


def samples() -> np.ndarray:
    """Training samples of each client (n,)."""
    return np.arange(1, CLIENTS + 1) * 10


def results_of(w_P: np.ndarray, current: int) -> np.ndarray:
    """Results of the clients in a round, float32 (n, P): similar changes, of which one is reversed and long."""
    draw = np.random.default_rng(current)
    change_nP = 0.1 * draw.normal(size=w_P.size) + 0.05 * draw.normal(size=(CLIENTS, w_P.size))
    change_nP[0] *= -5
    return (w_P + change_nP).astype(np.float32)


def after(averages: Averages) -> np.ndarray:
    """The weights (P,) after all rounds."""
    w_P = np.random.default_rng(9).normal(size=WEIGHTS).astype(np.float32)
    for current in range(1, ROUNDS + 1):
        w_P = np.asarray(averages(w_P, results_of(w_P, current)), np.float32)
    return w_P


@dataclass
class Reply:
    """What a strategy reads of a client's message."""

    content: Any

    def has_error(self) -> bool:
        return False


def of_strategy(strategy: Any) -> Averages:
    """Averaging by a strategy of Flower, which keeps its own moments."""
    from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict

    current = 0

    def reply(w_P: np.ndarray, count: int) -> Reply:
        metrics = MetricRecord({"num-examples": int(count)})
        return Reply(RecordDict({"arrays": ArrayRecord({"w": Array(w_P)}), "metrics": metrics}))

    def averages(w_P: np.ndarray, result_nP: np.ndarray) -> np.ndarray:
        nonlocal current
        current += 1
        sent = ArrayRecord({"w": Array(w_P)})
        strategy.current_arrays = (
            sent if type(strategy).__name__ == "FedAvgM" else {"w": w_P}
        )  # as configure_train does
        arrays, _ = strategy.aggregate_train(current, map(reply, result_nP, samples()))
        return arrays["w"].numpy()

    return averages


def of_optimizer(name: str, start: float | None = None, corrected: bool = False, **options: float) -> Averages:
    """Averaging with a server optimiser of this package.

    start: v at first, in the place of tau^2. corrected: with the factors of Adam's bias correction, a round late.
    """
    optimizer = SERVER_OPTIMIZERS.resolve(name)(**options)
    moments, current = None, 0

    def averages(w_P: np.ndarray, result_nP: np.ndarray) -> np.ndarray:
        nonlocal moments, current
        current += 1
        delta_P = torch.from_numpy(mean(w_P, result_nP) - w_P)
        if start is not None and moments is None:
            moments = torch.zeros_like(delta_P), torch.full_like(delta_P, start)
        step_P, moments = optimizer(delta_P, moments)
        factor = (1 - 0.99 ** (current + 1)) ** 0.5 / (1 - 0.9 ** (current + 1)) if corrected else 1
        return w_P + factor * step_P.numpy()

    return averages


def mean(w_P: np.ndarray, result_nP: np.ndarray) -> np.ndarray:
    return np.average(result_nP.astype(np.float64), 0, samples())


def of_rule(name: str, weighted: bool = False, **options: float) -> Averages:
    """Averaging by an aggregation rule of this package.

    weighted: those that the rule chooses have weights by their samples.
    """
    rule = RULES[name](**options)

    def averages(w_P: np.ndarray, result_nP: np.ndarray) -> np.ndarray:
        weight_n = samples() / samples().sum()
        if hasattr(rule, "combine"):
            return rule.combine(result_nP, weight_n)
        chosen_n = rule.weigh(squared_distances([result_nP]), weight_n)
        return np.average(result_nP, 0, chosen_n * weight_n if weighted else chosen_n)

    return averages


def section(installed: Path) -> str:
    """The section, with Flower in a folder of `pip install --target`."""
    sys.path.append(str(installed))  # last, so that what both need is that of this environment
    from flwr.serverapp import strategy as flower

    adaptive = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3}
    adagrad = adaptive | {"beta1": 0.0}
    krum = {"attackers": 2, "keep": 8}
    # strategy, ours in words, ours, ours with the change, the change
    rows: list[tuple[str, Any, str, Averages, Averages | None, str]] = [
        ("FedAvg()", flower.FedAvg(), "`fedavg`", mean, None, ""),
        (
            "FedAvgM(server_momentum=0.9)",
            flower.FedAvgM(server_momentum=0.9),
            "`server_optimizer: fedavgm`",
            of_optimizer("fedavgm"),
            None,
            "",
        ),
        (
            "FedAdam()",
            flower.FedAdam(),
            "`{fedadam: {lr: 0.1}}`",
            of_optimizer("fedadam", **adaptive),
            of_optimizer("fedadam", 0.0, True, **adaptive),
            "v = 0 at first; bias correction, with t + 1 in round t: steps of 0.74 lr in round 1 where Adam has lr",
        ),
        (
            "FedYogi()",
            flower.FedYogi(),
            "`{fedyogi: {lr: 0.01}}`",
            of_optimizer("fedyogi", **adaptive | {"lr": 0.01}),
            of_optimizer("fedyogi", 0.0, **adaptive | {"lr": 0.01}),
            "v = 0 at first; no bias correction",
        ),
        (
            "FedAdagrad()",
            flower.FedAdagrad(),
            "`{fedadagrad: {lr: 0.1, beta1: 0}}`",
            of_optimizer("fedadagrad", **adagrad),
            of_optimizer("fedadagrad", 0.0, **adagrad),
            "v = 0 at first",
        ),
        ("FedMedian()", flower.FedMedian(), "`aggregation: median`", of_rule("median"), None, ""),
        (
            "FedTrimmedAvg()",
            flower.FedTrimmedAvg(),
            "`{trimmed_mean: {share: 0.2}}`",
            of_rule("trimmed_mean", share=0.2),
            None,
            "",
        ),
        (
            "MultiKrum(num_malicious_nodes=2, num_nodes_to_select=8)",
            flower.MultiKrum(num_malicious_nodes=2, num_nodes_to_select=8),
            "`{multi_krum: {attackers: 2, keep: 8}}`",
            of_rule("multi_krum", **krum),
            of_rule("multi_krum", True, **krum),
            "those chosen are weighed by their samples",
        ),
        (
            "Krum(num_malicious_nodes=2)",
            flower.Krum(num_malicious_nodes=2),
            "`{multi_krum: {attackers: 2, keep: 1}}`",
            of_rule("multi_krum", **krum | {"keep": 1}),
            None,
            "",
        ),
    ]
    lines: list[list[str]] = [["Flower", "here", "difference", "with it", "what differs"]]
    for text, strategy, ours, rule, changed, words in rows:
        theirs_P = after(of_strategy(strategy))
        found = [_difference(theirs_P, after(averages)) if averages else "" for averages in (rule, changed)]
        lines.append([f"`{text}`", ours, *found, words])
        print(lines[-1], flush=True)
    return "\n".join([HEAD, *table(*lines), FOOT])


def _difference(theirs_P: np.ndarray, ours_P: np.ndarray) -> str:
    w_P = after(lambda w_P, result_nP: w_P)
    return f"{np.abs(theirs_P - ours_P).max() / np.abs(ours_P - w_P).max():.1g}"
