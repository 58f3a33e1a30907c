"""Own modules written by hand in JAX, for turns: a round is one program, a `lax.scan` over clients and their batches.

Parameters have PyTorch's names and layout, and the equations are those of PyTorch's layers (`benchmarks/models.py`).
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # XLA has a thread for each core that it may use

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers.turns import Model, NextRound, run
from benchmarks.workloads import Workload, samples_by_client

Params = dict[str, jax.Array]
HEADS, EPS = 4, 1e-5


def linear(params: Params, name: str, x: jax.Array) -> jax.Array:
    """`nn.Linear`, with or without bias."""
    x = x @ params[f"{name}.weight"].T
    return x + params[f"{name}.bias"] if f"{name}.bias" in params else x


def layer_norm(params: Params, name: str, x: jax.Array) -> jax.Array:
    """`nn.LayerNorm` of the last axis."""
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPS) * params[f"{name}.weight"] + params[f"{name}.bias"]


def dropout(key: jax.Array, number: int, x: jax.Array, rate: float) -> jax.Array:
    """`nn.Dropout`. number: that of the mask in a step."""
    if not rate:
        return x
    return jnp.where(jax.random.bernoulli(jax.random.fold_in(key, number), 1 - rate, x.shape), x / (1 - rate), 0)


def attention(params: Params, name: str, x: jax.Array, key: jax.Array, rate: float, causal: bool) -> jax.Array:
    """`nn.MultiheadAttention` of x (B, T, F) to itself."""
    b, t, f = x.shape
    qkv = x @ params[f"{name}.in_proj_weight"].T + params[f"{name}.in_proj_bias"]
    q, k, v = jnp.moveaxis(qkv.reshape(b, t, 3, HEADS, f // HEADS), (2, 3), (0, 2))
    weights = q @ k.mT * (f // HEADS) ** -0.5
    if causal:
        weights = jnp.where(jnp.tril(jnp.ones((t, t), bool)), weights, -jnp.inf)
    weights = dropout(key, 0, jax.nn.softmax(weights), rate)
    return linear(params, f"{name}.out_proj", (weights @ v).swapaxes(1, 2).reshape(b, t, f))


def encoder(params: Params, x: jax.Array, key: jax.Array, layers: int, act, rate=0.0, first=False) -> jax.Array:
    """`nn.TransformerEncoder` of x (B, T, F). first: norms are before the attention, which is causal, else after."""
    for layer in range(layers):
        name, key_of_layer = f"encoder.layers.{layer}", jax.random.fold_in(key, layer)

        def mixed(x: jax.Array, name=name, key=key_of_layer) -> jax.Array:
            return dropout(key, 1, attention(params, f"{name}.self_attn", x, key, rate, first), rate)

        def wide(x: jax.Array, name=name, key=key_of_layer) -> jax.Array:
            inner = dropout(key, 2, act(linear(params, f"{name}.linear1", x)), rate)
            return dropout(key, 3, linear(params, f"{name}.linear2", inner), rate)

        norm1, norm2 = (partial(layer_norm, params, f"{name}.norm{number}") for number in (1, 2))
        if first:
            x = x + mixed(norm1(x))
            x = x + wide(norm2(x))
        else:
            x = norm1(x + mixed(x))
            x = norm2(x + wide(x))
    return x


def mlp(params: Params, x: jax.Array, key: jax.Array, hidden: int) -> jax.Array:
    """Logits of `benchmarks.models.MLP`."""
    return linear(params, "fc2", jax.nn.relu(linear(params, "fc1", x.reshape(len(x), -1))))


def transformer(params: Params, x: jax.Array, key: jax.Array, dropout: float) -> jax.Array:
    """Logits of `benchmarks.models.Transformer`."""
    x = encoder(params, linear(params, "embed", x.squeeze(1)), key, 2, jax.nn.relu, dropout)
    return linear(params, "fc", x.mean(1))


def vit(params: Params, x: jax.Array, key: jax.Array) -> jax.Array:
    """Logits of `benchmarks.models.ViT`: its convolution is a product with patches of 4 x 4."""
    patches = x.reshape(-1, 3, 8, 4, 8, 4).transpose(0, 2, 4, 1, 3, 5).reshape(-1, 64, 48)
    weight = params["patches.weight"].reshape(64, 48)
    x = patches @ weight.T + params["patches.bias"] + params["positions"]
    x = encoder(params, x, key, 3, partial(jax.nn.gelu, approximate=False))
    return linear(params, "fc", x.mean(1))


def gpt(params: Params, x: jax.Array, key: jax.Array) -> jax.Array:
    """Logits of `benchmarks.models.GPT`."""
    x = params["embed.weight"][x] + params["positions"][: x.shape[1]]
    x = encoder(params, x, key, 2, partial(jax.nn.gelu, approximate=False), first=True)
    return linear(params, "fc", layer_norm(params, "norm", x))


MODELS = {"mlp": mlp, "transformer": transformer, "vit": vit, "gpt": gpt}


def train(work: Workload, first: Model, next_round: NextRound) -> Model:
    x, y = samples_by_client(work)
    x, y = jnp.asarray(x), jnp.asarray(y.astype(np.int32))
    batch, network = work.batch or work.samples, MODELS[work.model]
    full = work.samples // batch * batch

    def loss(params: Params, x: jax.Array, y: jax.Array, key: jax.Array) -> jax.Array:
        log_p = jax.nn.log_softmax(network(params, x, key, **work.options))
        return -jnp.take_along_axis(log_p, y[..., None], -1).mean()

    def train_client(params: Params, client: tuple) -> Params:
        x, y, order, key = client  # order (epochs, samples)

        def step(params: Params, batch: tuple) -> tuple:
            index_B, number = batch
            grads = jax.grad(loss)(params, x[index_B], y[index_B], jax.random.fold_in(key, number))
            return jax.tree.map(lambda w, g: w - work.lr * g, params, grads), None

        def epoch(params: Params, order: tuple) -> tuple:
            index, number = order
            numbers = number * work.steps + jnp.arange(full // batch)
            params = jax.lax.scan(step, params, (index[:full].reshape(-1, batch), numbers))[0]
            if full < work.samples:
                params = step(params, (index[full:], number * work.steps + full // batch))[0]
            return params, None

        return jax.lax.scan(epoch, params, (order, jnp.arange(work.epochs)))[0]

    @jax.jit
    def one_round(params: Params, orders: jax.Array, keys: jax.Array) -> Params:
        def add(total: Params, client: tuple) -> tuple:
            return jax.tree.map(jnp.add, total, train_client(params, client)), None

        total = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), (x, y, orders, keys))[0]
        return jax.tree.map(lambda value: value / work.clients, total)

    params, draw, number = {name: jnp.asarray(value) for name, value in first.items()}, np.random.default_rng(0), 0
    while next_round():
        order = np.broadcast_to(np.arange(work.samples, dtype=np.int32), (work.clients, work.epochs, work.samples))
        order = draw.permuted(order, axis=-1) if work.shuffle else order
        keys = jax.random.split(jax.random.key(number, impl="rbg"), work.clients)
        params, number = jax.block_until_ready(one_round(params, order, keys)), number + 1
    return {name: np.asarray(value) for name, value in params.items()}


if __name__ == "__main__":
    run({"plain_jax": train}, ["jax", "jaxlib", "numpy"])
