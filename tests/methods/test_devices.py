"""Every method on a simulated CUDA device: no operation is on tensors of two devices, and figures are equal."""

import contextlib
import functools

import numpy as np
import pytest
import torch
from covering import covering
from fake_cuda import fake_cuda
from small_runs import figures
from test_runs import EVERY_METHOD, LOCALS, assert_figures_agree, make_experiment, some_methods

import cfl_ray
from cfl_ray.core.work import Averaging
from cfl_ray.engine.reduce import ChunkSums, HostSums
from cfl_ray.methods import REGISTRY


def test_the_simulated_device_refuses_what_a_gpu_refuses():
    with fake_cuda():
        there, here = torch.ones(3, device="cuda"), torch.ones(3)
        assert there.device.type == (there + 1).device.type == there[:2].device.type == "cuda"
        assert there.cpu().device.type == here.to(there).cpu().device.type == "cpu"
        assert torch.equal(there[torch.tensor([0, 2])].cpu(), torch.ones(2))
        for operation in (lambda: there + here, lambda: here.add_(there), lambda: here[there.long()]):
            with pytest.raises(RuntimeError, match="on the same device"):
                operation()
        with pytest.raises(TypeError, match="numpy"):
            there.numpy()


@pytest.mark.parametrize("first, second", [("cpu", "cuda"), ("cuda", "cpu")])
def test_uploads_on_both_devices_have_one_sum(first, second):
    """A vmap batch whose rows are used leaves them on the CPU; the client that is left alone has its row on the GPU."""
    with fake_cuda():
        sums, total = ChunkSums(Averaging.of(np.ones((1, 2)), 2)), HostSums()
        for client, device in enumerate((first, second)):
            sums.add(client, torch.full((3,), client + 1.0, device=device), torch.zeros(3))
        sums.close()
        total.add(sums)
        total.add(sums)
        assert total.values()[0].tolist() == [3.0] * 3 and total.totals[0].device.type == "cpu"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Returns a function: on a GPU, LOCALS -> figures of each method; a run of all of them is made once.

    With `vectorised` these are the methods that make every kind of request.
    """

    @functools.cache
    def of(on_a_gpu: bool, local: str):
        data, evaluation = {"synthetic_samples": 7}, {"local_samples": 1000, "tuned_epochs": 1, "every": 3}
        sections = {"local": LOCALS[local], "data": data, "evaluation": evaluation}
        runtime = {"engine": local.partition(",")[0]}
        methods = EVERY_METHOD if local.startswith("span") else some_methods(covering())
        run = make_experiment(tmp_path_factory.mktemp("every"), methods, 3, runtime=runtime, **sections)
        with fake_cuda() if on_a_gpu else contextlib.nullcontext():
            found = cfl_ray.simulate(run)
        return {name: figures(result) for name, result in found.methods.items()}

    return of


CASES = [
    *(("vectorised, mini-batches", name) for name in covering()),
    *(pytest.param("span, full batch", name, marks=pytest.mark.slow) for name in REGISTRY),
]


@pytest.mark.parametrize("local, name", CASES)
def test_a_run_on_a_gpu_has_the_figures_of_the_cpu(name, local, runs):
    """Up to rounding, as vmap batches are larger there; with recorded steps, samples and sums on the device."""
    expected, found = (runs(on_a_gpu, local)[name] for on_a_gpu in (False, True))
    assert_figures_agree(found, expected)
