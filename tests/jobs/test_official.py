"""Methods beside the code of their authors: what this project adds to their code, with runs in its place."""

import copy
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from closeness import close

from jobs.official import (
    apfl,
    cfl,
    cflgp,
    clove,
    fedas,
    fedbabu,
    fedbn,
    fedcac,
    fedccfa,
    feddrift,
    fedem,
    fedgwc,
    fedpac,
    fedproto,
    fedrc,
    fedrep,
    fedsoft,
    feroma,
    flux,
    ifca,
    moon,
    pacfl,
    pfedgraph,
    pfedme,
    pfllib,
    runs,
    stocfl,
)
from jobs.official.__main__ import METHODS
from jobs.official.page import PAGE, table, with_section
from jobs.official.runs import Course, Data


@pytest.fixture
def source(monkeypatch):
    """Images whose pixels count up from left to right, with labels that take turns."""
    pixels = (np.arange(12_000 * 784) % 28).astype(np.uint8).reshape(-1, 1, 28, 28)
    found = type("Images", (), {"train_x": pixels, "train_y": np.arange(12_000) % 10})
    monkeypatch.setattr(runs, "locate", lambda *_: type("Source", (), {"read": lambda *_: found})())


def course(by: float, kept: tuple[int, ...], start_P: torch.Tensor, clients: int) -> Course:
    """Weights at a distance of 1 from the first ones in each column, and `by` more."""
    weights = {t: (start_P + 1.0 + by).expand(clients, -1) for t in kept}
    groups = dict.fromkeys(kept, {frozenset(range(5)), frozenset(range(5, clients))})
    return Course([0.5] * 20 + [0.9] * 10, [1] * 20 + [2] * 10, groups, weights)


@pytest.fixture
def lines_of(monkeypatch):
    """Returns a function: the lines of a method's section for one seed, whose functions return these values instead."""

    def of(method, **values):
        monkeypatch.setattr(method, "SEEDS", (0,), raising=False)
        for name, value in values.items():
            monkeypatch.setattr(method, name, lambda *_, value=value, **__: value)
        return method.section(Path("checkout"), "1234567").split("\n")

    return of


def test_images_of_a_client_are_rotated_by_its_quarter_turns(source):
    data = runs.rotated_mnist(0, [0, 1, 2], 8, 2)
    assert data.x.shape == (3, 8, 1, 28, 28) and data.x_test.shape == (3, 2, 1, 28, 28)
    across, down = data.x[..., 0, 1] - data.x[..., 0, 0], data.x[..., 1, 0] - data.x[..., 0, 0]
    assert (across.sign().mean((1, 2)).tolist(), down.sign().mean((1, 2)).tolist()) == ([1, 0, -1], [0, -1, 0])


def test_clients_have_two_labels_in_training_and_test_and_no_image_twice(source):
    data = pacfl.two_labels(0)
    for y in (data.y, data.y_test):
        assert [len(row.unique()) for row in y] == [2] * pacfl.CLIENTS
    assert all(client % 10 in row for client, row in enumerate(data.y.tolist()))


def test_our_runs_end_after_the_kept_rounds():
    x = torch.rand(4, 6, 1, 28, 28)
    y = torch.arange(24).reshape(4, 6) % 3
    found = runs.ours(Data(x, y, x, y), 0, (1, 2), {"fedavg": {}}, {"name": "mlp"}, {"steps": 1, "batch_size": None})
    assert len(found.accuracy) == 2 and found.clusters == [1, 1] and found.split is None
    start_P = runs.first_weights({"name": "mlp"}, 10, 0)
    assert found.weights[1].shape == (4, len(start_P)) and not torch.equal(found.weights[1], found.weights[2])
    assert found.groups == {1: {frozenset(range(4))}, 2: {frozenset(range(4))}} and found.sizes(2) == [4]
    assert runs.distance(found, found, start_P, 1) == 0


def test_clients_train_on_their_first_samples_alone():
    x, y = torch.rand(3, 4, 1, 28, 28), torch.arange(12).reshape(3, 4) % 3
    data, sizes = Data(x, y, x, y, sizes=(1, 4, 2)), []
    runs.ours(
        data, 0, (1,), {"fedavg": {}}, {"name": "mlp"}, {"steps": 1, "batch_size": None},
        look=lambda result, _: sizes.extend(len(result.trained.federation.train(i)[1]) for i in range(3)),
    )  # fmt: skip
    assert sizes == [1, 4, 2] and [len(part) for part in data.training] == sizes
    assert torch.equal(data.training[2].tensors[0], x[2, :2]) and Data(x, y, x, y).used.all()


def test_rounded_weights_differ_in_their_last_digits():
    first_P = runs.first_weights({"name": "mlp"}, 10, 0)
    apart = [((other_P - first_P) / first_P).abs().nan_to_num() for other_P in runs.rounded(first_P)]
    assert all(1e-8 < part.mean() < 2e-7 for part in apart) and not torch.equal(*apart)


def test_a_script_sees_its_folder_and_arguments_while_it_runs(tmp_path):
    (tmp_path / "beside_it.py").write_text("value = 3")
    file = tmp_path / "run.py"
    file.write_text("import sys, beside_it\nwords = sys.argv\nname = __name__\nvalue = beside_it.value")
    found = runs.script(file, "--rounds=2")
    assert (found["words"], found["name"], found["value"]) == (["run.py", "--rounds=2"], "__main__", 3)
    assert runs.script(file, run=False)["name"] == "imported"
    with pytest.raises(ModuleNotFoundError):
        runs.modules(Path("/nowhere"), "not_beside_it")


def test_a_section_replaces_the_one_of_its_method():
    page = "# Title\n\nText.\n\n## CFL\n\nold\n\n### CFL, part\n\n## IFCA\n\nkept\n"
    assert with_section(page, "## CFL\n\nnew\n\n") == "# Title\n\nText.\n\n## CFL\n\nnew\n\n## IFCA\n\nkept\n"
    assert with_section(page, "## PACFL\n\nnew\n") == page + "\n## PACFL\n\nnew\n"
    assert table(["a", "b"], [1, 2]) == ["| a | b |", "|---|---|", "| 1 | 2 |", ""]


