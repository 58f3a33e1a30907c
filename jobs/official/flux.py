"""FLUX beside the code of its authors, dariofenoglio98/FLUX."""

import sys
from collections.abc import Callable, Sequence
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

from cfl_ray.clustering.agreement import agreement
from cfl_ray.methods.flux import projection
from jobs.official import runs
from jobs.official.page import table
from jobs.official.pfllib import personal_rows
from jobs.official.runs import (
    Course,
    Data,
    accuracy_of,
    distance,
    groups_of,
    modules,
    quiet,
    replaced,
    rotated_mnist,
    same_groups,
    stand_in,
)

TURNS, PER_TURN, TRAIN, TEST, EPOCHS, LR, HIDDEN, EPSILON = 4, 4, 200, 50, 5, 0.1, 32, 1.0
CLUSTER_ROUND = 3
KEPT = (2, 3, 6)
SEEDS = range(2)
MODEL: dict[str, Any] = {"name": "mlp", "options": {"hidden": HIDDEN}}
LOCAL: dict[str, Any] = {"epochs": EPOCHS, "batch_size": None, "lr": LR}
OPTIONS = {"blocks": "labels", "knee": "kneedle"}  # of ours, as theirs
TURN_N = np.arange(TURNS * PER_TURN) % TURNS


@dataclass(frozen=True)
class How:
    """A comparison."""

    own_projection: bool = False  # theirs: its PCA as it is
    noise: str = ""  # theirs: as it is, or "own": drawn for each client
    as_theirs: bool = True  # options of ours, else the defaults


RUNS = {
    "the projection of ours": How(),
    "the projection of ours, defaults of ours": How(as_theirs=False),
    "its projection": How(own_projection=True),
    "its projection and noise": How(own_projection=True, noise="as it is"),
    "its projection, noise of each client": How(own_projection=True, noise="own"),
}


class Net(nn.Module):
    """The model, with the outputs that theirs looks for."""

    num_classes = 10

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(784, HIDDEN), nn.ReLU())
        self.head = nn.Linear(HIDDEN, 10)

    def forward(self, x: Tensor, latent: bool = False) -> Any:
        features_BF = self.body(x)
        return (self.head(features_BF), features_BF) if latent else self.head(features_BF)


class Projection:
    """In the place of scikit-learn's PCA: the projection of ours."""

    def __init__(self, n_components: int, seed: int) -> None:
        self.direction_FL = projection(HIDDEN, n_components, seed).numpy()

    def fit(self, points_nF: np.ndarray) -> None:
        pass

    def transform(self, features_nF: np.ndarray) -> np.ndarray:
        return np.asarray(features_nF, np.float64) @ self.direction_FL


def without_flower() -> None:
    """Stand-ins for the parts of Flower that their servers name."""

    class FedAvg:
        def __init__(self, **options: Any) -> None:
            vars(self).update(options)

    class Empty(SimpleNamespace):
        pass

    names = ("EvaluateIns", "EvaluateRes", "FitRes", "FitIns", "Parameters", "Scalar", "Metrics", "NDArrays")
    kinds = dict.fromkeys(names, Empty)
    same: dict[str, Callable[[Any], Any]] = dict.fromkeys(
        ("ndarrays_to_parameters", "parameters_to_ndarrays"), lambda value: value
    )
    proxy = SimpleNamespace(ClientProxy=Empty)
    stand_in("flwr.common", **kinds, **same)
    stand_in("flwr.common.logger", log=lambda *_: None)
    stand_in("flwr.server.client_proxy", ClientProxy=Empty)
    stand_in("flwr.server.client_manager", ClientManager=Empty, SimpleClientManager=Empty)
    server = SimpleNamespace(strategy=SimpleNamespace(FedAvg=FedAvg), client_proxy=proxy)
    stand_in("flwr", server=server, common=SimpleNamespace(**kinds))
    stand_in("seaborn")


