"""MOON beside the code of its authors, QinbinLi/MOON."""

from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

from jobs.official import runs
from jobs.official.fedrep import CLIENTS, images
from jobs.official.pacfl import TEST, TRAIN
from jobs.official.page import table
from jobs.official.runs import Course, Data, accuracy_of, distance, modules, quiet, replaced, script

EPOCHS, LR, MOMENTUM, DECAY, TAU, OUT = 5, 0.1, 0.9, 1e-5, 0.5, 32  # MOMENTUM: in the text of theirs
MODEL: dict[str, Any] = {"name": "lenet5", "options": {"projection": OUT}}
LOCAL: dict[str, Any] = {
    "epochs": EPOCHS, "batch_size": None, "lr": LR, "momentum": MOMENTUM, "weight_decay": DECAY,
}  # fmt: skip
KEPT = (1, 5)
SEEDS = range(1)
RUNS = (1.0, 5.0)  # mu


def theirs(checkout: Path, data: Data, start_P: Tensor, mu: float) -> Course:
    """The course of their main.py, which begins anew for each of the rounds KEPT."""
    course = Course()
    utils, models = modules(checkout, "utils", "model")
    model = models.ModelFedCon("simple-cnn-mnist", OUT, 10)
    vector_to_parameters(start_P.clone(), model.parameters())
    own = dict(enumerate(np.arange(data.y.numel()).reshape(data.y.shape)))
    whole = TensorDataset(data.x.flatten(0, 1), data.y.flatten())

    def get_dataloader(*args: Any) -> tuple[Any, ...]:
        rows = torch.from_numpy(args[4]) if len(args) > 4 else torch.arange(len(whole))
        used = TensorDataset(*whole[rows])
        return DataLoader(used, batch_size=len(used)), [], used, []

    def accuracy(*_: Any, get_confusion_matrix: bool = False, **__: Any) -> tuple[Any, ...]:
        return (0.0, None, 0.0) if get_confusion_matrix else (0.0, 0.0)

    options = {
        "alg": "moon", "model": "simple-cnn-mnist", "dataset": "fmnist", "n_parties": data.clients, "epochs": EPOCHS,
        "batch-size": TRAIN, "lr": LR, "reg": DECAY, "mu": mu, "temperature": TAU, "out_dim": OUT, "device": "cpu",
        "load_model_file": "start.pt", "load_model_round": 0, "log_file_name": "log",
    }  # fmt: skip
    for rounds in KEPT:
        with (
            TemporaryDirectory() as folder,
            chdir(folder),
            replaced(
                utils,
                partition_data=lambda *_, **__: (None, whole.tensors[1].numpy(), None, None, own, None),
                get_dataloader=get_dataloader,
                compute_accuracy=accuracy,
            ),
            replaced(torch.Tensor, cuda=lambda self: self),
            replaced(torch.nn.Module, cuda=lambda self: self),
            quiet(),
        ):
            torch.save(model.state_dict(), "start.pt")
            words = [f"--{name}={value}" for name, value in (options | {"comm_round": rounds}).items()]
            found = script(checkout / "main.py", *words)
        w_P = parameters_to_vector(found["global_model"].parameters()).detach()
        course.weights[rounds] = w_P.expand(data.clients, -1)
    return course


def ours(data: Data, seed: int, mu: float) -> Course:
    method = {"moon": {"mu": mu, "tau": TAU}}
    return runs.ours(data, seed, KEPT, method, MODEL, LOCAL)


HEAD = f"""## MOON

[QinbinLi/MOON](https://github.com/QinbinLi/MOON), commit COMMIT, by the authors of MOON: its `main.py` as a whole, with
`ModelFedCon`, whose projection head has {OUT} outputs. {CLIENTS} clients of {TRAIN} training and {TEST} test images of
Fashion-MNIST of two labels each; {EPOCHS} epochs of full batches at eta {LR} with momentum {MOMENTUM}, weight decay
{DECAY}, tau {TAU}. Both start from the same model.

Replaced in memory: the partition and the loaders, so that both have the same images, calls of CUDA, and the test. In
the first round theirs has no previous models, and no contrastive loss. In the paper the first model takes their place
(`first: initial`), which changes nothing while all clients take part: previous and global model are the same, the loss
is log 2, and it has no gradient.

Distance: between the weights of the global model in the two codes, relative to their distance from the initial model.
Accuracy: of the global model.
"""


def section(checkout: Path, commit: str) -> str:
    rows = [["mu", "seed", *runs.HEAD]]
    model = runs.network_of(MODEL, 10).module
    for seed in SEEDS:
        data, start_P = images(seed), runs.first_weights(MODEL, 10, seed)
        for mu in RUNS:
            a, b = theirs(checkout, data, start_P, mu), ours(data, seed, mu)
            for t in KEPT:
                accuracy = [f"{accuracy_of(model, run.weights[t], data):.4f}" for run in (a, b)]
                rows.append([f"{mu:g}", str(seed), str(t), f"{distance(a, b, start_P, t):.1e}", *accuracy])
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows)])
