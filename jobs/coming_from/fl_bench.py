"""FL-bench's servers and clients beside our runs with `protocol: fl_bench`: their division, their scores."""

import contextlib
import io
import json
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from jobs.coming_from.fl_bench_mended import (
    first_heads,
    mixed_parameters,
    own_weights,
    received,
    stored_theta,
    theta_of_the_paper,
    w_in_one_step,
    with_both_heads,
    with_c_local,
)
from jobs.coming_from.measured import HIDDEN, MODEL, Client, ours, side_by_side
from jobs.official.page import table
from jobs.official.runs import cohorts, first_weights, images, modules, replaced, stand_in

CLIENTS, IMAGES, ROUNDS, EVERY, SEEDS = 20, 3000, 20, 5, range(3)
FRACTION, LR, EPOCHS, BATCH = 0.2, 0.01, 5, 32
LENET: dict[str, Any] = {"name": "lenet5", "options": {"batch_norm": True}}  # its default
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
    model: dict[str, Any] = MODEL,
    selected: Sequence[np.ndarray] | None = None,
    **common: Any,
) -> Server:
    """Their server of the file `name` after all rounds.

    settings: of the method; model: `MODEL`, with another number of neurons or none, or `LENET`; selected: ids of the
    clients in each round, None for those that it draws; common: keys of that group.
    """
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
    parts = [(client.x, client.y) for client in clients] + [(client.x_test, client.y_test) for client in clients]
    ends = np.cumsum([0, *(len(y) for _, y in parts)])
    rows = [np.arange(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]
    x, y = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*parts, strict=True))
    own = [{"train": rows[i], "val": [], "test": rows[len(clients) + i]} for i in range(len(clients))]
    ids = list(range(len(clients)))
    separation = {"train": ids, "val": ids, "test": ids, "total": len(ids)}

    class Own(mended(kind)):  # type: ignore[misc]
        def train(self) -> None:
            if selected is not None:
                self.client_sample_stream = [ids_M.tolist() for ids_M in selected]
            super().train()

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
            replaced(base, FLBENCH_ROOT=Path(folder), MODELS={"lenet5": network(models, model, first_P, x[0].numel())}),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            arguments = functional.parse_args(
                omegaconf.OmegaConf.create(config), name, getattr(kind, "get_hyperparams", None)
            )
            made = Own(arguments)
            made.train()
    return made


def network(models: Any, model: dict[str, Any], first_P: Tensor, size: int) -> type[Any]:
    """The class of their module `models` for this model, which begins with these weights. size: pixels of an image."""

    def begin(made: nn.Module) -> None:
        vector_to_parameters(first_P[: sum(part.numel() for part in made.parameters())].clone(), made.parameters())

    class Perceptron(models.DecoupledModel):  # type: ignore[misc]
        def __init__(self, **_: Any) -> None:
            super().__init__()
            hidden = model["options"]["hidden"]
            inner = (nn.Linear(size, hidden), nn.ReLU()) if hidden else ()
            self.base = nn.Sequential(nn.Flatten(), *inner)
            self.classifier = nn.Linear(hidden or size, 10)
            begin(self)

    class LeNet(models.LeNet5):  # type: ignore[misc]
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            begin(self)

    return LeNet if model == LENET else Perceptron


def score_of(made: Server, stage: str) -> float:
    """The best accuracy of the evaluated rounds that it prints, 0..1. stage: before or after fine-tuning."""
    found = [of["all_clients"][stage]["test"].accuracy for of in made.test_results.values()]
    return float(max(found)) / 100


@dataclass(frozen=True)
class Row:
    """A method in both codes."""

    label: str
    theirs: str  # the file of their server
    ours: Any
    settings: dict[str, Any] = field(default_factory=dict)  # of their method
    mended: Callable[[type[Server]], type[Server]] = lambda server: server
    model: dict[str, Any] = field(default_factory=lambda: MODEL)
    tuned: int = 0  # epochs of fine-tuning, after which theirs is scored