def with_their_files(folder: Path, path: str) -> Path:
    """The working folder of their server, in this one, with what it expects to be there."""
    here, data = folder / "flux", folder / "data" / "cur_datasets"
    for part in (here / "results" / path, here / "checkpoints" / path, data):
        part.mkdir(parents=True)
    np.save(data / "n_clusters.npy", TURNS)
    return here


def trained(models: ModuleType, model: nn.Module, x: Tensor, y: Tensor, arrays: Sequence[np.ndarray]) -> list[Any]:
    """The weights of a client after the training in their client, from these."""
    model.load_state_dict(dict(zip(model.state_dict(), map(torch.from_numpy, arrays), strict=True)))
    loader = DataLoader(TensorDataset(x, y), batch_size=len(y))
    for epoch in range(EPOCHS):
        models.simple_train(model, "cpu", loader, torch.optim.SGD(model.parameters(), lr=LR), epoch)
    return [value.detach().clone().numpy() for value in model.state_dict().values()]


def theirs(checkout: Path, data: Data, start_P: Tensor, seed: int, how: How) -> Course:
    """The course of their `SaveModelStrategy` and `ModelEvaluator`, in the loop of their client."""
    course, model = Course(), Net()
    without_flower()
    sys.path.append(str(checkout / "deps"))
    cfg, models, utils, server = modules(checkout, "public.config", "public.models", "public.utils", "flux.server")
    drawn = np.random.default_rng(seed)

    def own_noise(values: list[float], epsilon: float, sensitivity: float = 1.0) -> list[float]:
        noise = drawn.laplace(0, sensitivity / epsilon, len(values))
        return list(np.asarray(values) + noise)

    named: dict[str, Any] = {
        "PCA": models.PCA if how.own_projection else lambda n_components: Projection(n_components, seed),
        "add_dp_noise": own_noise if how.noise == "own" else models.add_dp_noise,
    }
    scale = 1.0 if how.own_projection else 1 + 1e-6  # of eps
    settings = {
        "n_clients": data.clients,
        "eps_scaling": scale,
        "differential_privacy_descriptors": bool(how.noise),
        "epsilon": EPSILON,
    }
    vector_to_parameters(start_P.clone(), model.parameters())
    sent = [[value.clone().numpy() for value in model.state_dict().values()]] * data.clients
    with TemporaryDirectory() as folder, replaced(cfg, **settings), replaced(models, **named), quiet():
        here = with_their_files(Path(folder), cfg.default_path)
        scaler = server.client_descr_scaling(scaler=server.MinMaxScaler())
        strategy = server.SaveModelStrategy(
            Net(), cfg.default_path, scaler, SimpleNamespace(non_iid_type=""), accept_failures=True,
            fit_metrics_aggregation_fn=None,
        )  # fmt: skip
        with chdir(here), replaced(utils, cluster_plot=lambda *_, **__: None):
            for rounds in range(1, KEPT[-1] + 1):
                strategy.cluster_status = 1 if rounds == CLUSTER_ROUND else strategy.cluster_status
                results = []
                for client, arrays in enumerate(sent):
                    x, y, metrics = data.x[client], data.y[client], {}
                    if rounds == CLUSTER_ROUND:
                        state = dict(zip(model.state_dict(), map(torch.from_numpy, arrays), strict=True))
                        model.load_state_dict(state)
                        loader = DataLoader(TensorDataset(x, y), batch_size=len(y))
                        metrics = models.ModelEvaluator(loader, "cpu").extract_descriptors(model, client)
                    parameters = trained(models, model, x, y, arrays)
                    found = SimpleNamespace(parameters=parameters, num_examples=len(y), metrics=metrics)
                    results.append((SimpleNamespace(cid=client), found))
                strategy.aggregate_fit(rounds, results, [])
                label = strategy.cluster_labels
                sent = [
                    strategy.aggregated_cluster_parameters[label[client]] if label
                    else strategy.aggregated_parameters_global
                    for client in range(data.clients)
                ]  # fmt: skip
                course.groups[rounds] = groups_of(label.get(client, 0) for client in range(data.clients))
                rows = [torch.cat([torch.from_numpy(value).flatten() for value in arrays]) for arrays in sent]
                course.weights[rounds] = torch.stack(rows).float()
    return course


