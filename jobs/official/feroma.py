"""Feroma beside the code of its authors, dariofenoglio98/FEROMA."""

from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

from jobs.official import runs
from jobs.official.flux import EPOCHS, HIDDEN, LOCAL, LR, MODEL, Net, Projection, trained, without_flower
from jobs.official.page import table
from jobs.official.runs import Course, Data, accuracy_of, distance, modules, quiet, replaced, rotated_mnist, stand_in

TURNS, PER_TURN, TRAIN, TEST, WARMUP = 4, 3, 200, 50, 2
CLIENTS = TURNS * PER_TURN
MOVES = (4, 6)  # rounds in which each client takes over the data of the next one
KEPT = (3, 4, 7)
SEEDS = range(2)
INVERSE: dict[str, Any] = {"weighting": "inverse", "blocks": "labels"}


@dataclass(frozen=True)
class How:
    """A comparison."""

    fixed: bool = True  # theirs: results arrive in one order in all rounds
    ours: str = "inverse"  # weighting


RUNS = {
    "results in one order": How(),
    "results in the order of their arrival": How(fixed=False),
    "results in one order, ours `weighting: softmax`": How(ours="softmax"),
}


def moved(data: Data, rounds: int) -> Data:
    """The data of the clients in a round."""
    order = np.roll(np.arange(data.clients), -sum(move <= rounds for move in MOVES))
    return Data(*(values[torch.from_numpy(order)] for values in (data.x, data.y, data.x_test, data.y_test)))


def theirs(checkout: Path, data: Data, start_P: Tensor, seed: int, fixed: bool) -> Course:
    """The course of their `SaveModelStrategy` and `ModelEvaluator`, in the loop of their client.

    fixed: results arrive in one order in all rounds.
    """
    course, model, drawn = Course(), Net(), np.random.default_rng(seed)
    without_flower()
    stand_in("kneed", KneeLocator=None)
    stand_in("modified_flwr", app=None)
    stand_in("modified_flwr.server", Server=None)
    cfg, models, server = modules(checkout, "public.config", "public.models", "feroma.server")
    vector_to_parameters(start_P.clone(), model.parameters())
    sent = last = [[value.clone().numpy() for value in model.state_dict().values()]] * data.clients
    extractor = Net()
    with (
        TemporaryDirectory() as folder,
        chdir(folder),
        replaced(cfg, n_clients=data.clients, n_rounds=KEPT[-1] + 1, random_seed=seed),
        replaced(models, PCA=lambda n_components: Projection(n_components, seed)),
        quiet(),
    ):
        for part in ("results", "checkpoints"):
            (Path(folder) / part / cfg.default_path).mkdir(parents=True)
        scaler = server.client_descr_scaling(scaler=server.MinMaxScaler())
        strategy = server.SaveModelStrategy(
            Net(), cfg.default_path, scaler, accept_failures=True, fit_metrics_aggregation_fn=None
        )
        for rounds in range(1, KEPT[-1] + 1):
            now = moved(data, rounds)
            if rounds > WARMUP:
                order = np.arange(data.clients) if fixed else drawn.permutation(data.clients)
                results = []
                for client in order.tolist():
                    loader = DataLoader(TensorDataset(now.x[client], now.y[client]), batch_size=TRAIN)
                    metrics = models.ModelEvaluator(loader, "cpu").extract_descriptors(extractor, client)
                    found = SimpleNamespace(parameters=last[client], num_examples=TRAIN, metrics=metrics)
                    results.append((SimpleNamespace(cid=client), found))
                strategy.aggregate_fit(rounds, results, [], descriptor_extraction=True)
                sent = [strategy.aggregated_client_parameters[client] for client in range(data.clients)]
            last = [trained(models, model, *pair, arrays) for *pair, arrays in zip(now.x, now.y, sent, strict=True)]
            if rounds <= WARMUP:
                results = [
                    (SimpleNamespace(cid=client), SimpleNamespace(parameters=arrays, num_examples=TRAIN, metrics={}))
                    for client, arrays in enumerate(last)
                ]
                strategy.aggregate_fit(rounds, results, [])
                sent = [strategy.aggregated_parameters_global] * data.clients
            if rounds == WARMUP:
                strategy.fedavg = False
                arrays = map(torch.from_numpy, strategy.aggregated_parameters_global)
                extractor.load_state_dict(dict(zip(extractor.state_dict(), arrays, strict=True)))
            rows = [torch.cat([torch.from_numpy(value).flatten() for value in arrays]) for arrays in last]
            course.weights[rounds] = torch.stack(rows).float()
    return course


