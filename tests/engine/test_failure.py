"""Which errors may be of a machine, also after the way to another process."""

import errno
import pickle

import pyarrow as pa
import pytest
import torch

from cfl_ray.engine.failure import ClientFailure, may_be_machine, naming_client
from cfl_ray.errors import ConfigError, DataError, RunError, first_line

OF_MACHINE = [
    OSError(errno.EIO, "read error"),
    FileNotFoundError("/mnt/shards"),
    MemoryError(),
    DataError("shards are missing"),
    pa.ArrowInvalid("not an Arrow file"),
    torch.OutOfMemoryError("CUDA out of memory"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
]
OF_USER = [
    ConfigError("no such option"),
    RunError("too few clients"),
    ValueError("bad value"),
    TypeError("no such argument"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x5 and 4x3)"),
    RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu!"),
    ZeroDivisionError(),
]


@pytest.mark.parametrize("error, expected", [(e, e in OF_MACHINE) for e in OF_MACHINE + OF_USER], ids=repr)
def test_of_the_machine_or_of_the_user(error, expected):
    assert may_be_machine(error) is expected
    with pytest.raises(ClientFailure) as found, naming_client(3, "training"):
        raise error
    assert may_be_machine(pickle.loads(pickle.dumps(found.value))) is expected


def test_the_first_line_of_an_error_without_a_text_is_its_class():
    """Reasons are made of it: why an engine is not chosen, why steps are not recorded, what did not fit into memory."""
    assert first_line(torch.OutOfMemoryError()) == "OutOfMemoryError" and first_line(OSError("one\ntwo")) == "one"
