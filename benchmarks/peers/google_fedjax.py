"""FedAvg of FedJAX: `fedjax.algorithms.fed_avg` on a backend for all clients, with the models of `jax_models`.

`pmap` runs one client on each of one CPU device per core; `jit`, its default on CPUs, one client after another.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from functools import partial

from benchmarks.peers.common import CORES, Trained, run, timed_rounds

BACKEND = os.environ.get("FEDJAX_BACKEND", "pmap")
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false" + (
    f" --xla_force_host_platform_device_count={CORES}" if BACKEND == "pmap" else ""
)

import fedjax
import jax
import numpy as np

from benchmarks.peers.jax_models import loss, num_convolutions, to_jax, to_torch
from benchmarks.workloads import Workload, first_model, samples_by_client


def train(work: Workload, rounds: int) -> Trained:
    fedjax.set_for_each_client_backend(BACKEND)
    x, y = samples_by_client(work)
    data = fedjax.InMemoryFederatedData(
        {client: {"x": x[client], "y": y[client].astype(np.int32)} for client in range(work.clients)}
    )
    gradient = jax.grad(partial(loss, num_convolutions=num_convolutions(work)))
    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        lambda params, batch, rng: gradient(params, batch["x"], batch["y"]),
        client_optimizer=fedjax.optimizers.sgd(work.lr),
        server_optimizer=fedjax.optimizers.sgd(1.0),
        client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(
            batch_size=work.batch or work.samples, num_epochs=work.epochs, skip_shuffle=not work.shuffle
        ),
    )
    state, keys = algorithm.init(to_jax(first_model(work))), jax.random.split(jax.random.PRNGKey(0), work.clients)

    def one_round() -> None:
        nonlocal state
        clients = [(client, samples, key) for (client, samples), key in zip(data.clients(), keys)]
        state, _ = algorithm.apply(state, clients)
        jax.block_until_ready(state.params)

    return Trained(timed_rounds(one_round, rounds), to_torch(state.params, work))


if __name__ == "__main__":
    run("FedJAX", train, ["fedjax", "jax", "jaxlib", "numpy"])
