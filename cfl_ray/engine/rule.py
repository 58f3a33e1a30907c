"""The rule of `runtime.engine: auto`: the cost of a local step with each engine, from facts that are counted.

Costs are microseconds of a step for one client. Their constants are fitted to times on one core of an AMD EPYC, such as
those of `python -m jobs.benchmarks engines` (docs/performance.md#the-choice-of-an-engine). No time is measured in a
run: equal facts give the same engine on every machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """The facts that decide: of the device, the network, a client with the median number of samples, and the cohort."""

    device: str  # "cpu" or "cuda"
    calls: int  # functions of PyTorch in a forward pass
    parameters: int  # P
    activations: int  # numbers that a forward pass reads and returns for one sample
    samples: int  # n
    batch: int  # samples of a batch
    steps: int  # local steps of a client in a round
    together: Mapping[str, int]  # clients that are trained at once, by engine
    cannot: Mapping[str, str]  # the reason, by engine that cannot train the clients
    first: tuple[int, int] = (0, 0)  # outputs H and inputs D of a first linear layer
    recurrent: bool = False  # whether the network has recurrent layers of PyTorch
    # operations of the written-out passes, and how many of them are differentiated by autograd
    operations: int = 1
    differentiated: int = 0
    convolved: int = 0  # multiplications of the convolutions for one sample
    narrow: bool = False  # whether the convolutions have few channels
    by_lines: bool = False  # whether their written-out passes multiply line by line

    @property
    def numbers(self) -> int:
        """Parameters and activations of a step, each of which is read and written a few times."""
        return self.parameters + self.batch * self.activations

    @property
    def products(self) -> float:
        """The cost of the products of a batch with the parameters, forward and for the gradients of the parameters."""
        return 2 * PRODUCT * self.batch * self.parameters

    @property
    def convolutions(self) -> float:
        """The cost of PyTorch's convolutions of a batch, forward and for both gradients."""
        return 3 * (_NARROW if self.narrow else _CONVOLVED) * self.batch * self.convolved


# A step of `sequential`: PyTorch's calls forward and backward, in which the numbers are read and written.
_STEP, _CALL, _NUMBER = 200, 40, 2.5e-3
# The written-out passes need a quarter of the calls. An operation that autograd differentiates has its own graph, and
# its activations are copied between the layouts.
_WRITTEN_STEP, _WRITTEN_CALL, _WRITTEN_NUMBER = 90, 10, 1e-3
_DIFFERENTIATED, _COPIED_NUMBER = 200, 6e-3
# A call under vmap takes longer, once for all clients; products of many small matrices are slower.
_VMAP_STEP, _VMAP_CALL, _VMAP_CLIENT, _VMAP_NUMBER = 1300, 130, 20, 3.5e-3
_VMAP_RECURRENT = 2  # times `sequential`: a recurrent layer is one kernel for one client, and many under vmap
# A compiled gradient has no calls of PyTorch besides its products, and reads and writes numbers fewer times.
_COMPILED_STEP, _COMPILED_CALL, _COMPILED_NUMBER = 60, 2, 6e-4
# Compiling a program starts PyTorch's compiler in a process, seconds, and takes longer for more operations.
_COMPILE, _COMPILE_OPERATION = 9, 0.018
# The span engine has its own products at the start and end of a chunk, and coefficients beside the written-out passes.
_SPAN_CHUNK, _SPAN_STEP = 1300, 60
PRODUCT = 3e-5  # a multiplication with its addition: 33 billion a second
_CONVOLVED, _NARROW, _BY_LINES = 1.2e-5, 4e-5, 2.2e-5  # of a multiplication of convolutions
# On a GPU a step is the start of its kernels, which the clients of a vmap batch share: 1.2 ms in W2, 2.2 in W3.
_GPU_STEP, _GPU_SPAN_STEP = 1500, 1600


def sequential(facts: Facts, together: int) -> float:
    """The cost of one client after another with PyTorch's autograd."""
    if facts.device != "cpu":
        return _GPU_STEP
    return _STEP + _CALL * facts.calls + _NUMBER * facts.numbers + facts.products + facts.convolutions


def manual(facts: Facts, together: int) -> float:
    """The cost of the written-out passes, on a CPU."""
    copied = facts.differentiated / facts.operations
    calls = _WRITTEN_CALL * facts.calls + _DIFFERENTIATED * facts.differentiated
    numbers = (_WRITTEN_NUMBER + _COPIED_NUMBER * copied) * facts.numbers
    convolutions = facts.convolutions * (_BY_LINES / _NARROW if facts.by_lines else 1)
    return _WRITTEN_STEP + calls + numbers + facts.products + convolutions


def vectorised(facts: Facts, together: int) -> float:
    """The cost of clients under `torch.func.vmap`, whose calls they share."""
    if facts.device != "cpu":
        return _GPU_STEP / together
    if facts.recurrent:
        return _VMAP_RECURRENT * sequential(facts, together)
    shared = (_VMAP_STEP + _VMAP_CALL * facts.calls) / together
    return shared + _VMAP_CLIENT + _VMAP_NUMBER * facts.numbers + facts.products + facts.convolutions


def compiled(facts: Facts, together: int) -> float:
    """The cost of a gradient that PyTorch's compiler made, without the time of the compiler."""
    numbers = _COMPILED_NUMBER * facts.numbers
    return _COMPILED_STEP + _COMPILED_CALL * facts.calls + numbers + facts.products + facts.convolutions


def compile_seconds(programs: Sequence[int]) -> float:
    """The CPU time of the compiler, once for each machine. programs: recorded operations of each."""
    return sum(_COMPILE + _COMPILE_OPERATION * operations for operations in programs)


def span(facts: Facts, together: int) -> float:
    """The cost of the full-batch shortcut, which moves the products with the first layer's weights out of the steps.

    It replaces H D numbers and 2 n H D multiplications of a step by n n H; once it needs those of one step, and n n D.
    """
    if facts.device != "cpu":
        return _GPU_SPAN_STEP / together
    outputs, inputs = facts.first
    pairs = PRODUCT * facts.samples**2
    first = outputs * inputs * (_WRITTEN_NUMBER + 2 * PRODUCT * facts.samples)
    once = _SPAN_CHUNK / together + first + pairs * inputs
    return manual(facts, together) - first + _SPAN_STEP + pairs * outputs + once / facts.steps