def test_the_page_has_a_section_of_each_method():
    sections = [line[3:] for line in PAGE.read_text().split("\n") if line.startswith("## ")]
    assert [section.lower().replace("-", "") for section in sections] == list(METHODS)


def test_the_section_of_cfl_compares_weights_clusters_and_accuracy(lines_of):
    theirs, ours = (course(by, (1, 20, 22, 30), cfl.first_weights(0), 10) for by in (0.0, 0.001))
    lines = lines_of(cfl, mnist=None, theirs=theirs, ours=ours)
    assert "| 22 | 1.0e-03 | 0.9000 | 0.9000 | 2 | 2 |" in lines, "0.001 beside a way of 1"
    assert "The clusters after round 22 are the same." in lines
    assert "| 2 | ours | 21 | 2 | yes | 0.500 | 0.900 | 0.900 | 0.900 |" in lines
    assert "| 100 | 0.900 | 0.900 |" in lines and any(
        "in 12 of 12 orders with theirs and in 12" in line for line in lines
    )


def test_a_run_with_another_order_of_batches_begins_with_the_weights_of_the_first_seed():
    x, y, model = torch.rand(4, 6, 1, 28, 28), torch.arange(24).reshape(4, 6) % 3, {"name": "mlp"}
    data, local = Data(x, y, x, y), {"epochs": 1, "batch_size": 2, "lr": 1e-30}
    with runs.weights_file(model, 10, 0) as file:
        found = runs.ours(data, 7, (1,), {"fedavg": {}}, model | {"weights": str(file)}, local)
    assert torch.equal(found.weights[1][0], runs.first_weights(model, 10, 0))
    assert not torch.equal(found.weights[1][0], runs.first_weights(model, 10, 7))


def test_the_authors_script_of_ifca_has_the_images_in_their_order(source, monkeypatch, tmp_path):
    """With a script in its place that trains nothing and counts what it is given."""
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train_cluster_mnist.py").write_text(
        "class TrainMNISTCluster:\n"
        "    def __init__(self, config): self.config, self.calls = config, 0\n"
        "    def setup_datasets(self): self.x, self.y = self._load_MNIST(train=True)\n"
        "    def setup_models(self): assert self.config['train_seed'] == self.config['data_seed'] == 0\n"
        "    def train(self, chosen, lr): assert (chosen, lr) == ([0], 0.1)\n"
        "    def test(self, train):\n"
        "        self.calls += 1\n"
        "        found = {'acc': float(self.x[0, 0, 27]), 'cl_ct': [len(self.x), int(self.y[3]), self.calls]}\n"
        "        return {'cluster_assign': [0]} if train else found\n"
    )
    monkeypatch.setattr(ifca, "locate", runs.locate)
    head, first, *_, last = ifca.of_their_settings(tmp_path)
    assert head == ["epoch", "accuracy", "test clients of each model"] and last[0] == str(ifca.EPOCHS)
    assert first == ["1", f"{27 / 255:.3f}", "12000, 3, 2"]


@pytest.mark.parametrize(
    "method, model, line",
    [
        (ifca, ifca.MODEL, "| 0 | 5 | 1.0e-03 | 0.5000 | 0.5000 | 35, 5 | 35, 5 | yes |"),
        (stocfl, stocfl.MODEL, "| 0 | 5 | 1.0e-03 | 0.5000 | 0.5000 | 1 | 1 | yes |"),
    ],
)
def test_the_sections_of_ifca_and_stocfl(lines_of, monkeypatch, method, model, line):
    start_P = runs.first_weights(model, 10, 0)
    monkeypatch.setattr(ifca, "of_their_settings", lambda _: [["epoch"]])
    if method is ifca:  # its distances are from the mean of the first models, here those of one
        monkeypatch.setattr(runs, "first_weights", lambda *_: start_P)
    theirs, ours = (course(by, method.KEPT, start_P, method.CLIENTS) for by in (0.0, 0.001))
    assert line in lines_of(method, rotated_mnist=None, theirs=theirs, ours=ours)


def test_the_section_of_pacfl(lines_of, source):
    start_P = runs.first_weights(pacfl.MODEL, 10, 0)
    clusters = {client: int(client >= 5) for client in range(pacfl.CLIENTS)}
    angles = np.full((pacfl.CLIENTS, pacfl.CLIENTS), 5.0)
    found = {"adj_mat": angles, "clients_clust_id": clusters, "U_clients": [np.zeros((784, 6))] * pacfl.CLIENTS}
    theirs, ours = (course(by, pacfl.KEPT, start_P, pacfl.CLIENTS) for by in (0.0, 0.001))
    lines = lines_of(pacfl, theirs=(theirs, found), ours=(ours, angles + 0.25), main_pacfl=found)
    (line,) = [line for line in lines if line.startswith("| 0 ") and "| 5 |" in line]
    assert line.startswith("| 0 | 0.2500 | 2 | 2 | yes |") and line.endswith("| 5 | 1.0e-03 | 0.5000 | 0.5000 |")
    assert "has\n3 vectors per label" in "\n".join(lines)


def test_shares_of_images_of_mixed_clients_are_rotated(source):
    data, new = fedem.mixed(0)
    across = (data.x[..., 0, 1] - data.x[..., 0, 0]).sign(), (new.x[..., 0, 1] - new.x[..., 0, 0]).sign()
    upright = torch.cat(across).mean((1, 2))  # a rotated image has the same pixels in a row
    assert len(across[1]) == fedem.NEW and sorted(upright.tolist())[:: fedem.CLIENTS + fedem.NEW - 1] == [0, 1]
    assert len(upright.unique()) == fedem.CLIENTS + fedem.NEW, "each client has its own share"


def mixtures(by: float, first_P: torch.Tensor) -> fedem.Mixtures:
    """With weights at a distance of 1 + by from the first ones; every second client has another largest weight."""
    pi = np.full((fedem.CLIENTS, fedem.K), 0.5 + by)
    pi[1::2, 1] += 0.25
    pi[0] = np.nan  # has not trained
    made = course(by, fedem.KEPT, first_P, fedem.CLIENTS)
    made.weights = {t: rows[: fedem.K] for t, rows in made.weights.items()}
    return fedem.Mixtures(made, dict.fromkeys(fedem.KEPT, pi), new_pi=np.full((fedem.NEW, fedem.K), 0.25 + 2 * by))


