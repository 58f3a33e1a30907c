"""A backend: it carries out the work in this process, and notes how long each exchange takes."""

import time

from cfl_ray.engine.in_process import InProcessBackend


class Stopwatch(InProcessBackend):
    """Writes one line per exchange: its round, its kind, its clients and its seconds."""

    def __init__(self, worker, file="exchanges.txt"):
        super().__init__(worker)
        self.file = file

    def run(self, work):
        began = time.perf_counter()
        outcome = super().run(work)
        with open(self.file, "a") as file:
            seconds = time.perf_counter() - began
            file.write(f"{work.address.round} {type(work).__name__} {len(work.ids_M)} {seconds:.3f}\n")
        return outcome
