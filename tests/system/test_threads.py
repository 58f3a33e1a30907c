import scipy.linalg  # noqa: F401  loads a BLAS of its own
import torch
from threadpoolctl import threadpool_info, threadpool_limits

from cfl_ray.system.threads import one_thread


def threads() -> list[int]:
    return [torch.get_num_threads(), *(library["num_threads"] for library in threadpool_info())]


def test_all_libraries_have_one_thread_inside_and_as_many_as_before_afterwards():
    before = torch.get_num_threads()
    try:
        with threadpool_limits(2):
            torch.set_num_threads(2)
            outside = threads()
            assert set(outside) == {2} and len(outside) > 2
            with one_thread():
                assert set(threads()) == {1}
            assert threads() == outside
    finally:
        torch.set_num_threads(before)
