"""Arrow files that grow with the rounds."""

import tracemalloc

import numpy as np
import pyarrow as pa

from cfl_ray.results.client_metrics import ClientMetrics


def test_a_run_that_goes_on_does_not_read_what_it_has_recorded(tmp_path):
    scores_MV = np.zeros((100_000, 4))
    scores_MV[:, 0] = np.arange(100_000)
    writer = ClientMetrics(tmp_path)
    for round in (1, 2, 3):
        writer.add(round, scores_MV)
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        resumed = ClientMetrics(tmp_path)
        peaks = pool.max_memory(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)
    assert resumed.last == 3 and max(peaks) < 500_000, peaks
    assert (tmp_path / "client_metrics.arrow").stat().st_size > 5_000_000
