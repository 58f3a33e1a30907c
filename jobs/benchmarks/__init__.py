"""Time and memory of rounds of cfl_ray: `python -m jobs.benchmarks`."""
