"""Frozen parameters in memory that processes share."""

import copy
import pickle
import warnings

import numpy as np
import torch
from torch import nn

from cfl_ray.nn.shared import FrozenParameter, digest_of, shared_tensor


class Tied(nn.Module):
    """Frozen parameters that are tied, of several types and layouts, beside a trained one."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight
        self.coarse = nn.Parameter(torch.randn(3, 2).to(torch.bfloat16))
        self.rows = nn.Parameter(torch.randn(2, 6).T)
        self.image = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(2))
        FrozenParameter.replace_in(self)


def test_a_pickle_holds_no_bytes_of_frozen_parameters():
    module, buffers = Tied(), []
    content = pickle.dumps(module, protocol=5, buffer_callback=buffers.append)
    frozen = [module.table.weight, module.coarse, module.rows, module.image]
    assert sorted(len(buffer.raw()) for buffer in buffers) == sorted(tensor.nbytes for tensor in frozen)
    loaded = pickle.loads(content, buffers=buffers)
    assert loaded.table.weight.data_ptr() == module.table.weight.data_ptr(), "no copy"
    assert loaded.head.weight is loaded.table.weight and loaded.scale.requires_grad
    for name, tensor in module.named_parameters():
        there = loaded.get_parameter(name)
        assert torch.equal(there, tensor) and there.dtype == tensor.dtype and there.stride() == tensor.stride()
        assert there.requires_grad == tensor.requires_grad


def test_a_copy_shares_frozen_parameters_alone():
    module = Tied()
    other = copy.deepcopy(module)
    assert other.coarse.data_ptr() == module.coarse.data_ptr() and other.scale.data_ptr() != module.scale.data_ptr()
    assert other.head.weight is other.table.weight
    other.coarse.data = torch.zeros(1, dtype=torch.bfloat16)
    assert module.coarse.shape == (3, 2), "the copy has a parameter of its own"


def test_the_digest_follows_names_types_and_values():
    tensor = torch.arange(6.0).reshape(2, 3)
    assert digest_of({"a": tensor}) == digest_of({"a": tensor.T.contiguous().T})
    others = [{"b": tensor}, {"a": tensor + 1}, {"a": tensor.T}, {"a": tensor.double()}, {}]
    assert len({digest_of(one) for one in [{"a": tensor}, *others]}) == 6


def test_a_tensor_of_a_read_only_array_shares_it_without_a_warning():
    """Nor does it make others' warnings appear again, of a user's metric once for each client."""
    array_NF = np.arange(12.0).reshape(3, 4)[:, ::2]
    array_NF.flags.writeable = False
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            tensor_NF = shared_tensor(array_NF)
            warnings.warn("of a metric", stacklevel=1)
    assert [str(warning.message) for warning in shown] == ["of a metric"]
    assert torch.equal(tensor_NF, torch.tensor([[0.0, 2.0], [4, 6], [8, 10]], dtype=torch.float64))
    assert tensor_NF.data_ptr() == array_NF.ctypes.data
