"""The workloads and the bare loop, with which other systems are compared."""

import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from closeness import close
from torch.nn.functional import cross_entropy

from benchmarks.compare import distance, plain_round
from benchmarks.memory import PeakMemory
from benchmarks.peers import bare, torch_loops, turns
from benchmarks.workloads import OWN_MODULES, WORKLOADS, first_model, samples_by_client, samples_of, shapes_of

PEERS = Path(bare.__file__).parent


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_first_model_fits_the_module(name):
    work = WORKLOADS[name]
    params = [p.detach().numpy() for p in bare.module_of(work).parameters()]
    assert [p.shape for p in params] == shapes_of(work) == [array.shape for array in first_model(work)]
    for array, p in zip(first_model(work), params):
        assert array.dtype == np.float32
        if array.size > 100:  # both are uniform in +- 1 / sqrt(inputs)
            assert np.abs(array).max() == pytest.approx(np.abs(p).max(), rel=0.1)


def test_samples_by_client_are_those_of_the_federation():
    work = replace(WORKLOADS["W1"], clients=3, samples=5)
    x, y, clients = samples_of(work)
    x_by_client, y_by_client = samples_by_client(work)
    assert np.bincount(clients).tolist() == [5, 5, 5] and x_by_client.dtype == np.float32
    assert np.allclose(x_by_client[1], x[clients == 1] / 255) and (y_by_client[1] == y[clients == 1]).all()


def test_the_bare_loop_trains_a_client_as_sgd_does():
    """One full-batch step: W = w - lr * gradient."""
    work = replace(WORKLOADS["W1"], options={"hidden": 4}, clients=2, samples=5, epochs=1)
    x, y = (torch.from_numpy(array) for array in samples_by_client(work))
    module = bare.module_of(work)
    params = list(module.parameters())
    gradients = torch.autograd.grad(cross_entropy(module(x[0]), y[0]), params)
    expected = [p.detach() - work.lr * gradient for p, gradient in zip(params, gradients)]
    bare.train_client(module, params, x[0], y[0], work)
    for found, value in zip(params, expected):
        assert close(found.detach(), value, 1e-5)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_client_takes_as_many_steps_as_the_workload_says(name, monkeypatch):
    work, steps = WORKLOADS[name].for_check(), []
    step = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: (steps.append(1), step(self)))
    x, y = (torch.from_numpy(array) for array in samples_by_client(work))
    module = bare.module_of(work)
    bare.train_client(module, list(module.parameters()), x[0], y[0], work)
    assert len(steps) == work.steps and (WORKLOADS["W2"].steps, WORKLOADS["W3"].steps) == (500, 10)


def test_requirements_are_pinned_and_belong_to_a_peer():
    files = sorted((PEERS / "requirements").glob("*.txt"))
    assert files and all((PEERS / f"{file.stem}.py").exists() for file in files)
    for file in files:
        for line in file.read_text().splitlines():
            assert line.startswith("#") or re.fullmatch(r"[a-z-]+(\[[a-z,]+\])?==[0-9.]+", line), f"{file.name}: {line}"


def test_peak_memory_counts_descendants():
    child = "import time; held = bytearray(200_000_000); time.sleep(1.5)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with PeakMemory() as memory:
        subprocess.run([sys.executable, "-c", parent], check=True)
    assert memory.peak > 200e6


def test_jax_models_keep_the_layout():
    pytest.importorskip("jax")
    from benchmarks.peers import jax_models

    for work in WORKLOADS.values():
        arrays = first_model(work)
        for found, expected in zip(jax_models.to_torch(jax_models.to_jax(arrays), work), arrays, strict=True):
            assert (found == expected).all()


class TestTurns:
    """Systems that train own modules in turn with cfl_ray."""

    WORK = replace(
        OWN_MODULES["GPT-like, 64 tokens of 80"], classes=7, tokens=5, clients=2, samples=5, batch=2
    ).for_check()

    @pytest.mark.parametrize("make", [torch_loops.plain, torch_loops.compiled_module, torch_loops.compiled_step])
    def test_every_loop_trains_as_the_plain_one(self, make, monkeypatch):
        """With the compiler left out: two batches of two samples and one of one, of two clients."""
        monkeypatch.setattr(torch, "compile", lambda function=None, **_: function or (lambda given: given))
        work = replace(self.WORK, clients=2, samples=5)
        first = {name: p.detach().numpy().copy() for name, p in bare.module_of(work).named_parameters()}
        found = torch_loops.train(make, work, first, iter([True, False]).__next__)
        expected = plain_round(work, list(first.values()))
        assert distance(list(found.values()), expected, list(first.values())) < 1e-5

    def test_a_line_is_a_round_and_the_end_of_input_is_the_end(self, monkeypatch):
        told = io.StringIO()
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n"))
        following = turns.Turns(told)
        assert [following(), following(), following()] == [True, True, False]
        assert len(told.getvalue().splitlines()) == 2 and all(float(line) >= 0 for line in told.getvalue().split())

    @pytest.mark.parametrize("name", ["MLP 784-200-10", "Transformer", "ViT, 3x32x32", "GPT-like, 64 tokens of 80"])
    def test_networks_in_jax_have_the_same_outputs(self, name):
        pytest.importorskip("jax")
        from benchmarks.peers import jax_modules

        work = replace(OWN_MODULES[name], clients=1, samples=3)
        module, x = bare.module_of(work), samples_by_client(work)[0][0]
        params = {name: p.detach().numpy() for name, p in module.named_parameters()}
        found = jax_modules.MODELS[work.model](params, x, jax_modules.jax.random.key(0), **work.options)
        assert close(torch.from_numpy(np.array(found)), module(torch.from_numpy(x)).detach(), 1e-5)
