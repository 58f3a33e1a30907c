"""The fixed points of SCAFFOLD and FedAvg in FL-bench's code, of a convex problem."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from jobs.coming_from.fl_bench import prepare, theirs
from jobs.coming_from.fl_bench_mended import with_c_local
from jobs.coming_from.measured import Client
from jobs.official.page import table
from jobs.official.runs import images

ROUNDS = 400
HEAD = f"""## SCAFFOLD in FL-bench

In [KarhouTam/FL-bench](https://github.com/KarhouTam/FL-bench), commit 06e658b, the server keeps c_i at 0, so that
clients add c alone. Logistic regression on two clients with unlike labels, full batches, 5 steps, lr 0.5, weight decay
0.02, {ROUNDS} rounds by its servers and clients; distances in units of that of FedAvg's fixed point from the optimum,
which is 1,500 rounds of FedAvg with one step.
"""


def two_clients() -> list[Client]:
    """Images of 4 x 4 pixels of MNIST, with the labels 0 to 3, or 6 to 9."""
    x, y = (part.numpy() for part in images("mnist", 1))
    small = x[:, :, ::7, ::7].copy()
    rows = (np.flatnonzero(y < 4)[:40], np.flatnonzero(y > 5)[:40])
    return [Client(small[part], y[part], small[part[:4]], y[part[:4]]) for part in rows]


def limit(
    checkout: Path,
    name: str,
    mended: Callable[[type[Any]], type[Any]] = lambda server: server,
    steps: int = 5,
    rounds: int = ROUNDS,
) -> Tensor:
    """The weights of their server `name` after these rounds, from zeros."""
    made = theirs(
        checkout,
        name,
        two_clients(),
        torch.zeros(16 * 10 + 10),
        0,
        None,
        mended,
        {"lr": 0.5, "weight_decay": 0.02},
        {"name": "mlp", "options": {"hidden": 0}},
        join_ratio=1.0,
        local_epoch=steps,
        batch_size=40,
        global_epoch=rounds,
        test={"client": {"interval": -1}},
    )
    return parameters_to_vector(list(made.public_model_params.values()))


def section(checkout: Path) -> str:
    prepare(checkout)
    optimum, average = limit(checkout, "fedavg", steps=1, rounds=1500), limit(checkout, "fedavg")
    unit = (average - optimum).norm()
    rows = [["server", "from FedAvg's fixed point", "from the optimum"]]
    for label, mended in (("SCAFFOLD", lambda server: server), ("SCAFFOLD that stores c_i", with_c_local)):
        found = limit(checkout, "scaffold", mended)
        rows.append([label, *(f"{(found - of).norm() / unit:.4f}" for of in (average, optimum))])
    return "\n".join([HEAD, *table(*rows)])
