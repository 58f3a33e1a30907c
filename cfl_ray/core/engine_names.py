"""The names of the engines, which implement the local training on a host; each is a module of `cfl_ray.engine`."""

SEQUENTIAL = "sequential"  # the definition of local training, which can train everything
COMPILED = "compiled"  # needs a compiler
ENGINES = {  # name: how it trains the clients of a host. Of equally fast ones the first is chosen
    SEQUENTIAL: "one by one",
    "span": "full-batch shortcut",
    "manual": "one by one, without autograd",
    "vectorised": "together",
    COMPILED: "one by one, with the gradient compiled by PyTorch",
}
