"""pFedMe beside the code of its authors, CharlieDinh/pFedMe."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import TensorDataset

from jobs.official import runs
from jobs.official.pacfl import CLIENTS, TEST, TRAIN, two_labels
from jobs.official.page import table
from jobs.official.runs import Course, Data, accuracy_of, distance, modules, quiet, replaced, stand_in

LAM, K, PERSONAL_LR, ETA = 15.0, 5, 0.02, 0.005
MODEL: dict[str, Any] = {"name": "mlp", "options": {"hidden": 0}}  # their Mclr_Logistic
KEPT = (1, 5, 10)
SEEDS = range(2)


@dataclass(frozen=True)
class How:
    """A comparison."""

    steps: int  # R
    from_w: bool  # theirs: theta_i starts from w_i at a new batch, as in the paper
    fraction: float = 1.0  # of the clients, in a round
    beta: float = 1.0


RUNS = {
    "R = 1": How(1, False),
    "R = 20, theta_i from w_i": How(20, True),
    "R = 20, theta_i from w_i, a quarter of the clients, beta 2": How(20, True, 0.25, 2.0),
    "R = 20": How(20, False),
}


@dataclass
class Models:
    """The personal models theta_i, and w: its accuracy is that of w_i, its weights (1, P) those of the global w."""

    theta: Course
    w: Course


def theirs(checkout: Path, data: Data, start_P: Tensor, how: How, cohorts: Sequence[np.ndarray]) -> Models:
    """The method by the authors' `pFedMe` and `UserpFedMe`, with these cohorts."""
    stand_in("h5py")
    servers, users, models = modules(
        checkout, "FLAlgorithms.servers.serverpFedMe", "FLAlgorithms.users.userpFedMe", "FLAlgorithms.trainmodel.models"
    )
    run, model = Models(Course(), Course()), models.Mclr_Logistic()
    vector_to_parameters(start_P.clone(), model.parameters())

    class User(users.UserpFedMe):  # type: ignore[name-defined, misc]
        def get_next_train_batch(self) -> tuple[Tensor, Tensor]:
            if how.from_w:
                self.update_parameters(self.local_model)
            return super().get_next_train_batch()  # type: ignore[no-any-return]

        def train(self, epochs: int) -> None:
            super().train(epochs)
            self.trained_P = self.before_P

        def update_parameters(self, new_params: Any) -> None:
            self.before_P = parameters_to_vector(self.model.parameters()).detach()  # theta_i at the end of `train`
            super().update_parameters(new_params)

    class Server(servers.pFedMe):  # type: ignore[name-defined, misc]
        def select_users(self, round: int, num_users: int) -> list[Any]:
            return [self.users[i] for i in cohorts[round]]

        def persionalized_aggregate_parameters(self) -> None:
            super().persionalized_aggregate_parameters()
            rounds = len(run.theta.accuracy) + 1
            theta_NP = torch.stack([user.trained_P for user in self.users])
            run.theta.accuracy.append(accuracy_of(model, theta_NP, data))
            run.theta.weights[rounds] = theta_NP
            run.w.weights[rounds] = parameters_to_vector(self.model.parameters()).detach()[None]

        def save_results(self) -> None:
            pass

        save_model = save_results

    def read_data(_: str) -> tuple[list[int]]:
        return (list(range(data.clients)),)

    def read_user_data(i: int, *_: Any) -> tuple[int, TensorDataset, TensorDataset]:
        return i, TensorDataset(data.x[i], data.y[i]), TensorDataset(data.x_test[i], data.y_test[i])

    with replaced(servers, UserpFedMe=User, read_data=read_data, read_user_data=read_user_data), quiet():
        server = Server(
            device="cpu", dataset="ours", algorithm="pFedMe", model=(model, "mclr"), batch_size=TRAIN,
            learning_rate=ETA, beta=how.beta, lamda=LAM, num_glob_iters=len(cohorts), local_epochs=how.steps,
            optimizer="SGD", num_users=0, K=K, personal_learning_rate=PERSONAL_LR, times=0,
        )  # fmt: skip
        server.train()
    run.w.accuracy = server.rs_glob_acc_per
    return run


def personal_models(result: Any) -> Tensor:
    """The models (clients, P) that the clients keep; NaN before their first training."""
    trained = result.trained
    rows = [trained.backend.client_state("personal", client) for client in range(CLIENTS)]
    return torch.stack([torch.full_like(trained.state.models_KP[0], torch.nan) if row is None else row for row in rows])


def ours(data: Data, seed: int, how: How) -> Models:
    def run(predict: str, rows: Callable[[Any], Tensor]) -> Course:
        options = {"lam": LAM, "inner_steps": K, "personal_lr": PERSONAL_LR, "eta": ETA, "beta": how.beta}
        method = {"pfedme": {**options, "predict": predict, "weights": "samples"}}
        local: dict[str, Any] = {"steps": how.steps, "batch_size": None}
        return runs.ours(data, seed, KEPT, method, MODEL, local, fraction=how.fraction, rows=rows)

    return Models(run("theta", personal_models), run("w", lambda result: result.trained.state.models_KP))


HEAD = f"""## pFedMe

[CharlieDinh/pFedMe](https://github.com/CharlieDinh/pFedMe), commit COMMIT, by the authors of pFedMe: its server
`pFedMe`, `UserpFedMe`, `pFedMeOptimizer` and `Mclr_Logistic`. {CLIENTS} clients of {TRAIN} training and {TEST} test
images of Fashion-MNIST of two labels each; full batches, K = {K} steps at eta_p {PERSONAL_LR}, lambda {LAM:g},
eta {ETA}. Both start from the same model.

Replaced in memory: the data, the choice of clients, so that both have the same cohorts, and `h5py` with what is saved
in the end. *theta_i from w_i*: theirs goes on from the last theta_i at a new batch, the paper (and ours) from w_i; in
these runs it is reset to w_i before each batch. With R = 1 there is no difference. A listed deviation: theirs averages
w_i by samples, as ours with `weights: samples` does here; all clients have equally many.

Accuracy: of w_i, which theirs prints under the name of the personal model, and ours has with `predict: w`; and of
theta_i, which theirs overwrites: it is read before that. Theirs trains all clients in every round, ours the cohort
alone: with a quarter of the clients w alone is compared.

Distance: between the weights in the two codes, relative to their distance from the initial models; of theta_i the
largest of the clients.
"""


def section(checkout: Path, commit: str) -> str:
    accuracy = [f"accuracy of {model}, {code}" for model in ("w_i", "theta_i") for code in ("theirs", "ours")]
    rows = [["run", "seed", "round", "distance, w", "theta_i", *accuracy]]
    for name, how in RUNS.items():
        for seed in SEEDS:
            data, start_P = two_labels(seed), runs.first_weights(MODEL, 10, seed)
            cohorts = runs.cohorts(CLIENTS, seed, how.fraction, KEPT[-1])
            a, b = theirs(checkout, data, start_P, how, cohorts), ours(data, seed, how)
            for t in KEPT:
                found = [f"{distance(a.w, b.w, start_P, t):.1e}"]
                if how.fraction == 1:
                    found.append(f"{distance(a.theta, b.theta, start_P, t):.1e}")
                    found += [f"{x.accuracy[t - 1]:.4f}" for x in (a.w, b.w, a.theta, b.theta)]
                rows.append([name, str(seed), str(t), *found, *["-"] * (len(rows[0]) - 3 - len(found))])
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows)])
