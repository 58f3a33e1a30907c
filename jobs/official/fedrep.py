"""FedRep, FedPer and LG-FedAvg beside the code of the authors of FedRep, lgcollins/FedRep."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters
from torch.utils.data import TensorDataset

from jobs.official import runs
from jobs.official.pacfl import TEST, TRAIN, two_labels
from jobs.official.page import table
from jobs.official.pfllib import personal_rows
from jobs.official.runs import Course, Data, compared, modules, quiet, replaced, stand_in

LR, MOMENTUM, DECAY = 0.1, 0.5, 1e-4  # MOMENTUM, DECAY: theirs, in the text of their optimisers
CLIENTS, EPOCHS, HEAD_EPOCHS, HIDDEN = 10, 3, 5, 32  # EPOCHS: of FedPer and LG-FedAvg
KEPT = (1, 5)
SEEDS = range(2)


def mlp(input_shape: tuple[int, ...], num_classes: int) -> nn.Sequential:
    """Four linear layers, as their MLP."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs in (math.prod(input_shape), HIDDEN, HIDDEN):
        layers += [nn.Linear(inputs, HIDDEN), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(HIDDEN, num_classes))


MODEL: dict[str, Any] = {"name": mlp}
# Changes of the text of theirs
OWN_START = {"=net_glob.state_dict()[key]": "=net_glob.state_dict()[key].clone()"}  # w_i stays the first model
DECAYED = {"'params': bias_p, 'weight_decay':0}": f"'params': bias_p, 'weight_decay':{DECAY}}}"}
OLD_TORCH = {"net.zero_grad()": "net.zero_grad(set_to_none=False)"}


@dataclass(frozen=True)
class How:
    """A comparison."""

    method: str  # of ours
    fraction: float = 1.0  # of the clients, in a round
    own_start: bool = True  # theirs: the private layers of a client start from the first model, as ours do
    decayed: bool = True  # theirs: weight decay of biases, as ours
    old_torch: bool = False  # theirs: `zero_grad` as in PyTorch before 2.0

    @property
    def ours(self) -> tuple[str, float]:
        return self.method, self.fraction


RUNS = {
    "FedRep, all clients": How("fedrep"),
    "FedRep, 30 %": How("fedrep", 0.3),
    "FedRep, 30 %, heads from w": How("fedrep", 0.3, own_start=False),
    "FedRep, all clients, PyTorch 1": How("fedrep", old_torch=True),
    "FedRep, all clients, biases do not decay": How("fedrep", decayed=False),
    "FedPer, all clients": How("fedper"),
    "FedPer, 30 %": How("fedper", 0.3),
    "FedPer, 30 %, heads from w": How("fedper", 0.3, own_start=False),
    "LG-FedAvg, all clients": How("lg_fedavg"),
    "LG-FedAvg, 30 %": How("lg_fedavg", 0.3),
    "LG-FedAvg, 30 %, lower layers from w": How("lg_fedavg", 0.3, own_start=False),
}


def images(seed: int) -> Data:
    """The images of the first clients of PACFL's comparison."""
    data = two_labels(seed)
    return Data(*(values[:CLIENTS] for values in (data.x, data.y, data.x_test, data.y_test)))


def changed(file: Path, name: str, changes: dict[str, str], **values: Any) -> ModuleType:
    """The module `name`, with these values, of the text of a file after these changes. Raises ValueError without one.

    Tabs become spaces: one line of their `models/test.py` is indented by a tab, which Python 3 refuses.
    """
    text = file.read_text().expandtabs()
    for old, new in changes.items():
        if old not in text:
            raise ValueError(f"{file.name} has no {old!r}")
        text = text.replace(old, new)
    module = ModuleType(name)
    vars(module).update(values)
    exec(compile(text, str(file), "exec"), vars(module))
    return module


def their_script(
    file: Path,
    data: Data,
    start_P: Tensor,
    cohorts: Sequence[np.ndarray],
    options: dict[str, Any],
    changes: dict[str, str],
    update_changes: dict[str, str],
    **values: Any,
) -> Course:
    """The course of a script of theirs with full batches of these cohorts.

    options: of the script. changes, update_changes: of its text and that of `models/Update.py`. values: names that the
    script uses and does not define. Its last round, which has all clients, is not in the course.
    """
    stand_in("FedProx")
    checkout, course, turn = file.parent, Course(), iter(cohorts)
    trains, _ = modules(checkout, "utils.train_utils", "models.language_utils")
    tests = sys.modules["models.test"] = changed(checkout / "models" / "test.py", "models.test", {})
    test_all = tests.test_img_local_all
    sys.modules["models.Update"] = changed(checkout / "models" / "Update.py", "models.Update", update_changes)
    model = mlp(runs.SHAPE, 10)
    vector_to_parameters(start_P.clone(), model.parameters())
    model.weight_keys = [[f"{layer}.weight", f"{layer}.bias"] for layer in (1, 3, 5, 7)]

    def test(net: Any, *given: Any, w_locals: Any, w_glob_keys: Any = None, fedavg: Any = None, **more: Any) -> Any:
        """Their test; main_apfl.py gives an argument `fedavg`, which it does not have."""
        accuracy, loss = test_all(net, *given, w_locals=w_locals, w_glob_keys=w_glob_keys, **more)
        rows, shared = [], {key: net.state_dict()[key] for key in w_glob_keys or []}
        for client in range(data.clients):
            rows.append(torch.cat([(w_locals[client] | shared)[key].flatten() for key in net.state_dict()]))
        course.accuracy.append(accuracy / 100)
        course.weights[len(course.accuracy)] = torch.stack(rows)
        return accuracy, loss

    def dataset(x: Tensor, y: Tensor) -> tuple[TensorDataset, dict[int, np.ndarray]]:
        rows = np.arange(y.numel()).reshape(y.shape)
        return TensorDataset(x.flatten(0, 1), y.flatten()), dict(enumerate(rows))

    def get_data(_: Any) -> tuple[Any, ...]:
        (train, own), (tested, own_test) = dataset(data.x, data.y), dataset(data.x_test, data.y_test)
        return train, tested, own, own_test

    options = options | {
        "dataset": "mnist", "gpu": -1, "epochs": len(cohorts), "num_users": data.clients, "local_bs": TRAIN,
        "frac": len(cohorts[0]) / data.clients, "lr": LR, "test_freq": 1,
    }  # fmt: skip
    with (
        TemporaryDirectory() as folder,
        chdir(folder),
        replaced(tests, test_img_local_all=test),
        replaced(trains, get_data=get_data, get_model=lambda _: model),
        replaced(np.random, choice=lambda ids, *_, **__: next(turn, np.array(ids))),
        replaced(sys, path=[str(checkout), *sys.path], argv=[file.name, *(f"--{k}={v}" for k, v in options.items())]),
        quiet(),
    ):
        Path("save").mkdir()
        changed(file, "__main__", changes, **values)
    course.accuracy = course.accuracy[: len(cohorts)]
    return course


