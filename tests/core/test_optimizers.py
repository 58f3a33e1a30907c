"""The optimisers that a config can name, and what is refused."""

import pytest
import torch

from cfl_ray.core.optimizers import OPTIMIZERS, resolve_optimizer
from cfl_ray.errors import ConfigError


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS.names() if name != "sgd"])
def test_every_name_is_made(name):
    made = resolve_optimizer(name, {"weight_decay": 0.1} if name != "rprop" else {})
    assert made.elementwise and isinstance(made([torch.zeros(2)], 0.3), OPTIMIZERS.builtin[name])
    assert made([torch.zeros(2)], 0.3).param_groups[0]["lr"] == 0.3


def test_sgd_is_that_of_the_engines():
    assert resolve_optimizer("sgd", {}) is None
    with pytest.raises(ConfigError, match="sgd has none; set local.momentum and local.weight_decay"):
        resolve_optimizer("sgd", {"momentum": 0.9})


def test_own(tmp_path):
    (tmp_path / "opt.py").write_text(
        "import torch\n\n\nclass Sign(torch.optim.Optimizer):\n    def __init__(self, params, lr):\n"
        "        super().__init__(params, {'lr': lr})\n\n    @torch.no_grad()\n    def step(self):\n"
        "        for group in self.param_groups:\n            for p in group['params']:\n"
        "                p.sub_(p.grad.sign(), alpha=group['lr'])\n\n\ndef nothing(params, lr):\n    return None\n"
    )
    assert not resolve_optimizer(f"{tmp_path}/opt.py:Sign", {}).elementwise
    with pytest.raises(ConfigError, match=r"Sign \(.*opt.py, line 4\) has no option 'decay'"):
        resolve_optimizer(f"{tmp_path}/opt.py:Sign", {"decay": 1})
    with pytest.raises(ConfigError, match="makes NoneType, expected a torch.optim.Optimizer"):
        resolve_optimizer(f"{tmp_path}/opt.py:nothing", {})


@pytest.mark.parametrize(
    "name, options, text",
    [
        ("adamm", {}, "unknown optimizer 'adamm'.*did you mean"),
        ("adam", {"beta": 3}, "Adam has no option 'beta'.*did you mean 'betas'"),
        ("adam", {"betas": [2, 0.5]}, "Adam failed: ValueError: Invalid beta"),
        (3, {}, "local.optimizer 3 is int, expected a torch.optim class"),
    ],
)
def test_what_is_refused(name, options, text):
    with pytest.raises(ConfigError, match=text):
        resolve_optimizer(name, options)
