"""FedBN and `norm: local`: norm layers by type, rounds by plain PyTorch, newcomers, and refusals."""

import copy

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage, uneven
from rounds import EnginesAndCheckpoints, floats
from small_runs import metrics_of, simulate_until
from torch import nn
from torch.nn.functional import cross_entropy, nll_loss

from cfl_ray import Experiment, resume, simulate
from cfl_ray.config import EvaluationConfig
from cfl_ray.core.checked_method import CheckedMethod
from cfl_ray.core.local_sgd import LocalSGD
from cfl_ray.core.params import ParamSpec
from cfl_ray.core.rng import Draws
from cfl_ray.engine import programs
from cfl_ray.engine.client_state import predicting_row, with_client_state
from cfl_ray.methods import REGISTRY
from cfl_ray.methods.ditto import Ditto
from cfl_ray.methods.fedavg import FedAvg
from cfl_ray.methods.fedavg_plus import FedAvgPlus
from cfl_ray.methods.fedbn import FedBN
from cfl_ray.methods.fedem import FedEM
from cfl_ray.methods.fedper import FedPer
from cfl_ray.methods.fedrod import FedRoD
from cfl_ray.methods.ifca import IFCA
from cfl_ray.runtime.evaluation import Evaluator

SIZES, ETA = [12, 8, 6], 0.3


