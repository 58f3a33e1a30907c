"""Copies to the device."""

import torch

from cfl_ray.nn.device_memory import copied_to


class OfCPU:
    """A tensor on the CPU that notes how it is copied."""

    device = torch.device("cpu")

    def __init__(self):
        self.calls = []

    def pin_memory(self):
        self.calls.append("pin")
        return self

    def to(self, device, non_blocking=False):
        self.calls.append((str(device), non_blocking))
        return self


def test_to_a_gpu_they_come_from_page_locked_memory_without_a_wait():
    x = OfCPU()
    copied_to(torch.device("cuda", 0), x)
    assert x.calls == ["pin", ("cuda:0", True)]


def test_what_is_there_is_not_copied():
    x = torch.ones(3)
    assert copied_to(torch.device("cpu"), x) is x
    there = x.to("meta")
    assert copied_to(torch.device("meta"), there) is there and copied_to(torch.device("meta"), x).is_meta
