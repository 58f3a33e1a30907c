"""CUDA graphs of local steps: a step of a vmap batch is recorded once, and replayed for all further steps of its kind.

A step of a small network is hundreds of kernels of a few microseconds, so most of its time goes into starting them one
by one; a replay starts all of them at once. The recorded operations are the same, on static tensors: a replay reads
and writes the memory that the step was recorded with.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from cfl_ray.engine.vmap_steps import VmapSteps
from cfl_ray.errors import first_line
from cfl_ray.nn.device_memory import DeviceMemory
from cfl_ray.nn.network import Network

_MIN_STEPS = 16  # of a batch from which its graph pays for itself; others are recorded when their kind comes again
_MAX_GRAPHS = 4  # kept
_SHARE = 0.25  # of the free memory that a graph may hold

Record = Callable[[Callable[[], None], DeviceMemory], tuple[Callable[[], None], int]]


def record(step: Callable[[], None], memory: DeviceMemory) -> tuple[Callable[[], None], int]:
    """Records a step. Returns the function that replays it, and the bytes that its intermediate results hold.

    Raises RuntimeError if the step cannot be recorded, e.g. because it reads a value on the host.
    """
    stream, current = torch.cuda.Stream(memory.device), torch.cuda.current_stream(memory.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        step()  # libraries allocate their workspaces in a first call
    current.wait_stream(stream)
    graph, before = torch.cuda.CUDAGraph(), 0
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            before = torch.cuda.memory_reserved(memory.device)
            step()
    finally:
        torch.cuda.set_stream(current)  # after an error, PyTorch before 2.15 stays on the other
    return graph.replay, torch.cuda.memory_reserved(memory.device) - before


@dataclass(frozen=True)
class _Graph:
    """A recorded step with its tensors. number: of the next step, (1,)."""

    steps: VmapSteps
    number: Tensor
    replay: Callable[[], None]
    held: int  # bytes

    def take_all(self, steps: VmapSteps) -> None:
        self.steps.copy_inputs(steps)
        self.number.zero_()
        for _ in range(steps.count):
            self.replay()
        self.steps.copy_results_to(steps)


class StepGraphs:
    """The recorded steps of a network, by kind of vmap batch.

    A kind that cannot be recorded, or only with much memory, is trained one operation after another, as on a CPU.
    """

    def __init__(self, memory: DeviceMemory, record: Record | None = None):
        self.memory, self.record = memory, record
        self._kept: OrderedDict[Hashable, _Graph] = OrderedDict()
        self._seen: set[Hashable] = set()
        self.refused: dict[Hashable, str] = {}  # the reason, by kind
        memory.caches.append(self.clear)

    def take_all(self, steps: VmapSteps) -> None:
        """Takes all steps of a vmap batch."""
        graph = self._graph(steps)
        if graph is None:
            steps.take_all()
        else:
            graph.take_all(steps)

    def clear(self) -> None:
        """Drops all graphs."""
        while self._kept:
            self._drop()

    @property
    def remarks(self) -> set[str]:
        """At most one line: why the first kind that could not be recorded could not."""
        reasons = list(self.refused.values())[:1]
        return {f"vectorised takes some steps without a CUDA graph, which is slower: {reason}" for reason in reasons}

    def _drop(self) -> None:
        _, graph = self._kept.popitem(last=False)
        graph.steps.end()
        self.memory.held -= graph.held

    def _graph(self, steps: VmapSteps) -> _Graph | None:
        kind = None if self.record is None else steps.kind()
        if kind is None or kind in self.refused:
            return None
        if kind in self._kept:
            self._kept.move_to_end(kind)
            return self._kept[kind]
        pays = kind in self._seen or steps.count >= _MIN_STEPS
        self._seen.add(kind)
        if not pays or self.memory.measuring:  # a graph would be measured as the need of these clients
            return None
        return self._recorded(kind, steps)

    def _recorded(self, kind: Hashable, steps: VmapSteps) -> _Graph | None:
        assert self.record is not None
        free = self.memory.free()
        try:
            own = steps.on_static_tensors()
        except torch.OutOfMemoryError as error:  # the batch itself fits
            self.refused[kind] = first_line(error)
            return None
        number = torch.zeros(1, dtype=torch.long, device=own.rows_mP.device)
        own.copy_inputs(steps)
        own.begin()

        def step() -> None:
            own.take(number)
            number.add_(1)

        try:
            replay, held = self.record(step, self.memory)
        except RuntimeError as error:  # also out of memory
            self.refused[kind] = first_line(error)
            own.end()
            return None
        if held > _SHARE * free:
            self.refused[kind] = f"its intermediate results would hold {held / 2**20:.0f} MiB"
            own.end()
            return None
        self._kept[kind] = graph = _Graph(own, number, replay, held)
        self.memory.held += held
        while len(self._kept) > _MAX_GRAPHS:
            self._drop()
        return graph


_GRAPHS: WeakKeyDictionary[Network, StepGraphs] = WeakKeyDictionary()


def graphs_of(network: Network) -> StepGraphs:
    """The recorded steps of a network."""
    graphs = _GRAPHS.get(network)
    if graphs is None or graphs.memory is not network.memory:
        graphs = StepGraphs(network.memory, record if network.device.type == "cuda" else None)
        _GRAPHS[network] = graphs
    return graphs