class Residual(nn.Module):
    """A block as torchvision's: one norm layer is named bn1, the other downsample.1; a layer norm before the head."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.downsample = nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3))
        self.ln, self.fc = nn.LayerNorm(3), nn.Linear(3, 3)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)) + self.downsample(x))
        return self.fc(self.ln(x.mean((2, 3))))


STATISTICS = ("bn1.", "downsample.1.")


def stage(engine: str = "sequential", **local) -> Stage:
    return Stage(uneven(SIZES, (1, 4, 4)), Residual, LocalSGD(**{"steps": 2, "lr": ETA} | local), engine)


def play(one: Stage, method, *cohorts):
    """Rounds as a run plays them, with the option `norm`."""
    checked_method = CheckedMethod(method, one.network.spec.size)
    state = checked_method.init(one.start())
    for number, ids in enumerate(cohorts, 1):
        state = checked_method.round(state, one.clients(ids, number), Draws(0, number))
    return checked_method, state


def is_norm(name: str) -> bool:
    return name.startswith(STATISTICS)


def enacted(one: Stage, rounds: int) -> tuple[list[dict], dict]:
    """(state of each client, shared state) of FedBN by torch.nn and torch.optim alone."""
    module = Residual()
    views = one.network.spec.tensors(one.model())
    module.load_state_dict({name: views[name].clone() for name in views}, strict=False)
    clients, shared = [copy.deepcopy(module.state_dict()) for _ in SIZES], copy.deepcopy(module.state_dict())
    for _ in range(rounds):
        for i, own in enumerate(clients):
            own.update({name: value.clone() for name, value in shared.items() if not is_norm(name)})
            module.load_state_dict(own)
            module.train()
            optimizer, (x, y) = torch.optim.SGD(module.parameters(), lr=ETA), one.federation.train(i)
            for _ in range(2):
                optimizer.zero_grad()
                cross_entropy(module(x), y).backward()
                optimizer.step()
            clients[i] = copy.deepcopy(module.state_dict())
        for name in shared:
            if not is_norm(name):
                shared[name] = torch.stack([own[name].double() for own in clients]).mean(0).float()
    return clients, shared


@pytest.mark.parametrize("compile", [torch.jit.script, lambda module: torch.jit.trace(module, torch.zeros(2, 4))])
def test_norm_layers_of_torchscript_are_known_by_type(compile):
    spec = ParamSpec.of(compile(torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.LayerNorm(4))))
    assert spec.batch_norms == {"0.weight", "0.bias", "0.running_mean", "0.running_var"}
    assert spec.other_norms == {"1.weight", "1.bias"}


def test_norm_layers_are_known_by_type():
    spec = stage().network.spec
    own = [name for name in spec.names if is_norm(name)]
    assert len(own) == 2 * 4 and spec.batch_norms == frozenset(own)
    assert spec.norms().count == sum(spec.tensors(torch.zeros(spec.size))[name].numel() for name in own)
    assert spec.norms(every=True).count == spec.norms().count + 6


@pytest.mark.parametrize("engine", ["sequential", "vectorised", "manual"])
@pytest.mark.parametrize("method", [FedBN(), FedBN(newcomers="mean"), FedAvg(norm="local", weights="uniform")], ids=str)
def test_rounds_are_those_of_plain_pytorch(method, engine):
    """Three rounds of full batches: all but the norm layers is averaged, and these stay, statistics included."""
    one = stage(engine)
    checked_method, state = play(one, method, None, None, None)
    clients, shared = enacted(one, 3)
    spec = one.network.spec
    found = spec.tensors(state.models_KP[0])
    for name in spec.names:
        if not is_norm(name):
            assert close(found[name], shared[name], 2e-5), name
    norms = spec.norms()
    for i, own in enumerate(clients):
        expected_P = torch.cat([own[name].reshape(-1) for name in spec.names])
        assert close(one.client_states["norm", i], norms.of(expected_P), 2e-5)
    assert not close(one.client_states["norm", 0], one.client_states["norm", 1], 1e-2)
    served = checked_method.serve(state, one.clients()).client_state
    assert (served.name, served.columns) == ("norm", norms)


def test_norm_layers_are_not_sent():
    one = stage()
    size, norms = one.network.spec.size, one.network.spec.norms().count
    play(one, FedBN(), None)
    assert floats(one) == (3 * (size - norms), 3 * (size - norms))
    play(one, FedBN(newcomers="mean"), None)
    assert floats(one) == (3 * (size - norms), 3 * size)


def test_the_server_has_the_first_norm_layers_or_the_mean():
    one, spec = stage(), stage().network.spec
    for method, is_first in ((FedBN(), True), (FedBN(newcomers="mean"), False), (FedAvg(norm="local"), False)):
        _, state = play(one, method, None, None)
        assert torch.equal(spec.norms().of(state.models_KP[0]), spec.norms().of(one.model())) == is_first


@pytest.mark.parametrize("newcomers", ["first", "mean"])
def test_a_newcomer_has_the_statistics_of_its_own_inputs(newcomers):
    """Weights and biases of the server, running means of the features of its own data; nothing else is trained."""
    one, method = stage(), FedBN(newcomers=newcomers)
    checked_method, state = play(one, method, [0, 1], [0, 1])
    assert checked_method.join(state, one.clients([2], round=3)) is state
    spec, row_P = one.network.spec, state.models_KP[0].clone()
    spec.norms().put(row_P, one.client_states["norm", 2])
    own, server = spec.tensors(row_P), spec.tensors(state.models_KP[0])
    assert torch.equal(own["bn1.weight"], server["bn1.weight"]) and torch.equal(own["bn1.bias"], server["bn1.bias"])
    x, _ = one.federation.train(2)
    features = torch.nn.functional.conv2d(x, server["conv1.weight"], server["conv1.bias"], padding=1)
    share = 0.9**50 if newcomers == "first" else 0.0  # of the first statistics, 0 and 1
    assert close(own["bn1.running_mean"], (1 - share) * features.mean((0, 2, 3)), 2e-2)
    assert close(own["bn1.running_var"], features.var((0, 2, 3)), 2e-2)


def test_norms_stay_beside_the_columns_that_a_method_keeps():
    """Heads of FedPer with the norm layers in one state; Ditto's global model has norm layers of the client as well."""
    spec = stage().network.spec
    one = stage()
    checked_method, state = play(one, FedPer(norm="local"), None, None)
    kept = spec.head.joined(spec.norms())
    assert checked_method.serve(state, one.clients()).client_state.columns == kept
    assert {name for name, _ in one.client_states} == {"head"} and len(one.client_states["head", 0]) == kept.count
    other = stage()
    play(other, Ditto(norm="local"), None, None)
    assert {name for name, _ in other.client_states} == {"personal", "norm"}
    assert len(other.client_states["personal", 0]) == spec.size


def test_layer_norms_stay_on_demand():
    spec = stage().network.spec
    for method in (FedBN(layers="all"), FedAvg(norm="local_all")):
        one = stage()
        play(one, method, None)
        assert len(one.client_states["norm", 0]) == spec.norms(every=True).count


def test_a_model_without_norm_layers_is_fedavg_and_said():
    one = Stage(uneven(SIZES), lambda: nn.Linear(6, 3), LocalSGD(steps=2, lr=ETA))
    spec = one.network.spec
    assert "the model has no norm layer of this type" in FedBN().model_warning(spec) and not FedBN().model_warning(
        stage().network.spec
    )
    found, expected = play(one, FedBN(), None, None)[1], play(one, FedAvg(weights="uniform"), None, None)[1]
    assert torch.equal(found.models_KP, expected.models_KP) and not one.client_states