def test_the_section_of_fedem(lines_of, monkeypatch):
    first_P = runs.first_weights(fedem.MODEL, 10, 0)
    monkeypatch.setattr(runs, "first_weights", lambda *_: first_P)
    lines = lines_of(fedem, mixed=(None, None), theirs=mixtures(0.0, first_P), ours=mixtures(0.001, first_P))
    assert "| half | 0 | 5 | 1.0e-03 | 1.0e-03 | 0.5000 | 0.5000 |" in lines
    assert "differ by at most 2.0e-03." in lines[-2]


def test_our_run_of_fedem_has_weights_of_the_cohort_and_of_newcomers(monkeypatch, source):
    monkeypatch.setattr(fedem, "KEPT", (1, 2))
    (data, new), how = fedem.mixed(0), fedem.How(fraction=0.5)
    run = fedem.ours(data, new, 0, how)
    cohorts = [set(ids.tolist()) for ids in runs.cohorts(fedem.CLIENTS, 0, 0.5, 2)]
    assert [len(cohort) for cohort in cohorts] == [fedem.CLIENTS // 2] * 2 and cohorts[0] != cohorts[1]
    assert cohorts[0] == {client for client, pi in enumerate(run.pi[1]) if np.isfinite(pi).all()}
    assert len(run.course.weights[1]) == fedem.K and run.new_pi.shape == (fedem.NEW, fedem.K)
    assert np.allclose(run.new_pi.sum(1), 1)


def test_the_section_of_pfedme(lines_of):
    start_P = runs.first_weights(pfedme.MODEL, 10, 0)

    def run(by: float) -> pfedme.Models:
        theta, w = (course(x, pfedme.KEPT, start_P, pfedme.CLIENTS) for x in (2 * by, by))
        w.accuracy = [0.25] * 20
        return pfedme.Models(theta, w)

    lines = lines_of(pfedme, two_labels=None, theirs=run(0.0), ours=run(0.001))
    assert "| R = 1 | 0 | 5 | 1.0e-03 | 2.0e-03 | 0.2500 | 0.2500 | 0.5000 | 0.5000 |" in lines
    (quarter,) = [line for line in lines if "a quarter" in line and "| 0 | 5 |" in line and line.startswith("|")]
    assert quarter.endswith("| 0 | 5 | 1.0e-03 | - | - | - | - | - |")


def test_our_runs_of_pfedme_have_both_models(monkeypatch, source):
    monkeypatch.setattr(pfedme, "KEPT", (1, 2))
    run = pfedme.ours(pacfl.two_labels(0), 0, pfedme.How(1, True))
    start_P = runs.first_weights(pfedme.MODEL, 10, 0)
    assert run.theta.weights[1].shape == (pfedme.CLIENTS, len(start_P)) and run.w.weights[1].shape == (1, len(start_P))
    step_NP = pfedme.ETA * pfedme.LAM * (run.theta.weights[1] - start_P)  # of w_i after R = 1
    assert close(run.w.weights[1][0], start_P + step_NP.mean(0), 1e-5)
    assert len(run.theta.accuracy) == len(run.w.accuracy) == 2


def test_the_section_of_cflgp(lines_of, source):
    start_P, pairs = runs.first_weights(cflgp.MODEL, 10, 0), 2 * cflgp.PER_ANGLE

    def run(by: float, clusters: int) -> Course:
        made = course(by, cflgp.KEPT, start_P, cflgp.CLIENTS)
        groups = runs.groups_of(i // pairs % clusters for i in range(cflgp.CLIENTS))
        return Course(made.accuracy, made.clusters, dict.fromkeys(cflgp.KEPT, groups), made.weights)

    lines = lines_of(cflgp, theirs=run(0.0, 4), ours=run(0.001, 1))
    assert "| equal | 0 | 10 | 1.0e-03 | 0.5000 | 0.5000 | 1.00 | 0.00 |" in lines
    assert "| own | 0 | 20 | - | 0.5000 | 0.5000 | 1.00 | 0.00 |" in lines
    data = cflgp.rotated(0)
    upright, turned = data.x[0, 0, 0], data.x[2 * cflgp.PER_ANGLE, 0, 0]  # by 90 degrees
    assert upright[0].std() > 0.01 and turned[0].std() < 1e-6, "rows of turned images are constant"


def test_the_section_of_fedccfa(lines_of, monkeypatch):
    start_P = runs.first_weights(fedccfa.MODEL, 10, 0)

    def run(by: float, models: int) -> Course:
        made = course(by, fedccfa.KEPT, start_P, fedccfa.CLIENTS)
        made.accuracy, made.clusters = [0.5] * fedccfa.DRIFT + [0.25] * 10, [models] * 110
        return made

    monkeypatch.setattr(runs, "ours", lambda *_, **__: run(0.002, 4))
    lines = lines_of(fedccfa, images=None, theirs=run(0.0, 1), their_script=run(0.0, 3), ours=run(0.001, 1))
    assert "| eps 0.4 | 0 | 104 | 1.0e-03 | 0.2500 | 0.2500 |" in lines
    assert "| 0 | 20 | 2.0e-03 | 0.5000 | 0.5000 | 3 | 4 |" in lines
    assert "| 0 | 104 | - | 0.2500 | 0.2500 | 3 | 4 |" in lines


def test_our_run_of_fedccfa_has_the_models_of_all_clients(monkeypatch, source):
    monkeypatch.setattr(fedccfa, "KEPT", (1, 2))
    monkeypatch.setattr(fedccfa, "TRAIN", 30)
    data, start_P = fedccfa.images(0), runs.first_weights(fedccfa.MODEL, 10, 0)
    found = fedccfa.ours(data, 0, fedccfa.How(eps=0.0))  # each client has a classifier of its own
    assert found.weights[2].shape == (fedccfa.CLIENTS, len(start_P)) and len(found.weights[2].unique(dim=0)) > 1
    model = fedccfa.Model(start_P)
    assert model(data.x[0], True)[1].shape == (30, fedccfa.HIDDEN)


def test_the_drift_of_our_runs_is_that_of_their_script():
    (event,) = fedccfa.SCHEDULE
    assert event["round"] == 101 and [change["clients"] for change in event["change"]] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8, 9],
    ]


