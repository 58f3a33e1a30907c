"""FL-bench's servers and clients beside our runs with `protocol: fl_bench`: their division, their scores."""

import contextlib
import io
import json
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from jobs.coming_from.measured import HIDDEN, MODEL, Client, ours, side_by_side
from jobs.official.page import table
from jobs.official.runs import first_weights, images, modules, replaced, stand_in

CLIENTS, IMAGES, ROUNDS, EVERY, SEEDS = 40, 6000, 10, 5, range(3)
LR, EPOCHS, BATCH = 0.01, 5, 32
Server = Any  # of theirs


def divided(checkout: Path) -> list[Client]:
    """The clients that their `dirichlet` makes of images of MNIST, alpha 0.1, a quarter of each for tests."""
    prepare(checkout)
    (scheme,) = modules(checkout, "data.utils.schemes.dirichlet")
    x, y = (part[:IMAGES].numpy() for part in images("mnist", 0))
    partition: dict[str, Any] = {}
    stats: dict[int, dict[str, Any]] = defaultdict(dict)
    np.random.seed(0)
    scheme.dirichlet(y, np.arange(IMAGES), set(range(10)), CLIENTS, 0.1, 10, partition, stats)
    clients = []
    for rows in partition["data_indices"]:
        np.random.shuffle(rows)
        test = int(len(rows) * 0.25)
        clients.append(Client(x[rows[test:]], y[rows[test:]], x[rows[:test]], y[rows[:test]]))
    return clients


def prepare(checkout: Path) -> None:
    """Modules that the checkout imports and that are not needed, and the libraries beside it."""
    hydra = SimpleNamespace(get=lambda: SimpleNamespace(runtime=SimpleNamespace(output_dir="out")))
    for name, values in {
        "hydra": {}, "hydra.core": {}, "hydra.core.hydra_config": {"HydraConfig": hydra}, "pynvml": {}
    }.items():  # fmt: skip
        stand_in(name, **values)
    if (libraries := str(checkout / "deps")) not in sys.path:
        sys.path.append(libraries)


