"""FedDrift beside the code of its authors, microsoft/FedDrift."""

import pickle
from argparse import Namespace
from contextlib import chdir
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from jobs.official import runs
from jobs.official.page import table
from jobs.official.runs import (
    Course,
    Data,
    compared,
    groups_of,
    modules,
    quiet,
    replaced,
    rotated_mnist,
    same_groups,
    stand_in,
)

# concept of each client in each time step
POINTS = ((0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0), (1, 1, 0, 0, 0, 0), (1, 1, 1, 0, 0, 0), (1, 0, 1, 0, 0, 0))
EARLY = ((0, 0, 0, 0, 0, 0), (1, 1, 0, 0, 0, 0), (1, 1, 0, 0, 0, 0))
APART = ((0, 0, 0, 1, 1, 1), (0, 0, 0, 1, 1, 1), (1, 0, 0, 1, 1, 1))
SWAP = (1, 2)  # the labels that concept 1 exchanges
CLIENTS, TRAIN, TEST, ROUNDS = 6, 200, 50, 6  # ROUNDS: of a time step
STEPS, LR = 20, 0.2
MOST = 8  # models in the pool
MODEL: dict[str, Any] = {"name": "mlp", "options": {"hidden": 0}}
SEEDS = range(2)


@dataclass(frozen=True)
class How:
    """A comparison."""

    eager: bool
    delta: float = 0.0957  # never the difference of two shares of samples
    trained: bool = True  # theirs: drift is an increase over the errors after the last step, as in ours
    points: tuple[tuple[int, ...], ...] = POINTS
    each: bool = False  # whether each client has a first model


RUNS = {
    "Eager": How(True),
    "FedDrift": How(False),
    "FedDrift, delta 0.1557": How(False, delta=0.1557),
    "FedDrift, first models, delta 0.2457": How(False, delta=0.2457, points=APART, each=True),
    "Eager, early, theirs as it is": How(True, trained=False, points=EARLY),
}


def swapped(y: Tensor, concept: int) -> Tensor:
    """The labels in a concept."""
    a, b = SWAP
    return torch.where(y == a, b, torch.where(y == b, a, y)) if concept else y


def theirs(checkout: Path, data: Data, start_P: Tensor, how: How) -> Course:
    """FedDrift by the authors' `FedAvgEnsAggregatorSoftCluster` and `FedAvgEnsTrainerSoftCluster`."""
    accuracy: list[float] = []

    def log(values: dict[str, Any]) -> None:
        accuracy.extend(value for name, value in values.items() if name == "Test/Acc")

    stand_in("wandb", run=Namespace(summary={}))
    folder = "fedml_api.distributed.fedavg_ens.FedAvgEns"
    loader, aggregator, trainer = modules(
        checkout, f"{folder}DataLoader", f"{folder}AggregatorSoftCluster", f"{folder}TrainerSoftCluster"
    )
    course = Course(accuracy)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    vector_to_parameters(start_P.clone(), model.parameters())
    models = [deepcopy(model) for _ in range(MOST)]

    class Trainer(trainer.FedAvgEnsTrainerSoftCluster):  # type: ignore[name-defined, misc]
        def train(self) -> dict[int, Any]:
            """Theirs for a model at a time, on all its data as one batch; theirs draws one of several batches."""
            own, weights, results = self.all_local_data, self.extra_info["sc_weights"], {}
            for k in range(MOST):
                parts = [own[t][0] for t in range(len(own)) if weights[t][k][self.client_index]]
                union = tuple(map(torch.cat, zip(*parts, strict=True)))
                self.all_local_data = [[union]] * len(own)
                self.extra_info = {"sc_weights": {t: w * (np.arange(MOST) == k)[:, None] for t, w in weights.items()}}
                results[k] = super().train()[k]
            self.all_local_data = own
            return results

    name = f"{100 * how.delta:g}"
    first = "F" if how.each else "C"
    args = Namespace(
        concept_drift_algo="softcluster",
        concept_drift_algo_arg=f"mmacc_{name}" if how.eager else f"H_A_{first}_1_{name}_0",
        client_num_in_total=CLIENTS, concept_num=MOST, comm_round=ROUNDS, frequency_of_the_test=1, report_client=0,
        ci=0, is_mobile=0, epochs=STEPS, client_optimizer="sgd", lr=LR, dataset="", curr_train_iteration=0,
    )  # fmt: skip
    all_data = [[[(data.x[c], swapped(data.y[c], row[c]))] for row in how.points] for c in range(CLIENTS)]
    with TemporaryDirectory() as folder, chdir(folder), replaced(loader.wandb, log=log), quiet():
        loader.SoftCluster_data_loader(args, lambda _: None, "cpu", Namespace(Barrier=lambda: None), 0)
        for t, row in enumerate(how.points):
            args.curr_train_iteration = t
            test = {c: [(data.x_test[c], swapped(data.y_test[c], row[c]))] for c in range(CLIENTS)}
            server = aggregator.FedAvgEnsAggregatorSoftCluster(
                None, None, None, None, [test] * MOST, None, all_data, CLIENTS, "cpu", models, 10, args
            )
            clients = [
                Trainer(c, None, None, None, all_data[c][: t + 1], "cpu", deepcopy(models), args)
                for c in range(CLIENTS)
            ]
            for round in range(ROUNDS):
                for c, client in enumerate(clients):
                    client.update_model(server.get_global_model_params(), server.extra_info(round))
                    server.add_local_trained_result(c, client.train())
                server.aggregate(round)
                server.test_on_all_clients(round)
            state, last = server.sc_state, (t + 1) * ROUNDS
            cluster_N = [int(state.get_test_model_idx(t, c)) for c in range(CLIENTS)]
            rows = [parameters_to_vector(models[k].parameters()).detach() for k in cluster_N]
            course.weights[last], course.groups[last] = torch.stack(rows), groups_of(cluster_N)
            for c, k in enumerate(cluster_N) if how.trained else ():
                right, number, _ = server._infer(models[k], all_data[c][t])
                state.set_acc(c, right / number)
            Path("sc_state.pkl").write_bytes(pickle.dumps(state))
    return course