@pytest.fixture
def imports():
    """Modules that a test imports from a checkout of its own are forgotten after it."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("models", "utils", "FedProx"):
            del sys.modules[name]


def of_fedrep(folder: Path) -> Path:
    """A checkout whose script adds a number and the label of a client's first image to a bias, and its test is 50 %."""
    for name, text in {
        "utils/train_utils.py": "get_data = get_model = None",
        "models/language_utils.py": "",
        "models/Update.py": "number = 100",
        "models/test.py": (
            "def test_img_local_all(net, args, *data, w_locals, w_glob_keys):\n"
            "    for _ in range(1):\n\taccuracy = 50.0\n        loss = 1.0\n    return accuracy, loss\n"
        ),
        "main.py": (
            "import copy, sys\nimport numpy as np\n"
            "from utils.train_utils import get_data, get_model\n"
            "from models.Update import number\n"
            "from models.test import test_img_local_all\n"
            "options, net = dict(word[2:].split('=') for word in sys.argv[1:]), get_model(None)\n"
            "train, test, rows, test_rows = get_data(None)\n"
            "own = {i: copy.deepcopy(net.state_dict()) for i in rows}\n"
            "for t in range(int(options['epochs']) + 1):\n"
            "    for i in np.random.choice(range(len(rows)), 1, replace=False):\n"
            "        own[i]['7.bias'] += number + train[rows[i][0]][1]\n"
            "    values = {'w_locals': own, 'w_glob_keys': ['1.bias'], 'fedavg': False}\n"
            "    found.append(test_img_local_all(net, None, test, **values))\n"
        ),
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder / "main.py"


def test_their_script_of_fedrep_has_our_cohorts_and_all_clients_at_last(tmp_path, imports):
    x, y = torch.rand(4, 6, 1, 28, 28), torch.arange(4)[:, None].expand(4, 6)
    start_P, found = runs.first_weights(fedrep.MODEL, 10, 0), []
    given = (of_fedrep(tmp_path), Data(x, y, x, y), start_P, [np.array([1, 3]), np.array([2, 3])], {"alg": "fedrep"})
    course = fedrep.their_script(*given, {}, {"100": "200"}, found=found)
    assert found == [(50.0, 1.0)] * 3 and course.accuracy == [0.5, 0.5]
    moved = [(course.weights[t] - start_P)[:, -10:].mean(1).round().tolist() for t in (1, 2, 3)]
    assert moved == [[0, 201, 0, 203], [0, 201, 202, 406], [200, 402, 404, 609]]
    assert torch.equal(course.weights[3][:, :-10], start_P[:-10].expand(4, -1))
    with pytest.raises(ValueError, match=r"Update.py has no '300'"):
        fedrep.their_script(*given, {}, {"300": "200"}, found=found)


def test_our_run_of_fedrep_has_the_heads_of_the_cohort(monkeypatch, source):
    monkeypatch.setattr(fedrep, "KEPT", (1,))
    course = fedrep.ours(fedrep.images(0), 0, "fedrep", 0.3)
    start_P, (cohort,) = runs.first_weights(fedrep.MODEL, 10, 0), runs.cohorts(fedrep.CLIENTS, 0, 0.3, 1)
    head = fedrep.HIDDEN * 10 + 10
    same = (course.weights[1] == start_P)[:, -head:].all(1)
    assert {*np.flatnonzero(~same)} == {*cohort.tolist()} and len(cohort) == 3
    assert len(course.weights[1][:, :-head].unique(dim=0)) == 1


@pytest.mark.parametrize(
    "method, line",
    [
        (fedrep, "| LG-FedAvg, 30 % | 0 | 5 | 1.0e-03 | 0.5000 | 0.5000 |"),
        (apfl, "| alpha 0.75, both | 0 | 5 | 1.0e-03 | 0.5000 | 0.5000 |"),
    ],
)
def test_the_sections_of_fedrep_and_apfl(lines_of, monkeypatch, method, line):
    start_P = runs.first_weights(fedrep.MODEL, 10, 0)
    monkeypatch.setattr(fedrep, "SEEDS", (0,))
    monkeypatch.setattr(fedrep, "images", lambda _: None)
    theirs, ours = (course(by, fedrep.KEPT, start_P, fedrep.CLIENTS) for by in (0.0, 0.001))
    lines = lines_of(method, theirs=theirs, ours=ours)
    assert line in lines and len([line for line in lines if line.startswith("| ")]) == 2 * len(method.RUNS) + 1


def test_a_server_of_pfllib_has_our_data_cohorts_and_weights(monkeypatch):
    """With a server in its place that adds 1 to the weights of each client in the cohort."""
    base, loaded = SimpleNamespace(read_client_data=None), []

    class Client:
        def __init__(self, args, i):
            self.id, self.model, train = i, copy.deepcopy(args.model), base.read_client_data("", i, is_train=True)
            assert (
                torch.equal(torch.stack([x for x, _ in train]), data.x[i]) and args.batch_size == 6 and args.mu == 0.5
            )

        def load_train_data(self, batch_size=None):
            return "theirs"

    class FedProx:
        def __init__(self, args, times):
            self.rounds, self.rs_test_acc = args.global_rounds, []
            self.clients = [Client(args, i) for i in range(args.num_clients)]

        def train(self):
            for _ in range(self.rounds + 1):
                chosen = self.select_clients()
                self.evaluate()
                for client in random.sample(chosen, self.current_num_join_clients):
                    loaded.append((client.load_train_data(), client.load_train_data(16)))
                    for parameter in client.model.parameters():
                        parameter.data += 1
            self.save_results()

    base.Client = Client
    models = SimpleNamespace(BaseHeadSplit=torch.nn.Sequential)
    readers = [SimpleNamespace(read_client_data=None) for _ in range(2)]  # of clients and servers
    found = [base, *readers, SimpleNamespace(FedProx=FedProx), models]
    monkeypatch.setattr(pfllib, "modules", lambda *_: found)
    monkeypatch.setattr(pfllib, "stand_in", lambda _: None)
    y, seen = torch.arange(18).reshape(3, 6) % 3, []
    data = Data(torch.rand(3, 6, *runs.SHAPE), y, torch.rand(3, 2, *runs.SHAPE), y[:, :2])
    start_P = runs.first_weights(pfllib.MODEL, 10, 0)
    cohorts = [np.array([1, 2]), np.array([2]), np.array([0])]
    call = Path("checkout"), "FedProx", data, start_P, cohorts, {"mu": 0.5}
    course = pfllib.theirs(*call, look=lambda server, rounds: seen.append((len(server.clients), rounds)))
    added = course.weights[2] - start_P
    assert close(added, torch.tensor([[0.0], [1.0], [2.0]]).expand_as(added), 1e-5)
    assert len(course.accuracy) == 2 and seen == [(3, 0), (3, 1), (3, 2)]
    assert all(len(x) == len(y) == 6 for pair in loaded for ((x, y),) in pair)
    pfllib.theirs(*call, whole=False)
    assert loaded[-1][1] == "theirs" != loaded[-1][0] and Client.load_train_data(None) == "theirs"


def test_steps_of_two_batches_have_the_halves_in_order():
    assert list(pfllib.in_order(None, 6, 2, None)) == [None, None]
    halves = [half.tolist() for half in pfllib.in_order(None, 6, 4, None, 2)]
    assert halves == [[0, 1, 2], [3, 4, 5]] * 2


def test_the_section_of_fedcac_counts_bits(lines_of):
    start_P = runs.first_weights(fedcac.MODEL, 10, 0)

    def run(by: float, critical: bool) -> fedcac.Masks:
        masks = torch.zeros(fedcac.CLIENTS, 5, dtype=torch.bool)
        masks[3] = critical
        return fedcac.Masks(course(by, fedcac.KEPT, start_P, fedcac.CLIENTS), dict.fromkeys(fedcac.KEPT, masks))

    lines = lines_of(fedcac, two_labels=None, theirs=run(0.0, False), ours=run(0.001, True))
    assert "| half | 0 | 5 | 1.0e-03 | 0.5000 | 0.5000 | 5 of 100 |" in lines


def test_our_run_of_fedcac_has_the_masks_of_the_cohort(monkeypatch, source):
    monkeypatch.setattr(fedcac, "KEPT", (1,))
    run = fedcac.ours(pacfl.two_labels(0), 0, 0.5)
    (cohort,) = runs.cohorts(fedcac.CLIENTS, 0, 0.5, 1)
    assert np.flatnonzero(run.masks[1].any(1)).tolist() == sorted(cohort.tolist())
    weights_NP = run.course.weights[1]
    assert weights_NP.shape == run.masks[1].shape
    others_NP = np.delete(weights_NP.numpy(), cohort, axis=0)
    assert (others_NP == others_NP[0]).all(), "the global model"
    assert len(weights_NP.unique(dim=0)) == len(cohort) + 1


def test_the_section_of_fedas_has_no_distance_to_clients_with_the_first_model(lines_of):
    start_P = runs.first_weights(fedas.MODEL, 10, 0)
    theirs, ours = (course(by, fedas.KEPT, start_P, fedas.CLIENTS) for by in (0.0, 0.001))
    theirs.weights[1] = theirs.weights[1].clone()
    theirs.weights[1][2] = start_P
    lines = lines_of(fedas, two_labels=None, theirs=theirs, ours=ours)
    assert "| half | 0 | 1 | - | 0.5000 | 0.5000 |" in lines and "| half | 0 | 5 | 1.0e-03 | 0.5000 | 0.5000 |" in lines


def test_the_section_of_pfllib_has_the_distance_of_each_method(lines_of):
    start_P = runs.first_weights(pfllib.MODEL, 10, 0)
    theirs, ours = (course(by, pfllib.KEPT, start_P, pfllib.CLIENTS) for by in (0.0, 0.001))
    lines = lines_of(pfllib, two_labels=None, theirs=theirs, ours=ours, accuracy_of=0.5)
    rows = [line for line in lines if line.endswith("| 0 | 1.0e-03 | 1.0e-03 | 0.5000 | 0.5000 |")]
    assert [row.split("|")[1].strip() for row in rows] == list(pfllib.RUNS)


def test_our_runs_beside_pfllib_have_personal_and_global_models(monkeypatch, source):
    monkeypatch.setattr(pfllib, "KEPT", (1,))
    data = pacfl.two_labels(0)
    w_NP, v_NP = (pfllib.ours(data, 0, pfllib.RUNS[name]).weights[1] for name in ("Ditto, w", "Ditto, v_i"))
    assert len(w_NP.unique(dim=0)) == 1 and len(v_NP.unique(dim=0)) > 1


def test_clients_of_pfllib_have_the_mended_members():
    """Clients of FedRoD predict with the sum of their heads; those of FedBABU tune a copy from one of two bodies."""

    class Server:
        def set_clients(self, kind):
            self.client = kind()

    class Client:
        learning_rate, train_time_cost = 0.5, {}

        def __init__(self):
            self.model = torch.nn.Sequential()
            self.model.base, self.model.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
            self.head = copy.deepcopy(self.model.head)

        def fine_tune(self):
            self.optimizer.zero_grad()
            self.model.base.bias.sum().backward()
            self.optimizer.step()

    made = pfllib.clients_with(summed=property(pfllib.with_both_heads), **pfllib.BABU)(Server)()
    made.set_clients(Client)
    client, received = made.client, torch.nn.Linear(2, 2)
    last = client.model.base.bias.clone()
    client.set_parameters(received)
    assert torch.equal(client.summed.head.weight, 2 * client.head.weight)
    assert torch.equal(client.tuned.base.bias, received.bias - 0.5) and torch.equal(
        client.model.base.bias, received.bias
    )
    assert torch.equal(client.tuned_last.base.bias, last - 0.5)


def test_every_second_client_of_fedrc_has_labels_in_the_other_order(monkeypatch):
    y = torch.arange(12_000) % 10
    monkeypatch.setattr(runs, "images", lambda *_: (y[:, None, None, None].expand(-1, *runs.SHAPE), y))
    data, new = fedrc.swapped(0)
    assert (len(data.y), len(new.y)) == (fedem.CLIENTS, fedem.NEW)
    for part in (data, new):
        for x, y in ((part.x, part.y), (part.x_test, part.y_test)):
            assert torch.equal(x[::2, :, 0, 0, 0], y[::2]) and torch.equal(x[1::2, :, 0, 0, 0], 9 - y[1::2])
    counts = torch.stack([labels.bincount(minlength=10) for labels in data.y])
    assert counts.max() > 2 * fedrc.TRAIN / 10, "shares differ"


def test_the_section_of_fedrc(lines_of, monkeypatch):
    first_P = runs.first_weights(fedem.MODEL, 10, 0)
    monkeypatch.setattr(runs, "first_weights", lambda *_: first_P)
    theirs = mixtures(0.0, first_P), np.full((fedem.NEW, fedem.K), 0.75)
    lines = lines_of(fedrc, swapped=(None, None), theirs=theirs, ours=mixtures(0.001, first_P))
    assert "| half | 0 | 5 | 1.0e-03 | 1.0e-03 | 0.5000 | 0.5000 | 1.00 / 1.00 |" in lines
    assert "have C(y, k) in both codes, and by at most 5.0e-01 with theirs as it is." in lines
    assert any("differ by at most 2.0e-03 if they" in line for line in lines)


def test_the_section_of_fedgwc(lines_of):
    start_P = runs.first_weights(fedgwc.MODEL, 10, 0)

    def run(by: float, clusters: list[int]) -> fedgwc.Interactions:
        made = course(by, fedgwc.KEPT, start_P, fedgwc.CLIENTS)
        made.accuracy, made.clusters = [0.5] * 60, clusters
        a = np.full((fedgwc.CLIENTS, fedgwc.CLIENTS), 0.25 + by)
        a[0] = np.nan  # of another cluster
        v = dict.fromkeys(fedgwc.KEPT, np.full(fedgwc.CLIENTS, 2 * (1 + by)))
        return fedgwc.Interactions(made, dict.fromkeys(fedgwc.KEPT, a), v)

    theirs, ours = run(0.0, [1, 1, 2, 2, 4]), run(-0.5, [1] * 5)
    lines = lines_of(fedgwc, rotated_mnist=None, theirs=theirs, ours=ours)
    assert "| 0 | 5.0e-01 | 1.0e+00 | 2 | 2 | yes | 20 | 5.0e-01 | 0.5000 | 0.5000 |" in lines
    assert "| 0 | 3, 5 | - |" in lines


def test_our_run_of_fedgwc_has_the_interactions_of_the_cohort(monkeypatch, source):
    monkeypatch.setattr(fedgwc, "KEPT", (1,))
    data = runs.rotated_mnist(0, fedgwc.TURNS, 20, 5)
    run = fedgwc.ours(data, 0)
    (cohort,) = runs.cohorts(fedgwc.CLIENTS, 0, fedgwc.COHORT / fedgwc.CLIENTS, 1)
    outside = np.setdiff1d(np.arange(fedgwc.CLIENTS), cohort)
    assert len(cohort) == fedgwc.COHORT and (run.a[1][outside] == 1 / fedgwc.CLIENTS**2).all()
    assert (run.a[1][np.ix_(cohort, cohort)] > 1 / fedgwc.CLIENTS**2).all() and (run.v[1] > 0.74).all()


def test_the_section_of_feddrift(lines_of):
    start_P = runs.first_weights(feddrift.MODEL, 10, 0)
    kept = tuple(range(feddrift.ROUNDS, 6 * feddrift.ROUNDS, feddrift.ROUNDS))
    theirs, ours = (course(by, kept, start_P, feddrift.CLIENTS) for by in (0.0, 0.001))
    lines = lines_of(feddrift, rotated_mnist=None, theirs=theirs, ours=ours)
    assert "| Eager | 0 | 3 | 5, 1 | 5, 1 | yes | 24 | 1.0e-03 | 0.9000 | 0.9000 |" in lines
    assert sum(line.startswith("| Eager, early, theirs as it is |") for line in lines) == 2


def test_every_step_of_our_run_of_feddrift_has_new_data_of_its_concepts(monkeypatch, source):
    monkeypatch.setattr(feddrift, "ROUNDS", 2)
    data, rounds, ours = runs.rotated_mnist(0, [0] * feddrift.CLIENTS, 30, 10), [], runs.ours

    def look(result, kept):
        rounds.append(result.trained.state.round_T.tolist())
        members = result.trained.state.model_TN
        assert (members[0] == 1).all() and (members > 0).all()

    monkeypatch.setattr(runs, "ours", lambda *args, **options: ours(*args, **options, look=look))
    feddrift.ours(data, 0, feddrift.How(True, points=feddrift.EARLY))
    assert rounds == [[2], [2, 4], [2, 4, 6]]
    labels = feddrift.swapped(torch.arange(4), 1)
    assert labels.tolist() == [0, 2, 1, 3] and torch.equal(feddrift.swapped(labels, 0), labels)


def test_the_section_of_pfedgraph(lines_of):
    start_P = runs.first_weights(pfedgraph.MODEL, 10, 0)

    def run(by: float) -> pfedgraph.Graphs:
        made = course(by, pfedgraph.KEPT, start_P, pfedgraph.CLIENTS)
        return pfedgraph.Graphs(made, dict.fromkeys(pfedgraph.KEPT, np.full((5, 5), 0.2 - 2 * by)))

    lines = lines_of(pfedgraph, clients=None, theirs=run(0.0), ours=run(0.001))
    assert "| near | 0 | 5 | 1.0e-03 | 0.0e+00 | 2.0e-03 | 0.5000 | 0.5000 |" in lines


def test_our_run_of_pfedgraph_has_the_graph_and_the_aggregates(monkeypatch, source):
    monkeypatch.setattr(pfedgraph, "KEPT", (1, 2))
    run = pfedgraph.ours(pfedgraph.clients(0), 0, pfedgraph.How(fraction=0.5))
    first, second = (set(ids.tolist()) for ids in runs.cohorts(pfedgraph.CLIENTS, 0, 0.5, 2))
    assert run.graph[2].shape == (5, 5) and np.allclose(run.graph[2].sum(1), 1)
    rows, known = run.course.weights[1], sorted(first)
    others = [client for client in range(pfedgraph.CLIENTS) if client not in first]
    assert len(rows[others].unique(dim=0)) == 1 and len(rows[known].unique(dim=0)) > 1
    waiting = sorted(first - second)
    assert torch.equal(run.course.weights[2][waiting], rows[waiting]), "they keep their aggregates"


def test_the_section_of_fedsoft(lines_of, monkeypatch, source):
    start_P = runs.first_weights(fedsoft.MODEL, 10, 0)
    monkeypatch.setattr(runs, "first_weights", lambda *_: start_P)

    def run(by: float) -> fedsoft.Soft:
        own, centres = (course(x, fedsoft.KEPT, start_P, rows) for x, rows in ((2 * by, fedsoft.CLIENTS), (by, 2)))
        return fedsoft.Soft(own, centres, dict.fromkeys(fedsoft.KEPT, np.full((fedsoft.CLIENTS, 2), 0.5 + 3 * by)))

    lines = lines_of(fedsoft, theirs=run(0.0), ours=run(0.001))
    assert "| m = 4 | 0 | 5 | 1.0e-03 | 0.0e+00 | 2.0e-03 | 3.0e-03 | 0.5000 | 0.5000 |" in lines


def test_our_run_of_fedsoft_has_own_models_and_centres(monkeypatch, source):
    monkeypatch.setattr(fedsoft, "KEPT", (1,))
    run = fedsoft.ours(fedem.mixed(0)[0], 0, fedsoft.How(momentum=0.9))
    own_NP, centre_KP = run.own.weights[1], run.centres.weights[1]
    drawn = (own_NP[:, None] != centre_KP).any(2).all(1)  # others predict with a centre
    assert fedsoft.DRAWN <= drawn.sum() <= fedsoft.K * fedsoft.DRAWN
    assert np.allclose(run.u[1].sum(1), 1, atol=2e-4) and run.u[1].min() >= 1e-4
    for centre_P in centre_KP:
        parts = torch.linalg.lstsq(own_NP[drawn].T.double(), centre_P[:, None].double()).solution[:, 0]
        assert np.allclose(sorted(parts)[-fedsoft.DRAWN :], 1 / fedsoft.DRAWN, atol=1e-3), "the mean of its S_k"


def test_the_section_of_fedbabu(lines_of):
    start_P = runs.first_weights(fedbabu.MODEL, 10, 0)

    def run(by: float) -> fedbabu.Models:
        return fedbabu.Models(*(course(x, fedbabu.KEPT, start_P, fedbabu.CLIENTS) for x in (by, 2 * by)))

    lines = lines_of(fedbabu, two_labels=None, theirs=run(0.0), ours=run(0.001), accuracy_of=0.5)
    assert "| half | 0 | 5 | 1.0e-03 | 2.0e-03 | 0.5000 | 0.5000 |" in lines


def test_their_learning_rate_of_fedbabu_is_divided_after_a_half_and_three_quarters():
    factors = [fedbabu.decayed(t, 0) for t in range(1, fedbabu.ROUNDS + 1)]
    assert np.allclose(factors, [1] * 4 + [0.1] * 2 + [0.01] * 2)


def test_the_section_of_moon(lines_of):
    start_P = runs.first_weights(moon.MODEL, 10, 0)
    theirs, ours = (course(by, moon.KEPT, start_P, moon.CLIENTS) for by in (0.0, 0.001))
    lines = lines_of(moon, images=None, theirs=theirs, ours=ours, accuracy_of=0.5)
    assert "| 5 | 0 | 5 | 1.0e-03 | 0.5000 | 0.5000 |" in lines


def test_accuracies_of_users_follow_from_hits_that_are_counted_on():
    """Two users with 10 test images: 4 and 9 hits with own last layers, 6 and 1 with prototypes."""
    own, both = [4 / 10, (4 + 6 + 9) / 30], [(4 + 6) / 20, (4 + 6 + 9 + 1) / 40]
    found = fedproto.of_each_user(own, both)
    assert close(torch.tensor(found), torch.tensor([[0.4, 0.9], [0.6, 0.1]]), 1e-6)


def test_the_section_of_fedproto(lines_of):
    start_P = runs.first_weights(fedproto.MODEL, 10, 0)

    def run(by: float) -> fedproto.Prototypes:
        made, kept = course(by, fedproto.KEPT, start_P, fedproto.CLIENTS), fedproto.KEPT
        prototype_CF = torch.full((10, 4), 2 + 4 * by)  # a norm of 4, and a distance of 8 by
        return fedproto.Prototypes(
            made, dict.fromkeys(kept, prototype_CF), dict.fromkeys(kept, 0.25 + by), dict.fromkeys(kept, (0.125, 0.75))
        )

    lines = lines_of(fedproto, two_labels=None, theirs=run(0.0), ours=run(0.001), accuracy_of=0.5)
    numbers = "| 0.5000 | 0.5000 | 0.2500 | 0.2510 | 0.1250 | 0.7500 |"
    assert f"| the default | 0 | 5 | 1.0e-03 | 2.0e-03 {numbers}" in lines


def test_our_run_of_fedproto_has_models_with_their_own_last_layers(monkeypatch, source):
    monkeypatch.setattr(fedproto, "KEPT", (1,))
    data = pacfl.two_labels(0)
    run = fedproto.ours(data, 0, {})
    body = 784 * fedproto.HIDDEN + fedproto.HIDDEN
    served_NP = run.own.weights[1]
    assert len(served_NP[:, body:].unique(dim=0)) > 1, "personal_model has one for all"
    assert run.prototypes[1].shape == (10, fedproto.HIDDEN) and 0 <= run.nearest[1] <= 1


def test_the_section_of_fedpac(lines_of):
    start_P = runs.first_weights(fedpac.MODEL, 10, 0)

    def run(by: float) -> fedpac.Mixed:
        graph = dict.fromkeys(fedpac.KEPT, np.full((fedpac.CLIENTS, fedpac.CLIENTS), 0.5 - 2 * by))
        return fedpac.Mixed(course(by, fedpac.KEPT, start_P, fedpac.CLIENTS), graph)

    lines = lines_of(fedpac, images=None, theirs=run(0.0), ours=run(0.001), accuracy_of=0.5)
    assert "| 0 | 5 | 1.0e-03 | 0.5000 | 0.5000 | 2.0e-03 |" in lines


def test_eigenvectors_in_the_form_of_old_pytorch():
    matrix_MM = torch.tensor([[2.0, 1.0], [1.0, 2.0]])
    value_M2, vector_MM = fedpac.eig(matrix_MM, eigenvectors=True)
    assert close(value_M2, torch.tensor([[1.0, 0.0], [3.0, 0.0]]), 1e-6)
    assert close((vector_MM * value_M2[:, 0]) @ vector_MM.T, matrix_MM, 1e-6)


def test_the_section_of_fedbn(lines_of):
    start_P = runs.first_weights({"name": fedbn.with_bn1}, 10, 0)
    theirs, ours = (course(by, fedbn.KEPT, start_P, fedbn.CLIENTS) for by in (0.0, 0.001))
    lines = lines_of(fedbn, rotated_mnist=None, theirs=theirs, ours=ours)
    assert "| downsample | 0 | 5 | 1.0e-03 | 0.5000 | 0.5000 |" in lines


def test_the_section_of_flux_has_clusters_and_their_agreement_with_rotations(lines_of):
    start_P, clients = runs.first_weights(flux.MODEL, 10, 0), len(flux.TURN_N)

    def run(by: float, groups: int) -> Course:
        made = course(by, flux.KEPT, start_P, clients)
        made.groups = dict.fromkeys(flux.KEPT, runs.groups_of(i % groups for i in range(clients)))
        return made

    theirs, ours = run(0.0, flux.TURNS), run(0.001, 1)
    lines = lines_of(flux, rotated_mnist=None, theirs=theirs, ours=ours, accuracy_of=0.5)
    cells = "| 1.0e-03 | no | 4 | 1 | 1.00 | 0.00 | 0.5000 | 0.5000 |"
    assert f"| the projection of ours | 0 | 3 {cells}" in lines and f"| its projection | 0 | 6 {cells}" in lines
    assert not any(line.startswith("| its projection | 0 | 3") for line in lines)


def test_our_projection_stands_in_for_their_pca():
    made = flux.Projection(10, 3)
    made.fit(np.zeros((5, flux.HIDDEN)))
    found = made.transform(np.eye(flux.HIDDEN, dtype=np.float32))
    assert found.dtype == np.float64 and np.allclose(found.T @ found, np.eye(10))


def test_clients_of_feroma_take_over_the_data_of_the_next_one():
    values = torch.arange(3)[:, None]
    data = Data(values, values, values, values)
    found = [feroma.moved(data, t).y_test.flatten().tolist() for t in (1, *feroma.MOVES)]
    assert found == [[0, 1, 2], [1, 2, 0], [2, 0, 1]]


def test_our_run_of_feroma_has_the_own_models_after_moves(monkeypatch, source):
    monkeypatch.setattr(feroma, "KEPT", (4,))
    monkeypatch.setattr(feroma, "LOCAL", {"steps": 1, "batch_size": None, "lr": 1e-30})
    data = runs.rotated_mnist(0, [i % feroma.TURNS for i in range(feroma.CLIENTS)], 10, 4)
    found = feroma.ours(data, 0, feroma.INVERSE)
    start_P = runs.first_weights(feroma.MODEL, 10, 0)
    assert found.weights[4].shape == (feroma.CLIENTS, len(start_P)) and close(found.weights[4][5], start_P, 1e-6)


def test_the_section_of_feroma(lines_of):
    start_P = runs.first_weights(feroma.MODEL, 10, 0)
    theirs, ours = (course(by, feroma.KEPT, start_P, feroma.CLIENTS) for by in (0.0, 0.001))
    lines = lines_of(feroma, rotated_mnist=None, moved=None, theirs=theirs, ours=ours, accuracy_of=0.5)
    assert "| results in one order | 0 | 4 | 1.0e-03 | 0.5000 | 0.5000 | 0.0e+00 |" in lines


def test_the_section_of_clove(lines_of):
    start_P = torch.stack([runs.first_weights(clove.MODEL, 10, 0, k) for k in range(clove.TURNS)]).mean(0)

    def run(by: float, groups: int) -> Course:
        made = course(by, clove.KEPT, start_P, clove.CLIENTS)
        made.groups = dict.fromkeys(clove.KEPT, runs.groups_of(i % groups for i in range(clove.CLIENTS)))
        return made

    theirs, ours = run(0.0, clove.TURNS), run(0.001, 1)
    lines = lines_of(clove, rotated_mnist=None, theirs=theirs, ours=ours, accuracy_of=0.5, of_a_late_client="late\n")
    assert "| K = 4 | 0 | 4 | 1.0e-03 | no | 1.00 | 0.00 | 0.5000 | 0.5000 |" in lines and "late" in lines


def test_a_late_client_of_clove_stops_theirs_and_joins_its_rotation_in_ours(monkeypatch):
    def theirs(checkout, data, first, seed, how, cohorts):
        assert [clove.LATE in cohort for cohort in cohorts].index(True) == clove.LATE_ROUND - 1
        raise KeyError(clove.LATE)

    made = Course(groups={clove.KEPT[-1]: runs.groups_of(i % clove.TURNS for i in range(clove.CLIENTS))})
    monkeypatch.setattr(clove, "theirs", theirs)
    monkeypatch.setattr(clove, "ours", lambda data, seed, how, schedule: made)
    text = clove.of_a_late_client(Path("checkout"), None, [], 0)
    assert f"it stops with KeyError: {clove.LATE}. " in text and "a cluster of 2 others,\n2 of them with" in text