def theirs(
    checkout: Path,
    name: str,
    clients: Sequence[Client],
    first_P: Tensor,
    seed: int,
    settings: dict[str, Any] | None = None,
    mended: Callable[[type[Server]], type[Server]] = lambda server: server,
    optimizer: dict[str, Any] | None = None,
    hidden: int = HIDDEN,
    **common: Any,
) -> Server:
    """Their server of the file `name` after all rounds. settings: of the method; common: keys of that group."""
    prepare(checkout)
    base, server, models, functional, datasets, omegaconf = modules(
        checkout,
        "src.server.fedavg",
        f"src.server.{name}",
        "src.utils.models",
        "src.utils.functional",
        "data.utils.datasets",
        "omegaconf",
    )
    kind = next(of for key, of in vars(server).items() if key.lower() == f"{name}server")
    size = clients[0].x[0].size

    class Perceptron(models.DecoupledModel):  # type: ignore[misc]
        def __init__(self, **_: Any) -> None:
            super().__init__()
            inner = (nn.Linear(size, hidden), nn.ReLU()) if hidden else ()
            self.base = nn.Sequential(nn.Flatten(), *inner)
            self.classifier = nn.Linear(hidden or size, 10)
            vector_to_parameters(first_P.clone(), self.parameters())

    parts = [(client.x, client.y) for client in clients] + [(client.x_test, client.y_test) for client in clients]
    ends = np.cumsum([0, *(len(y) for _, y in parts)])
    rows = [np.arange(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]
    x, y = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts, strict=True))
    own = [{"train": rows[i], "val": [], "test": rows[len(clients) + i]} for i in range(len(clients))]
    ids = list(range(len(clients)))
    separation = {"train": ids, "val": ids, "test": ids, "total": len(ids)}

    class Own(mended(kind)):  # type: ignore[misc]
        def get_dataset(self) -> Any:
            return datasets.BaseDataset(x, y, list(range(10)))

    given: dict[str, Any] = {
        "seed": seed, "global_epoch": ROUNDS, "use_cuda": False, "save_log": False, "save_learning_curve_plot": False,
        "save_metrics": False, "client_side_evaluation": False, "test": {"client": {"interval": EVERY}}, **common,
    }  # fmt: skip
    config = {"method": name, "common": given, "optimizer": optimizer or {}} | ({name: settings} if settings else {})
    with TemporaryDirectory() as folder:
        place = Path(folder) / "data" / "mnist"
        place.mkdir(parents=True)
        (place / "partition.pkl").write_bytes(pickle.dumps({"separation": separation, "data_indices": own}))
        (place / "args.json").write_text(json.dumps({"split": "sample", "monitor_window_name_suffix": ""}))
        with (
            replaced(base, FLBENCH_ROOT=Path(folder), MODELS={"lenet5": Perceptron}),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            arguments = functional.parse_args(
                omegaconf.OmegaConf.create(config), name, getattr(kind, "get_hyperparams", None)
            )
            made = Own(arguments)
            made.train()
    return made


def score_of(made: Server) -> float:
    """The best accuracy of the evaluated rounds that it prints, 0..1."""
    found = [of["all_clients"]["before"]["test"].accuracy for of in made.test_results.values()]
    return float(max(found)) / 100


@dataclass(frozen=True)
class Row:
    """A method in both codes."""

    label: str
    theirs: str  # the file of their server
    ours: Any
    settings: dict[str, Any] = field(default_factory=dict)
    mended: Callable[[type[Server]], type[Server]] = lambda server: server


def own_weights(server: type[Server]) -> type[Server]:
    """FedALA's server whose clients have weights W and a local model each."""

    class Worker(server.client_cls):  # type: ignore[misc, name-defined]
        kept: dict[int, tuple[Any, bool, Any]]

        def set_parameters(self, package: dict[str, Any]) -> None:
            first = package["regular_model_params"]
            self.kept = getattr(self, "kept", {})
            self.weights, self.start_phase, state = self.kept.get(package["client_id"], (None, True, first))
            self.model.load_state_dict(state)
            if package["client_id"] in self.kept:
                super().set_parameters(package)
            else:  # in its first round a client begins with the received model
                self.client_id, self.local_epoch = package["client_id"], package["local_epoch"]
                self.load_data_indices()
            if self.testing is False and package["client_id"] in self.kept:
                self.kept[self.client_id] = (self.weights, self.start_phase, state)

        def train(self, package: dict[str, Any]) -> Any:
            result = super().train(package)
            state = {key: value.clone() for key, value in self.model.state_dict().items()}
            self.kept[self.client_id] = (self.weights, self.start_phase, state)
            return result

    return type("Mended", (server,), {"client_cls": Worker})


def with_c_local(server: type[Server]) -> type[Server]:
    """SCAFFOLD's server that stores the new c_i of the clients."""

    class Mended(server):  # type: ignore[misc, valid-type]
        def aggregate_client_updates(self, packages: dict[int, Any]) -> None:
            super().aggregate_client_updates(packages)
            for client, package in packages.items():
                pairs = zip(self.c_local[client], package["c_delta"], strict=True)
                self.c_local[client] = [c + delta for c, delta in pairs]

    return Mended


ROWS = (
    Row("FedAvg", "fedavg", "fedavg"),
    Row("FedPer", "fedper", "fedper"),
    Row("Ditto, `pers_epoch=5`", "ditto", {"ditto": {"lam": 1.0}}, {"pers_epoch": 5}),
    Row("APFL, `adaptive_alpha=0`", "apfl", {"apfl": {"alpha": 0.5}}, {"adaptive_alpha": 0}),
    Row("FedProto", "fedproto", {"fedproto": {"weights": "uniform", "prototypes": "running", "predict": "classifier"}}),
    Row("MOON", "moon", {"moon": {"mu": 5.0, "tau": 0.5, "first": "initial"}}),
    Row("FedALA", "fedala", {"fedala": {"layers": 1}}),
    Row("FedALA, own W and v in theirs", "fedala", {"fedala": {"layers": 1}}, mended=own_weights),
    Row("pFedMe", "pfedme", {"pfedme": {"lam": 15.0, "personal_lr": 0.01, "weights": "samples"}}),
    Row("SCAFFOLD, of 5 batches a round", "scaffold", {"scaffold": {"local": {"steps": 5}}}),
    Row("SCAFFOLD, c_i stored in theirs", "scaffold", {"scaffold": {"local": {"steps": 5}}}, mended=with_c_local),
)

HEAD = f"""## Measured beside FL-bench

[KarhouTam/FL-bench](https://github.com/KarhouTam/FL-bench), commit 06e658b: its servers, clients and metrics as they
are, on {IMAGES:,} images of MNIST that its `dirichlet` divides among {CLIENTS} clients (alpha 0.1). Multilayer
perceptron with {HIDDEN} hidden neurons, {ROUNDS} rounds, tests after each {EVERY}th; otherwise its defaults: 10 % of
the clients, E = {EPOCHS}, B = {BATCH}, lr {LR}. Three seeds, in both codes from the same first weights; the cohorts
differ. Ours: `protocol: fl_bench`, with the same samples. Columns as above.
"""


def section(checkout: Path) -> str:
    clients = divided(checkout)
    runs: dict[str, dict[str, np.ndarray]] = {}  # ours, which several rows may share

    def scores(row: Row, seed: int) -> tuple[float, float]:
        key, first_P = f"{row.ours} {seed}", first_weights(MODEL, 10, seed)
        if key not in runs:
            runs[key] = ours("fl_bench", clients, seed, ROUNDS, row.ours, MODEL, evaluation={"every": EVERY})
        found = theirs(checkout, row.theirs, clients, first_P, seed, row.settings, row.mended)
        return score_of(found), runs[key]["best"][-1]

    return "\n".join([HEAD, *table(*side_by_side("FL-bench", ROWS, SEEDS, scores))])
