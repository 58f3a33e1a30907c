"""The geometric median of the clients' models, which a minority cannot move far."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GeometricMedian:
    """Point with the least sum of distances to the results, by `steps` steps of Weiszfeld's algorithm."""

    steps: int = 8

    def weigh(self, squared_nn, weight_n):
        found_n = weight_n
        for _ in range(self.steps):
            # squared distance of each result to the present weighted mean
            squared_n = squared_nn @ found_n - found_n @ squared_nn @ found_n / 2
            found_n = weight_n / np.sqrt(np.maximum(squared_n, 1e-12))
            found_n = found_n / found_n.sum()
        return found_n