def test_clients_compare_models_by_the_mean_norm_layers():
    """IFCA with `norm: local`: the server's models have the mean statistics of their clients, as without the option."""
    one = stage()
    checked_method, state = play(one, IFCA(num_clusters=2, norm="local"), None, None)
    used = np.unique(state.assign_N)
    assert not torch.equal(state.models_KP[used[0]], one.model(int(used[0])))
    assert (one.network.spec.tensors(state.models_KP[used])["bn1.running_mean"].abs().max(1).values > 1e-3).all()


class TestAll(EnginesAndCheckpoints):
    METHOD = FedBN()
    COHORTS = [[0, 1], [1, 2], [0, 1, 2]]

    def test_engines_agree(self):
        from rounds import assert_engines_agree

        assert_engines_agree(lambda engine: stage(engine, batch_size=4, steps=None), self.METHOD, self.COHORTS)

    def test_continues_from_a_checkpoint_after_any_round(self, tmp_path):
        from rounds import assert_survives_an_interruption

        make = lambda: stage(batch_size=4, steps=None, momentum=0.5, persist=True)
        assert_survives_an_interruption(make, self.METHOD, self.COHORTS, tmp_path)


def normed(input_shape, num_classes):
    """A model of digits with a norm layer."""
    size = int(np.prod(input_shape))
    return nn.Sequential(nn.Flatten(), nn.Linear(size, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, num_classes))


def test_runs_of_the_option_are_those_of_the_method_and_continue(tmp_path):
    """With all clients in every round the figures are the same, to the last bit; a resumed run has them, too."""
    run = {
        "rounds": 3,
        "methods": ["fedbn", {"fedavg": {"norm": "local", "weights": "uniform"}}, {"fedavg": {"weights": "uniform"}}],
        "data": {"shift": {"kind": "brightness", "factors": [1.0, 0.3]}, "partition": {"clients": 4}},
        "model": {"name": normed},
        "local": {"epochs": 1, "batch_size": 32, "drop_last": True},
        "cohort": {"fraction": 1.0},
        "runtime": {"engine": "sequential", "checkpoint_every": 1},
        "tracking": {"enabled": False},
        "output": str(tmp_path),
    }
    whole = simulate(Experiment(**run))
    method, option, shared = (metrics_of(whole[label]) for label in whole.methods)
    without_traffic = lambda rows: [{k: v for k, v in row.items() if not k.startswith("mbit")} for row in rows]
    assert without_traffic(method) == without_traffic(option) != without_traffic(shared)
    simulate_until(2, Experiment(**run), tmp_path / "run")
    found = resume(tmp_path / "run", on_ray=False, experiment=Experiment(**run))
    assert metrics_of(found["fedbn"]) == method


@pytest.mark.parametrize("method", [FedEM(num_models=2, norm="local"), FedAvgPlus(num_models=2, norm="local")], ids=str)
def test_clients_that_mix_models_predict_with_their_own_norm_layers(method):
    """The layers of each model of a mixture; clients that train one model after another have a single set."""
    one, module = stage(), Residual().eval()
    checked_method, state = play(one, method, [0, 1], [0, 1])
    serving, spec = checked_method.serve(state, one.clients(round=3)), one.network.spec
    evaluator = Evaluator(EvaluationConfig(local_samples=10**6), one.federation, one.backend, one.seed)
    scores_MV = evaluator.scores(serving, one.clients(round=3))
    for i in range(3):
        (x, y), p_nC = one.federation.test(i), 0.0
        for k, row_P in enumerate(serving.models_KP.clone()):
            states = [one.client_states[name, i] for name in (f"norm-{k}", "norm") if (name, i) in one.client_states]
            assert len(states) == (i < 2)  # client 2 never took part
            for own in states:
                assert not close(spec.norms().of(row_P), own, 1e-3)
                spec.norms().put(row_P, own)
            module.load_state_dict(spec.tensors(row_P), strict=False)
            p_nC = p_nC + serving.weight_MK[i, k] * module(x).softmax(1).double()
        assert scores_MV[i, 2] == pytest.approx(nll_loss(p_nC.log(), y).item(), abs=1e-5)


