"""FedCAC beside its implementation in PFLlib."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jobs.official import pfllib, runs
from jobs.official.pacfl import CLIENTS, TEST, TRAIN, two_labels
from jobs.official.page import table
from jobs.official.pfllib import EPOCHS, HIDDEN, MODEL, personal_rows
from jobs.official.runs import Course, Data, compared

TAU, BETA, LR = 0.5, 20, 0.1
LOCAL: dict[str, Any] = pfllib.LOCAL | {"lr": LR}
KEPT = (1, 5, 10)
SEEDS = range(2)


@dataclass(frozen=True)
class How:
    """A comparison."""

    fraction: float = 1.0  # of the clients, in a round
    customised: bool = True  # theirs: also in the first round, as in the paper


RUNS = {"all clients": How(), "half": How(fraction=0.5), "all clients, first round as it is": How(customised=False)}


@dataclass
class Masks:
    """The critical parameters in the rounds of a run."""

    course: Course = field(default_factory=Course)
    masks: dict[int, Tensor] = field(default_factory=dict)  # bool (N, P); none of a client that has not trained


def customised(server: type[Any]) -> type[Any]:
    """Their server; it makes the u_i of the first round too."""

    class Server(server):  # type: ignore[misc, valid-type]
        def aggregate_parameters(self) -> None:
            super().aggregate_parameters()
            if self.epoch == 0:
                self.get_customized_global_models()

    return Server


def theirs(checkout: Path, data: Data, start_P: Tensor, seed: int, how: How) -> Masks:
    run, none_P = Masks(), torch.zeros(len(start_P), dtype=torch.bool)

    def look(server: Any, rounds: int) -> None:
        masks = [client.critical_parameter for client in server.clients]
        run.masks[rounds] = torch.stack([none_P if mask is None else mask.bool() for mask in masks])

    cohorts = runs.cohorts(CLIENTS, seed, how.fraction, KEPT[-1] + 1)
    settings = {"tau": TAU, "beta": BETA, "local_learning_rate": LR}
    mended = customised if how.customised else lambda server: server
    run.course = pfllib.theirs(checkout, "FedCAC", data, start_P, cohorts, settings, mended=mended, look=look)
    return run


def ours(data: Data, seed: int, fraction: float) -> Masks:
    run = Masks()

    def look(result: Any, rounds: int) -> None:
        state = result.trained.state
        run.masks[rounds] = torch.zeros(data.clients, state.mask_SP.shape[1], dtype=torch.bool)
        run.masks[rounds][state.seen_S] = state.mask_SP

    method = {"fedcac": {"tau": TAU, "beta": BETA}}
    run.course = runs.ours(data, seed, KEPT, method, MODEL, LOCAL, look=look, fraction=fraction, rows=personal_rows)
    return run


HEAD = f"""## FedCAC

[TsingZ0/PFLlib](https://github.com/TsingZ0/PFLlib), commit COMMIT, second-hand: its `FedCAC` and `clientCAC` are
near copies of the code of FedCAC's authors, which is a part of
[kxzxvbk/Fling](https://github.com/kxzxvbk/Fling/blob/f6c6f1e/fling/component/group/fedcac_group.py). {CLIENTS} clients
of {TRAIN} training and {TEST} test images of Fashion-MNIST of two labels each; an MLP with {HIDDEN} hidden units,
{EPOCHS} epochs of full batches at eta {LR}, tau {TAU}, beta {BETA}. Both start from the same model.

Replaced in memory: the data and the loaders, the choice of clients, so that both have the same cohorts, the order of
the clients in averages, which is random in theirs, `h5py` with what is saved in the end, and the test.

An error of PFLlib, which Fling does not have: after the first round it makes no customised models u_i, so that the
critical parameters of all clients go back to those of the first model (*first round as it is*); in the other runs the
server makes them in that round too. A deviation in the list of our method, of both libraries: if the tau n-th largest
value of c is at most 1e-10, all values that are not 0 are critical.

Accuracy and distance: of the models from which the clients start their next round. Distance: between the weights in the
two codes, relative to their distance from the initial models; the largest of the clients. *Bits*: of the masks m_i of
all clients, those that differ.
"""


def section(checkout: Path, commit: str) -> str:
    rows = [["run", "seed", *runs.HEAD, "bits"]]
    for seed in SEEDS:
        data, start_P = two_labels(seed), runs.first_weights(MODEL, 10, seed)
        found = {fraction: ours(data, seed, fraction) for fraction in {how.fraction for how in RUNS.values()}}
        for name, how in RUNS.items():
            a, b = theirs(checkout, data, start_P, seed, how), found[how.fraction]
            for t in KEPT:
                bits = int((a.masks[t] != b.masks[t]).sum())
                rows.append(
                    [name, str(seed), *compared(a.course, b.course, start_P, t), f"{bits} of {a.masks[t].numel()}"]
                )
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows)])
