"""CPU seconds of rounds of FedEM with three models and of FedAvg: `python -m jobs.benchmarks mixtures`.

Both run in this process with one thread, interleaved with plain PyTorch loops of the same two rounds. These loops have
no server, no validation and no records: they show how much of the ratio is due to the method itself.
"""

from dataclasses import replace
from functools import partial

from benchmarks.workloads import Workload
from cfl_ray.system.threads import one_thread
from jobs.benchmarks.in_process import PlainLoop, compare, cpu_seconds, our_round

MODELS = 3
WORK = Workload("LeNet-5, 10 clients of 600, batch 32", "lenet5", {}, 10, 10, 600, 32, 1)
EPOCHS = (1, 5)
ENGINES = ("manual", "sequential")
METHODS = ("FedAvg", "FedEM")


def mixtures(rounds: int) -> None:
    """Prints CPU seconds per round and their ratio, by local epochs, of the plain loops and of each engine."""
    print(f"{WORK.description}; K = {MODELS}; CPU seconds of one thread per round, median of {rounds}, interleaved")
    for epochs in EPOCHS:
        work = replace(WORK, epochs=epochs)
        with one_thread():
            loops = tuple(partial(cpu_seconds, PlainLoop(work, models).round) for models in (1, MODELS))
            compare(f"{epochs} local epochs, plain loop", loops, METHODS, rounds)
        for engine in ENGINES:
            fedem = {"fedem": {"num_models": MODELS}}
            with our_round(work, "fedavg", engine) as one, our_round(work, fedem, engine) as other:
                steps = partial(cpu_seconds, one), partial(cpu_seconds, other)
                compare(f"{epochs} local epochs, {engine}", steps, METHODS, rounds)
