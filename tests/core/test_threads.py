import scipy.linalg  # noqa: F401
import torch
from threadpoolctl import threadpool_info

from cfl_ray.core.threads import one_thread


def threads() -> list[int]:
    return [torch.get_num_threads(), *(library["num_threads"] for library in threadpool_info())]


def test_everything_computes_with_one_thread_inside_and_with_as_many_as_before_afterwards():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        outside = threads()
        with one_thread():
            assert set(threads()) == {1}
        assert threads() == outside and outside[0] == 2
    finally:
        torch.set_num_threads(before)