def theirs(checkout: Path, data: Data, start_P: Tensor, how: How, cohorts: Sequence[np.ndarray]) -> Course:
    """The method by the authors' `main_fedrep.py`."""
    algorithm = {"lg_fedavg": "lg"}.get(how.method, how.method)
    epochs = HEAD_EPOCHS + 1 if algorithm == "fedrep" else EPOCHS
    options = {"alg": algorithm, "local_ep": epochs, "local_rep_ep": 1}
    changes = OWN_START if how.own_start else {}
    updates = (DECAYED if how.decayed else {}) | (OLD_TORCH if how.old_torch else {})
    return their_script(checkout / "main_fedrep.py", data, start_P, cohorts, options, changes, updates)


def ours(data: Data, seed: int, name: str, fraction: float) -> Course:
    fedrep = name == "fedrep"
    method = {name: {"head_epochs": HEAD_EPOCHS} if fedrep else {}}
    local = {"epochs": 1 if fedrep else EPOCHS, "batch_size": None, "lr": LR}
    local |= {"momentum": MOMENTUM, "weight_decay": DECAY}
    return runs.ours(data, seed, KEPT, method, MODEL, local, fraction=fraction, rows=personal_rows)


HEAD = f"""## FedRep

[lgcollins/FedRep](https://github.com/lgcollins/FedRep), commit COMMIT, by the authors of FedRep: its script
`main_fedrep.py` with `LocalUpdate`, which has FedPer and LG-FedAvg too. {CLIENTS} clients of {TRAIN} training and
{TEST} test images of Fashion-MNIST of two labels each; an MLP of four layers with {HIDDEN} hidden units; full batches
at eta {LR} with momentum {MOMENTUM} and weight decay {DECAY}; {HEAD_EPOCHS} epochs of the head and one of the
representation, {EPOCHS} with the other two methods. FedRep and FedPer share all layers but the last, LG-FedAvg the
last two. Both start from the same model, the cohorts are ours.

Replaced in memory: the data, the choice of clients, `FedProx`, a tab in its module of tests, for which Python 3 refuses
the file, and the model: their MLP has a softmax before the cross entropy, which has one of its own.

An error of theirs: until a client takes part, its private layers are the tensors of the global model, which become the
average of those of each cohort. So heads leave the clients, and a client's first head is the average of the cohort
before (*from w*); it is the first model's in the other runs, as in the paper and ours.

Deviations of theirs: before PyTorch 2.0 `zero_grad` left zeros, so that momentum and weight decay moved the head on
while the representation is trained (*PyTorch 1*); weight decay is for weights and not for biases, here for both except
in one run. Not compared: after the last round all clients train their private layers alone, for at least ten epochs,
with all three methods. Clients are averaged uniformly, by samples with FEMNIST and Sent140; here they have equally
many.

Distance: between the weights of the model with which a client predicts in the two codes, relative to their distance
from the initial models; the largest of the clients.
"""


def rows_of(
    checkout: Path, compare: dict[str, Any], theirs: Callable[..., Course], ours: Callable[..., Course]
) -> Iterator[list[Any]]:
    """Rows of a table, its head first. compare: a `How` by name. theirs, ours: functions as those of this module."""
    yield ["run", "seed", *runs.HEAD]
    for seed in SEEDS:
        data, start_P = images(seed), runs.first_weights(MODEL, 10, seed)
        found = {kind: ours(data, seed, *kind) for kind in {how.ours for how in compare.values()}}
        for name, how in compare.items():
            cohorts = runs.cohorts(CLIENTS, seed, how.fraction, KEPT[-1])
            course = theirs(checkout, data, start_P, how, cohorts)
            yield from ([name, seed, *compared(course, found[how.ours], start_P, t)] for t in KEPT)


def section(checkout: Path, commit: str) -> str:
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows_of(checkout, RUNS, theirs, ours))])