def ours(data: Data, seed: int, as_theirs: bool) -> Course:
    method = {"flux": {"cluster_round": CLUSTER_ROUND} | (OPTIONS if as_theirs else {})}
    return runs.ours(data, seed, KEPT, method, MODEL, LOCAL, rows=personal_rows)


HEAD = f"""## FLUX

[dariofenoglio98/FLUX](https://github.com/dariofenoglio98/FLUX), commit COMMIT, by the authors of FLUX: its
`SaveModelStrategy`, `ModelEvaluator`, `client_descr_scaling` and `simple_train`. {TURNS * PER_TURN} clients of {TRAIN}
training and {TEST} test images of MNIST, {PER_TURN} for each of {TURNS} rotations; an MLP with {HIDDEN} hidden units,
{EPOCHS} epochs of full batches at eta {LR}; clients are described in round {CLUSTER_ROUND}. Both start from the same
model.

Replaced in memory: Flower, of which nothing is used but names; the loaders and the model, whose features are the inputs
of the last layer; plots; and in the first two runs the projection, by that of ours. Theirs scales the values of each
label on their own, and takes eps from Kneedle (kneed 0.9.0): ours with `blocks: labels` and `knee: kneedle`. The
defaults of ours have one scale for the means of all labels and one for their standard deviations, and the distance that
is furthest below the line. The knee is often the distance of two clients that are each other's nearest neighbours, and
rounding decides in theirs whether DBSCAN finds them within eps: its `eps_scaling` is 1 + 1e-6 in the first two runs.

Errors of theirs: its projection is a PCA of 200 uniform random points, and no client's data. It sets one seed before it
draws noise, so that every client adds the same random numbers, times its sensitivity, which a server that knows the
code can subtract. The last run has noise that each client draws on its own, as much as theirs (epsilon {EPSILON:g} for
each of the 220 numbers): the clusters show what it costs.

Distance: between the weights of a client's cluster model in the two codes, relative to their distance from the initial
model; the largest of the clients. *ARI*: of the clusters with the rotations.
"""


def section(checkout: Path, commit: str) -> str:
    rows = [["run", "seed", "round", "distance", "same clusters"]]
    rows[0] += [f"{name}, {code}" for name in ("clusters", "ARI", "accuracy") for code in ("theirs", "ours")]
    model = runs.network_of(MODEL, 10).module
    for seed in SEEDS:
        data, start_P = rotated_mnist(seed, TURN_N.tolist(), TRAIN, TEST), runs.first_weights(MODEL, 10, seed)
        of_ours = {as_theirs: ours(data, seed, as_theirs) for as_theirs in (True, False)}
        for name, how in RUNS.items():
            a, b = theirs(checkout, data, start_P, seed, how), of_ours[how.as_theirs]
            for t in KEPT[-1 if how.own_projection else 0 :]:
                clusters = [str(len(run.groups[t])) for run in (a, b)]
                ari = [f"{agreement(TURN_N, labels_of(run.groups[t], len(TURN_N)))['ari']:.2f}" for run in (a, b)]
                accuracy = [f"{accuracy_of(model, run.weights[t], data):.4f}" for run in (a, b)]
                far = f"{distance(a, b, start_P, t):.1e}"
                rows.append([name, str(seed), str(t), far, same_groups(a, b, t), *clusters, *ari, *accuracy])
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows)])


def labels_of(groups: set[frozenset[int]], clients: int) -> np.ndarray:
    """The number of each client's cluster, int (N,)."""
    label_N = np.zeros(clients, int)
    for number, group in enumerate(sorted(groups, key=min)):
        label_N[list(group)] = number
    return label_N
