"""StoCFL beside the code of its authors, dunzeng/StoCFL, which needs fedlab 1.2.1 (beside it, in the checkout)."""

import logging
import sys
import tempfile
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

from jobs.official import runs
from jobs.official.page import table
from jobs.official.runs import (
    Course,
    Data,
    accuracy_of,
    compared,
    modules,
    quiet,
    rotated_mnist,
    same_groups,
    script,
    stand_in,
)

GROUPS, CLIENTS, TRAIN, TEST = 4, 16, 200, 50
EPOCHS, LR, LAM, TAU, ANCHOR_EPOCHS = 5, 0.1, 0.05, 0.5, 10
MODEL = {"name": "mlp", "options": {"hidden": 200}}
KEPT = (1, 5, 10)
SEEDS = range(3)


class Images:
    """The authors' data set of rotated images, with ours; batches are all of a client's images."""

    def __init__(self, data: Data):
        self.data = data

    def get_data_loader(self, client: int, batch_size: int, type: str = "train") -> DataLoader[tuple[Tensor, ...]]:
        x, y = (self.data.x, self.data.y) if type == "train" else (self.data.x_test, self.data.y_test)
        return DataLoader(TensorDataset(x[client], y[client]), batch_size=len(y[client]))


def theirs(checkout: Path, data: Data, start_P: Tensor) -> Course:
    """StoCFL by the authors' `StandaloneServer` and `RotatedMNISTTrainer`."""
    stand_in("leaf.dataloader", get_LEAF_dataloader=None, get_LEAF_all_test_dataloader=None)
    stand_in("leaf.pickle_dataset", PickleDataset=None)
    for name in ("cvxopt", "munch", "pynvml"):
        stand_in(name)
    trainers, linear = modules(checkout, "trainer", "models.linear")
    with tempfile.TemporaryDirectory() as folder:
        server_class = script(checkout / "StoCFL-FCC+CFL.py", run=False)["StandaloneServer"]
        model = linear.SimpleLinear(h1=MODEL["options"]["hidden"])
        vector_to_parameters(start_P.clone(), model.parameters())  # parameters become views of the vector
        args = SimpleNamespace(
            dataset="ours", n=CLIENTS, k=GROUPS, com_round=1, num_per_round=CLIENTS, batch_size=TRAIN, lr=LR,
            epochs=EPOCHS, obep=ANCHOR_EPOCHS, obbs=TRAIN, mu=LAM, tau=TAU, train=1, dir=folder,
            exp_logger=logging.getLogger("quiet"),
        )  # fmt: skip
        trainer = trainers.RotatedMNISTTrainer(model, args)
        trainer.dataset = Images(data)
        server, course = server_class(model, False, trainer, args), Course()
        for t in range(1, KEPT[-1] + 1):
            logging.disable()
            with quiet(), redirect_stderr(sys.stdout):  # progress bars
                server.main()  # a round
            logging.disable(logging.NOTSET)
            row_NP = torch.stack([server.cluster_parameters[k] for k in server.find_client_cluster])
            course.accuracy.append(accuracy_of(model, row_NP, data))
            course.groups[t] = {frozenset(members) for members in server.find_cluster_content.values() if members}
            course.clusters.append(len(course.groups[t]))
            course.weights[t] = row_NP
    return course


def ours(data: Data, seed: int) -> Course:
    method = {
        "stocfl": {
            "tau": TAU, "lam": LAM, "signature": "displacement", "signature_epochs": ANCHOR_EPOCHS,
            "signature_batch": TRAIN, "global_update": "chain", "active_only": True, "weights": "uniform",
        }
    }  # fmt: skip
    local: dict[str, Any] = {"epochs": EPOCHS, "batch_size": None, "lr": LR}
    return runs.ours(data, seed, KEPT, method, MODEL, local)


HEAD = f"""## StoCFL

[dunzeng/StoCFL](https://github.com/dunzeng/StoCFL), commit COMMIT, by the authors of StoCFL: `StandaloneServer` of
`StoCFL-FCC+CFL.py` and `RotatedMNISTTrainer`. {CLIENTS} clients of {TRAIN} images of MNIST, four for each of four
rotations, all of them in every round; full batches, {EPOCHS} epochs at eta {LR}, lambda {LAM}, tau {TAU}, a signature
after {ANCHOR_EPOCHS} epochs. Both start from the same model.

Replaced in memory: the data set, and modules that the trainer imports for other data (`leaf`, `cvxopt`). Deviations of
ours that are switched off here: the global model as an average (`global_update: chain`), signatures by gradients
(`signature: displacement`), all known members of a cluster (`active_only: true`), weights by samples
(`weights: uniform`). One is left: our signatures have norm 1, theirs keep the length of the displacement, so the mean
signature of a cluster weighs clients that moved further more.

Distance: between the weights of a client's cluster model in the two codes, relative to their distance from the initial
models; the largest of the clients.
"""


def section(checkout: Path, commit: str) -> str:
    rows = [["seed", *runs.HEAD, "clusters, theirs", "clusters, ours", "same"]]
    for seed in SEEDS:
        data = rotated_mnist(seed, [i * GROUPS // CLIENTS for i in range(CLIENTS)], TRAIN, TEST)
        start_P = runs.first_weights(MODEL, 10, seed)
        a, b = theirs(checkout, data, start_P), ours(data, seed)
        for t in KEPT:
            clusters = [str(x.clusters[t - 1]) for x in (a, b)]
            rows.append([str(seed), *compared(a, b, start_P, t), *clusters, same_groups(a, b, t)])
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows)])
