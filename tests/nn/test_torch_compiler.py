"""The graphs that PyTorch's compiler gets. Whole programs are compiled in `engine/test_compiled.py`."""

import pytest
import torch
from torch.fx import Interpreter

from cfl_ray.nn.recording import record
from cfl_ray.nn.torch_compiler import module_of, update_in_products

pytestmark = pytest.mark.cpu


class Values(Interpreter):
    """Keeps the value of each node, as `torch.export` does."""

    def run_node(self, node):
        node.meta["val"] = super().run_node(node)
        return node.meta["val"]


def step(w, x, rate):
    """A step on half the squared norm of the outputs, whose gradient is a product."""
    y = x @ w.t()
    return (w - rate[0] * (y.t() @ x).t().t(),)


@pytest.mark.parametrize(
    "function, samples, products",
    [
        (step, 2, ["addmm", "mm"]),
        (step, 4, ["mm", "mm"]),  # as many outputs of samples as weights
        (lambda w, x, rate: (w[None] - rate[0] * ((x @ w.t()).t() @ x),), 2, ["mm", "mm"]),  # not of the same shape
        (lambda w, x, rate: (w - rate * ((x @ w.t()).t() @ x),), 2, ["mm", "mm"]),  # several rates
        (lambda w, x, rate: (w - rate[0] * (x.t() @ (x @ w.t())).t(),), 2, ["mm", "mm"]),  # transposed
    ],
    ids=["few samples", "many samples", "shapes", "rates", "transposed"],
)
def test_weights_are_updated_in_the_product_of_their_gradient_if_it_has_few_samples(function, samples, products):
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.rand(3, 4, generator=draw), torch.rand(samples, 4, generator=draw), torch.rand(4, generator=draw)]
    module = module_of(record(function, inputs)[0])
    (expected,) = Values(module).run(*inputs)
    update_in_products(module.graph)
    module.graph.eliminate_dead_code()
    module.recompile()
    assert torch.allclose(module(*inputs)[0], expected, rtol=0, atol=1e-6)
    names = [node.target._schema.name for node in module.graph.nodes if node.op == "call_function"]
    assert sorted(name for name in (n.removeprefix("aten::") for n in names) if name in ("mm", "addmm")) == products
