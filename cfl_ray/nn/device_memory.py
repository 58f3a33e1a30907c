"""Memory of a device: free memory, and the number of clients that fit into a vmap batch."""

import gc
from collections.abc import Callable, Hashable
from typing import TypeVar

import torch

PROBE = 4  # clients of the vmap batch that measures the need of one client
_USED = 0.7  # share of the free memory that a vmap batch fills; the rest is for unequal clients and fragments

Result = TypeVar("Result")


def device_of(name: str) -> torch.device:
    """The device of this name; "cuda" is the current GPU with its index, as tensors on it report it."""
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def copied_to(device: torch.device, x: torch.Tensor) -> torch.Tensor:
    """The tensor on this device, itself if it is there; to a GPU from page-locked memory, so that nothing waits."""
    if device.type == "cuda" and x.device.type == "cpu":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


class DeviceMemory:
    """Memory of a device that this process may use.

    share: of the device's memory, at most 1; the rest is for other client hosts on the device.
    most: most clients of a vmap batch; None: as many as fit.
    """

    def __init__(self, device: torch.device, share: float = 1.0, most: int | None = None):
        self.device, self.share, self.most = device, share, most
        self.needs: dict[Hashable, int] = {}  # bytes of one client, by kind
        self.limits: dict[Hashable, int] = {}  # most clients of a vmap batch, by kinds of which one did not fit
        self._before = 0
        self.measuring = False  # whether the need of the clients that are trained now is being measured
        self.held = 0  # bytes in use that PyTorch counts as free for reuse: of CUDA graphs
        self.largest = 0  # clients of the largest vmap batch that was trained
        self.caches: list[Callable[[], None]] = []  # functions that clear caches on the device
        self.samples: dict[str, int] = {}  # most samples of a forward pass that fitted, by its name

    @property
    def measurable(self) -> bool:
        """Whether the memory limits vmap batches; otherwise an engine receives one chunk at a time."""
        return self.device.type == "cuda"

    def free(self) -> int:
        """Bytes free for this process, including the reserve of PyTorch's allocator; 0 if not measurable."""
        if not self.measurable:
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        used = torch.cuda.memory_allocated(self.device)
        reusable = max(torch.cuda.memory_reserved(self.device) - used - self.held, 0)
        return max(min(free + reusable, int(self.share * total) - used - self.held), 0)

    def begin_peak(self) -> None:
        """Begins a measurement of the peak."""
        if self.measurable:
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        """Most bytes in use since the measurement began, beyond those in use then; 0 if not measurable."""
        if not self.measurable:
            return 0
        return torch.cuda.max_memory_allocated(self.device) - self._before

    def drop_caches(self) -> None:
        """Clears the caches on the device and releases their memory."""
        for drop in self.caches:
            drop()
        self.release()

    def release(self) -> None:
        """Releases memory that PyTorch's allocator holds for reuse, and garbage of an earlier error."""
        if self.measurable:
            gc.collect()
            torch.cuda.empty_cache()

    def in_batches_of(self, name: str, size: int, run: Callable[[int], Result]) -> Result:
        """The result of `run(size)`, with `size` halved until the memory is sufficient.

        name: of the operation, for which the size that fitted is remembered.
        """
        size = min(size, self.samples.get(name, size))
        while True:
            try:
                return run(size)
            except torch.OutOfMemoryError:
                if size == 1:
                    raise
            self.samples[name] = size = size // 2  # outside the handler: the error holds the tensors of the pass
            self.drop_caches()

    def batch_size(self, kind: Hashable) -> int | None:
        """Most clients of the next vmap batch of this kind; None if there is no limit."""
        if not self.measurable:
            return None
        need = self.needs.get(kind)
        size = PROBE if need is None else max(int(_USED * self.free()) // need, 1)
        return min(size, self.limits.get(kind, size), size if self.most is None else self.most)

    def fitted(self, kind: Hashable, size: int) -> None:
        """Records the peak of a vmap batch of `size` clients as the need of such clients."""
        self.needs[kind] = max(self.peak() // size, 1)

    def did_not_fit(self, kind: Hashable, size: int) -> None:
        """Limits vmap batches to half of `size`, after `size` clients ran out of memory."""
        self.needs.setdefault(kind, max(self.free() // size, 1))
        self.limits[kind] = max(size // 2, 1)
        self.release()