def ours(data: Data, seed: int, how: How) -> Course:
    options = {"eager": how.eager, "delta": how.delta, "step_rounds": ROUNDS, "max_models": MOST}
    method = {"feddrift": options | {"first_models": "each" if how.each else "one"}}
    local: dict[str, Any] = {"steps": STEPS, "batch_size": None, "lr": LR}
    schedule: list[dict[str, Any]] = []
    if apart := np.flatnonzero(how.points[0]).tolist():
        schedule.append({"round": 1, "change": [{"clients": apart, "swap": list(SWAP)}]})
    for t, differs in enumerate(np.diff(how.points, axis=0) != 0, 1):
        # data of another step, whose values are the same in float32
        change: list[dict[str, Any]] = [{"clients": np.flatnonzero(~differs).tolist(), "brightness": 1 + t * 1e-12}]
        if differs.any():
            change.append({"clients": np.flatnonzero(differs).tolist(), "swap": list(SWAP)})
        schedule.append({"round": 1 + t * ROUNDS, "change": change})
    kept = [(t + 1) * ROUNDS for t in range(len(how.points))]
    return runs.ours(data, seed, kept, method, MODEL, local, schedule=schedule)


HEAD = f"""## FedDrift

[microsoft/FedDrift](https://github.com/microsoft/FedDrift), commit COMMIT, by the authors of FedDrift:
`FedAvgEnsAggregatorSoftCluster`, `SoftClusterState` and `FedAvgEnsTrainerSoftCluster`. {CLIENTS} clients of {TRAIN}
training and {TEST} test images of MNIST. Time steps of {ROUNDS} rounds; from step 2 on the first two clients, from step
3 on the third, and in step 4 no longer the second exchange the labels {SWAP[0]} and {SWAP[1]}; *early*: the first two
from step 1 on; *first models*: the last three always, and from step 2 on the first. Multinomial logistic regression,
{STEPS} steps of full batches at eta {LR}, all clients, delta {How(True).delta:g} of the share of wrong predictions.
Both start from the same model; with *first models* every client has a copy of it (`first_models: each`, `H_A_F`).

Replaced in memory: the messages of MPI, `wandb`, the data, and the batch of a step, which is all data of a client's
model here and one of several batches there. In both codes every step has new data of all clients, here the same
images.

Deviations of their code, in the list of our method: it merges after clients took models and new models were made for
this step, with the new data, where ours merges before (no models merge with delta {How(True).delta:g}); models without
a client in the present step are not trained; FedDrift begins with a model for each client. An error of theirs: drift is
an increase over the errors *before* the training of the last step, in step 1 over those of the untrained model, so that
no drift is found in step 1 (*theirs as it is*), nor at a client whose data drifted in the last step. In the other runs
theirs is given the errors after the training, which ours has.

Distance: between the weights of a client's model in the two codes, relative to their distance from the initial model;
the largest of the clients. *Clients*: those of each model.
"""


def section(checkout: Path, commit: str) -> str:
    rows = [["run", "seed", "step", "clients, theirs", "clients, ours", "same", *runs.HEAD]]
    for name, how in RUNS.items():
        for seed in SEEDS:
            data = rotated_mnist(seed, [0] * CLIENTS, TRAIN, TEST)
            start_P = runs.first_weights(MODEL, 10, seed)
            a, b = theirs(checkout, data, start_P, how), ours(data, seed, how)
            for step in range(1, len(how.points)):
                t = (step + 1) * ROUNDS
                sizes = [", ".join(map(str, x.sizes(t))) for x in (a, b)]
                rows.append([name, str(seed), str(step), *sizes, same_groups(a, b, t), *compared(a, b, start_P, t)])
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows)])
