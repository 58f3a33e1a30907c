"""FedAvg written by hand in JAX: `shard_map` over one CPU device per core, and on each its clients in groups by `vmap`.

A whole round is one compiled program; XLA computes with one thread per device. `_WIDTH` clients train together.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from functools import partial

from benchmarks.peers.common import CORES, Trained, run, timed_rounds

os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={CORES} --xla_cpu_multi_thread_eigen=false"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.peers.jax_models import loss, num_convolutions, to_jax, to_torch
from benchmarks.workloads import Workload, first_model, samples_by_client

_WIDTH = {"mlp": 1, "lenet5": 5, "leaf_cnn": 1}  # clients of a `vmap`: more are faster for small networks alone


def train(work: Workload, rounds: int) -> Trained:
    width = _WIDTH[work.model]
    block = CORES * width
    count = -(-work.clients // block) * block  # the last clients are padding, of weight 0
    owner = np.arange(count).reshape(CORES, -1, width)
    weight = np.where(owner < work.clients, np.float32(1 / work.clients), np.float32(0))
    x, y = samples_by_client(work)
    owner = np.minimum(owner, work.clients - 1)
    mesh = jax.make_mesh((CORES,), ("device",))
    of_device, of_all = NamedSharding(mesh, P("device")), NamedSharding(mesh, P())
    x, y, weight = (jax.device_put(array, of_device) for array in (x[owner], y[owner].astype(np.int32), weight))
    gradient = jax.grad(partial(loss, num_convolutions=num_convolutions(work)))
    batch, draw = work.batch or work.samples, np.random.default_rng(0)

    def train_client(params, x, y, order):
        def step(params, index_B):
            grads = gradient(params, x, y) if batch == work.samples else gradient(params, x[index_B], y[index_B])
            return jax.tree.map(lambda w, g: w - work.lr * g, params, grads), None

        return jax.lax.scan(step, params, order)[0]

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), *[P("device")] * 4), out_specs=P(), check_vma=False)
    def one_round(params, *clients):  # of this device: arrays (1, groups, width, ...)
        def group(total, clients):
            x, y, weight, order = clients
            trained = jax.vmap(train_client, (None, 0, 0, 0))(params, x, y, order)
            return jax.tree.map(lambda t, w: t + jnp.tensordot(weight, w, 1), total, trained), None

        zero = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.psum(jax.lax.scan(group, zero, tuple(array[0] for array in clients))[0], "device")

    def orders() -> np.ndarray:
        """Sample indices (..., steps, batch) of every client, drawn anew in every round."""
        index = np.broadcast_to(np.arange(work.samples, dtype=np.int32), (*owner.shape, work.epochs, work.samples))
        if work.shuffle and batch < work.samples:
            index = draw.permuted(index, axis=-1)
        return index.reshape(*owner.shape, -1, batch)

    params = jax.device_put(to_jax(first_model(work)), of_all)

    def advance() -> None:
        nonlocal params
        params = jax.block_until_ready(one_round(params, x, y, weight, jax.device_put(orders(), of_device)))

    seconds = timed_rounds(advance, rounds)
    return Trained(seconds, to_torch(params, work))


if __name__ == "__main__":
    run("JAX by hand", train, ["jax", "jaxlib", "numpy"])
