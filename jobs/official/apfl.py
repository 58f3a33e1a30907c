"""APFL beside the code of the authors of FedRep, lgcollins/FedRep, who wrote it again to compare with."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from jobs.official import runs
from jobs.official.fedrep import DECAY, KEPT, LR, MODEL, MOMENTUM, rows_of, their_script
from jobs.official.page import table
from jobs.official.pfllib import personal_rows
from jobs.official.runs import Course, Data

EPOCHS = 3
# Changes of the text of theirs
CALL = {"w_glob_keys=w_glob_keys, lr": "lr"}  # an argument that LocalUpdateAPFL.train does not have
PLAIN = {"momentum=0.5": "momentum=0", "'weight_decay':0.0001": "'weight_decay':0"}
MIXTURE = {"self.args.alpha_apfl*w_glob[k]": "(1 - self.args.alpha_apfl)*w_glob[k]"}


@dataclass(frozen=True)
class How:
    """A comparison."""

    alpha: float = 0.5
    fraction: float = 1.0  # of the clients, in a round
    plain: bool = True  # theirs: steps without momentum and weight decay
    mixture: bool = True  # theirs: trained at alpha v_i + (1 - alpha) w_i, as ours

    @property
    def ours(self) -> tuple[float, float]:
        return self.alpha, self.fraction


RUNS = {
    "alpha 0.5": How(),
    "alpha 0.5, 30 %": How(fraction=0.3),
    "alpha 0.75": How(0.75),
    "alpha 0.5, momentum and decay": How(plain=False),
    "alpha 0.75, 0.75 (v_i + w_i)": How(0.75, mixture=False),
    "alpha 0.75, both": How(0.75, plain=False, mixture=False),
}


def theirs(checkout: Path, data: Data, start_P: Tensor, how: How, cohorts: Sequence[np.ndarray]) -> Course:
    """The method by the script `main_apfl.py` of FedRep's authors."""
    updates = (PLAIN if how.plain else {}) | (MIXTURE if how.mixture else {})
    options, undefined = {"local_ep": EPOCHS, "alpha_apfl": how.alpha}, {"accs10": 0, "loss_train": [], "times": []}
    file = checkout / "main_apfl.py"
    return their_script(file, data, start_P, cohorts, options, CALL, updates, **undefined, w_glob_keys=None)


def ours(data: Data, seed: int, alpha: float, fraction: float) -> Course:
    local = {"epochs": EPOCHS, "batch_size": None, "lr": LR}
    return runs.ours(data, seed, KEPT, {"apfl": {"alpha": alpha}}, MODEL, local, fraction=fraction, rows=personal_rows)


HEAD = f"""## APFL

[lgcollins/FedRep](https://github.com/lgcollins/FedRep), commit COMMIT: `main_apfl.py` with `LocalUpdateAPFL`, by which
the authors of FedRep compare with APFL; it is not the code of APFL's authors. Data, model, eta and cohorts are those of
[FedRep](#fedrep), with {EPOCHS} epochs. alpha is fixed, as is ours without `adaptive`.

Replaced in memory: what is replaced there, and what keeps the script from running: it uses four names that are not
defined (`w_glob_keys`, `loss_train`, `accs10`, `times`), and gives `LocalUpdateAPFL.train` and `test_img_local_all` an
argument that they do not have.

An error of theirs: v_i is trained at alpha (v_i + w_i) in the place of alpha v_i + (1 - alpha) w_i, which is the same
with alpha 0.5 alone (*0.75 (v_i + w_i)*; mended in the runs before). They test with the mixture of the paper.

A deviation of theirs: v_i and w_i take turns in one optimiser with momentum {MOMENTUM}, so that each moves on by the
gradients of the other, and the weight decay of {DECAY} in a step of v_i is that of the mixture (*momentum and decay*;
both are 0 in the other runs, as ours). Clients are averaged uniformly; here they have equally many samples. As ours,
v_i starts as the first global model that the client receives.

Distance: between the weights of the mixtures with which a client predicts in the two codes, relative to their distance
from the initial models; the largest of the clients.
"""


def section(checkout: Path, commit: str) -> str:
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows_of(checkout, RUNS, theirs, ours))])