def ours(data: Data, seed: int, options: dict[str, Any]) -> Course:
    everyone = list(range(data.clients))
    schedule = [
        {"round": move, "change": [{"clients": everyone, "data_of": everyone[1:] + everyone[:1]}]} for move in MOVES
    ]

    def rows(result: Any) -> Tensor:
        state = result.trained.state
        return state.own_SP[torch.from_numpy(np.argsort(state.seen_S))]

    method = {"feroma": {"warmup_rounds": WARMUP} | options}
    return runs.ours(data, seed, KEPT, method, MODEL, LOCAL, rows=rows, schedule=schedule)


HEAD = f"""## Feroma

[dariofenoglio98/FEROMA](https://github.com/dariofenoglio98/FEROMA), commit COMMIT, by the authors of Feroma: its
`SaveModelStrategy`, `ModelEvaluator`, `client_descr_scaling` and `simple_train`. {CLIENTS} clients of {TRAIN} training
and {TEST} test images of MNIST, {PER_TURN} for each of {TURNS} rotations; an MLP with {HIDDEN} hidden units, {EPOCHS}
epochs of full batches at eta {LR}, {WARMUP} rounds of FedAvg. In the rounds {MOVES[0]} and {MOVES[1]} each client takes
over the data of the next one, which has another rotation. Both start from the same model.

Replaced in memory: as for FLUX, also the projection; and profiles are of all training images (theirs: of random halves
of validation images). Options of ours: `weighting: inverse`, in the last run its default, and `blocks: labels`.

An error of theirs: the profiles of a round stay in the order in which results arrived, and are used for the models of
the next round in the order of that round. In one order, as here else, nothing goes wrong; with orders as of a network
(random here) the weights of a client belong to other models.

Distance: between the models of a client after its training in the two codes, relative to their distance from the
initial model; the largest of the clients. *Rounding*: that of theirs, in one order, from itself with first weights that
differ by 1e-7 of their size, at random. Accuracy: of these models, on test images of the client's present data.
"""


def section(checkout: Path, commit: str) -> str:
    rows, model = [["run", "seed", *runs.HEAD, "rounding"]], runs.network_of(MODEL, 10).module
    for seed in SEEDS:
        data = rotated_mnist(seed, [i % TURNS for i in range(CLIENTS)], TRAIN, TEST)
        start_P = runs.first_weights(MODEL, 10, seed)
        of_ours = {
            weighting: ours(data, seed, INVERSE | {"weighting": weighting}) for weighting in ("inverse", "softmax")
        }
        of_theirs = {fixed: theirs(checkout, data, start_P, seed, fixed) for fixed in (True, False)}
        again = theirs(checkout, data, runs.rounded(start_P)[0], seed, True)
        for name, how in RUNS.items():
            a, b = of_theirs[how.fixed], of_ours[how.ours]
            for t in KEPT:
                accuracy = [f"{accuracy_of(model, run.weights[t], moved(data, t)):.4f}" for run in (a, b)]
                far = [f"{distance(*pair, start_P, t):.1e}" for pair in ((a, b), (of_theirs[True], again))]
                rows.append([name, str(seed), str(t), far[0], *accuracy, far[1]])
    return "\n".join([HEAD.replace("COMMIT", commit), *table(*rows)])
