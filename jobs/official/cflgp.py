"""CFL-GP beside the code of its authors."""

from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from sklearn.metrics import adjusted_rand_score
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import TensorDataset

from jobs.official import runs
from jobs.official.page import table
from jobs.official.runs import Course, Data, compared, groups_of, modules, quiet, stand_in

ANGLES, K, PER_ANGLE, TRAIN, TEST = (0, 15, 90, 105, 180, 195, 270, 275), 4, 4, 200, 50
CLIENTS, LR = PER_ANGLE * len(ANGLES), 0.1
MODEL: dict[str, Any] = {"name": "mlp", "options": {"hidden": 200}}  # their SimpleLinear
KEPT = (1, 10, 20)
SEEDS = range(2)


def rotated(seed: int) -> Data:
    """The images of `PER_ANGLE` clients for each of their angles."""
    from torchvision.transforms.functional import rotate  # here, because it takes two seconds

    data = runs.rotated_mnist(seed, [0] * CLIENTS, TRAIN, TEST)

    def turned(x: Tensor) -> Tensor:
        return torch.stack([rotate(part, ANGLES[i // PER_ANGLE]) for i, part in enumerate(x)])

    return Data(turned(data.x), data.y, turned(data.x_test), data.y_test)


def ari(groups: set[frozenset[int]]) -> float:
    """Agreement of clusters with the four pairs of angles."""
    found = {client: k for k, members in enumerate(groups) for client in members}
    return float(
        adjusted_rand_score([i // (2 * PER_ANGLE) for i in range(CLIENTS)], [found[i] for i in range(CLIENTS)])
    )


def theirs(checkout: Path, data: Data, start_P: Tensor, seed: int, equal: bool) -> Course:
    """The method by the authors' `CentralUnit` and `Client`; equal: all K models start as `start_P`, else the first."""

    stand_in("torch.utils.tensorboard", SummaryWriter=lambda **_: SimpleNamespace(flush=lambda: None))
    units, clients, models, config = modules(
        checkout,
        "learning_agent.central_unit",
        "learning_agent.client",
        "model.neural_networks.simple_neural_classification.simple_linear",
        "global_config",
    )
    units.tqdm = lambda sequence: sequence
    config.global_logger.setLevel("ERROR")
    run, done = Course(), [0] * CLIENTS
    parts: list[list[tuple[Tensor, float]]] = [[] for _ in range(KEPT[-1])]

    class Client(clients.Client):  # type: ignore[name-defined, misc]
        def performance_evaluation(self, dataset_type: str, device: str) -> tuple[float, None]:
            """Their test at the beginning of a round, with the model after the round before."""
            accuracy, _ = super().performance_evaluation(dataset_type=dataset_type, device=device)
            if 0 < done[self.number] <= len(parts):
                row_P = parameters_to_vector(self.local_model.parameters()).detach()
                parts[done[self.number] - 1].append((row_P, accuracy))
                run.groups[done[self.number]] = groups_of(unit.estimated_cluster_ids)
            done[self.number] += 1
            return accuracy, None

    torch.manual_seed(seed)
    made = []
    for i in range(CLIENTS):
        train, test = TensorDataset(data.x[i], data.y[i]), TensorDataset(data.x_test[i], data.y_test[i])
        made.append(Client(
            models.SimpleLinear, lambda weights: torch.optim.SGD(weights, lr=LR), train, test, use_scheduler=False,
            batch_size=TRAIN, train_dataset_ratio=1.0, local_update_epoch=1, task="classification", device="cpu",
        ))  # fmt: skip
        made[i].number = i
    with TemporaryDirectory() as folder:
        unit = units.CentralUnit(
            models.SimpleLinear, made, name="run", clustering_period=2, n_communication_rounds=KEPT[-1] + 1,
            learning_rate=LR, n_models=K, results_path_name=folder, load=False, optimizer_name="sgd",
            algorithm="CFLGP", evaluation_interval=1, protocol="gradient_averaging", subprotocol="no_subprotocol",
            task="classification", use_reduced_G=False, unknown_k=False, warmup_epoch=0,
            clustering_termination_threshold=10, device="cpu",
        )  # fmt: skip
        for model in unit.models[: K if equal else 1]:
            vector_to_parameters(start_P.clone(), model.parameters())
        with quiet():
            unit.train()
    for t, found in enumerate(parts, 1):
        run.weights[t] = torch.stack([row_P for row_P, _ in found])
        run.accuracy.append(sum(accuracy for _, accuracy in found) / CLIENTS)
    return run


def ours(data: Data, seed: int) -> Course:
    method = {"cflgp": {"num_clusters": K, "criterion": "first", "weights": "uniform"}}
    return runs.ours(data, seed, KEPT, method, MODEL, {"steps": 1, "batch_size": None, "lr": LR})


HEAD = f"""## CFL-GP

[Heasung-Kim/clustered-federated-learning-via-gradient-based-partitioning](https://github.com/Heasung-Kim/clustered-federated-learning-via-gradient-based-partitioning),
commit COMMIT, by the authors of CFL-GP: its `CentralUnit`, `Client` and `SimpleLinear`, an MLP with 200 hidden units.
{CLIENTS} clients of {TRAIN} training and {TEST} test images of MNIST, {PER_ANGLE} for each of their eight angles
{str(ANGLES)[1:-1]}; K = {K}, one step of full batches at eta {LR} in a round (their gradient averaging), all clients.

Replaced in memory: the data, TensorBoard, progress bars. Deviations of their code from the paper: the updates that are
compared are from the model of a client's own cluster; beta is 1 until round 8 and 1/2 in round 9, the last with a
clustering; they begin with K models of their own, to which the changes from the first model are added. Ours with
`criterion: first` compares updates from the first model in all rounds and begins with that model alone. So *equal*
begins theirs with K equal models; *own* is theirs as it is, from the same first model, beside the same run of ours.

*ARI*: of the clusters with the four pairs of angles. Distance: between the weights of a client's cluster model in the
two codes, relative to their distance from the initial models; the largest of the clients.
"""


def section(checkout: Path, commit: str) -> str:
    rows = [["models", "seed", *runs.HEAD, "ARI, theirs", "ARI, ours"]]
    for seed in SEEDS:
        data, start_P = rotated(seed), runs.first_weights(MODEL, 10, seed)
        b = ours(data, seed)
        for equal in (True, False):
            a = theirs(checkout, data, start_P, seed, equal)
            for t in KEPT:
                round, apart, *accuracy = compared(a, b, start_P, t)
                agreement = [f"{ari(x.groups[t]):.2f}" for x in (a, b)]
                models = ["equal", str(seed), round, apart] if equal else ["own", str(seed), round, "-"]
                rows.append([*models, *accuracy, *agreement])
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows)])
