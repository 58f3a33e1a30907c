"""FedAS beside its implementation in PFLlib."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from jobs.official import pfllib, runs
from jobs.official.pacfl import CLIENTS, TEST, TRAIN, two_labels
from jobs.official.page import table
from jobs.official.pfllib import EPOCHS, HIDDEN, LOCAL, LR, MODEL, personal_rows
from jobs.official.runs import Course, Data, compared

ALIGN_LR = 0.01  # of their alignment
KEPT = (1, 5, 10)
SEEDS = range(2)


@dataclass(frozen=True)
class How:
    """A comparison: in theirs ..."""

    fraction: float = 1.0  # of the clients, in a round
    received: bool = True  # a client has the averaged model until it trains, as in ours
    whole: bool = True  # a client aligns its base with all samples in a batch
    chained: bool = False  # one client after another aligns the same base


RUNS = {
    "all clients": How(),
    "half": How(0.5),
    "half, first model": How(0.5, received=False),
    "all clients, alignment in batches of 16": How(whole=False),
    "all clients, chained alignment": How(chained=True),
}


def theirs(checkout: Path, data: Data, start_P: Tensor, seed: int, how: How) -> Course:
    def mended(server: type[Any]) -> type[Any]:
        class Server(server):  # type: ignore[misc, valid-type]
            def aggregate_wrt_fisher(self) -> None:
                super().aggregate_wrt_fisher()
                for client in self.clients:
                    if how.received and not client.train_time_cost["num_rounds"]:
                        client.clone_model(self.global_model, client.model)

            def send_selected_models(self, selected_ids: list[int], epoch: int) -> None:
                if not how.chained:
                    return super().send_selected_models(selected_ids, epoch)  # type: ignore[no-any-return]
                for i in sorted(selected_ids):
                    self.clients[i].set_parameters(self.global_model, epoch / self.global_rounds)

        return Server

    cohorts = runs.cohorts(CLIENTS, seed, how.fraction, KEPT[-1] + 1)
    return pfllib.theirs(checkout, "FedAS", data, start_P, cohorts, mended=mended, whole=how.whole)


def ours(data: Data, seed: int, fraction: float) -> Course:
    method = {"fedas": {"align_epochs": 1, "align_lr": ALIGN_LR}}
    return runs.ours(data, seed, KEPT, method, MODEL, LOCAL, fraction=fraction, rows=personal_rows)


HEAD = f"""## FedAS

[TsingZ0/PFLlib](https://github.com/TsingZ0/PFLlib), commit COMMIT, to which the authors of FedAS point: their
[repository](https://github.com/xiyuanyang45/FedAS) is a variant of it, and PFLlib has their `FedAS` and
`clientAS`, which are compared here. {CLIENTS} clients of {TRAIN} training and {TEST} test images of Fashion-MNIST of
two labels each; an MLP with {HIDDEN} hidden units, {EPOCHS} epochs of full batches at eta {LR}, alignment at {ALIGN_LR}
in one batch. Both start from the same model.

Replaced in memory: as for FedCAC, and `avg_generalization_metrics`, which the server of PFLlib calls after the last
round and does not have: it ends with an AttributeError before its results are saved.

Deviations in the list of our method. A client that did not take part in the first round begins from the head and the
features of the first model (*first model*), ours from the averaged model, which such clients of theirs have in the
other runs. The alignment takes batches of 16 in random order, without the rest of the samples. In the authors' own
repository, at 1a4f5fd, each client aligns the base that the client before it has aligned (*chained alignment*); PFLlib
copies the base for each.

Accuracy and distance: of the models that the clients keep after their training; distance as for FedCAC. -: some clients
of theirs still have the first model.
"""


def section(checkout: Path, commit: str) -> str:
    rows = [["run", "seed", *runs.HEAD]]
    for seed in SEEDS:
        data, start_P = two_labels(seed), runs.first_weights(MODEL, 10, seed)
        found = {fraction: ours(data, seed, fraction) for fraction in {how.fraction for how in RUNS.values()}}
        for name, how in RUNS.items():
            a = theirs(checkout, data, start_P, seed, how)
            for t in KEPT:
                line = compared(a, found[how.fraction], start_P, t)
                if (a.weights[t] == start_P).all(1).any():
                    line[1] = "-"
                rows.append([name, str(seed), *line])
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows)])