PFEDME = {"pfedme": {"lam": 15.0, "personal_lr": 0.01, "weights": "samples"}}
APFL = {"apfl": {"alpha": 0.5}}
FEDPROTO = {"fedproto": {"weights": "uniform", "prototypes": "running", "predict": "classifier"}}
FEDREP = {"fedrep": {"head_epochs": 4, "local": {"epochs": 1}}}
STEPS = {"scaffold": {"local": {"steps": 5}}}
ROWS = (
    Row("FedAvg", "fedavg", "fedavg"),
    Row("FedAvg, its LeNet-5", "fedavg", "fedavg", model=LENET),
    Row("FedBN, its LeNet-5", "fedbn", {"fedbn": {"weights": "samples"}}, model=LENET),
    Row("FedProx, `mu=1`", "fedprox", {"fedprox": {"mu": 1.0}}),
    Row("Local", "local", "local"),
    Row("FedPer", "fedper", "fedper"),
    Row("FedPer, first heads in theirs", "fedper", "fedper", mended=first_heads),
    Row("FedRep", "fedrep", FEDREP),
    Row("FedRep, first heads in theirs", "fedrep", FEDREP, mended=first_heads),
    Row("LG-FedAvg beside our FedPer", "lgfedavg", "fedper"),
    Row("LG-FedAvg", "lgfedavg", "lg_fedavg"),
    Row("Ditto, `pers_epoch=5`", "ditto", {"ditto": {"lam": 1.0}}, {"pers_epoch": 5}),
    Row("APFL, `adaptive_alpha=0`", "apfl", APFL, {"adaptive_alpha": 0}),
    Row("APFL, one step of w in theirs", "apfl", APFL, {"adaptive_alpha": 0}, w_in_one_step),
    Row("APFL, and mixed parameters", "apfl", APFL, {"adaptive_alpha": 0}, mixed_parameters),
    Row("pFedMe", "pfedme", PFEDME),
    Row("pFedMe, theta stored in theirs", "pfedme", PFEDME, mended=stored_theta),
    Row("pFedMe, and from w at each batch", "pfedme", PFEDME, mended=theta_of_the_paper),
    Row("FedProto", "fedproto", FEDPROTO),
    Row("FedALA", "fedala", "fedala"),
    Row("FedALA, own W and v in theirs", "fedala", "fedala", mended=own_weights),
    Row("FedPAC", "fedpac", {"fedpac": {"local": {"epochs": 4}}}),
    Row("FedBABU, fine-tuned for 5 epochs", "fedbabu", {"fedbabu": {"weights": "samples", "tune_lr": None}}, tuned=5),
    Row("FedRoD", "fedrod", {"fedrod": {"start": "copy"}}),
    Row("FedRoD, average received in theirs", "fedrod", {"fedrod": {"start": "copy"}}, mended=received),
    Row("FedRoD, and both heads", "fedrod", {"fedrod": {"start": "copy"}}, mended=with_both_heads),
    Row("MOON", "moon", "moon"),
    Row("SCAFFOLD, of 5 batches a round", "scaffold", STEPS),
    Row("SCAFFOLD, c_i stored in theirs", "scaffold", STEPS, mended=with_c_local),
)

HEAD = f"""## Measured beside FL-bench

[KarhouTam/FL-bench](https://github.com/KarhouTam/FL-bench), commit 06e658b: its servers, clients and metrics as they
are, on {IMAGES:,} images of MNIST that its `dirichlet` divides among {CLIENTS} clients (alpha 0.1). Multilayer
perceptron with {HIDDEN} hidden neurons, {ROUNDS} rounds of {FRACTION:.0%} of the clients (its default: 10 %), tests
after each {EVERY}th; otherwise its defaults: E = {EPOCHS}, B = {BATCH}, lr {LR}. Three seeds, in both codes from the
same first weights and with the same cohorts, so noise is that of the differences by seed; the order of samples differs.
Ours: `protocol: fl_bench`, with the same samples. Columns as above.
"""


def section(checkout: Path) -> str:
    clients = divided(checkout)
    sections = {"evaluation": {"every": EVERY}, "cohort": {"fraction": FRACTION}}
    runs: dict[str, float] = {}  # which several rows may share

    def scores(row: Row, seed: int) -> tuple[float, float]:
        key = f"{row.theirs} {row.settings} {row.mended.__qualname__} {row.model} {seed}"
        own = f"{row.ours} {row.model} {seed}"
        if key not in runs:
            made = theirs(
                checkout,
                row.theirs,
                clients,
                first_weights(row.model, 10, seed),
                seed,
                row.settings,
                row.mended,
                model=row.model,
                selected=cohorts(len(clients), seed, FRACTION, ROUNDS),
                join_ratio=FRACTION,
                test={"client": {"interval": EVERY, "finetune_epoch": row.tuned}},
            )
            runs[key] = score_of(made, "after" if row.tuned else "before")
        if own not in runs:
            found = ours("fl_bench", clients, seed, ROUNDS, row.ours, row.model, **sections)
            runs[own] = found["best"][-1]
        return runs[key], runs[own]

    return "\n".join(
        [HEAD, *table(*side_by_side("FL-bench", ROWS, SEEDS, scores, paired=True)), *facts(checkout, clients)]
    )


def facts(checkout: Path, clients: Sequence[Client]) -> list[str]:
    """Lines on runs of two rounds."""
    first_P = first_weights(MODEL, 10, 0)

    def made(name: str) -> Server:
        return theirs(checkout, name, clients, first_P, 0, global_epoch=2, test={"client": {"interval": -1}})

    def row(tensors: Iterable[Tensor]) -> Tensor:
        return parameters_to_vector([tensor.detach() for tensor in tensors])

    rod, pfedme, scaffold = made("fedrod"), made("pfedme"), made("scaffold")
    worker, average_P = rod.trainer.worker, row(rod.public_model_params.values())
    before_P = row(worker.model.generic_model.parameters())
    worker.set_parameters(rod.package(0))
    loaded_P = row(worker.model.generic_model.parameters())
    loads = "no number" if torch.equal(before_P, loaded_P) else "some numbers"
    stored = [row(theta.values()) for theta in pfedme.clients_personalized_model_params.values()]
    moved = max(float((theta_P - first_P).norm()) for theta_P in stored)
    c_i = max(float(row(parts).norm()) for parts in scaffold.c_local)
    return [
        f"- FedRoD: receiving the average changes {loads} of the worker's generic model, which is "
        f"{float((loaded_P - average_P).norm()):.2g} from it.",
        f"- pFedMe: the stored theta_i are {moved:g} from the first model.",
        f"- SCAFFOLD: the norms of all c_i are {c_i:g}, that of c is {float(row(scaffold.c_global).norm()):.2g}.",
        "",
    ]
