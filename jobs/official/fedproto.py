"""FedProto beside the code of its authors, yuetan031/FedProto."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from jobs.official import runs
from jobs.official.fedbabu import samples
from jobs.official.pacfl import CLIENTS, TEST, TRAIN, two_labels
from jobs.official.page import table
from jobs.official.pfllib import HIDDEN, MODEL, network
from jobs.official.runs import Course, Data, accuracy_of, distance, modules, quiet, replaced, stand_in

EPOCHS, LR, MOMENTUM, LAM = 5, 0.1, 0.5, 1.0  # MOMENTUM: in the text of theirs
LOCAL: dict[str, Any] = {"epochs": EPOCHS, "batch_size": None, "lr": LR, "momentum": MOMENTUM}
KEPT = (1, 5)
SEEDS = range(2)
RUNS: dict[str, dict[str, Any]] = {  # options of ours
    "as theirs": {"prototypes": "running", "weights": "uniform"},
    "the default": {},
}


@dataclass
class Prototypes:
    """A run: the models of the clients with their own last layers, and by round what goes with them."""

    own: Course = field(default_factory=Course)
    prototypes: dict[int, Tensor] = field(default_factory=dict)  # (C, F)
    nearest: dict[int, float] = field(default_factory=dict)  # accuracy with the nearest prototype
    printed: dict[int, tuple[float, float]] = field(default_factory=dict)  # theirs: "without", "with" prototypes


class Net(nn.Module):
    """The model, with the outputs that theirs looks for."""

    def __init__(self, row_P: Tensor) -> None:
        super().__init__()
        self.body, self.head = network()
        vector_to_parameters(row_P.clone(), self.parameters())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features_BF = self.body(x)
        return log_softmax(self.head(features_BF), 1), features_BF


def of_each_user(own: Sequence[float], both: Sequence[float]) -> tuple[list[float], list[float]]:
    """Accuracy of each user without and with prototypes, from what theirs collects of users with equal test sets.

    `own`, `both`: hits over tests so far, before and after the user's test with prototypes.
    """
    hits = [0.0]
    for user, (before, after) in enumerate(zip(own, both, strict=True)):
        hits += [before * (2 * user + 1), after * (2 * user + 2)]
    each = np.diff(hits).tolist()
    return each[::2], each[1::2]


def theirs(checkout: Path, data: Data, start_P: Tensor) -> Prototypes:
    """Runs of their `FedProto_taskheter`, which begin anew for each of the rounds KEPT."""
    run = Prototypes()
    stand_in("tensorboardX", SummaryWriter=lambda _: SimpleNamespace(add_scalar=lambda *_: None))
    (main,) = modules(checkout / "exps", "federated_main")
    test = main.test_inference_new_het_lt
    (train, own), (tested, own_test) = samples(data.x, data.y), samples(data.x_test, data.y_test)
    labels = [y.unique().numpy() for y in data.y]
    for rounds in KEPT:
        models = [Net(start_P) for _ in range(data.clients)]

        def tests(*given: Any, rounds: int = rounds) -> Any:
            found, prototypes = test(*given), given[-1]
            run.printed[rounds] = (float(np.mean(found[0])), float(np.mean(found[1])))
            run.nearest[rounds] = float(np.mean(of_each_user(found[0], found[1])[1]))
            run.prototypes[rounds] = torch.stack([prototypes[label][0] for label in sorted(prototypes)])
            return found

        args = SimpleNamespace(
            dataset="fmnist", ways=2, shots=TRAIN, stdev=0, num_users=data.clients, rounds=rounds, device="cpu",
            local_bs=TRAIN, optimizer="sgd", lr=LR, train_ep=EPOCHS, ld=LAM, num_classes=10, verbose=0,
        )  # fmt: skip
        with replaced(main, test_inference_new_het_lt=tests, tqdm=iter), quiet():
            main.FedProto_taskheter(args, train, tested, own, own_test, models, labels)
        run.own.weights[rounds] = torch.stack([parameters_to_vector(net.parameters()).detach() for net in models])
    return run


def ours(data: Data, seed: int, options: dict[str, Any]) -> Prototypes:
    """Two runs of the same models: predictions with own last layers, and with the nearest prototype."""
    run = Prototypes()

    def look(result: Any, rounds: int) -> None:
        run.prototypes[rounds] = result.trained.state.prototype_CF
        run.nearest[rounds] = result.records[-1].metrics["accuracy"]

    def rows(result: Any) -> Tensor:
        """Their models, whose last layer is that of the prototypes in `personal_model`."""
        spec, backend = result.trained.spec, result.trained.backend
        return torch.stack([backend.client_state("model", client)[: spec.size] for client in range(data.clients)])

    method = {"fedproto": {"lam": LAM} | options}
    run.own = runs.ours(data, seed, KEPT, method, MODEL, LOCAL, look=look, rows=rows)
    return run


HEAD = f"""## FedProto

[yuetan031/FedProto](https://github.com/yuetan031/FedProto), commit COMMIT, by the authors of FedProto: its
`FedProto_taskheter`, `LocalUpdate` and test. {CLIENTS} clients of {TRAIN} training and {TEST} test images of
Fashion-MNIST of two labels each; an MLP with {HIDDEN} hidden units, {EPOCHS} epochs of full batches at eta {LR} with
momentum {MOMENTUM}, lambda {LAM:g}. All models start from the same one. Replaced in memory: the data, the model
(theirs for MNIST has dropout), and what it logs.

Deviations of their code: prototypes are of the features in the last epoch, before each step (ours with `prototypes:
running`), and means over clients (`weights: uniform`, which makes little difference here, where most clients have
equally many images of a label). The run with *the default* of ours has neither.

An error of theirs: in the test, hits and samples are counted on from user to user, and in the test of prototypes from
that of the user's own last layer. What it prints as accuracy *without* prototypes is a mean of running means over the
tests of both kinds, and so is that *with* them. In the table: what it prints, and the accuracies that follow for each
user. Theirs compares an image with the prototypes of the user's own labels alone, ours with all.

Distance: between the models of a client in the two codes, relative to their distance from the initial ones; the
largest of the clients. *Prototypes*: the largest distance between two of the same label, relative to its norm.
"""


def section(checkout: Path, commit: str) -> str:
    model = network()
    rows = [
        ["prototypes of ours", "seed", "round", "distance", "prototypes"]
        + [f"{name}, {code}" for name in ("own layer", "nearest") for code in ("theirs", "ours")]
        + ["theirs prints *without*", "*with*"]
    ]
    for seed in SEEDS:
        data, start_P = two_labels(seed), runs.first_weights(MODEL, 10, seed)
        a = theirs(checkout, data, start_P)
        for name, options in RUNS.items():
            b = ours(data, seed, options)
            for t in KEPT:
                apart = (a.prototypes[t] - b.prototypes[t]).norm(dim=1) / a.prototypes[t].norm(dim=1)
                own = [accuracy_of(model, run.own.weights[t], data) for run in (a, b)]
                numbers = [*own, a.nearest[t], b.nearest[t], *a.printed[t]]
                far = [f"{distance(a.own, b.own, start_P, t):.1e}", f"{float(apart.max()):.1e}"]
                rows.append([name, str(seed), str(t), *far, *(f"{number:.4f}" for number in numbers)])
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows)])
