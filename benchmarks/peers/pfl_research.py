"""FedAvg of pfl-research (Apple): `SimulatedBackend` in one process of one thread per core, started by torchrun.

That is how its guide "Fast distributed simulations" starts several processes for PyTorch models; it calls data in
memory (`pfl.data.dataset.Dataset`) the fastest. Every user trains in every round. Batches follow the order of the
samples in every epoch, since this class does not shuffle. Users are evaluated in the first round alone, the warm-up.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.peers.common import CORES, Trained, run
from benchmarks.workloads import Workload, first_model, samples_by_client

_MOST = 1_000_000  # rounds, of which a callback ends the training earlier


def train(work: Workload, rounds: int) -> Trained:
    with tempfile.TemporaryDirectory() as folder:
        order, result = Path(folder) / "order", Path(folder) / "result"
        order.write_bytes(pickle.dumps((work, rounds)))
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nnodes=1",
            f"--nproc_per_node={CORES}",
        ]
        environment = os.environ | {"PFL_PYTORCH_DEVICE": "cpu", "OMP_NUM_THREADS": "1"}
        subprocess.run([*launch, "-m", __spec__.name, str(order), str(result)], env=environment, check=True)
        return pickle.loads(result.read_bytes())


def _worker(order: Path, result: Path) -> None:
    """Trains in one of the processes; that of rank 0 writes the result."""
    from pfl.internal.ops import pytorch_ops

    work, rounds = pickle.loads(order.read_bytes())
    ends: list[float] = []

    def next_round() -> bool:
        ends.append(time.perf_counter())
        return len(ends) <= rounds

    model = federated_averaging(work, first_model(work), next_round)
    if pytorch_ops.distributed.global_rank == 0:
        seconds = [end - start for start, end in zip(ends, ends[1:])]
        result.write_bytes(pickle.dumps(Trained(seconds, model)))


def federated_averaging(
    work: Workload, first: Sequence[np.ndarray], next_round: Callable[[], bool]
) -> list[np.ndarray]:
    """The model after all rounds. next_round: called before each; False ends the training."""
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    from benchmarks.peers.bare import load, mean_loss, module_of

    torch.set_num_threads(1)
    x, y = (torch.from_numpy(array) for array in samples_by_client(work))
    data = {user: [x[user], y[user]] for user in range(work.clients)}
    users = FederatedDataset.from_slices(data, get_user_sampler("minimize_reuse", list(data)))
    module = module_of(work)
    params = list(module.parameters())
    load(params, [torch.from_numpy(array) for array in first])
    module.loss = lambda x_B, y_B: mean_loss(module(x_B), y_B)
    module.metrics = lambda *samples: {}
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(params, lr=1.0))

    class Rounds(TrainingProcessCallback):
        def on_train_begin(self, *, model):
            next_round()
            return Metrics()

        def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
            return not next_round(), Metrics()

    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=_MOST,
            evaluation_frequency=_MOST + 1,
            train_cohort_size=work.clients,
            val_cohort_size=None,
        ),
        SimulatedBackend(users, users, postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(
            local_learning_rate=work.lr, local_num_epochs=work.epochs, local_batch_size=work.batch or work.samples
        ),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[Rounds()],
        send_metrics_to_platform=False,
    )
    return [p.detach().numpy() for p in params]


if __name__ == "__main__":
    if "RANK" in os.environ:
        _worker(*map(Path, sys.argv[1:]))
    else:
        run("pfl-research", train, ["pfl", "torch", "numpy"])