@pytest.mark.parametrize(
    "name",
    ["apfl", "fedala", "fedas", "fedbabu", "fedccfa", "fedpac", "fedper", "fedrep", "fedrod", "moon", "pfedme"],
)
def test_clients_of_methods_with_states_of_their_own_train_and_predict_with_their_norm_layers(name, monkeypatch):
    """The first exchange of round 2 starts from the layers of round 1, and predictions have those of the last."""
    starts, held_by = [], programs.held_by

    def noted(chunk, index):
        start_P, held = held_by(chunk, index)
        starts.append((chunk.work.ids_M[index], start_P.clone()))
        return start_P, held

    monkeypatch.setattr(programs, "held_by", noted)
    one, spec = stage(), stage().network.spec
    checked_method, state = play(one, REGISTRY[name](norm="local"), None)
    before = one.client_states
    starts.clear()
    state = checked_method.round(state, one.clients(round=2), Draws(0, 2))
    serving = checked_method.serve(state, one.clients(round=3))
    kept, norms = serving.client_state, spec.norms()
    for i, row_P in enumerate(serving.models_KP[serving.row_M]):
        values = before[kept.name, i], one.client_states[kept.name, i]
        first, last = (norms.of(with_client_state(row_P, kept, value)) for value in values)
        start_P = next(start_P for client, start_P in starts if client == i)
        assert torch.equal(norms.of(start_P), first) and not close(norms.of(row_P), last, 1e-3)
        if not kept.reads_data:
            assert torch.equal(norms.of(predicting_row(row_P, kept, values[1])), last)
    assert not torch.equal(norms.of(state.models_KP[0]), norms.of(one.model()))  # the mean of the clients'


def test_a_personal_head_is_added_beside_the_norm_layers():
    """FedRoD keeps p_i, (3, 4), and the norm layers in one vector."""
    one, module = stage(), Residual().eval()
    checked_method, state = play(one, FedRoD(norm="local"), None, None)
    serving, spec = checked_method.serve(state, one.clients(round=3)), one.network.spec
    evaluator = Evaluator(EvaluationConfig(local_samples=10**6), one.federation, one.backend, one.seed)
    for i, scores in enumerate(evaluator.scores(serving, one.clients(round=3))):
        row_P, value = state.models_KP[0].clone(), one.client_states["personal_head", i]
        norms, p_CF = value[: spec.norms().count], value[spec.norms().count : -1].reshape(3, 4)
        spec.norms().put(row_P, norms)
        module.load_state_dict(spec.tensors(row_P), strict=False)
        module.fc.weight.data += p_CF[:, :3]
        module.fc.bias.data += p_CF[:, 3]
        x, y = one.federation.test(i)
        assert scores[2] == pytest.approx(cross_entropy(module(x), y).item(), abs=1e-5) and p_CF.abs().max() > 1e-2


@pytest.mark.parametrize("name", ["fedem", "fedavg_plus"])
def test_mixtures_of_a_result_have_the_norm_layers_of_the_client(name, tmp_path):
    """Its accuracy is that of the run."""
    experiment = Experiment(
        rounds=2,
        methods=[{name: {"norm": "local", "num_models": 2}}],
        data={"shift": {"kind": "brightness", "factors": [1.0, 0.3]}, "partition": {"clients": 4}},
        model={"name": normed},
        local={"epochs": 2, "batch_size": 32, "drop_last": True},
        tracking={"enabled": False},
        output=str(tmp_path),
    )
    result = simulate(experiment)[name]
    accuracy_M = [(result.predict(result.test(i)[0], like=i) == result.test(i)[1].numpy()).mean() for i in range(4)]
    assert result.final["accuracy"] == pytest.approx(np.mean(accuracy_M), abs=1e-6)


@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_statistics_alone_can_stay(engine):
    """SiloBN: weights and biases of norm layers are averaged, and the running means and variances are each client's."""
    one, spec = stage(engine), stage().network.spec
    statistics = [name for name in spec.names if is_norm(name) and "running" in name]
    method = FedAvg(norm="local_statistics", weights="uniform")
    checked_method, state = play(one, method, None, None)
    kept = checked_method.serve(state, one.clients()).client_state.columns
    assert kept.count == sum(spec.tensors(torch.zeros(spec.size))[name].numel() for name in statistics) == 2 * 2 * 3
    module, row_P = Residual(), one.model()
    clients = [row_P.clone() for _ in SIZES]
    for _ in range(2):
        for i, own_P in enumerate(clients):
            start_P = row_P.clone()
            kept.put(start_P, kept.of(own_P))
            module.load_state_dict(spec.tensors(start_P), strict=False)
            module.train()
            optimizer, (x, y) = torch.optim.SGD(module.parameters(), lr=ETA), one.federation.train(i)
            for _ in range(2):
                optimizer.zero_grad()
                cross_entropy(module(x), y).backward()
                optimizer.step()
            clients[i] = spec.row_of(module)
        row_P = torch.stack(clients).double().mean(0).float()
    assert close(state.models_KP[0], row_P, 2e-5)
    for i, own_P in enumerate(clients):
        assert close(one.client_states["norm", i], kept.of(own_P), 2e-5)
    linear = Stage(uneven(SIZES), lambda: nn.Linear(6, 3), LocalSGD(steps=2, lr=ETA))
    assert method.kept_norms(linear.network.spec) is None  # nothing to keep, and no error
