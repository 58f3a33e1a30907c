"""DP-SGD: gradients of single samples, their clipping and noise, and batches in which each sample is by itself."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from closeness import close
from federations import Stage, uneven
from torch import nn
from training_tasks import with_fields

from cfl_ray.core.local_sgd import ExampleNoise, LocalSGD
from cfl_ray.core.work import Address, Proximal
from cfl_ray.data.synthetic import SyntheticFederation
from cfl_ray.engine.engines import ENGINES
from cfl_ray.engine.sequential import train
from cfl_ray.engine.task import TrainingTask
from cfl_ray.nn.network import Network

CLIP = 0.4


def flat() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4))


class Scaled(nn.Module):
    """Has a trained number, without axes."""

    def __init__(self):
        super().__init__()
        self.head, self.scale = nn.Linear(6, 3), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.head(x) * self.scale


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 3))


def case(factory=flat, shape=(6,), classes=3, samples=12, **local):
    federation = SyntheticFederation(2, input=shape, classes=classes, groups=1, samples=samples, seed=0)
    network = Network(factory, federation.shape.input)
    x, y = federation.train(0)
    settings = LocalSGD(**{"lr": 1.0, "examples": ExampleNoise(1.0, CLIP)} | local)
    return network, TrainingTask(3, network.new_model(0, 0), x, y, 1, settings, Address(0, 1, 1))


def change(network, task) -> torch.Tensor:
    (result,) = train(network, [task])
    return result.row_P.cpu().clone() - task.start_P


@pytest.mark.parametrize("factory, shape, classes", [(flat, (6,), 3), (convolutions, (1, 4, 4), 4), (Scaled, (6,), 3)])
@pytest.mark.parametrize("at_once, scale", [(1, 1), (5, 1), (10**6, 1), (5, 1e-4), (5, 1e4)])
def test_is_the_mean_of_clipped_gradients_of_single_samples(factory, shape, classes, at_once, scale, monkeypatch):
    """- sum_j g_j min(1, C / |g_j|) / n, each g_j by autograd on a batch of one sample."""
    network, task = case(factory, shape, classes)
    task = replace(task, x=task.x * scale)
    monkeypatch.setattr("cfl_ray.engine.example_gradients._FLOATS", at_once * network.spec.trained)
    found_P = change(network, task)
    network.load(task.start_P)
    expected_P, norms = torch.zeros(network.spec.trained, dtype=torch.float64), []
    for x, y in zip(task.x, task.y, strict=True):
        logits = network.module(network.input(x[None]))
        loss = nn.functional.cross_entropy(logits, y[None].to(network.device))
        row_P = torch.cat([g.cpu().flatten() for g in torch.autograd.grad(loss, network.params)]).double()
        norms.append(row_P.norm().item())
        expected_P -= row_P * CLIP / max(norms[-1], CLIP) / len(task.y)  # a gradient may be 0
    assert max(norms) > CLIP, "some gradients are clipped"
    assert close(found_P.double(), expected_P, 1e-4)


def test_one_sample_changes_a_step_by_at_most_the_norm():
    network, task = case(samples=5)
    whole_P = change(network, task)
    for out in range(5):
        rest = [j for j in range(5) if j != out]
        without_P = change(network, replace(task, x=task.x[rest], y=task.y[rest]))
        assert (5 * whole_P - 4 * without_P).norm() <= CLIP * (1 + 1e-5)


def test_dropout_masks_are_those_of_the_plain_engine():
    """With a norm that clips nothing, and no noise, it is the plain step."""
    network, task = case(with_dropout, examples=ExampleNoise(1, 1e6))
    plain = replace(task, local=replace(task.local, examples=None))
    assert close(change(network, task), change(network, plain), 1e-4)


def test_proximal_terms_and_momentum_use_no_samples_and_are_not_clipped():
    network, task = case(examples=ExampleNoise(1, 1e6), momentum=0.5, weight_decay=0.1)
    anchor = Proximal(0.3, network.new_model(0, 1))
    task = with_fields(task, steps=3, proximal=(anchor,))
    plain = replace(task, local=replace(task.local, examples=None))
    assert close(change(network, task), change(network, plain), 1e-4)


def test_noise_has_the_deviation_of_the_plan_and_an_address():
    """z C / B on every number, of a client whose samples have no gradient."""
    network, task = case(lambda: nn.Linear(6, 3000), classes=3000, examples=ExampleNoise(2.0, CLIP, b"key"))
    task = replace(task, x=task.x * 0, start_P=task.start_P * 0)
    clean_P = change(network, replace(task, local=replace(task.local, examples=ExampleNoise(2.0, CLIP))))
    noise_P = change(network, task) - clean_P
    assert noise_P.std().item() == pytest.approx(2.0 * CLIP / len(task.y), rel=0.02)
    assert noise_P.equal(change(network, task) - clean_P)
    others = (replace(task, client=4), replace(task, address=Address(0, 2, 1)))
    others += (replace(task, local=replace(task.local, examples=ExampleNoise(2.0, CLIP, b"other"))),)
    assert not any(noise_P.equal(change(network, other) - clean_P) for other in others)


def test_steps_of_a_round_have_noise_of_their_own():
    network, task = case(examples=ExampleNoise(1.0, CLIP, b"key"))
    once_P, twice_P = (change(network, replace(task, steps=steps)) for steps in (1, 2))
    assert (twice_P - 2 * once_P).norm() > 0.1 * once_P.norm()


def test_a_sample_that_is_not_finite_counts_as_zeros():
    network, task = case()
    spoiled = replace(task, x=task.x.clone().index_fill_(0, torch.tensor([2]), torch.inf))
    rest = [j for j in range(len(task.y)) if j != 2]
    without = replace(task, x=task.x[rest], y=task.y[rest])
    expected_P = change(network, without) * len(rest) / len(task.y)
    assert close(change(network, spoiled), expected_P, 1e-4)


def test_batches_are_poisson_samples():
    """Each sample is in a batch with chance B / n, by itself: sizes are binomial, and no batch depends on another."""
    local = LocalSGD(batch_size=5, examples=ExampleNoise(1.0, 1.0))
    batches = list(local.batches(20, 4000, np.random.default_rng(0)))
    sizes = np.array([len(batch) for batch in batches])
    assert sizes.mean() == pytest.approx(5, abs=4.5 * (20 * 0.25 * 0.75 / 4000) ** 0.5)
    assert sizes.var() == pytest.approx(20 * 0.25 * 0.75, rel=0.1) and (sizes == 0).any()
    counts = np.bincount(np.concatenate(batches), minlength=20)
    assert np.abs(counts / 4000 - 0.25).max() < 4.5 * (0.25 * 0.75 / 4000) ** 0.5
    assert list(replace(local, batch_size=None).batches(20, 2, None)) == [None, None]


@pytest.mark.parametrize("factory", [flat, with_dropout])
def test_an_empty_batch_is_a_step_of_noise(factory):
    network, task = case(factory, batch_size=1, examples=ExampleNoise(1.0, CLIP, b"key"), samples=40)
    rows = [train(network, [replace(task, client=client)]) for client in range(12)]
    results = [next(result) for result in rows]
    empty = [len(next(replace(task, client=client).batches())) == 0 for client in range(12)]
    assert any(empty) and all(np.isfinite(result.train_loss) for result in results)


@pytest.mark.parametrize("engine", ["manual", "span", "vectorised"])
def test_other_engines_leave_it_to_sequential(engine):
    local = LocalSGD(batch_size=4, examples=ExampleNoise(1.0, CLIP, b"key"))
    network, task = case()
    assert "single samples" in ENGINES[engine].why_not(network, [replace(task, local=local)])
    rows = []
    for name in ("sequential", engine):
        clients = Stage(uneven([9, 12, 7]), flat, local, name).clients()
        start = torch.zeros(1, 53)
        rows.append(clients.train(clients.send(start), average=torch.ones(1, 3)).averaged(start))
    assert rows[0].equal(rows[1])


def test_is_the_step_of_opacus():
    """Its per-sample gradients, clipping and mean, beside ours; needs the package, which cfl_ray does not."""
    opacus = pytest.importorskip("opacus")
    network, task = case()
    found_P = change(network, task)
    module = flat()
    network.load(task.start_P)
    module.load_state_dict(dict(zip(module.state_dict(), (p.detach().clone() for p in network.params), strict=True)))
    private = opacus.GradSampleModule(module)
    optimizer = opacus.optimizers.DPOptimizer(
        torch.optim.SGD(private.parameters(), lr=1.0),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        expected_batch_size=len(task.y),
    )
    nn.functional.cross_entropy(private(task.x), task.y).backward()
    before = torch.cat([p.detach().flatten() for p in module.parameters()]).clone()
    optimizer.step()
    after = torch.cat([p.detach().flatten() for p in module.parameters()])
    assert close(found_P, after - before, 1e-4)
