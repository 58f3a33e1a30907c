"""Methods beside the code of their authors: what this project adds to their code, with runs in its place."""

from pathlib import Path

import numpy as np
import pytest
import torch

from jobs.official import cfl, cflgp, fedccfa, fedem, fedsoft, ifca, pacfl, pfedgraph, pfedme, runs, stocfl
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


def test_the_section_of_fedem(lines_of, monkeypatch):
    first_P = runs.first_weights(fedem.MODEL, 10, 0)

    def run(by: float) -> fedem.Mixtures:
        pi = np.full((fedem.CLIENTS, fedem.K), 0.5 + by)
        pi[0] = np.nan  # has not trained
        made = course(by, fedem.KEPT, first_P, fedem.CLIENTS)
        made.weights = {t: rows[: fedem.K] for t, rows in made.weights.items()}
        return fedem.Mixtures(made, dict.fromkeys(fedem.KEPT, pi), new_pi=np.full((fedem.NEW, fedem.K), 0.25 + 2 * by))

    monkeypatch.setattr(runs, "first_weights", lambda *_: first_P)
    lines = lines_of(fedem, mixed=(None, None), theirs=run(0.0), ours=run(0.001))
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
    assert torch.allclose(run.w.weights[1][0], start_P + step_NP.mean(0), atol=1e-6)
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
